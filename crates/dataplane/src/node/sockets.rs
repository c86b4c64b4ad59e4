//! Destruction of UDP sockets that are connected to an endpoint that no longer serves.
//!
//! A connected UDP socket keeps the endpoint that was chosen for it, and nothing in the kernel
//! informs it that the endpoint is gone: it would send to a dead address forever. SOCK_DESTROY
//! makes its next call fail with ECONNABORTED, so that the program connects again and gets an
//! endpoint that serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, ErrorKind},
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::Path,
    thread,
};

use anyhow::{Context, Result, anyhow};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use nix::sched::{CloneFlags, setns};
use serde::{Deserialize, Serialize};

use super::{
    netlink::Connection,
    sock_diag::{
        self, AF_INET, AF_INET6, IPPROTO_UDP, SOCK_DESTROY, SOCK_DIAG_BY_FAMILY, SocketId, StateFlags,
        socket_id,
    },
};

/// The result for sockets that were to be destroyed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Destroyed {
    /// The cookies of the sockets that this call destroyed. Sockets that are neither here nor in
    /// `failures` are gone, or connected to another peer by now.
    pub cookies: BTreeSet<u64>,
    /// The number of network namespaces that were searched before nothing was left to find.
    pub namespaces: usize,
    /// The failures, one sentence each; the rest was done.
    pub failures: Vec<String>,
}

/// Destroys the connected UDP sockets whose cookie (SO_COOKIE) is a key and whose peer is the
/// endpoint of that key, in every network namespace of the processes in `cgroup` and in the cgroups
/// below it.
///
/// It blocks: each namespace takes a namespace switch of a separate thread and a dump of its UDP
/// sockets. The calling thread stays in its namespace.
///
/// # Errors
/// The cgroup cannot be read, or no thread can be created. Failures in one namespace are in
/// [`Destroyed::failures`].
pub fn destroy_udp(cgroup: &Path, cookies: &BTreeMap<u64, SocketAddr>) -> Result<Destroyed> {
    if cookies.is_empty() {
        return Ok(Destroyed::default());
    }
    let processes = processes(cgroup)?;
    thread::scope(|scope| {
        let work = thread::Builder::new()
            .name("sockets".to_owned())
            // The thread's namespace changes with each step and is never restored.
            .spawn_scoped(scope, || look_into(cgroup, &processes, cookies))
            .context("no thread to look into network namespaces")?;
        work.join().map_err(|_| anyhow!("looking into network namespaces failed"))
    })
}

/// Whether this kernel can destroy UDP sockets (CONFIG_INET_DIAG_DESTROY and CONFIG_INET_UDP_DIAG).
/// It is also false if the kernel does not answer.
pub fn supported() -> bool {
    let Ok(mut diag) = Connection::open(NETLINK_SOCK_DIAG) else { return false };
    // Without the UDP handler this fails with ENOENT, which the second request could not
    // distinguish from "no such socket".
    if diag.dump(SOCK_DIAG_BY_FAMILY, &request(AF_INET, SocketId::new_v4())).is_err() {
        return false;
    }
    // No socket is connected from port 0 to port 0, so a kernel with support answers that there is
    // no such socket.
    let answer = diag.request(SOCK_DESTROY, 0, &request(AF_INET, SocketId::new_v4()));
    !answer.is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP))
}

/// Moves the calling thread through the network namespaces of the processes, each once, as long as
/// there are sockets to find.
fn look_into(cgroup: &Path, processes: &[u32], cookies: &BTreeMap<u64, SocketAddr>) -> Destroyed {
    let mut destroyed = Destroyed::default();
    let mut known = BTreeSet::new();
    for process in processes.iter().filter(|process| **process != 0) {
        let path = format!("/proc/{process}/ns/net");
        match File::open(&path).and_then(|file| Ok((file.metadata()?.ino(), file))) {
            Ok((inode, file)) if known.insert(inode) => {
                if let Err(error) = destroy_in(&file, cookies, &mut destroyed) {
                    let message = format!("UDP sockets in the network of process {process}: {error:#}");
                    destroyed.failures.push(message);
                }
                destroyed.namespaces += 1;
            }
            Ok(_) => {}
            // The process has exited in the meantime, and its sockets are gone.
            Err(error) if error.kind() == ErrorKind::NotFound || is(&error, libc::ESRCH) => {}
            // The kernel returns EACCES for a process that has just been reaped, too:
            // proc_ns_get_link in https://github.com/torvalds/linux/blob/v6.18/fs/proc/namespaces.c
            Err(_) if !Path::new("/proc").join(process.to_string()).exists() => {}
            Err(error) => destroyed.failures.push(format!(
                "{path} cannot be opened ({error}): the agent needs CAP_SYS_PTRACE and CAP_SYS_ADMIN for it"
            )),
        }
        if destroyed.cookies.len() == cookies.len() {
            return destroyed;
        }
    }
    // The kernel writes 0 for a process that is not in this PID namespace.
    let unseen = processes.iter().filter(|process| **process == 0).count();
    if unseen > 0 {
        destroyed.failures.push(format!(
            "{unseen} processes of {} are outside this PID namespace: run the agent with hostPID",
            cgroup.display()
        ));
    }
    destroyed
}

