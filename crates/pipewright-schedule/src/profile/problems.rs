//! The values that a profile cannot have, each with its place and what is expected there.

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use super::figures::{LayerProfile, LinkProfile, PairProfile, PartProfile, Profile, RankProfile};
use crate::recompute::LayerPart;
use crate::words::counted;

/// The largest number of layers, with repetitions.
pub const MAX_LAYERS: u64 = 10_000;
/// The longest time of a layer or a message, in seconds. Any longer time is a mistake in the unit.
pub const MAX_PROFILE_SECONDS: f64 = 1e6;
/// The largest size in bytes. Sums over the largest model fit 64 bits.
pub const MAX_PROFILE_BYTES: u64 = 1_000_000_000_000_000;
/// The largest numbers of rows in a microbatch and of tokens in a row.
pub const MAX_PROFILE_ROWS: u32 = 1_000_000;
/// See [`MAX_PROFILE_ROWS`].
pub const MAX_PROFILE_TOKENS: u32 = 1_000_000_000;
/// The largest bandwidth in bytes per second.
pub const MAX_BYTES_PER_SECOND: f64 = 1e18;
/// The largest number of sums over tensor-parallel ranks in a layer.
pub const MAX_TENSOR_SUMS: u32 = 1_000;
/// The largest number of ranks of a node.
pub const MAX_NODE_RANKS: u32 = 65_536;
/// The largest number of `[[rank]]` sections.
pub const MAX_PROFILE_RANKS: u32 = 256;
/// The largest number of `[[pair]]` sections.
pub const MAX_PAIRS: u32 = 65_536;
/// The smallest and the largest speed of a rank relative to the profile.
pub const MIN_SPEED: f64 = 1e-3;
/// See [`MIN_SPEED`].
pub const MAX_SPEED: f64 = 1e3;

/// The part of a profile that a problem is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProfilePart {
    /// The keys before the first section.
    Top,
    /// The section `[device]`.
    Device,
    /// The section `[link]`.
    Link,
    /// The section `[node]`.
    Node,
    /// The section `[[rank]]` with this index, counted from 0.
    Rank(usize),
    /// The section `[[pair]]` with this index, counted from 0.
    Pair(usize),
    /// The section `[[layers]]` with this index, counted from 0.
    Layer(usize),
}

/// A value that is not possible in a profile.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileProblem {
    /// The part of the profile.
    pub part: ProfilePart,
    /// The key.
    pub key: &'static str,
    /// The value, as text.
    pub value: String,
    /// The values that are possible, in words.
    pub expected: String,
}

impl Profile {
    /// Returns all values that a profile cannot have; nothing if it can be used.
    pub fn problems(&self) -> Vec<ProfileProblem> {
        let mut found = Vec::new();
        if self.layers.is_empty() {
            let expected = "at least one [[layers]] section";
            found.push(problem(ProfilePart::Top, "layers", "empty", expected));
        }
        self.check_layer_count(&mut found);
        self.check_trained(&mut found);
        let counts =
            [("rows", Some(self.rows), MAX_PROFILE_ROWS), ("tokens", self.tokens, MAX_PROFILE_TOKENS)];
        for (key, count, most) in counts {
            check_count(&mut found, ProfilePart::Top, key, count, most);
        }
        for (key, bytes) in [("stage_bytes", self.stage_bytes), ("rank_bytes", self.rank_bytes)] {
            check_bytes(&mut found, ProfilePart::Top, key, bytes);
        }
        let device = self.device.as_ref();
        let counts = [
            ("ranks", device.and_then(|device| device.ranks)),
            ("threads_per_rank", device.and_then(|device| device.threads_per_rank)),
        ];
        for (key, count) in counts {
            check_count(&mut found, ProfilePart::Device, key, count, MAX_NODE_RANKS);
        }
        check_memory(&mut found, ProfilePart::Device, device.and_then(|device| device.memory_bytes));
        check_link(&mut found, ProfilePart::Link, &self.link);
        if let Some(node) = &self.node {
            check_link(&mut found, ProfilePart::Node, &node.link());
            check_count(&mut found, ProfilePart::Node, "ranks", Some(node.ranks), MAX_NODE_RANKS);
        }
        self.check_ranks(&mut found);
        self.check_pairs(&mut found);
        for (index, layer) in self.layers.iter().enumerate() {
            check_layer(&mut found, ProfilePart::Layer(index), layer);
        }
        found
    }

    /// Returns the values that a profile for `ranks` ranks cannot have besides [`Profile::problems`]: another
    /// number of `[[rank]]` sections, and pairs with a rank that does not exist.
    pub fn problems_for(&self, ranks: u32) -> Vec<ProfileProblem> {
        let mut found = Vec::new();
        if !self.ranks.is_empty() && self.ranks.len() != ranks as usize {
            let sections = self.ranks.len();
            let expected = format!("one [[rank]] for each of {}", counted(ranks, "rank"));
            found.push(problem(ProfilePart::Top, "rank", counted(sections as u64, "section"), expected));
            return found;
        }
        for (index, pair) in self.pairs.iter().enumerate() {
            check_ends(&mut found, ProfilePart::Pair(index), pair, ranks);
        }
        found
    }

