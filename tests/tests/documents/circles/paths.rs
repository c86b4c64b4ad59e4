//! The modules, paths and re-exports of a file, taken from its tokens: those within macros and
//! attributes are found, too, and comments are none.

use std::collections::BTreeMap;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// A path as its segments.
pub type Path = Vec<String>;

/// The paths, modules and re-exports in the text of a module.
#[derive(Debug, Default)]
pub struct Module {
    /// The modules that are files, each with the file of its attribute `path`.
    pub files: Vec<(String, Option<String>)>,
    /// The modules within this file.
    pub inner: Vec<(String, Module)>,
    /// The paths that are used.
    pub used: Vec<Path>,
    /// The paths that are re-exported, by their names here.
    pub exports: BTreeMap<String, Path>,
}

impl Module {
    pub fn of(tokens: TokenStream) -> Self {
        let mut module = Self::default();
        module.read(tokens);
        module
    }

    fn read(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut rest = tokens.as_slice();
        let (mut public, mut file) = (false, None);
        while let Some((first, after)) = rest.split_first() {
            match rest {
                [TokenTree::Punct(hash), TokenTree::Group(attribute), after @ ..]
                    if hash.as_char() == '#' && attribute.delimiter() == Delimiter::Bracket =>
                {
                    let text = attribute.stream().to_string().replace(' ', "");
                    file = text.strip_prefix("path=").map(|file| file.trim_matches('"').to_owned()).or(file);
                    self.read(attribute.stream());
                    rest = if text == "cfg(test)" { after_item(after) } else { after };
                }
                [TokenTree::Ident(word), TokenTree::Ident(name), next, after @ ..] if word == "mod" => {
                    match next {
                        TokenTree::Group(content) => {
                            self.inner.push((name.to_string(), Self::of(content.stream())));
                        }
                        _ => self.files.push((name.to_string(), file.take())),
                    }
                    (public, rest) = (false, after);
                }
                [TokenTree::Ident(word), after @ ..] if word == "use" && !is_punct(after.first(), '<') => {
                    let (item, after) = after.split_at(item_length(after));
                    for (name, path) in leaves(&[], item) {
                        if public {
                            self.exports.insert(name, path);
                        } else {
                            self.used.push(path);
                        }
                    }
                    (public, rest) = (false, after);
                }
                [TokenTree::Ident(word), after @ ..] if word == "pub" => {
                    public = true;
                    // The scope in `pub(crate)` is no path.
                    rest = match after {
                        [TokenTree::Group(scope), after @ ..]
                            if scope.delimiter() == Delimiter::Parenthesis =>
                        {
                            after
                        }
                        _ => after,
                    };
                }
                [TokenTree::Ident(_), ..] => {
                    let (path, after) = path(rest);
                    if path.len() > 1 {
                        self.used.push(path);
                    }
                    (public, rest) = (false, after);
                }
                _ => {
                    if let TokenTree::Group(group) = first {
                        self.read(group.stream());
                    }
                    // A path after `::` begins in another crate, or in a type.
                    rest = after_separator(rest).map_or(after, |after| path(after).1);
                }
            }
        }
    }
}

fn is_punct(token: Option<&TokenTree>, letter: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == letter)
}

/// Returns the tokens after `::`, if these begin with it.
fn after_separator(tokens: &[TokenTree]) -> Option<&[TokenTree]> {
    match tokens {
        [TokenTree::Punct(first), TokenTree::Punct(second), after @ ..]
            if first.as_char() == ':' && first.spacing() == Spacing::Joint && second.as_char() == ':' =>
        {
            Some(after)
        }
        _ => None,
    }
}

/// Returns the path at the beginning of tokens, and the tokens after it.
fn path(tokens: &[TokenTree]) -> (Path, &[TokenTree]) {
    let (mut path, mut rest) = (Path::new(), tokens);
    while let [TokenTree::Ident(segment), after @ ..] = rest {
        path.push(segment.to_string());
        rest = after;
        match after_separator(after) {
            Some(after @ [TokenTree::Ident(_), ..]) => rest = after,
            _ => break,
        }
    }
    (path, rest)
}

/// Returns the number of tokens before the semicolon that ends an item.
fn item_length(tokens: &[TokenTree]) -> usize {
    tokens.iter().position(|token| is_punct(Some(token), ';')).unwrap_or(tokens.len())
}

/// Returns the tokens after an item.
fn after_item(tokens: &[TokenTree]) -> &[TokenTree] {
    let block =
        |token: &TokenTree| matches!(token, TokenTree::Group(block) if block.delimiter() == Delimiter::Brace);
    let end = item_length(tokens);
    let block = tokens.iter().position(block).unwrap_or(tokens.len());
    tokens.get(end.min(block) + 1..).unwrap_or_default()
}

/// Returns the leaves of a tree of `use`: their names, and their paths.
fn leaves(before: &[String], tree: &[TokenTree]) -> Vec<(String, Path)> {
    let mut found = Vec::new();
    for branch in tree.split(|token| is_punct(Some(token), ',')).filter(|branch| !branch.is_empty()) {
        let (segments, rest) = path(branch);
        let mut whole: Path = before.iter().cloned().chain(segments).collect();
        match after_separator(rest).unwrap_or(rest) {
            [TokenTree::Group(group)] => {
                let tree: Vec<_> = group.stream().into_iter().collect();
                found.extend(leaves(&whole, &tree));
            }
            rest => {
                // `a::{self}` is `a`.
                if whole.len() > 1 && whole.last().is_some_and(|last| last == "self") {
                    whole.pop();
                }
                let name = match rest {
                    [TokenTree::Ident(_), TokenTree::Ident(name)] => name.to_string(),
                    [TokenTree::Punct(star)] => star.to_string(),
                    _ => whole.last().cloned().unwrap_or_default(),
                };
                found.push((name, whole));
            }
        }
    }
    found
}
