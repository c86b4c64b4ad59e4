//! Addresses of Services.

use std::net::IpAddr;

use super::service::Service;
use crate::lab::Family;

/// The address that a load balancer announces.
pub fn vip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [203, 0, 113, 9].into(),
        Family::V6 => [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 9].into(),
    }
}

/// The n-th address of the ranges of ClusterIPs.
pub fn cluster_ip(number: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 96, 0, number].into(),
        Family::V6 => [0xfd00, 0x10, 0x96, 0, 0, 0, 0, number.into()].into(),
    }
}

impl Service {
    /// Makes the Service type LoadBalancer, with the address of [`vip`] in both families.
    pub fn announced(self) -> Self {
        Family::BOTH.into_iter().fold(self, |service, family| service.vip(vip(family)))
    }

    /// Gives the Service the n-th ClusterIP of both families.
    pub fn cluster_ips(self, number: u8) -> Self {
        Family::BOTH.into_iter().fold(self, |service, family| service.cluster_ip(cluster_ip(number, family)))
    }
}
