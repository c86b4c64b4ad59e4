//! The protocol of the server: paths, queries, pages and streams.

use std::{collections::HashMap, io, sync::Arc, time::Instant};

use futures::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue},
};
use serde_json::{Value, json};
use tokio::sync::watch::error::RecvError;

use super::{
    Shared, State, Streaming,
    store::{Gone, Kind, Selection},
};

pub(super) type Body = UnsyncBoxBody<Bytes, io::Error>;

pub(super) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let query = parse_query(request.uri().query().unwrap_or_default());
    let text = format!("{} {path}?{}", request.method(), request.uri().query().unwrap_or_default());
    shared.state().requests.push((Instant::now(), text));
    shared.voice().await;
    if !authorized(&shared, &request) {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized");
    }
    if path == "/version" {
        return json_answer(StatusCode::OK, &json!({"major": "1", "minor": "34", "gitVersion": "v1.34.0"}));
    }
    let mut parts: Vec<&str> = path.split('/').collect();
    let last = parts.pop().unwrap_or_default();
    if request.method() == Method::POST && last == "events" {
        let Ok(event) = serde_json::from_slice::<Value>(&body(request).await) else {
            return failure(StatusCode::BAD_REQUEST, "not JSON");
        };
        shared.state().posted_events.push(event.clone());
        return json_answer(StatusCode::CREATED, &event);
    }
    if request.method() == Method::PATCH && parts.last() == Some(&"nodes") {
        return patch_node(&shared, last, &body(request).await);
    }
    if request.method() == Method::PATCH
        && last == "status"
        && let [.., "nodes", name] = parts.as_slice()
    {
        return patch_node_status(&shared, name, &body(request).await);
    }
    if let [.., "namespaces", namespace, "leases"] = parts.as_slice() {
        return write_lease(&shared, namespace, last, request).await;
    }
    let Some(kind) = Kind::of_plural(last) else { return failure(StatusCode::NOT_FOUND, "not found") };
    let refused = shared.state().refused.get(&kind).and_then(|code| StatusCode::from_u16(*code).ok());
    if let Some(code) = refused {
        return failure(code, "not given");
    }
    let namespace = match parts.as_slice() {
        [.., "namespaces", namespace] => Some((*namespace).to_owned()),
        _ => None,
    };
    let selection = selection(namespace, &query);
    if query.get("watch").is_some_and(|watch| watch == "true" || watch == "1") {
        return watch(shared, kind, selection, &query).await;
    }
    list(shared, kind, &selection, &query).await
}

/// Applies a merge patch to a Node's taints, provided that the Node still has the version that the
/// patch names.
fn patch_node(shared: &Shared, name: &str, body: &[u8]) -> Response<Body> {
    patched(shared, name, body, |node, patch| {
        if patch["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"] {
            return Some(failure(StatusCode::CONFLICT, "the object has been modified"));
        }
        node["spec"]["taints"] = patch["spec"]["taints"].clone();
        None
    })
}

/// Applies a strategic merge patch to a Node's conditions: they are merged by type, field by field.
fn patch_node_status(shared: &Shared, name: &str, body: &[u8]) -> Response<Body> {
    patched(shared, name, body, |node, patch| {
        let mut conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        for change in patch["status"]["conditions"].as_array().into_iter().flatten() {
            match conditions.iter_mut().find(|condition| condition["type"] == change["type"]) {
                Some(Value::Object(condition)) => {
                    condition.extend(change.as_object().cloned().unwrap_or_default());
                }
                _ => conditions.push(change.clone()),
            }
        }
        node["status"]["conditions"] = conditions.into();
        None
    })
}

