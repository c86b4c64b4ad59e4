//! A listing of all objects of a cluster, in pages, so that only the converted objects and one page
//! are in memory.

use std::fmt::Debug;

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};
use kube::{
    Api, Resource,
    api::ListParams,
    core::{DeserializeGuard, Status},
};
use serde::de::DeserializeOwned;

use super::{Access, AccessError, deadline::Line, known_versions::KnownVersions, opening};
use crate::source::{
    batch::{Batch, Change, Update},
    convert::{
        self, Author, FieldError,
        detail::{self, Detail},
    },
    status::StatusWriter,
};

/// The number of objects in a page, the same as for `kubectl`.
const PAGE: u32 = 500;
/// The number of attempts. A list that takes longer than the API server keeps its version is
/// started again.
const ATTEMPTS: u32 = 3;

#[derive(Debug, thiserror::Error)]
pub enum ListError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(
        "the API server gives no {plural}: {message} (list on nodes, services and endpointslices.discovery.k8s.io is needed)"
    )]
    Refused { plural: &'static str, message: String },
    #[error("{plural} cannot be listed: {message}")]
    Failed { plural: &'static str, message: String },
}

/// Progress of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub plural: &'static str,
    pub objects: usize,
    /// The number of remaining objects, if the API server reports it.
    pub remaining: Option<usize>,
}

/// The objects of a cluster.
#[derive(Debug)]
pub struct WholeCluster {
    pub batch: Batch,
    /// The reason for which the Leases of direct forwarding are not known, if they are not.
    pub no_leases: Option<String>,
}

/// Lists Nodes, Services and EndpointSlices, and the Leases of direct forwarding, of one namespace
/// or of all. Objects that cannot be parsed are left out and logged.
///
/// # Errors
/// The API cannot be reached, or does not return one of the first three kinds.
pub async fn list_cluster(
    access: &Access,
    leases_of: Option<&str>,
    mut progress: impl FnMut(Listed),
) -> Result<WholeCluster, ListError> {
    let (status, _reader) = StatusWriter::new();
    let (client, _next) = super::client(access, &Line::new(), &status, &KnownVersions::default()).await?;
    let everything = ListParams::default();
    let nodes = all(Api::all(client.clone()), "Nodes", &everything, &mut progress, |node: &Node| {
        detail::node(node, Detail::Cluster).map(Some)
    })
    .await?;
    let services = all(
        Api::all(client.clone()),
        "Services",
        &everything.clone().labels(convert::SERVICE_SELECTOR),
        &mut progress,
        |service: &Service| detail::service(service, Author::ApiServer, Detail::Cluster),
    )
    .await?;
    let slices = all(
        Api::all(client.clone()),
        "EndpointSlices",
        &everything.clone().labels(convert::SLICE_SELECTOR),
        &mut progress,
        |slice: &EndpointSlice| detail::endpoint_slice(slice, Detail::Cluster),
    )
    .await?;
    let leases = leases_of.map_or_else(|| Api::all(client.clone()), |of| Api::namespaced(client.clone(), of));
    let selected = everything.labels(opening::SELECTOR);
    let (leases, no_leases) = match all(leases, "Leases", &selected, &mut progress, convert::direct).await {
        Ok(leases) => (leases, None),
        // Few roles have them, and few clusters forward directly.
        Err(ListError::Refused { message, .. }) => {
            (Change::Reset { objects: Vec::new(), unreadable: Vec::new() }, Some(message))
        }
        Err(error) => return Err(error),
    };
    let batch = Batch(vec![
        Update::Node(nodes),
        Update::Service(services),
        Update::EndpointSlice(slices),
        Update::Direct(leases),
        Update::Synced,
    ]);
    Ok(WholeCluster { batch, no_leases })
}

async fn all<K, T>(
    api: Api<DeserializeGuard<K>>,
    plural: &'static str,
    of: &ListParams,
    progress: &mut impl FnMut(Listed),
    convert: impl Fn(&K) -> Result<Option<T>, FieldError>,
) -> Result<Change<T>, ListError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let mut attempt = 1;
    loop {
        match pages(&api, plural, of, progress, &convert).await {
            // The version of the first page is no longer kept.
            Err(kube::Error::Api(error)) if error.code == 410 && attempt < ATTEMPTS => attempt += 1,
            Err(kube::Error::Api(error)) if matches!(error.code, 401 | 403 | 404) => {
                return Err(ListError::Refused { plural, message: refusal(&error) });
            }
            Err(error) => {
                return Err(ListError::Failed { plural, message: super::observe::chain(&error) });
            }
            Ok(objects) => return Ok(Change::Reset { objects, unreadable: Vec::new() }),
        }
    }
}

