//! The metadata server of a cloud, as far as agents ask it: one HTTP/1.1 server on the loopback
//! address of a node, and for each cloud what it answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::netns::Namespace;

/// A running server. Its thread ends with the process.
#[derive(Debug)]
pub struct MetadataServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// The clouds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cloud {
    Gce,
    Aws,
    Azure,
}

#[derive(Debug)]
struct Shared {
    cloud: Cloud,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The news, in the words of the cloud; empty: none.
    news: String,
    /// The number of changes so far, which is the ETag.
    version: u64,
    /// The number of tokens so far, of which the last one is valid.
    tokens: u64,
    /// Whether every request gets 500.
    broken: bool,
    requests: Vec<String>,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
}

impl MetadataServer {
    /// Starts a server without news on a free port of a namespace.
    pub fn start(namespace: &Namespace, cloud: Cloud) -> Result<Self> {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = namespace.run(bind).context("the metadata server has no port")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { cloud, state: Mutex::default(), changed: Condvar::new() });
        let server = Self { address, shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                // A request may be held for long. A client that goes away meanwhile is no error.
                thread::spawn(move || shared.serve(&stream).ok());
            }
        });
        Ok(server)
    }

    /// The base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets the news, in the words of the cloud: `TRUE`, or a JSON document; empty: none.
    pub fn set(&self, news: &str) {
        let mut state = self.shared.state();
        news.clone_into(&mut state.news);
        state.version += 1;
        self.shared.changed.notify_all();
    }

    /// Makes all tokens invalid.
    pub fn forget_tokens(&self) {
        self.shared.state().tokens += 1;
    }

    /// Sets whether every request gets 500 from now on.
    pub fn set_broken(&self, broken: bool) {
        self.shared.state().broken = broken;
    }

    /// Method and path of every request so far.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.shared.state().requests.clone()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: &TcpStream) -> Result<()> {
        let request = Request::read(stream)?;
        self.state().requests.push(format!("{} {}", request.method, request.path));
        let broken = self.state().broken;
        let (status, etag, body) = if broken {
            (500, 0, String::new())
        } else {
            match self.cloud {
                Cloud::Gce => self.gce(&request),
                Cloud::Aws => self.aws(&request),
                Cloud::Azure => self.azure(&request),
            }
        };
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status} x\r\nETag: {etag}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        let mut stream = stream;
        stream.write_all((head + &body).as_bytes())?;
        Ok(())
    }

    fn gce(&self, request: &Request) -> (u16, u64, String) {
        if request.header("metadata-flavor") != "Google" {
            return (403, 0, String::new());
        }
        if request.path != "/computeMetadata/v1/instance/preempted" {
            return (404, 0, String::new());
        }
        let mut state = self.state();
        if request.query.get("wait_for_change").is_some_and(|wait| wait == "true") {
            let known = request.query.get("last_etag").cloned().unwrap_or_default();
            let seconds = request.query.get("timeout_sec").and_then(|text| text.parse().ok()).unwrap_or(60);
            let same = |state: &mut State| state.version.to_string() == known;
            let waited = self.changed.wait_timeout_while(state, Duration::from_secs(seconds), same);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let news = if state.news.is_empty() { "FALSE" } else { &state.news };
        (200, state.version, news.to_owned())
    }

    fn aws(&self, request: &Request) -> (u16, u64, String) {
        let mut state = self.state();
        match (request.method.as_str(), request.path.as_str()) {
            ("PUT", "/latest/api/token") => {
                let life = request.header("x-aws-ec2-metadata-token-ttl-seconds").parse::<u32>();
                if !life.is_ok_and(|life| (1..=21_600).contains(&life)) {
                    return (400, 0, String::new());
                }
                state.tokens += 1;
                (200, 0, format!("token-{}", state.tokens))
            }
            ("GET", path) => {
                if request.header("x-aws-ec2-metadata-token") != format!("token-{}", state.tokens) {
                    return (401, 0, String::new());
                }
                if path != "/latest/meta-data/spot/instance-action" || state.news.is_empty() {
                    return (404, 0, String::new());
                }
                (200, 0, state.news.clone())
            }
            _ => (405, 0, String::new()),
        }
    }

    fn azure(&self, request: &Request) -> (u16, u64, String) {
        if request.header("metadata") != "true" || !request.query.contains_key("api-version") {
            return (400, 0, String::new());
        }
        let state = self.state();
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/metadata/instance/compute/name") => (200, 0, "pool_3".to_owned()),
            ("GET", "/metadata/scheduledevents") => (
                200,
                0,
                format!(r#"{{"DocumentIncarnation": {}, "Events": [{}]}}"#, state.version, state.news),
            ),
            _ => (404, 0, String::new()),
        }
    }
}

impl Request {
    fn read(stream: &TcpStream) -> Result<Self> {
        let mut lines = BufReader::new(stream).lines();
        let first = lines.next().context("nothing came")??;
        let mut words = first.split(' ').map(str::to_owned);
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let query = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Ok(Self { method, path: path.to_owned(), query, headers })
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(String::as_str).unwrap_or_default()
    }
}
