//! Packages linked into the agent, as SPDX 2.3: <https://spdx.github.io/spdx-spec/v2.3/>.
//!
//! It lists the crates that cargo resolves for the agent alone, without macros and build scripts;
//! those of the packet path, which the agent contains as an object; and the parts that are not
//! crates: std, the unwinder, the C library.
//!
//! `cargo-cyclonedx` would replace the call of `cargo tree` alone: it writes CycloneDX instead of
//! SPDX, one document for each package and target, with macros among the crates. The packet path,
//! which is of another target, and the parts that are not crates would have to be merged into it
//! here.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::layer::digest;
use crate::{cargo, vm::arch::Arch};

const AGENT: &str = "traffic-policy-agent";
const PACKET_PATH: &str = "traffic-policy-ebpf";

/// A part that is linked in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) version: String,
    /// The licence as an SPDX expression.
    pub(super) licence: String,
    /// The origin as a package URL, <https://github.com/package-url/purl-spec>; `None`: this
    /// repository.
    pub(super) purl: Option<String>,
}

/// Returns the document for the program that these sources are built into. Other builds of the same
/// commit give the same document.
pub(super) fn list(
    sources: &Path,
    archs: &[Arch],
    others: BTreeSet<Part>,
    commit_time: &str,
) -> Result<Vec<u8>> {
    let mut parts = others;
    for arch in archs {
        parts.extend(crates(sources, AGENT, &format!("{arch}-unknown-linux-musl"))?);
        parts.extend(crates(sources, PACKET_PATH, "bpfel-unknown-none")?);
    }
    let mut text = serde_json::to_vec_pretty(&document(&parts, commit_time))?;
    text.push(b'\n');
    Ok(text)
}

/// Returns the crates that a package is linked with on a target, including itself.
fn crates(sources: &Path, package: &str, target: &str) -> Result<BTreeSet<Part>> {
    let mut command = cargo::cargo();
    command.current_dir(sources);
    command.args(["tree", "--locked", "--package", package, "--target", target]);
    command.args(["--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}\t{l}"]);
    let output = command.output().context("cargo cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo tree: {said}");
    String::from_utf8_lossy(&output.stdout).lines().filter(|line| !line.is_empty()).map(part).collect()
}

/// Parses `aya v0.14.0<TAB>MIT OR Apache-2.0`. The version is followed by the folder for a crate of
/// this repository, and by `(*)` for a crate that was listed before.
fn part(line: &str) -> Result<Part> {
    let (package, licence) = line.split_once('\t').with_context(|| format!("cargo tree said {line:?}"))?;
    let mut words = package.split(' ');
    let (name, version) =
        words.next().zip(words.next()).with_context(|| format!("cargo tree said {line:?}"))?;
    let version = version.trim_start_matches('v');
    let of_this_repository = words.next().is_some_and(|word| word.starts_with("(/"));
    let licence = licence.trim_end_matches("(*)").trim();
    Ok(Part {
        name: name.to_owned(),
        version: version.to_owned(),
        // An older notation for OR.
        licence: licence.replace('/', " OR "),
        purl: (!of_this_repository).then(|| format!("pkg:cargo/{name}@{version}")),
    })
}

