//! Services for pods whose sockets the programs on the cgroup do not see (`--pod-services`).

/// The value of `--pod-services`: whether packets that pods send to Services are translated at the
/// host side of their devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PodServices {
    #[default]
    Off,
    On,
}
