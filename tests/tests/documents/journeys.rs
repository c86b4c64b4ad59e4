//! docs/architecture.md: the journeys, row by row beside the code, and the drawing of the packet's
//! way, which is that of the code.

use std::collections::{BTreeMap, BTreeSet};

use crate::page;

const PAGE: &str = "docs/architecture.md";
/// The drawing is in this file's header.
const DRAWING: &str = "traffic-policy-ebpf/src/datapath.rs";
/// Programs are named here, and so called by the kernel.
const PROGRAMS: &str = "traffic-policy-ebpf/src/main.rs";
/// The files whose calls among each other are all to be named.
const DATAPATH: &str = "traffic-policy-ebpf/src/datapath/";

/// Some files, and the functions in them that a row names: `name`, or `module::name` where two of a
/// journey have one name.
#[derive(Debug)]
struct Row {
    number: String,
    files: Vec<String>,
    functions: Vec<String>,
}

#[derive(Debug)]
struct Journey {
    name: String,
    rows: Vec<Row>,
}

#[test]
fn functions_are_in_the_files_that_are_named() {
    let mut missing = Vec::new();
    for journey in journeys() {
        for Row { number, files, functions } in &journey.rows {
            let sources: Vec<_> = files.iter().map(|file| code(file)).collect();
            let lacks = functions.iter().filter(|name| sources.iter().all(|text| body(text, name).is_none()));
            missing.extend(lacks.map(|name| format!("{} {number}: no {name} in {files:?}", journey.name)));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// A row's functions are called by code of the rows above it or of its own, or are programs.
#[test]
fn functions_are_called_from_the_rows_before() {
    let mut strays = Vec::new();
    let programs = code(PROGRAMS);
    for journey in journeys() {
        let mut above = vec![programs.clone()];
        for (at, Row { number, files, functions }) in journey.rows.iter().enumerate() {
            above.extend(files.iter().map(|file| code(file)));
            let called = |name: &String| above.iter().any(|text| call(text, name).is_some());
            // Whoever calls the first row is outside of the journey.
            let strange = functions.iter().filter(|name| at > 0 && !called(name));
            strays.extend(
                strange.map(|name| format!("{} {number}: nothing before calls {name}", journey.name)),
            );
        }
    }
    assert!(strays.is_empty(), "{}", strays.join("\n"));
}

/// A function that calls two others of its journey calls the one of the earlier row first.
#[test]
fn functions_are_called_in_the_order_of_the_rows() {
    let mut wrong = Vec::new();
    let mut compared = 0;
    for journey in journeys() {
        let named: BTreeSet<_> = journey
            .rows
            .iter()
            .flat_map(|row| {
                row.files.iter().flat_map(|file| row.functions.iter().map(move |name| (file, name)))
            })
            .collect();
        for (file, caller) in named {
            let text = code(file);
            let Some(body) = body(&text, caller) else { continue };
            let mut last: Option<(usize, &str)> = None;
            for row in &journey.rows {
                // A row that is reached twice is a row twice.
                let calls =
                    row.functions.iter().filter(|name| *name != caller && !is_repeated(&journey, name));
                let first = calls.filter_map(|name| Some((call(body, name)?, name.as_str()))).min();
                let Some((at, name)) = first else { continue };
                if let Some((before, former)) = last {
                    compared += 1;
                    if at < before {
                        wrong.push(format!(
                            "{} {}: {caller} of {file} calls {name} before {former}",
                            journey.name, row.number
                        ));
                    }
                }
                last = Some((at, name));
            }
        }
    }
    assert!(compared > 20, "only {compared} pairs of calls were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The reverse: a call of `module::function` in a row's function leads to a function or a file that
/// the chapter of journeys names, if only as an exit or among what is left out.
#[test]
fn calls_within_the_packet_path_are_named() {
    let text = page::text(PAGE);
    let chapter = text.split("\n## ").find(|chapter| chapter.starts_with("Journeys\n")).unwrap();
    let named: BTreeSet<_> = chapter.lines().flat_map(page::code_spans).collect();
    let modules = modules();
    let (mut unnamed, mut compared) = (BTreeSet::new(), 0);
    for Row { files, functions, .. } in journeys().iter().flat_map(|journey| &journey.rows) {
        for file in files.iter().filter(|file| file.starts_with(DATAPATH)) {
            let text = code(file);
            for body in functions.iter().filter_map(|name| body(&text, name)) {
                for (module, function) in paths(body) {
                    let files = modules.get(module).into_iter().flatten();
                    let files: Vec<_> = files.filter(|path| defines(path, function)).collect();
                    compared += files.len();
                    let path = format!("{module}::{function}");
                    let links = |path: &&String| chapter.contains(&format!("](../{path})"));
                    if !files.is_empty() && !named.contains(&*path) && !files.iter().any(links) {
                        unnamed.insert(format!("{file}: {path}"));
                    }
                }
            }
        }
    }
    assert!(compared > 50, "only {compared} calls were found");
    assert!(unnamed.is_empty(), "{PAGE} names neither these nor their files: {unnamed:#?}");
}

/// A reader needs few files for each of the journeys that most questions are about.
#[test]
fn the_journeys_of_packets_and_endpoints_are_short() {
    let limits =
        [("A SYN to a node port", 10), ("A packet of an established flow", 6), ("An endpoint's change", 12)];
    for (name, most) in limits {
        let journey = journeys().into_iter().find(|journey| journey.name == name);
        let journey = journey.unwrap_or_else(|| panic!("{PAGE} has no journey {name:?}"));
        let files: BTreeSet<_> = journey.rows.iter().flat_map(|row| &row.files).collect();
        assert!(files.len() <= most, "{name}: {} files: {files:#?}", files.len());
    }
}

#[test]
fn the_drawing_is_that_of_the_code() {
    let text = page::text(DRAWING);
    let header = text.lines().map_while(|line| line.strip_prefix("//!"));
    let drawing: Vec<_> = header
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .skip_while(|line| *line != "```text")
        .skip(1)
        .take_while(|line| *line != "```")
        .collect();
    assert!(drawing.len() > 20, "{DRAWING} has no drawing");
    page::compare(PAGE, "drawing", &format!("```text\n{}\n```\n", drawing.join("\n")));
}

#[test]
fn calls_and_bodies_are_found() {
    let text = "fn one() -> [u8; 2] {\n    two::<V4>(three(), self.four(), a::seven());\n}\nfn five();\nfn six() {}\n";
    let inner = body(text, "one").unwrap();
    for (name, found) in [
        ("two", true),
        ("three", true),
        ("four", true),
        ("a::seven", true),
        ("b::seven", false),
        ("hree", false),
        ("six", false),
    ] {
        assert_eq!(call(inner, name).is_some(), found, "{name}");
    }
    assert_eq!(paths(inner).collect::<Vec<_>>(), [("a", "seven")]);
    assert!(body(text, "five").is_none() && body(text, "six").is_some() && call(text, "one").is_none());
}

/// The files of the packet path by the names of their modules.
fn modules() -> BTreeMap<String, Vec<String>> {
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in page::files(&["rs"]).into_iter().filter(|path| path.starts_with(DATAPATH)) {
        let parts = path.trim_end_matches(".rs").trim_end_matches("/mod");
        let name = parts.rsplit('/').next().unwrap_or(parts).to_owned();
        modules.entry(name).or_default().push(path);
    }
    modules
}

fn defines(file: &str, function: &str) -> bool {
    body(&code(file), function).is_some()
}

/// The calls of `module::function` in a text.
fn paths(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    text.match_indices("::").filter_map(move |(at, _)| {
        let (before, behind) = (&text[..at], &text[at + 2..]);
        let module = &before[before.trim_end_matches(is_word).len()..];
        let function = &behind[..behind.find(|c| !is_word(c)).unwrap_or(behind.len())];
        let rest = &behind[function.len()..];
        let is_call = rest.starts_with('(') || rest.starts_with("::<");
        (is_call && !module.is_empty() && !function.is_empty()).then_some((module, function))
    })
}

/// The functions of several rows, or of several files of a journey, cannot be told apart by their
/// names.
fn is_repeated(journey: &Journey, name: &str) -> bool {
    journey.rows.iter().filter(|row| row.functions.iter().any(|own| own == name)).count() > 1
}

fn journeys() -> Vec<Journey> {
    let text = page::text(PAGE);
    let mut found: Vec<Journey> = Vec::new();
    let mut name = String::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            name = heading.to_owned();
        }
        let Some(cells) = page::cells(line) else { continue };
        if cells.len() != 5 {
            continue;
        }
        if cells[2] == "functions" {
            found.push(Journey { name: name.clone(), rows: Vec::new() });
        } else if cells[0].parse::<u32>().is_ok()
            && let Some(journey) = found.last_mut()
        {
            let files = cells[1].split("](../").skip(1).filter_map(|link| link.split(')').next());
            journey.rows.push(Row {
                number: cells[0].clone(),
                files: files.map(str::to_owned).collect(),
                functions: page::code_spans(&cells[2]).map(str::to_owned).collect(),
            });
        }
    }
    assert!(found.len() > 4, "{PAGE} has only {} journeys", found.len());
    for Journey { name, rows } in &found {
        let numbers: Vec<_> = rows.iter().map(|row| row.number.clone()).collect();
        let expected: Vec<_> = (1..=rows.len()).map(|number| number.to_string()).collect();
        assert_eq!(numbers, expected, "{name}");
        let empty = rows.iter().find(|row| row.files.is_empty() || row.functions.is_empty());
        assert!(empty.is_none(), "{name}: {empty:?}");
    }
    found
}

/// The code of a file, without comments and tests.
fn code(file: &str) -> String {
    let text = page::text(file);
    let lines = text.lines().take_while(|line| *line != "mod tests {");
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    lines.map(|line| line.split(" // ").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The body of a function, if the text has one of this name with a body. The text is that of the
/// module that a name may have.
fn body<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let name = name.rsplit("::").next().unwrap_or(name);
    let declared = text.match_indices("fn ").find_map(|(at, _)| {
        let rest = text[at + 3..].strip_prefix(name)?;
        let signature = rest.strip_prefix(['(', '<'])?;
        let (open, end) = (signature.find('{')?, signature.find(";\n").unwrap_or(usize::MAX));
        (open < end).then(|| &signature[open..])
    })?;
    let mut depth = 0;
    for (at, character) in declared.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&declared[..=at]);
        }
    }
    None
}

/// Returns the offset of the first call of a function, or of its path named as a value.
fn call(text: &str, name: &str) -> Option<usize> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name).map(|(at, _)| at).find(|at| {
        let (before, behind) = (&text[..*at], &text[at + name.len()..]);
        let is_whole = !before.ends_with(is_word) && !behind.starts_with(is_word);
        let is_call = behind.starts_with('(') || behind.starts_with("::<");
        is_whole && !before.ends_with("fn ") && (is_call || before.ends_with("::"))
    })
}
