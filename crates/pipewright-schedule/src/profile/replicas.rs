//! Replicas of unlike ranks as one pipeline.
//!
//! The replicas run one program, each on its share of the batch, and add their gradients at its end. So rank `p` of the
//! merged pipeline stands for rank `p` of every replica: a computation takes as long as the slowest of them needs for
//! its rows, a message as long as the slowest link, and the memory is the least of them, for the rows of the replica
//! that has the most. A step of the merged pipeline takes at least as long as one of each replica.

use std::collections::BTreeMap;

use super::figures::{LayerProfile, LinkProfile, PairProfile, Profile, RankProfile};
use crate::ids::Rank;

impl Profile {
    /// Returns the pipeline that stands for replicas of these ranks: `replicas[r][p]` is rank `p` of replica `r`, and all
    /// have equally many ranks. Replica `r` has `shares[r]` of the rows of a step; the shares are equal if there are none.
    /// The sizes and times of the layers are for microbatches with the mean of the rows of all replicas.
    #[must_use]
    pub fn of_replicas(&self, replicas: &[Vec<Rank>], shares: &[u32]) -> Self {
        let count = replicas.len();
        let all: f64 = shares.iter().map(|&share| f64::from(share)).sum();
        // The rows of each replica over their mean.
        let parts: Vec<f64> = match shares {
            [] => vec![1.0; count],
            shares => shares.iter().map(|&share| f64::from(share) * count as f64 / all).collect(),
        };
        let most = parts.iter().copied().fold(0.0, f64::max);
        let ranks = replicas.first().map_or(0, Vec::len);
        let rank = |place: usize| {
            let own: Vec<RankProfile> = replicas.iter().map(|replica| self.rank(replica[place])).collect();
            slowest(&own, &parts)
        };
        let links: Vec<Vec<LinkProfile>> =
            replicas.iter().map(|replica| self.links_between(replica)).collect();
        let pair = |from: usize, to: usize| {
            let own = || links.iter().map(move |links| links[from * ranks + to]).zip(&parts);
            PairProfile {
                from: from as u32,
                to: to as u32,
                latency_s: own().map(|(link, _)| link.latency_s).fold(0.0, f64::max),
                bytes_per_s: own()
                    .map(|(link, part)| link.bytes_per_s * most / part)
                    .fold(f64::INFINITY, f64::min),
            }
        };
        let places = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let pairs = places.filter(|(from, to)| from != to).map(|(from, to)| pair(from, to)).collect();
        let bytes = |bytes: u64| (bytes as f64 * most).ceil() as u64;
        let layer = |layer: &LayerProfile| LayerProfile {
            output_bytes: bytes(layer.output_bytes),
            activation_bytes: bytes(layer.activation_bytes),
            weight_activation_bytes: layer.weight_activation_bytes.map(bytes),
            temporary_bytes: bytes(layer.temporary_bytes),
            norms_bytes: bytes(layer.norms_bytes),
            feed_forward_bytes: bytes(layer.feed_forward_bytes),
            // The exchange of tokens has the time of the replica with the most rows, whatever the speed of its ranks.
            exchange_s: layer.exchange_s * most,
            ..layer.clone()
        };
        Self {
            link: self.slowest_exchange(replicas),
            node: None,
            ranks: (0..ranks).map(rank).collect(),
            pairs,
            layers: self.layers.iter().map(layer).collect(),
            ..self.clone()
        }
    }

    /// Returns a rank of the profile.
    fn rank(&self, rank: Rank) -> RankProfile {
        self.ranks.get(rank.index()).cloned().unwrap_or_default()
    }

    /// Returns the slowest link between two ranks that add their gradients.
    fn slowest_exchange(&self, replicas: &[Vec<Rank>]) -> LinkProfile {
        let ranks = replicas.first().map_or(0, Vec::len);
        let groups =
            (0..ranks).map(|place| replicas.iter().map(|replica| replica[place]).collect::<Vec<_>>());
        let links = groups.flat_map(|group| {
            let links = self.links_between(&group);
            let count = group.len();
            (0..links.len()).filter(move |at| at / count != at % count).map(move |at| links[at])
        });
        let slower = |one: LinkProfile, other: LinkProfile| LinkProfile {
            latency_s: one.latency_s.max(other.latency_s),
            bytes_per_s: one.bytes_per_s.min(other.bytes_per_s),
            ..one
        };
        let slowest = links.reduce(slower).unwrap_or(self.link);
        LinkProfile { latency_s: slowest.latency_s, bytes_per_s: slowest.bytes_per_s, ..self.link }
    }
}

/// Returns a rank with the longest times of several ranks, which have these parts of the mean rows.
fn slowest(ranks: &[RankProfile], parts: &[f64]) -> RankProfile {
    let least = |speed: &dyn Fn(&RankProfile) -> f64| {
        ranks.iter().zip(parts).map(|(rank, part)| speed(rank) / part).fold(f64::INFINITY, f64::min)
    };
    let kinds = ranks.iter().flat_map(|rank| rank.speeds.keys());
    let speeds: BTreeMap<String, f64> =
        kinds.map(|kind| (kind.clone(), least(&|rank| rank.speed_of(kind)))).collect();
    RankProfile {
        speed: least(&|rank| rank.speed),
        // The optimizer takes equally long for any number of rows.
        optimizer_speed: Some(ranks.iter().map(RankProfile::least_speed).fold(f64::INFINITY, f64::min)),
        memory_bytes: ranks.iter().filter_map(|rank| rank.memory_bytes).min(),
        speeds,
        ..RankProfile::default()
    }
}
