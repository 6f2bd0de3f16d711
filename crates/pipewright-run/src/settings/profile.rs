//! Reads a profile: strict TOML, and every mistake with its place.
//!
//! The keys are checked here, the values by the profile itself. A key with another unit, such as
//! `forward_ms`, is reported with the right one. If the model is known, the profile must be of that model,
//! and figures that it lacks are estimated.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use pipewright::device::DeviceChoice;
use pipewright::tensor::Precision;
use pipewright_document::{Place, Problem, Problems, Reader, Source, Table, Value};
use pipewright_schedule::ModelDesc;
use pipewright_schedule::analytic::{Figure, Missing, PeakRates, Workload, fill};
use pipewright_schedule::plan::with_head_parts;
use pipewright_schedule::profile::{
    DeviceProfile, HEAD_PART, LayerProfile, LinkProfile, MAX_LAYERS, MAX_PAIRS, MAX_PROFILE_RANKS,
    NodeProfile, PROCESSOR, PairProfile, PartProfile, Profile, ProfilePart, RankProfile,
};
use pipewright_schedule::recompute::LayerPart;

use crate::settings::load::{ConfigError, read_source};

/// The run that a profile must be for.
pub struct ProfiledRun<'a> {
    /// The model.
    pub workload: Workload<'a>,
    /// The rates for figures that the profile lacks.
    pub rates: PeakRates,
    /// The devices, as the configuration names them.
    pub device: String,
    /// The precision.
    pub precision: Precision,
    /// The threads that each rank computes with.
    pub threads_per_rank: u32,
}

/// Returns the kinds of devices in a list of their names. A profile of one GPU is also for several like it.
fn kinds_of(devices: &str) -> BTreeSet<String> {
    let kind = |name: &str| match name.parse::<DeviceChoice>() {
        Ok(choice) => choice.kind().to_string(),
        Err(_) => name.to_owned(),
    };
    devices.split(',').map(|name| kind(name.trim())).collect()
}

