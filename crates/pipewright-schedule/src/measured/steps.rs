//! Steps that overlap, on one time axis.

use super::ranks::moved;
use crate::action::Action;
use crate::ids::Microbatch;
use crate::message_record::{MessageEnd, MessageRecord};
use crate::skip_event::{SkipAction, SkipEvent, SkipMessage};
use crate::timeline::{Event, Timeline};

/// Returns what several steps have recorded, each with the time at which it starts, in seconds. The microbatches are numbered
/// through: a step has so many `microbatches`. Scopes keep the actions that they name.
pub fn join_steps(steps: &[(f64, &Timeline)], microbatches: u32) -> Timeline {
    let number = |(index, (_, timeline)): (u32, &(f64, &Timeline))| {
        numbered(timeline, microbatches.saturating_mul(index))
    };
    let timelines: Vec<Timeline> = (0..).zip(steps).map(number).collect();
    let ranks = timelines.iter().map(Timeline::ranks).max().unwrap_or(0);
    moved(&timelines, ranks, |index, rank| Some((rank, steps.get(index as usize)?.0)))
}

/// Returns a timeline whose microbatches have numbers that are higher by `more`.
fn numbered(timeline: &Timeline, more: u32) -> Timeline {
    let higher = |microbatch: Microbatch| microbatch.get().checked_add(more).map(Microbatch::new);
    let of_action = |action: Action| {
        let microbatch = action.microbatch().and_then(higher);
        let numbered = microbatch
            .and_then(|microbatch| Action::of_microbatch(action.kind(), action.stage(), microbatch));
        numbered.unwrap_or(action)
    };
    let of_message = |message: SkipMessage| SkipMessage {
        microbatch: higher(message.microbatch).unwrap_or(message.microbatch),
        ..message
    };
    let of_skip = |action: SkipAction| match action {
        SkipAction::Send(message) => SkipAction::Send(of_message(message)),
        SkipAction::Receive(message) => SkipAction::Receive(of_message(message)),
    };
    let of_end = |end: MessageEnd| match end {
        MessageEnd::Action(action) => MessageEnd::Action(of_action(action)),
        MessageEnd::Skip(action) => MessageEnd::Skip(of_skip(action)),
    };
    let event = |event: &Event| Event { action: of_action(event.action), ..*event };
    let skip = |skip: &SkipEvent| SkipEvent { action: of_skip(skip.action), ..*skip };
    let message = |message: &MessageRecord| MessageRecord { end: of_end(message.end), ..message.clone() };
    Timeline::new(timeline.ranks(), timeline.events().iter().map(event).collect())
        .with_skips(timeline.skips().iter().map(skip).collect())
        .with_scopes(timeline.scopes().to_vec())
        .with_messages(timeline.messages().iter().map(message).collect())
        .with_clock_skew(timeline.clock_skew())
        .with_slices(timeline.slices())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Rank, StageIndex};
    use crate::timeline::{Scope, ScopeKind};

    #[test]
    fn the_second_step_follows_with_microbatches_of_its_own() {
        let event = |action: &str, start| Event {
            rank: Rank::new(0),
            action: action.parse().expect("an action"),
            start,
            end: start + 1.0,
        };
        let skip = |microbatch: u32, start| {
            let (from, to) = (StageIndex::new(0), StageIndex::new(2));
            let message = SkipMessage { from, to, microbatch: Microbatch::new(microbatch) };
            SkipEvent { rank: Rank::new(0), action: SkipAction::Send(message), start, end: start + 0.25 }
        };
        let scope = |start| {
            let kind = ScopeKind::User("mix".into());
            Scope { rank: Rank::new(0), kind, start, end: start + 0.25 }
        };
        let message = |end| {
            let (rank, peer, tensors) = (Rank::new(0), Rank::new(0), [].into());
            MessageRecord { rank, end, peer, bytes: 8, tensors }
        };
        let step = Timeline::new(1, vec![event("0F1", 0.5), event("0REDUCE_GRAD", 2.0)])
            .with_skips(vec![skip(1, 0.75)])
            .with_scopes(vec![scope(0.5)])
            .with_messages(vec![message(MessageEnd::Skip(skip(1, 0.0).action))]);
        let found = join_steps(&[(0.0, &step), (1.25, &step)], 2);
        let expected = [("0F1", 0.5), ("0F3", 1.75), ("0REDUCE_GRAD", 2.0), ("0REDUCE_GRAD", 3.25)];
        assert_eq!(found.events(), expected.map(|(action, start)| event(action, start)));
        assert_eq!(found.skips(), [skip(1, 0.75), skip(3, 2.0)]);
        assert_eq!(found.scopes(), [scope(0.5), scope(1.75)]);
        assert_eq!(
            found.messages(),
            [1, 3].map(|number| message(MessageEnd::Skip(skip(number, 0.0).action)))
        );
    }
}