fn refusal(error: &Status) -> String {
    format!("{} ({})", error.message, error.code)
}

async fn pages<K, T>(
    api: &Api<DeserializeGuard<K>>,
    plural: &'static str,
    of: &ListParams,
    progress: &mut impl FnMut(Listed),
    convert: impl Fn(&K) -> Result<Option<T>, FieldError>,
) -> Result<Vec<T>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let mut objects = Vec::new();
    let mut seen = 0;
    let mut page = of.clone().limit(PAGE);
    loop {
        let list = api.list(&page).await?;
        seen += list.items.len();
        for object in &list.items {
            let converted = match &object.0 {
                Ok(object) => convert(object).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            match converted {
                Ok(object) => objects.extend(object),
                Err(error) => {
                    let name = object.meta().name.as_deref().unwrap_or_default();
                    tracing::warn!("{plural} {name}: not understood, left out: {error}");
                }
            }
        }
        let remaining = list.metadata.remaining_item_count.and_then(|left| usize::try_from(left).ok());
        progress(Listed { plural, objects: seen, remaining });
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::model::Index;

    /// Answers each request with the status and body for its path and query.
    async fn server(
        answer: impl Fn(&str) -> (u16, String) + Send + Sync + 'static,
    ) -> (Access, Arc<Mutex<Vec<String>>>, tempfile::TempDir) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = serve(stream, &answer, &log).await;
            }
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "secret").unwrap();
        let access = Access::InCluster { api_server: Some(url), service_account: folder.path().to_owned() };
        (access, asked, folder)
    }

    async fn serve(
        mut stream: TcpStream,
        answer: &impl Fn(&str) -> (u16, String),
        log: &Mutex<Vec<String>>,
    ) -> std::io::Result<()> {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            if stream.read(&mut byte).await? == 0 {
                return Ok(());
            }
            request.push(byte[0]);
        }
        let text = String::from_utf8_lossy(&request).into_owned();
        let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
        let (status, body) = answer(&path);
        log.lock().unwrap().push(path);
        let head = format!(
            "HTTP/1.1 {status} Answer\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await
    }

    fn list(kind: &str, api: &str, items: &str, next: &str) -> (u16, String) {
        let metadata = if next.is_empty() {
            "{\"resourceVersion\":\"1\"}".to_owned()
        } else {
            format!("{{\"resourceVersion\":\"1\",\"continue\":\"{next}\",\"remainingItemCount\":1}}")
        };
        (
            200,
            format!(
                "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{api}\",\"metadata\":{metadata},\"items\":[{items}]}}"
            ),
        )
    }

    fn failure(code: u16, reason: &str) -> (u16, String) {
        let status = format!(
            "{{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{{}},\"status\":\"Failure\",\"message\":\"{reason} it is\",\
             \"reason\":\"{reason}\",\"code\":{code}}}"
        );
        (code, status)
    }

    fn node(name: &str) -> String {
        format!(
            "{{\"metadata\":{{\"name\":\"{name}\",\"labels\":{{\"node.kubernetes.io/exclude-from-external-load-balancers\":\"\"}}}}}}"
        )
    }

    #[tokio::test]
    async fn all_pages_are_read_and_told() {
        let (access, asked, _folder) = server(|path| match path {
            path if path.contains("/nodes") && path.contains("continue=second") => {
                list("Node", "v1", &node("b"), "")
            }
            path if path.contains("/nodes") => list("Node", "v1", &node("a"), "second"),
            path if path.contains("/services") => {
                // The second one has an invalid port: it alone is left out.
                let service = |name: &str, port: u32| {
                    format!(
                        "{{\"metadata\":{{\"name\":\"{name}\",\"namespace\":\"ns\"}},\"spec\":{{\"clusterIP\":\"10.96.0.1\",\
                         \"ports\":[{{\"port\":{port}}}]}}}}"
                    )
                };
                list("Service", "v1", &format!("{},{}", service("s", 80), service("bad", 70_000)), "")
            }
            path if path.contains("/leases") => list(
                "Lease",
                "coordination.k8s.io/v1",
                "{\"metadata\":{\"name\":\"traffic-policy-opens-a\",\"namespace\":\"n\",\
                 \"labels\":{\"traffic-policy.io/opens\":\"ipip\"},\
                 \"annotations\":{\"traffic-policy.io/opens-from\":\"192.0.2.1\"}},\
                 \"spec\":{\"holderIdentity\":\"a\"}}",
                "",
            ),
            _ => list(
                "EndpointSlice",
                "discovery.k8s.io/v1",
                "{\"metadata\":{\"name\":\"s-1\",\"namespace\":\"ns\",\"labels\":{\"kubernetes.io/service-name\":\"s\"}},\
                 \"addressType\":\"IPv4\",\"ports\":[{\"port\":8080}],\
                 \"endpoints\":[{\"addresses\":[\"10.0.0.1\"],\"targetRef\":{\"kind\":\"Pod\",\"name\":\"pod\"}}]}",
                "",
            ),
        })
        .await;
        let mut told = Vec::new();
        let tell = |listed: Listed| told.push((listed.plural, listed.objects, listed.remaining));
        let WholeCluster { batch, no_leases } = list_cluster(&access, None, tell).await.unwrap();
        assert_eq!(no_leases, None);
        assert_eq!(
            told,
            [
                ("Nodes", 1, Some(1)),
                ("Nodes", 2, None),
                ("Services", 2, None),
                ("EndpointSlices", 1, None),
                ("Leases", 1, None)
            ]
        );
        assert!(asked.lock().unwrap().iter().all(|path| path.contains("limit=500")), "{asked:?}");
        let mut index = Index::default();
        batch.apply(&mut index);
        assert!(index.nodes().all(|node| node.standing.excluded) && index.nodes().count() == 2);
        let service = index.services().next().unwrap();
        assert_eq!((service.name.to_string().as_str(), index.services().count()), ("ns/s", 1));
        let slice = index.slices_of(&service.name).next().unwrap();
        assert_eq!(slice.endpoints[0].pod.as_deref(), Some("pod"));
        assert_eq!(index.direct_leases().map(|lease| lease.node.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    /// The Leases are those of one namespace, if that is known; without them the others suffice.
    #[tokio::test]
    async fn leases_that_may_not_be_listed_are_left_out() {
        let (access, asked, _folder) = server(|path| match path {
            path if path.contains("/leases") => failure(403, "Forbidden"),
            path if path.contains("/nodes") => list("Node", "v1", &node("a"), ""),
            path if path.contains("/services") => list("Service", "v1", "", ""),
            _ => list("EndpointSlice", "discovery.k8s.io/v1", "", ""),
        })
        .await;
        let listed = list_cluster(&access, Some("opening"), |_| ()).await.unwrap();
        assert_eq!(listed.no_leases.as_deref(), Some("Forbidden it is (403)"));
        let asked = asked.lock().unwrap();
        let of_leases = asked.iter().filter(|path| path.contains("/leases")).collect::<Vec<_>>();
        let is_selected =
            |path: &str| path.contains("/namespaces/opening/") && path.contains("labelSelector");
        assert!(of_leases.len() == 1 && is_selected(of_leases[0]), "{asked:?}");
        let mut index = Index::default();
        listed.batch.apply(&mut index);
        assert!(index.nodes().count() == 1 && index.direct_leases().next().is_none());
    }

    #[tokio::test]
    async fn a_role_that_may_not_list_is_named() {
        let (access, _, _folder) = server(|path| match path {
            path if path.contains("/nodes") => failure(403, "Forbidden"),
            _ => list("Service", "v1", "", ""),
        })
        .await;
        let error = list_cluster(&access, None, |_| ()).await.unwrap_err().to_string();
        assert!(error.contains("gives no Nodes: Forbidden it is (403)"), "{error}");
        assert!(error.contains("list on nodes, services and endpointslices"), "{error}");
    }

    #[tokio::test]
    async fn a_list_whose_version_is_gone_is_begun_anew() {
        let first = Mutex::new(true);
        let (access, asked, _folder) = server(move |path| match path {
            path if path.contains("/nodes") && path.contains("continue=") => {
                if std::mem::take(&mut *first.lock().unwrap()) {
                    failure(410, "Expired")
                } else {
                    list("Node", "v1", &node("b"), "")
                }
            }
            path if path.contains("/nodes") => list("Node", "v1", &node("a"), "second"),
            path if path.contains("/services") => list("Service", "v1", "", ""),
            path if path.contains("/leases") => list("Lease", "coordination.k8s.io/v1", "", ""),
            _ => list("EndpointSlice", "discovery.k8s.io/v1", "", ""),
        })
        .await;
        let mut index = Index::default();
        list_cluster(&access, None, |_| ()).await.unwrap().batch.apply(&mut index);
        assert_eq!(index.nodes().count(), 2);
        assert_eq!(asked.lock().unwrap().iter().filter(|path| path.contains("/nodes")).count(), 4);
    }
}
