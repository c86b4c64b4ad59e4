//! Silent API servers: noticed, reported and recovered from. The times are those that users are
//! promised.

use std::time::{Duration, Instant};

use tokio::time::timeout;
use traffic_policy_testing::api_server::{ApiServer, Kind, Streaming};
use traffic_policy_testing::pace::scaled;

use crate::fixture::{Agent, service, until};

/// The time within which `/status` and the log report the fault.
const SAID: Duration = Duration::from_secs(30);
/// The time within which watches are started anew, on other connections.
const ELSEWHERE: Duration = Duration::from_secs(45);

async fn error_of(agent: &Agent, subject: &str) -> String {
    let mut status = agent.source.status();
    let found = timeout(scaled(SAID), status.wait_for(|status| status.errors.contains_key(subject))).await;
    let status = found.unwrap_or_else(|_| panic!("no word of it: {:?}", agent.source.status().get()));
    status.expect("the source goes on").errors[subject].clone()
}

#[tokio::test]
async fn a_server_that_takes_connections_and_says_nothing_is_reported() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    server.fall_silent();
    let mut agent = Agent::with_kubeconfig(&server).await;
    let said = error_of(&agent, "API server").await;
    assert!(said.contains("no answer within"), "{said}");
    assert!(!agent.index.is_synced());
    server.speak();
    agent.expect(&["web="]).await;
    agent.status(|status| status.errors.is_empty()).await;
}

#[tokio::test]
async fn a_list_that_ends_in_the_middle_is_reported() {
    for streaming in [Streaming::Given, Streaming::Refused] {
        let server = ApiServer::start().unwrap();
        server.stream_lists(streaming);
        server.apply(&service("web", "10.96.0.1")).unwrap();
        server.stall_lists(Kind::Service);
        let agent = Agent::with_kubeconfig(&server).await;
        let said = error_of(&agent, "API server").await;
        assert!(said.contains("stopped in the middle"), "{streaming:?}: {said}");
        assert!(!agent.index.is_synced());
    }
}

/// Neither connection is broken: only the server's process is stopped.
#[tokio::test]
async fn watches_of_a_silent_server_are_given_up_and_go_on_later() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a="]).await;
    let watches = || server.requests_with("/services?") - server.requests_with("/namespaces/");
    let before = watches();
    let fell_silent = Instant::now();
    server.fall_silent();
    let said = error_of(&agent, "API server").await;
    assert!(said.contains("no answer within"), "{said}");
    // The watch is started anew on another connection, which may lead to another server.
    until("another watch", || watches() > before).await;
    let noticed = fell_silent.elapsed();
    assert!(noticed < scaled(ELSEWHERE), "{noticed:?}");
    assert_eq!(agent.services(), ["a="], "what is known stays");
    server.apply(&service("b", "10.96.0.2")).unwrap();
    server.speak();
    agent.expect(&["a=", "b="]).await;
    agent.status(|status| status.errors.is_empty()).await;
    assert_eq!(server.lists_of(Kind::Service), 1, "the history goes on where it was");
}

/// Nothing happens, and nothing is wrong: a quiet cluster costs no lists and no new watches.
#[tokio::test]
async fn a_quiet_server_is_no_silent_one() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a="]).await;
    let watches = server.requests_with("watch=true");
    let mut status = agent.source.status();
    let trouble = timeout(Duration::from_secs(40), status.wait_for(|status| !status.errors.is_empty())).await;
    assert!(trouble.is_err(), "{trouble:?}");
    assert_eq!(server.requests_with("watch=true"), watches.max(4));
    assert!(server.requests_with("/version") >= 1, "it was asked whether it is there");
}
