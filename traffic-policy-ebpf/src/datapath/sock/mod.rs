//! Calls of sockets of this node and its pods: the destination is exchanged for an endpoint before any packet is made, and
//! the application sees the address that it named.

pub mod addr;
pub mod explain;
pub mod lookup;
pub mod map;

use core::{mem::MaybeUninit, ptr};

use aya_ebpf::helpers::bpf_get_prandom_u32;
use traffic_policy_ebpf::{
    abi::{Address, PROTOCOL_UDP, Search, Socket, SocketKey, Tuple, hook, ports},
    outcome::Outcome,
};

use crate::datapath::{
    clock, counters,
    events::{self, Notice},
    family::{Family, V4, V6},
    maps::{ANY, NODE, Table},
    prefilter,
    sock::{
        addr::{Call, Closing, Named},
        lookup::{Decision, Question},
    },
};

/// Verdicts of socket hooks.
const REFUSE: i32 = 0;
const GO_ON: i32 = 1;

/// A call that names a destination.
struct Destined<A> {
    call: Call,
    destination: A,
    /// Zero if the socket is not bound.
    source: A,
    /// The socket is being connected; else it sends one datagram.
    connects: bool,
}

/// Where a call goes.
struct Exchange<A> {
    verdict: i32,
    /// The endpoint holds.
    exchanged: bool,
    address: A,
    port: u16,
}

impl<A: Address> Exchange<A> {
    #[inline(always)]
    fn none(verdict: i32) -> Self {
        Self { verdict, exchanged: false, address: A::default(), port: 0 }
    }
}

impl<A: Address> Destined<A> {
    #[inline(always)]
    fn exchange<F: Family<Address = A>>(&self) -> Exchange<A> {
        let call = self.call;
        let (protocol, port) = (call.protocol(), call.port());
        if protocol == 0 || !prefilter::concerns::<F>(self.destination, port) {
            return Exchange::none(GO_ON);
        }
        let netns = call.netns();
        let node = NODE.get_ptr(0).is_some_and(|node| unsafe { (*node).netns } == netns);
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
            let shown = map::noted(protocol, true).lookup::<_, Socket>(&peer);
            // The kernel lets a connected socket hear its peer only, so that a datagram which names the same address as
            // connect() did must go to the same endpoint.
            if peer.ipv6 == key.ipv6
                && shown.is_some_and(|shown| unsafe {
                    (*shown).address == key.address && (*shown).port == key.port
                })
            {
                let address = F::narrow(peer.address);
                return Exchange { verdict: GO_ON, exchanged: true, address, port: peer.port };
            }
        }
        let had = if self.connects {
            ptr::null_mut()
        } else {
            map::noted(protocol, false).lookup::<_, Socket>(&key).unwrap_or(ptr::null_mut())
        };
        let question = Question {
            destination: self.destination,
            port,
            protocol: protocol as u16,
            source: self.source,
            netns,
            node,
            hash: unsafe { bpf_get_prandom_u32() } as u64,
            had,
        };
        let mut search = MaybeUninit::<Search<A>>::uninit();
        let decision = lookup::decide::<F>(&question, search.as_mut_ptr());
        match decision.outcome {
            Outcome::Connected => {}
            Outcome::Passed | Outcome::PassedNotService => return Exchange::none(GO_ON),
            refused => {
                self.note::<F>(refused, netns, &decision);
                call.fail(refused, protocol);
                return Exchange::none(REFUSE);
            }
        }
        if self.connects {
            self.note::<F>(Outcome::Connected, netns, &decision);
            if connected {
                // It gets another peer; nobody will ask for this one again.
                let peer = map::named_key(key.cookie, protocol, call.peer(), call.peer_port());
                map::noted(protocol, true).remove(&peer);
            }
            self.note_peer(&mut key, netns, &decision);
        } else {
            self.note_conversation::<F>(&mut key, netns, &decision, had);
        }
        Exchange { verdict: GO_ON, exchanged: true, address: decision.address, port: decision.port }
    }

    /// Counts a refusal or a new conversation, and tells whoever listens.
    #[inline(always)]
    fn note<F: Family<Address = A>>(&self, outcome: Outcome, netns: u64, decision: &Decision<A>) {
        counters::count_call(outcome);
        counters::add(decision.service, outcome, 1, 0, 0);
        events::tell::<F>(|| Notice {
            hook: hook::SOCKET,
            outcome,
            service: decision.service,
            ifindex: 0,
            netns,
            tuple: Tuple {
                source: self.source,
                destination: self.destination,
                ports: ports(0, self.call.port()),
                protocol: self.call.protocol(),
            },
            endpoint: if outcome as u32 == Outcome::Connected as u32 {
                (decision.address, decision.port)
            } else {
                (A::default(), 0)
            },
        });
    }

    /// The way back: what the application is to see instead of the endpoint. Turns `key` into that of this entry.
    #[inline(always)]
    fn note_peer(&self, key: &mut SocketKey, netns: u64, decision: &Decision<A>) {
        let value = Socket {
            address: key.address,
            port: key.port,
            zero: 0,
            service: decision.service,
            netns,
            offset: 0,
            used: 0,
        };
        map::reverse(key, decision);
        // A full map lets go of the oldest entry; any other failure shows the application the endpoint's address.
        map::noted(key.protocol as u32, self.connects).insert(key, &raw const value, ANY);
    }

    /// Both ways of an unconnected socket's conversation. While it stays as it is, only the time is written, once a
    /// second.
    #[inline(always)]
    fn note_conversation<F: Family<Address = A>>(
        &self,
        key: &mut SocketKey,
        netns: u64,
        decision: &Decision<A>,
        had: *mut Socket,
    ) {
        let sockets = map::noted(PROTOCOL_UDP, false);
        let (address, port) = (decision.address.wide(), decision.port);
        let used = clock::seconds();
        if !had.is_null() && unsafe { (*had).address == address && (*had).port == port } {
            unsafe {
                if (*had).offset != decision.offset {
                    (*had).offset = decision.offset;
                }
                if (*had).service != decision.service {
                    (*had).service = decision.service;
                }
                if (*had).used != used {
                    (*had).used = used;
                }
            }
        } else {
            self.note::<F>(Outcome::Connected, netns, decision);
            let value = Socket {
                address,
                port,
                zero: 0,
                service: decision.service,
                netns,
                offset: decision.offset,
                used,
            };
            sockets.insert(&*key, &raw const value, ANY);
        }
        let mut back = *key;
        map::reverse(&mut back, decision);
        let shown = sockets.lookup::<_, Socket>(&back);
        // The kernel may have let go of this entry. Where two Services share an endpoint, its answers show the one that was
        // asked last.
        if shown.is_none_or(|shown| unsafe { (*shown).address != key.address || (*shown).port != key.port }) {
            self.note_peer(key, netns, decision);
        }
    }
}

