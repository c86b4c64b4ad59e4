//! The socket programs, for processes of this node and its pods: the destination is translated to
//! an endpoint before any packet is built, and the application sees the address that it named.

pub mod addr;
pub mod explain;
pub mod lookup;
pub mod map;
pub mod ops;

use core::ptr;

use aya_ebpf::helpers::bpf_get_prandom_u32;
use traffic_policy_ebpf::{
    abi::{
        Address, Address4, AffinityLookup, PROTOCOL_TCP, PROTOCOL_UDP, Port, Ports, SocketKey,
        TranslatedSocket, Tuple, hook,
    },
    outcome::Outcome,
};

use crate::datapath::{
    clock, counters,
    events::{self, NewEvent},
    family::{Family, V4, V6},
    maps::{ANY, LOCAL_NODE, Table},
    node_silence, prefilter,
    sock::{
        addr::{Call, Closing, Named},
        lookup::{Query, Translation},
    },
};

/// The verdicts of socket hooks.
const DENY: i32 = 0;
const ALLOW: i32 = 1;

/// A call that names a destination.
struct DestinationCall<A> {
    call: Call,
    destination: A,
    /// The bound source address; zero if the socket is not bound.
    source: A,
    /// Whether the socket is being connected; otherwise it sends one datagram.
    connects: bool,
}

/// The verdict on a call, and its new destination.
struct CallVerdict<A> {
    verdict: i32,
    /// Whether `address` and `port` are an endpoint's.
    translated: bool,
    address: A,
    port: Port,
}

impl<A: Address> CallVerdict<A> {
    #[inline(always)]
    fn none(verdict: i32) -> Self {
        Self { verdict, translated: false, address: A::default(), port: Port::NONE }
    }
}

impl<A: Address> DestinationCall<A> {
    #[inline(always)]
    fn translate<F: Family<Address = A>>(&self) -> CallVerdict<A> {
        let call = self.call;
        let (protocol, port) = (call.protocol(), call.port());
        if protocol == 0 || !prefilter::may_be_service::<F>(self.destination, port) {
            return CallVerdict::none(ALLOW);
        }
        let netns = call.netns();
        let node = LOCAL_NODE.get_ptr(0).is_some_and(|node| get!(node.netns) == netns);
        let mut key = SocketKey {
            cookie: call.cookie(),
            address: self.destination.wide(),
            port,
            protocol: protocol as u8,
            forward: 1,
            ipv6: F::V6 as u32,
        };
        let connected = protocol == PROTOCOL_UDP && call.is_connected();
        if connected && !self.connects {
            let peer = map::named_key(key.cookie, protocol, call.peer(), call.peer_port());
            let shown = map::table_of(protocol, true).lookup::<_, TranslatedSocket>(&peer);
            // The kernel lets a connected socket receive from its peer only, so a datagram to the
            // address that was passed to connect() must go to the same endpoint.
            if peer.ipv6 == key.ipv6
                && shown
                    .is_some_and(|shown| (get!(shown.address) == key.address && get!(shown.port) == key.port))
            {
                let address = F::narrow(peer.address);
                return CallVerdict { verdict: ALLOW, translated: true, address, port: peer.port };
            }
        }
        let had = if self.connects {
            ptr::null_mut()
        } else {
            map::table_of(protocol, false).lookup::<_, TranslatedSocket>(&key).unwrap_or(ptr::null_mut())
        };
        // SAFETY: a helper of the kernel without arguments.
        let hash = unsafe { bpf_get_prandom_u32() } as u64;
        let query = Query {
            destination: self.destination,
            port,
            protocol: protocol as u16,
            source: self.source,
            netns,
            node,
            hash,
            had,
        };
        // Initialized: the verifier may require this for memory passed to a global function.
        let mut search = AffinityLookup::default();
        let translation = lookup::decide::<F>(&query, &raw mut search);
        match translation.outcome {
            Outcome::Connected => {}
            Outcome::Passed | Outcome::PassedNotService => return CallVerdict::none(ALLOW),
            refused => {
                self.note::<F>(refused, netns, &translation);
                call.fail(refused, protocol);
                return CallVerdict::none(DENY);
            }
        }
        if self.connects {
            self.note::<F>(Outcome::Connected, netns, &translation);
            if connected {
                // The socket gets another peer; the entry of this one is not needed again.
                let peer = map::named_key(key.cookie, protocol, call.peer(), call.peer_port());
                map::table_of(protocol, true).remove(&peer);
            }
            self.note_peer(&mut key, netns, &translation);
            if protocol == PROTOCOL_TCP {
                // The SYN leaves as soon as this call returns.
                node_silence::note_syn(translation.node, clock::jiffies());
            }
        } else {
            self.note_conversation::<F>(&mut key, netns, &translation, had);
        }
        CallVerdict { verdict: ALLOW, translated: true, address: translation.address, port: translation.port }
    }

