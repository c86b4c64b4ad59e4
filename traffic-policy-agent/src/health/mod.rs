//! Answers to load balancers and probes.
