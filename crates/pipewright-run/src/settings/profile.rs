//! Reads the profile of a run: it must be of the run's model, and figures that it lacks are estimated.

use std::collections::BTreeSet;
use std::path::Path;

use pipewright::device::{DeviceChoice, RankThreads};
use pipewright::ids::WorldRank;
use pipewright::tensor::Precision;
use pipewright_document::{Problem, Problems};
use pipewright_schedule::analytic::{Figure, PeakRates, Workload, fill};
use pipewright_schedule::plan::with_head_parts;
use pipewright_schedule::profile::{DeviceProfile, HEAD_PART, PROCESSOR, Profile, ProfilePart};
use pipewright_schedule::words::counted;
use pipewright_schedule::{ModelDesc, Rank};
use pipewright_system::config_file::{ConfigError, read_source};
use pipewright_system::profile_file::{ReadProfile, parse};

use crate::settings::devices::DeviceSettings;

/// The advice about a profile of another run.
const MEASURE: &str = "use the profile of this run: `pipewright profile` with its configuration measures one";

/// The run that a profile must be for.
pub struct ProfiledRun<'a> {
    /// The model.
    pub workload: Workload<'a>,
    /// The rates for figures that the profile lacks.
    pub rates: PeakRates,
    /// The devices.
    pub devices: DeviceSettings,
    /// The precision.
    pub precision: Precision,
    /// The threads that the ranks compute with.
    pub threads: RankThreads,
    /// The number of ranks, over all replicas.
    pub ranks: u32,
    /// The rank of the profile that each rank is; empty if they are the same ones.
    pub profile_ranks: &'a [u32],
}

/// Returns the kinds of devices in a list of their names. A profile of one GPU is also for several like it.
fn kinds_of(devices: &str) -> BTreeSet<String> {
    let kind = |name: &str| match name.parse::<DeviceChoice>() {
        Ok(choice) => choice.kind().to_string(),
        Err(_) => name.to_owned(),
    };
    devices.split(',').map(|name| kind(name.trim())).collect()
}

/// Reads the profile of a run in `file`, with the ranks that the run has, and estimates figures of layers that it lacks.
///
/// # Errors
/// As [`parse`] and [`read_source`], and if the profile is of another model, device, precision or number of threads.
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
    found.profile = with_ranks_of(found.profile, run);
    fill(&mut found.profile, &found.missing, &run.workload, run.rates);
    Ok(found.profile)
}

/// Reads the ranks of a profile in `file` for a run, which may be of another model.
///
/// # Errors
/// As [`parse`] and [`read_source`], and if ranks have another device or number of threads.
pub fn read_ranks(file: &Path, run: &ProfiledRun<'_>) -> Result<Profile, ConfigError> {
    let found = parse(read_source(file, "profile")?, true).map_err(ConfigError::Problems)?;
    let mut problems = Vec::new();
    check_ranks(&found.profile, run, &mut |part, key, sentence| {
        problems.push(Problem::new(found.place(part, key), sentence).help(MEASURE));
    });
    if problems.is_empty() {
        Ok(with_ranks_of(found.profile, run))
    } else {
        Err(ConfigError::Problems(Problems(problems)))
    }
}

/// Returns a profile of the ranks that a run has.
fn with_ranks_of(profile: Profile, run: &ProfiledRun<'_>) -> Profile {
    let ranks: Vec<Rank> = run.profile_ranks.iter().map(|&rank| Rank::new(rank)).collect();
    if ranks.is_empty() { profile } else { profile.of_ranks(&ranks) }
}

/// Returns the number of parts of a model's head.
fn parts_of(model: &ModelDesc) -> u32 {
    let parts = model.layers.iter().rev().take_while(|layer| layer.kind == HEAD_PART);
    u32::try_from(parts.count()).unwrap_or(u32::MAX).max(1)
}

fn device_of(profile: &Profile) -> Option<&DeviceProfile> {
    profile.device.as_ref()
}

