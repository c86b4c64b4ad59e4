//! The reason of a failed request, as it is logged once.

/// Returns the API server's own message, or what kept it from being reached.
pub(super) fn of(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}
