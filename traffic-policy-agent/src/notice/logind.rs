//! `--notice logind`: the shutdown of the machine, as systemd-logind announces it on the system
//! bus, held up until the others have been told.

use std::{convert::Infallible, pin::pin, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures::{Stream, StreamExt as _};
use jiff::{SignedDuration, Timestamp};
use tokio::time::{sleep, timeout};
use traffic_policy_cluster::source::Leaving;
use zbus::{OwnedFd, connection::Builder, proxy};

use super::board::Reporter;

/// The pauses between attempts to reach logind.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// The time limit for each answer of the bus.
const LIMIT: Duration = Duration::from_secs(10);
/// The reason that `systemd-inhibit --list` shows.
const WHY: &str = "load balancers and other nodes are told that this one is about to go";
/// logind's own default of `InhibitDelayMaxSec`.
const DELAY: Duration = Duration::from_secs(5);

#[proxy(
    interface = "org.freedesktop.login1.Manager",
    default_service = "org.freedesktop.login1",
    default_path = "/org/freedesktop/login1"
)]
trait Manager {
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> zbus::Result<OwnedFd>;

    #[zbus(signal)]
    fn prepare_for_shutdown(&self, start: bool) -> zbus::Result<()>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn preparing_for_shutdown(&self) -> zbus::Result<bool>;

    #[zbus(property(emits_changed_signal = "false"), name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max(&self) -> zbus::Result<u64>;
}

/// Listens forever. What was heard last stays while logind cannot be reached.
pub(super) async fn run(reporter: Reporter) {
    let mut pause = PAUSES[0];
    loop {
        let Err(error) = listen(&reporter, &mut pause).await;
        reporter.trouble(format!("{error:#}"));
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES[1]);
    }
}

async fn listen(reporter: &Reporter, pause: &mut Duration) -> Result<Infallible> {
    let connecting = Builder::system().method_timeout(LIMIT).build();
    let bus = timeout(LIMIT, connecting).await.context("the system bus does not answer")?;
    let bus = bus.context("the system bus cannot be reached (in a container, /run/dbus must be mounted)")?;
    let manager = ManagerProxy::new(&bus).await.context("logind")?;
    // Signals are received from here on, so none is missed after the first look.
    let signals = manager.receive_prepare_for_shutdown().await.context("signals of logind")?;
    let mut signals = pin!(signals);
    let mut ending = manager.preparing_for_shutdown().await.context("logind's PreparingForShutdown")?;
    let mut lock = None;
    loop {
        if ending {
            reporter.well();
            let delay = manager.inhibit_delay_max().await.map_or(DELAY, Duration::from_micros);
            let span = SignedDuration::try_from(delay).unwrap_or_default();
            reporter.say(Some(Leaving {
                reason: "the machine is being shut down".to_owned(),
                gone_by: Timestamp::now().checked_add(span).ok(),
            }));
            // logind goes on by itself after that time.
            tokio::select! {
                _ = timeout(delay, reporter.told()) => lock = None,
                heard = next(&mut signals) => {
                    ending = heard?;
                    continue;
                }
            }
        } else {
            reporter.say(None);
            if lock.is_none() {
                let taken = manager.inhibit("shutdown", "traffic-policy", WHY, "delay").await;
                if let Err(error) = &taken {
                    // While a shutdown is in progress, there is no lock either.
                    ending = manager.preparing_for_shutdown().await.context("logind")?;
                    if ending {
                        continue;
                    }
                    reporter.trouble(format!(
                        "logind gives no delay lock, so a shutdown may be over before others are told of it: {error}"
                    ));
                } else {
                    reporter.well();
                }
                lock = taken.ok();
            }
        }
        *pause = PAUSES[0];
        tokio::select! {
            heard = next(&mut signals) => ending = heard?,
            () = sleep(PAUSES[1]), if lock.is_none() && !ending => {}
        }
    }
}

/// Returns whether a shutdown begins, or was called off.
async fn next(signals: &mut (impl Stream<Item = PrepareForShutdown> + Unpin)) -> Result<bool> {
    let Some(signal) = signals.next().await else { bail!("the system bus has closed the connection") };
    Ok(*signal.args().context("logind's PrepareForShutdown")?.start())
}
