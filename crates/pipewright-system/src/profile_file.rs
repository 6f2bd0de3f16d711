//! Reads a profile: strict TOML, and every mistake with its place.
//!
//! The keys are checked here, the values by the profile itself. A key with another unit, such as
//! `forward_ms`, is reported with the right one.

use std::collections::BTreeMap;
use std::path::Path;

use pipewright_document::{Place, Problem, Problems, Reader, Source, Table, Value};
use pipewright_schedule::analytic::{Figure, Missing};
use pipewright_schedule::profile::{
    DeviceProfile, LayerProfile, LinkProfile, MAX_LAYERS, MAX_PAIRS, MAX_PROFILE_RANKS, NodeProfile,
    PairProfile, PartProfile, Profile, ProfilePart, RankProfile,
};
use pipewright_schedule::recompute::LayerPart;

use crate::config_file::{ConfigError, read_source};

/// A profile as it was read.
pub struct ReadProfile {
    /// The profile. Figures that are missing are 0 or 1.
    pub profile: Profile,
    /// The figures of layers that are not written.
    pub missing: Vec<Missing>,
    /// The file's keys, for the places of values.
    table: Table,
}

/// Reads the profile in `file`.
///
/// # Errors
/// Fails if the file cannot be read, or with every mistake in it.
pub fn read(file: &Path) -> Result<Profile, ConfigError> {
    let found = parse(read_source(file, "profile")?, false).map_err(ConfigError::Problems)?;
    Ok(found.profile)
}

/// Reads a profile. With `may_lack`, figures of layers may be missing.
///
/// # Errors
/// Every mistake in the text.
pub fn parse(source: Source, may_lack: bool) -> Result<ReadProfile, Problems> {
    Table::read(source, usize::MAX, |table, problems| {
        let mut missing = Vec::new();
        let file = Reader::new("the profile", table, problems);
        let profile = read_profile(file, may_lack, &mut missing).filter(|_| problems.is_empty())?;
        let found = ReadProfile { profile, missing, table: table.clone() };
        problems.extend(found.profile.problems().into_iter().map(|problem| {
            let (key, range) = (problem.key, problem.expected);
            let sentence = format!("`{key}` is {}, where {range} is expected", problem.value);
            Problem::new(found.place(problem.part, key), sentence).help(format!("write {range}"))
        }));
        Some(found)
    })
}

/// Reads the sections. Returns `None` if there are too many.
fn read_profile(mut file: Reader<'_>, may_lack: bool, missing: &mut Vec<Missing>) -> Option<Profile> {
    file.require(&["link", "layers"]);
    let device = file.table("device", "a section").map(|table| device(file.inner("[device]", table)));
    let link = file.table("link", "a section").map(|table| link(file.inner("[link]", table)));
    let node = file.table("node", "a section").map(|table| node(file.inner("[node]", table)));
    let ranks = sections(&mut file, "rank", "[[rank]] sections", MAX_PROFILE_RANKS as usize)?;
    let ranks = ranks.into_iter().map(|table| rank(file.inner("[[rank]]", table))).collect();
    let pairs = sections(&mut file, "pair", "[[pair]] sections", MAX_PAIRS as usize)?;
    let pairs = pairs.into_iter().map(|table| pair(file.inner("[[pair]]", table))).collect();
    let tables = sections(&mut file, "layers", "[[layers]] sections", MAX_LAYERS as usize)?;
    if tables.is_empty() && file.is_written("layers") {
        file.empty::<()>("layers");
    }
    let layer = |(index, table)| layer(file.inner("[[layers]]", table), index, may_lack, missing);
    let layers = tables.into_iter().enumerate().map(layer).collect();
    let texts =
        |value: &Value| value.as_list()?.iter().map(|item| item.as_text().map(str::to_owned)).collect();
    let profile = Profile {
        rows: u32_of(&mut file, "rows").unwrap_or(1),
        tokens: u32_of(&mut file, "tokens"),
        stage_bytes: u64_of(&mut file, "stage_bytes").unwrap_or(0),
        rank_bytes: u64_of(&mut file, "rank_bytes").unwrap_or(0),
        assumed: file.read("assumed", "a list of texts", texts).unwrap_or_default(),
        device,
        link: link.unwrap_or_default(),
        node,
        ranks,
        pairs,
        layers,
    };
    file.finish();
    Some(profile)
}

