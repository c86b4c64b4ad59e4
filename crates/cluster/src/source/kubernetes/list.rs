//! A listing of all objects of a cluster, in pages, so that only the converted objects and one page
//! are in memory.

use std::fmt::Debug;

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{DeserializeGuard, Status},
};
use serde::de::DeserializeOwned;

use super::{Access, AccessError, deadline::Line, known_versions::KnownVersions};
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

/// Lists Nodes, Services and EndpointSlices. Objects that cannot be parsed are left out and logged.
///
/// # Errors
/// The API cannot be reached, or does not return one of these kinds.
pub async fn list_cluster(access: &Access, mut progress: impl FnMut(Listed)) -> Result<Batch, ListError> {
    let (status, _reader) = StatusWriter::new();
    let (client, _next) = super::client(access, &Line::new(), &status, &KnownVersions::default()).await?;
    let everything = ListParams::default();
    let nodes = all(&client, "Nodes", &everything, &mut progress, |node: &Node| {
        detail::node(node, Detail::Cluster).map(Some)
    })
    .await?;
    let services = all(
        &client,
        "Services",
        &everything.clone().labels(convert::SERVICE_SELECTOR),
        &mut progress,
        |service: &Service| detail::service(service, Author::ApiServer, Detail::Cluster),
    )
    .await?;
    let slices = all(
        &client,
        "EndpointSlices",
        &everything.labels(convert::SLICE_SELECTOR),
        &mut progress,
        |slice: &EndpointSlice| detail::endpoint_slice(slice, Detail::Cluster),
    )
    .await?;
    Ok(Batch(vec![
        Update::Node(nodes),
        Update::Service(services),
        Update::EndpointSlice(slices),
        Update::Synced,
    ]))
}

async fn all<K, T>(
    client: &Client,
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
        match pages(client, plural, of, progress, &convert).await {
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
    client: &Client,
    plural: &'static str,
    of: &ListParams,
    progress: &mut impl FnMut(Listed),
    convert: impl Fn(&K) -> Result<Option<T>, FieldError>,
) -> Result<Vec<T>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<DeserializeGuard<K>> = Api::all(client.clone());
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
        let batch =
            list_cluster(&access, |listed| told.push((listed.plural, listed.objects, listed.remaining)))
                .await
                .unwrap();
        assert_eq!(
            told,
            [("Nodes", 1, Some(1)), ("Nodes", 2, None), ("Services", 2, None), ("EndpointSlices", 1, None)]
        );
        assert!(asked.lock().unwrap().iter().all(|path| path.contains("limit=500")), "{asked:?}");
        let mut index = Index::default();
        batch.apply(&mut index);
        assert!(index.nodes().all(|node| node.standing.excluded) && index.nodes().count() == 2);
        let service = index.services().next().unwrap();
        assert_eq!((service.name.to_string().as_str(), index.services().count()), ("ns/s", 1));
        let slice = index.slices_of(&service.name).next().unwrap();
        assert_eq!(slice.endpoints[0].pod.as_deref(), Some("pod"));
    }

    #[tokio::test]
    async fn a_role_that_may_not_list_is_named() {
        let (access, _, _folder) = server(|path| match path {
            path if path.contains("/nodes") => failure(403, "Forbidden"),
            _ => list("Service", "v1", "", ""),
        })
        .await;
        let error = list_cluster(&access, |_| ()).await.unwrap_err().to_string();
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
            _ => list("EndpointSlice", "discovery.k8s.io/v1", "", ""),
        })
        .await;
        let mut index = Index::default();
        list_cluster(&access, |_| ()).await.unwrap().apply(&mut index);
        assert_eq!(index.nodes().count(), 2);
        assert_eq!(asked.lock().unwrap().iter().filter(|path| path.contains("/nodes")).count(), 4);
    }
}
