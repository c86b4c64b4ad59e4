//! Requirements of every page of this project: it draws without a message on the console and
//! without loading anything, fits on a phone, is dark where that is preferred, is legible, and can
//! be used with a screen reader.

use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{Accessible, Browser, Look, Tab};

/// A script that lists the texts whose contrast is less than 4.5 (WCAG 2.2 level AA), with their
/// colours. The background of a text within a drawing is the shape behind it, or that of the page.
const FAINT: &str = include_str!("contrast.js");

/// Opens a page in each look and checks it. `screenshots` is a folder, and the prefix of the names
/// of the pictures in it.
///
/// # Errors
/// The page does not meet one of the requirements.
pub fn judge(browser: &mut Browser, page: &Path, screenshots: (&Path, &str)) -> Result<Vec<Accessible>> {
    let mut read = Vec::new();
    for (name, look) in [("desktop", Look::DESKTOP), ("dark", Look::DARK), ("phone", Look::PHONE)] {
        let mut tab = browser.open(page, look)?;
        tab.screenshot(&screenshots.0.join(format!("{}-{name}.png", screenshots.1)))?;
        quiet(&mut tab)?;
        let wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")?;
        let (content, room) = (wide[0].as_f64().unwrap_or(0.0), f64::from(look.width));
        ensure!(content <= room && wide[1] == room, "{name}: {content} wide in {room}: {wide}");
        let ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")?;
        let ground: Vec<u32> = numbers(&ground);
        let is_dark = ground.iter().take(3).sum::<u32>() < 200;
        ensure!(is_dark == look.dark, "{name}: the ground is {ground:?}");
        let faint = tab.evaluate(FAINT)?;
        ensure!(faint.as_array().is_some_and(Vec::is_empty), "{name}: hardly legible: {faint}");
        let moving = tab.evaluate("document.getAnimations().length")?;
        ensure!(!look.reduced_motion || moving == 0, "{name}: {moving} things move");
        if look.width == Look::DESKTOP.width && !look.dark {
            read = tab.accessible()?;
        }
    }
    structure(&read)?;
    Ok(read)
}

fn quiet(tab: &mut Tab<'_>) -> Result<()> {
    tab.settle()?;
    ensure!(tab.console.is_empty(), "on the console: {:?}", tab.console);
    ensure!(tab.requests.len() == 1, "it asked for {:?}", tab.requests);
    Ok(())
}

/// Checks landmarks, headings, and names of elements that have none from their content.
fn structure(read: &[Accessible]) -> Result<()> {
    let of = |role: &str| -> Vec<_> { read.iter().filter(|node| node.role == role).collect() };
    ensure!(of("main").len() == 1, "one main part: {:?}", of("main"));
    ensure!(!of("heading").is_empty(), "no headings");
    for role in ["image", "img", "table", "region", "article", "group", "button", "searchbox", "link"] {
        let nameless = of(role).into_iter().filter(|node| node.name.trim().is_empty()).count();
        ensure!(nameless == 0, "{nameless} of role {role} without a name");
    }
    Ok(())
}

fn numbers(colour: &Value) -> Vec<u32> {
    let text = colour.as_str().unwrap_or_default();
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}
