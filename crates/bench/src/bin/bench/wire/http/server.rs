//! The smallest HTTP server that keeps connections.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result};
use socket2::{Domain, Socket, Type};
use traffic_policy_testing::netns::Namespace;

/// Number of connections that are served at once.
pub(in super::super) const THREADS: usize = 8;
pub(super) const BODY: [u8; 256] = [b'.'; 256];

pub(in super::super) struct Server {
    listener: Socket,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts the server. It listens when this returns; `settle` chooses the CPUs of each of its
    /// threads.
    pub(in super::super) fn start(
        namespace: &Namespace,
        address: SocketAddr,
        settle: impl Fn() -> Result<()> + Clone + Send + 'static,
    ) -> Result<Self> {
        let listener = namespace.run(|| -> Result<Socket> {
            let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            listener.set_reuse_address(true)?;
            listener.bind(&address.into()).with_context(|| format!("binding {address}"))?;
            listener.listen(128)?;
            Ok(listener)
        })?;
        let mut server = Self { listener, threads: Vec::new() };
        for _ in 0..THREADS {
            let listener = server.listener.try_clone()?;
            let settle = settle.clone();
            server.threads.push(thread::spawn(move || {
                if let Err(error) = settle() {
                    eprintln!("an HTTP server is on another CPU than it should be: {error:#}");
                }
                // The loop ends when the listener is shut down.
                while let Ok((stream, _)) = listener.accept() {
                    // A client that has disconnected needs no answer.
                    let _ = serve(stream.into());
                }
            }));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The shutdown fails only if the socket no longer listens.
        let _ = self.listener.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            // A panic was printed by its own thread.
            let _ = thread.join();
        }
    }
}

/// Answers until the client closes.
fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let head =
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n", BODY.len());
    let answer = [head.as_bytes(), &BODY].concat();
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            read => request.extend_from_slice(&buffer[..read]),
        }
        if request.ends_with(b"\r\n\r\n") {
            if !request.starts_with(b"GET ") {
                return Err(ErrorKind::InvalidData.into());
            }
            stream.write_all(&answer)?;
            request.clear();
        }
    }
}