    /// Counts a refusal or a new conversation, and emits the event.
    #[inline(always)]
    fn note<F: Family<Address = A>>(&self, outcome: Outcome, netns: u64, translation: &Translation<A>) {
        counters::count_call(outcome);
        counters::add(translation.service, outcome, 1, 0, 0);
        events::emit::<F>(|| NewEvent {
            hook: hook::SOCKET,
            outcome,
            service: translation.service,
            ifindex: 0,
            netns,
            tuple: Tuple {
                source: self.source,
                destination: self.destination,
                ports: Ports::new(Port::NONE, self.call.port()),
                protocol: self.call.protocol(),
            },
            endpoint: if outcome as u32 == Outcome::Connected as u32 {
                (translation.address, translation.port)
            } else {
                (A::default(), Port::NONE)
            },
        });
    }

    /// Notes the reverse translation: the address that the application is to see instead of the
    /// endpoint. Turns `key` into that of this entry.
    #[inline(always)]
    fn note_peer(&self, key: &mut SocketKey, netns: u64, translation: &Translation<A>) {
        let value = TranslatedSocket {
            address: key.address,
            port: key.port,
            node: translation.node,
            service: translation.service,
            netns,
            offset: 0,
            used: 0,
        };
        map::reverse(key, translation);
        // A full map evicts the oldest entry; any other failure shows the application the
        // endpoint's address.
        map::table_of(key.protocol as u32, self.connects).insert(key, &raw const value, ANY);
    }

    /// Notes both directions of an unconnected socket's conversation. While it stays unchanged,
    /// only the time is written, once a second.
    #[inline(always)]
    fn note_conversation<F: Family<Address = A>>(
        &self,
        key: &mut SocketKey,
        netns: u64,
        translation: &Translation<A>,
        had: *mut TranslatedSocket,
    ) {
        let sockets = map::table_of(PROTOCOL_UDP, false);
        let (address, port) = (translation.address.wide(), translation.port);
        let used = clock::seconds();
        if !had.is_null() && (get!(had.address) == address && get!(had.port) == port) {
            if get!(had.offset) != translation.offset {
                set!(had.offset = translation.offset);
            }
            if get!(had.service) != translation.service {
                set!(had.service = translation.service);
            }
            if get!(had.used) != used {
                set!(had.used = used);
            }
        } else {
            self.note::<F>(Outcome::Connected, netns, translation);
            let value = TranslatedSocket {
                address,
                port,
                node: 0,
                service: translation.service,
                netns,
                offset: translation.offset,
                used,
            };
            sockets.insert(&*key, &raw const value, ANY);
        }
        let mut back = *key;
        map::reverse(&mut back, translation);
        let shown = sockets.lookup::<_, TranslatedSocket>(&back);
        // The kernel may have evicted this entry. If two Services share an endpoint, its answers
        // show the one that was addressed last.
        if shown.is_none_or(|shown| (get!(shown.address) != key.address || get!(shown.port) != key.port)) {
            self.note_peer(key, netns, translation);
        }
    }
}

#[inline(always)]
fn to4(call: Call, source: Address4, connects: bool) -> i32 {
    let translate = DestinationCall { call, destination: call.ip4(), source, connects }.translate::<V4>();
    if translate.translated {
        call.set4(translate.address, translate.port);
    }
    translate.verdict
}

#[inline(always)]
pub fn connect4(call: Call) -> i32 {
    to4(call, call.bound4(), true)
}