/// A profile as it was read.
struct ReadProfile {
    profile: Profile,
    /// The figures of layers that are not written.
    missing: Vec<Missing>,
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

/// Reads the profile of a run in `file`, and estimates figures of layers that it lacks.
///
/// # Errors
/// As [`read`], and if the profile is of another model, device or precision.
pub fn read_for(file: &Path, run: &ProfiledRun<'_>) -> Result<Profile, ConfigError> {
    let mut found = parse(read_source(file, "profile")?, true).map_err(ConfigError::Problems)?;
    if found.missing.is_empty() {
        // The figures of a part follow from the figures of the whole head.
        found.profile = with_head_parts(&found.profile, Some(parts_of(run.workload.model))).into_owned();
    }
    let problems = check_run(&found, run);
    if !problems.is_empty() {
        return Err(ConfigError::Problems(Problems(problems)));
    }
    fill(&mut found.profile, &found.missing, &run.workload, run.rates);
    Ok(found.profile)
}

/// Returns the number of parts of a model's head.
fn parts_of(model: &ModelDesc) -> u32 {
    let parts = model.layers.iter().rev().take_while(|layer| layer.kind == HEAD_PART);
    u32::try_from(parts.count()).unwrap_or(u32::MAX).max(1)
}

/// Reads a profile. With `may_lack`, figures of layers may be missing.
fn parse(source: Source, may_lack: bool) -> Result<ReadProfile, Problems> {
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
    keys.finish();
    LinkProfile { latency_s, bytes_per_s, reduce_bytes_per_s, offload_bytes_per_s }
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
    fn place(&self, part: ProfilePart, key: &str) -> Place {
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

fn device_of(profile: &Profile) -> Option<&DeviceProfile> {
    profile.device.as_ref()
}

/// Returns the names of the devices of all ranks, if the profile has them.
fn devices_of(profile: &Profile) -> Option<String> {
    let usual = device_of(profile).and_then(|device| device.device.clone());
    if profile.ranks.iter().all(|rank| rank.device.is_none()) {
        return usual;
    }
    let usual = usual.as_deref().unwrap_or(PROCESSOR);
    let names = profile.ranks.iter().map(|rank| rank.device.as_deref().unwrap_or(usual));
    Some(names.collect::<Vec<_>>().join(","))
}

/// Reports a profile whose model, device, precision or length of rows differs from the run. Sizes may differ
/// by a hundredth, because they may be written by hand.
fn check_run(found: &ReadProfile, run: &ProfiledRun<'_>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let measure = "use the profile of this run: `pipewright profile` with its configuration measures one";
    let mut report = |part, key, sentence: String, help: &str| {
        problems.push(Problem::new(found.place(part, key), sentence).help(help));
    };
    let (profile, layers) = (&found.profile, &run.workload.model.layers);
    let devices = devices_of(profile);
    if let Some(device) = devices.filter(|devices| kinds_of(devices) != kinds_of(&run.device)) {
        let sentence = format!(
            "the profile is of the device {device}, and the configuration computes on {}",
            run.device
        );
        report(ProfilePart::Device, "device", sentence, measure);
    }
    let precision = device_of(profile).and_then(|device| device.precision.clone());
    let precision = precision.unwrap_or_else(|| Precision::F32.to_string());
    if precision != run.precision.to_string() {
        let sentence = format!(
            "the profile is of the precision {precision}, and the configuration computes in {}",
            run.precision
        );
        let help = format!(
            "`pipewright profile` with this configuration measures one; in a profile that is written by hand, write \
             `precision = \"{}\"` below `[device]`",
            run.precision
        );
        report(ProfilePart::Device, "precision", sentence, &help);
    }
    let threads = device_of(profile).and_then(|device| device.threads_per_rank);
    let settings = [
        (ProfilePart::Top, "tokens", profile.tokens, "data.seq_len", run.workload.tokens),
        (ProfilePart::Device, "threads_per_rank", threads, "pipeline.threads_per_rank", run.threads_per_rank),
    ];
    for (part, key, found_value, setting, expected) in settings {
        if let Some(value) = found_value.filter(|value| *value != expected) {
            let sentence = format!(
                "`{key}` of the profile is {value}, and `{setting}` of the configuration is {expected}"
            );
            report(part, key, sentence, measure);
        }
    }
    if profile.layer_count() != layers.len() as u64 {
        let part = ProfilePart::Layer(profile.layers.len() - 1);
        let sentence = format!(
            "the profile has {} layers, and the model of the configuration has {}",
            profile.layer_count(),
            layers.len()
        );
        report(part, "kind", sentence, measure);
        return problems;
    }
    let bytes = |parameters: u64| parameters.saturating_mul(4);
    let mut first = 0;
    for (index, section) in profile.layers.iter().enumerate() {
        for (number, layer) in layers.iter().enumerate().skip(first).take(section.count as usize) {
            // The output of the last layer does not cross a boundary.
            let output = if number + 1 < layers.len() { section.output_bytes } else { 0 };
            let expected_output = if number + 1 < layers.len() { layer.output_bytes } else { 0 };
            let sizes = [
                (
                    Figure::Parameters,
                    "parameter_bytes",
                    section.parameter_bytes,
                    bytes(layer.all_parameters()),
                ),
                (
                    Figure::Parameters,
                    "trained_bytes",
                    section.gradient_bytes(),
                    bytes(layer.trained_parameters()),
                ),
                (
                    Figure::Output,
                    "output_bytes",
                    output,
                    expected_output.saturating_mul(u64::from(profile.rows)),
                ),
            ];
            let differs = |&(figure, _, size, expected): &(Figure, &str, u64, u64)| {
                !found.missing.contains(&(index, figure)) && size.abs_diff(expected) > expected / 100
            };
            if let Some((_, key, size, expected)) = sizes.into_iter().find(differs) {
                let sentence = format!(
                    "`{key}` is {size}, and layer {number} of the model ({}) has {expected}",
                    layer.kind
                );
                report(ProfilePart::Layer(index), key, sentence, measure);
                break;
            }
        }
        first += section.count as usize;
    }
    problems
}

#[cfg(test)]
mod tests;
