//! The client of the probes against malicious servers.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use traffic_policy_cluster::model::ServiceName;

use super::*;
use crate::{Answer, probe::Spoken};

/// The time limit for answers that must come.
const LONG: Duration = Duration::from_secs(60);
/// The time limit for answers that never come.
const SHORT: Duration = Duration::from_millis(300);

fn asking(question: Question, to: SocketAddr) -> Asking {
    Asking {
        node: "n1".to_owned(),
        service: Some(ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() }),
        question,
        to: Some(to),
        expected: Answer::Ok(Some(2)),
        kubelet_silent: false,
        decides: true,
    }
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    (listener, to)
}

async fn hear(question: Question, to: SocketAddr, within: Duration) -> Heard {
    let limits = Limits { within, at_once: 4, traffic_rate: 1000 };
    let mut all = ask(vec![asking(question, to)], limits, |_, _| ()).await;
    all.remove(0).1
}

/// Answers with the bytes `once`, then `for_ever` repeatedly; then closes the connection, or keeps
/// it.
async fn against(once: &'static [u8], for_ever: &'static [u8], within: Duration) -> Heard {
    let (listener, to) = listener().await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await;
        if stream.write_all(once).await.is_err() || for_ever.is_empty() {
            return;
        }
        while stream.write_all(for_ever).await.is_ok() {
            // An occasional byte keeps a client waiting if it has a time limit for the next byte
            // only.
            if for_ever.len() == 1 {
                // Long enough to notice a client that sends more than the limit at a time: all of
                // its requests would arrive within this time.
                sleep(Duration::from_millis(20)).await;
            }
        }
    });
    let heard = hear(Question::ServiceHealth(1), to, within).await;
    server.abort();
    heard
}

#[tokio::test]
async fn an_answer_is_read() {
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nX-Load-Balancing-Endpoint-Weight: 2\r\nContent-Length: 94\r\n\r\n\
        {\"service\":{\"namespace\":\"shop\",\"name\":\"web\"},\"localEndpoints\":2,\"serviceProxyHealthy\":true}    ";
    let Heard::Http(http) = against(ANSWER, b"", LONG).await else { panic!("no answer") };
    assert_eq!((http.status, http.weight), (200, Some(2)));
    assert!(matches!(http.spoken, Spoken::Service { endpoints: 2, healthy: Some(true), .. }), "{http:?}");
}

#[tokio::test]
async fn a_body_without_end_is_not_read_to_its_end() {
    let heard = against(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", &[b' '; 4096], LONG).await;
    assert_eq!(heard, Heard::Garbled("a body that is too long"));
    // A server that announces its length is not trusted either.
    let heard = against(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", &[b' '; 4096], LONG).await;
    assert_eq!(heard, Heard::Garbled("a body that is too long"));
}

#[tokio::test]
async fn who_sends_byte_by_byte_is_not_waited_for() {
    let heard = against(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b" ", SHORT).await;
    assert_eq!(heard, Heard::Hangs);
    let heard = against(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x", SHORT).await;
    assert_eq!(heard, Heard::Hangs);
    let heard = against(b"HTTP/1.1 100 Continue\r\n\r\n", b"H", SHORT).await;
    assert!(matches!(heard, Heard::Hangs | Heard::Garbled(_)), "{heard:?}");
}

#[tokio::test]
async fn other_bytes_and_headers_without_end_are_no_answer() {
    assert_eq!(against(b"SSH-2.0-OpenSSH_9.9\r\n", b"", LONG).await, Heard::Garbled("other bytes"));
    assert_eq!(against(b"", b"", LONG).await, Heard::Garbled("closed without an answer"));
    let heard = against(b"HTTP/1.1 200 OK\r\nX-Long: ", &[b'x'; 4096], LONG).await;
    assert_eq!(heard, Heard::Garbled("headers that are too long"));
    let heard = against(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b"", LONG).await;
    assert_eq!(heard, Heard::Garbled("a body that is cut off"));
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let (elsewhere, to_elsewhere) = listener().await;
    let visits = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&visits);
    tokio::spawn(async move {
        while elsewhere.accept().await.is_ok() {
            seen.fetch_add(1, Ordering::Relaxed);
        }
    });
    let (listener, to) = listener().await;
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 1024]).await;
        let answer = format!(
            "HTTP/1.1 302 Found\r\nLocation: http://{to_elsewhere}/healthz\r\nContent-Length: 0\r\n\r\n"
        );
        let _ = stream.write_all(answer.as_bytes()).await;
        let _ = stream.read(&mut [0; 1024]).await;
    });
    let heard = hear(Question::ProxyHealth, to, LONG).await;
    let Heard::Http(http) = heard else { panic!("{heard:?}") };
    assert_eq!((http.status, http.spoken), (302, Spoken::Other));
    tokio::task::yield_now().await;
    assert_eq!(visits.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_node_port_is_connected_to_and_nothing_is_sent() {
    let (listener, to) = listener().await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read(&mut [0; 16]).await.unwrap()
    });
    assert_eq!(hear(Question::TrafficPort(1), to, LONG).await, Heard::Connected);
    assert_eq!(server.await.unwrap(), 0, "bytes before the end");
}

#[tokio::test]
async fn a_closed_port_refuses() {
    let (listener, to) = listener().await;
    drop(listener);
    assert_eq!(hear(Question::ServiceHealth(1), to, LONG).await, Heard::Refused);
    assert_eq!(hear(Question::TrafficPort(1), to, LONG).await, Heard::Refused);
}

/// There are no more probes at a time, and no more node ports per second, than the limits allow.
#[tokio::test]
async fn questions_are_few_at_a_time() {
    let (listener, to) = listener().await;
    let (open, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (now, peak) = (Arc::clone(&open), Arc::clone(&most));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let now = Arc::clone(&now);
            tokio::spawn(async move {
                sleep(Duration::from_millis(20)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                let _ = stream.write_all(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n").await;
                let _ = stream.read(&mut [0; 1024]).await;
            });
        }
    });
    let limits = Limits { within: LONG, at_once: 3, traffic_rate: 50 };
    let askings = vec![asking(Question::ServiceHealth(1), to); 12];
    let answers = ask(askings, limits, |_, _| ()).await;
    assert!(answers.iter().all(|(_, heard, _)| matches!(heard, Heard::Http(_))), "{answers:?}");
    let most = most.load(Ordering::SeqCst);
    assert!((1..=3).contains(&most), "{most} at a time");

    let begun = Instant::now();
    let askings = vec![asking(Question::TrafficPort(1), to); 11];
    ask(askings, limits, |_, _| ()).await;
    // Ten pauses of 20 ms.
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
}
