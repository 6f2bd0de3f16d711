//! The time of collectives among ranks of a group.
//!
//! **Algorithms.** A tensor of `b` bytes is divided among `n` ranks. A gather gives all of it to each rank. A
//! reduction to shards takes as long. A reduction to all is a reduction to shards and a gather, or a switch
//! does it. With the latency `a` of a message and the bandwidth `w`:
//!
//! | algorithm | seconds of a gather | seconds of a reduction to all |
//! |---|---|---|
//! | ring | `(n - 1) a + b (n - 1) / (n w)` | twice |
//! | tree (recursive doubling) | `ceil(log2 n) a + b (n - 1) / (0.92 n w)` | twice |
//! | tree through a switch | `ceil(log2 n) a + b (n - 1) / (n w)` | twice |
//! | switch that reduces | as a tree through a switch | `2 a + b (n + 1) / (n w)` |
//!
//! A tree sends to distant ranks, and reaches 0.92 of the bandwidth of a ring (the factor of NCCL's tuning
//! for large messages). A switch connects all GPUs of a node, so no rank is distant; links between all pairs of
//! GPUs count as a switch. A switch that reduces adds the tensors of all ranks on their way (NVLink SHARP). The
//! fastest algorithm counts. With links between all pairs, a group of `r` of `g` GPUs uses `(r - 1) / (g - 1)` of
//! the links of each, and a message between two GPUs uses one.
//!
//! A machine may have measured rates of messages, sums and exchanges, which replace bandwidths and latencies.
//!
//! If a group has several ranks in each node, its rings enter and leave the node through the links of all of
//! them, so the bandwidth between nodes is multiplied by their number, up to the bandwidth inside the node (as
//! nccl-tests measure on nodes with one link per GPU).

use crate::implementation::Dispatcher;
use crate::machine::{Machine, Switch};
use crate::measured_times::LinkUse;
use pipewright_shapes::model::{Experts, MAX_GROUPS};

/// The share of a ring's bandwidth that a tree reaches.
const TREE_SHARE: f64 = 0.92;

/// The share of the network's bandwidth that libraries for experts' tokens reach: DeepEP's README has 43 to 58 GB/s
/// on links of 50 GB/s, tokens for the rank's own node included.
const NETWORK_SHARE: f64 = 0.88;

/// A group of ranks that exchange tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The ranks.
    pub ranks: u32,
    /// The distance of neighbours in the order of GPUs.
    pub stride: u32,
}

/// Returns the mean number of `places`, each with the same number of neighbouring experts, that have one of a
/// token's experts. Groups and experts are chosen evenly.
///
/// Without groups, `n` places are reached `n (1 - (1 - 1 / n)^k)` times by the `k` experts of a token. With groups, a
/// token first chooses groups, and then its experts from these. A place with several groups has any number of the
/// chosen ones; of several places with one group, all or none are candidates.
pub fn places_reached(experts: &Experts, places: f64) -> f64 {
    let copies = experts.per_token as f64;
    let groups = experts.groups.max(1);
    let chosen = experts.groups_per_token.clamp(1, groups);
    let evenly = |places: f64| places * (1.0 - (1.0 - 1.0 / places).powf(copies));
    if chosen == groups || places <= 1.0 || groups > MAX_GROUPS {
        return evenly(places);
    }
    let groups_of_place = groups as f64 / places;
    if groups_of_place <= 1.0 {
        return evenly(places * chosen as f64 / groups as f64).max(1.0);
    }
    let own = (groups_of_place.round() as u64).min(groups);
    let missed = |share: f64| (1.0 - share).powf(copies);
    let mut probability = 0.0;
    for count in 0..=own.min(chosen) {
        let ways = combinations(own, count) * combinations(groups - own, chosen - count);
        let share = count as f64 / chosen as f64;
        probability += ways / combinations(groups, chosen) * (1.0 - missed(share));
    }
    places * probability
}

/// The number of ways to choose `chosen` of `all`, which are at most [`MAX_GROUPS`].
fn combinations(all: u64, chosen: u64) -> f64 {
    if chosen > all {
        return 0.0;
    }
    (0..chosen).map(|index| (all - index) as f64 / (index + 1) as f64).product()
}

impl Group {
    /// Returns the ranks of the group that share a node.
    pub fn ranks_per_node(&self, machine: &Machine) -> u32 {
        (machine.gpus_per_node / self.stride.max(1)).clamp(1, self.ranks.max(1))
    }

    /// Returns whether all ranks are in one node.
    pub fn is_inside_node(&self, machine: &Machine) -> bool {
        self.ranks_per_node(machine) == self.ranks
    }

    /// Returns the bytes per second of a ring.
    pub fn bandwidth(&self, machine: &Machine) -> f64 {
        let near = self.ranks_per_node(machine);
        let measured =
            |is_inside| machine.measured.link(LinkUse::AllReduce, is_inside).map(|link| link.bandwidth);
        let share = machine.constants.link;
        let inside = measured(true).unwrap_or(machine.bandwidth_among(near) * share);
        if self.is_inside_node(machine) {
            return inside;
        }
        let near = f64::from(near);
        inside.min(measured(false).map_or(machine.network_bandwidth * near * share, |rate| rate * near))
    }

