//! The root file system of containers: that of the image, or one with the agent that tests run and
//! the libraries that it loads.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::agent;
use crate::image::{Image, architecture};

/// The variable that names an archive of `cargo xtask image` to run containers from.
const VARIABLE: &str = "TRAFFIC_POLICY_IMAGE";
/// Folders of the dynamic linker.
const LIBRARIES: [&str; 3] = ["/lib", "/lib64", "/usr/lib"];

/// A prepared folder.
#[derive(Debug)]
pub struct Root {
    pub folder: PathBuf,
    pub entrypoint: Vec<String>,
    /// Folders of this machine that are mounted into it, by their names there.
    pub mounts: Vec<(PathBuf, String)>,
}

impl Root {
    /// The archive that the environment names, if any.
    pub fn image() -> Result<Option<Image>> {
        env::var_os(VARIABLE).map(|path| Image::read(Path::new(&path))).transpose()
    }

    pub(super) fn prepare(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let folder = folder.to_owned();
        if let Some(image) = Self::image()? {
            image.unpack(architecture(), &folder)?;
            let config = image.config(architecture())?;
            let entrypoint =
                config["config"]["Entrypoint"].as_array().context("the image has no entry point")?;
            let entrypoint = entrypoint.iter().filter_map(Value::as_str).map(str::to_owned).collect();
            return Ok(Self { folder, entrypoint, mounts: Vec::new() });
        }
        let program = agent::program()?;
        File::create(folder.join("traffic-policy-agent"))?;
        let mut mounts = vec![(fs::canonicalize(program)?, "/traffic-policy-agent".to_owned())];
        for library in LIBRARIES.iter().filter(|library| Path::new(library).is_dir()) {
            mounts.push((fs::canonicalize(library)?, (*library).to_owned()));
        }
        Ok(Self { folder, entrypoint: vec!["/traffic-policy-agent".to_owned()], mounts })
    }
}