#[inline(always)]
fn to4(call: Call, source: u32, connects: bool) -> i32 {
    let exchange = Destined { call, destination: call.ip4(), source, connects }.exchange::<V4>();
    if exchange.exchanged {
        call.set4(exchange.address, exchange.port);
    }
    exchange.verdict
}

#[inline(always)]
pub fn connect4(call: Call) -> i32 {
    to4(call, call.bound4(), true)
}

/// Also of IPv6 sockets that name an IPv4-mapped address.
#[inline(always)]
pub fn sendmsg4(call: Call) -> i32 {
    to4(call, call.source4(), false)
}

#[inline(always)]
pub fn connect6(call: Call) -> i32 {
    match call.ip6() {
        Named::V4(destination) => {
            let source = call.bound6().v4();
            let exchange = Destined { call, destination, source, connects: true }.exchange::<V4>();
            if exchange.exchanged {
                call.set_mapped(exchange.address, exchange.port);
            }
            exchange.verdict
        }
        Named::V6(destination) => {
            let source = call.bound6().v6();
            let exchange = Destined { call, destination, source, connects: true }.exchange::<V6>();
            if exchange.exchanged {
                call.set6(exchange.address, exchange.port);
            }
            exchange.verdict
        }
    }
}

/// Never with an IPv4-mapped address: the kernel turns to [`sendmsg4`] for those (`udpv6_sendmsg`).
/// <https://github.com/torvalds/linux/blob/v6.1/net/ipv6/udp.c>
#[inline(always)]
pub fn sendmsg6(call: Call) -> i32 {
    let Named::V6(destination) = call.ip6() else { return GO_ON };
    let source = call.source6().v6();
    let exchange = Destined { call, destination, source, connects: false }.exchange::<V6>();
    if exchange.exchanged {
        call.set6(exchange.address, exchange.port);
    }
    exchange.verdict
}

/// What the application named, where the other end is an endpoint that it was exchanged for; or null.
#[inline(always)]
fn peer<F: Family>(call: Call, sockets: Table, protocol: u32, address: F::Address) -> *const Socket {
    let key = map::peer_key::<F>(call.cookie(), protocol, address, call.port());
    sockets.lookup::<_, Socket>(&key).map_or(ptr::null(), <*mut Socket>::cast_const)
}

#[inline(always)]
fn show4(call: Call, sockets: Table, protocol: u32) {
    let socket = peer::<V4>(call, sockets, protocol, call.ip4());
    if !socket.is_null() {
        unsafe { call.set4(V4::narrow((*socket).address), (*socket).port) };
    }
}

#[inline(always)]
fn show6(call: Call, sockets: Table, protocol: u32) {
    match call.ip6() {
        Named::V4(address) => {
            let socket = peer::<V4>(call, sockets, protocol, address);
            if !socket.is_null() {
                unsafe { call.set_mapped(V4::narrow((*socket).address), (*socket).port) };
            }
        }
        Named::V6(address) => {
            let socket = peer::<V6>(call, sockets, protocol, address);
            if !socket.is_null() {
                unsafe { call.set6(V6::narrow((*socket).address), (*socket).port) };
            }
        }
    }
}

#[inline(always)]
pub fn recvmsg4(call: Call) -> i32 {
    if prefilter::is_endpoint(call.port()) {
        show4(call, map::noted(PROTOCOL_UDP, call.is_connected()), PROTOCOL_UDP);
    }
    GO_ON
}

#[inline(always)]
pub fn recvmsg6(call: Call) -> i32 {
    if prefilter::is_endpoint(call.port()) {
        show6(call, map::noted(PROTOCOL_UDP, call.is_connected()), PROTOCOL_UDP);
    }
    GO_ON
}

#[inline(always)]
pub fn getpeername4(call: Call) -> i32 {
    let protocol = call.protocol();
    show4(call, map::noted(protocol, true), protocol);
    GO_ON
}

#[inline(always)]
pub fn getpeername6(call: Call) -> i32 {
    let protocol = call.protocol();
    show6(call, map::noted(protocol, true), protocol);
    GO_ON
}

/// A connected socket is closed: nobody will ask for its peer again.
#[inline(always)]
pub fn release(closing: Closing) -> i32 {
    let (protocol, port) = (closing.protocol(), closing.port());
    if protocol != 0 && prefilter::is_endpoint(port) {
        let key = map::named_key(closing.cookie(), protocol, closing.peer(), port);
        map::noted(protocol, true).remove(&key);
    }
    GO_ON
}
