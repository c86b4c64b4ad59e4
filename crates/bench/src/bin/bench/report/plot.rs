//! Bar charts as SVG: one bar per row, a whisker from quartile to quartile, a mark at the goal.

use std::fmt::Write as _;

use traffic_policy_lb::page::frame::escaped;

use super::{Row, table::short};

const WIDTH: f64 = 860.0;
/// Width of the area for values behind the longest bar.
const VALUES: f64 = 170.0;
const ROW: f64 = 40.0;
const TOP: f64 = 8.0;
const AXIS: f64 = 28.0;

/// Draws the chart of rows that share one unit. `number` makes the identifiers of charts on one
/// page distinct.
pub(super) fn chart(title: &str, number: usize, rows: &[&Row]) -> String {
    let reach = |row: &&Row| {
        let beside = row.reference.as_ref().map_or(0.0, |reference| reference.figure.median);
        row.figure.upper.max(row.limit().unwrap_or(0.0)).max(beside)
    };
    let step = step(rows.iter().map(reach).fold(0.0, f64::max));
    let most = step * (rows.iter().map(reach).fold(0.0, f64::max) / step).ceil().max(1.0);
    let x = |value: f64| value.max(0.0) / most * (WIDTH - VALUES);
    let height = TOP + ROW * rows.len() as f64 + AXIS;
    let unit = rows.first().map_or("", |row| row.unit.symbol());
    let title = escaped(title);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"t{number}\" aria-describedby=\"d{number}\">\n<title id=\"t{number}\">{title}, {unit}</title>\n<desc id=\"d{number}\">Bars of the medians in {unit}, whiskers from the lower to the upper quartile, a line where the goal is, a circle for what a row is compared with. The table below has the same figures.</desc>\n"
    );
    let bottom = height - AXIS;
    let mut tick = 0.0;
    while tick <= most * 1.0001 {
        let at = x(tick);
        writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/><text class=\"axis\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{}\">{}</text>",
            bottom + 16.0,
            if tick == 0.0 { "start" } else { "middle" },
            number_of(tick)
        )
        .ok();
        tick += step;
    }
    for (place, row) in rows.iter().enumerate() {
        bar(&mut svg, row, TOP + ROW * place as f64, x);
    }
    svg + "</svg>\n"
}

fn bar(svg: &mut String, row: &Row, y: f64, x: impl Fn(f64) -> f64) {
    let figure = row.figure;
    let class = match (row.is_noisy(), row.met()) {
        (true, _) => "noisy",
        (false, Some(false)) => "missed",
        (false, _) => "bar",
    };
    let (top, middle, low) = (y + 18.0, y + 25.0, y + 32.0);
    writeln!(svg, "<text x=\"0\" y=\"{:.1}\">{}</text>", y + 13.0, escaped(&row.name)).ok();
    writeln!(
        svg,
        "<rect class=\"{class}\" x=\"0\" y=\"{top}\" width=\"{:.1}\" height=\"14\"/>",
        x(figure.median)
    )
    .ok();
    let (from, to) = (x(figure.lower), x(figure.upper));
    writeln!(
        svg,
        "<path class=\"whisker\" d=\"M{from:.1} {middle}H{to:.1}M{from:.1} {:.1}V{:.1}M{to:.1} {:.1}V{:.1}\"/>",
        middle - 4.0,
        middle + 4.0,
        middle - 4.0,
        middle + 4.0
    )
    .ok();
    let mut label = to.max(x(figure.median));
    if let Some(reference) = &row.reference {
        let at = x(reference.figure.median);
        label = label.max(at);
        writeln!(svg, "<circle class=\"beside\" cx=\"{at:.1}\" cy=\"{middle}\" r=\"4\"/>").ok();
    }
    if let Some(limit) = row.limit() {
        let at = x(limit);
        label = label.max(at);
        writeln!(svg, "<path class=\"goal\" d=\"M{at:.1} {:.1}V{:.1}\"/>", top - 2.0, low + 2.0).ok();
    }
    let ratio = row.ratio().map_or_else(String::new, |ratio| format!(" · {ratio:.2} ×"));
    let noisy = if row.is_noisy() { " ~" } else { "" };
    writeln!(
        svg,
        "<text class=\"value\" x=\"{:.1}\" y=\"{:.1}\">{} {}{ratio}{noisy}</text>",
        label + 8.0,
        middle + 4.0,
        short(figure.median),
        row.unit.symbol()
    )
    .ok();
}

/// Returns the distance of the grid lines: 1, 2 or 5 times a power of ten, with four to eight of
/// them up to `most`.
fn step(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((most / 4.0).log10().floor());
    let times = [5.0, 2.0].into_iter().find(|times| power * times * 4.0 <= most).unwrap_or(1.0);
    power * times
}

fn number_of(tick: f64) -> String {
    let text = format!("{tick:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_has_round_numbers() {
        for (most, expected) in [(9.7, 2.0), (41.0, 10.0), (1000.0, 200.0), (0.9, 0.2), (0.0, 1.0)] {
            assert!((step(most) - expected).abs() < 1e-9, "{most}: {}", step(most));
        }
        assert_eq!(number_of(0.4), "0.4");
        assert_eq!(number_of(200.0), "200");
    }
}
