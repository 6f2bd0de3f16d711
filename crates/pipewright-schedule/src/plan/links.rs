//! The links between ranks: the link of each message, and its arrival. A link takes one message at a time, as in the timed
//! simulation.

use crate::plan::network::Network;
use crate::plan::stage_load::StageLoad;
use crate::profile::LinkProfile;

/// No link: the neighbouring stage is on the same rank, or there is none.
pub(super) const NO_LINK: u32 = u32::MAX;

/// The links that messages of each stage take.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// For each stage, the link of its output and that of the gradient of its input.
    of: Vec<[u32; 2]>,
    /// The times that these messages occupy their links.
    occupied: Vec<[f64; 2]>,
    /// The time from which each link is free.
    pub(super) free: Vec<f64>,
    /// The costs of each link.
    costs: Vec<LinkProfile>,
}

impl Links {
    /// Numbers the links between the ranks of neighbouring stages. The messages have no sizes until [`Links::set_sizes`].
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

    /// Returns the link of the output of a stage (direction 0), or of the gradient of its input (1), the time that a message
    /// occupies it, and its latency.
    pub(super) fn route(&self, stage: usize, direction: usize) -> (u32, f64, f64) {
        let link = self.of[stage][direction];
        let latency = self.costs.get(link as usize).map_or(0.0, |costs| costs.latency_s);
        (link, self.occupied[stage][direction], latency)
    }

    /// Sends the output of a stage (direction 0), or the gradient of its input (1), at `now`. Returns the arrival.
    pub(super) fn send(&mut self, stage: usize, direction: usize, now: f64) -> f64 {
        let link = self.of[stage][direction] as usize;
        let Some(free) = self.free.get_mut(link) else { return now };
        *free = free.max(now) + self.occupied[stage][direction];
        *free + self.costs[link].latency_s
    }
}
