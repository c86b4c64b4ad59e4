//! A kernel of the archive, unpacked: its image, its modules as a disk, and an initial RAM disk
//! that mounts the root disk.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    arch::Arch,
    archive::{Archive, run},
    cpio,
    series::{Release, Series},
};

/// The modules that are needed to read the root disk, in the order in which they are loaded.
const EARLY: [&str; 4] = ["virtio_pci", "virtio_blk", "ext4", "virtio_rng"];

/// A kernel, an initrd and modules with which a machine is started.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    pub(super) series: Series,
    pub(super) release: String,
    pub(super) image: PathBuf,
    pub(super) initrd: PathBuf,
    /// The disk for `/lib/modules`.
    pub(super) modules_image: PathBuf,
}

impl Kernel {
    /// Fetches the kernel, unless it was fetched before.
    ///
    /// # Errors
    /// The archive cannot be reached, or a program that unpacks is missing.
    pub(super) fn fetch(folder: &Path, archive: &Archive, arch: Arch, release: &Release) -> Result<Self> {
        let name = &release.release;
        let folder = folder.join(format!("kernels/{arch}/{name}"));
        let kernel = Self {
            series: release.series,
            release: name.clone(),
            image: folder.join("vmlinuz"),
            initrd: folder.join("initrd"),
            modules_image: folder.join("modules.ext4"),
        };
        // The initrd is made last.
        if kernel.initrd.exists() {
            return Ok(kernel);
        }
        println!("vm: fetching Linux {name} (some 40 MB) …");
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let unpacked = folder.join("unpacked");
        let mut packages = vec![release.package.clone()];
        // Newer kernels consist of several packages.
        let mut depends = archive.depends(&packages)?;
        let depends = depends.remove(&release.package).unwrap_or_default();
        packages.extend(depends.there.into_iter().filter(|name| is_part(name)));
        archive.unpack(&packages, &unpacked)?;
        // Newer packages have the image in the folder of the modules.
        let places = [format!("boot/vmlinuz-{name}"), format!("usr/lib/modules/{name}/vmlinuz")];
        let found = places.iter().map(|place| unpacked.join(place)).find(|path| path.exists());
        let found = found.with_context(|| format!("the package {} has no kernel", release.package))?;
        fs::rename(found, &kernel.image)?;
        let modules = [unpacked.join("lib/modules"), unpacked.join("usr/lib/modules")];
        let modules = modules
            .into_iter()
            .find(|folder| folder.exists())
            .with_context(|| format!("none of {} has modules", packages.join(", ")))?;
        let base = folder.join("base");
        fs::create_dir_all(base.join("lib"))?;
        fs::rename(modules, base.join("lib/modules"))?;
        run(Command::new("/usr/sbin/depmod").arg("-b").arg(&base).arg(name))?;
        image(&base.join("lib/modules"), &kernel.modules_image, 16)?;
        initrd(&base.join("lib/modules").join(name), arch, archive, &folder, &kernel.initrd)?;
        fs::remove_dir_all(unpacked)?;
        fs::remove_dir_all(base)?;
        Ok(kernel)
    }
}

/// Whether a package is a part of a kernel, judged by its name.
pub(super) fn is_part(package: &str) -> bool {
    ["linux-binary-", "linux-modules-"].iter().any(|part| package.starts_with(part))
}

/// Makes a disk with the content of a folder, and `free` free mebibytes.
pub(super) fn image(folder: &Path, file: &Path, free: u64) -> Result<()> {
    let size = Command::new("du").args(["--summarize", "--block-size=1M"]).arg(folder).output()?;
    let size = String::from_utf8_lossy(&size.stdout);
    let size: u64 = size.split_whitespace().next().and_then(|size| size.parse().ok()).context("du failed")?;
    // The file system itself needs room, too.
    let size = size + size / 8 + free;
    let part = file.with_extension("part");
    match fs::remove_file(&part) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let mut command = Command::new("/usr/sbin/mke2fs");
    command.args(["-q", "-t", "ext4", "-O", "^has_journal", "-E", "root_owner=0:0", "-d"]);
    run(command.arg(folder).arg(&part).arg(format!("{size}M")))?;
    fs::rename(part, file).with_context(|| format!("{} cannot be put in place", file.display()))
}

