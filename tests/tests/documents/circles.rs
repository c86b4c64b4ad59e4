//! Circles of modules: files of a crate that use each other's items, directly or through others. A
//! reader of one of them has to know all of them.
//!
//! A file uses another one if a path in it leads to an item of the other; a path that leads through
//! a re-export uses the file in which the item is defined. Re-exports themselves and the use of a
//! module's own descendants, which it puts in order, do not count; nor do unit tests.

mod graph;
mod paths;
mod resolve;

use std::{fs, path::Path};

use self::{
    graph::circles,
    resolve::{Crate, Read},
};
use crate::workspace::{metadata, own_packages, text};

/// Returns the circles of a crate with the edges of each.
fn found(root: &Path, read: Read<'_>) -> Vec<String> {
    let own = Crate::read(root, read);
    assert!(!own.is_empty(), "{} cannot be read", root.display());
    circles(&own.edges())
}

#[test]
fn no_crate_has_a_circle_of_modules() {
    let metadata = metadata();
    let mut wrong = Vec::new();
    let mut crates = 0;
    for package in own_packages(&metadata) {
        for target in package["targets"].as_array().unwrap() {
            crates += 1;
            let found = found(Path::new(text(&target["src_path"])), &|path| fs::read_to_string(path).ok());
            let (package, kind) = (text(&package["name"]), text(&target["kind"][0]));
            let name = format!("{package}, {kind} {}", text(&target["name"]));
            wrong.extend(found.into_iter().map(|circle| format!("{name}: {circle}")));
        }
    }
    assert!(crates > 12, "{crates}");
    assert!(wrong.is_empty(), "files use each other's items in circles:\n{}", wrong.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the circles of a crate with these files.
    fn of(files: &[(&str, &str)]) -> Vec<String> {
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new("src").join(name) == path);
            file.map(|(_, text)| (*text).to_owned())
        };
        found(Path::new("src/lib.rs"), &read)
    }

    const ROOT: (&str, &str) = ("lib.rs", "mod a;\nmod b;\n");

    #[test]
    fn two_that_use_each_other() {
        let circle = ["a ↔ b: a → b, b → a"];
        let uses = ("a.rs", "use crate::b::{self, One};\npub fn two() {}\n");
        assert_eq!(of(&[ROOT, uses, ("b.rs", "use super::a;\npub struct One;\n")]), circle);
        // A path in a function, a macro or an attribute is a use, too.
        for used in [
            "fn one() { crate::a::two(); }",
            "fn one() { println!(\"{}\", super::a::two()); }",
            "#[arg(value_parser = crate::a::two)] struct One;",
        ] {
            assert_eq!(of(&[ROOT, uses, ("b.rs", used)]), circle, "{used}");
        }
    }

    #[test]
    fn one_after_the_other_is_no_circle() {
        let uses = ("a.rs", "use crate::b::One;\npub fn two() {}\n");
        for unused in [
            "pub struct One;",
            "//! See [`crate::a`].\n/* crate::a::two() */ const TEXT: &str = \"crate::a::two()\";",
            "#[cfg(test)]\nmod tests {\n    use crate::a::two;\n}\n",
            "use a::two;\nuse ::a::two;\n",
        ] {
            assert_eq!(of(&[ROOT, uses, ("b.rs", unused)]), Vec::<String>::new(), "{unused}");
        }
    }

    #[test]
    fn a_circle_of_three() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; mod d;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use crate::c::C; use crate::d;"),
            ("c/mod.rs", "use super::a; use crate::d::D;"),
            ("d.rs", ""),
        ];
        assert_eq!(of(&files), ["a ↔ b ↔ c: a → b, b → c, c → a"]);
    }

    #[test]
    fn through_re_exports() {
        let outside = ("b.rs", "use crate::Two; pub struct One;");
        let inside = ("a.rs", "use crate::b::One; pub struct Two;");
        assert_eq!(
            of(&[("lib.rs", "mod a; mod b; pub use a::Two;"), inside, outside]),
            ["a ↔ b: a → b, b → a"]
        );
        // By another name, and a module instead of an item.
        let renamed = ("lib.rs", "mod a; mod b; pub(crate) use self::{a as c, b::One};");
        let outside = ("b.rs", "use crate::c::Two;");
        assert_eq!(of(&[renamed, inside, outside]), ["a ↔ b: a → b, b → a"]);
        // The re-export itself is no use of a file beside it.
        let beside = ("b.rs", "pub use crate::a::Two; pub struct One;");
        assert_eq!(of(&[ROOT, inside, beside]), Vec::<String>::new());
    }

    #[test]
    fn a_parent_puts_its_children_in_order() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod one; mod two; use self::one::One; struct Own; fn own() { two::two() }"),
            ("a/one.rs", "use super::Own; pub struct One;"),
            ("a/two.rs", "use super::one::One; pub fn two() {}"),
        ];
        assert_eq!(of(&files), Vec::<String>::new());
        // An edge out of the family leads back into it.
        let mut longer = files.to_vec();
        longer[0].1 = "mod a; mod b;";
        longer[2].1 = "use crate::b::B;";
        longer.push(("b.rs", "use crate::a::Own; pub struct B;"));
        assert_eq!(of(&longer), Vec::<String>::new());
        longer[1].1 = "mod one; use crate::b::B;";
        assert_eq!(of(&longer), ["a ↔ b: a → b, b → a"]);
    }

    #[test]
    fn modules_within_a_file_belong_to_it() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "mod inner { use super::super::b::B; pub struct A; }"),
            ("b.rs", "use crate::a::inner::A; pub struct B;"),
        ];
        assert_eq!(of(&files), ["a ↔ b: a → b, b → a"]);
    }
}
