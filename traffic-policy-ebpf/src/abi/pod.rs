//! Implementations of `aya::Pod`, by which the agent reads the layouts from maps and writes them.

use super::*;

// SAFETY: all types of this file are repr(C), made of integers, valid for any bytes, and 'static.
unsafe impl<A: Address> aya::Pod for Tuple<A> {}
// SAFETY: as above, but repr(transparent).
unsafe impl aya::Pod for Address4 {}
// SAFETY: as above.
unsafe impl aya::Pod for Address6 {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for FlowKey<A> {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for Flow<A> {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for FrontendKey<A> {}
// SAFETY: as above.
unsafe impl<const W: usize> aya::Pod for SourceRange<W> {}
// SAFETY: as above.
unsafe impl<const W: usize> aya::Pod for RoutePrefix<W> {}
// SAFETY: as above.
unsafe impl aya::Pod for Frontend {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for Slot<A> {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for SlotRoute<A> {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for DirectEndpointKey<A> {}
// SAFETY: as above.
unsafe impl aya::Pod for DirectEndpoint {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for DirectNode<A> {}
// SAFETY: as above.
unsafe impl aya::Pod for Hop {}
// SAFETY: as above.
unsafe impl aya::Pod for HopKey {}
// SAFETY: as above.
unsafe impl aya::Pod for DeviceInfo {}
// SAFETY: as above.
unsafe impl aya::Pod for PodDevice {}
// SAFETY: as above.
unsafe impl aya::Pod for RuntimeConfig {}
// SAFETY: as above.
unsafe impl aya::Pod for NodeSilence {}
// SAFETY: as above.
unsafe impl aya::Pod for RouteConfig {}
// SAFETY: as above.
unsafe impl aya::Pod for TableUsage {}
// SAFETY: as above.
unsafe impl aya::Pod for Prefilter {}
// SAFETY: as above.
unsafe impl aya::Pod for EndpointKey {}
// SAFETY: as above.
unsafe impl aya::Pod for Sweep {}
// SAFETY: as above.
unsafe impl aya::Pod for RejectBucket {}
// SAFETY: as above.
unsafe impl aya::Pod for EventBucket {}
// SAFETY: as above.
unsafe impl aya::Pod for AgentHeartbeat {}
// SAFETY: as above.
unsafe impl aya::Pod for MonitorEvent {}
// SAFETY: as above.
unsafe impl<const W: usize> aya::Pod for ServiceCidr<W> {}
// SAFETY: as above.
unsafe impl aya::Pod for AffinityKey {}
// SAFETY: as above.
unsafe impl aya::Pod for Affinity {}
// SAFETY: as above.
unsafe impl aya::Pod for ServiceInfo {}
// SAFETY: as above.
unsafe impl aya::Pod for ServiceCountKey {}
// SAFETY: as above.
unsafe impl aya::Pod for ServiceCount {}
// SAFETY: as above.
unsafe impl aya::Pod for SocketKey {}
// SAFETY: as above.
unsafe impl aya::Pod for TranslatedSocket {}
// SAFETY: as above.
unsafe impl aya::Pod for LocalNode {}
// SAFETY: as above.
unsafe impl aya::Pod for PacketTrace {}
// SAFETY: as above.
unsafe impl aya::Pod for SocketQuestion {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for Scratch<A> {}
// SAFETY: as above.
unsafe impl<A: Address> aya::Pod for FragmentKey<A> {}
// SAFETY: as above.
unsafe impl aya::Pod for Fragment {}
