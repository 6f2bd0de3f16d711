//! Steps that overlap, on one time axis.

use crate::action::Action;
use crate::ids::Microbatch;
use crate::timeline::{Event, Timeline};

/// Returns the events of several steps, each with the time at which it starts, in seconds. The microbatches are numbered through:
/// a step has so many `microbatches`.
pub fn join_steps(steps: &[(f64, &Timeline)], microbatches: u32) -> Timeline {
    let number = |action: Action, more: u32| {
        let microbatch = Microbatch::new(action.microbatch()?.get().checked_add(more)?);
        Action::of_microbatch(action.kind(), action.stage(), microbatch)
    };
    let of_step = |(index, (start, timeline)): (u32, &(f64, &Timeline))| -> Vec<Event> {
        let moved = |event: &Event| Event {
            action: number(event.action, index * microbatches).unwrap_or(event.action),
            start: event.start + start,
            end: event.end + start,
            ..*event
        };
        timeline.events().iter().map(moved).collect()
    };
    let ranks = steps.iter().map(|(_, timeline)| timeline.ranks()).max().unwrap_or(0);
    let skew = steps.iter().find_map(|(_, timeline)| timeline.clock_skew());
    Timeline::new(ranks, (0..).zip(steps).flat_map(of_step).collect()).with_clock_skew(skew)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Rank;

    #[test]
    fn the_second_step_follows_with_microbatches_of_its_own() {
        let event = |action: &str, start| Event {
            rank: Rank::new(0),
            action: action.parse().expect("an action"),
            start,
            end: start + 1.0,
        };
        let step = Timeline::new(1, vec![event("0F1", 0.5), event("0REDUCE_GRAD", 2.0)]);
        let found = join_steps(&[(0.0, &step), (1.25, &step)], 2);
        let expected = [("0F1", 0.5), ("0F3", 1.75), ("0REDUCE_GRAD", 2.0), ("0REDUCE_GRAD", 3.25)];
        assert_eq!(found.events(), expected.map(|(action, start)| event(action, start)));
    }
}
