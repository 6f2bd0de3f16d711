//! Puts the events of all ranks on one clock.
//!
//! The clocks of separate processes agree only to the accuracy of [`Timeline::clock_skew`]. No message
//! arrives before it is sent. If a timeline shows a message that does, the receiver's clock is behind, and
//! its events are moved later by the smallest amount that puts every message in order. A timeline of one
//! process does not change.
//!
//! Time: linear in the events for each round, and there are at most as many rounds as ranks.

use std::collections::HashMap;

use crate::action::Action;
use crate::ids::Rank;
use crate::skip_event::SkipEvent;
use crate::timeline::{Event, Scope, Timeline};
use crate::transfer::Transfer;

/// The ends of a message: its sender with the start of the send, and its receiver with the end of the
/// receive.
struct Message {
    sender: Rank,
    sent: f64,
    receiver: Rank,
    received: f64,
}

/// Returns the timeline with the clocks of all ranks adjusted, so that no message arrives before it is sent.
///
/// `timeline` contains one replica, so each action occurs once.
pub fn on_one_clock(timeline: &Timeline) -> Timeline {
    let messages = messages(timeline);
    let mut delays = vec![0.0_f64; timeline.ranks() as usize];
    // A delay passes on from rank to rank. Clocks that only differ need at most one round per rank.
    for _ in 0..timeline.ranks() {
        let mut has_changed = false;
        for message in &messages {
            let sent = message.sent + delays[message.sender.index()];
            let delay = &mut delays[message.receiver.index()];
            if sent - message.received > *delay {
                *delay = sent - message.received;
                has_changed = true;
            }
        }
        if !has_changed {
            break;
        }
    }
    let moved = timeline.events().iter().map(|event| {
        let delay = delays[event.rank.index()];
        Event { start: event.start + delay, end: event.end + delay, ..*event }
    });
    let skips = timeline.skips().iter().map(|skip| {
        let delay = delays[skip.rank.index()];
        SkipEvent { start: skip.start + delay, end: skip.end + delay, ..*skip }
    });
    let scopes = timeline.scopes().iter().map(|scope| {
        let delay = delays[scope.rank.index()];
        Scope { start: scope.start + delay, end: scope.end + delay, ..scope.clone() }
    });
    let moved = Timeline::new(timeline.ranks(), moved.collect());
    let moved = moved.with_skips(skips.collect()).with_scopes(scopes.collect());
    moved.with_clock_skew(timeline.clock_skew()).with_slices(timeline.slices())
}

fn messages(timeline: &Timeline) -> Vec<Message> {
    let is_send = |action: Action| matches!(action, Action::SendForward { .. } | Action::SendBackward { .. });
    let sends: HashMap<Action, &Event> = timeline
        .events()
        .iter()
        .filter(|event| is_send(event.action))
        .map(|event| (event.action, event))
        .collect();
    let is_receive =
        |action: Action| matches!(action, Action::RecvForward { .. } | Action::RecvBackward { .. });
    let receives = timeline.events().iter().filter(|event| is_receive(event.action));
    let message = |receive: &Event| {
        let send = sends.get(&Transfer::other_end(receive.action)?)?;
        Some(Message { sender: send.rank, sent: send.start, receiver: receive.rank, received: receive.end })
    };
    receives.filter_map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::ScopeKind;

    fn timeline(events: &[(u32, &str, f64, f64)]) -> Timeline {
        let event = |&(rank, action, start, end): &(u32, &str, f64, f64)| Event {
            rank: Rank::new(rank),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        Timeline::new(3, events.iter().map(event).collect())
    }

    #[test]
    fn a_clock_that_is_behind_is_moved() {
        let behind = timeline(&[
            (0, "0F0", 0.0, 2.0),
            (0, "0SEND_F0", 2.0, 2.0),
            (1, "1RECV_F0", 0.0, 1.5),
            (1, "1F0", 1.5, 3.0),
            (1, "1SEND_F0", 3.0, 3.0),
            (2, "2RECV_F0", 0.0, 3.0),
            (2, "2F0", 3.0, 4.0),
        ]);
        let kind = ScopeKind::Exchange("1F0".parse().expect("an action"));
        let behind =
            behind.with_scopes(vec![Scope { rank: Rank::new(1), kind: kind.clone(), start: 2.0, end: 2.5 }]);
        let starts = |timeline: &Timeline| -> Vec<(String, f64)> {
            let compute = timeline.events().iter().filter(|event| event.action.is_compute());
            compute.map(|event| (event.action.to_string(), event.start)).collect()
        };
        let expected = [("0F0", 0.0), ("1F0", 2.0), ("2F0", 3.5)].map(|(name, at)| (name.to_owned(), at));
        let moved = on_one_clock(&behind);
        assert_eq!(starts(&moved), expected);
        assert_eq!(moved.scopes(), [Scope { rank: Rank::new(1), kind, start: 2.5, end: 3.0 }]);
        assert_eq!(on_one_clock(&moved), moved, "a timeline on one clock does not change");
    }
}
