//! A large transfer in both directions at once whose content is checked at both ends.

use std::io::{self, BufRead as _, Read as _, Write as _};
use std::net::{self, SocketAddr};
use std::time::{Duration, Instant};
use std::{iter, thread};

use anyhow::{Context, Result, ensure};
use crc32fast::Hasher;
use socket2::SockRef;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::retransmissions;
use crate::netns::Namespace;

pub(super) const CHUNK: usize = 64 * 1024;
/// The longest time without an acknowledgement; after it the path is considered lost.
const STUCK: Duration = Duration::from_secs(60);
const TO_SERVER: u64 = 0x9e37_79b9_7f4a_7c15;
const TO_CLIENT: u64 = 0xd1b5_4a32_d192_ed03;

#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Bytes in each direction.
    pub bytes: u64,
    pub took: Duration,
    /// The number of segments of this end that were lost.
    pub lost: u32,
}

/// Sends `bytes` bytes (a multiple of 8) to a server from `namespace` and receives as many, at the
/// same time. Fails if one byte differs on either side.
pub fn transfer(namespace: &Namespace, server: SocketAddr, bytes: u64) -> Result<Transfer> {
    namespace
        .block_on(async || run(server, bytes).await)
        .with_context(|| format!("{bytes} bytes with {server}"))
}

async fn run(server: SocketAddr, bytes: u64) -> Result<Transfer> {
    ensure!(bytes.is_multiple_of(8), "{bytes} is not a multiple of 8");
    let start = Instant::now();
    let mut stream = TcpStream::connect(server).await?;
    SockRef::from(&stream).set_tcp_user_timeout(Some(STUCK))?;
    let done = talk(&mut stream, bytes).await;
    done.with_context(|| {
        retransmissions::progress(&stream).unwrap_or_else(|error| format!("state unknown: {error:#}"))
    })?;
    Ok(Transfer { bytes, took: start.elapsed(), lost: retransmissions::lost(&stream)? })
}

async fn talk(stream: &mut TcpStream, bytes: u64) -> Result<()> {
    stream.write_all(format!("transfer {bytes}\n").as_bytes()).await?;
    let (reader, writer) = stream.split();
    let mut reader = BufReader::new(reader);
    let (received, ()) = tokio::try_join!(receive(&mut reader, bytes), send(writer, TO_SERVER, bytes))?;
    ensure!(received == expected(TO_CLIENT, bytes), "the content that arrived here differs");
    let mut line = String::new();
    reader.read_line(&mut line).await?;
    let at_server: u32 = line.trim_end().parse().with_context(|| format!("hash of the server: {line:?}"))?;
    ensure!(at_server == expected(TO_SERVER, bytes), "the content that arrived at the server differs");
    Ok(())
}

/// The server's part: answers with the hash of the received content.
pub(super) async fn serve(mut stream: BufReader<TcpStream>, bytes: u64) -> Result<()> {
    exchange(&mut stream, bytes).await?;
    Ok(stream.shutdown().await?)
}

/// A variant of [`serve`] for a connection that stays open.
pub(super) async fn exchange(stream: &mut BufReader<TcpStream>, bytes: u64) -> Result<()> {
    SockRef::from(stream.get_ref()).set_tcp_user_timeout(Some(STUCK))?;
    let (mut reader, writer) = tokio::io::split(&mut *stream);
    let (received, ()) = tokio::try_join!(receive(&mut reader, bytes), send(writer, TO_CLIENT, bytes))?;
    Ok(stream.write_all(format!("{received}\n").as_bytes()).await?)
}

/// Sends `bytes` bytes (a multiple of 8) on an open connection and receives as many, at the same
/// time; the connection stays open. Fails if one byte differs on either side.
pub fn burst(stream: &mut io::BufReader<net::TcpStream>, bytes: u64) -> Result<()> {
    ensure!(bytes.is_multiple_of(8), "{bytes} is not a multiple of 8");
    stream.get_ref().write_all(format!("exchange {bytes}\n").as_bytes())?;
    let received = both_ways(stream, TO_SERVER, bytes)?;
    ensure!(received == expected(TO_CLIENT, bytes), "the content that arrived here differs");
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let at_server: u32 = line.trim_end().parse().with_context(|| format!("hash of the server: {line:?}"))?;
    ensure!(at_server == expected(TO_SERVER, bytes), "the content that arrived at the server differs");
    Ok(())
}

/// The server's part of [`burst`].
pub(super) fn answer_burst(stream: &mut io::BufReader<net::TcpStream>, bytes: u64) -> Result<()> {
    let received = both_ways(stream, TO_CLIENT, bytes)?;
    Ok(stream.get_ref().write_all(format!("{received}\n").as_bytes())?)
}

/// Sends one content and receives another at the same time; returns the hash of the latter.
fn both_ways(stream: &mut io::BufReader<net::TcpStream>, seed: u64, bytes: u64) -> Result<u32> {
    let mut writer = stream.get_ref().try_clone()?;
    thread::scope(|scope| {
        let sent = scope.spawn(move || content(seed, bytes).try_for_each(|chunk| writer.write_all(&chunk)));
        let mut hash = Hasher::new();
        let mut left = usize::try_from(bytes)?;
        let mut chunk = vec![0; CHUNK];
        while left > 0 {
            let wanted = left.min(CHUNK);
            stream.read_exact(&mut chunk[..wanted]).context("the stream ended early")?;
            hash.update(&chunk[..wanted]);
            left -= wanted;
        }
        sent.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?.context("sending")?;
        Ok(hash.finalize())
    })
}

async fn send(mut writer: impl AsyncWrite + Unpin, seed: u64, bytes: u64) -> Result<()> {
    for chunk in content(seed, bytes) {
        writer.write_all(&chunk).await?;
    }
    Ok(writer.flush().await?)
}

async fn receive(reader: &mut (impl AsyncRead + Unpin), bytes: u64) -> Result<u32> {
    let mut hash = Hasher::new();
    let mut chunk = vec![0; CHUNK];
    let mut left = usize::try_from(bytes)?;
    while left > 0 {
        let wanted = left.min(CHUNK);
        reader.read_exact(&mut chunk[..wanted]).await.context("the stream ended early")?;
        hash.update(&chunk[..wanted]);
        left -= wanted;
    }
    Ok(hash.finalize())
}

fn expected(seed: u64, bytes: u64) -> u32 {
    let mut hash = Hasher::new();
    content(seed, bytes).for_each(|chunk| hash.update(&chunk));
    hash.finalize()
}

/// Yields `bytes` bytes in chunks: random ones, so that nothing can be swapped or repeated
/// unnoticed.
pub(super) fn content(seed: u64, bytes: u64) -> impl Iterator<Item = Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut left = bytes;
    iter::from_fn(move || {
        let mut chunk = vec![0; left.min(CHUNK as u64) as usize];
        left -= chunk.len() as u64;
        random.fill(&mut chunk);
        (!chunk.is_empty()).then_some(chunk)
    })
}
