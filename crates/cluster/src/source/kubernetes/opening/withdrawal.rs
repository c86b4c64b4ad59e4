//! The end of a node's part in direct forwarding, before its programs are removed.

use std::{future::Future, time::Duration};

use kube::Client;
use tokio::time::timeout;

use super::lease::{self, Leases};
use crate::source::{
    kubernetes::{Access, AccessError, connect::Next, deadline::Line, known_versions::KnownVersions, reason},
    status::StatusWriter,
};

/// The time limit of each of the two steps.
const LIMIT: Duration = Duration::from_secs(30);

/// The Leases of a node that is to open no packets any longer.
pub struct Withdrawal {
    leases: Leases,
    node: String,
    namespace: String,
    _next: Next,
}

#[derive(Debug, thiserror::Error)]
pub enum WithdrawError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("the Lease {lease} cannot be changed: {reason}")]
    Failed { lease: String, reason: String },
}

impl Withdrawal {
    /// Connects to the API server.
    pub async fn begin(access: &Access, namespace: &str, node: &str) -> Result<Self, WithdrawError> {
        let (status, _reader) = StatusWriter::new();
        let (client, next): (Client, Next) =
            super::super::client(access, &Line::new(), &status, &KnownVersions::default()).await?;
        Ok(Self {
            leases: Leases::new(client, namespace),
            node: node.to_owned(),
            namespace: namespace.to_owned(),
            _next: next,
        })
    }

    /// Tells the other nodes to forward nothing directly to this one; packets that it sends itself
    /// are still opened. Returns whether they had been told something else.
    ///
    /// # Errors
    /// The API server refuses, or does not answer within 30 seconds.
    pub async fn stop_opening(&self, why: &str) -> Result<bool, WithdrawError> {
        self.within(self.leases.stop_opening(&self.node, why)).await
    }

    /// Removes both Leases.
    ///
    /// # Errors
    /// The API server refuses, or does not answer within 30 seconds.
    pub async fn remove(&self) -> Result<(), WithdrawError> {
        self.within(async {
            self.leases.remove(&lease::name(&self.node)).await?;
            self.leases.remove(&lease::name_renewed(&self.node)).await
        })
        .await
    }

    async fn within<T>(
        &self,
        step: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, WithdrawError> {
        let reason = match timeout(LIMIT, step).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => reason::of(&error),
            Err(_) => format!("the API server did not answer within {} s", LIMIT.as_secs()),
        };
        let lease = format!("{}/{}", self.namespace, lease::name(&self.node));
        Err(WithdrawError::Failed { lease, reason })
    }
}

/// Tries to read and write the Leases of a namespace, without writing one.
pub async fn try_opening(access: &Access, namespace: &str) -> Result<(), String> {
    let withdrawal =
        Withdrawal::begin(access, namespace, "check").await.map_err(|error| error.to_string())?;
    match timeout(LIMIT, withdrawal.leases.try_out()).await {
        Ok(tried) => tried.map_err(|error| reason::of(&error)),
        Err(_) => Err(format!("the API server did not answer within {} s", LIMIT.as_secs())),
    }
}
