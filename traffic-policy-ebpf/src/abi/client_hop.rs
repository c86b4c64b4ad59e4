//! Next hops of clients, as the FIB named them lately.

/// A question to the FIB about the way to a client, and the hop that it named. All zero: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ClientHop<A> {
    /// The frontend's address, and the client's.
    pub source: A,
    pub destination: A,
    /// The device by which the reply came.
    pub ingress: u32,
    /// Index into `tp_nexthops`, and the route epoch under which the FIB was asked.
    pub hop: u16,
    pub epoch: u16,
    /// Low half of jiffies when it was asked.
    pub asked: u32,
    pub zero: u32,
}

/// One of each client, by the highest bits of a hash of its address: a power of two, in halves of what implements [`Default`].
pub type ClientHops<A> = [[ClientHop<A>; 32]; CLIENT_HOPS / 32];

/// Number of places of [`ClientHops`].
pub const CLIENT_HOPS: usize = 128;
