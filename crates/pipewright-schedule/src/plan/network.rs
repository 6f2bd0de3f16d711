//! The mesh of all ranks, and the links between them: tensor-parallel ranks within a stage, replicas, and the
//! ranks of a pipeline.
//!
//! Ranks are numbered so that tensor-parallel ranks are neighbours. Next come either the replicas of a stage
//! or the ranks of a pipeline ([`MeshOrder`]). A node has ranks with consecutive numbers. Only meshes in
//! which every pipeline is placed on the nodes in the same way have a network, so that one pipeline can be
//! simulated for all.
//!
//! **Collectives.** For sums over tensor-parallel ranks, each rank adds a part and sends the sum to all
//! others inside the node, as the runtime does; two ranks send everything to each other. Sums over replicas
//! run on a ring inside each node, and then on rings between the nodes, each with its share. These times are
//! assumed, not measured.

use std::rc::Rc;

use crate::ids::Rank;
use crate::mesh::{Mesh, MeshOrder};
use crate::profile::{LinkProfile, Profile};

/// The links of a mesh.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Network {
    pub(super) mesh: Mesh,
    /// The link inside a node.
    pub(super) near: LinkProfile,
    /// The link between nodes.
    pub(super) far: LinkProfile,
    /// The number of consecutive ranks of a pipeline that share a node.
    pub(super) in_a_row: u32,
    /// The number of replicas of a stage that share a node.
    replicas_in_node: u32,
    /// The link of each pair of ranks, by sender and then by receiver, if ranks have links of their own.
    own: Option<Rc<[LinkProfile]>>,
}

impl Network {
    /// Returns the links of a mesh; `None` if its pipelines are on the nodes in different ways, or if
    /// tensor-parallel ranks would not share a node.
    pub(super) fn of(profile: &Profile, mesh: Mesh) -> Option<Self> {
        let far = profile.link;
        if profile.has_unlike_ranks() {
            // Unlike ranks do not compute a stage together. Replicas of them are merged into one pipeline
            // (`Profile::of_replicas`).
            let ranks: Vec<Rank> = (0..mesh.pipeline).map(Rank::new).collect();
            let own = (!profile.pairs.is_empty() || profile.node.is_some())
                .then(|| profile.links_between(&ranks).into());
            let unlike = Self { mesh, near: far, far, in_a_row: u32::MAX, replicas_in_node: 1, own };
            return (mesh.tensor == 1).then_some(unlike);
        }
        let Some(node) = profile.node else {
            let flat = Self { mesh, near: far, far, in_a_row: u32::MAX, replicas_in_node: 1, own: None };
            return (mesh.tensor == 1).then_some(flat);
        };
        let near = LinkProfile { latency_s: node.latency_s, bytes_per_s: node.bytes_per_s, ..far };
        if mesh.tensor == 0 || !node.ranks.is_multiple_of(mesh.tensor) {
            return None;
        }
        // The inner axis fills nodes, or several of its groups share a node.
        let places = node.ranks / mesh.tensor;
        let (inner, outer) = match mesh.order {
            MeshOrder::Replicas => (mesh.data, mesh.pipeline),
            MeshOrder::Pipeline => (mesh.pipeline, mesh.data),
        };
        let in_node = if inner.is_multiple_of(places) || outer == 1 {
            (places.min(inner), 1)
        } else if places.is_multiple_of(inner) {
            (inner, (places / inner).min(outer))
        } else {
            return None;
        };
        let (in_a_row, replicas_in_node) = match mesh.order {
            MeshOrder::Replicas => (in_node.1, in_node.0),
            MeshOrder::Pipeline => (in_node.0, in_node.1),
        };
        let is_even = mesh.data.is_multiple_of(replicas_in_node);
        is_even.then_some(Self { mesh, near, far, in_a_row, replicas_in_node, own: None })
    }

