//! The page: a timeline to explore in a browser, in one file that loads nothing.
//!
//! It draws what [`super::svg()`] draws, to scale, and below each rank what the rank holds in memory. The
//! wheel zooms, dragging moves, hovering names the action and lights up its microbatch. The page's markup and
//! script are in `page.html` and `page.js` beside this file; here they are joined with the data.

use std::fmt::Write;

use crate::action::ActionKind;
use crate::costs::StageSizes;
use crate::ids::{Microbatch, Rank};
use crate::picture::palette::{BUBBLE, STYLES};
use crate::simulate::{MemoryStep, UNIT, memory_curve};
use crate::timeline::{Event, Timeline};

/// Makes the page of `timeline`, under the heading `title`.
///
/// Memory is in bytes where `sizes` are given, one entry for each stage or one for all, else in activations
/// of one stage and microbatch.
pub fn html(timeline: &Timeline, title: &str, sizes: &[StageSizes]) -> String {
    let data = data(timeline, sizes);
    include_str!("page.html")
        .replace("{{title}}", &escaped(title))
        .replace("{{script}}", &include_str!("page.js").replace("\"{{data}}\"", &data))
}

/// The timeline as a JavaScript value. It holds numbers, and texts that are made here, so nothing in it can
/// end the script.
fn data(timeline: &Timeline, sizes: &[StageSizes]) -> String {
    let kinds: Vec<[&str; 4]> = ActionKind::ALL.iter().map(|&kind| looks(kind)).collect();
    let unit = if sizes.is_empty() { "activations" } else { "bytes" };
    let sizes = if sizes.is_empty() { &[UNIT] } else { sizes };
    let mut data = format!(
        "{{\"kinds\":{},\"bubble\":{},\"bubbleFraction\":{:.6},\"unit\":\"{unit}\",\"start\":{},\"makespan\":{},\"ranks\":[",
        json(&kinds),
        json(&BUBBLE),
        timeline.bubble_fraction(),
        timeline.start(),
        timeline.makespan()
    );
    for rank in (0..timeline.ranks()).map(Rank::new) {
        let separator = if rank.get() == 0 { "" } else { "," };
        write!(data, "{separator}{{\"events\":[").expect("writing to a string does not fail");
        push_list(&mut data, timeline.events_of(rank), push_event);
        data.push_str("],\"memory\":[");
        push_list(&mut data, &memory_curve(timeline, rank, sizes), push_memory);
        data.push_str("]}");
    }
    data.push_str("]}");
    data
}

/// Name, meaning, fill and ink of a kind.
fn looks(kind: ActionKind) -> [&'static str; 4] {
    let group = match kind {
        ActionKind::Forward => 0,
        ActionKind::Backward | ActionKind::Overlap => 1,
        ActionKind::InputBackward => 2,
        ActionKind::WeightBackward => 3,
        kind if kind.is_communication() => 4,
        _ => 5,
    };
    [kind.name(), STYLES[group].meaning, STYLES[group].fill, STYLES[group].ink]
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("texts are JSON")
}

fn push_list<T>(data: &mut String, items: &[T], push: fn(&mut String, &T) -> std::fmt::Result) {
    for (place, item) in items.iter().enumerate() {
        data.push_str(if place == 0 { "" } else { "," });
        push(data, item).expect("writing to a string does not fail");
    }
}

/// `[kind, start, end, stage, microbatch]`, with a second stage and microbatch for an overlap, and -1 where
/// there is no microbatch.
fn push_event(data: &mut String, event: &Event) -> std::fmt::Result {
    let Event { action, start, end, .. } = *event;
    write!(data, "[{},{start},{end}", action.kind() as u8)?;
    for part in action.parts() {
        let microbatch = part.microbatch().map_or(-1, |microbatch: Microbatch| i64::from(microbatch.get()));
        write!(data, ",{},{microbatch}", part.stage())?;
    }
    data.push(']');
    Ok(())
}

fn push_memory(data: &mut String, step: &MemoryStep) -> std::fmt::Result {
    write!(data, "[{},{}]", step.time, step.held)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use crate::simulate::logical;

    fn page(rows: &str, title: &str) -> String {
        let program = parse_program(rows).expect("a program");
        html(&logical(&program).expect("no deadlock").timeline(1.0), title, &[])
    }

    fn data_of(page: &str) -> serde_json::Value {
        let line = page.lines().find_map(|line| line.trim().strip_prefix("const data = ")).expect("the data");
        serde_json::from_str(line.trim_end_matches(';')).expect("JSON")
    }

    #[test]
    fn the_page_holds_events_and_memory() {
        let data = data_of(&page("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0UNSHARD\n", "a step"));
        let rank = &data["ranks"][0];
        assert_eq!(
            rank["events"],
            serde_json::json!([[0, 0, 1, 0, 0], [14, 1, 2, 0, 1, 0, 0], [3, 2, 3, 0, 1], [4, 3, 4, 0, -1]])
        );
        assert_eq!(rank["memory"], serde_json::json!([[0, 1], [1, 2], [2, 1], [3, 0]]));
        assert_eq!(data["kinds"][14][0], "OVERLAP_F_B");
    }

    #[test]
    fn the_page_loads_nothing_and_escapes_its_title() {
        let page = page("0F0\n", "<script>&");
        assert!(page.contains("&lt;script&gt;&amp;"));
        for reference in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(!page.contains("{{"), "a place in the page is not filled");
    }

    #[test]
    fn nothing_is_no_error() {
        assert!(html(&Timeline::new(0, Vec::new()), "", &[]).contains("const data"));
    }
}
