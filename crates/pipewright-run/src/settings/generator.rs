//! The settings of `[pipeline]` that only some schedules have.

use pipewright_document::Problem;
use pipewright_schedule::generate::{PerStage, Setting};
use pipewright_schedule::{Costs, GenerateError, GenerateErrorKind, ScheduleSpec, Slices};
use serde::Serialize;

use crate::settings::section::Section;

/// The settings of generators besides the size of the schedule. A schedule refuses a setting that it does not
/// have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GeneratorSettings {
    /// The number of microbatches that a chunk runs before the next chunk.
    pub group_size: Option<u32>,
    /// Whether to warm up with two forwards instead of one for each later rank.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wide_warmup: bool,
    /// The number of microbatches whose activations a stage may hold at once: one for all stages, or one for
    /// each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory_limit: Vec<u32>,
    /// The costs for which the schedule is optimised, as in `pipewright simulate --cost`.
    pub costs: Option<String>,
    /// The number of slices into which microbatches are cut along their sequence.
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
        section.report_error("costs", GenerateError::from(error));
    }
    GeneratorSettings {
        group_size: section.given_count("group_size"),
        wide_warmup: section.given_flag("wide_warmup").unwrap_or(false),
        memory_limit: section.given_one_or_several("memory_limit").unwrap_or_default(),
        costs,
        slices: section.given_count("slices"),
        overlap: section.given_flag("overlap").unwrap_or(false),
    }
}

/// Records an error of a generator, at the key that is most likely its cause.
pub(super) fn report(section: &mut Section<'_>, error: GenerateError) {
    let (key, help) = (section.first_of(culprits(&error)), set_stages(&error));
    let problem = Problem::of(section.place(key), error);
    section.problems.push(Problem { help, ..problem });
}

/// Returns the argument that sets the number of stages on each rank to one that the schedule has, and what
/// else has to change for it, if the number of stages is the problem.
fn set_stages(error: &GenerateError) -> Option<String> {
    let advice = error.advice.first()?;
    let stages = advice.stages_per_rank?;
    let microbatches = advice.microbatches.map(|number| u64::from(number) * u64::from(error.replicas));
    let further = [
        ("ranks", advice.ranks.map(u64::from)),
        ("microbatches", microbatches),
        ("group_size", advice.group_size.map(u64::from)),
    ];
    let mut text = format!("add --set pipeline.stages_per_rank={stages}");
    for (key, number) in further {
        text.extend(number.map(|number| format!(" --set pipeline.{key}={number}")));
    }
    Some(text)
}

/// Refuses settings of generators if the schedule is not made by one.
pub(super) fn refuse_all(section: &mut Section<'_>) {
    for (key, _) in KEYS {
        if section.is_written(key) {
            section.report_without(key, "a schedule by name", "remove it");
        }
    }
}

/// Returns the keys that an error of a generator is about, the most likely first.
fn culprits(error: &GenerateError) -> &'static [&'static str] {
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
