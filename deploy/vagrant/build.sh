#!/usr/bin/env bash
# Builds what the machines of the Vagrantfile run, into target/vagrant.
set -euo pipefail

cd "$(dirname "$0")/../.."
cargo xtask setup
cargo build --release -p traffic-policy-agent -p traffic-policy-lb -p traffic-policy-lab -p traffic-policy-bench
mkdir -p target/vagrant
install target/release/traffic-policy-agent target/release/kubectl-traffic_policy target/release/lab target/release/bench target/vagrant/