/// Applies or deletes one Lease. A server-side apply replaces what its author has written before,
/// which is all of the object here.
async fn write_lease(
    shared: &Shared,
    namespace: &str,
    name: &str,
    request: Request<Incoming>,
) -> Response<Body> {
    let refused = {
        let state = shared.state();
        let code = state.refused.get(&Kind::Lease).copied().or(state.refused_patches);
        code.and_then(|code| StatusCode::from_u16(code).ok())
    };
    if let Some(code) = refused {
        return failure(code, "leases.coordination.k8s.io is forbidden");
    }
    let found = shared.state().store.get(Kind::Lease, namespace, name);
    match (request.method().clone(), found) {
        (Method::DELETE, Some(_)) => {
            shared.change(|state| state.store.delete(Kind::Lease, namespace, name));
            json_answer(StatusCode::OK, &json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
        }
        (Method::PATCH, found) => {
            let Ok(mut lease) = serde_json::from_slice::<Value>(&body(request).await) else {
                return failure(StatusCode::BAD_REQUEST, "not JSON");
            };
            lease["metadata"]["namespace"] = namespace.into();
            shared.change(|state| state.store.apply(Kind::Lease, lease.clone()));
            json_answer(if found.is_some() { StatusCode::OK } else { StatusCode::CREATED }, &lease)
        }
        _ => failure(StatusCode::NOT_FOUND, "not found"),
    }
}

/// Changes a Node and answers with it, unless `change` returns another response.
fn patched(
    shared: &Shared,
    name: &str,
    body: &[u8],
    change: impl FnOnce(&mut Value, &Value) -> Option<Response<Body>>,
) -> Response<Body> {
    let refused = shared.state().refused_patches.and_then(|code| StatusCode::from_u16(code).ok());
    if let Some(code) = refused {
        return failure(code, "nodes is forbidden");
    }
    let Ok(patch) = serde_json::from_slice::<Value>(body) else {
        return failure(StatusCode::BAD_REQUEST, "not JSON");
    };
    let selection = Selection { name: Some(name.to_owned()), ..Selection::default() };
    let found = shared.state().store.page(Kind::Node, &selection, 0, 1).0.pop();
    let Some(mut node) = found else { return failure(StatusCode::NOT_FOUND, "not found") };
    if let Some(response) = change(&mut node, &patch) {
        return response;
    }
    shared.change(|state| state.store.apply(Kind::Node, node.clone()));
    json_answer(StatusCode::OK, &node)
}

fn authorized(shared: &Shared, request: &Request<Incoming>) -> bool {
    let state = shared.state();
    let Some(tokens) = &state.tokens else { return true };
    let header = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    header.and_then(|value| value.strip_prefix("Bearer ")).is_some_and(|token| tokens.contains(token))
}

async fn list(
    shared: Arc<Shared>,
    kind: Kind,
    selection: &Selection,
    query: &HashMap<String, String>,
) -> Response<Body> {
    if held(&shared, kind).await.is_err() {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "stopping");
    }
    if shared.state().stalled.contains(&kind) {
        return streamed(stalling(Vec::new()));
    }
    let number = |key: &str| query.get(key).and_then(|text| text.parse::<usize>().ok());
    let start = number("continue").unwrap_or(0);
    let limit = number("limit").filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let state = shared.state();
    if is_too_large(&state, query) {
        return failure(StatusCode::GATEWAY_TIMEOUT, "Too large resource version");
    }
    let (items, more) = state.store.page(kind, selection, start, limit);
    let mut metadata = json!({"resourceVersion": state.store.version().to_string()});
    if more {
        metadata["continue"] = (start + limit).to_string().into();
    }
    json_answer(
        StatusCode::OK,
        &json!({
            "kind": format!("{}List", kind.name()),
            "apiVersion": kind.api_version(),
            "metadata": metadata,
            "items": items,
        }),
    )
}

/// Whether a request names a version that the cache does not reach. 0 stands for any version.
fn is_too_large(state: &State, query: &HashMap<String, String>) -> bool {
    let version = query.get("resourceVersion").and_then(|version| version.parse::<u64>().ok()).unwrap_or(0);
    version > 0 && (state.behind || version > state.store.version())
}

/// Waits until lists of a kind may be answered.
async fn held(shared: &Shared, kind: Kind) -> Result<(), RecvError> {
    let mut changed = shared.changed.subscribe();
    while shared.state().held.contains(&kind) {
        changed.changed().await?;
    }
    Ok(())
}

async fn watch(
    shared: Arc<Shared>,
    kind: Kind,
    selection: Selection,
    query: &HashMap<String, String>,
) -> Response<Body> {
    let after = query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
    if query.get("sendInitialEvents").is_some_and(|wanted| wanted == "true") {
        if is_too_large(&shared.state(), query) {
            return failure(StatusCode::GATEWAY_TIMEOUT, "Too large resource version");
        }
        return watch_from_all(shared, kind, selection).await;
    }
    {
        let state = shared.state();
        if state.gone_by_status && state.store.events(kind, &selection, after).is_err() {
            return failure(StatusCode::GONE, "too old resource version");
        }
    }
    streamed(lines(shared, kind, selection, after))
}

