//! The links between ranks: the link of each message, and its arrival. A link takes one message at a time, as
//! in the timed simulation.

use crate::plan::network::Network;
use crate::plan::stage_load::StageLoad;
use crate::profile::LinkProfile;

/// No link: the neighbouring stage is on the same rank, or there is none.
pub(super) const NO_LINK: u32 = u32::MAX;

/// How a message travels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// [`NO_LINK`] between stages of one rank.
    pub(super) link: u32,
    /// The time that the message occupies the link.
    occupied: f64,
    /// The latency of the link.
    latency: f64,
}

impl Route {
    /// The route of a message between stages of one rank, which takes no time.
    pub(super) const NONE: Self = Self { link: NO_LINK, occupied: 0.0, latency: 0.0 };

    /// Sends a message at `now`. `free` is the time from which the link is free. Returns the arrival.
    pub(super) fn send(self, free: &mut f64, now: f64) -> f64 {
        *free = free.max(now) + self.occupied;
        *free + self.latency
    }
}

/// The links that messages of each stage take.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// For each stage, the link of its output and the link of its input's gradient.
    of: Vec<[u32; 2]>,
    /// The times that these messages occupy their links.
    occupied: Vec<[f64; 2]>,
    /// The time from which each link is free.
    pub(super) free: Vec<f64>,
    /// The costs of each link.
    costs: Vec<LinkProfile>,
}

impl Links {
    /// Numbers the links between the ranks of neighbouring stages. The messages have no sizes until
    /// [`Links::set_sizes`].
    pub(super) fn set(&mut self, rank_of: &[u32], network: &Network) {
        let mut known: Vec<(u32, u32)> = Vec::new();
        let mut number = |from: u32, to: u32| {
            if from == to {
                return NO_LINK;
            }
            // There are few pairs: at most two for each stage.
            let found = known.iter().rposition(|&pair| pair == (from, to));
            found.unwrap_or_else(|| {
                known.push((from, to));
                known.len() - 1
            }) as u32
        };
        self.of.clear();
        for (stage, &rank) in rank_of.iter().enumerate() {
            let output = rank_of.get(stage + 1).map_or(NO_LINK, |&next| number(rank, next));
            let gradient = stage.checked_sub(1).map_or(NO_LINK, |before| number(rank, rank_of[before]));
            self.of.push([output, gradient]);
        }
        self.free.clear();
        self.free.resize(known.len(), 0.0);
        self.costs.clear();
        self.costs.extend(known.iter().map(|&(from, to)| network.link(from, to)));
    }

    /// Sets the sizes of the messages.
    pub(super) fn set_sizes(&mut self, loads: &[StageLoad]) {
        let takes = |link: u32, bytes: u64| {
            self.costs.get(link as usize).map_or(0.0, |costs| bytes as f64 / costs.bytes_per_s)
        };
        self.occupied.clear();
        self.occupied.extend(self.of.iter().enumerate().map(|(stage, &[output, gradient])| {
            let before = stage.checked_sub(1).map_or(0, |before| loads[before].output);
            [takes(output, loads[stage].output), takes(gradient, before)]
        }));
    }

    /// Returns the route of the output of a stage (direction 0), or of the gradient of its input (1).
    pub(super) fn route(&self, stage: usize, direction: usize) -> Route {
        let link = self.of[stage][direction];
        let costs = self.costs.get(link as usize);
        costs.map_or(Route::NONE, |costs| {
            let occupied = self.occupied[stage][direction];
            Route { link, occupied, latency: costs.latency_s }
        })
    }

    /// Sends the output of a stage (direction 0), or the gradient of its input (1), at `now`. Returns the
    /// arrival.
    pub(super) fn send(&mut self, stage: usize, direction: usize, now: f64) -> f64 {
        let route = self.route(stage, direction);
        self.free.get_mut(route.link as usize).map_or(now, |free| route.send(free, now))
    }
}
