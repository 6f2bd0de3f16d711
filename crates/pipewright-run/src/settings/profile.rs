//! Reads a profile: strict TOML, and every mistake with its place.
//!
//! The keys are checked here, the values by the profile itself. A key with another unit, such as
//! `forward_ms`, is reported with the right one. If the model is known, the profile must be of that model,
//! and figures that it lacks are estimated.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use pipewright::device::DeviceChoice;
use pipewright::tensor::Precision;
use pipewright_schedule::ModelDesc;
use pipewright_schedule::analytic::{Figure, Missing, PeakRates, Workload, fill};
use pipewright_schedule::plan::with_head_parts;
use pipewright_schedule::profile::{
    DeviceProfile, HEAD_PART, LayerProfile, LinkProfile, MAX_LAYERS, NodeProfile, PartProfile, Profile,
    ProfilePart,
};
use pipewright_schedule::recompute::LayerPart;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::settings::load::read_source;
use crate::settings::place::{Place, Source};
use crate::settings::problem::{ConfigError, Problem, ProblemKind, ProfileMismatch};
use crate::settings::profile_keys::{Keys, Places, SECTION, missing_problem};

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

/// Reads the costs of a part of a layer, which are optional. A time without a size is a mistake.
fn read_part(keys: &mut Keys<'_>, part: LayerPart) -> PartProfile {
    let [bytes, seconds] = part.profile_keys();
    match keys.optional_number(seconds) {
        Some(recompute_s) => PartProfile { bytes: keys.whole(bytes), recompute_s },
        None => PartProfile { bytes: keys.optional(bytes).unwrap_or(0), recompute_s: 0.0 },
    }
}

/// A profile as it was read.
struct Found {
    profile: Profile,
    /// The figures of layers that are not written.
    missing: Vec<Missing>,
    places: Places,
    /// The beginning of the file.
    whole: Place,
}

/// Reads the profile in `file`.
///
/// # Errors
/// Fails if the file cannot be read, or with every mistake in it.
pub fn read(file: &Path) -> Result<Profile, ConfigError> {
    let mut problems = Vec::new();
    match parse(read_source(file, "profile")?, false, &mut problems) {
        Some(found) if problems.is_empty() => Ok(found.profile),
        _ => Err(ConfigError::Problems(problems)),
    }
}

