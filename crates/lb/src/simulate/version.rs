//! Versions of the objects.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use crate::judge::Standpoint;

/// The consequences of one version of the objects, and the pods by their addresses in it.
#[derive(Debug)]
pub(super) struct Version {
    pub(super) standpoint: Standpoint,
    pub(super) pods: HashMap<IpAddr, usize>,
    /// The machines with endpoints that serve.
    pub(super) hosts: BTreeSet<usize>,
    /// The machines whose agents have said that they will go.
    pub(super) leaving: BTreeSet<usize>,
}