    fn check_ranks(&self, found: &mut Vec<ProfileProblem>) {
        check_sections(found, "rank", self.ranks.len(), MAX_PROFILE_RANKS);
        let kinds: BTreeSet<&str> = self.layers.iter().map(|layer| layer.kind.as_str()).collect();
        for (index, rank) in self.ranks.iter().enumerate() {
            check_rank(found, ProfilePart::Rank(index), rank, &kinds);
        }
    }

    fn check_pairs(&self, found: &mut Vec<ProfileProblem>) {
        check_sections(found, "pair", self.pairs.len(), MAX_PAIRS);
        let ranks = if self.ranks.is_empty() { MAX_NODE_RANKS } else { self.ranks.len() as u32 };
        let mut known = HashSet::new();
        for (index, pair) in self.pairs.iter().enumerate() {
            let part = ProfilePart::Pair(index);
            check_link(found, part, &pair.link());
            check_ends(found, part, pair, ranks);
            if pair.from == pair.to {
                found.push(problem(part, "to", pair.to, "another rank than `from`"));
            } else if !known.insert((pair.from, pair.to)) {
                let value = format!("{} for a second time after `from = {}`", pair.to, pair.from);
                found.push(problem(part, "to", value, "one [[pair]] for each direction"));
            }
        }
    }

    /// Reports a model without trained layers, and layers whose trained parameters are more than all.
    fn check_trained(&self, found: &mut Vec<ProfileProblem>) {
        if !self.layers.is_empty() && !self.layers.iter().any(LayerProfile::is_trained) {
            let expected = "at least one layer with trained parameters";
            found.push(problem(ProfilePart::Layer(0), "trained_bytes", 0, expected));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let all = layer.parameter_bytes;
            // A size of 0 may be one that is estimated later.
            if let Some(trained) = layer.trained_bytes.filter(|&trained| all > 0 && trained > all) {
                let expected = format!("a number of bytes from 0 to {all} (`parameter_bytes`)");
                found.push(problem(ProfilePart::Layer(index), "trained_bytes", trained, expected));
            }
        }
    }

    /// Reports the layer with which there are too many.
    fn check_layer_count(&self, found: &mut Vec<ProfileProblem>) {
        let mut layers = 0;
        for (index, layer) in self.layers.iter().enumerate() {
            layers += u64::from(layer.count);
            if layers > MAX_LAYERS {
                let expected = format!("at most {MAX_LAYERS} layers in all");
                found.push(problem(ProfilePart::Layer(index), "count", layer.count, expected));
                return;
            }
        }
    }
}

/// Reports more sections than there may be.
fn check_sections(found: &mut Vec<ProfileProblem>, key: &'static str, sections: usize, most: u32) {
    if sections > most as usize {
        let expected = format!("at most {most} sections");
        found.push(problem(ProfilePart::Top, key, counted(sections as u64, "section"), expected));
    }
}

fn check_rank(
    found: &mut Vec<ProfileProblem>,
    part: ProfilePart,
    rank: &RankProfile,
    kinds: &BTreeSet<&str>,
) {
    let is_possible = |speed: f64| (MIN_SPEED..=MAX_SPEED).contains(&speed);
    let range = format!("a number from {MIN_SPEED:e} to {MAX_SPEED:e}");
    if !is_possible(rank.speed) {
        found.push(problem(part, "speed", rank.speed, range.as_str()));
    }
    for (kind, &speed) in &rank.speeds {
        if !kinds.contains(kind.as_str()) {
            let kinds: Vec<&str> = kinds.iter().copied().collect();
            let expected = format!("a kind of the layers ({})", kinds.join(", "));
            found.push(problem(part, "speeds", format!("for `{kind}`"), expected));
        }
        if !is_possible(speed) {
            found.push(problem(part, "speeds", format!("{speed} for `{kind}`"), range.as_str()));
        }
    }
    check_memory(found, part, rank.memory_bytes);
    check_count(found, part, "threads", rank.threads, MAX_NODE_RANKS);
}

/// Reports a pair with a rank that does not exist.
fn check_ends(found: &mut Vec<ProfileProblem>, part: ProfilePart, pair: &PairProfile, ranks: u32) {
    for (key, rank) in [("from", pair.from), ("to", pair.to)] {
        if rank >= ranks {
            let expected = format!("a rank from 0 to {}", ranks.saturating_sub(1));
            found.push(problem(part, key, rank, expected));
        }
    }
}

fn check_memory(found: &mut Vec<ProfileProblem>, part: ProfilePart, memory: Option<u64>) {
    let Some(memory) = memory else { return };
    if memory == 0 {
        let expected = format!("a number of bytes from 1 to {MAX_PROFILE_BYTES}");
        found.push(problem(part, "memory_bytes", memory, expected));
    }
    check_bytes(found, part, "memory_bytes", memory);
}

