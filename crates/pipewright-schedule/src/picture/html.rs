//! The page: a timeline to explore in a browser, in one file that loads no other file.
//!
//! It draws the same as [`super::svg()`], to scale, and on request each rank's memory. The wheel scrolls and
//! zooms, dragging moves, and hovering names the action and highlights its microbatch. A table has the same
//! content for screen readers. The page's markup, style and scripts are in the folder `page`; this file joins
//! them with the colours, the legend, the table and the data.

use crate::ids::Rank;
use crate::picture::chunks::Chunks;
use crate::picture::names::Named;
use crate::picture::page_data::page_data;
use crate::picture::palette::{DARK, LIGHT, Sort, Theme, occurring};
use crate::picture::settings::{PictureSettings, escaped};
use crate::simulate::peak_memory;
use crate::timeline::{Event, Scope, Timeline};
use std::collections::BTreeSet;

/// The scripts, in the order in which they use each other.
pub(super) const SCRIPTS: [&str; 8] = [
    include_str!("page/data.js"),
    include_str!("page/view.js"),
    include_str!("page/shares.js"),
    include_str!("page/lanes.js"),
    include_str!("page/labels.js"),
    include_str!("page/draw.js"),
    include_str!("page/input.js"),
    include_str!("page/print.js"),
];

/// The most actions of a rank that the table lists.
const MOST_LISTED: usize = 100;

/// Makes the page of `timeline`.
pub fn html(timeline: &Timeline, settings: &PictureSettings<'_>) -> String {
    let chunks = Chunks::of(timeline);
    let style = include_str!("page/page.css")
        .replace("{{light}}", &variables(&LIGHT, chunks.most()))
        .replace("{{dark}}", &variables(&DARK, chunks.most()));
    let script = SCRIPTS.concat().replace("\"{{data}}\"", &page_data(timeline, &chunks, settings));
    // The title is inserted after everything else but the script, so that nothing in it is replaced. The
    // script has no title.
    include_str!("page/page.html")
        .replace("{{style}}", &style)
        .replace(
            "{{legend}}",
            &(legend(&occurring(timeline), &chunks) + &bubble(timeline) + exchange(timeline)),
        )
        .replace("{{table}}", &table(timeline, &chunks, settings))
        .replace("{{title}}", &escaped(settings.title).replace('{', "&#123;"))
        .replace("{{script}}", &script)
}

/// Returns the colours of all pages, light and dark, as variables of a style sheet: `--page`, `--ink`, `--faint`, `--rule`,
/// `--bubble`, `--hatch`, `--memory` and `--memory-edge`.
pub fn page_colours() -> String {
    let (light, dark) = (variables(&LIGHT, 1), variables(&DARK, 1));
    format!(
        ":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
}

/// Returns the colours as variables of the style sheet.
pub(super) fn variables(theme: &Theme, chunks: usize) -> String {
    let named = [
        ("page", theme.page),
        ("ink", theme.ink),
        ("faint", theme.faint),
        ("rule", theme.rule),
        ("bubble", theme.bubble),
        ("hatch", theme.hatch),
        ("memory", theme.memory),
        ("memory-edge", theme.memory_edge),
    ];
    let named = named.map(|(name, colour)| format!("--{name}:{colour};")).concat();
    let fills = Sort::ALL.iter().flat_map(|&sort| {
        let shades = theme.shades(sort, chunks).into_iter().enumerate();
        shades.map(move |(chunk, fill)| format!("--fill-{}-{chunk}:{fill};", sort as u8))
    });
    named + &fills.collect::<String>()
}

/// Returns the meaning of the bars of exchanges, as an item of the legend; nothing without exchanges.
pub(super) fn exchange(timeline: &Timeline) -> &'static str {
    let has_exchanges = timeline.scopes().iter().any(Scope::is_exchange);
    if has_exchanges { "<li>hatched bars above: exchange of tokens</li>" } else { "" }
}

