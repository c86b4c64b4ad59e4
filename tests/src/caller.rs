//! Processes in a cgroup and a network namespace of the test's choice, and their sockets.

use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;

use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::netns::{Namespace, Process};
use traffic_policy_testing::traffic::Answer;

/// A process that makes socket calls on request.
#[derive(Clone, Debug)]
pub struct Caller(Rc<RefCell<Child>>);

#[derive(Debug)]
struct Child {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    process: Process,
}

/// One of its sockets. Errors are those that the application gets.
#[derive(Debug)]
pub struct Socket {
    caller: Caller,
    number: String,
}

/// The family of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    V4,
    V6,
    /// An IPv6 socket that uses IPv4 addresses in IPv4-mapped form.
    Mapped,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];

    pub fn family(self) -> Family {
        if self == Self::V6 { Family::V6 } else { Family::V4 }
    }

    /// The address in the form that an application with such a socket uses.
    pub fn written(self, address: SocketAddr) -> SocketAddr {
        match (self, address.ip()) {
            (Self::Mapped, IpAddr::V4(ip)) => (ip.to_ipv6_mapped(), address.port()).into(),
            _ => address,
        }
    }

    fn domain(self) -> &'static str {
        if self == Self::V4 { "4" } else { "6" }
    }
}

impl Caller {
    /// Starts the binary `caller` of the suites, whose path only they know.
    pub fn start(program: &str, namespace: &Namespace, cgroup: &Cgroup) -> Self {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        cgroup.enter_on_exec(&mut command).unwrap();
        let mut process = namespace.spawn(command).unwrap();
        let (input, output) = process.pipes().unwrap();
        Self(Rc::new(RefCell::new(Child { input, output: BufReader::new(output), process })))
    }

    pub fn tcp(&self, kind: Kind) -> Socket {
        self.open(kind, "tcp")
    }

    pub fn mptcp(&self, kind: Kind) -> Socket {
        self.open(kind, "mptcp")
    }

    pub fn udp(&self, kind: Kind) -> Socket {
        self.open(kind, "udp")
    }

    fn open(&self, kind: Kind, transport: &str) -> Socket {
        let number = self.call(&format!("open {} {transport}", kind.domain())).unwrap();
        Socket { caller: self.clone(), number }
    }

    /// Connects by TCP, sends a request, and returns the answer and the socket.
    pub fn ask(&self, kind: Kind, to: SocketAddr) -> io::Result<(Answer, Socket)> {
        let socket = self.tcp(kind);
        socket.connect(kind.written(to))?;
        let answer = socket.line("who")?;
        Ok((answer, socket))
    }

    /// Kills the process; the kernel closes its sockets.
    pub fn kill(self, sockets: Vec<Socket>) {
        // Nobody is left to be asked to close them.
        sockets.into_iter().for_each(std::mem::forget);
        self.0.borrow_mut().process.kill().unwrap();
    }

    fn call(&self, line: &str) -> io::Result<String> {
        let mut child = self.0.borrow_mut();
        writeln!(child.input, "{line}").unwrap();
        let mut answer = String::new();
        child.output.read_line(&mut answer).unwrap();
        match answer.trim_end_matches('\n').split_once(' ') {
            Some(("ok", said)) => Ok(said.to_owned()),
            Some(("error", number)) => Err(io::Error::from_raw_os_error(number.parse().unwrap())),
            _ => panic!("process {}, {line}: {answer}", child.process.id()),
        }
    }
}

impl Socket {
    fn call(&self, verb: &str, rest: &str) -> io::Result<String> {
        self.caller.call(format!("{verb} {} {rest}", self.number).trim_end())
    }

    pub fn bind(&self, to: SocketAddr) {
        self.call("bind", &to.to_string()).unwrap();
    }

    pub fn connect(&self, to: SocketAddr) -> io::Result<()> {
        self.call("connect", &to.to_string()).map(drop)
    }

    /// Begins a connection without waiting for it: an error of EINPROGRESS, if it is not refused at
    /// once.
    pub fn begin(&self, to: SocketAddr) -> io::Result<()> {
        self.call("begin", &to.to_string()).map(drop)
    }

    /// Dissolves the association by a connect() with AF_UNSPEC.
    pub fn disconnect(&self) -> io::Result<()> {
        self.call("disconnect", "").map(drop)
    }

    /// Sends one line on a connection, and returns its answer.
    pub fn line(&self, text: &str) -> io::Result<Answer> {
        Ok(Answer::parse(&self.call("line", text)?).unwrap())
    }

    /// Sends one datagram on a connected socket.
    pub fn send(&self, text: &str) -> io::Result<()> {
        self.call("send", text).map(drop)
    }

    /// Sends one datagram to an address.
    pub fn send_to(&self, text: &str, to: SocketAddr) -> io::Result<()> {
        self.call("send", &format!("{text} {to}")).map(drop)
    }

    /// Receives one datagram, and returns its sender, too.
    pub fn receive(&self) -> io::Result<(SocketAddr, Answer)> {
        let said = self.call("receive", "")?;
        let (from, text) = said.split_once(' ').unwrap();
        Ok((from.parse().unwrap(), Answer::parse(text).unwrap()))
    }

    /// Sends a datagram and waits for its answer.
    pub fn exchange(&self, to: SocketAddr) -> io::Result<(SocketAddr, Answer)> {
        self.send_to("who", to)?;
        self.receive()
    }

    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.call("peer", "").map(|address| address.parse().unwrap())
    }

    /// Makes, connects and closes other UDP sockets.
    pub fn churn(&self, sockets: u32, to: SocketAddr) {
        self.call("churn", &format!("{sockets} {to}")).unwrap();
    }

    /// Sends one datagram from each of other UDP sockets.
    pub fn scatter(&self, sockets: u32, to: SocketAddr) {
        self.call("scatter", &format!("{sockets} {to}")).unwrap();
    }

    /// The nanoseconds of one of many connections by TCP, from its socket to its end, on average.
    pub fn time_connections(&self, count: u32, to: SocketAddr) -> u64 {
        self.call("connections", &format!("{count} {to}")).unwrap().parse().unwrap()
    }

    /// The nanoseconds of one connect(), on average.
    pub fn time_connect(&self, calls: u32, to: SocketAddr) -> u64 {
        self.call("time", &format!("{calls} {to}")).unwrap().parse().unwrap()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.call("close", "").unwrap();
        }
    }
}