fn document(parts: &BTreeSet<Part>, time: &str) -> Value {
    let identifier = |part: &Part| {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '.';
        format!("SPDXRef-{}-{}", part.name, part.version).replace(|c| !fits(c), "-")
    };
    let packages: Vec<Value> = parts
        .iter()
        .map(|part| {
            let mut package = json!({
                "SPDXID": identifier(part),
                "name": part.name,
                "versionInfo": part.version,
                "downloadLocation": if part.purl.is_some() { "NOASSERTION" } else { env!("CARGO_PKG_REPOSITORY") },
                "filesAnalyzed": false,
                "licenseConcluded": "NOASSERTION",
                "licenseDeclared": if part.licence.is_empty() { "NOASSERTION" } else { &part.licence },
                "copyrightText": "NOASSERTION",
            });
            if let Some(purl) = &part.purl {
                package["externalRefs"] = json!([{
                    "referenceCategory": "PACKAGE-MANAGER",
                    "referenceType": "purl",
                    "referenceLocator": purl,
                }]);
            }
            package
        })
        .collect();
    let root = parts.iter().find(|part| part.name == AGENT).map(identifier).unwrap_or_default();
    let mut relationships = vec![json!({
        "spdxElementId": "SPDXRef-DOCUMENT",
        "relationshipType": "DESCRIBES",
        "relatedSpdxElement": root,
    })];
    relationships.extend(parts.iter().filter(|part| part.name != AGENT).map(|part| {
        json!({
            "spdxElementId": root,
            "relationshipType": "CONTAINS",
            "relatedSpdxElement": identifier(part),
        })
    }));
    // SPDX requires that a document with other contents has another name.
    let content = digest(Value::from(packages.clone()).to_string().as_bytes()).replace(':', "-");
    json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": concat!("traffic-policy-", env!("CARGO_PKG_VERSION")),
        "documentNamespace": format!("{}/spdx/{content}", env!("CARGO_PKG_REPOSITORY")),
        "creationInfo": { "created": time, "creators": ["Tool: cargo-xtask-image"] },
        "packages": packages,
        "relationships": relationships,
    })
}

/// Returns the time of the commit, which SPDX requires and which does not depend on this machine's
/// clock; 1970 outside a repository.
pub(super) fn commit_time() -> String {
    let mut git = Command::new("git");
    git.current_dir(cargo::root()).env("TZ", "UTC");
    git.args(["log", "-1", "--date=format-local:%Y-%m-%dT%H:%M:%SZ", "--format=%cd"]);
    let time = cargo::output(&mut git).map(|time| time.trim().to_owned());
    time.filter(|time| !time.is_empty()).unwrap_or_else(|| "1970-01-01T00:00:00Z".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_cargo_tree() {
        let own = part("traffic-policy-ebpf v0.1.0 (/src/traffic-policy-ebpf)\tMIT OR Apache-2.0").unwrap();
        assert_eq!((&*own.name, &*own.version, own.purl), ("traffic-policy-ebpf", "0.1.0", None));
        let again = part("memchr v2.8.0\tUnlicense/MIT (*)").unwrap();
        assert_eq!(again.purl.as_deref(), Some("pkg:cargo/memchr@2.8.0"));
        assert_eq!(again.licence, "Unlicense OR MIT");
        assert!(part("nonsense").is_err());
    }

    /// The list is that of the current workspace: macros, and crates that only tests and builds
    /// use, are not shipped.
    #[test]
    fn what_is_linked_in_and_no_more() {
        let mut parts = crates(cargo::root(), AGENT, "x86_64-unknown-linux-musl").unwrap();
        parts.extend(crates(cargo::root(), PACKET_PATH, "bpfel-unknown-none").unwrap());
        let has = |name: &str| parts.iter().any(|part| part.name == name);
        for name in [AGENT, PACKET_PATH, "aya", "aya-ebpf", "kube", "ring", "tokio"] {
            assert!(has(name), "{name} is linked in");
        }
        for name in ["serde_derive", "clap_derive", "aya-build", "proptest", "tempfile", "windows-sys", "cc"]
        {
            assert!(!has(name), "{name} is not linked in");
        }
        let first = document(&parts, "1970-01-01T00:00:00Z");
        assert_eq!(first, document(&parts, "1970-01-01T00:00:00Z"));
        let packages = first["packages"].as_array().unwrap();
        let identifiers: BTreeSet<_> =
            packages.iter().map(|package| package["SPDXID"].as_str().unwrap()).collect();
        assert_eq!(identifiers.len(), parts.len());
        let relationships = first["relationships"].as_array().unwrap();
        assert_eq!(relationships.len(), parts.len());
        for relationship in relationships {
            assert!(
                identifiers.contains(relationship["relatedSpdxElement"].as_str().unwrap()),
                "{relationship}"
            );
        }
        let without = packages.iter().filter(|package| package["licenseDeclared"] == "NOASSERTION");
        assert_eq!(without.count(), 0, "each crate says its licence");
        let mut fewer = parts.clone();
        fewer.pop_last();
        assert_ne!(document(&fewer, "")["documentNamespace"], first["documentNamespace"]);
    }
}
