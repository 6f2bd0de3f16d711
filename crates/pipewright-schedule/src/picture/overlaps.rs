//! Joins the halves of overlaps, which the timed simulation and the executor report as two events.

use std::collections::HashMap;

use crate::action::Action;
use crate::ids::Rank;
use crate::schedule::Program;
use crate::timeline::{Event, Timeline};

/// Returns the timeline of `program` with one event per overlap, so that a picture shows it as one cell. If the
/// backward computes its forward again while the other half exchanges tokens, that is a part of the cell.
///
/// Halves with idle time between them do not change: one cell would hide the wait.
pub fn with_whole_overlaps(timeline: &Timeline, program: &Program) -> Timeline {
    let mut events = Vec::with_capacity(timeline.events().len());
    for rank in (0..timeline.ranks()).map(Rank::new) {
        let overlaps = overlaps_of(program.row(rank));
        let (compute, other): (Vec<Event>, Vec<Event>) =
            timeline.events_of(rank).iter().partition(|event| event.action.is_compute());
        events.extend(other);
        let mut compute = compute.into_iter().peekable();
        while let Some(first) = compute.next() {
            let Some(&(action, backward)) = overlaps.get(&first.action) else {
                events.push(first);
                continue;
            };
            let again = compute.next_if(|event| recomputes(event, backward) && event.start < first.end);
            let end = again.map_or(first.end, |again| first.end.max(again.end));
            let whole = Event { action, end, ..first };
            match compute.next_if(|second| follows(second, &whole, backward)) {
                Some(second) => events.push(Event { end: end.max(second.end), ..whole }),
                None => events.extend([Some(first), again].into_iter().flatten()),
            }
        }
    }
    timeline.with_events(events)
}

/// Returns the overlaps of a row by their forwards, each with its backward.
fn overlaps_of(row: &[Action]) -> HashMap<Action, (Action, Action)> {
    let halves = |&action: &Action| {
        let mut parts = action.parts();
        Some((parts.next()?, (action, parts.next()?)))
    };
    row.iter().filter_map(halves).collect()
}

/// Returns whether `event` is the forward of `backward`.
fn recomputes(event: &Event, backward: Action) -> bool {
    let is_forward = matches!(event.action, Action::Forward { .. });
    let at = |action: Action| (action.stage(), action.microbatch());
    is_forward && at(event.action) == at(backward)
}

/// Returns whether `second` runs `backward`, and begins as soon as `first` ends.
fn follows(second: &Event, first: &Event, backward: Action) -> bool {
    let tolerance = (second.end - first.start) * 1e-6;
    second.action == backward && second.start - first.end <= tolerance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::csv::parse_program;
    use crate::simulate::timed;

    fn check(times: [[f64; 2]; 4], expected: &[(&str, f64, f64)]) {
        let program = parse_program("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n").expect("a program");
        let event = |(action, [start, end]): (&str, [f64; 2])| Event {
            rank: Rank::new(0),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        let events = ["0F0", "0F1", "0B0", "0B1"].into_iter().zip(times).map(event).collect();
        let whole = with_whole_overlaps(&Timeline::new(1, events), &program);
        let found: Vec<(String, f64, f64)> =
            whole.events().iter().map(|event| (event.action.to_string(), event.start, event.end)).collect();
        let expected: Vec<(String, f64, f64)> =
            expected.iter().map(|&(action, start, end)| (action.to_owned(), start, end)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn halves_that_touch_are_joined() {
        let times = [[0.0, 1.0], [1.0, 2.0], [2.0, 4.0], [4.0, 6.0]];
        check(times, &[("0F0", 0.0, 1.0), ("(0F1;0B0)OVERLAP_F_B", 1.0, 4.0), ("0B1", 4.0, 6.0)]);
    }

    #[test]
    fn halves_that_alternate_are_joined() {
        let times = [[0.0, 1.0], [1.0, 5.0], [2.0, 4.0], [5.0, 6.0]];
        check(times, &[("0F0", 0.0, 1.0), ("(0F1;0B0)OVERLAP_F_B", 1.0, 5.0), ("0B1", 5.0, 6.0)]);
    }

    #[test]
    fn a_wait_between_halves_stays_in_sight() {
        let times = [[0.0, 1.0], [1.0, 2.0], [3.0, 5.0], [5.0, 7.0]];
        check(times, &[("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 3.0, 5.0), ("0B1", 5.0, 7.0)]);
    }

    const ROWS: &str = "0F0,1F0,1B0,0F1,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n";

    #[test]
    fn a_forward_that_is_computed_again_is_a_part_of_its_overlap() {
        let program = parse_program(ROWS).expect("a program");
        let costs: Costs = "F=2,B=2,exchange=1,exchanges=1".parse().expect("costs");
        let cells = |recompute: &str| {
            let costs = Costs { recompute: recompute.parse().expect("a choice"), ..costs.clone() };
            let run = timed(&program, &costs).expect("no deadlock");
            let whole = with_whole_overlaps(run.timeline(), &program);
            let is_overlap = |event: &&Event| event.action.parts().count() > 1;
            let overlap = *whole.events().iter().find(is_overlap).expect("an overlap");
            // The cells of a rank do not lie on top of each other.
            assert!(whole.events().is_sorted_by(|one, other| one.end <= other.start), "{:?}", whole.events());
            (overlap.start, overlap.end, whole.events().len())
        };
        assert_eq!(cells("none"), (12.0, 16.0, 7));
        // The second forwards of `1B1` and `0B1` have cells of their own.
        assert_eq!(cells("stage"), (12.0, 19.0, 9));
    }

    #[test]
    fn a_second_forward_after_the_first_half_stays_in_sight() {
        let program = parse_program(ROWS).expect("a program");
        let costs = Costs { recompute: "stage".parse().expect("a choice"), ..Costs::default() };
        let run = timed(&program, &costs).expect("no deadlock");
        assert_eq!(&with_whole_overlaps(run.timeline(), &program), run.timeline());
    }

    #[test]
    fn idle_time_is_the_same() {
        let program = parse_program("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n").expect("a program");
        let run = timed(&program, &"F=1,I=1,W=1".parse().expect("costs")).expect("no deadlock");
        let whole = with_whole_overlaps(run.timeline(), &program);
        assert_eq!(whole.events().len() + 1, run.timeline().events().len());
        assert_eq!(whole.bubble_per_rank(), run.timeline().bubble_per_rank());
    }
}
