//! Echo requests that a chosen CPU answers, which show for how long it leaves packets waiting.

use std::{
    fs,
    io::Read,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    libc,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use socket2::{Domain, Protocol, Socket, Type};
use traffic_policy_testing::{
    netlink::{Mac, VethEnd},
    netns::{Namespace, Owned},
};

const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
const FAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
const NEAR_MAC: Mac = [2, 0, 10, 77, 0, 1];
const FAR_MAC: Mac = [2, 0, 10, 77, 0, 2];
const PATIENCE: Duration = Duration::from_secs(1);

/// Two namespaces with a wire between them.
pub(super) struct Probe {
    near: Owned,
    _far: Owned,
}

impl Probe {
    /// Builds the probe. `cpu` does all the work for the packets that arrive at the far end: it
    /// answers them, and hands the answer over.
    pub(super) fn build(cpu: usize) -> Result<Self> {
        let id = std::process::id();
        let near = Namespace::create(&format!("tp-bench-{id}-near"))?;
        let far = Namespace::create(&format!("tp-bench-{id}-far"))?;
        near.netlink(async |net| {
            let (end, peer) = (
                VethEnd { name: "near", mac: Some(NEAR_MAC), mtu: None },
                VethEnd { name: "far", mac: Some(FAR_MAC), mtu: None },
            );
            net.veth(&end, None, &peer, &far).await?;
            net.address("near", NEAR, 24).await?;
            net.neighbour("near", FAR, FAR_MAC).await
        })?;
        far.netlink(async |net| {
            net.address("far", FAR, 24).await?;
            net.neighbour("far", NEAR, NEAR_MAC).await
        })?;
        far.run(|| steer("far", cpu)).context("steering packets to a CPU (RPS)")?;
        Ok(Self { near, _far: far })
    }

    /// Sends an echo request when the last one is answered, without a pause, and returns the
    /// duration of each. The thread sleeps in between: spinning would keep the kernel's thread that
    /// sends the requests off its CPU.
    pub(super) fn ask_until(&self, ended: &AtomicBool) -> Result<Vec<Duration>> {
        self.near.enter()?;
        go_first()?;
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
        socket.connect(&SocketAddr::new(FAR, 0).into())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut took = Vec::new();
        let mut number = 0_u16;
        while !ended.load(Ordering::Relaxed) {
            number = number.wrapping_add(1);
            let request = request(number);
            let start = Instant::now();
            socket.send(&request)?;
            while !answers(&socket, number)? {}
            took.push(start.elapsed());
        }
        Ok(took)
    }
}

/// Returns an echo request without data; its identifier is zero.
fn request(number: u16) -> [u8; 8] {
    let [high, low] = number.to_be_bytes();
    let sum = u32::from(u16::from_be_bytes([8, 0])) + u32::from(number);
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    let [first, second] = checksum.to_be_bytes();
    [8, 0, first, second, 0, 0, high, low]
}

/// Whether the reply of this number has arrived.
fn answers(mut socket: &Socket, number: u16) -> Result<bool> {
    let mut buffer = [0; 128];
    let length = socket.read(&mut buffer).context("an echo was not answered")?;
    // An IP header without options precedes it.
    let reply = buffer.get(20..length).unwrap_or_default();
    Ok(reply.first() == Some(&0) && reply.get(6..8) == Some(&number.to_be_bytes()))
}

/// Sets the CPU that processes the packets arriving at a device of this thread's namespace. sysfs
/// shows the devices of the namespace in which it was mounted, so it is mounted anew, for this
/// thread alone.
fn steer(device: &str, cpu: usize) -> Result<()> {
    ensure!(cpu < 32, "only the first 32 CPUs are named by one word of a mask");
    unshare(CloneFlags::CLONE_NEWNS)?;
    let nothing = None::<&str>;
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing)?;
    let folder = tempfile::tempdir()?;
    mount(Some("sysfs"), folder.path(), Some("sysfs"), MsFlags::empty(), nothing)?;
    let file = folder.path().join(format!("class/net/{device}/queues/rx-0/rps_cpus"));
    let written = fs::write(&file, format!("{:x}", 1_u32 << cpu));
    nix::mount::umount(folder.path())?;
    written.with_context(|| format!("writing {} (is the kernel built with CONFIG_RPS?)", file.display()))
}

/// Gives the calling thread priority over all others: its waiting for a CPU must not look like a
/// waiting packet.
fn go_first() -> Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel reads the parameter, which outlives the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
    nix::errno::Errno::result(result).context("real-time scheduling (SCHED_FIFO) is refused").map(drop)
}
