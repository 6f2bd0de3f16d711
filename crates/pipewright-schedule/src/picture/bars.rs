//! The thin bars below the computation: messages, collectives, and the messages of skip connections.

use crate::action::Action;
use crate::ids::Rank;
use crate::picture::palette::{Sort, sort};
use crate::skip_event::SkipAction;
use crate::timeline::Timeline;

/// A bar of a rank's lane.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bar {
    pub(super) of: BarOf,
    pub(super) start: f64,
    pub(super) end: f64,
}

/// The action or the message that a bar shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum BarOf {
    Action(Action),
    Skip(SkipAction),
}

impl BarOf {
    pub(super) fn sort(self) -> Sort {
        match self {
            Self::Action(action) => sort(action),
            Self::Skip(_) => Sort::Message,
        }
    }
}

/// Returns the bars of a rank that take time, by start.
pub(super) fn bars(timeline: &Timeline, rank: Rank) -> Vec<Bar> {
    let actions = timeline.events_of(rank).iter().filter(|event| !event.action.is_compute());
    let actions =
        actions.map(|event| Bar { of: BarOf::Action(event.action), start: event.start, end: event.end });
    let skips = timeline.skips_of(rank).iter();
    let skips = skips.map(|skip| Bar { of: BarOf::Skip(skip.action), start: skip.start, end: skip.end });
    let mut bars: Vec<Bar> = actions.chain(skips).filter(|bar| bar.end > bar.start).collect();
    bars.sort_by(|a, b| a.start.total_cmp(&b.start));
    bars
}
