//! Reads the profile of a run: it must be of the run's model, and figures that it lacks are estimated.

use std::collections::BTreeSet;
use std::path::Path;

use pipewright::device::DeviceChoice;
use pipewright::tensor::Precision;
use pipewright_document::{Problem, Problems};
use pipewright_schedule::ModelDesc;
use pipewright_schedule::analytic::{Figure, PeakRates, Workload, fill};
use pipewright_schedule::plan::with_head_parts;
use pipewright_schedule::profile::{DeviceProfile, HEAD_PART, PROCESSOR, Profile, ProfilePart};
use pipewright_system::config_file::{ConfigError, read_source};
use pipewright_system::profile_file::{ReadProfile, parse};

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

/// Reads the profile of a run in `file`, and estimates figures of layers that it lacks.
///
/// # Errors
/// As [`parse`] and [`read_source`], and if the profile is of another model, device or precision.
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
