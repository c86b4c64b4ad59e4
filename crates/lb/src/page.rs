//! Judgements as one self-contained HTML page: data as JSON, and a script that draws them. A
//! browser loads nothing, and text of objects never becomes markup.

#![forbid(unsafe_code)]

mod file;
pub mod frame;
mod timeline;

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use serde::Serialize;

pub use file::check;
pub use timeline::{Event, Second, Timeline};

const STYLE: &str = include_str!("page/judgement.css");
/// The scripts, each after those that it uses.
const SCRIPTS: [&str; 6] = [
    include_str!("page/elements.js"),
    include_str!("page/map.js"),
    include_str!("page/tables.js"),
    include_str!("page/what_if.js"),
    include_str!("page/timeline.js"),
    include_str!("page/start.js"),
];

/// A part of a page; each is the JSON that a command prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The output of `lb`.
    Judged,
    /// The output of `lb`, after the changes of a `lb what-if`.
    After,
    /// The output of `lb what-if`.
    WhatIf,
    Timeline,
}

impl Part {
    /// Returns the id of the element that holds the part, by which the script finds it.
    const fn id(self) -> &'static str {
        match self {
            Self::Judged => "lb",
            Self::After => "after",
            Self::WhatIf => "what-if",
            Self::Timeline => "timeline",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    parts: Vec<(Part, String)>,
}

impl Page {
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), parts: Vec::new() }
    }

    /// Adds a part.
    ///
    /// # Errors
    /// The value cannot be represented as JSON, such as a map whose keys are not strings.
    pub fn with(mut self, part: Part, value: &impl Serialize) -> Result<Self> {
        self.parts.push((part, serde_json::to_string(value)?));
        Ok(self)
    }

    /// Returns the whole page.
    #[must_use]
    pub fn html(&self) -> String {
        let title = frame::escaped(&self.title);
        let mut page = frame::head(&self.title, STYLE);
        page += &format!(
            "<a class=\"skip\" href=\"#main\">Skip to the content</a>\n<header>\n<p>traffic-policy: who is healthy, and who gets what</p>\n<h1>{title}</h1>\n</header>\n<main id=\"main\" tabindex=\"-1\">\n<noscript><p class=\"warning\">A script within this page draws it from the data within it; it loads nothing. Scripts are switched off here.</p></noscript>\n</main>\n"
        );
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        page += &format!(
            "<footer>\n<p>Made by traffic-policy-agent {} on {}. Its numbers are those of <code>--output json</code>, which this page contains. It loads nothing from anywhere.</p>\n</footer>\n",
            env!("CARGO_PKG_VERSION"),
            frame::utc(seconds),
        );
        for (part, json) in &self.parts {
            // Within a script element only `<` can end it, and in JSON `<` only occurs in strings.
            let json = json.replace('<', "\\u003c");
            page += &format!("<script type=\"application/json\" id=\"{}\">{json}</script>\n", part.id());
        }
        page + "<script>\n\"use strict\";\n(() => {\n"
            + &SCRIPTS.concat()
            + "})();\n</script>\n</body>\n</html>\n"
    }

    /// Writes the page, replacing the file atomically.
    pub fn write(&self, path: &Path) -> Result<()> {
        file::replace(path, &self.html()).with_context(|| format!("{} is not written", path.display()))
    }
}

#[cfg(test)]
mod tests;
