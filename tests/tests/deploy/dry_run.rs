//! Objects of `deploy/`, applied to a real API server as a dry run: whatever it would refuse is
//! reported here.

use std::io::Write;

use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use traffic_policy_testing::real_api_server::RealApiServer;

use crate::{FOLDERS, objects};

#[tokio::test]
async fn an_api_server_takes_every_object() {
    let Some(server) = RealApiServer::start().await.unwrap() else {
        let why = "KUBEBUILDER_ASSETS is not set";
        writeln!(std::io::stderr(), "SKIPPED an_api_server_takes_every_object: {why}").unwrap();
        return;
    };
    let mut how = PatchParams::apply("traffic-policy-tests").validation_strict();
    how.dry_run = true;
    for folder in FOLDERS {
        for object in objects(folder) {
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            let types = object.types.clone().unwrap();
            let kind = ApiResource::from_gvk(&GroupVersionKind::try_from(&types).unwrap());
            let client = server.admin().unwrap();
            let api: Api<DynamicObject> = match &object.metadata.namespace {
                Some(namespace) => Api::namespaced_with(client, namespace, &kind),
                None => Api::all_with(client, &kind),
            };
            let name = object.metadata.name.clone().unwrap();
            let taken = api.patch(&name, &how, &Patch::Apply(&object)).await;
            assert!(taken.is_ok(), "{folder}: {} {name}: {}", types.kind, taken.unwrap_err());
        }
    }
}
