//! What the packet path and its users share.
#![cfg_attr(target_arch = "bpf", no_std)]