/// Handles sendmsg of IPv4 sockets, and of IPv6 sockets that name an IPv4-mapped address.
#[inline(always)]
pub fn sendmsg4(call: Call) -> i32 {
    to4(call, call.source4(), false)
}

#[inline(always)]
pub fn connect6(call: Call) -> i32 {
    match call.ip6() {
        Named::V4(destination) => {
            let source = call.bound6().v4();
            let translate = DestinationCall { call, destination, source, connects: true }.translate::<V4>();
            if translate.translated {
                call.set_mapped(translate.address, translate.port);
            }
            translate.verdict
        }
        Named::V6(destination) => {
            let source = call.bound6().v6();
            let translate = DestinationCall { call, destination, source, connects: true }.translate::<V6>();
            if translate.translated {
                call.set6(translate.address, translate.port);
            }
            translate.verdict
        }
    }
}

/// Handles sendmsg of IPv6 sockets, never with an IPv4-mapped address: the kernel calls
/// [`sendmsg4`] for those (`udpv6_sendmsg`).
/// <https://github.com/torvalds/linux/blob/v6.1/net/ipv6/udp.c>
#[inline(always)]
pub fn sendmsg6(call: Call) -> i32 {
    let Named::V6(destination) = call.ip6() else { return ALLOW };
    let source = call.source6().v6();
    let translate = DestinationCall { call, destination, source, connects: false }.translate::<V6>();
    if translate.translated {
        call.set6(translate.address, translate.port);
    }
    translate.verdict
}

/// Returns the address that the application named, if the peer is the endpoint of a translated
/// call; otherwise null.
#[inline(always)]
fn peer<F: Family>(
    call: Call,
    sockets: Table,
    protocol: u32,
    address: F::Address,
) -> *const TranslatedSocket {
    let key = map::peer_key::<F>(call.cookie(), protocol, address, call.port());
    sockets.lookup::<_, TranslatedSocket>(&key).map_or(ptr::null(), <*mut TranslatedSocket>::cast_const)
}

#[inline(always)]
fn show4(call: Call, sockets: Table, protocol: u32) {
    let socket = peer::<V4>(call, sockets, protocol, call.ip4());
    if !socket.is_null() {
        call.set4(V4::narrow(get!(socket.address)), get!(socket.port));
    }
}

#[inline(always)]
fn show6(call: Call, sockets: Table, protocol: u32) {
    match call.ip6() {
        Named::V4(address) => {
            let socket = peer::<V4>(call, sockets, protocol, address);
            if !socket.is_null() {
                call.set_mapped(V4::narrow(get!(socket.address)), get!(socket.port));
            }
        }
        Named::V6(address) => {
            let socket = peer::<V6>(call, sockets, protocol, address);
            if !socket.is_null() {
                call.set6(V6::narrow(get!(socket.address)), get!(socket.port));
            }
        }
    }
}

#[inline(always)]
pub fn recvmsg4(call: Call) -> i32 {
    if prefilter::is_endpoint(call.port()) {
        show4(call, map::table_of(PROTOCOL_UDP, call.is_connected()), PROTOCOL_UDP);
    }
    ALLOW
}

#[inline(always)]
pub fn recvmsg6(call: Call) -> i32 {
    if prefilter::is_endpoint(call.port()) {
        show6(call, map::table_of(PROTOCOL_UDP, call.is_connected()), PROTOCOL_UDP);
    }
    ALLOW
}

#[inline(always)]
pub fn getpeername4(call: Call) -> i32 {
    let protocol = call.protocol();
    show4(call, map::table_of(protocol, true), protocol);
    ALLOW
}

#[inline(always)]
pub fn getpeername6(call: Call) -> i32 {
    let protocol = call.protocol();
    show6(call, map::table_of(protocol, true), protocol);
    ALLOW
}

/// Removes the entry of a connected socket that is closed: its peer is not looked up again.
#[inline(always)]
pub fn release(closing: Closing) -> i32 {
    let (protocol, port) = (closing.protocol(), closing.port());
    if protocol != 0 && prefilter::is_endpoint(port) {
        let key = map::named_key(closing.cookie(), protocol, closing.peer(), port);
        map::table_of(protocol, true).remove(&key);
    }
    ALLOW
}
