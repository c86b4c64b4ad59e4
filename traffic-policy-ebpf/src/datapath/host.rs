//! Host replacements for the modules of the packet path that its parser uses. A packet word outside
//! the frame is a panic, where the kernel's verifier would refuse the program.

mod frames;
mod tests;

pub mod words {
    use crate::datapath::ctx;

    macro_rules! load {
        ($name:ident, $type:ty) => {
            pub fn $name<const OFFSET: i16>(at: usize) -> $type {
                let at = at.checked_add_signed(OFFSET.into()).expect("an address");
                <$type>::from_ne_bytes(ctx::bytes(at))
            }
        };
    }

    load!(load8, u8);
    load!(load16, u16);
    load!(load32, u32);
    load!(load64, u64);
}

pub mod barrier {
    pub fn opaque(value: u64) -> u64 {
        value
    }
}

pub mod verdict {
    use traffic_policy_ebpf::outcome::Outcome;

    pub struct Decision(Outcome);

    impl From<Outcome> for Decision {
        fn from(outcome: Outcome) -> Self {
            Self(outcome)
        }
    }
}

pub mod ctx {
    use std::cell::RefCell;

    use crate::datapath::{
        family::Family,
        parse::{self, ipv6_ext, variable},
    };

    pub const BY_FRAGMENTS: u32 = 0xffff;

    /// The packet interface of the parser.
    pub trait Packet: Copy {
        const TC: bool;
        const SCTP: bool;
        const L2: usize;

        fn data(self) -> usize;
        fn end(self) -> usize;
        fn pull(self, wanted: u32);
        fn distant_word(self, offset: u32) -> u32;
        fn length(self) -> u32;
        fn holds(self, length: u32) -> bool;
        fn segment(self) -> u32;
        fn window_scale(self, offset: u32) -> i32;
        fn check_options(self, header: u32) -> i32;
        fn walk_headers(self, offset: u32) -> i32;
        fn jump<F: Family, const PROGRAM: u32>(self) {}
    }

    /// The address of a frame's first byte, as the programs count: any number but 0.
    const START: usize = 0x1000;

    thread_local! {
        static FRAME: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    /// The frame of this thread.
    #[derive(Clone, Copy)]
    pub struct Frame;

    impl Frame {
        pub fn with(bytes: &[u8], work: impl FnOnce(Self)) {
            FRAME.with_borrow_mut(|frame| *frame = bytes.to_vec());
            work(Self);
        }
    }

    impl Packet for Frame {
        const TC: bool = false;
        const SCTP: bool = true;
        const L2: usize = parse::ETHERNET;

        fn data(self) -> usize {
            START
        }
        fn end(self) -> usize {
            START + FRAME.with_borrow(Vec::len)
        }
        fn pull(self, _: u32) {}
        fn distant_word(self, _: u32) -> u32 {
            0
        }
        fn length(self) -> u32 {
            FRAME.with_borrow(Vec::len) as u32
        }
        fn holds(self, length: u32) -> bool {
            length <= self.length()
        }
        fn segment(self) -> u32 {
            0
        }
        fn window_scale(self, offset: u32) -> i32 {
            parse::window_scale(self, offset)
        }
        fn check_options(self, header: u32) -> i32 {
            variable::check_options(self, header)
        }
        fn walk_headers(self, offset: u32) -> i32 {
            ipv6_ext::walk_headers(self, offset)
        }
    }

    /// Returns bytes of the frame.
    pub fn bytes<const SIZE: usize>(at: usize) -> [u8; SIZE] {
        FRAME.with_borrow(|frame| {
            let from = at.checked_sub(START).expect("no byte before the frame is read");
            let bytes = frame.get(from..from + SIZE).expect("no byte after the frame is read");
            bytes.try_into().expect("as many as asked for")
        })
    }
}

pub mod family {
    use std::{cell::Cell, ptr};

    use traffic_policy_ebpf::abi::{Address, Address4, Address6, Scratch};

    pub trait Family: 'static {
        type Address: Address;
        const V6: bool;

        fn scratch() -> Option<*mut Scratch<Self::Address>>;
    }

    pub struct V4;
    pub struct V6;

    impl Family for V4 {
        type Address = Address4;
        const V6: bool = false;

        fn scratch() -> Option<*mut Scratch<Address4>> {
            None
        }
    }

    impl Family for V6 {
        type Address = Address6;
        const V6: bool = true;

        fn scratch() -> Option<*mut Scratch<Address6>> {
            thread_local! {
                static SCRATCH: Cell<*mut Scratch<Address6>> = const { Cell::new(ptr::null_mut()) };
            }
            if SCRATCH.get().is_null() {
                // One for each thread, for the duration of the test.
                SCRATCH.set(Box::into_raw(Box::default()));
            }
            Some(SCRATCH.get())
        }
    }
}