/// Returns the processes in a cgroup and below it.
fn processes(cgroup: &Path) -> Result<Vec<u32>> {
    let mut processes = Vec::new();
    let mut waiting = vec![cgroup.to_owned()];
    while let Some(folder) = waiting.pop() {
        let top = folder == cgroup;
        match fs::read_to_string(folder.join("cgroup.procs")) {
            Ok(text) => processes.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
            // The processes of a threaded cgroup are listed by the cgroup above it that is its
            // domain.
            Err(error) if is(&error, libc::EOPNOTSUPP) => {}
            Err(error) if !top && is_gone(&error) => continue,
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "the processes of {} cannot be listed (is it a cgroup2 folder?)",
                        folder.display()
                    )
                });
            }
        }
        match fs::read_dir(&folder) {
            Ok(entries) => waiting.extend(
                entries
                    .flatten()
                    .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                    .map(|entry| entry.path()),
            ),
            Err(error) if is_gone(&error) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("{} cannot be read", folder.display()));
            }
        }
    }
    Ok(processes)
}

fn is(error: &io::Error, number: i32) -> bool {
    error.raw_os_error() == Some(number)
}

/// Whether a cgroup was removed since its parent was read. A file that is already open returns
/// ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || is(error, libc::ENODEV)
}

fn destroy_in(
    namespace: &File,
    cookies: &BTreeMap<u64, SocketAddr>,
    destroyed: &mut Destroyed,
) -> Result<()> {
    setns(namespace, CloneFlags::CLONE_NEWNET)
        .context("it cannot be entered (the agent needs CAP_SYS_ADMIN for it)")?;
    let mut diag = Connection::open(NETLINK_SOCK_DIAG).context("this kernel has no sock_diag")?;
    for family in [AF_INET, AF_INET6] {
        let sockets = match diag.dump(SOCK_DIAG_BY_FAMILY, &request(family, SocketId::new_v4())) {
            Ok(sockets) => sockets,
            Err(error) if is(&error, libc::ENOENT) => {
                return Err(anyhow!("this kernel lists no UDP sockets: it lacks CONFIG_INET_UDP_DIAG"));
            }
            Err(error) => return Err(error).context("they cannot be listed"),
        };
        for socket in sockets.iter().filter_map(|message| socket_id(&message.payload)) {
            let (peer, cookie) = (peer(&socket), cookie(&socket));
            if cookies.get(&cookie).map(canonical) != Some(peer) {
                continue;
            }
            match diag.request(SOCK_DESTROY, 0, &request(family, socket)) {
                Ok(_) => {
                    destroyed.cookies.insert(cookie);
                }
                // The socket was closed between the two requests.
                Err(error) if is(&error, libc::ENOENT) => {}
                Err(error) if is(&error, libc::EOPNOTSUPP) => {
                    return Err(anyhow!(
                        "this kernel destroys no sockets: it lacks CONFIG_INET_DIAG_DESTROY, so those connected to {peer} stay"
                    ));
                }
                Err(error) => destroyed.failures.push(format!(
                    "the UDP socket connected to {peer} with cookie {cookie} cannot be destroyed: {error}"
                )),
            }
        }
    }
    Ok(())
}

/// Returns a request about connected UDP sockets, or about the one with this id. UDP has two
/// states, with TCP's names: ESTABLISHED means connected.
fn request(family: u8, id: SocketId) -> Vec<u8> {
    sock_diag::request(family, IPPROTO_UDP, StateFlags::ESTABLISHED, id)
}

fn peer(socket: &SocketId) -> SocketAddr {
    canonical(&SocketAddr::new(socket.destination_address, socket.destination_port))
}

/// Returns the cookie, which consists of two words, the low one first, each in native byte order.
fn cookie(socket: &SocketId) -> u64 {
    let [a, b, c, d, rest @ ..] = socket.cookie;
    u64::from(u32::from_ne_bytes([a, b, c, d])) | u64::from(u32::from_ne_bytes(rest)) << 32
}

/// Returns an address in canonical form: an IPv4-mapped address becomes the IPv4 address; scope and
/// flow label are dropped.
fn canonical(address: &SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn messages_are_understood() {
        let mut message = vec![AF_INET6, 1, 0, 0];
        message.extend([0x30, 0x39, 0x00, 0x35]);
        message.extend([0; 16]);
        message.extend(Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().octets());
        message.extend(0u32.to_ne_bytes());
        message.extend(7u32.to_ne_bytes());
        message.extend(1u32.to_ne_bytes());
        message.extend([0; 20]);
        let socket = socket_id(&message).unwrap();
        assert_eq!(peer(&socket), "192.0.2.1:53".parse().unwrap());
        assert_eq!(cookie(&socket), (1 << 32) + 7);
        // The request for it names it as the reply did.
        assert_eq!(request(AF_INET6, socket)[8..], message[4..52]);
        assert!(socket_id(&message[..51]).is_none());
    }

    #[test]
    fn nothing_to_destroy_looks_nowhere() {
        let nowhere = Path::new("/nonexistent");
        assert_eq!(destroy_udp(nowhere, &BTreeMap::new()).unwrap(), Destroyed::default());
        let one = BTreeMap::from([(1, "192.0.2.1:53".parse().unwrap())]);
        let error = destroy_udp(nowhere, &one).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("cgroup2"), "{error}");
    }
}