/// Reads the profile of a run in `file`, and estimates figures of layers that it lacks.
///
/// # Errors
/// As [`read`], and if the profile is of another model, device or precision.
pub fn read_for(file: &Path, run: &ProfiledRun<'_>) -> Result<Profile, ConfigError> {
    let mut problems = Vec::new();
    let found = parse(read_source(file, "profile")?, true, &mut problems).filter(|_| problems.is_empty());
    let Some(mut found) = found else { return Err(ConfigError::Problems(problems)) };
    if found.missing.is_empty() {
        // The figures of a part follow from the figures of the whole head.
        found.profile = with_head_parts(&found.profile, Some(parts_of(run.workload.model))).into_owned();
    }
    check_run(&found, run, &mut problems);
    if !problems.is_empty() {
        return Err(ConfigError::Problems(problems));
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
fn parse(source: Source, may_lack: bool, problems: &mut Vec<Problem>) -> Option<Found> {
    let source = Arc::new(source);
    let place = |span: Range<usize>| Place::File { source: Arc::clone(&source), span };
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    if !errors.is_empty() {
        problems.extend(errors.iter().map(|error| Problem {
            place: place(error.span().unwrap_or(0..0)),
            kind: ProblemKind::Syntax { message: error.message().to_owned() },
        }));
        return None;
    }
    let mut reader = Reader { place: &place, may_lack, places: Places::new(), missing: Vec::new(), problems };
    let (mut device, mut link, mut node) = (None, None, None);
    let (mut layers, mut top) = (Vec::new(), DeTable::new());
    for (key, value) in table.into_inner() {
        let (key_place, span) = (place(key.span()), value.span());
        match (key.get_ref().as_ref(), value.into_inner()) {
            ("device", DeValue::Table(keys)) => device = Some(reader.device(key_place, keys)),
            ("link", DeValue::Table(keys)) => link = Some(reader.link(key_place, keys)),
            ("node", DeValue::Table(keys)) => node = Some(reader.node(key_place, keys)),
            ("layers", DeValue::Array(items)) => {
                // The places of many more, and the mistakes in them, might not fit into memory.
                if let Some(item) = items.get(MAX_LAYERS as usize) {
                    let (value, range) = (items.len().to_string(), format!("at most {MAX_LAYERS} sections"));
                    let kind = ProblemKind::OutOfRange { key: "layers", value, range };
                    reader.problems.push(Problem { place: place(item.span()), kind });
                    return None;
                }
                for (index, item) in items.into_iter().enumerate() {
                    let item_place = place(item.span());
                    match item.into_inner() {
                        DeValue::Table(keys) => layers.push(reader.layer(index, item_place, keys)),
                        _ => reader.wrong_type("layers", item_place, "[[layers]] sections", "a list"),
                    }
                }
            }
            ("device", _) => reader.wrong_type("device", place(span), "a section", "a value"),
            ("link", _) => reader.wrong_type("link", place(span), "a section", "a value"),
            ("node", _) => reader.wrong_type("node", place(span), "a section", "a value"),
            ("layers", _) => {
                reader.wrong_type("layers", place(span), "[[layers]] sections", "a value");
            }
            (_, value) => drop(top.insert(key, Spanned::new(span, value))),
        }
    }
    let whole = place(0..0);
    let top = reader.top(whole.clone(), top);
    let Reader { places, missing, problems, .. } = reader;
    let has = [("link", link.is_some()), ("layers", !layers.is_empty())];
    for (key, _) in has.into_iter().filter(|(_, is_there)| !is_there) {
        problems.push(missing_problem(0, key, whole.clone()));
    }
    if !problems.is_empty() {
        return None;
    }
    let profile = Profile { device, link: link?, node, layers, ..top };
    let found = Found { profile, missing, places, whole };
    for problem in found.profile.problems() {
        let place = found.place(problem.part, problem.key);
        let kind =
            ProblemKind::OutOfRange { key: problem.key, value: problem.value, range: problem.expected };
        problems.push(Problem { place, kind });
    }
    Some(found)
}

/// Reads the sections.
struct Reader<'a, P: Fn(Range<usize>) -> Place> {
    place: &'a P,
    may_lack: bool,
    places: Places,
    missing: Vec<Missing>,
    problems: &'a mut Vec<Problem>,
}

impl<P: Fn(Range<usize>) -> Place> Reader<'_, P> {
    /// Reads the keys outside of any section.
    fn top(&mut self, place: Place, keys: DeTable<'_>) -> Profile {
        let mut keys = Keys::of(0, place, keys, self.place, self.problems);
        let profile = Profile {
            rows: keys.optional("rows").unwrap_or(1),
            tokens: keys.optional("tokens"),
            stage_bytes: keys.optional("stage_bytes").unwrap_or(0),
            rank_bytes: keys.optional("rank_bytes").unwrap_or(0),
            assumed: keys.texts("assumed"),
            ..Profile::default()
        };
        keys.keep(ProfilePart::Top, &mut self.places);
        profile
    }

    fn device(&mut self, place: Place, keys: DeTable<'_>) -> DeviceProfile {
        let mut keys = Keys::of(1, place, keys, self.place, self.problems);
        let device = DeviceProfile {
            name: keys.text("name"),
            memory_bytes: keys.optional("memory_bytes"),
            device: Some(keys.text("device")).filter(|text| !text.is_empty()),
            precision: Some(keys.text("precision")).filter(|text| !text.is_empty()),
            ranks: keys.optional("ranks"),
            threads_per_rank: keys.optional("threads_per_rank"),
        };
        keys.keep(ProfilePart::Device, &mut self.places);
        device
    }

    fn link(&mut self, place: Place, keys: DeTable<'_>) -> LinkProfile {
        let mut keys = Keys::of(2, place, keys, self.place, self.problems);
        let [latency_s, bytes_per_s] = ["latency_s", "bytes_per_s"].map(|key| keys.number(key));
        let reduce_bytes_per_s = keys.optional_number("reduce_bytes_per_s");
        let offload_bytes_per_s = keys.optional_number("offload_bytes_per_s");
        keys.keep(ProfilePart::Link, &mut self.places);
        LinkProfile { latency_s, bytes_per_s, reduce_bytes_per_s, offload_bytes_per_s }
    }

    fn node(&mut self, place: Place, keys: DeTable<'_>) -> NodeProfile {
        let mut keys = Keys::of(4, place, keys, self.place, self.problems);
        let [latency_s, bytes_per_s] = ["latency_s", "bytes_per_s"].map(|key| keys.number(key));
        let ranks = keys.whole("ranks");
        keys.keep(ProfilePart::Node, &mut self.places);
        NodeProfile { ranks, latency_s, bytes_per_s }
    }

    fn layer(&mut self, index: usize, place: Place, keys: DeTable<'_>) -> LayerProfile {
        let mut keys = Keys::of(3, place, keys, self.place, self.problems);
        let mut layer = LayerProfile {
            kind: keys.text("kind"),
            count: keys.optional("count").unwrap_or(1),
            forward_s: keys.number("forward_s"),
            input_backward_s: keys.number("input_backward_s"),
            weight_backward_s: keys.number("weight_backward_s"),
            backward_s: keys.optional_number("backward_s"),
            recompute_s: keys.optional_number("recompute_s"),
            exchange_s: keys.optional_number("exchange_s").unwrap_or(0.0),
            optimizer_s: keys.optional_number("optimizer_s").unwrap_or(0.0),
            output_bytes: keys.whole("output_bytes"),
            parameter_bytes: keys.whole("parameter_bytes"),
            trained_bytes: keys.optional("trained_bytes"),
            activation_bytes: keys.whole("activation_bytes"),
            weight_activation_bytes: keys.optional("weight_activation_bytes"),
            norms_bytes: 0,
            norms_s: 0.0,
            feed_forward_bytes: 0,
            feed_forward_s: 0.0,
            temporary_bytes: keys.optional("temporary_bytes").unwrap_or(0),
            tensor_sums: keys.optional("tensor_sums"),
            optimizer_bytes: None,
            held_bytes: None,
            copy_bytes: None,
        };
        let missing = if self.may_lack { keys.take_missing() } else { Vec::new() };
        // Parts are estimated only together with the activations, so a missing size of a part is a mistake.
        let parts = LayerPart::ALL.map(|part| (part, read_part(&mut keys, part)));
        let lacks_activations = missing.contains(&Figure::Activation.key());
        if !lacks_activations {
            parts.into_iter().for_each(|(part, costs)| layer.set_part(part, costs));
        }
        let is_missing = |figure: &Figure| match figure {
            Figure::Part(_) => lacks_activations,
            figure => missing.contains(&figure.key()),
        };
        let figures = Figure::ALL.into_iter().filter(is_missing);
        self.missing.extend(figures.map(|figure| (index, figure)));
        if layer.kind.is_empty() {
            keys.miss("kind");
            layer.kind = "?".to_owned();
        }
        keys.keep(ProfilePart::Layer(index), &mut self.places);
        layer
    }

    fn wrong_type(&mut self, key: &'static str, place: Place, expected: &'static str, found: &'static str) {
        let kind = ProblemKind::WrongType { key, expected, found };
        self.problems.push(Problem { place, kind });
    }
}

