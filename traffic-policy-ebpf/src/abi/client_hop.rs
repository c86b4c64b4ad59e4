//! The cache of next hops towards clients, as the FIB named them last: the layout of its places.

/// A place of the cache: the question put to the FIB, and the next hop that it named. All zero:
/// empty.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ClientHop<A> {
    /// The source of the reply (the frontend's address), and its destination (the client's).
    pub source: A,
    pub destination: A,
    /// The index of the device by which the reply came.
    pub ingress: u32,
    /// The index into `tp_nexthops`; 0 if the place is empty.
    pub hop: u16,
    /// The route epoch of the FIB look-up.
    pub epoch: u16,
    /// The time of the FIB look-up: low half of jiffies.
    pub looked_up: u32,
    /// Padding.
    pub zero: u32,
}

/// The places of one CPU; the highest bits of a hash of the client's address choose one. An array
/// of arrays, because [`Default`] is implemented for arrays of up to 32 elements only.
pub type ClientHops<A> = [[ClientHop<A>; 32]; CLIENT_HOPS / 32];

/// The number of places of [`ClientHops`], a power of two.
pub const CLIENT_HOPS: usize = 128;
