//! Puts the events of all ranks on one clock.
//!
//! The clocks of separate processes agree only to the accuracy of [`Timeline::clock_skew`]. No message
//! arrives before it is sent. If a timeline shows a message that does, the receiver's clock is behind, and
//! its events are moved later by the smallest amount that puts every message in order. A timeline of one
//! process does not change.
//!
//! Time: linear in the events for each round, and there are at most as many rounds as ranks.

use crate::ids::Rank;
use crate::measured::ranks::{messages, moved};
use crate::timeline::{Event, Timeline};

/// Returns the timeline with the clocks of all ranks adjusted, so that no message arrives before it is sent.
///
/// `timeline` contains one replica, so each action occurs once.
pub fn on_one_clock(timeline: &Timeline) -> Timeline {
    let messages: Vec<(&Event, &Event)> = messages(timeline).collect();
    let mut delays = vec![0.0_f64; timeline.ranks() as usize];
    // A delay passes on from rank to rank. Clocks that only differ need at most one round per rank.
    for _ in 0..timeline.ranks() {
        let mut has_changed = false;
        for (send, receive) in &messages {
            let sent = send.start + delays[send.rank.index()];
            let delay = &mut delays[receive.rank.index()];
            if sent - receive.end > *delay {
                *delay = sent - receive.end;
                has_changed = true;
            }
        }
        if !has_changed {
            break;
        }
    }
    let place = |_, rank: Rank| Some((rank, delays[rank.index()]));
    moved(std::slice::from_ref(timeline), timeline.ranks(), place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Scope, ScopeKind};

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
