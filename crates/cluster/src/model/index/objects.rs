//! Storage of each kind of object in an [`Index`].

use std::sync::Arc;

use super::{Index, Indexed};
use crate::model::{
    ServiceName,
    object::{EndpointSlice, Node, Service, ServiceCidr},
};

impl Indexed for Service {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.dirty.insert(self.name.clone());
        index.recent.note(&self.name, !index.services.contains_key(&self.name));
        index.services.insert(self.name.clone(), self);
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        let found = index.services.remove(name).is_some();
        if found {
            index.dirty.insert(name.clone());
            index.recent.forget(name);
        }
        found
    }

    fn name(&self) -> ServiceName {
        self.name.clone()
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.services.keys().cloned().collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.services.get(&self.name) == Some(self)
    }
}

impl Indexed for EndpointSlice {
    fn apply(self, index: &mut Index) -> bool {
        let name = self.name.clone();
        let service = self.service_name();
        match index.slices.get(&name) {
            Some(old) if *old == self => return false,
            // The label may name another Service now.
            Some(old) if old.service != self.service => {
                Self::delete(&name, index);
            }
            _ => {}
        }
        for node in self.endpoints.iter().filter_map(|endpoint| endpoint.node_name.as_deref()) {
            let slices = &index.slices;
            Arc::make_mut(&mut index.context.numbers).assign(node, || {
                let endpoints = slices.values().flat_map(|slice| &slice.endpoints);
                endpoints.filter_map(|endpoint| endpoint.node_name.as_deref()).collect()
            });
        }
        index.dirty.insert(service.clone());
        index.slices_of.insert((service, name.clone()));
        index.slices.insert(name, self);
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        let Some(old) = index.slices.remove(name) else { return false };
        let service = old.service_name();
        index.slices_of.remove(&(service.clone(), name.clone()));
        index.dirty.insert(service);
        true
    }

    fn name(&self) -> ServiceName {
        self.name.clone()
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.slices.keys().cloned().collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.slices.get(&self.name) == Some(self)
    }
}

impl Indexed for Node {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.nodes.insert(self.name.clone(), self);
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        let Some(node) = index.nodes.remove(&name.name) else { return false };
        index.deleted_nodes.insert(node.name.clone(), node);
        true
    }

    fn name(&self) -> ServiceName {
        ServiceName { namespace: String::new(), name: self.name.clone() }
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.nodes.keys().map(|name| ServiceName { namespace: String::new(), name: name.clone() }).collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.nodes.get(&self.name) == Some(self)
    }
}

impl Indexed for ServiceCidr {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.service_cidrs.insert(self.name.clone(), self);
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        index.service_cidrs.remove(&name.name).is_some()
    }

    fn name(&self) -> ServiceName {
        ServiceName { namespace: String::new(), name: self.name.clone() }
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.service_cidrs.values().map(Self::name).collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.service_cidrs.get(&self.name) == Some(self)
    }
}
