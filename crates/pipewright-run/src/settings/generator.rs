//! The settings of `[pipeline]` that only some schedules have.

use pipewright_schedule::generate::{PerStage, Setting};
use pipewright_schedule::{Costs, GenerateError, GenerateErrorKind, ScheduleSpec, Slices};
use serde::Serialize;

use crate::settings::problem::ProblemKind;
use crate::settings::section::Section;

/// The settings of generators besides the size of the schedule. A schedule refuses a setting that it does not
/// have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GeneratorSettings {
    /// The number of microbatches that a chunk runs before the next chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u32>,
    /// Whether to warm up with two forwards instead of one for each later rank.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wide_warmup: bool,
    /// The number of microbatches whose activations a stage may hold at once: one for all stages, or one for
    /// each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory_limit: Vec<u32>,
    /// The costs for which the schedule is optimised, as in `pipewright simulate --cost`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub costs: Option<String>,
    /// The number of slices into which microbatches are cut along their sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slices: Option<u32>,
    /// Whether forwards and backwards that follow each other become overlaps.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overlap: bool,
}

/// The settings by key.
pub const KEYS: [(&str, Setting); 6] = [
    ("group_size", Setting::GroupSize),
    ("wide_warmup", Setting::WideWarmup),
    ("memory_limit", Setting::MemoryLimit),
    ("costs", Setting::Costs),
    ("slices", Setting::Slices),
    ("overlap", Setting::Overlap),
];

impl GeneratorSettings {
    /// Returns the specification of a schedule of this size with these settings.
    pub fn spec(&self, size: ScheduleSpec) -> ScheduleSpec {
        let memory_limit = match self.memory_limit.as_slice() {
            [] => None,
            &[limit] => Some(PerStage::Same(limit)),
            limits => Some(PerStage::Each(limits.to_vec())),
        };
        // The text was checked when it was read.
        let costs = self.costs.as_ref().and_then(|costs| costs.parse().ok());
        let slices = self.slices.and_then(Slices::new);
        let Self { group_size, wide_warmup, overlap, .. } = *self;
        ScheduleSpec { group_size, wide_warmup, costs, memory_limit, slices, overlap, ..size }
    }
}

/// Reads the settings.
pub(super) fn read(section: &mut Section<'_>) -> GeneratorSettings {
    let costs = section.text("costs");
    if let Some(Err(error)) = costs.as_ref().map(|costs| costs.parse::<Costs>()) {
        section.report("costs", GenerateError::from(error).into());
    }
    GeneratorSettings {
        group_size: section.is_written("group_size").then(|| section.count("group_size", 1)),
        wide_warmup: section.flag("wide_warmup", false),
        memory_limit: section.count_or_counts("memory_limit"),
        costs,
        slices: section.is_written("slices").then(|| section.count("slices", 1)),
        overlap: section.flag("overlap", false),
    }
}

/// Refuses settings of generators if the schedule is not made by one.
pub(super) fn refuse_all(section: &mut Section<'_>) {
    for (key, _) in KEYS {
        if section.is_written(key) {
            let (other, advice) = ("a schedule by name", "remove it");
            section.report(key, ProblemKind::Without { key, other, advice });
        }
    }
}

/// Returns the keys that an error of a generator is about, the most likely first.
pub(super) fn culprits(error: &GenerateError) -> &'static [&'static str] {
    use GenerateErrorKind as Kind;
    match &error.kind {
        Kind::UnknownSchedule { .. } => &["schedule"],
        Kind::UnusedSetting { setting, .. } | Kind::EntryCount { setting, .. } => keys_of(*setting),
        Kind::NoMemory { .. } => keys_of(Setting::MemoryLimit),
        Kind::Costs(_) => keys_of(Setting::Costs),
        Kind::GroupSize { .. } => &["group_size", "ranks"],
        Kind::UnevenGroups { .. } => &["group_size", "microbatches"],
        Kind::StagesPerRank { .. } | Kind::OddStagesPerRank { .. } => &["stages_per_rank"],
        Kind::TooManyStages { .. } => &["layout", "boundaries", "ranks", "stages_per_rank"],
        _ => &["microbatches", "ranks", "schedule"],
    }
}

/// Returns the keys that a setting is about, the most likely first.
fn keys_of(setting: Setting) -> &'static [&'static str] {
    match setting {
        Setting::GroupSize => &["group_size", "schedule"],
        Setting::WideWarmup => &["wide_warmup", "schedule"],
        Setting::MemoryLimit => &["memory_limit", "schedule"],
        Setting::Costs => &["costs", "schedule"],
        Setting::Slices => &["slices", "schedule"],
        Setting::Overlap => &["overlap", "schedule"],
    }
}
