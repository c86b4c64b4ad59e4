//! Where Services, EndpointSlices and Nodes come from: the Kubernetes API or a folder of manifests.
