//! The end of a client's connection, without a segment that is sent again although none was lost.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::pace::scaled;

/// The time within which the other end closes, too. One that is gone never does.
const PATIENCE: Duration = Duration::from_secs(1);

/// Closes a connection once the other end has.
///
/// A socket that its process has closed leaves FIN_WAIT1 as a TIME_WAIT socket. If the other end's
/// FIN comes by another processor at this moment, behind the acknowledgement, it is lost: "We still
/// can lose it now, if it spins in bh_lock_sock()"
/// (<https://github.com/torvalds/linux/blob/v6.12/net/ipv4/tcp_input.c> `tcp_rcv_state_process`).
pub(super) async fn close(mut stream: TcpStream) {
    let both_ways = async {
        stream.shutdown().await?;
        let mut rest = [0; 64];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    // What ends by a reset, or with its pod, has been counted before.
    let _ = timeout(scaled(PATIENCE), both_ways).await;
}
