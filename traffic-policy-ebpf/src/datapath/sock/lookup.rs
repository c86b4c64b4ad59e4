//! The Service look-up for a socket call. No socket is needed here: the kernel cannot test-run
//! socket hooks, so `explain` calls the same function from an XDP program.

use traffic_policy_ebpf::{
    abi::{
        Address, AffinityLookup, EndpointKey, LocalNode, NO_SERVICE, Port, REMOVED_FROM_OPENING, Slot,
        TranslatedSocket, frontend, frontend_kind, scope, step,
    },
    hash,
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    family::Family,
    lb::{Client, List, Refusal, Target, affinity, select},
    maps::{LOCAL_NODE, REMOVED_ENDPOINTS, Table},
    prefilter, trace,
    value::load,
};

/// The input of the Service look-up for a socket call.
#[derive(Clone, Copy)]
pub struct Query<A> {
    /// The address that the application names; an IPv4-mapped IPv6 address counts as IPv4.
    pub destination: A,
    pub port: Port,
    /// TCP or UDP, as an IP protocol number.
    pub protocol: u16,
    /// The address that the socket is bound to; zero if it is not bound.
    pub source: A,
    /// The cookie of the socket's network namespace, never 0.
    pub netns: u64,
    /// Whether the namespace is the node's own.
    pub node: bool,
    /// A hash that spreads connections over endpoints.
    pub hash: u64,
    /// The endpoint of the socket's earlier datagrams to this destination, or null: a conversation
    /// keeps its endpoint.
    pub had: *const TranslatedSocket,
}

/// The result. For [`Outcome::Connected`] all fields are valid, otherwise only `outcome` and
/// `service`.
#[derive(Clone, Copy)]
pub struct Translation<A> {
    /// `Connected`, an outcome that refuses (`Rejected…`, `Dropped…`), or one that passes: the call
    /// does not concern a Service.
    pub outcome: Outcome,
    /// The index of the Service port, or [`NO_SERVICE`].
    pub service: u32,
    /// The endpoint.
    pub address: A,
    pub port: Port,
    /// The endpoint's place within the list.
    pub offset: u32,
    /// The number of the endpoint's node; 0 for a conversation that keeps its endpoint, too.
    pub node: u16,
}

impl<A: Address> Translation<A> {
    #[inline(always)]
    fn none() -> Self {
        Self {
            outcome: Outcome::Passed,
            service: NO_SERVICE,
            address: A::default(),
            port: Port::NONE,
            offset: 0,
            node: 0,
        }
    }

    #[inline(always)]
    fn refused(self, refusal: Refusal) -> Self {
        let Refusal { outcome, service } = refusal;
        Self { outcome, service, ..self }
    }

    #[inline(always)]
    fn no_endpoint(self, list: &List) -> Self {
        Self { outcome: Outcome::RejectedNoEndpoint, service: list.service, ..self }
    }

    /// Fills in the endpoint in a slot of a list.
    #[inline(always)]
    fn at<F: Family<Address = A>>(self, list: &List, slot: u32) -> Self {
        let translation = Self { service: list.service, ..self };
        let Some(endpoint) = F::slots().lookup::<u32, Slot<A>>(&slot) else {
            return Self { outcome: Outcome::DroppedInternalError, ..translation };
        };
        let (address, port) = (get!(endpoint.address), get!(endpoint.port));
        let (offset, node) = (slot - list.range.base, get!(endpoint.node));
        Self { outcome: Outcome::Connected, address, port, offset, node, ..translation }
    }
}

/// Whether an address leads to the caller's own namespace: 127.0.0.0/8, ::1, and the unspecified
/// address, which the kernel treats as loopback.
#[inline(always)]
fn is_loopback<F: Family>(address: F::Address) -> bool {
    let [head, tail] = address.wide().wire();
    if F::V6 {
        return head == 0 && (tail == 0 || tail == u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 1]));
    }
    let address = head as u32;
    address == 0 || address.to_ne_bytes()[0] == 127
}

/// Returns the source that a socket without one will probably get: the node's address, or one of
/// its pods' range.
#[inline(always)]
fn usual_source<F: Family>(node: bool) -> F::Address {
    let Some(this) = LOCAL_NODE.get_ptr(0) else { return F::Address::default() };
    let this: *const LocalNode = this;
    F::narrow(if node { get!(this.primary[F::INDEX]) } else { get!(this.pods[F::INDEX]) })
}

