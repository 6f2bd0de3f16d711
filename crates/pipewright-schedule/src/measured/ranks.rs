//! Timelines whose ranks are moved, and the two ends of each message.

use std::collections::HashMap;

use crate::action::Action;
use crate::ids::Rank;
use crate::message_record::MessageRecord;
use crate::skip_event::SkipEvent;
use crate::timeline::{Event, Scope, Timeline};
use crate::transfer::Transfer;

/// Returns a timeline of `ranks` ranks with the events of `timelines`. `place` gets the index of a timeline
/// and one of its ranks. It returns the new rank and the delay of all its times, or `None` to leave it out.
pub(super) fn moved(
    timelines: &[Timeline],
    ranks: u32,
    place: impl Fn(u32, Rank) -> Option<(Rank, f64)>,
) -> Timeline {
    let (mut events, mut skips, mut scopes) = (Vec::new(), Vec::new(), Vec::new());
    let mut messages = Vec::new();
    for (index, timeline) in (0..).zip(timelines) {
        for from in (0..timeline.ranks()).map(Rank::new) {
            let Some((rank, delay)) = place(index, from) else { continue };
            let event =
                |event: &Event| Event { rank, start: event.start + delay, end: event.end + delay, ..*event };
            let skip = |skip: &SkipEvent| SkipEvent {
                rank,
                start: skip.start + delay,
                end: skip.end + delay,
                ..*skip
            };
            let scope = |scope: &Scope| Scope {
                rank,
                start: scope.start + delay,
                end: scope.end + delay,
                kind: scope.kind.clone(),
            };
            let message = |message: &MessageRecord| {
                let (peer, _) = place(index, message.peer)?;
                Some(MessageRecord { rank, peer, ..message.clone() })
            };
            messages.extend(timeline.messages_of(from).iter().filter_map(message));
            events.extend(timeline.events_of(from).iter().map(event));
            skips.extend(timeline.skips_of(from).iter().map(skip));
            scopes.extend(timeline.scopes_of(from).iter().map(scope));
        }
    }
    let slices = timelines.first().map(Timeline::slices).unwrap_or_default();
    let moved = Timeline::new(ranks, events).with_skips(skips).with_scopes(scopes).with_messages(messages);
    moved.with_clock_skew(timelines.iter().find_map(Timeline::clock_skew)).with_slices(slices)
}

/// Returns the send and the receive of each message, in the order of the receives.
pub(super) fn messages(timeline: &Timeline) -> impl Iterator<Item = (&Event, &Event)> {
    let events = timeline.events().iter();
    let sends = events.clone().filter(|event| event.action.kind().is_send());
    let sends: HashMap<Action, &Event> = sends.map(|event| (event.action, event)).collect();
    let receives = events.filter(|event| event.action.kind().is_receive());
    receives.filter_map(move |receive| {
        let send = sends.get(&Transfer::other_end(receive.action)?)?;
        Some((*send, receive))
    })
}
