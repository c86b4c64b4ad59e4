//! The choice of API server and token.

use std::{fs, time::Duration};

use traffic_policy_cluster::source::{Access, Kubernetes};
use traffic_policy_testing::api_server::{ApiServer, Certificate};

use crate::fixture::{Agent, service};

#[tokio::test]
async fn an_api_that_comes_late_is_waited_for() {
    let mut server = ApiServer::start().unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    server.stop().await;
    let mut agent = Agent::with_kubeconfig(&server).await;
    let status = agent.status(|status| !status.errors.is_empty()).await;
    assert!(status.errors["API server"].contains("refused"), "{status:?}");
    assert!(!agent.index.is_synced());
    server.restart().await.unwrap();
    agent.expect(&["web="]).await;
}

#[tokio::test]
async fn a_rotated_token_is_used_at_once() {
    let server = ApiServer::start().unwrap();
    server.require_tokens(&["first"]);
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::in_cluster(&server, "first\n").await;
    agent.expect(&["a="]).await;

    agent.rotate("second");
    server.require_tokens(&["second"]);
    server.compact();
    server.cut_watches();
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
}

#[tokio::test]
async fn a_refused_token_is_told_and_nothing_is_given() {
    let server = ApiServer::start().unwrap();
    server.require_tokens(&["right"]);
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::in_cluster(&server, "wrong").await;
    let status = agent.status(|status| status.errors.contains_key("Services")).await;
    assert!(status.errors["Services"].contains("401"), "{status:?}");
    agent.expect_silence(Duration::from_millis(500)).await;
    agent.rotate("right");
    agent.expect(&["a="]).await;
    agent.status(|status| status.errors.is_empty()).await;
}

/// An API server is given by its address, but its certificate contains the name that every cluster
/// uses.
#[tokio::test]
async fn tls_is_checked_against_the_name_of_the_api_server() {
    for (name, trusted) in [("kubernetes.default.svc", true), ("example.org", false)] {
        let certificate = Certificate::for_name(name).unwrap();
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("token"), "t").unwrap();
        fs::write(files.path().join("ca.crt"), &certificate.pem).unwrap();
        let server = ApiServer::start_tls(certificate).unwrap();
        server.apply(&service("a", "10.96.0.1")).unwrap();
        let service_account = files.path().to_owned();
        let access = Access::InCluster { api_server: Some(server.url()), service_account };
        let mut agent = Agent::start(access, files).await;
        if trusted {
            agent.expect(&["a="]).await;
        } else {
            let status = agent.status(|status| !status.errors.is_empty()).await;
            assert!(status.errors["API server"].contains("certificate"), "{status:?}");
            assert!(!agent.index.is_synced());
        }
    }
}

#[tokio::test]
async fn a_service_account_without_token_is_an_error() {
    let files = tempfile::tempdir().unwrap();
    let access = Access::InCluster {
        api_server: Some("http://127.0.0.1:1".to_owned()),
        service_account: files.path().to_owned(),
    };
    let error = Kubernetes { relist_within: Duration::from_millis(100), ..Kubernetes::new(access, "here") }
        .start()
        .await
        .unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
}

/// A kubeconfig that refers to files, like those of kubeadm and the kubelet: the certificates are
/// replaced before they expire.
#[tokio::test]
async fn replaced_certificates_of_a_kubeconfig_are_used() {
    let files = tempfile::tempdir().unwrap();
    let path = |name: &str| files.path().join(name);
    let write = |server: &Certificate, client: &Certificate| {
        fs::write(path("ca.crt"), &server.pem).unwrap();
        fs::write(path("client.crt"), &client.pem).unwrap();
        fs::write(path("client.key"), &client.key_pem).unwrap();
    };
    let [first, second] = [(); 2].map(|()| Certificate::for_name("kubernetes.default.svc").unwrap());
    let [client, next_client] = [(); 2].map(|()| Certificate::for_name("node").unwrap());
    let mut server = ApiServer::start_tls(first.clone().asking_for(&client).unwrap()).unwrap();
    server.apply(&service("a", "10.96.0.1")).unwrap();
    write(&first, &client);
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: '{}', certificate-authority: ca.crt, \
         tls-server-name: kubernetes.default.svc}}}}]\n\
         users: [{{name: u, user: {{client-certificate: client.crt, client-key: client.key}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
        server.url()
    );
    fs::write(path("kubeconfig"), text).unwrap();
    let access = Access::Kubeconfig(path("kubeconfig"));
    let mut agent = Agent::start(access, tempfile::tempdir().unwrap()).await;
    agent.expect(&["a="]).await;

    write(&second, &next_client);
    server.stop().await;
    server.replace_certificate(second.asking_for(&next_client).unwrap());
    server.apply(&service("b", "10.96.0.2")).unwrap();
    server.restart().await.unwrap();
    agent.expect(&["a=", "b="]).await;
    agent.status(|status| status.errors.is_empty()).await;
}