/// Reads the sections of a name. Returns `None` if there are more than `most`.
fn sections<'a>(
    file: &mut Reader<'a>,
    key: &'static str,
    expected: &str,
    most: usize,
) -> Option<Vec<&'a Table>> {
    let tables = file.tables(key, expected).unwrap_or_default();
    if let Some(table) = tables.get(most) {
        // The mistakes in many more might not fit into memory.
        let sentence = format!("`{key}` is {}, where at most {most} sections is expected", tables.len());
        file.report_at(table.place.clone(), sentence, format!("write at most {most} sections"));
        return None;
    }
    Some(tables)
}

fn number(keys: &mut Reader<'_>, key: &'static str) -> Option<f64> {
    keys.read(key, "a number", Value::as_number)
}

fn u32_of(keys: &mut Reader<'_>, key: &'static str) -> Option<u32> {
    keys.count(key, 0..=u32::MAX)
}

fn u64_of(keys: &mut Reader<'_>, key: &'static str) -> Option<u64> {
    keys.whole(key, 0..=i64::MAX as u64)
}

fn text(keys: &mut Reader<'_>, key: &'static str) -> Option<String> {
    keys.read(key, "a text in quotes", |value| value.as_text().map(str::to_owned))
}

fn device(mut keys: Reader<'_>) -> DeviceProfile {
    let device = DeviceProfile {
        name: text(&mut keys, "name").unwrap_or_default(),
        memory_bytes: u64_of(&mut keys, "memory_bytes"),
        device: text(&mut keys, "device").filter(|text| !text.is_empty()),
        precision: text(&mut keys, "precision").filter(|text| !text.is_empty()),
        ranks: u32_of(&mut keys, "ranks"),
        threads_per_rank: u32_of(&mut keys, "threads_per_rank"),
    };
    keys.finish();
    device
}

fn link(mut keys: Reader<'_>) -> LinkProfile {
    keys.require(&["latency_s", "bytes_per_s"]);
    let [latency_s, bytes_per_s] =
        ["latency_s", "bytes_per_s"].map(|key| number(&mut keys, key).unwrap_or(1.0));
    let reduce_bytes_per_s = number(&mut keys, "reduce_bytes_per_s");
    let offload_bytes_per_s = number(&mut keys, "offload_bytes_per_s");
    let read_bytes_per_s = number(&mut keys, "read_bytes_per_s");
    keys.finish();
    LinkProfile { latency_s, bytes_per_s, reduce_bytes_per_s, offload_bytes_per_s, read_bytes_per_s }
}

fn node(mut keys: Reader<'_>) -> NodeProfile {
    keys.require(&["latency_s", "bytes_per_s", "ranks"]);
    let [latency_s, bytes_per_s] =
        ["latency_s", "bytes_per_s"].map(|key| number(&mut keys, key).unwrap_or(1.0));
    let ranks = u32_of(&mut keys, "ranks").unwrap_or(1);
    keys.finish();
    NodeProfile { ranks, latency_s, bytes_per_s }
}

fn rank(mut keys: Reader<'_>) -> RankProfile {
    let rank = RankProfile {
        speed: number(&mut keys, "speed").unwrap_or(1.0),
        memory_bytes: u64_of(&mut keys, "memory_bytes"),
        threads: u32_of(&mut keys, "threads"),
        device: text(&mut keys, "device").filter(|text| !text.is_empty()),
        speeds: keys.read("speeds", "a table of numbers", speeds).unwrap_or_default(),
        ..RankProfile::default()
    };
    keys.finish();
    rank
}

fn speeds(value: &Value) -> Option<BTreeMap<String, f64>> {
    let entries = value.as_table()?.entries.iter();
    entries.map(|(kind, entry)| Some((kind.clone(), entry.value.as_number()?))).collect()
}

fn pair(mut keys: Reader<'_>) -> PairProfile {
    keys.require(&["from", "to", "latency_s", "bytes_per_s"]);
    let [from, to] = ["from", "to"].map(|key| u32_of(&mut keys, key).unwrap_or(0));
    let [latency_s, bytes_per_s] =
        ["latency_s", "bytes_per_s"].map(|key| number(&mut keys, key).unwrap_or(1.0));
    keys.finish();
    PairProfile { from, to, latency_s, bytes_per_s }
}