impl Found {
    /// Returns the place of a value, or its section's place if it is not written.
    fn place(&self, part: ProfilePart, key: &'static str) -> Place {
        let place = self.places.get(&(part, key)).or_else(|| self.places.get(&(part, SECTION)));
        place.unwrap_or(&self.whole).clone()
    }
}

fn device_of(profile: &Profile) -> Option<&DeviceProfile> {
    profile.device.as_ref()
}

/// Reports a profile whose model, device, precision or length of rows differs from the run. Sizes may differ
/// by a hundredth, because they may be written by hand.
fn check_run(found: &Found, run: &ProfiledRun<'_>, problems: &mut Vec<Problem>) {
    let (profile, layers) = (&found.profile, &run.workload.model.layers);
    let device = device_of(profile).and_then(|device| device.device.as_ref());
    if let Some(device) = device.filter(|device| kinds_of(device) != kinds_of(&run.device)) {
        let kind = ProfileMismatch::OtherDevice { found: device.clone(), expected: run.device.clone() };
        problems.push(Problem { place: found.place(ProfilePart::Device, "device"), kind: kind.into() });
    }
    let precision = device_of(profile).and_then(|device| device.precision.clone());
    let precision = precision.unwrap_or_else(|| Precision::F32.to_string());
    if precision != run.precision.to_string() {
        let kind = ProfileMismatch::OtherPrecision { found: precision, expected: run.precision };
        problems.push(Problem { place: found.place(ProfilePart::Device, "precision"), kind: kind.into() });
    }
    let threads = device_of(profile).and_then(|device| device.threads_per_rank);
    let settings = [
        (ProfilePart::Top, "tokens", profile.tokens, "data.seq_len", run.workload.tokens),
        (ProfilePart::Device, "threads_per_rank", threads, "pipeline.threads_per_rank", run.threads_per_rank),
    ];
    for (part, key, found_value, setting, expected) in settings {
        if let Some(value) = found_value.filter(|value| *value != expected) {
            let kind = ProfileMismatch::OtherSetting { key, found: value, setting, expected };
            problems.push(Problem { place: found.place(part, key), kind: kind.into() });
        }
    }
    if profile.layer_count() != layers.len() as u64 {
        let part = ProfilePart::Layer(profile.layers.len() - 1);
        let kind = ProfileMismatch::OtherLayers { found: profile.layer_count(), expected: layers.len() };
        problems.push(Problem { place: found.place(part, "kind"), kind: kind.into() });
        return;
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
                let kind = layer.kind.clone();
                let kind = ProfileMismatch::OtherLayer { key, layer: number, kind, found: size, expected };
                problems
                    .push(Problem { place: found.place(ProfilePart::Layer(index), key), kind: kind.into() });
                break;
            }
        }
        first += section.count as usize;
    }
}

#[cfg(test)]
mod tests;