/// Reports the ranks of a profile whose device or number of threads differs from the configuration's. Without sections
/// for ranks, `[device]` is about all of them.
fn check_ranks(
    profile: &Profile,
    run: &ProfiledRun<'_>,
    report: &mut dyn FnMut(ProfilePart, &'static str, String),
) {
    let usual = device_of(profile).cloned().unwrap_or_default();
    let are_apart = profile.ranks.iter().any(|rank| rank.device.is_some());
    if let Some(device) = usual.device.as_ref().filter(|_| !are_apart) {
        let own = run.devices.to_string();
        if kinds_of(device) != kinds_of(&own) {
            let sentence =
                format!("the profile is of the device {device}, and the configuration computes on {own}");
            report(ProfilePart::Device, "device", sentence);
        }
    }
    let own_threads = |rank: u32| run.threads.of(WorldRank::new(rank));
    let are_equal =
        profile.ranks.is_empty() && (0..run.ranks).all(|rank| own_threads(rank) == own_threads(0));
    let ranks = if profile.ranks.is_empty() || !run.profile_ranks.is_empty() {
        run.ranks
    } else {
        profile.ranks.len() as u32
    };
    let mut is_usual_wrong = false;
    for rank in (0..ranks).map(WorldRank::new) {
        let index = run.profile_ranks.get(rank.index()).map_or(rank.index(), |&machine| machine as usize);
        let section = profile.ranks.get(index);
        if section.is_none() && !profile.ranks.is_empty() {
            let sentence = format!(
                "`pipeline.profile_ranks` of the configuration names rank {index}, and the profile has {}",
                counted(profile.ranks.len(), "[[rank]] section")
            );
            report(ProfilePart::Rank(profile.ranks.len() - 1), "speed", sentence);
            return;
        }
        let of_rank = if are_equal { String::new() } else { format!(" for rank {rank}") };
        let own = run.devices.choice_of(rank).to_string();
        let device = section.and_then(|section| section.device.as_ref().or(usual.device.as_ref()));
        let device = device.map_or(PROCESSOR, String::as_str);
        if are_apart && kinds_of(device) != kinds_of(&own) {
            let sentence = format!(
                "the profile is of the device {device}{of_rank}, and the configuration computes on {own} there"
            );
            report(ProfilePart::Rank(index), "device", sentence);
        }
        let (own, threads) = (run.threads.of(rank), section.and_then(|section| section.threads));
        let (part, key) = match threads {
            Some(_) => (ProfilePart::Rank(index), "threads"),
            None => (ProfilePart::Device, "threads_per_rank"),
        };
        let threads = threads.or(usual.threads_per_rank.filter(|_| !is_usual_wrong));
        if let Some(threads) = threads.filter(|threads| *threads as usize != own) {
            is_usual_wrong |= part == ProfilePart::Device;
            let sentence = format!(
                "`{key}` of the profile is {threads}, and `pipeline.threads_per_rank` of the configuration is {own}{of_rank}"
            );
            report(part, key, sentence);
        }
    }
}

/// Reports a profile whose model, device, precision or length of rows differs from the run. Sizes may differ
/// by a hundredth, because they may be written by hand.
fn check_run(found: &ReadProfile, run: &ProfiledRun<'_>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut report = |part, key, sentence: String, help: &str| {
        problems.push(Problem::new(found.place(part, key), sentence).help(help));
    };
    let (profile, layers) = (&found.profile, &run.workload.model.layers);
    check_ranks(profile, run, &mut |part, key, sentence| report(part, key, sentence, MEASURE));
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
    let expected = run.workload.tokens;
    if let Some(tokens) = profile.tokens.filter(|tokens| *tokens != expected) {
        let sentence = format!(
            "`tokens` of the profile is {tokens}, and `data.seq_len` of the configuration is {expected}"
        );
        report(ProfilePart::Top, "tokens", sentence, MEASURE);
    }
    if profile.layer_count() != layers.len() as u64 {
        let part = ProfilePart::Layer(profile.layers.len() - 1);
        let sentence = format!(
            "the profile has {} layers, and the model of the configuration has {}",
            profile.layer_count(),
            layers.len()
        );
        report(part, "kind", sentence, MEASURE);
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
                report(ProfilePart::Layer(index), key, sentence, MEASURE);
                break;
            }
        }
        first += section.count as usize;
    }
    problems
}

#[cfg(test)]
mod tests;