fn check_link(found: &mut Vec<ProfileProblem>, part: ProfilePart, link: &LinkProfile) {
    check_seconds(found, part, "latency_s", link.latency_s);
    let bandwidths = [
        ("bytes_per_s", Some(link.bytes_per_s)),
        ("reduce_bytes_per_s", link.reduce_bytes_per_s),
        ("offload_bytes_per_s", link.offload_bytes_per_s),
        ("read_bytes_per_s", link.read_bytes_per_s),
    ];
    for (key, bandwidth) in bandwidths {
        if let Some(value) = bandwidth.filter(|value| !(1.0..=MAX_BYTES_PER_SECOND).contains(value)) {
            let expected = format!("a number from 1 to {MAX_BYTES_PER_SECOND:e}");
            found.push(problem(part, key, value, expected));
        }
    }
}

fn check_layer(found: &mut Vec<ProfileProblem>, part: ProfilePart, layer: &LayerProfile) {
    if layer.count == 0 {
        found.push(problem(part, "count", layer.count, "at least 1"));
    }
    let times = [
        ("forward_s", Some(layer.forward_s)),
        ("input_backward_s", Some(layer.input_backward_s)),
        ("weight_backward_s", Some(layer.weight_backward_s)),
        ("recompute_s", layer.recompute_s),
        ("exchange_s", Some(layer.exchange_s)),
        ("optimizer_s", Some(layer.optimizer_s)),
    ];
    for (key, seconds) in times {
        check_seconds(found, part, key, seconds.unwrap_or(0.0));
    }
    let (least, most) = (layer.input_backward_s, layer.input_backward_s + layer.weight_backward_s);
    if let Some(whole) = layer.backward_s.filter(|whole| !(least..=most).contains(whole)) {
        let expected = format!("a number of seconds from {least} (`I`) to {most} (`I` and `W` together)");
        found.push(problem(part, "backward_s", whole, expected));
    }
    let sizes = [
        ("output_bytes", Some(layer.output_bytes)),
        ("parameter_bytes", Some(layer.parameter_bytes)),
        ("activation_bytes", Some(layer.activation_bytes)),
        ("weight_activation_bytes", layer.weight_activation_bytes),
        ("temporary_bytes", Some(layer.temporary_bytes)),
    ];
    for (key, bytes) in sizes {
        check_bytes(found, part, key, bytes.unwrap_or(0));
    }
    let mut left = layer.activation_bytes;
    for layer_part in LayerPart::ALL {
        let [bytes_key, seconds_key] = layer_part.profile_keys();
        let PartProfile { bytes, recompute_s } = layer.part(layer_part);
        check_seconds(found, part, seconds_key, recompute_s);
        if bytes > left {
            let expected = format!("a number of bytes from 0 to {left}, a part of `activation_bytes`");
            found.push(problem(part, bytes_key, bytes, expected));
        }
        left = left.saturating_sub(bytes);
    }
    if let Some(sums) = layer.tensor_sums.filter(|&sums| sums > MAX_TENSOR_SUMS) {
        found.push(problem(part, "tensor_sums", sums, format!("a number from 0 to {MAX_TENSOR_SUMS}")));
    }
}

fn check_count(
    found: &mut Vec<ProfileProblem>,
    part: ProfilePart,
    key: &'static str,
    count: Option<u32>,
    most: u32,
) {
    if let Some(count) = count.filter(|count| !(1..=most).contains(count)) {
        found.push(problem(part, key, count, format!("a number from 1 to {most}")));
    }
}

fn check_seconds(found: &mut Vec<ProfileProblem>, part: ProfilePart, key: &'static str, seconds: f64) {
    if !(0.0..=MAX_PROFILE_SECONDS).contains(&seconds) {
        let expected = format!("a number of seconds from 0 to {MAX_PROFILE_SECONDS:e}");
        found.push(problem(part, key, seconds, expected));
    }
}

fn check_bytes(found: &mut Vec<ProfileProblem>, part: ProfilePart, key: &'static str, bytes: u64) {
    if bytes > MAX_PROFILE_BYTES {
        let expected = format!("a number of bytes from 0 to {MAX_PROFILE_BYTES}");
        found.push(problem(part, key, bytes, expected));
    }
}

fn problem(
    part: ProfilePart,
    key: &'static str,
    value: impl fmt::Display,
    expected: impl Into<String>,
) -> ProfileProblem {
    ProfileProblem { part, key, value: value.to_string(), expected: expected.into() }
}

impl fmt::Display for ProfilePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => f.write_str("the profile"),
            Self::Device => f.write_str("[device]"),
            Self::Link => f.write_str("[link]"),
            Self::Node => f.write_str("[node]"),
            Self::Rank(index) => write!(f, "[[rank]] number {}", index + 1),
            Self::Pair(index) => write!(f, "[[pair]] number {}", index + 1),
            Self::Layer(index) => write!(f, "[[layers]] number {}", index + 1),
        }
    }
}

impl fmt::Display for ProfileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, key, value, expected } = self;
        write!(f, "`{key}` of {part} is {value}, where {expected} is expected")
    }
}