    /// Returns the seconds in which each rank gets all `bytes` of a tensor that is divided among the ranks, or
    /// in which such a tensor is reduced to its shards.
    pub fn gather(&self, machine: &Machine, bytes: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let ranks = f64::from(self.ranks);
        let hop = self.hop(machine, LinkUse::AllReduce);
        let transfer = bytes * (ranks - 1.0) / ranks / self.bandwidth(machine);
        let ring = (ranks - 1.0) * hop + transfer;
        let tree_share = if self.has_switch(machine) { 1.0 } else { TREE_SHARE };
        ring.min(ranks.log2().ceil() * hop + transfer / tree_share)
    }

    /// Returns the seconds in which a tensor of `bytes` is summed over all ranks.
    pub fn all_reduce(&self, machine: &Machine, bytes: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let both = 2.0 * self.gather(machine, bytes);
        if machine.node_switch == Switch::Reduces && self.is_inside_node(machine) {
            let ranks = f64::from(self.ranks);
            let by_switch = bytes * (ranks + 1.0) / ranks / self.bandwidth(machine);
            return both.min(2.0 * self.hop(machine, LinkUse::AllReduce) + by_switch);
        }
        both
    }

    /// Returns the seconds in which each rank sends `bytes` in total, divided among all ranks of the group.
    /// The share of the rank itself is not sent.
    pub fn all_to_all(&self, machine: &Machine, bytes: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let (ranks, near) = (f64::from(self.ranks), f64::from(self.ranks_per_node(machine)));
        let share = machine.constants.link;
        let seconds = |bytes: f64, is_inside: bool, bandwidth: f64| {
            let measured = machine.measured.link(LinkUse::AllToAll, is_inside);
            measured.map_or(bytes / bandwidth / share, |link| bytes / link.bandwidth)
        };
        let own = machine.bandwidth_among(self.ranks_per_node(machine));
        let inside = seconds(bytes * (near - 1.0) / ranks, true, own);
        let outside = seconds(bytes * (ranks - near) / ranks, false, machine.network_bandwidth);
        // A rank posts all its messages at once. Without a switch, they pass the ranks between.
        let hops = if self.has_switch(machine) { 1.0 } else { ranks.log2().ceil() };
        inside.max(outside) + hops * self.hop(machine, LinkUse::AllToAll)
    }

    /// Returns the seconds in which the tokens of a rank, of `bytes` in total, reach their experts or come back.
    ///
    /// An exchange of all ranks with all ranks sends each copy of a token by itself. The other libraries send a
    /// token once to each node that has one of its experts, where it is copied, and once to each rank of a node.
    /// Both links work at the same time. Measured rates of exchanges replace the rates of these libraries, too.
    pub fn dispatch(&self, machine: &Machine, bytes: f64, experts: &Experts, dispatcher: Dispatcher) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        if dispatcher == Dispatcher::AllToAll {
            return self.all_to_all(machine, bytes * experts.per_token as f64);
        }
        let ranks = f64::from(self.ranks);
        let near = f64::from(self.ranks_per_node(machine));
        let nodes = ranks / near;
        let measured = |is_inside: bool| machine.measured.link(LinkUse::AllToAll, is_inside);
        let own = machine.bandwidth_among(self.ranks_per_node(machine)) * machine.constants.link;
        let own = measured(true).map_or(own, |link| link.bandwidth);
        let network = machine.network_bandwidth * NETWORK_SHARE.max(machine.constants.link);
        let network = measured(false).map_or(network, |link| link.bandwidth);
        let outside = bytes * places_reached(experts, nodes) * (nodes - 1.0) / nodes / network;
        // Every token that reaches a node passes to each rank of it with one of its experts.
        let inside = bytes * places_reached(experts, ranks) * (near - 1.0) / near / own;
        let node_latency = measured(true).map_or(machine.node_latency, |link| link.latency);
        let network_latency = measured(false).map_or(machine.network_latency, |link| link.latency);
        inside.max(outside) + node_latency + if nodes > 1.0 { network_latency } else { 0.0 }
    }

    /// Returns the seconds in which each rank passes tensors of `bytes` to its neighbour in a ring, `steps`
    /// times. Between nodes, a ring has one link.
    pub fn ring_exchange(&self, machine: &Machine, bytes: f64, steps: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let (bandwidth, latency) = machine.message_rate(self.is_inside_node(machine));
        steps * (bytes / bandwidth + latency)
    }

    fn has_switch(&self, machine: &Machine) -> bool {
        machine.node_switch != Switch::None && self.is_inside_node(machine)
    }

    /// The seconds of a message without its bytes.
    fn hop(&self, machine: &Machine, purpose: LinkUse) -> f64 {
        let is_inside = self.is_inside_node(machine);
        let known = if is_inside { machine.node_latency } else { machine.network_latency };
        machine.measured.link(purpose, is_inside).map_or(known, |link| link.latency)
    }
}

impl Machine {
    /// Returns the bytes per second and the latency of messages between two ranks.
    pub(crate) fn message_rate(&self, is_inside_node: bool) -> (f64, f64) {
        let (bandwidth, latency) = if is_inside_node {
            (self.bandwidth_among(2), self.node_latency)
        } else {
            (self.network_bandwidth, self.network_latency)
        };
        let measured = self.measured.link(LinkUse::Message, is_inside_node);
        measured.map_or((bandwidth * self.constants.link, latency), |link| (link.bandwidth, link.latency))
    }
}
