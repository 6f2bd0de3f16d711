//! The links between ranks in the timed simulation. Each carries one message after another.

use std::collections::BTreeMap;

use crate::ids::Rank;

/// The links, one for each ordered pair of ranks.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// The time from which each link that has been used is free.
    free: BTreeMap<(Rank, Rank), f64>,
}

/// The times of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transit {
    /// When it begins to occupy its link.
    pub(super) start: f64,
    /// When it ceases to occupy its link.
    pub(super) left: f64,
    /// When it has arrived.
    pub(super) arrival: f64,
}

impl Links {
    /// Puts a message on a link once the link is free, at `ready` at the earliest. It occupies the link for
    /// the first time of `cost`, and travels for the second one after that.
    pub(super) fn occupy(&mut self, link: (Rank, Rank), cost: (f64, f64), ready: f64) -> Transit {
        let (occupied, latency) = cost;
        let free = self.free.entry(link).or_insert(0.0);
        let start = free.max(ready);
        *free = start + occupied;
        Transit { start, left: *free, arrival: *free + latency }
    }
}