/// Finds the endpoint of a call, or the outcome without one. `search` belongs to the caller:
/// packets that interrupt a socket call use the per-CPU one.
#[inline(always)]
pub fn decide<F: Family>(
    query: &Query<F::Address>,
    search: *mut AffinityLookup<F::Address>,
) -> Translation<F::Address> {
    let mut translation = Translation::none();
    if !prefilter::may_be_service::<F>(query.destination, query.port) {
        trace::note(step::FILTER, prefilter::Match::No as u32, [0; 2]);
        return translation;
    }
    let mut target = Target {
        address: query.destination,
        port: query.port,
        protocol: query.protocol,
        scope: scope::ADDRESS,
    };
    if is_loopback::<F>(query.destination) {
        // The loopback addresses of a pod belong to the pod.
        if !query.node {
            trace::note(step::OWN_LOOPBACK, 0, [0; 2]);
            translation.outcome = Outcome::PassedNotService;
            return translation;
        }
        target.address = F::Address::default();
        target.scope = scope::NODE_PORT;
        let found = select::frontend::<F>(&target).cast_const();
        if !found.is_null() && frontend::kind(get!(found.flags)) != frontend_kind::LOOPBACK {
            trace::note(step::NO_FRONTEND, Outcome::PassedNotService as u32, [0; 2]);
            translation.outcome = Outcome::PassedNotService;
            return translation;
        }
    }
    let had = query.had;
    if is_continued::<F>(query, &target) {
        translation.outcome = Outcome::Connected;
        translation.service = get!(had.service);
        (translation.address, translation.port) = (F::narrow(get!(had.address)), get!(had.port));
        translation.offset = get!(had.offset);
        return translation;
    }
    let mut client = Client { source: query.source, netns: query.netns, of_pod: false, hash: query.hash };
    if client.source == F::Address::default() {
        client.source = usual_source::<F>(query.node);
    }
    let list = match select::list::<F>(&target, &client) {
        Ok(list) => list,
        Err(refusal) => return translation.refused(refusal),
    };
    if list.range.len == 0 {
        return translation.no_endpoint(&list);
    }
    let offset = conversation::<F>(query, &list, search);
    let slot = if offset == affinity::NONE {
        select::slot::<F>(&list, &client, search)
    } else {
        list.range.base + offset
    };
    let translation = translation.at::<F>(&list, slot);
    // A process may be suspended for long between two instructions; meanwhile the frontend that it
    // has looked up, or the slots, may be rewritten for another Service.
    if select::holds::<F>(&target, &list) {
        return translation;
    }
    // One retry is enough, because two such pauses would be needed to get a wrong result; and any
    // endpoint will do. Looking for the client's earlier endpoint again would multiply the
    // verifier's work by ten.
    let translation = Translation::none();
    match select::list::<F>(&target, &client) {
        Err(refusal) => translation.refused(refusal),
        Ok(list) if list.range.len == 0 => translation.no_endpoint(&list),
        Ok(list) => {
            let slot = list.range.base + hash::pick(client.hash, list.range.len);
            translation.at::<F>(&list, slot)
        }
    }
}

/// The seconds for which an unconnected socket's conversation keeps its endpoint after its last
/// datagram: as long as conntrack keeps an answered UDP flow (`nf_conntrack_udp_timeout_stream`).
const CONVERSATION: u32 = 120;

/// Whether a conversation keeps its endpoint whatever has become of lists, policies and source
/// ranges: those apply to new conversations. It ends with its time-out, with its Service, and when
/// its endpoint stops serving.
#[inline(always)]
fn is_continued<F: Family>(query: &Query<F::Address>, target: &Target<F::Address>) -> bool {
    let had = query.had;
    if had.is_null() {
        return false;
    }
    let (service, used) = (get!(had.service), get!(had.used));
    if used == 0 || clock::seconds().wrapping_sub(used) > CONVERSATION {
        return false;
    }
    let found = select::frontend::<F>(target);
    // Services with affinity keep track of their clients' endpoints themselves.
    if found.is_null() || (get!(found.service) != service || get!(found.affinity) != 0) {
        return false;
    }
    let endpoint = EndpointKey {
        address: get!(had.address),
        port: get!(had.port),
        protocol: query.protocol as u8,
        ipv6: F::V6 as u8,
        service,
    };
    let removed = Table::of(&raw const REMOVED_ENDPOINTS).lookup::<_, u32>(&endpoint);
    removed.is_none_or(|from| load(from) == REMOVED_FROM_OPENING)
}

/// Returns the place of this conversation's endpoint within the list, [`affinity::NONE`] without
/// one. Services with affinity keep track of it themselves.
#[inline(always)]
fn conversation<F: Family>(
    query: &Query<F::Address>,
    list: &List,
    search: *mut AffinityLookup<F::Address>,
) -> u32 {
    let had = query.had;
    if had.is_null() || get!((list.frontend).affinity) != 0 {
        return affinity::NONE;
    }
    affinity::find::<F>(list, F::narrow(get!(had.address)), get!(had.port), get!(had.offset), search)
}
