//! BPF_PROG_TEST_RUN of loaded programs.

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{
        Program, RawTracePoint, RawTracePointRunOptions, SchedClassifier, TestRun, TestRunOptions,
        TestRunResult, Xdp,
    },
};

use super::test_context::{sk_buff, xdp_md};

/// The bytes that the kernel may append to a frame: an ICMP error quotes the frame after its own
/// headers.
const ROOM: usize = 256;

fn program<'a>(object: &'a Ebpf, name: &str) -> Result<&'a Program> {
    object.program(name).with_context(|| format!("the packet path has no program {name}"))
}

/// Runs a raw tracepoint program once and returns its return value.
pub fn raw_tracepoint(object: &Ebpf, name: &str) -> Result<u32> {
    raw_tracepoint_with(object, name, &[])
}

/// Runs a raw tracepoint program once, with at most twelve arguments, and returns its return value.
pub fn raw_tracepoint_with(object: &Ebpf, name: &str, arguments: &[u64]) -> Result<u32> {
    let program: &RawTracePoint = program(object, name)?.try_into()?;
    let mut options = RawTracePointRunOptions::default();
    for (argument, given) in options.args.iter_mut().zip(arguments) {
        *argument = *given;
    }
    let result = program.test_run(options).with_context(|| format!("running the program {name} failed"))?;
    Ok(result.return_value)
}

/// Runs an XDP program on a frame that arrived on a device, and returns the frame as the program
/// leaves it.
pub fn xdp(object: &Ebpf, name: &str, frame: &[u8], ifindex: u32) -> Result<Vec<u8>> {
    let program: &Xdp = program(object, name)?.try_into()?;
    packet(program, name, frame, &xdp_md(frame.len() as u32, ifindex))
}

/// Runs a TC program on a frame that arrived on a device, and returns the frame as the program
/// leaves it.
pub fn tc(object: &Ebpf, name: &str, frame: &[u8], ifindex: u32) -> Result<Vec<u8>> {
    let program: &SchedClassifier = program(object, name)?.try_into()?;
    packet(program, name, frame, &sk_buff(ifindex, 0))
}

/// Runs an XDP program that reads its input from a map.
pub fn xdp_without_frame(object: &Ebpf, name: &str) -> Result<()> {
    let program: &Xdp = program(object, name)?.try_into()?;
    let options = TestRunOptions { data_in: Some(&[0; 64]), ..TestRunOptions::default() };
    program.test_run(options).with_context(|| format!("running the program {name} failed"))?;
    Ok(())
}

fn packet<'a, P>(program: &P, name: &str, frame: &'a [u8], context: &'a [u8]) -> Result<Vec<u8>>
where
    P: for<'o> TestRun<Opts<'o> = TestRunOptions<'o>, Result = TestRunResult>,
{
    let mut out = vec![0; frame.len() + ROOM];
    let options = TestRunOptions {
        data_in: Some(frame),
        data_out: Some(&mut out),
        ctx_in: Some(context),
        ..TestRunOptions::default()
    };
    let ran = program.test_run(options).with_context(|| format!("running {name} on a packet failed"))?;
    out.truncate(ran.data_size_out as usize);
    Ok(out)
}
