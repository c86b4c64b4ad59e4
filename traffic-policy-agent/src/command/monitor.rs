//! `monitor`: refusals and new flows as they happen, with reason and fix.

mod line;

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::Args;
use ipnet::IpNet;
use traffic_policy_cluster::model::parse_duration;
use traffic_policy_dataplane::inspect::{Event, Listener, Pinned, ServicePort};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use self::line::{Line, WallClock, show};
use super::{
    flows::net,
    view::{self, View},
};

/// Show drops, rejects and new flows as they happen: Service, policy, reason and fix.
///
/// While it runs, the packet path writes an event for each, at most 1,000 per second on each CPU;
/// further ones are suppressed and counted. It costs nothing while it does not run.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Only events of this Service: NAME, or NAMESPACE/NAME.
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    /// Only this outcome; may be repeated. docs/outcomes.md lists them.
    #[arg(long = "outcome", value_name = "NAME", value_parser = outcome)]
    outcomes: Vec<Outcome>,
    /// Only events of clients with this address, or of this range.
    #[arg(long, value_name = "IP|CIDR", value_parser = net)]
    client: Option<IpNet>,
    /// Leave out new flows.
    #[arg(long)]
    drops: bool,
    /// Stop after this number of events.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Stop after this time.
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    lasts: Option<Duration>,
    #[command(flatten)]
    view: View,
}

fn outcome(name: &str) -> Result<Outcome, String> {
    Outcome::ALL.iter().copied().find(|outcome| outcome.name() == name).ok_or_else(|| {
        let names: Vec<_> = Outcome::ALL
            .iter()
            .filter(|outcome| is_reported(**outcome))
            .map(|outcome| outcome.name())
            .collect();
        format!("`{name}` is no outcome; those that are reported: {}", names.join(", "))
    })
}

fn time(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("`{text}` is not a time: write 30s, 2m or 500ms"))
}

/// Whether there are events with this outcome.
const fn is_reported(outcome: Outcome) -> bool {
    match outcome.verdict() {
        Verdict::Drop => true,
        Verdict::Send => !matches!(
            outcome,
            Outcome::Replied
                | Outcome::RepliedRedirected
                | Outcome::RepliedToFront
                | Outcome::RepliedOpened
                | Outcome::DeliveredDirect
                | Outcome::RepliedDirect
        ),
        Verdict::Pass => matches!(outcome, Outcome::Delivered | Outcome::Connected),
    }
}

/// Interval at which the packet path is informed that a listener is still present.
const RENEW: Duration = Duration::from_secs(1);
/// Interval at which Services are read again, because they change; for an unknown index it is
/// [`RENEW`].
const KNOWN_FOR: Duration = Duration::from_secs(5);

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let pinned = self.view.pinned()?;
        let mut services = Services::read(&pinned)?;
        if let Some(name) = &self.service
            && !services.ports.values().any(|port| view::is_named(&port.key, name))
        {
            anyhow::bail!("no Service {name} is in the maps: see `services` for all of them");
        }
        let stop = stop()?;
        let mut listener = Listener::start(&pinned)?;
        let clock = WallClock::now()?;
        let end = self.lasts.map(|lasts| Instant::now() + lasts);
        let (mut shown, mut suppressed) = (0, 0);
        let mut renewed = Instant::now();
        let json = self.view.json();
        if !json {
            eprintln!("listening; Ctrl-C ends it");
        }
        while !stop.load(Ordering::Relaxed)
            && self.count.is_none_or(|count| shown < count)
            && end.is_none_or(|end| Instant::now() < end)
        {
            if renewed.elapsed() >= RENEW {
                listener.renew()?;
                renewed = Instant::now();
            }
            let rest = end.map_or(RENEW, |end| end.saturating_duration_since(Instant::now()));
            let wait = rest.min(RENEW.saturating_sub(renewed.elapsed())).max(Duration::from_millis(1));
            let Some(event) = listener.next(wait)? else { continue };
            suppressed += u64::from(event.suppressed);
            services.refresh(&pinned, event.service)?;
            let port = event.service.and_then(|index| services.ports.get(&index));
            if !self.wants(&event, port) {
                continue;
            }
            let line = Line::new(&event, port, &clock);
            let printed = show(&line, json);
            if printed.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
                break;
            }
            printed?;
            shown += 1;
        }
        conclude(&listener, shown, suppressed, json)
    }

    fn wants(&self, event: &Event, port: Option<&ServicePort>) -> bool {
        (!self.drops || view::is_drop(event.outcome))
            && (self.outcomes.is_empty() || self.outcomes.contains(&event.outcome))
            && self.client.is_none_or(|net| net.contains(&event.client.ip()))
            && self
                .service
                .as_ref()
                .is_none_or(|name| port.is_some_and(|port| view::is_named(&port.key, name)))
    }
}