/// Makes an initrd of busybox, the early modules, and the script that mounts the root disk.
fn initrd(modules: &Path, arch: Arch, archive: &Archive, folder: &Path, to: &Path) -> Result<()> {
    let base = folder.join("early");
    for name in ["bin", "dev", "proc", "root", "modules"] {
        fs::create_dir_all(base.join(name))?;
    }
    let busybox = folder.join("busybox");
    archive.unpack(&["busybox-static".to_owned()], &busybox)?;
    let program = [busybox.join("bin/busybox"), busybox.join("usr/bin/busybox")];
    let program = program.into_iter().find(|path| path.exists()).context("there is no busybox")?;
    fs::rename(program, base.join("bin/busybox"))?;
    fs::remove_dir_all(busybox)?;
    super::root::script(&base.join("init"), include_str!("guest/initrd.sh"))?;
    let depends = fs::read_to_string(modules.join("modules.dep"))
        .with_context(|| format!("{arch} modules have no list of what they depend on"))?;
    let mut order = String::new();
    let mut names = vec!["bin", "bin/busybox", "dev", "proc", "root", "init", "modules", "modules/order"];
    let paths = loading_order(&depends, &EARLY);
    let mut files = Vec::new();
    for path in &paths {
        let name =
            Path::new(path).file_name().and_then(|name| name.to_str()).context("a module has no name")?;
        let from = modules.join(path);
        let name = match name.strip_suffix(".xz") {
            Some(plain) => {
                let packed = Command::new("xz").args(["--decompress", "--stdout"]).arg(&from).output()?;
                fs::write(base.join("modules").join(plain), packed.stdout)?;
                plain
            }
            None => {
                fs::copy(&from, base.join("modules").join(name))?;
                name
            }
        };
        order.push_str(name);
        order.push('\n');
        files.push(format!("modules/{name}"));
    }
    fs::write(base.join("modules/order"), order)?;
    names.extend(files.iter().map(String::as_str));
    let archive = cpio::archive(&base, &names)?;
    let part = to.with_extension("part");
    fs::write(&part, archive)?;
    fs::remove_dir_all(base)?;
    Ok(fs::rename(part, to)?)
}

/// Returns the paths of modules and their dependencies, each after those it needs. `depends` has
/// the format of `modules.dep`; a module that is missing there is built into the kernel.
fn loading_order(depends: &str, wanted: &[&str]) -> Vec<String> {
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    for name in wanted {
        let line = depends.lines().find(|line| {
            let path = line.split(':').next().unwrap_or_default();
            let file = path.rsplit('/').next().unwrap_or_default();
            file.split('.').next().is_some_and(|stem| stem.replace('-', "_") == *name)
        });
        let Some((path, needs)) = line.and_then(|line| line.split_once(':')) else { continue };
        // The dependency that is named last is needed first.
        for path in needs.split_whitespace().rev().chain([path]) {
            if seen.insert(path.to_owned()) {
                order.push(path.to_owned());
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_module_after_what_it_needs() {
        let depends = "kernel/a/virtio_blk.ko.xz: kernel/v/virtio_ring.ko.xz kernel/v/virtio.ko.xz\nkernel/v/virtio.ko.xz:\nkernel/v/virtio_ring.ko.xz: kernel/v/virtio.ko.xz\nkernel/v/virtio-rng.ko: kernel/v/virtio.ko.xz\n";
        let order = loading_order(depends, &["virtio_pci", "virtio_blk", "virtio_rng"]);
        assert_eq!(
            order,
            [
                "kernel/v/virtio.ko.xz",
                "kernel/v/virtio_ring.ko.xz",
                "kernel/a/virtio_blk.ko.xz",
                "kernel/v/virtio-rng.ko"
            ]
        );
    }
}
