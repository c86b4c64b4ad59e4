//! The cases for which this project exists, on real packets between real nodes: scenes one after
//! the other, each with the prediction of `lb`.

pub mod cluster;
pub mod dead_front;
pub mod dead_node;
pub mod local_curl;
pub mod node_port;
mod policies;
mod predict;
pub mod preemption;
pub mod scene;
mod share;
pub mod switch;

use anyhow::{Result, ensure};

use self::cluster::DemoCluster;

/// Plays all scenes. `attach`: the attach mode of the agents.
///
/// # Errors
/// A scene cannot be played, the lost requests differ from those of `lb simulate`, or a connection
/// was cut that should have gone on.
pub fn play(cluster: &DemoCluster, attach: &str) -> Result<()> {
    cluster.introduce();
    policies::show(cluster)?;
    local_curl::show(cluster)?;
    let mut differences = preemption::show(cluster)?;
    differences.extend(switch::show(cluster)?);
    share::show(cluster)?;
    differences.extend(node_port::show(cluster)?);
    differences.extend(dead_node::show(cluster, attach)?);
    differences.extend(dead_front::show(cluster)?);
    ensure!(differences.is_empty(), "not as it should be: {}", differences.join("; "));
    Ok(())
}
