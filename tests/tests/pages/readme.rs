//! The picture in the README: the upper part of a page of `lb --html`. `UPDATE_DOCS=1` takes it
//! anew.

use std::path::Path;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use traffic_policy_testing::browser::{Browser, Look};

use crate::cluster::cluster;
use crate::{Case, pictures};

/// Path of the picture from the root.
const PICTURE: &str = "docs/images/lb.png";
/// Largest size in bytes: everybody who clones the repository downloads it.
const SIZE: usize = 150_000;

#[test]
fn the_picture_of_the_readme_is_a_page() -> Result<()> {
    let Some(mut browser) = Browser::start("the_picture_of_the_readme_is_a_page")? else { return Ok(()) };
    let nodes = ["pool-1-a", "pool-1-b", "pool-1-c", "pool-1-d"];
    let pods = [("web-x2k9q", "pool-1-a"), ("web-m4wzt", "pool-1-b"), ("web-q8vhn", "pool-1-b")];
    let case = Case::new(&cluster(&nodes, "Cluster", &pods).manifests())?;
    case.make(&["shop/web", "--balancer", "gke"])?;
    let mut tab = browser.open(&case.page(), Look { reduced_motion: true, ..Look::DESKTOP })?;
    // The page goes on with tables, which the README has no room for.
    let below = tab.evaluate(
        "(() => { const map = document.querySelector('.map').parentElement; let removed = 0; \
         for (let part = map; part !== document.body; part = part.parentElement) \
         while (part.nextElementSibling) { part.nextElementSibling.remove(); removed += 1; } return removed; })()",
    )?;
    ensure!(below.as_u64() > Some(0), "nothing is below the map: {below}");
    // Only what is drawn anew has the page's new height.
    tab.settle()?;
    let taken = pictures().join("readme.png");
    tab.screenshot(&taken)?;
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no root")?.join(PICTURE);
    if env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        fs::copy(&taken, &committed)?;
    }
    let (taken, committed) = (fs::read(&taken)?, fs::read(&committed)?);
    ensure!(committed.len() < SIZE, "{PICTURE} has {} bytes", committed.len());
    let (now, before) = (dimensions(&taken)?, dimensions(&committed)?);
    // Fonts differ from machine to machine, and the lines that they fill with them; the layout does
    // not.
    ensure!(
        now.0 == before.0 && now.1.abs_diff(before.1) <= now.1 / 10,
        "{PICTURE} measures {before:?}, the page {now:?}: UPDATE_DOCS=1 cargo xtask test pages takes it anew"
    );
    Ok(())
}

/// Width and height of a PNG in pixels, by its first chunk (PNG 1.2, section 11.2.2).
fn dimensions(png: &[u8]) -> Result<(u32, u32)> {
    ensure!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "no PNG");
    let number = |at: usize| -> Result<u32> {
        Ok(u32::from_be_bytes(png.get(at..at + 4).context("the PNG ends early")?.try_into()?))
    };
    Ok((number(16)?, number(20)?))
}