/// Prints how many events were suppressed, including those that no shown event has reported.
fn conclude(listener: &Listener, shown: u64, suppressed: u64, json: bool) -> Result<()> {
    let suppressed = suppressed + listener.suppressed()?;
    if json {
        let last = serde_json::json!({"shown": shown, "suppressed": suppressed});
        return view::print(|out| writeln!(out, "{last}"));
    }
    match suppressed {
        0 => eprintln!("{shown} shown"),
        _ => eprintln!(
            "{shown} shown; {suppressed} more events were suppressed, for more than 1,000 a second came on a CPU"
        ),
    }
    Ok(())
}

/// Returns a flag that Ctrl-C and SIGTERM set, so that the packet path learns at once that no
/// listener is left.
fn stop() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let flag = Arc::clone(&stop);
    // The handlers are in place before the first event.
    let (ready, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.block_on(async move {
            use tokio::signal::unix::{SignalKind, signal};
            let signals = (|| {
                Ok::<_, io::Error>((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
            })();
            match signals {
                Ok((mut interrupt, mut terminate)) => {
                    let _ = ready.send(Ok(()));
                    tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
                    flag.store(true, Ordering::Relaxed);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        });
    });
    wait.recv()
        .context("the thread that waits for signals has ended")?
        .context("signals cannot be waited for")?;
    Ok(stop)
}

/// Services by the index of the Service port.
struct Services {
    ports: BTreeMap<u32, ServicePort>,
    read: Instant,
}

impl Services {
    fn read(pinned: &Pinned) -> Result<Self> {
        let ports = ServicePort::all(pinned)?.into_iter().map(|port| (port.index, port)).collect();
        Ok(Self { ports, read: Instant::now() })
    }

    fn refresh(&mut self, pinned: &Pinned, index: Option<u32>) -> Result<()> {
        let unknown = index.is_some_and(|index| !self.ports.contains_key(&index));
        if self.read.elapsed() > if unknown { RENEW } else { KNOWN_FOR } {
            *self = Self::read(pinned)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{line::tests::event, *};
    use crate::command::view::tests::port;

    #[test]
    fn filters() {
        let arguments = |outcomes: &[Outcome], drops| Arguments {
            service: Some("shop/web".to_owned()),
            outcomes: outcomes.to_vec(),
            client: Some("192.0.2.0/24".parse().unwrap()),
            drops,
            count: None,
            lasts: None,
            view: View { pin_dir: "/".into(), output: view::OutputArguments { output: view::Output::Table } },
        };
        let (port, dropped, forwarded) =
            (port(), event(Outcome::DroppedNoLocalEndpoint), event(Outcome::Forwarded));
        assert!(arguments(&[], false).wants(&forwarded, Some(&port)));
        assert!(!arguments(&[], true).wants(&forwarded, Some(&port)));
        for outcome in [Outcome::DroppedNoLocalEndpoint, Outcome::RejectedNoEndpoint, Outcome::ResetNoFlow] {
            assert!(arguments(&[], true).wants(&event(outcome), Some(&port)), "{outcome:?}");
        }
        for outcome in
            [Outcome::Delivered, Outcome::Connected, Outcome::ForwardedDirect, Outcome::ForwardedToOwner]
        {
            assert!(!arguments(&[], true).wants(&event(outcome), Some(&port)), "{outcome:?}");
        }
        assert!(!arguments(&[], true).wants(&dropped, None), "of no Service");
        assert!(!arguments(&[Outcome::DroppedNoRoute], false).wants(&dropped, Some(&port)));
        let stranger = Event { client: "198.51.100.1:1".parse().unwrap(), ..dropped };
        assert!(!arguments(&[], false).wants(&stranger, Some(&port)));
        assert!(outcome("dropped-no-route").is_ok());
        let error = outcome("lost").unwrap_err();
        assert!(error.contains("dropped-no-route") && !error.contains("passed-fragment"), "{error}");
    }
}
