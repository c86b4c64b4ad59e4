use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// A complete log of Linux 6.18: a program whose first instruction reads a register that was never
/// written.
const UNREADABLE: &str = "0: R1=ctx() R10=fp0
; unsafe { (*self.skb).data as usize } @ context.rs:210
0: (bf) r0 = r9
R9 !read_ok
verification time 699 usec
stack depth 0+0+0
processed 1 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0
";

/// A complete log of Linux 7.3 except for its statistics; that kernel explains the reason after it.
const EXPLAINED: &str = "0: R1=ctx() R10=fp0
; unsafe { (*$pointer).$($field)+ } @ value.rs:13
0: (bf) r0 = r9
R9 !read_ok
Verification failed: Register Type Safety: Unreadable register
Reason:
  R9 has never been initialized on this path, so the verifier cannot use it as an input.
At:
  tp_tc_slow4 @ value.rs:13:18
  Source context:
      11 | ...
      12 | ...
  >>> 13 |         unsafe { (*$pointer).$($field)+ }
         |         ^-- error: R9 is not readable
      14 | ...
      15 | ...
  Instruction context:
  >>>    0 | (bf) r0 = r9
         1 | (bf) r2 = r3
         2 | (07) r2 += 14
Causal path:
  no retained diagnostic events on this path
Suggestion:
  Initialize R9 on every path before this instruction.
verification time 807162 usec
stack depth max 0
subprog 0 (tp_tc_slow4) main insns_self 1 insns_total 1 stack 0
subprog 1 (remembered4) global insns_self 0 insns_total 0 stack 0
processed 1 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0
";

/// The message of Linux 6.12 in the format of its logs: a bound that LLVM checked on a copy of the
/// register.
const UNBOUNDED: &str = "; counters.0[outcome as usize] += 1; @ exit.rs:52
1403: (79) r2 = *(u64 *)(r10 -96)     ; frame1: R2_w=map_value(map=tp_counters,ks=4,vs=800) R10=fp0 fp-96=map_value(map=tp_counters,ks=4,vs=800)
1404: (67) r8 <<= 3                   ; frame1: R8_w=scalar(smax=0x7ffffffffffffff8,umax=0xfffffffffffffff8,smax32=0x7ffffff8,umax32=0xfffffff8,var_off=(0x0; 0xfffffffffffffff8))
1405: (0f) r2 += r8
R8 unbounded memory access, make sure to bounds check any such access
verification time 61350 usec
stack depth 192+96
processed 29318 insns (limit 1000000) max_states_per_insn 12 total_states 1630 peak_states 871 mark_read 122
";

/// The message of Linux 6.1 in the format of its logs: it has two lines.
const OUTSIDE: &str = "from 812 to 815: R0=scalar(umax=255) R2_w=pkt(id=5,off=12,r=0,umax=4294967295,var_off=(0x0; 0xffffffff)) R10=fp0
; u16::from_be_bytes(bytes)
815: (71) r3 = *(u8 *)(r2 +2)
invalid access to packet, off=14 size=1, R2(id=5,off=14,r=0)
R2 offset is outside of the packet
processed 5120 insns (limit 1000000) max_states_per_insn 4 total_states 301 peak_states 301 mark_read 40
";

/// The message of Linux 6.1 in the format of its logs: the refusal follows the walk.
const STACK: &str = "combined stack size of 3 calls is 544. Too large
verification time 70012 usec
stack depth 192+160+160+32
processed 68007 insns (limit 1000000) max_states_per_insn 30 total_states 3540 peak_states 1602 mark_read 230
";

const TOO_MANY: &str = "; loop
17: (05) goto pc-3
BPF program is too large. Processed 1000001 insn
processed 1000001 insns (limit 1000000) max_states_per_insn 4 total_states 5000 peak_states 5000 mark_read 3
";

const ENDLESS: &str = "3: (05) goto pc-1
infinite loop detected at insn 3
cur state: R0=1 R10=fp0
old state: R0=1 R10=fp0
processed 5 insns (limit 1000000) max_states_per_insn 0 total_states 1 peak_states 1 mark_read 1
";

