//! A lab with one node, an API server, and an optimised agent on the node.

use std::{
    env,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Array, HashMap, Map, MapData};
use traffic_policy_dataplane::ToWire;
use traffic_policy_ebpf::abi::{Address4, Frontend, FrontendKey, PROTOCOL_TCP, Port as AbiPort, Slot, scope};
use traffic_policy_testing::{
    agent::Agent,
    control_plane::ControlPlane,
    lab::{Family, Lab},
    object::{Backend, Port, Service},
    pinned,
};

use super::{cluster, stream::Stream};

const WEB_PORT: u16 = 30_080;
const POD_PORT: u16 = 8_080;
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Stage {
    pub(super) services: u32,
    /// Whether some of them have the algorithm maglev.
    maglev: bool,
    pub(super) control_plane: ControlPlane,
    pub(super) agent: Agent,
    pub(super) lab: Lab,
}

impl Stage {
    /// Builds the stage. The agent serves one Service at first, the one that the stream uses.
    pub(super) fn build(services: u32) -> Result<Self> {
        Self::build_with(services, &[], false)
    }

    /// A variant of [`Self::build`] for an agent with these flags, and Services of which some have
    /// the algorithm maglev: [`cluster::MAGLEV_EVERY`].
    pub(super) fn build_with(services: u32, flags: &[&str], maglev: bool) -> Result<Self> {
        let lab = Lab::builder().pods(&[1]).build()?;
        let control_plane = ControlPlane::start(&lab)?;
        let web = Service::new("web").port(Port::udp(80, POD_PORT).node_port(WEB_PORT));
        control_plane.apply(&web, &[Backend::of(lab.node(1).pod(1))])?;
        let agent = Agent::builder(&lab, lab.node(1)).program(&program()?).flags(flags);
        let agent = agent.kubeconfig(control_plane.kubeconfig()).start()?;
        agent.wait_ready(PATIENCE)?;
        Ok(Self { services, maglev, control_plane, agent, lab })
    }

    /// Starts a stream from the client to the pod, through the node port.
    pub(super) fn start_stream(&self) -> Result<Stream> {
        let target = SocketAddr::new(self.lab.node(1).address(Family::V4), WEB_PORT);
        Stream::start(&self.lab, POD_PORT, target)
    }

    /// Writes all Services to the API server.
    pub(super) fn put_all(&self) -> Result<()> {
        let server = self.control_plane.server();
        (0..self.services)
            .flat_map(|number| cluster::objects(number, self.maglev))
            .try_for_each(|object| server.put(object))
    }

    pub(super) fn pid(&self) -> Result<u32> {
        self.agent.pid().context("the agent has ended")
    }

    /// Opens a map of the agent.
    pub(super) fn map(&self, name: &str) -> Result<MapData> {
        let path = pinned::path(self.agent.pin_dir(), name)?;
        MapData::from_pin(&path).with_context(|| format!("opening {}", path.display()))
    }

    pub(super) fn maps(&self) -> Result<Maps> {
        Ok(Maps {
            frontends: Map::HashMap(self.map("tp_frontends4")?).try_into()?,
            slots: Map::Array(self.map("tp_endpoints4")?).try_into()?,
        })
    }
}

/// Map entries of a Service, as packets find them.
pub(super) struct Maps {
    frontends: HashMap<MapData, FrontendKey<Address4>, Frontend>,
    slots: Array<MapData, Slot<Address4>>,
}

impl Maps {
    /// Returns the frontend of a Service's cluster IP; `None` if the map has none.
    pub(super) fn frontend(&self, service: u32) -> Option<Frontend> {
        let key = FrontendKey {
            address: cluster::cluster_ip(service).to_wire(),
            port: AbiPort::from_host(cluster::PORT),
            protocol: PROTOCOL_TCP as u16,
            scope: scope::ADDRESS,
        };
        self.frontends.get(&key, 0).ok()
    }

    /// Polls without a pause until a Service's frontend differs from `before`; returns the time.
    pub(super) fn wait(&self, service: u32, before: Option<Frontend>) -> Result<Instant> {
        let start = Instant::now();
        loop {
            let now = self.frontend(service);
            let at = Instant::now();
            if now != before {
                return Ok(at);
            }
            ensure!(at - start < PATIENCE, "Service {service} did not change in the maps for {PATIENCE:?}");
        }
    }

    /// Fails unless packets to all endpoints of a Service are forwarded directly.
    pub(super) fn check_direct(&self, service: u32) -> Result<()> {
        let list =
            self.frontend(service).with_context(|| format!("Service {service} has no frontend"))?.cluster;
        for index in list.base..list.base + list.len {
            ensure!(self.slots.get(&index, 0)?.opens() != 0, "slot {index}: its node opens no packets");
        }
        Ok(())
    }

    /// Fails unless a Service has this number of endpoints.
    pub(super) fn check(&self, service: u32, endpoints: u32) -> Result<()> {
        let frontend =
            self.frontend(service).with_context(|| format!("Service {service} has no frontend"))?;
        let list = frontend.cluster;
        ensure!(list.len == endpoints, "Service {service} has {} endpoints, not {endpoints}", list.len);
        for index in list.base..list.base + list.len {
            let slot = self.slots.get(&index, 0)?;
            ensure!(slot.port == AbiPort::from_host(cluster::TARGET_PORT), "slot {index} holds no endpoint");
        }
        Ok(())
    }
}

/// Returns the optimised agent that users have. The rest of the bench needs no optimisation; this
/// part would measure the unoptimised code.
pub(super) fn program() -> Result<PathBuf> {
    if let Some(path) = env::var_os("TRAFFIC_POLICY_AGENT") {
        return Ok(path.into());
    }
    let own = env::current_exe()?;
    let target = own.parent().and_then(Path::parent).context("this program is not in a target folder")?;
    let path = target.join("release/traffic-policy-agent");
    if !path.is_file() {
        bail!(
            "there is no optimised agent at {}: run this by `cargo xtask bench`, or `cargo build --release -p traffic-policy-agent` first",
            path.display()
        );
    }
    Ok(path)
}
