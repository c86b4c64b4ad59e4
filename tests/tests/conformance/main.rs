//! Verdicts on packets, compared with kube-proxy's: `explain`, which runs the real programs,
//! evaluates thousands of flows whose result is known.
//!
//! The cases of `testdata/conformance` are written out, one folder each; the others follow from
//! kube-proxy's rules, which [`reference`] restates independently.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod addresses;
mod cases;
mod deviations;
mod explain;
mod nobody;
mod policy_matrix;
mod ranges;
mod reference;
mod topology;
