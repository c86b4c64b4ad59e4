//! Direct delivery to pods of this node (`--local-delivery`).

/// The value of `--local-delivery`: the way of packets to pods of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LocalDelivery {
    /// The stack delivers every packet.
    #[default]
    Stack,
    /// Packets of established flows go straight to the pod, and its replies to the client.
    Direct,
}
