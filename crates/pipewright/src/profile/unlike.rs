//! Says how ranks and links differ, as profiles do: what differs by less than the noise is equal.

use std::collections::BTreeMap;

use pipewright_schedule::ModelDesc;
use pipewright_schedule::profile::{LinkProfile, PairProfile, RankProfile};
use serde::{Deserialize, Serialize};

use super::measured::Measured;
use super::quartiles::Quartiles;
use crate::transport::LinkSpeed;

/// The least difference of two speeds or memories, as a share, that counts. The cores of one machine differ by a few per
/// cent, and so does the same core from minute to minute.
const LEAST: f64 = 0.1;
/// The least difference in half distances of the quartiles.
const SPREADS: f64 = 3.0;
/// The least ratio of the times of a message on two links that counts. Links are noisier than computations.
const LINK_RATIO: f64 = 2.0;
/// The size of the message by which links are compared, and the least difference of its times that counts.
const MESSAGE_BYTES: f64 = 1e6;
const LEAST_SECONDS: f64 = 50e-6;

/// The measurements of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MeasuredRank {
    /// The time of `F`, `I` and `W` of a layer of each kind, as [`Measured::times_by_rank`] has it.
    pub times: Vec<Quartiles>,
    /// The memory of the rank in bytes, if it is known.
    pub memory_bytes: Option<u64>,
    /// The threads of the rank.
    pub threads: u32,
    /// The device of the rank, as a configuration names it.
    pub device: String,
}

impl Measured {
    /// Returns the time of a layer of each kind to which speeds refer: the profile's own time of its `F`, `I` and `W`.
    fn usual_times(&self) -> Vec<f64> {
        let time = |spreads: [Quartiles; 3]| spreads.iter().map(|spread| spread.median).sum();
        self.kinds
            .iter()
            .map(|kind| time([kind.forward, kind.input_backward, kind.weight_backward]))
            .collect()
    }
}

/// Returns the `[[rank]]` sections of the profile that is made of `measured`; none if the ranks are equal. A speed is the
/// time of all layers of the model divided by the rank's. Kinds of layers for which it does not hold have their own.
pub fn unlike_ranks(measured: &Measured, model: &ModelDesc, ranks: &[MeasuredRank]) -> Vec<RankProfile> {
    let usual = measured.usual_times();
    let kinds: Vec<MeasuredKind<'_>> = measured
        .kinds
        .iter()
        .zip(usual)
        .map(|(kind, usual)| {
            let described = &model.layers[kind.layer];
            let layers = model.layers.iter().filter(|layer| described.is_like(layer)).count() as f64;
            MeasuredKind { name: &described.kind, layers, usual }
        })
        .collect();
    let described: Vec<RankProfile> = ranks.iter().map(|rank| of_rank(&kinds, rank)).collect();
    let Some((first, rest)) = described.split_first() else { return Vec::new() };
    let bytes = |rank: &RankProfile| rank.memory_bytes.map(|bytes| bytes as f64);
    let has_memory = rest.iter().any(|rank| match (bytes(first), bytes(rank)) {
        (Some(one), Some(other)) => differ(one, other, LEAST),
        (one, other) => one != other,
    });
    let has_threads = rest.iter().any(|rank| rank.threads != first.threads);
    let has_devices = rest.iter().any(|rank| rank.device != first.device);
    let has_speeds = described.iter().any(|rank| rank.speed != 1.0 || !rank.speeds.is_empty());
    if !(has_memory || has_threads || has_devices || has_speeds) {
        return Vec::new();
    }
    let stated = |rank: RankProfile| RankProfile {
        memory_bytes: rank.memory_bytes.filter(|_| has_memory),
        threads: rank.threads.filter(|_| has_threads),
        device: rank.device.filter(|_| has_devices),
        ..rank
    };
    described.into_iter().map(stated).collect()
}

/// A kind of layers.
struct MeasuredKind<'a> {
    /// The name, which several kinds may have.
    name: &'a str,
    /// The number of its layers in the model.
    layers: f64,
    /// The time of a layer to which speeds refer.
    usual: f64,
}

/// The times of some layers: the usual one, a rank's, and half the distance of the quartiles of the rank's.
#[derive(Clone, Copy, Default)]
struct Times {
    usual: f64,
    own: f64,
    spread: f64,
}

