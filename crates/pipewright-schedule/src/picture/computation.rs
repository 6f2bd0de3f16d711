//! Shows a run of a lowered program as the computations of its schedule.
//!
//! The lowering of training splits backwards and takes overlaps apart, so that messages leave early. The
//! order of a schedule is easier to see in its own computations.

use std::iter::Peekable;

use crate::action::Action;
use crate::ids::Rank;
use crate::schedule::Schedule;
use crate::timeline::{Event, Timeline};

/// Returns the timeline with the computations of `schedule` as its events, and without communication.
///
/// `timeline` must be a run of a program that `schedule` was lowered to. The parts of a computation become
/// one event. Halves of an overlap with idle time between them stay apart: one event would hide the wait.
pub fn computation_of(schedule: &Schedule, timeline: &Timeline) -> Timeline {
    let mut events = Vec::new();
    for rank in (0..timeline.ranks()).map(Rank::new) {
        let compute = timeline.events_of(rank).iter().filter(|event| event.action.is_compute());
        let mut compute = compute.copied().peekable();
        for &action in schedule.row(rank).iter().flatten() {
            let mut parts: Vec<Event> = Vec::new();
            for event in action.parts().flat_map(|part| run_of(part, &mut compute)) {
                match parts.last_mut() {
                    Some(last) if touches(last, &event) => {
                        *last = Event { action, end: last.end.max(event.end), ..*last };
                    }
                    _ => parts.push(event),
                }
            }
            events.append(&mut parts);
        }
    }
    let computation = Timeline::new(timeline.ranks(), events).with_slices(timeline.slices());
    computation.with_scopes(timeline.scopes().to_vec())
}

/// Takes the events of `part` from the run: its own, or the events of both halves of a backward. Other events
/// before them, such as a forward that is computed again, are dropped.
fn run_of(part: Action, run: &mut Peekable<impl Iterator<Item = Event>>) -> Vec<Event> {
    let halves = match part {
        Action::Backward { stage, microbatch } => {
            [Action::InputBackward { stage, microbatch }, Action::WeightBackward { stage, microbatch }]
        }
        whole => [whole, whole],
    };
    while run.next_if(|event| event.action != part && event.action != halves[0]).is_some() {}
    let Some(first) = run.next() else { return Vec::new() };
    let second = run.next_if(|event| event.action == halves[1] && first.action == halves[0]);
    match second {
        Some(second) => vec![Event { action: part, end: second.end, ..first }],
        None => vec![first],
    }
}

/// Returns whether `second` begins as soon as `first` ends.
fn touches(first: &Event, second: &Event) -> bool {
    second.start - first.end <= (second.end - first.start) * 1e-6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::csv::parse_schedule;
    use crate::lower::{TrainingLowering, for_training};
    use crate::simulate::timed;

    fn check(rows: &str, costs: &str, expected: &[&str]) {
        let schedule = parse_schedule(rows).expect("a schedule");
        let program = for_training(&schedule, &TrainingLowering::default()).expect("a sound schedule");
        let costs: Costs = costs.parse().expect("costs");
        let run = timed(program.as_program(), &costs).expect("no deadlock");
        let shown = computation_of(&schedule, run.timeline());
        let text = |event: &Event| format!("{} {}-{}", event.action, event.start, event.end);
        assert_eq!(shown.events().iter().map(text).collect::<Vec<_>>(), expected);
        assert_eq!(shown.makespan(), run.timeline().makespan());
    }

    #[test]
    fn a_backward_is_one_event_and_its_gradient_leaves_early() {
        check("0F0,0B0\n1F0,1B0\n", "F=1,I=1,W=1", &["0F0 0-1", "0B0 3-5", "1F0 1-2", "1B0 2-4"]);
        check("0F0,0I0,0W0\n", "F=1,I=1,W=2", &["0F0 0-1", "0I0 1-2", "0W0 2-4"]);
    }

    #[test]
    fn an_overlap_is_one_event_unless_it_waits() {
        let rows = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,1B1,1F2,1B2\n";
        check(
            rows,
            "F=1,B=2",
            &[
                "0F0 0-1",
                "0F1 1-2",
                "0F2 2-3",
                "0B0 4-6",
                "0B1 6-8",
                "0B2 9-11",
                "1F0 1-2",
                "(1F1;1B0)OVERLAP_F_B 2-5",
                "1B1 5-7",
                "1F2 7-8",
                "1B2 8-10",
            ],
        );
    }
}