fn layer(mut keys: Reader<'_>, index: usize, may_lack: bool, missing: &mut Vec<Missing>) -> LayerProfile {
    keys.require(&["forward_s", "input_backward_s", "weight_backward_s"]);
    keys.require(&["output_bytes", "parameter_bytes", "activation_bytes"]);
    let lacking = if may_lack { keys.take_missing() } else { Vec::new() };
    keys.require(&["kind"]);
    let [forward_s, input_backward_s, weight_backward_s] =
        ["forward_s", "input_backward_s", "weight_backward_s"]
            .map(|key| number(&mut keys, key).unwrap_or(1.0));
    let [output_bytes, parameter_bytes, activation_bytes] =
        ["output_bytes", "parameter_bytes", "activation_bytes"]
            .map(|key| u64_of(&mut keys, key).unwrap_or(0));
    let mut layer = LayerProfile {
        kind: text(&mut keys, "kind").unwrap_or_else(|| "?".to_owned()),
        count: u32_of(&mut keys, "count").unwrap_or(1),
        forward_s,
        input_backward_s,
        weight_backward_s,
        backward_s: number(&mut keys, "backward_s"),
        recompute_s: number(&mut keys, "recompute_s"),
        exchange_s: number(&mut keys, "exchange_s").unwrap_or(0.0),
        optimizer_s: number(&mut keys, "optimizer_s").unwrap_or(0.0),
        output_bytes,
        parameter_bytes,
        trained_bytes: u64_of(&mut keys, "trained_bytes"),
        activation_bytes,
        weight_activation_bytes: u64_of(&mut keys, "weight_activation_bytes"),
        norms_bytes: 0,
        norms_s: 0.0,
        feed_forward_bytes: 0,
        feed_forward_s: 0.0,
        temporary_bytes: u64_of(&mut keys, "temporary_bytes").unwrap_or(0),
        tensor_sums: u32_of(&mut keys, "tensor_sums"),
        optimizer_bytes: None,
        held_bytes: None,
        streamed_bytes: 0,
        read_whole_bytes: [0; 2],
        unstreamed_bytes: 0,
        copy_bytes: None,
    };
    // Parts are estimated only together with the activations, so a missing size of a part is a mistake.
    let parts = LayerPart::ALL.map(|part| (part, part_costs(&mut keys, part)));
    let lacks_activations = lacking.contains(&Figure::Activation.key());
    if !lacks_activations {
        parts.into_iter().for_each(|(part, costs)| layer.set_part(part, costs));
    }
    let is_missing = |figure: &Figure| match figure {
        Figure::Part(_) => lacks_activations,
        figure => lacking.contains(&figure.key()),
    };
    let figures = Figure::ALL.into_iter().filter(is_missing);
    missing.extend(figures.map(|figure| (index, figure)));
    keys.finish();
    layer
}

/// Reads the costs of a part of a layer, which are optional. A time without a size is a mistake.
fn part_costs(keys: &mut Reader<'_>, part: LayerPart) -> PartProfile {
    let [bytes, seconds] = part.profile_keys();
    let recompute_s = number(keys, seconds);
    if recompute_s.is_some() {
        keys.require(&[bytes]);
    }
    PartProfile { bytes: u64_of(keys, bytes).unwrap_or(0), recompute_s: recompute_s.unwrap_or(0.0) }
}

impl ReadProfile {
    /// Returns the place of a value, or its section's place if it is not written.
    pub fn place(&self, part: ProfilePart, key: &str) -> Place {
        let section = |name| self.table.get(name).and_then(Value::as_table);
        let numbered = |name, index: usize| match self.table.get(name).and_then(Value::as_list) {
            Some(sections) => sections.get(index).and_then(Value::as_table),
            None => section(name),
        };
        let section = match part {
            ProfilePart::Top => None,
            ProfilePart::Device => section("device"),
            ProfilePart::Link => section("link"),
            ProfilePart::Node => section("node"),
            ProfilePart::Rank(index) => numbered("rank", index),
            ProfilePart::Pair(index) => numbered("pair", index),
            ProfilePart::Layer(index) => numbered("layers", index),
        };
        let section = section.unwrap_or(&self.table);
        section.get(key).map_or(&section.place, |value| &value.place).clone()
    }
}

#[cfg(test)]
mod tests;