impl Times {
    fn of(kind: &MeasuredKind<'_>, times: &Quartiles) -> Self {
        let own = kind.layers * times.median;
        Self { usual: kind.layers * kind.usual, own, spread: own * times.relative() }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            usual: self.usual + other.usual,
            own: self.own + other.own,
            spread: self.spread + other.spread,
        }
    }

    /// Returns the speed if it differs from `other` by more than the noise; otherwise `None`.
    fn speed_unlike(self, other: f64) -> Option<f64> {
        let (speed, noise) = (self.usual / self.own, LEAST.max(SPREADS * self.spread / self.own));
        (speed.is_finite() && speed > 0.0 && differ(speed, other, noise)).then(|| rounded(speed))
    }
}

/// Returns the section of a rank, with everything that is known about it.
fn of_rank(kinds: &[MeasuredKind<'_>], rank: &MeasuredRank) -> RankProfile {
    let mut by_name: BTreeMap<&str, Times> = BTreeMap::new();
    for (kind, times) in kinds.iter().zip(&rank.times) {
        let sum = by_name.entry(kind.name).or_default();
        *sum = sum.plus(Times::of(kind, times));
    }
    let speed =
        by_name.values().copied().fold(Times::default(), Times::plus).speed_unlike(1.0).unwrap_or(1.0);
    let own =
        by_name.iter().filter_map(|(name, times)| Some(((*name).to_owned(), times.speed_unlike(speed)?)));
    RankProfile {
        speed,
        speeds: own.collect(),
        memory_bytes: rank.memory_bytes,
        threads: Some(rank.threads),
        device: Some(rank.device.clone()),
        ..RankProfile::default()
    }
}

/// Returns the link of most pairs, and the `[[pair]]` sections of the pairs with another one. `None` if nothing was
/// measured.
pub fn unlike_links(links: &[LinkSpeed]) -> Option<(LinkProfile, Vec<PairProfile>)> {
    // A pipeline sends both ways.
    let profile =
        |link: &LinkSpeed| LinkProfile::new(link.latency_s, link.bytes_per_s.min(link.both_ways_bytes_per_s));
    let time = |link: &LinkProfile| link.latency_s + MESSAGE_BYTES / link.bytes_per_s;
    let mut ordered: Vec<LinkProfile> = links.iter().map(profile).collect();
    ordered.sort_by(|one, other| time(one).total_cmp(&time(other)));
    let usual = *ordered.get(ordered.len().checked_sub(1)? / 2)?;
    let is_other = |link: &LinkProfile| {
        let [least, most] = [time(link).min(time(&usual)), time(link).max(time(&usual))];
        most > least * LINK_RATIO && most - least > LEAST_SECONDS
    };
    let others = links.iter().map(|link| (link.ranks, profile(link))).filter(|(_, link)| is_other(link));
    let pair = |([from, to], link): ([crate::ids::WorldRank; 2], LinkProfile)| PairProfile {
        from: from.get(),
        to: to.get(),
        latency_s: link.latency_s,
        bytes_per_s: link.bytes_per_s,
    };
    Some((usual, others.map(pair).collect()))
}

/// Returns whether two figures differ by more than a share of the larger one.
fn differ(one: f64, other: f64, share: f64) -> bool {
    (one - other).abs() > share * one.max(other)
}

/// Returns a speed with three significant digits.
fn rounded(speed: f64) -> f64 {
    let digits = libm::exp10(2.0 - libm::log10(speed).floor());
    (speed * digits).round() / digits
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::LayerDesc;

    use super::*;
    use crate::ids::WorldRank;
    use crate::profile::KindFigures;

    fn time(median: f64) -> Quartiles {
        Quartiles { low: median * 0.99, median, high: median * 1.01, count: 8 }
    }

    fn described(kind: &str, parameters: u64) -> LayerDesc {
        LayerDesc {
            path: String::new(),
            kind: kind.to_owned(),
            parameters,
            weight: 1,
            activation_bytes: 1,
            output_bytes: 1,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        }
    }

    /// Four blocks of 3 s and a head of 6 s.
    fn measured() -> (Measured, ModelDesc) {
        let kind = |layer, seconds: f64| KindFigures {
            layer,
            forward: time(seconds),
            input_backward: time(seconds),
            weight_backward: time(seconds),
            recompute: None,
            norms: None,
            feed_forward: None,
            optimizer_s: 0.0,
            activation_bytes: None,
            weight_activation_bytes: None,
            temporary_bytes: None,
        };
        let mut layers = vec![described("block", 5); 4];
        layers.push(described("head", 9));
        let measured = Measured {
            rows: 1,
            ranks: 1,
            kinds: vec![kind(0, 1.0), kind(4, 2.0)],
            times_by_rank: Vec::new(),
            reduce_bytes_per_s: None,
            stage_bytes: None,
            rank_bytes: None,
        };
        (measured, ModelDesc { layers })
    }

    fn rank(block: f64, head: f64) -> MeasuredRank {
        MeasuredRank {
            times: vec![time(block), time(head)],
            memory_bytes: Some(1 << 30),
            threads: 1,
            device: "flex".into(),
        }
    }

    fn check(ranks: &[MeasuredRank], expected: &[RankProfile]) {
        let (measured, model) = measured();
        assert_eq!(unlike_ranks(&measured, &model, ranks), expected);
    }

    #[test]
    fn ranks_that_differ_by_less_than_the_noise_are_equal() {
        check(&[rank(3.0, 6.0), rank(3.2, 6.4)], &[]);
        let noisy = Quartiles { low: 2.0, median: 4.0, high: 5.0, count: 8 };
        check(&[rank(3.0, 6.0), MeasuredRank { times: vec![noisy, time(6.0)], ..rank(3.0, 6.0) }], &[]);
        check(&[], &[]);
    }

    #[test]
    fn a_slow_rank_has_its_speed_and_kinds_of_other_ratios_their_own() {
        let equal = RankProfile::default();
        let slow = RankProfile { speed: 0.5, ..RankProfile::default() };
        check(&[rank(3.0, 6.0), rank(6.0, 12.0)], &[equal.clone(), slow]);
        // 18 s of work take 12 + 24 s: the head is slower than the rest.
        let speeds = [("block".to_owned(), 1.0), ("head".to_owned(), 0.25)].into();
        let unlike = RankProfile { speed: 0.5, speeds, ..RankProfile::default() };
        check(&[rank(3.0, 6.0), rank(3.0, 24.0)], &[equal, unlike]);
    }

    #[test]
    fn what_differs_is_stated_for_all_ranks() {
        let large = MeasuredRank { memory_bytes: Some(4 << 30), ..rank(3.0, 6.0) };
        let memory = |bytes: u64| RankProfile { memory_bytes: Some(bytes), ..RankProfile::default() };
        check(&[rank(3.0, 6.0), large], &[memory(1 << 30), memory(4 << 30)]);
        let other = MeasuredRank { device: "cuda".into(), threads: 2, ..rank(3.0, 6.0) };
        let stated = |device: &str, threads| RankProfile {
            device: Some(device.into()),
            threads: Some(threads),
            ..RankProfile::default()
        };
        check(&[rank(3.0, 6.0), other], &[stated("flex", 1), stated("cuda", 2)]);
    }

    #[test]
    fn links_that_differ_are_pairs() {
        let link = |first, second, latency_s, bytes_per_s| LinkSpeed {
            ranks: [first, second].map(WorldRank::new),
            latency_s,
            bytes_per_s,
            both_ways_bytes_per_s: bytes_per_s,
        };
        assert_eq!(unlike_links(&[]), None);
        let near = link(0, 1, 1e-5, 1e9);
        let usual = LinkProfile::new(1e-5, 1e9);
        assert_eq!(unlike_links(&[near]), Some((usual, Vec::new())));
        assert_eq!(unlike_links(&[near, link(0, 2, 1.1e-5, 0.9e9), near]), Some((usual, Vec::new())));
        let far = PairProfile { from: 0, to: 2, latency_s: 5e-3, bytes_per_s: 1.2e7 };
        assert_eq!(unlike_links(&[near, link(0, 2, 5e-3, 1.2e7), near]), Some((usual, vec![far])));
        // A link that both ways share has half of its bandwidth for each.
        let shared = LinkSpeed { both_ways_bytes_per_s: 5e8, ..near };
        assert_eq!(unlike_links(&[shared]), Some((LinkProfile::new(1e-5, 5e8), Vec::new())));
    }
}