/// Returns the share of bubbles, as an item of the legend.
fn bubble(timeline: &Timeline) -> String {
    let bubble = timeline.bubble_fraction() * 100.0;
    format!("<li><i class=\"bubble\"></i>bubble, {bubble:.1} %</li>")
}

/// Returns the sorts of actions with their shades, and the meaning of the shades.
pub(super) fn legend(sorts: &BTreeSet<Sort>, chunks: &Chunks) -> String {
    let mut legend = String::new();
    for &sort in sorts {
        let shades = LIGHT.shades(sort, chunks.most()).len();
        let fills = (0..shades).map(|chunk| {
            let (from, to) = (chunk * 100 / shades, (chunk + 1) * 100 / shades);
            format!("var(--fill-{}-{chunk}) {from}% {to}%", sort as u8)
        });
        let fills = fills.collect::<Vec<_>>().join(",");
        legend.push_str(&format!(
            "<li><i style=\"width:{}px;background:linear-gradient(90deg,{fills})\"></i>{}</li>",
            13.max(8 * shades.min(8)),
            sort.meaning()
        ));
    }
    if chunks.most() > 1 {
        legend.push_str(&format!("<li>shades: chunks 0 to {} of a rank</li>", chunks.most() - 1));
    }
    legend
}

/// Returns the rows of the table that replaces the picture for screen readers: one row per rank.
pub(super) fn table(timeline: &Timeline, chunks: &Chunks, settings: &PictureSettings<'_>) -> String {
    let peaks = peak_memory(timeline, settings.counted_sizes());
    let bubbles = timeline.bubble_per_rank();
    let makespan = timeline.makespan();
    let mut rows = String::new();
    for ((rank, peak), bubble) in (0..timeline.ranks()).map(Rank::new).zip(peaks).zip(bubbles) {
        let stages: Vec<String> = chunks.stages_of(rank).iter().map(ToString::to_string).collect();
        rows.push_str(&format!("<tr><th scope=\"row\">{rank}</th><td>{}</td><td>{}</td><td>{:.1} %</td><td>{peak}</td><td>{}</td></tr>",
            stages.join(", "),
            settings.unit.format(timeline.busy(rank), makespan),
            bubble * 100.0,
            order(timeline, rank)));
    }
    rows
}

/// Returns the computation of a rank, in order.
fn order(timeline: &Timeline, rank: Rank) -> String {
    let name = |event: &Event| Named(event.action, timeline.slices()).to_string();
    let compute = || timeline.events_of(rank).iter().filter(|event| event.action.is_compute());
    let listed: Vec<String> = compute().take(MOST_LISTED).map(name).collect();
    match compute().count() - listed.len() {
        0 => listed.join(" "),
        more => format!("{} and {more} more", listed.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use crate::simulate::logical;

    fn page(rows: &str, title: &str) -> String {
        let program = parse_program(rows).expect("a program");
        let timeline = logical(&program).expect("no deadlock").timeline(1.0);
        html(&timeline, &PictureSettings { title, ..PictureSettings::default() })
    }

    #[test]
    fn the_page_loads_nothing_and_escapes_its_title() {
        let page = page("0F0\n", "<script>&{{script}}");
        assert!(page.contains("&lt;script&gt;&amp;"));
        assert_eq!(page.matches("const data = ").count(), 1);
        for reference in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(!page.contains("{{"), "a place in the page is not filled");
    }

    #[test]
    fn the_table_says_what_the_picture_shows() {
        let page = page("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "a step");
        let row = "<tr><th scope=\"row\">0</th><td>0</td><td>3 s</td><td>0.0 %</td><td>2</td>\
                   <td>0F0 (0F1;0B0)OVERLAP_F_B 0B1</td></tr>";
        assert!(page.contains(row), "{page}");
    }

    #[test]
    fn nothing_is_no_error() {
        let page = html(&Timeline::new(0, Vec::new()), &PictureSettings::default());
        assert!(page.contains("const data"));
    }
}
