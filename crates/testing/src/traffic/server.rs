//! The program of a pod: a TCP and a UDP server on one port, for both families.

use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::sleep;

use super::answer::Answer;
use super::ledger::{Label, Ledger};
use super::{datagrams, retransmissions, transfer};
use crate::lab::Pod;
use crate::netns::{Namespace, Running, Stop};

/// A server on a thread of this process; it stops when dropped.
#[derive(Debug)]
pub struct Server {
    _running: Running<()>,
}

/// Deliberate mistakes, most of them at every n-th time, which prove that the meters notice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Ignores a datagram, as if it had never arrived.
    pub lose_request: Option<u64>,
    /// Receives a datagram but does not answer it.
    pub lose_reply: Option<u64>,
    /// Answers a datagram twice.
    pub repeat_reply: Option<u64>,
    /// Closes a connection without an answer.
    pub cut_connection: Option<u64>,
    /// Delays each answer over TCP by this time, like a busy machine.
    pub late: Duration,
    /// Closes a connection this long after the client has.
    pub lingers: Duration,
}

/// The identity of the server.
#[derive(Clone, Debug)]
pub struct Identity {
    pub pod: String,
    pub node: String,
}

#[derive(Debug)]
struct Service {
    identity: Identity,
    faults: Faults,
    ledger: Ledger,
    datagrams: AtomicU64,
    connections: AtomicU64,
}

impl Server {
    /// Starts a server in a pod. It is listening when this returns.
    pub fn start(pod: &Pod, port: u16, ledger: &Ledger) -> Result<Self> {
        let identity = Identity { pod: pod.name.clone(), node: pod.node.clone() };
        Self::start_in(pod.netns(), port, identity, Faults::default(), ledger)
    }

    /// Starts a server in any namespace, optionally one that makes mistakes.
    pub fn start_in(
        namespace: &Namespace,
        port: u16,
        identity: Identity,
        faults: Faults,
        ledger: &Ledger,
    ) -> Result<Self> {
        let sockets = namespace.run(|| Sockets::bind(port))?;
        let ledger = ledger.clone();
        let running = namespace.start("server", async move |mut stop: Stop| {
            let served = async {
                if let Err(error) = sockets.serve(identity, faults, ledger).await {
                    panic!("server on port {port}: {error:#}");
                }
            };
            tokio::select! {
                () = served => {}
                () = stop.requested() => {}
            }
        });
        Ok(Self { _running: running })
    }
}

/// Serves in the calling thread's namespace until the process is killed.
pub async fn serve(port: u16, identity: Identity) -> Result<()> {
    Sockets::bind(port)?.serve(identity, Faults::default(), Ledger::default()).await
}

struct Sockets {
    tcp: Socket,
    udp: Socket,
}

impl Sockets {
    fn bind(port: u16) -> Result<Self> {
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let open = |kind: Type, protocol: Protocol| -> Result<Socket> {
            let socket = Socket::new(Domain::IPV6, kind, Some(protocol))?;
            socket.set_only_v6(false)?;
            socket.set_nonblocking(true)?;
            socket.set_reuse_address(kind == Type::STREAM)?;
            socket.bind(&any.into()).with_context(|| format!("binding port {port}"))?;
            Ok(socket)
        };
        let tcp = open(Type::STREAM, Protocol::TCP)?;
        tcp.listen(4096)?;
        let udp = open(Type::DGRAM, Protocol::UDP)?;
        datagrams::enlarge_buffers(&udp)?;
        Ok(Self { tcp, udp })
    }

    async fn serve(self, identity: Identity, faults: Faults, ledger: Ledger) -> Result<()> {
        let (datagrams, connections) = Default::default();
        let context = Arc::new(Service { identity, faults, ledger, datagrams, connections });
        let tcp = TcpListener::from_std(self.tcp.into())?;
        let udp = UdpSocket::from_std(self.udp.into())?;
        tokio::try_join!(context.clone().accept(tcp), context.echo(udp)).map(drop)
    }
}

impl Service {
    fn answer(&self, client: SocketAddr, said: &str, lost: u32) -> String {
        let client = SocketAddr::new(client.ip().to_canonical(), client.port());
        let Identity { pod, node } = self.identity.clone();
        Answer { pod, node, client, lost, said: said.to_owned() }.to_line()
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) -> Result<()> {
        loop {
            let (stream, client) = match listener.accept().await {
                // This process has as many files open as it may, most of them connections whose
                // clients have gone: they end before others are accepted.
                Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                    sleep(Duration::from_millis(10)).await;
                    continue;
                }
                accepted => accepted?,
            };
            let number = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
            if is_turn(self.faults.cut_connection, number) {
                continue;
            }
            let context = self.clone();
            // A client that disconnects early is not an error of the server.
            tokio::spawn(async move { context.converse(stream, client).await.ok() });
        }
    }

    async fn converse(&self, stream: TcpStream, client: SocketAddr) -> Result<()> {
        stream.set_nodelay(true)?;
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while stream.read_line(&mut line).await? > 0 {
            let said = line.trim_end();
            let lost = retransmissions::lost(stream.get_ref())?;
            if let Some(request) = said.strip_prefix("GET ") {
                let body = self.answer(client, request, lost) + "\n";
                return respond(&mut stream, &body).await;
            }
            if let Some(length) = said.strip_prefix("transfer ") {
                return transfer::serve(stream, length.parse()?).await;
            }
            if let Some(length) = said.strip_prefix("exchange ") {
                let length = length.parse()?;
                transfer::exchange(&mut stream, length).await?;
                line.clear();
                continue;
            }
            let answer = self.answer(client, said, lost) + "\n";
            sleep(self.faults.late).await;
            stream.write_all(answer.as_bytes()).await?;
            line.clear();
        }
        sleep(self.faults.lingers).await;
        Ok(())
    }

    async fn echo(self: Arc<Self>, socket: UdpSocket) -> Result<()> {
        let mut buffer = vec![0; 65_536];
        loop {
            // An ICMP error about an earlier answer is reported here and does not concern the next
            // datagram.
            let Ok((length, client)) = socket.recv_from(&mut buffer).await else { continue };
            let said = String::from_utf8_lossy(&buffer[..length]);
            let number = self.datagrams.fetch_add(1, Ordering::Relaxed) + 1;
            if is_turn(self.faults.lose_request, number) {
                continue;
            }
            if let Some(label) = Label::parse(&said) {
                self.ledger.record(label);
            }
            if is_turn(self.faults.lose_reply, number) {
                continue;
            }
            let answer = self.answer(client, said.trim_end(), 0);
            let times = if is_turn(self.faults.repeat_reply, number) { 2 } else { 1 };
            for _ in 0..times {
                socket.send_to(answer.as_bytes(), client).await.ok();
            }
        }
    }
}

async fn respond(stream: &mut BufReader<TcpStream>, body: &str) -> Result<()> {
    let mut header = String::new();
    while stream.read_line(&mut header).await? > 0 && header.trim_end() != "" {
        header.clear();
    }
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n");
    stream.write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes()).await?;
    Ok(stream.shutdown().await?)
}

fn is_turn(every: Option<u64>, number: u64) -> bool {
    every.is_some_and(|every| number.is_multiple_of(every))
}
