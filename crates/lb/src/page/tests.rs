//! Pages as text: what they contain, and what never becomes markup. The suite `pages` opens them in
//! browsers.

use std::{fs, os::unix::fs::PermissionsExt as _};

use serde_json::{Value, json};

use super::*;

/// Returns the JSON of a part, extracted from the page as a program would do it.
fn part(html: &str, id: &str) -> Option<Value> {
    let (_, rest) = html.split_once(&format!("<script type=\"application/json\" id=\"{id}\">"))?;
    Some(serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap())
}

fn made_up() -> Timeline {
    let seconds = (0..30).map(|second| match second {
        10..14 => Second { ok: 75, delayed: 0, lost: 20, cut: 5 },
        _ => Second { ok: 100, delayed: 0, lost: 0, cut: 0 },
    });
    let events = vec![Event { second: 10.0, what: "node <b> is preempted".to_owned() }];
    Timeline { title: "preemption, gke, 100/s".to_owned(), seconds: seconds.collect(), events }
}

#[test]
fn a_time_line_is_there_if_it_is_given() {
    let page = Page::new("shop/web").with(Part::Judged, &json!({"nodes": 0, "services": []})).unwrap();
    assert_eq!(part(&page.html(), "timeline"), None);
    let html = page.with(Part::Timeline, &made_up()).unwrap().html();
    let found: Timeline = serde_json::from_value(part(&html, "timeline").unwrap()).unwrap();
    assert_eq!(found, made_up());
    assert_eq!(found.seconds.iter().map(|second| second.lost).sum::<u64>(), 80);
}

#[test]
fn text_of_objects_is_no_markup() {
    let hostile = "</script><script>alert(1)</script><!--\"'\u{2028}&amp;";
    let page = Page::new(hostile).with(Part::Judged, &json!({ "pod": hostile })).unwrap();
    let html = page.html();
    assert_eq!(part(&html, "lb").unwrap()["pod"], hostile);
    assert_eq!(html.matches("<script").count(), 2);
    assert_eq!(html.matches("</script").count(), 2);
    assert!(!html.contains("<!--"), "{hostile}");
    assert!(html.contains("<title>&lt;/script&gt;"));
}

#[test]
fn a_page_needs_nothing_else() {
    let html = Page::new("empty").html();
    for part in ["src=", " href=\"h", "http://", "https://", "@import", "url(", "innerHTML", "eval("] {
        let found = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(part), "{part}");
    }
}

#[test]
fn a_file_is_replaced_in_one_step() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("a.html"), folder.path().join("link.html"));
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let open = fs::File::open(&file).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    Page::new("new").write(&link).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read_to_string(&file).unwrap().contains("<h1>new</h1>"));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    // A reader that had the old page open still has it whole.
    assert_eq!(std::io::read_to_string(open).unwrap(), "old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn where_no_page_can_be() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing/a.html");
    let error = format!("{:#}", Page::new("").write(&missing).unwrap_err());
    assert!(error.contains("there is no folder") && error.contains("missing: make it"), "{error}");
    let error = check(folder.path()).unwrap_err().to_string();
    assert!(error.contains("is a folder; name a file in it"), "{error}");
    // A device stays a device.
    Page::new("").write(Path::new("/dev/null")).unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
