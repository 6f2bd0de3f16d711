//! Tests of the whole drawing.

use super::layout::{LABEL, PLOT};
use super::*;
use crate::costs::Costs;
use crate::csv::parse_program;
use crate::generate::{ScheduleSpec, generate};
use crate::ids::Rank;
use crate::level::Level;
use crate::lower::{LowerConfig, lower};
use crate::simulate::{logical, timed};
use crate::timeline::{Scope, ScopeKind};

fn drawn_with(rows: &str, settings: &PictureSettings<'_>) -> String {
    let program = parse_program(rows).expect("a program");
    svg(&logical(&program).expect("no deadlock").timeline(1e-3), settings)
}

fn drawn(rows: &str) -> String {
    drawn_with(rows, &PictureSettings::default())
}

fn predicted(name: &str, ranks: u32, microbatches: u32, costs: &str) -> Timeline {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let schedule = generate(name, &spec).expect("a schedule");
    let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("a program");
    let costs: Costs = costs.parse().expect("costs");
    timed(&program, &costs).expect("no deadlock").timeline().clone()
}

/// Checks that every element is closed, in the right order.
fn check_is_closed(picture: &str) {
    let mut open = Vec::new();
    for tag in picture.split('<').skip(1).map(|rest| rest.split('>').next().expect("a tag")) {
        let name = tag.trim_start_matches('/').split(' ').next().expect("a name");
        match (tag.starts_with('/'), tag.ends_with('/')) {
            (true, _) => assert_eq!(open.pop(), Some(name)),
            (false, false) => open.push(name),
            (false, true) => {}
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn every_action_is_drawn_to_scale() {
    let picture = drawn("0F0,0SEND_F0\n1RECV_F0,1F0\n");
    assert_eq!(picture.matches("<g><title>").count(), 4);
    assert!(picture.contains("<title>1F0 on rank 1, 2 ms to 3 ms</title>"), "{picture}");
    // Three ticks fill the plot; the last action starts after two of them.
    assert!(picture.contains(&format!("x=\"{:.2}\"", LABEL + PLOT * 2.0 / 3.0)), "{picture}");
    assert!(picture.contains("bubble, 66.7 %"));
}

#[test]
fn the_title_is_drawn_and_read_out() {
    let settings = PictureSettings { title: "a <b> & c", ..PictureSettings::default() };
    let picture = drawn_with("0F0,0B0\n", &settings);
    assert!(picture.contains("<title id=\"name\">a &lt;b&gt; &amp; c</title>"), "{picture}");
    assert!(picture.contains(">a &lt;b&gt; &amp; c</text>"), "{picture}");
    check_is_closed(&picture);
}

#[test]
fn nothing_is_no_error() {
    for memory_lane in [false, true] {
        let settings = PictureSettings { memory_lane, ..PictureSettings::default() };
        assert!(svg(&Timeline::new(0, Vec::new()), &settings).ends_with("</svg>\n"));
        assert!(svg(&Timeline::new(1, Vec::new()), &settings).ends_with("</svg>\n"));
    }
}

#[test]
fn an_overlap_is_one_cell_of_two_halves() {
    let picture = drawn("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
    assert!(picture.contains(">0F1</text>") && picture.contains(">0B0</text>"), "{picture}");
    let line = picture.lines().find(|line| line.contains("OVERLAP_F_B on rank 0")).expect("the overlap");
    assert_eq!(line.matches("height=\"16.00\"").count(), 2, "two halves: {line}");
    assert_eq!(line.matches("stroke=").count(), 1, "one edge: {line}");
    check_is_closed(&picture);
}

#[test]
fn labels_are_on_top_of_messages() {
    let picture = svg(&predicted("1f1b", 2, 2, "hop=0.5"), &PictureSettings::default());
    for (rank, label) in [(0, ">0B1</text>"), (1, ">1B1</text>")] {
        let bar = picture.rfind(&format!(" on rank {rank}, ")).expect("a bar");
        let title = &picture[picture[..bar].rfind("<title>").expect("a title")..bar];
        assert!(
            title.contains("SEND") || title.contains("RECV"),
            "the last cell with a title is a bar: {title}"
        );
        assert!(picture.find(label).is_some_and(|label| label > bar), "{label}: {picture}");
    }
    check_is_closed(&picture);
}

#[test]
fn chunks_have_shades_and_narrow_cells_tell_the_stage() {
    let picture = svg(&predicted("zbvzerobubble", 4, 8, ""), &PictureSettings::default());
    for shade in LIGHT.shades(crate::picture::palette::Sort::Forward, 2) {
        assert!(picture.contains(&format!("fill=\"{shade}\"")), "{shade}");
    }
    assert!(picture.contains("shades: chunks 0 to 1 of a rank"));
    // The whole label fits; with more microbatches it takes two lines.
    assert!(picture.contains(">7F0</text>"));
    let narrow = svg(&predicted("zbvzerobubble", 4, 12, ""), &PictureSettings::default());
    assert!(narrow.contains(">7F</text>") && !narrow.contains(">7F10</text>"));
    check_is_closed(&picture);
}

#[test]
fn labels_hold_large_microbatches() {
    let picture = drawn("0F123,0B123\n");
    assert!(picture.contains(">0F123</text>"), "{picture}");
}

#[test]
fn exchanges_are_hatched_bars() {
    let with = svg(&predicted("dualpipev", 2, 8, "exchange=0.5"), &PictureSettings::default());
    assert_eq!(with.matches("<path stroke=\"url(#exchange)\"").count(), 2, "one for each rank");
    assert!(with.contains("exchange of tokens"));
    check_is_closed(&with);
    let without = svg(&predicted("dualpipev", 2, 8, ""), &PictureSettings::default());
    assert!(!without.contains("exchange"));
    // The user's code may name a span like anything.
    let scope = |kind| Scope { rank: Rank::new(0), kind, start: 1.0, end: 2.0 };
    let drawn_of = |kind| {
        let timeline = predicted("dualpipev", 2, 8, "").with_scopes(vec![scope(kind)]);
        svg(&timeline, &PictureSettings::default()).contains("exchange of tokens")
    };
    let action = "0F0".parse().expect("an action");
    assert!(drawn_of(ScopeKind::Exchange(action)));
    assert!(!drawn_of(ScopeKind::Computation(action)));
    assert!(!drawn_of(ScopeKind::User("exchange".into())));
    let many = svg(&predicted("1f1b", 64, 256, "exchange=0.5,exchanges=40"), &PictureSettings::default());
    assert!(many.len() <= 1_000_000, "{} bytes", many.len());
}

#[test]
fn the_memory_lane_is_an_option() {
    let settings = PictureSettings { memory_lane: true, ..PictureSettings::default() };
    let (with, without) = (drawn_with("0F0,0F1,0B0,0B1\n", &settings), drawn("0F0,0F1,0B0,0B1\n"));
    assert!(with.contains("<title>rank 0 holds at most 2 activations</title>"), "{with}");
    assert!(!without.contains("holds at most"));
    check_is_closed(&with);
}

#[test]
fn large_drawings_stay_below_a_megabyte() {
    for name in ["1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev", "gpipe"] {
        for costs in ["", "hop=0.1", "F=0.013,I=0.0171,W=0.0093,hop=0.0021"] {
            let microbatches = 256;
            let timeline = predicted(name, 64, microbatches, costs);
            for memory_lane in [false, true] {
                let settings = PictureSettings { title: name, memory_lane, ..PictureSettings::default() };
                let picture = svg(&timeline, &settings);
                assert!(picture.len() <= 1_000_000, "{name} {costs} {memory_lane}: {} bytes", picture.len());
                check_is_closed(&picture);
            }
        }
    }
}

#[test]
fn slices_are_named_by_their_microbatch() {
    let timeline = predicted("seq1f1b", 2, 2, "hop=0.1");
    let picture = svg(&timeline, &PictureSettings::default());
    for name in ["<title>0B1.0 on rank 0, ", ">0F0.1</text>", "<title>1RECV_F0.0 on rank 1, "] {
        assert!(picture.contains(name), "{name}: {picture}");
    }
    assert!(!picture.contains(">0F3<"), "{picture}");
    let page = crate::picture::html(&timeline, &PictureSettings::default());
    assert!(page.contains("\"slices\":2,") && page.contains("<td>0F0.0 0F0.1 0F1.0 0B0.1 "), "{page}");
}
