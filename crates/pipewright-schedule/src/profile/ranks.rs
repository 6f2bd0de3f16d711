//! Profiles of unlike ranks: the times of one of them, and the profile of some of them.

use std::borrow::Cow;

use super::figures::{LayerProfile, LinkProfile, PairProfile, Profile, RankProfile};
use crate::ids::Rank;

impl Profile {
    /// Returns whether ranks may differ in their speed, memory or links: whether the profile has `[[rank]]` or
    /// `[[pair]]` sections.
    pub fn has_unlike_ranks(&self) -> bool {
        !self.ranks.is_empty() || !self.pairs.is_empty()
    }

    /// Returns the profile of ranks that all have the speed of `rank`.
    #[must_use]
    pub fn at_speed_of(&self, rank: &RankProfile) -> Self {
        let layer = |layer: &LayerProfile| {
            let speed = rank.speed_of(&layer.kind);
            LayerProfile {
                forward_s: layer.forward_s / speed,
                input_backward_s: layer.input_backward_s / speed,
                weight_backward_s: layer.weight_backward_s / speed,
                backward_s: layer.backward_s.map(|seconds| seconds / speed),
                recompute_s: layer.recompute_s.map(|seconds| seconds / speed),
                optimizer_s: layer.optimizer_s / rank.optimizer_speed.unwrap_or(speed),
                norms_s: layer.norms_s / speed,
                feed_forward_s: layer.feed_forward_s / speed,
                ..layer.clone()
            }
        };
        Self { ranks: Vec::new(), layers: self.layers.iter().map(layer).collect(), ..self.clone() }
    }

    /// Returns the profile without `[[rank]]` sections if these say the same of all ranks, with the memory of
    /// each rank; otherwise the profile itself.
    pub fn with_equal_ranks_merged(&self) -> (Cow<'_, Self>, Option<u64>) {
        let rest = self.ranks.get(1..).unwrap_or_default();
        let is_equal = |rank: &RankProfile| {
            let first = &self.ranks[0];
            rank.has_times_of(first) && rank.memory_bytes == first.memory_bytes
        };
        match self.ranks.first() {
            Some(first) if self.pairs.is_empty() && rest.iter().all(is_equal) => {
                (Cow::Owned(self.at_speed_of(first)), first.memory_bytes)
            }
            _ => (Cow::Borrowed(self), None),
        }
    }

    /// Returns the profile of some of its ranks, which get the numbers from 0 in this order.
    #[must_use]
    pub fn of_ranks(&self, ranks: &[Rank]) -> Self {
        let kept = ranks.iter().map(|rank| self.ranks.get(rank.index()).cloned().unwrap_or_default());
        let usual = LinkProfile::new(self.link.latency_s, self.link.bytes_per_s);
        let links = self.links_between(ranks);
        let mut pairs = Vec::new();
        for (from, row) in (0..).zip(links.chunks(ranks.len().max(1))) {
            for (to, link) in (0..).zip(row).filter(|&(to, link)| to != from && *link != usual) {
                pairs.push(PairProfile {
                    from,
                    to,
                    latency_s: link.latency_s,
                    bytes_per_s: link.bytes_per_s,
                });
            }
            // A direction that is not written would have the link of the other one.
            for (to, _) in (0..).zip(row).filter(|&(to, link)| to != from && *link == usual) {
                if links[to as usize * ranks.len() + from as usize] != usual {
                    let LinkProfile { latency_s, bytes_per_s, .. } = usual;
                    pairs.push(PairProfile { from, to, latency_s, bytes_per_s });
                }
            }
        }
        Self { ranks: kept.collect(), pairs, node: None, ..self.clone() }
    }

    /// Returns the links between some ranks: one row for each sender, with the receivers in the same order.
    pub fn links_between(&self, ranks: &[Rank]) -> Vec<LinkProfile> {
        let count = ranks.len();
        let usual = LinkProfile::new(self.link.latency_s, self.link.bytes_per_s);
        let mut links = vec![usual; count * count];
        if let Some(node) = self.node {
            let node_of = |rank: Rank| rank.get() / node.ranks.max(1);
            for (at, link) in links.iter_mut().enumerate() {
                if node_of(ranks[at / count]) == node_of(ranks[at % count]) {
                    *link = node.link();
                }
            }
        }
        let place: std::collections::HashMap<u32, usize> =
            ranks.iter().map(|rank| rank.get()).zip(0..).collect();
        let ends = |pair: &PairProfile| Some((*place.get(&pair.from)?, *place.get(&pair.to)?));
        // The other directions come first, so that their own pairs replace them.
        for pair in &self.pairs {
            if let Some((from, to)) = ends(pair) {
                links[to * count + from] = pair.link();
            }
        }
        for pair in &self.pairs {
            if let Some((from, to)) = ends(pair) {
                links[from * count + to] = pair.link();
            }
        }
        links
    }

    /// Returns the shortest latency and the highest bandwidth of the links between `ranks` ranks.
    #[must_use]
    pub fn fastest_link(&self, ranks: u32) -> LinkProfile {
        let all: Vec<Rank> = (0..ranks).map(Rank::new).collect();
        let links = self.links_between(&all);
        let between = (0..links.len()).filter(|at| at / all.len() != at % all.len()).map(|at| links[at]);
        let faster = |one: LinkProfile, other: LinkProfile| LinkProfile {
            latency_s: one.latency_s.min(other.latency_s),
            bytes_per_s: one.bytes_per_s.max(other.bytes_per_s),
            ..one
        };
        let fastest = between.reduce(faster).unwrap_or(self.link);
        LinkProfile { latency_s: fastest.latency_s, bytes_per_s: fastest.bytes_per_s, ..self.link }
    }
}
