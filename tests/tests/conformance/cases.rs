//! The cases of `testdata/conformance`, each of which states the fate of its flows, as kube-proxy
//! decides it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use super::{
    deviations::{self, Origin, Policy, To},
    explain::{Fate, Flow, NODE, differences},
};

/// The content of `flows.yaml`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Case {
    local_addresses: BTreeSet<IpAddr>,
    node_port_addresses: Option<String>,
    flows: Vec<Written>,
}

/// A flow, and kube-proxy's decision on it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    src: IpAddr,
    dst: IpAddr,
    dport: u16,
    proto: String,
    verdict: String,
    #[serde(default)]
    endpoints: Vec<SocketAddr>,
    masquerade: Option<Masquerade>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Masquerade {
    Always(bool),
    ByEndpoint(BTreeMap<SocketAddr, bool>),
}

/// Fields of `objects.yaml` that decide whether kube-proxy would masquerade here.
struct Objects(Vec<Value>);

impl Objects {
    fn read(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap();
        Self(serde_yaml_ng::Deserializer::from_str(&text).map(|d| Value::deserialize(d).unwrap()).collect())
    }

    fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().filter(move |object| object["kind"] == kind)
    }

    fn is_here(&self, endpoint: IpAddr) -> bool {
        let endpoints =
            self.of_kind("EndpointSlice").filter_map(|slice| slice["endpoints"].as_array()).flatten();
        let mut of_address = endpoints.filter(|one| one["addresses"][0] == endpoint.to_string());
        of_address.any(|one| one["nodeName"] == NODE)
    }

    fn is_pod(&self, address: IpAddr) -> bool {
        let node = self.of_kind("Node").next().unwrap();
        let cidrs = node["spec"]["podCIDRs"].as_array().unwrap();
        cidrs.iter().any(|cidr| cidr.as_str().unwrap().parse::<ipnet::IpNet>().unwrap().contains(&address))
    }

    /// The destination of the flow, and the external policy there.
    fn destination(&self, flow: &Written) -> (To, Policy) {
        let dst = flow.dst.to_string();
        let named = |list: &Value, key: Option<&str>| {
            let mut items = list.as_array().into_iter().flatten();
            items.any(|item| *key.map_or(item, |key| &item[key]) == *dst)
        };
        let found = self.of_kind("Service").find_map(|service| {
            let spec = &service["spec"];
            let to = if spec["clusterIP"] == *dst {
                To::ClusterIp
            } else if named(&service["status"]["loadBalancer"]["ingress"], Some("ip")) {
                To::LoadBalancer
            } else if named(&spec["externalIPs"], None) {
                To::ExternalIp
            } else if spec["ports"].as_array().unwrap().iter().any(|port| port["nodePort"] == flow.dport) {
                To::NodePort
            } else {
                return None;
            };
            let local = spec["externalTrafficPolicy"] == "Local";
            Some((to, if local { Policy::Local } else { Policy::Cluster }))
        });
        found.unwrap_or_else(|| panic!("no Service has what {flow:?} goes to"))
    }
}

impl Case {
    fn origin(&self, address: IpAddr, objects: &Objects) -> Origin {
        if self.local_addresses.contains(&address) || address.is_loopback() {
            Origin::Node
        } else if objects.is_pod(address) {
            Origin::Pod
        } else {
            Origin::External
        }
    }

    fn fate(&self, flow: &Written, objects: &Objects) -> Fate {
        match flow.verdict.as_str() {
            _ if flow.proto == "SCTP" && self.origin(flow.src, objects) != Origin::External => {
                Fate::Unhandled
            }
            "reject" => Fate::Reject,
            "drop" => Fate::Drop,
            "unhandled" => Fate::Unhandled,
            "endpoints" => {
                let origin = self.origin(flow.src, objects);
                let (to, external) = objects.destination(flow);
                let masquerade = |endpoint: &SocketAddr| {
                    let by_kube_proxy = match flow.masquerade.as_ref().unwrap() {
                        Masquerade::Always(masquerade) => *masquerade,
                        Masquerade::ByEndpoint(masquerade) => masquerade[endpoint],
                    };
                    let here = objects.is_here(endpoint.ip());
                    deviations::masquerade(by_kube_proxy, origin, to, external, here)
                };
                let endpoints = flow.endpoints.iter();
                Fate::Endpoints(endpoints.map(|endpoint| (*endpoint, Some(masquerade(endpoint)))).collect())
            }
            other => panic!("unknown verdict {other:?}"),
        }
    }
}

fn folders() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conformance");
    let mut folders: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

#[test]
fn written_cases() {
    let mut wrong = Vec::new();
    let mut asked = 0;
    for folder in folders() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(folder.join("flows.yaml")).unwrap();
        let case: Case = serde_yaml_ng::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let objects = Objects::read(&folder.join("objects.yaml"));
        let flows: Vec<_> = case
            .flows
            .iter()
            .map(|flow| {
                let dst = SocketAddr::new(flow.dst, flow.dport);
                (Flow::new(&flow.name, flow.src, dst, &flow.proto), case.fate(flow, &objects))
            })
            .collect();
        // The folder also contains the flows, which are not a manifest.
        let manifests = tempfile::tempdir().unwrap();
        fs::copy(folder.join("objects.yaml"), manifests.path().join("objects.yaml")).unwrap();
        let mut options: Vec<String> = case
            .local_addresses
            .iter()
            .flat_map(|ip| ["--local-address".to_owned(), ip.to_string()])
            .collect();
        options.extend(
            case.node_port_addresses
                .iter()
                .flat_map(|chosen| ["--node-port-addresses", chosen])
                .map(str::to_owned),
        );
        asked += flows.len();
        let differences = differences(manifests.path(), &options, &flows);
        wrong.extend(differences.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    assert!(asked >= 146, "cases are missing");
    assert!(wrong.is_empty(), "{} of {asked} flows:\n{}", wrong.len(), wrong.join("\n"));
}
