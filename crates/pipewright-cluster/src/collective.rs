//! The time of collectives among ranks of a group.
//!
//! **Model.** In a ring, each rank sends `(n - 1) / n` of the whole tensor for a gather or a reduction to
//! shards, and twice that for a reduction to all. The latency is that of a tree, for groups of any size: it
//! grows with the logarithm of the ranks. If a group has several ranks in each node, its rings enter
//! and leave the node through the links of all of them, so the bandwidth between nodes is multiplied by their
//! number, up to the bandwidth inside the node (as nccl-tests measure on nodes with one link per GPU).

use crate::machine::Machine;

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
        let inside = machine.node_bandwidth;
        let outside = machine.network_bandwidth * f64::from(self.ranks_per_node(machine));
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
        bytes * (ranks - 1.0) / ranks / self.bandwidth(machine) + self.latency(machine)
    }

    /// Returns the seconds in which a tensor of `bytes` is summed over all ranks.
    pub fn all_reduce(&self, machine: &Machine, bytes: f64) -> f64 {
        2.0 * self.gather(machine, bytes)
    }

    /// Returns the seconds in which each rank sends `bytes` in total, divided among all ranks of the group.
    pub fn all_to_all(&self, machine: &Machine, bytes: f64) -> f64 {
        if self.ranks <= 1 {
            return 0.0;
        }
        let (ranks, near) = (f64::from(self.ranks), f64::from(self.ranks_per_node(machine)));
        let inside = bytes * (near - 1.0) / ranks / machine.node_bandwidth;
        let outside = bytes * (ranks - near) / ranks / machine.network_bandwidth;
        inside.max(outside) / machine.constants.link + self.latency(machine)
    }

    fn latency(&self, machine: &Machine) -> f64 {
        let hop = if self.is_inside_node(machine) { machine.node_latency } else { machine.network_latency };
        hop * f64::from(self.ranks).log2().ceil()
    }
}
