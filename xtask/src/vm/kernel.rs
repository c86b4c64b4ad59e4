//! A kernel of the archive, unpacked: its image, its modules as a disk, and an initial RAM disk
//! that mounts the root disk.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::{
    arch::Arch,
    archive::Archive,
    cpio, disk,
    series::{Release, Series},
};
use crate::{cargo, files};

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
        files::remove(&folder)?;
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
        cargo::quietly(Command::new("/usr/sbin/depmod").arg("-b").arg(&base).arg(name))?;
        disk::make(&base.join("lib/modules"), &kernel.modules_image, 16)?;
        initrd(&base, name, archive, &folder, &kernel.initrd)?;
        fs::remove_dir_all(unpacked)?;
        fs::remove_dir_all(base)?;
        Ok(kernel)
    }
}

/// Whether a package is a part of a kernel, judged by its name. `linux-base-VERSION` has the list
/// of the modules that are built in, without which modprobe takes them for missing.
pub(super) fn is_part(package: &str) -> bool {
    ["linux-base-", "linux-binary-", "linux-modules-"].iter().any(|part| package.starts_with(part))
}

/// Makes an initrd of busybox, the early modules of a release with all that they depend on, and the
/// script that mounts the root disk. `root` is the folder above `lib/modules`.
fn initrd(root: &Path, release: &str, archive: &Archive, folder: &Path, to: &Path) -> Result<()> {
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
    disk::script(&base.join("init"), include_str!("guest/initrd.sh"))?;
    let mut probe = Command::new("/usr/sbin/modprobe");
    probe.args(["--show-depends", "--all", "--config", "/dev/null", "--dirname"]).arg(root);
    let listed = probe.args(["--set-version", release]).args(EARLY).output();
    let listed = listed.context("modprobe cannot be started")?;
    ensure!(listed.status.success(), "modprobe: {}", String::from_utf8_lossy(&listed.stderr).trim());
    let mut modules: Vec<String> = Vec::new();
    // Lines of modules that are built into the kernel begin with another word.
    for line in
        String::from_utf8_lossy(&listed.stdout).lines().filter_map(|line| line.strip_prefix("insmod "))
    {
        let path = Path::new(line.trim_end());
        let name = path.file_name().and_then(|name| name.to_str()).context("a module has no name")?;
        let plain = name.trim_end_matches(".xz");
        if modules.iter().any(|known| known == plain) {
            continue;
        }
        let to = base.join("modules").join(plain);
        if plain == name {
            files::copy(path, &to)?;
        } else {
            let packed = Command::new("xz").args(["--decompress", "--stdout"]).arg(path).output()?;
            ensure!(packed.status.success(), "xz does not unpack {}", path.display());
            fs::write(to, packed.stdout)?;
        }
        modules.push(plain.to_owned());
    }
    fs::write(base.join("modules/order"), modules.join("\n") + "\n")?;
    let files = ["bin", "bin/busybox", "dev", "proc", "root", "init", "modules", "modules/order"];
    let modules = modules.iter().map(|module| format!("modules/{module}"));
    let files: Vec<_> = files.map(str::to_owned).into_iter().chain(modules).collect();
    let archive = cpio::archive(&base, &files)?;
    let part = to.with_extension("part");
    fs::write(&part, archive)?;
    fs::remove_dir_all(base)?;
    Ok(fs::rename(part, to)?)
}
