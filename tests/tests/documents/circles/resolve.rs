//! The modules of a crate, and the files that paths lead to.

use std::{
    collections::{BTreeMap, BTreeSet},
    path,
};

use super::{
    graph::Edges,
    paths::{Module, Path},
};

/// The longest chain of re-exports that is followed.
const CHAIN: usize = 8;

/// Returns the text of a file, if it exists.
pub type Read<'r> = &'r dyn Fn(&path::Path) -> Option<String>;

/// A crate as its modules, by their paths from the root.
#[derive(Default)]
pub struct Crate {
    modules: BTreeMap<Path, Module>,
    /// The modules that are files.
    files: BTreeSet<Path>,
}

impl Crate {
    /// Reads a crate from its root file.
    pub fn read(root: &path::Path, read: Read<'_>) -> Self {
        let mut own = Self::default();
        let folder = root.parent().unwrap();
        own.add_file(Path::new(), root, folder, read);
        own
    }

    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }

    /// Adds a file and those of the modules in it, which lie in `folder`. Returns whether it
    /// exists.
    fn add_file(&mut self, name: Path, file: &path::Path, folder: &path::Path, read: Read<'_>) -> bool {
        let Some(text) = read(file) else { return false };
        let tokens = text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.files.insert(name.clone());
        self.add(name, Module::of(tokens), file, folder, read);
        true
    }

    fn add(
        &mut self,
        name: Path,
        mut module: Module,
        file: &path::Path,
        folder: &path::Path,
        read: Read<'_>,
    ) {
        for (child, elsewhere) in std::mem::take(&mut module.files) {
            let own = child_of(&name, &child);
            let within = folder.join(&child);
            let found = match elsewhere {
                Some(elsewhere) => {
                    let elsewhere = file.with_file_name(elsewhere);
                    self.add_file(own, &elsewhere, elsewhere.parent().unwrap(), read)
                }
                None => {
                    self.add_file(own.clone(), &folder.join(format!("{child}.rs")), &within, read)
                        || self.add_file(own, &within.join("mod.rs"), &within, read)
                }
            };
            assert!(found, "{} has no file of its module {child}", file.display());
        }
        for (child, inner) in std::mem::take(&mut module.inner) {
            self.add(child_of(&name, &child), inner, file, &folder.join(&child), read);
        }
        self.modules.insert(name, module);
    }

    /// Returns the files that each file uses, without its descendants.
    pub fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (name, module) in &self.modules {
            let from = self.file(name);
            let to = module.used.iter().filter_map(|path| self.resolve(name, path, CHAIN));
            let to = to.map(|module| self.file(&module).to_vec()).filter(|to| !to.starts_with(from));
            edges.entry(shown(from)).or_default().extend(to.map(|to| shown(&to)));
        }
        edges
    }

    /// Returns the path of the file that a module is in.
    fn file<'m>(&self, module: &'m [String]) -> &'m [String] {
        let mut above = (0..=module.len()).rev().map(|length| &module[..length]);
        above.find(|name| self.files.contains(*name)).unwrap_or_default()
    }

    /// Returns the module that defines the item of a path, or that the path is of; `None` if the
    /// path leads out of the crate.
    fn resolve(&self, base: &[String], path: &[String], chain: usize) -> Option<Path> {
        let (mut module, mut rest) = (base.to_vec(), path);
        match path.first()?.as_str() {
            "crate" => (module, rest) = (Path::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    module.pop();
                    rest = &rest[1..];
                }
            }
            child if self.modules.contains_key(&child_of(base, child)) => {}
            _ => return None,
        }
        while let Some((next, after)) = rest.split_first() {
            let child = child_of(&module, next);
            if self.modules.contains_key(&child) {
                (module, rest) = (child, after);
                continue;
            }
            if let Some(target) = self.modules[&module].exports.get(next).filter(|_| chain > 0) {
                let target = [target, after].concat();
                // An item of another crate belongs to the module that re-exports it.
                return self.resolve(&module, &target, chain - 1).or(Some(module));
            }
            break;
        }
        Some(module)
    }
}

fn child_of(module: &[String], child: &str) -> Path {
    [module, &[child.to_owned()]].concat()
}

fn shown(module: &[String]) -> String {
    if module.is_empty() { "the root".to_owned() } else { module.join("::") }
}
