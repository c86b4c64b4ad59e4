fn main() -> anyhow::Result<()> {
    let config = traffic_policy_agent::dataplane::Config {
        pins: None,
        sizes: Default::default(),
        idle: Default::default(),
        pool: Default::default(),
        drain: Default::default(),
        mode: traffic_policy_agent::dataplane::Mode::Tc,
    };
    let _ = traffic_policy_agent::dataplane::Dataplane::open(config)?;
    Ok(())
}
