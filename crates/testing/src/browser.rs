//! A headless Chromium, driven by the DevTools protocol over a pair of pipes: pages as people and
//! screen readers meet them.

mod sight;
mod wire;

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

pub use self::sight::judge;
use self::wire::Wire;
use crate::pace::scaled;

const PROGRAM: &str = "chromium";
/// The time limit for a page to be loaded and drawn.
const DRAWN: Duration = Duration::from_secs(60);

/// The window size and preferences with which a page is opened.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub width: u32,
    pub dark: bool,
    pub reduced_motion: bool,
}

impl Look {
    pub const DESKTOP: Self = Self { width: 1280, dark: false, reduced_motion: false };
    pub const DARK: Self = Self { width: 1280, dark: true, reduced_motion: false };
    pub const PHONE: Self = Self { width: 360, dark: false, reduced_motion: true };
}

#[derive(Debug)]
pub struct Browser {
    wire: Wire,
}

/// A page that has been loaded and drawn.
#[derive(Debug)]
pub struct Tab<'b> {
    browser: &'b mut Browser,
    session: String,
    /// Lines of the page's console, and errors of its scripts.
    pub console: Vec<String>,
    /// URLs that the page requested, its own among them.
    pub requests: Vec<String>,
}

/// An element of the accessibility tree, as a screen reader meets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accessible {
    pub role: String,
    pub name: String,
    pub description: String,
}

impl Browser {
    /// Starts a browser; where none is installed, prints that the test is skipped.
    pub fn start(test: &str) -> Result<Option<Self>> {
        if !Command::new(PROGRAM).arg("--version").output().is_ok_and(|output| output.status.success()) {
            // Written to stderr directly: the test harness would capture it otherwise.
            writeln!(std::io::stderr(), "SKIPPED {test}: there is no {PROGRAM} (`cargo xtask setup`)").ok();
            return Ok(None);
        }
        let mut browser = Self { wire: Wire::start(PROGRAM)? };
        browser.wire.call(None, "Browser.getVersion", &json!({}))?;
        Ok(Some(browser))
    }

    /// Opens a file and waits until it is drawn.
    pub fn open(&mut self, page: &Path, look: Look) -> Result<Tab<'_>> {
        let target = self.wire.call(None, "Target.createTarget", &json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = self.wire.call(None, "Target.attachToTarget", &attach)?["sessionId"].clone();
        let session = session.as_str().context("no session")?.to_owned();
        let scheme = if look.dark { "dark" } else { "light" };
        let motion = if look.reduced_motion { "reduce" } else { "no-preference" };
        let features = json!([
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]);
        let size =
            json!({"width": look.width, "height": 800, "deviceScaleFactor": 1, "mobile": look.width < 600});
        let url = format!("file://{}", fs::canonicalize(page)?.display());
        self.wire.events.clear();
        for (method, parameters) in [
            ("Page.enable", json!({})),
            ("Runtime.enable", json!({})),
            ("Log.enable", json!({})),
            ("Network.enable", json!({})),
            ("Emulation.setDeviceMetricsOverride", size),
            ("Emulation.setEmulatedMedia", json!({"features": features})),
            ("Page.navigate", json!({"url": url})),
        ] {
            self.wire.call(Some(&session), method, &parameters)?;
        }
        self.wire.wait_for(&session, "Page.loadEventFired", scaled(DRAWN))?;
        let mut tab = Tab { browser: self, session, console: Vec::new(), requests: Vec::new() };
        tab.settle()?;
        Ok(tab)
    }
}

impl Tab<'_> {
    /// Waits until all that scripts have requested is drawn, and collects the events meanwhile.
    pub fn settle(&mut self) -> Result<()> {
        // Observers of sizes run before a frame is drawn; their requests take effect in the next
        // one.
        let frames = "new Promise(done => { let left = 4; const next = () => left-- ? requestAnimationFrame(next) : done(true); next(); })";
        self.evaluate(frames)?;
        for event in std::mem::take(&mut self.browser.wire.events) {
            if event["sessionId"] != self.session.as_str() {
                continue;
            }
            let parameters = &event["params"];
            match event["method"].as_str().unwrap_or_default() {
                "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded" => {
                    self.console.push(parameters.to_string());
                }
                "Network.requestWillBeSent" => {
                    let url = parameters["request"]["url"].as_str().unwrap_or_default();
                    self.requests.push(url.to_owned());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Evaluates an expression in the page; a promise gives the value with which it is fulfilled.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let parameters = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", &parameters)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].clone())
    }

    /// The accessibility tree, as screen readers read it.
    pub fn accessible(&mut self) -> Result<Vec<Accessible>> {
        self.call("Accessibility.enable", &json!({}))?;
        let answer = self.call("Accessibility.getFullAXTree", &json!({}))?;
        let text = |node: &Value, key: &str| node[key]["value"].as_str().unwrap_or_default().to_owned();
        let nodes = answer["nodes"].as_array().context("no tree")?.iter();
        let read = nodes.filter(|node| node["ignored"] != true).map(|node| Accessible {
            role: text(node, "role"),
            name: text(node, "name"),
            description: text(node, "description"),
        });
        Ok(read.collect())
    }

    /// Saves a picture of the whole page.
    pub fn screenshot(&mut self, file: &Path) -> Result<()> {
        let answer =
            self.call("Page.captureScreenshot", &json!({"format": "png", "captureBeyondViewport": true}))?;
        let data = answer["data"].as_str().context("no picture")?;
        fs::write(file, BASE64_STANDARD.decode(data)?).with_context(|| file.display().to_string())
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Result<Value> {
        self.browser.wire.call(Some(&self.session), method, parameters)
    }
}