    /// Returns whether two networks differ in nothing but the order of their ranks.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let mesh = Mesh { order: self.mesh.order, ..other.mesh };
        *self == Self { mesh, ..other.clone() }
    }

    /// Returns the link between two ranks of a pipeline.
    pub(super) fn link(&self, from: u32, to: u32) -> LinkProfile {
        if let Some(own) = &self.own {
            return own[(from * self.mesh.pipeline + to) as usize];
        }
        if from / self.in_a_row == to / self.in_a_row { self.near } else { self.far }
    }

    /// Returns the link of most pairs of ranks of a pipeline. [`Network::other_pairs`] counts the others.
    pub(super) fn usual_link(&self) -> LinkProfile {
        if self.in_a_row >= self.mesh.pipeline { self.near } else { self.far }
    }

    /// Returns whether ranks have links of their own.
    pub(super) fn has_own_links(&self) -> bool {
        self.own.is_some()
    }

    /// Returns the pairs of ranks of a pipeline whose link is not [`Network::usual_link`].
    pub(super) fn other_pairs(&self) -> Vec<(u32, u32)> {
        let (ranks, row) = (self.mesh.pipeline, self.in_a_row.min(self.mesh.pipeline));
        let links_of = move |from: u32| {
            let first = from / row * row;
            (first..(first + row).min(ranks)).filter(move |&to| to != from).map(move |to| (from, to))
        };
        let differs = self.near != self.usual_link();
        if self.has_own_links() {
            let from = move |from: u32| (0..ranks).filter(move |&to| to != from).map(move |to| (from, to));
            return (0..ranks).flat_map(from).collect();
        }
        (0..if differs { ranks } else { 0 }).flat_map(links_of).collect()
    }

    /// Returns the times of a message of `bytes` between two ranks of a pipeline, inside a node and between
    /// nodes.
    pub(super) fn hop_times(&self, bytes: u64) -> [f64; 2] {
        [self.near, self.far].map(|link| link.latency_s + bytes as f64 / link.bytes_per_s)
    }

    /// Returns the time of a sum of `bytes` over the tensor-parallel ranks. Two ranks send all of them to
    /// each other; each of more ranks sends every byte but its own share twice.
    pub(super) fn tensor_sum(&self, bytes: u64) -> f64 {
        match self.mesh.tensor {
            ..=1 => 0.0,
            2 => bytes as f64 / self.near.bytes_per_s + self.near.latency_s,
            ranks => ring(self.near, bytes as f64, ranks),
        }
    }

    /// Returns the time of a sum of `bytes` over the replicas.
    pub(super) fn replica_sum(&self, bytes: u64) -> f64 {
        let (inside, between) = (self.replicas_in_node, self.mesh.data / self.replicas_in_node);
        ring(self.near, bytes as f64, inside) + ring(self.far, bytes as f64 / f64::from(inside), between)
    }

    /// Returns the time in which a rank copies and adds the gradients for a sum over replicas, if the profile
    /// has it. It has no latency of the link.
    pub(super) fn replica_work(&self, bytes: u64) -> f64 {
        let of = |bytes_per_s| {
            ring(LinkProfile { bytes_per_s, latency_s: 0.0, ..self.far }, bytes as f64, self.mesh.data)
        };
        self.far.reduce_bytes_per_s.map_or(0.0, of)
    }
}

/// Returns the time of an all-reduce on a ring: each member sends every byte but its own share twice.
fn ring(link: LinkProfile, bytes: f64, members: u32) -> f64 {
    let steps = 2.0 * f64::from(members.saturating_sub(1));
    steps * (bytes / f64::from(members.max(1)) / link.bytes_per_s + link.latency_s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::NodeProfile;

    fn network(ranks: u32, tensor: u32, replicas: u32, order: MeshOrder) -> Option<Network> {
        let node = Some(NodeProfile { ranks: 8, latency_s: 0.0, bytes_per_s: 1e2 });
        let profile = Profile { node, link: LinkProfile::new(0.0, 1e1), ..Profile::default() };
        Network::of(&profile, Mesh { tensor, data: replicas, pipeline: ranks, order, ..Mesh::default() })
    }

    fn check(sizes: [u32; 3], order: MeshOrder, expected: Option<(u32, u32)>) {
        let [tensor, replicas, ranks] = sizes;
        let found = network(ranks, tensor, replicas, order);
        let found = found.map(|network| (network.in_a_row, network.replicas_in_node));
        assert_eq!(found, expected, "{sizes:?} {order:?}");
    }

    #[test]
    fn every_pipeline_lies_on_the_nodes_in_the_same_way() {
        let [replicas, pipeline] = [MeshOrder::Replicas, MeshOrder::Pipeline];
        check([8, 2, 4], replicas, Some((1, 1)));
        check([1, 8, 4], replicas, Some((1, 8)));
        check([2, 2, 4], replicas, Some((2, 2)));
        check([2, 2, 4], pipeline, Some((4, 1)));
        check([1, 2, 4], pipeline, Some((4, 2)));
        check([1, 1, 12], replicas, Some((8, 1)));
        check([1, 1, 12], pipeline, Some((8, 1)));
        check([1, 3, 12], replicas, None);
        check([1, 2, 12], pipeline, None);
        check([3, 1, 1], replicas, None);
    }

    #[test]
    fn links_and_sums_depend_on_the_nodes() {
        let network = network(4, 2, 4, MeshOrder::Pipeline).expect("a mesh");
        assert_eq!((network.in_a_row, network.replicas_in_node), (4, 1));
        // Each of two tensor-parallel ranks sends 100 bytes.
        assert_eq!(network.tensor_sum(100), 100.0 / 1e2);
        // Each of four sends a quarter to three others, twice.
        let four = self::network(2, 4, 2, MeshOrder::Pipeline).expect("a mesh");
        assert_eq!(four.tensor_sum(100), 2.0 * 3.0 * 25.0 / 1e2);
        // Four replicas in four nodes send three quarters twice.
        assert_eq!(network.replica_sum(100), 6.0 * 25.0 / 1e1);
        let spread = self::network(4, 2, 4, MeshOrder::Replicas).expect("a mesh");
        assert_eq!((spread.in_a_row, spread.replicas_in_node), (1, 4));
        assert_eq!(spread.replica_sum(100), 6.0 * 25.0 / 1e2);
        assert_eq!(spread.hop_times(100), [1.0, 10.0]);
        assert_eq!(spread.other_pairs().len(), 0);
        // The four ranks of a pipeline share a node.
        assert_eq!((network.other_pairs().len(), network.usual_link()), (0, network.near));
        let longer = self::network(8, 2, 2, MeshOrder::Pipeline).expect("a mesh");
        let pairs = longer.other_pairs();
        assert_eq!((pairs.len(), pairs[0], longer.usual_link()), (24, (0, 1), longer.far));
    }
}
