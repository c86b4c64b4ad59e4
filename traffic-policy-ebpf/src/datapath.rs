//! The packet path.
//!
//! The path of a packet. Each block is a file with programs ([`reject`] a folder); an arrow to a
//! number is a tail call. Headers of variable length and ICMP errors have a program each, 1a and
//! 1b. In XDP "too long" is left to TC, where the error is sent.
//!
//! ```text
//!  XDP, then TC ingress for what XDP passed           TC egress
//!
//!  fast_path                                          egress
//!   │ parse::fixed ─── no ports there ─────► 1a, 1b    │ parse::fixed ─── no ports there ───────────► 1a, 1b
//!   │                  within another packet ► 4, 5    │
//!   │ prefilter ────── not a Service packet ► stack    │ prefilter ────── not an endpoint's port ───► wire
//!   │ flow::table ──── no flow, SYN, FIN … ► 2         │ flow::table, flow::established
//!   │ forward ──────── resolved long ago ──► 2         │ forward: the source becomes the frontend
//!   │ flow::established, does not continue ► 2         │ forward::through_front: or to the node in front
//!   │ forward, or forward::enclose: TTL, MTU ► 3       │ came by another device: by 1a, and out of the one that
//!   ▼                 may be fragmented ───► 2         ▼   routing names for the new source; too long for it: 3
//!  endpoint on another node, client (redirected),     wire
//!  or the stack for an endpoint here
//!
//!  1a variable_headers: IPv4 options, IPv6 extension headers, fragments, SCTP
//!     │ parse::variable, forward::fragment; later fragments forwarded here, incoming others ► 2
//!  1b icmp_errors: ICMP errors about a flow's packets
//!     │ parse::icmp_error, flow::table or lb::owners, forward with forward::icmp, or forward::direct;
//!     │ about an outer packet of this node: forward::outer_error
//!  2 slow_path
//!     │ flow::table ───── found: flow::state advances it
//!     │ own ───────────── answer to a datagram of the node's own ───────────────────────── stack
//!     │ lb::select ────── frontend, source ranges, policy, affinity, endpoint ─────── none ─► 3
//!     │                   a source that no packet from outside can have ─────────────── yes ► 3
//!     │ lb::owners ────── endpoint of a connection that is not known here ─────────── none ─► 3, or stack
//!     │ forward::nexthop  route of the endpoint; FIB, neighbour ───────────────────── none ─► 3, or TC
//!     │ flow::new_flow ── both entries; flow::snat_port: source port ──────────────── none ─► 3
//!     ▼ forward, or forward::direct: TTL or MTU exceeded ───────────────────────────────────► 3
//!  3 reject: ICMP error or RST to the sender, or drop; the Service's count, the event
//!  4 open: a packet that another node has sent to an endpoint here; TC alone
//!     │ forward::outer ── not from a node ──────────────────────────────────────────────── stack
//!     │                   not to an endpoint here ──────────────────────────────────────────► 5
//!     │ flow::table, flow::established: an established flow, to the endpoint
//!     ▼ others with their endpoint given, or sent on by lb::owners ─────────────────────────► 2, 1a, 1b
//!  5 open_reply: a reply that an endpoint's node has sent to this one, the node in front; XDP, then TC
//!     │ forward::outer, lb::select: not from a node, or of no such frontend ────────────── stack
//!     ▼ forward::client_hop, forward::nexthop: to the client, never to the stack
//!
//!  connect, sendmsg, recvmsg, getpeername of local processes: sock → prefilter → sock::lookup → lb::select
//!  sock_ops of their TCP connections: sock::ops → node_silence
//!  Started by the agent: flow::gc, clock, sock::explain
//! ```
//!
//! Every program for packets ends in [`verdict::finish`]. Programs that the drawing names:
//!
//! - [`fast_path`]: entry of XDP and TC ingress; an established packet needs nothing else.
//! - [`l3_ingress`]: entry of TC ingress on devices without Ethernet; leads to the entry of the
//!   others.
//! - [`slow_path`]: finds or creates the flow of a packet, then forwards it.
//! - [`priority_tag`]: frames of VLAN 0, which are equivalent to untagged ones; leads to the entry
//!   of TC ingress.
//! - [`split`]: IPv4 packets that are too long for the outgoing device and may be fragmented, in
//!   two pieces.
//! - [`variable_headers`]: packets with IPv4 options or IPv6 extension headers, fragments, and
//!   SCTP. [`no_sctp`]: SCTP on a node that serves none.
//! - [`icmp_errors`]: ICMP errors about packets of flows.
//! - [`open`]: packets that other nodes have sent directly to endpoints of this one.
//!   [`open_reply`]: replies that they have sent back through this node in front.
//! - [`egress`]: replies of endpoints on this node. [`pod`]: those of assured flows, sent from
//!   where they leave their pod.
//! - [`reject`]: rejected and dropped packets; token bucket of the answers. [`reject::v4`],
//!   [`reject::v6`]: the answers.
//! - [`sock`]: socket programs. [`sock::addr`]: their context; [`sock::lookup`]: the Service
//!   lookup; [`sock::map`]: keys of the socket maps; [`sock::ops`]: connections that are answered;
//!   [`sock::explain`]: a socket call evaluated for `explain`.
//! - [`flow::gc`]: removes expired flows.
//!
//! Shared parts:
//!
//! - [`parse`]: the parsed packet. [`parse::fixed`]: headers where nearly all packets have them;
//!   [`parse::variable`]: IPv4 options and fragments; [`parse::ipv6_ext`]: the walk over IPv6
//!   extension headers; [`parse::icmp_error`]: an ICMP error and the packet in it.
//! - [`prefilter`]: bit arrays that tell whether a packet or a call may concern a Service.
//! - [`node_silence`]: nodes that have stopped answering.
//! - [`own`]: the node's own traffic on ports that Services use, too.
//! - [`pod_client`]: what pods send to Services, where their sockets are not seen.
//! - [`lb`]: types of load balancing. [`lb::select`]: frontend, sources, policy, endpoint;
//!   [`lb::affinity`]: session affinity; [`lb::maglev`]: tables equal on every node;
//!   [`lb::owners`]: endpoints of connections that this node does not know.
//! - [`flow::table`]: the flow tables; [`flow::established`]: packets that need nothing but their
//!   translation; [`flow::state`]: state transitions; [`flow::pair`]: both entries of a flow;
//!   [`flow::silence`]: SYNs on existing flows; [`flow::associations`]: state transitions of SCTP;
//!   [`flow::datagrams`]: those of UDP; [`flow::new_flow`]: the entries of a new flow;
//!   [`flow::snat_port`]: the search for its port; [`flow::unassured`]: the queue of unassured
//!   flows; [`flow::recycle`]: expired flows, removed for a new one; [`flow::directory`]: the array
//!   by which they are found;
//!   [`flow::claim`]: the claim of one CPU on an entry; [`flow::delivered`]: packets that TC sees
//!   again after XDP has delivered them; [`flow::inserted`]: the end of a flow's creation;
//!   [`flow::way_back`]: whether replies go back through the node in front.
//! - [`forward`]: the next hop of a flow's packets, translation and sending. [`forward::nexthop`]:
//!   next hops and the FIB; [`forward::client_hop`]: a cache of next hops towards clients;
//!   [`forward::reply_way`]: the device by which a reply of an endpoint on this node leaves;
//!   [`forward::local`]: the way straight into a pod of this node; [`forward::hairpin`]: that of a
//!   pod to itself;
//!   [`forward::device`]: the device by which a packet leaves;
//!   [`forward::fragment`]: later fragments; [`forward::icmp`]: translation of ICMP errors;
//!   [`forward::sctp`]: ports and checksum of SCTP; [`forward::direct`]: packets that travel
//!   unchanged; [`forward::enclose`]: those of established flows; [`forward::outer`]: the header
//!   around them, which [`open`] takes off; [`forward::through_front`]: replies that go back
//!   through the node in front, which [`open_reply`] opens there; [`forward::outer_error`]: ICMP
//!   errors of routers about such packets.
//! - [`verdict`]: outcome to verdict; [`counters`]: packets by outcome; [`events`]: the ring buffer
//!   of `monitor`; [`trace`]: steps for `explain`.
//! - [`ctx`]: the packet in its context; [`ctx::xdp`], [`ctx::tc`].
//! - [`maps`]: all maps; [`family`]: IPv4 and IPv6 as types; [`words`]: packet words; `value`:
//!   fields behind raw pointers; [`barrier`]: atomics and fences; [`clock`]: clocks; `global`:
//!   functions that the verifier walks by themselves.
//!
//! # Safety
//!
//! The kernel's verifier walks all paths of a program before it is loaded, and refuses one in which
//! an access could be out of bounds, a pointer null, or memory could be read before it is written.
//! So `unsafe` has to uphold less here than elsewhere, and the same within each of these families,
//! whose functions and SAFETY comment are in one place:
//!
//! - *packet words*: [`words`];
//! - *map values and contexts*: `value`, field by field through the raw pointer from
//!   [`maps::Table::lookup`], `get_ptr` or the kernel: other CPUs and the agent write the same
//!   value;
//! - *scratch memory* ([`family::Family::scratch`]): references by `value`, too, because it is a
//!   map value of this CPU alone, and a CPU handles one packet after the other (programs of
//!   sockets, which packets may interrupt, do not use it);
//! - *map look-ups*: [`maps::Table`];
//! - *atomics and fences*: [`barrier`].
//!
//! Other `unsafe` code has its own SAFETY comment: kernel helpers, whose arguments the verifier
//! checks.

#[macro_use]
mod global;
#[macro_use]
mod value;

pub mod clock;
pub mod counters;
pub mod ctx;
pub mod egress;
pub mod events;
pub mod family;
pub mod fast_path;
pub mod flow;
pub mod forward;
pub mod icmp_errors;
pub mod l3_ingress;
pub mod lb;
pub mod maps;
pub mod no_sctp;
pub mod node_silence;
pub mod open;
pub mod open_reply;
pub mod own;
pub mod parse;
pub mod pod;
pub mod pod_client;
pub mod prefilter;
pub mod priority_tag;
pub mod reject;
pub mod slow_path;
pub mod sock;
pub mod split;
pub mod trace;
pub mod variable_headers;
pub mod verdict;

pub use traffic_policy_ebpf::{barrier, words};
