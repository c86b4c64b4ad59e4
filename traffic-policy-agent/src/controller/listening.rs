//! The agent's own ports: one with /healthz and /livez, and one with /metrics and related paths.

use std::net::SocketAddr;

use anyhow::{Context, Result};

use crate::{
    health::{HealthzServer, ProxyHealth},
    in_effect::InEffect,
    metrics::{Metrics, MetricsServer},
};

pub(super) fn healthz(address: SocketAddr, health: &ProxyHealth) -> Result<HealthzServer> {
    let server = HealthzServer::start(address, health.clone()).with_context(|| {
        format!(
            "{address} cannot be listened on (is another proxy running here?): choose another with --healthz-address"
        )
    })?;
    tracing::info!(address = %server.address(), "answering /healthz and /livez");
    Ok(server)
}

pub(super) fn metrics(address: SocketAddr, metrics: &Metrics, in_effect: &InEffect) -> Result<MetricsServer> {
    let server = MetricsServer::start(address, metrics.clone(), in_effect.clone()).with_context(|| {
        format!(
            "{address} cannot be listened on (is another proxy running here?): choose another with \
             --metrics-address, or `none`"
        )
    })?;
    tracing::info!(address = %server.address(), "answering /metrics, /proxyMode and /configz");
    Ok(server)
}
