//! Judgements as one page of HTML that needs nothing else: data as JSON, and a script that draws them. A browser loads
//! nothing, and text of objects never becomes markup.

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

const STYLE: &str = include_str!("judgement.css");
/// In the order in which they use each other.
const SCRIPTS: [&str; 6] = [
    include_str!("elements.js"),
    include_str!("map.js"),
    include_str!("tables.js"),
    include_str!("what_if.js"),
    include_str!("timeline.js"),
    include_str!("start.js"),
];

/// Something that a page shows; each is the JSON that a command prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Of `lb`.
    Judged,
    /// Of `lb`, after the changes of a `lb what-if`.
    After,
    /// Of `lb what-if`.
    WhatIf,
    Timeline,
}

impl Part {
    /// Of the element that holds it; the script knows it by that.
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

    /// # Errors
    /// Something in it is no JSON, such as a map by keys that are no strings.
    pub fn with(mut self, part: Part, value: &impl Serialize) -> Result<Self> {
        self.parts.push((part, serde_json::to_string(value)?));
        Ok(self)
    }

    /// The whole page.
    #[must_use]
    pub fn html(&self) -> String {
        let title = frame::escaped(&self.title);
        let mut page = frame::head(&self.title, STYLE);
        page += &format!(
            "<a class=\"skip\" href=\"#main\">Skip to the content</a>\n<header>\n<p>traffic-policy: who is green, and who gets what</p>\n<h1>{title}</h1>\n</header>\n<main id=\"main\" tabindex=\"-1\">\n<noscript><p class=\"warning\">A script within this page draws it from the data within it; it loads nothing. Scripts are switched off here.</p></noscript>\n</main>\n"
        );
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        page += &format!(
            "<footer>\n<p>Made by traffic-policy-agent {} on {}. Its numbers are those of <code>--output json</code>, which this page contains. It loads nothing from anywhere.</p>\n</footer>\n",
            env!("CARGO_PKG_VERSION"),
            frame::utc(seconds),
        );
        for (part, json) in &self.parts {
            // Within a script element only `<` can end it, and in JSON it only stands in strings.
            let json = json.replace('<', "\\u003c");
            page += &format!("<script type=\"application/json\" id=\"{}\">{json}</script>\n", part.id());
        }
        page + "<script>\n\"use strict\";\n(() => {\n"
            + &SCRIPTS.concat()
            + "})();\n</script>\n</body>\n</html>\n"
    }

    /// Writes it, in one step, in place of what was there.
    ///
    /// # Errors
    /// The folder is not there, or not to be written to.
    pub fn write(&self, path: &Path) -> Result<()> {
        file::replace(path, &self.html()).with_context(|| format!("{} is not written", path.display()))
    }
}

#[cfg(test)]
mod tests;
