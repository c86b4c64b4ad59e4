//! Connections from outside, with real agents on real nodes: policies, families, protocols, attach
//! modes. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod addresses;
mod affinity;
mod big_tcp;
mod both_ways;
mod choice;
mod collision;
mod direct;
mod drain;
mod endpoints;
mod errors;
mod fallback;
mod fragments;
mod health;
mod host_network;
mod icmp;
mod jumbo;
mod local_delivery;
mod maglev;
mod matrix;
mod neighbours;
mod other_proxy;
mod overlay;
mod own_datagrams;
mod own_ports;
mod path_mtu;
mod pod_services;
mod priority_tag;
mod reject;
mod route_mtus;
mod router;
mod sctp;
mod sctp_sockets;
mod source_ranges;
mod spoofed;
mod stale_flows;
mod transfer;
mod tunnels;
mod uplinks;
