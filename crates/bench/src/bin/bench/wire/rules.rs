//! The rules that kube-proxy would write for the same Services.

use std::{fs, net::SocketAddr, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};
use traffic_policy_testing::{
    kube_proxy::{Backend, Place, Rules},
    netns::Namespace,
};

use super::{
    fixture::NODE,
    generator::TARGET_PORT,
    services::{CLUSTER, CLUSTER_IPS, PORT, Service},
};

/// Returns the version of a program, or an error with what is missing.
pub(crate) fn version(program: &str) -> Result<String> {
    let output = Command::new(program).arg("--version").output();
    let output = output.with_context(|| format!("the program {program} is not installed"))?;
    ensure!(output.status.success(), "{program} --version: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Writes the rules of these Services, with ports of this protocol, into a namespace.
pub(crate) fn write(
    namespace: &Namespace,
    backend: Backend,
    services: &[Service],
    protocol: &'static str,
    file: &Path,
) -> Result<()> {
    let program = if backend == Backend::Nftables { &["nft", "-f"][..] } else { &["iptables-restore"] };
    load(namespace, program, &text(backend, services, protocol), file)
}

fn text(backend: Backend, services: &[Service], protocol: &'static str) -> String {
    let place = Place { node: NODE.into(), pods: CLUSTER.to_owned(), cluster_ips: CLUSTER_IPS };
    let rules = |service: &Service| Rules {
        name: service.name.clone(),
        protocols: vec![protocol],
        cluster_ip: SocketAddr::new(service.cluster_ip.into(), PORT),
        vip: None,
        node_port: service.node_port,
        endpoints: service.endpoints.iter().map(|address| (*address, TARGET_PORT).into()).collect(),
        local: None,
    };
    backend.rules(&place, &services.iter().map(rules).collect::<Vec<_>>())
}

/// Makes a program read rules from a file, inside a namespace.
pub(crate) fn load(namespace: &Namespace, program: &[&str], rules: &str, file: &Path) -> Result<()> {
    fs::write(file, rules).with_context(|| format!("writing {}", file.display()))?;
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).arg(file);
    let output = namespace.output(command)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<_> = said.lines().take(5).collect();
        bail!("{}: {}: {}", program[0], output.status, lines.join("\n"));
    }
    Ok(())
}
