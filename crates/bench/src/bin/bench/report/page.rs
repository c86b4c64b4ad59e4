//! The report as an HTML page: one self-contained file.

use std::fmt::Write as _;

use traffic_policy_lb::page::frame::{escaped, head};

use super::{Report, Row, Unit, plot, table::short};

const STYLE: &str = include_str!("page.css");

impl Report {
    pub(super) fn page(&self) -> String {
        let run = &self.run;
        let commit = run.commit.get(..10).unwrap_or("unknown");
        let changes = if run.dirty { " with changes" } else { "" };
        let mut page = head(&format!("traffic-policy bench, {}", run.date), STYLE);
        writeln!(
            page,
            "<main>\n<h1>traffic-policy bench</h1>\n<p>{}, commit {commit}{changes}, <code>{}</code>, {:.0} s, seed {}.</p>",
            escaped(&run.date),
            escaped(&run.command),
            run.seconds,
            run.seed,
        )
        .ok();
        let doubts = self.warnings.iter().map(|warning| format!("Warning: {warning}")).chain(self.noise());
        for text in doubts {
            writeln!(page, "<p class=\"warning\">{}</p>", escaped(&text)).ok();
        }
        page += "<p>A bar is the median of all runs, the whisker goes from the lower to the upper quartile. The line marks the goal, the circle what the row is compared with. Things that are compared took turns, and a ratio is the median of the ratios of their pairs of runs. On another machine, compare ratios, not nanoseconds.</p>\n";
        let mut charts = 0;
        for (group, rows) in groups(&self.rows) {
            writeln!(page, "<h2>{}</h2>", escaped(group)).ok();
            for unit in units(&rows) {
                let of_unit: Vec<_> = rows.iter().copied().filter(|row| row.unit == unit).collect();
                charts += 1;
                page += &plot::chart(group, charts, &of_unit);
            }
            page += &table(group, &rows);
        }
        if !self.missing.is_empty() {
            page += "<h2>Not measured</h2>\n<ul>\n";
            for missing in &self.missing {
                let (group, name) = (escaped(&missing.group), escaped(&missing.name));
                writeln!(page, "<li>{group}, {name}: {}</li>", escaped(&missing.reason)).ok();
            }
            page += "</ul>\n";
        }
        page += "<h2>Measured on</h2>\n<table aria-label=\"Measured on\">\n<tbody>\n";
        for (key, value) in &self.environment {
            let (key, value) = (escaped(key), escaped(value));
            writeln!(page, "<tr><th scope=\"row\">{key}</th><td>{value}</td></tr>").ok();
        }
        page + "</tbody>\n</table>\n</main>\n</body>\n</html>\n"
    }
}

/// Returns the rows by group, in the order in which groups first appear.
fn groups(rows: &[Row]) -> Vec<(&str, Vec<&Row>)> {
    let mut groups: Vec<(&str, Vec<&Row>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(group, _)| *group == row.group) {
            Some((_, members)) => members.push(row),
            None => groups.push((&row.group, vec![row])),
        }
    }
    groups
}

fn units(rows: &[&Row]) -> Vec<Unit> {
    let mut units = Vec::new();
    for row in rows {
        if !units.contains(&row.unit) {
            units.push(row.unit);
        }
    }
    units
}

fn table(group: &str, rows: &[&Row]) -> String {
    let mut text = format!(
        "<div class=\"scroll\"><table aria-label=\"{}\">\n<thead><tr><th scope=\"col\"></th><th scope=\"col\">median</th><th scope=\"col\">quartiles</th><th scope=\"col\">spread (bound)</th><th scope=\"col\">beside</th><th scope=\"col\">ratio</th><th scope=\"col\">goal</th><th scope=\"col\">met</th></tr></thead>\n<tbody>\n",
        escaped(group)
    );
    for row in rows {
        let dash = || "–".to_owned();
        let (figure, unit) = (row.figure, row.unit.symbol());
        let beside = row.reference.as_ref().map_or_else(dash, |reference| {
            format!("{} {} {unit}", escaped(&reference.name), short(reference.figure.median))
        });
        let ratio = row.reference.as_ref().map_or_else(dash, |reference| {
            let ratio = reference.ratio;
            format!("{:.2} ({:.2}–{:.2})", ratio.median, ratio.lower, ratio.upper)
        });
        writeln!(
            text,
            "<tr><th scope=\"row\">{}</th><td>{} {unit}</td><td>{}–{}</td><td>{:.0} % ({:.0} %){}</td><td>{beside}</td><td>{ratio}</td><td>{}</td><td>{}</td></tr>",
            escaped(&row.name),
            short(figure.median),
            short(figure.lower),
            short(figure.upper),
            row.spread() * 100.0,
            row.bound * 100.0,
            if row.is_noisy() { " noisy" } else { "" },
            row.goal.map_or_else(dash, |goal| escaped(&goal.to_string())),
            row.met().map_or("–", |met| if met { "yes" } else { "no" }),
        )
        .ok();
    }
    text + "</tbody>\n</table></div>\n"
}

#[cfg(test)]
mod tests {
    use anyhow::Result;
    use traffic_policy_testing::browser::{self, Browser};

    use super::*;
    use crate::report::Goal;

    fn made_up() -> Report {
        let mut report = Report::listing();
        let row = Row::new("established", "request <1k>", Unit::Nanoseconds, &[30.0, 31.0, 32.0]);
        report.rows.push(row.beside("floor", &[27.0, 27.0, 27.0]).goal(Goal::TimesAtMost(1.1)));
        report.rows.push(Row::new("established", "rate", Unit::Mpps, &[4.0, 4.1, 1.0]));
        report.skip("wire", "kube-proxy", "no program of that name");
        report
    }

    #[test]
    fn a_page_needs_nothing_else_and_shows_each_row() {
        let page = made_up().page();
        for part in
            ["request &lt;1k&gt;", "class=\"goal\"", "class=\"missed\"", "class=\"noisy\"", "kube-proxy"]
        {
            assert!(page.contains(part), "no {part} in {page}");
        }
        for part in ["src=", "href=", "http://", "https://", "@import", "url("] {
            assert!(!page.contains(part), "{part} in {page}");
        }
        assert_eq!(page.matches("<svg").count(), 2);
        assert_eq!(page.matches("<title id=").count(), page.matches("<desc id=").count());
    }

    #[test]
    fn a_browser_draws_the_page() -> Result<()> {
        let Some(mut browser) = Browser::start("a_browser_draws_the_page")? else { return Ok(()) };
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("report.html");
        std::fs::write(&file, made_up().page())?;
        let read = browser::judge(&mut browser, &file, (folder.path(), "bench"))?;
        for (role, name) in
            [("image", "established, ns"), ("image", "established, Mpps"), ("rowheader", "request <1k>")]
        {
            let found = read.iter().any(|node| node.role == role && node.name == name);
            assert!(found, "no {role} {name} in {read:?}");
        }
        Ok(())
    }
}