#[test]
fn the_line_that_matters() {
    let said = |log| reason(log).unwrap_or_default();
    assert_eq!(said(UNREADABLE), "R9 !read_ok");
    assert_eq!(said(EXPLAINED), "R9 !read_ok");
    // The reason may be in the report alone.
    let report = EXPLAINED.replace("R9 !read_ok\n", "");
    assert_eq!(said(&report), "Register Type Safety: Unreadable register");
    assert_eq!(said(UNBOUNDED), "R8 unbounded memory access, make sure to bounds check any such access");
    assert_eq!(
        said(OUTSIDE),
        "invalid access to packet, off=14 size=1, R2(id=5,off=14,r=0); R2 offset is outside of the packet"
    );
    assert_eq!(said(STACK), "combined stack size of 3 calls is 544. Too large");
    assert_eq!(said(TOO_MANY), "BPF program is too large. Processed 1000001 insn");
    assert_eq!(said(ENDLESS), "infinite loop detected at insn 3");
}

#[test]
fn a_log_without_a_reason() {
    assert_eq!(reason(""), None);
    assert_eq!(reason("\n\n"), None);
    // The kernel leaves this log for a program that it refused before it examined it.
    let summary =
        "processed 0 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0\n";
    assert_eq!(reason(summary), None);
    // The log is cut short for lack of room.
    assert_eq!(reason("0: R1=ctx() R10=fp0\n0: (b7) r0 = 2").as_deref(), Some("0: (b7) r0 = 2"));
    // Only lines that begin like a line of the walk belong to it.
    assert_eq!(reason("R1 type=scalar expected=fp\n").as_deref(), Some("R1 type=scalar expected=fp"));
    assert_eq!(reason("R0 invalid mem access 'scalar'\n").as_deref(), Some("R0 invalid mem access 'scalar'"));
}

#[test]
fn errors_of_the_caller_are_no_refusals() {
    let refusal = |errno| refusal(&io::Error::from_raw_os_error(errno), UNREADABLE);
    for errno in [libc::EACCES, libc::EINVAL, libc::E2BIG, libc::EFAULT] {
        assert_eq!(refusal(errno).as_deref(), Some("R9 !read_ok"), "{errno}");
    }
    for errno in [libc::EPERM, libc::ENOMEM, libc::EAGAIN, libc::EINTR] {
        assert_eq!(refusal(errno), None, "{errno}");
    }
}

fn refused(errno: i32, log: &str) -> ProgramError {
    ProgramError::LoadError {
        io_error: io::Error::from_raw_os_error(errno),
        verifier_log: aya_obj::VerifierLog::new(log.to_owned()),
    }
}

#[test]
fn what_is_said_of_several() {
    let program = format!("of-a-test-{}", std::process::id());
    let failed = [
        ("aaa".to_owned(), refused(libc::ENOMEM, "")),
        (program.clone(), refused(libc::EACCES, UNBOUNDED)),
        ("zzz".to_owned(), refused(libc::EACCES, UNREADABLE)),
    ];
    let error = explain(&failed, 40);
    let refusal: &Refusal = error.downcast_ref().unwrap();
    assert_eq!((refusal.refused, refusal.all, &refusal.program), (2, 40, &program));
    let log = refusal.log.clone().unwrap();
    assert_eq!(fs::read_to_string(&log).unwrap(), UNBOUNDED);
    fs::remove_file(&log).unwrap();
    let text = error.to_string();
    for part in [
        "refuses 2 of the packet path's 40 programs; the first is of-a-test-",
        "verifier says: R8 unbounded memory access, make sure",
        &log.display().to_string(),
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(!text.contains("processed"), "{text}");

    let text = |errno| explain(&[("tp_xdp_ingress".to_owned(), refused(errno, ""))], 40).to_string();
    assert!(text(libc::EPERM).contains("does not load the program tp_xdp_ingress: Operation not permitted"));
    assert!(text(libc::EPERM).contains("seccomp"));
    assert!(text(libc::ENOMEM).contains("memory") && !text(libc::ENOMEM).contains("verifier"));
}

#[test]
fn a_kept_log_is_private_and_replaces_what_lies_there() {
    let folder = tempfile::tempdir().unwrap();
    let victim = folder.path().join("victim");
    fs::write(&victim, "untouched").unwrap();
    symlink(&victim, folder.path().join("traffic-policy-verifier-tp_xdp_ingress.log")).unwrap();
    for log in ["first", "second"] {
        let path = keep(folder.path(), "tp_xdp_ingress", log).unwrap();
        let kept = fs::symlink_metadata(&path).unwrap();
        assert!(kept.is_file() && kept.permissions().mode() & 0o777 == 0o600, "{kept:?}");
        assert_eq!(fs::read_to_string(&path).unwrap(), log);
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    let error = keep(&folder.path().join("nowhere"), "tp_xdp_ingress", "log").unwrap_err();
    assert!(error.to_string().contains("nowhere"), "{error}");
}
