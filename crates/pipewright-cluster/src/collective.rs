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
//! If a group has several ranks in each node, its rings enter and leave the node through the links of all of
//! them, so the bandwidth between nodes is multiplied by their number, up to the bandwidth inside the node (as
//! nccl-tests measure on nodes with one link per GPU).

use crate::machine::{Machine, Switch};

/// The share of a ring's bandwidth that a tree reaches.
const TREE_SHARE: f64 = 0.92;

/// A group of ranks that exchange tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The ranks.
    pub ranks: u32,
    /// The distance of neighbours in the order of GPUs.
    pub stride: u32,
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
        let inside = machine.bandwidth_among(near);
        let outside = machine.network_bandwidth * f64::from(near);
        let bandwidth = if self.is_inside_node(machine) { inside } else { outside.min(inside) };
        bandwidth * machine.constants.link
    }

    /// Returns the seconds in which each rank gets all `bytes` of a tensor that is divided among the ranks, or
    /// in which such a tensor is reduced to its shards.
    pub fn gather(&self, machine: &Machine, bytes: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let ranks = f64::from(self.ranks);
        let (hop, transfer) = (self.hop(machine), bytes * (ranks - 1.0) / ranks / self.bandwidth(machine));
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
            return both.min(2.0 * self.hop(machine) + by_switch);
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
        let inside = bytes * (near - 1.0) / ranks / machine.bandwidth_among(self.ranks_per_node(machine));
        let outside = bytes * (ranks - near) / ranks / machine.network_bandwidth;
        // A rank posts all its messages at once. Without a switch, they pass the ranks between.
        let hops = if self.has_switch(machine) { 1.0 } else { ranks.log2().ceil() };
        inside.max(outside) / machine.constants.link + hops * self.hop(machine)
    }

    /// Returns the seconds in which the tokens of a rank, of `bytes` in total, reach their experts or come back.
    /// Each token has `copies` experts, which are spread evenly. Inside a node, each copy is sent by itself. A
    /// token is sent once to each other node that has one of its experts, and is copied there (as DeepEP does).
    /// With `n` nodes, it reaches `n (1 - (1 - 1 / n)^copies)` of them on average.
    pub fn dispatch(&self, machine: &Machine, bytes: f64, copies: f64) -> f64 {
        if self.ranks <= 1 || self.is_inside_node(machine) {
            return self.all_to_all(machine, bytes * copies);
        }
        let near = f64::from(self.ranks_per_node(machine));
        let nodes = f64::from(self.ranks) / near;
        let reached = nodes * (1.0 - (1.0 - 1.0 / nodes).powf(copies));
        let outside = bytes * reached * (nodes - 1.0) / nodes / machine.network_bandwidth;
        let own = machine.bandwidth_among(self.ranks_per_node(machine));
        let inside = bytes * copies * (near - 1.0) / near / own;
        let latency = machine.network_latency + machine.node_latency;
        inside.max(outside) / machine.constants.link + latency
    }

    /// Returns the seconds in which each rank passes tensors of `bytes` to its neighbour in a ring, `steps`
    /// times. Between nodes, a ring has one link.
    pub fn ring_exchange(&self, machine: &Machine, bytes: f64, steps: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let inside = self.is_inside_node(machine);
        let bandwidth = if inside { machine.bandwidth_among(2) } else { machine.network_bandwidth };
        steps * (bytes / (bandwidth * machine.constants.link) + self.hop(machine))
    }

    fn has_switch(&self, machine: &Machine) -> bool {
        machine.node_switch != Switch::None && self.is_inside_node(machine)
    }

    /// The seconds of a message without its bytes.
    fn hop(&self, machine: &Machine) -> f64 {
        if self.is_inside_node(machine) { machine.node_latency } else { machine.network_latency }
    }
}
