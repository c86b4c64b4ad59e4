//! Notice of this node's end: sources of the news that it is about to go, each a task of its own,
//! and the board on which they write.
//!
//! Load balancers are told by the health ports, other nodes by a Lease; the packet path goes on.

#![forbid(unsafe_code)]

mod aws;
mod azure;
mod board;
mod file;
mod gce;
mod logind;
mod metadata;
mod poll;

use std::{
    fmt::{self, Display, Formatter},
    path::PathBuf,
    str::FromStr,
};

use hyper::Uri;
use tokio::task::JoinSet;
use traffic_policy_cluster::source::Leaving;

pub use self::board::{Board, Reporter};

/// A source of news, as `--notice` names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Logind,
    /// A cloud's metadata server, at another base URL than its own if one is given.
    Cloud(Cloud, Option<String>),
    /// The Node object.
    Node,
    File(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cloud {
    Gce,
    Aws,
    Azure,
}

impl Cloud {
    const ALL: [Self; 3] = [Self::Gce, Self::Aws, Self::Azure];

    fn name(self) -> &'static str {
        match self {
            Self::Gce => "gce",
            Self::Aws => "aws",
            Self::Azure => "azure",
        }
    }

    fn base(self) -> &'static str {
        match self {
            Self::Gce => gce::BASE,
            Self::Aws => aws::BASE,
            Self::Azure => azure::BASE,
        }
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("file:") {
            let path = PathBuf::from(path);
            // The agent's working folder is nobody's choice.
            return if path.is_absolute() {
                Ok(Self::File(path))
            } else {
                Err(format!("`{text}` names no absolute path: write file:/run/traffic-policy/leaving"))
            };
        }
        let (name, base) = match text.split_once('=') {
            Some((name, base)) => (name, Some(base)),
            None => (text, None),
        };
        if let Some(cloud) = Cloud::ALL.into_iter().find(|cloud| cloud.name() == name) {
            let uri = base.map(|base| base.parse::<Uri>().ok());
            let is_plain = |uri: &Uri| uri.scheme_str() == Some("http") && uri.host().is_some();
            return match uri {
                Some(uri) if !uri.as_ref().is_some_and(is_plain) => Err(format!(
                    "`{text}`: the base URL of a metadata server is http://HOST or http://HOST:PORT"
                )),
                _ => Ok(Self::Cloud(cloud, base.map(str::to_owned))),
            };
        }
        match text {
            "logind" => Ok(Self::Logind),
            "node" => Ok(Self::Node),
            _ => Err(format!(
                "`{text}` is no source of news: write logind, gce, aws, azure, node or file:PATH"
            )),
        }
    }
}

impl Display for Source {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Logind => out.write_str("logind"),
            Self::Cloud(cloud, None) => out.write_str(cloud.name()),
            Self::Cloud(cloud, Some(base)) => write!(out, "{}={base}", cloud.name()),
            Self::Node => out.write_str("node"),
            Self::File(path) => write!(out, "file:{}", path.display()),
        }
    }
}

/// Starts to listen to all sources except [`Source::Node`]. A task never returns.
#[must_use]
pub fn start(sources: &[Source], board: &Board) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for source in sources {
        let reporter = board.reporter(&source.to_string());
        match source.clone() {
            Source::Logind => _ = tasks.spawn(logind::run(reporter)),
            Source::File(path) => _ = tasks.spawn(file::run(path, reporter)),
            Source::Cloud(cloud, base) => {
                let base = base.unwrap_or_else(|| cloud.base().to_owned());
                match cloud {
                    Cloud::Gce => tasks.spawn(gce::run(base, reporter)),
                    Cloud::Aws => tasks.spawn(aws::run(base, reporter)),
                    Cloud::Azure => tasks.spawn(azure::run(base, reporter)),
                };
            }
            // The run loop knows the Node object, and reports.
            Source::Node => {}
        }
    }
    tasks
}

/// Returns the place of [`Source::Node`] on the board, if it is one of the sources.
#[must_use]
pub fn of_node(sources: &[Source], board: &Board) -> Option<Reporter> {
    sources.contains(&Source::Node).then(|| board.reporter(&Source::Node.to_string()))
}

/// Returns the news of a source that knows no time.
#[must_use]
pub fn leaving(reason: &str) -> Leaving {
    Leaving { reason: reason.to_owned(), gone_by: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_as_users_write_them() {
        for text in ["logind", "gce", "aws=http://127.0.0.1:80", "azure", "node", "file:/run/leaving"] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        for (text, fault) in [
            ("file:leaving", "absolute"),
            ("gce=https://host", "http://HOST"),
            ("aws=", "http://HOST"),
            ("azure=host:80", "http://HOST"),
            ("logind=x", "is no source"),
            ("", "is no source"),
            ("GCE", "is no source"),
        ] {
            let error = text.parse::<Source>().unwrap_err();
            assert!(error.contains(fault), "{text}: {error}");
        }
    }
}