/// Serves a watch that begins with all objects.
async fn watch_from_all(shared: Arc<Shared>, kind: Kind, selection: Selection) -> Response<Body> {
    if held(&shared, kind).await.is_err() {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "stopping");
    }
    let (streaming, stalled, mut first, version) = {
        let state = shared.state();
        let stalled = state.stalled.contains(&kind);
        (state.streaming, stalled, state.store.initial_events(kind, &selection), state.store.version())
    };
    match streaming {
        Streaming::Refused => {
            let message =
                "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
            return failure(StatusCode::UNPROCESSABLE_ENTITY, message);
        }
        Streaming::Unknown => drop(first.pop()),
        Streaming::Given => {}
    }
    let text: Vec<Bytes> = first.iter().map(line).collect();
    if stalled {
        return streamed(stalling(text.into_iter().take(1).collect()));
    }
    let first = stream::iter([Ok(text.concat().into())]);
    streamed(first.chain(lines(shared, kind, selection, version)))
}

/// A body that begins with `beginning` and then stalls for ever.
fn stalling(beginning: Vec<Bytes>) -> impl Stream<Item = io::Result<Bytes>> + Send {
    stream::iter(beginning.into_iter().map(Ok)).chain(stream::pending())
}

fn streamed(lines: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response<Body> {
    let mut response = Response::new(StreamBody::new(lines.map(|line| line.map(Frame::data))).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The watch events as an endless stream of lines; an error where the watch is cut.
fn lines(
    shared: Arc<Shared>,
    kind: Kind,
    selection: Selection,
    after: u64,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let changed = shared.changed.subscribe();
    let cuts = shared.state().cuts;
    stream::unfold(Some((shared, changed, after)), move |position| {
        let selection = selection.clone();
        async move {
            let (shared, mut changed, mut after) = position?;
            loop {
                shared.voice().await;
                if shared.state().cuts != cuts {
                    return Some((Err(io::Error::other("cut")), None));
                }
                let events = shared.state().store.events(kind, &selection, after);
                match events {
                    Err(Gone) => {
                        let error = json!({"type": "ERROR", "object": status(StatusCode::GONE, "too old")});
                        return Some((Ok(line(&error)), None));
                    }
                    // The change is of another kind. An API server writes nothing then, not even an
                    // empty DATA frame.
                    Ok((events, version)) if events.is_empty() && version > after => after = version,
                    Ok((events, version)) if version > after => {
                        let text: Vec<Bytes> = events.iter().map(line).collect();
                        return Some((Ok(text.concat().into()), Some((shared, changed, version))));
                    }
                    Ok(_) => changed.changed().await.ok()?,
                }
            }
        }
    })
}

fn line(value: &Value) -> Bytes {
    format!("{value}\n").into()
}

fn selection(namespace: Option<String>, query: &HashMap<String, String>) -> Selection {
    let labels = query.get("labelSelector").map(String::as_str).unwrap_or_default();
    let fields = query.get("fieldSelector").map(String::as_str).unwrap_or_default();
    Selection {
        namespace,
        name: fields.strip_prefix("metadata.name=").map(str::to_owned),
        having: labels
            .split(',')
            .filter(|label| !label.is_empty() && !label.contains(['!', '=']))
            .map(str::to_owned)
            .collect(),
        without: labels.split(',').filter_map(|label| label.strip_prefix('!')).map(str::to_owned).collect(),
        with: labels
            .split(',')
            .filter_map(|label| label.split_once('='))
            .map(|(label, value)| (label.to_owned(), value.to_owned()))
            .collect(),
    }
}

fn parse_query(query: &str) -> HashMap<String, String> {
    form_urlencoded::parse(query.as_bytes()).into_owned().collect()
}

/// Reads the body of a request; one that breaks off is empty.
async fn body(request: Request<Incoming>) -> Bytes {
    request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default()
}

fn status(code: StatusCode, message: &str) -> Value {
    json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": code.canonical_reason().unwrap_or_default(),
        "code": code.as_u16(),
    })
}

fn failure(code: StatusCode, message: &str) -> Response<Body> {
    json_answer(code, &status(code, message))
}

fn json_answer(code: StatusCode, value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
