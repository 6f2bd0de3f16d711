//! Finds sizes and settings that a schedule accepts, near the ones that it refuses.
//!
//! A refusal has a cause, and a few changes remove that cause. Each changed size is checked by the function
//! that refused the first one. If it is refused for another cause, it is changed further. So advice is never
//! a size that is refused.

use crate::generate::advice::Advice;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::{Generator, Limits};
use crate::generate::settings::Setting;
use crate::generate::spec::{PerStage, ScheduleSpec};
use crate::overlap::{MAX_OVERLAPPED_MICROBATCH, MAX_OVERLAPPED_STAGE};

/// The largest number of causes that a size is changed for.
const MOST_CHANGES: u32 = 6;
/// The farthest number of microbatches that is tried one by one.
const FARTHEST: u32 = 256;
/// The most pieces of advice.
const MOST_ADVICE: usize = 3;

/// Returns changes of `spec` that the generator accepts within the limits, the most useful first. `other`
/// finds the generator of another schedule.
pub(super) fn advice(
    generator: &Generator,
    spec: &ScheduleSpec,
    limits: Limits,
    kind: &GenerateErrorKind,
    other: impl Fn(&str) -> Option<&'static Generator>,
) -> Vec<Advice> {
    let repair = Repair { generator, layers: limits.layers };
    let fits = |repaired: &ScheduleSpec| repaired.microbatches.checked_mul(limits.replicas.max(1)).is_some();
    let mut found: Vec<Advice> = Vec::new();
    for candidate in repair.candidates(spec, kind) {
        if let Some(repaired) = repair.repaired(candidate, MOST_CHANGES).filter(fits) {
            let changes = changes(spec, &repaired);
            if !found.contains(&changes) {
                found.push(changes);
            }
        }
    }
    if let GenerateErrorKind::TooLargeToSearch { other: name, .. } = kind
        && let Some(generator) = other(name)
        && fits(spec)
        && generator
            .check(&Setting::ALL.iter().fold(spec.clone(), |spec, it| spec.without(*it)), limits.layers)
            .is_ok()
    {
        found.push(Advice { schedule: Some(generator.name), ..Advice::default() });
    }
    found.truncate(MOST_ADVICE);
    found
}

/// Returns the differences of two specifications.
fn changes(spec: &ScheduleSpec, repaired: &ScheduleSpec) -> Advice {
    let changed = |old: Option<u32>, new: Option<u32>| new.filter(|_| old != new);
    let left_out =
        Setting::ALL.into_iter().filter(|setting| spec.gives(*setting) && !repaired.gives(*setting));
    Advice {
        schedule: None,
        ranks: changed(Some(spec.ranks), Some(repaired.ranks)),
        stages_per_rank: changed(spec.stages_per_rank, repaired.stages_per_rank),
        microbatches: changed(Some(spec.microbatches), Some(repaired.microbatches)),
        group_size: changed(spec.group_size, repaired.group_size),
        memory_for_one: repaired.memory_limit.is_some() && spec.memory_limit != repaired.memory_limit,
        left_out: left_out.collect(),
    }
}

/// The rules that a size has to follow.
struct Repair<'a> {
    generator: &'a Generator,
    layers: Option<u32>,
}

impl Repair<'_> {
    fn refusal(&self, spec: &ScheduleSpec) -> Option<GenerateErrorKind> {
        self.generator.check(spec, self.layers).err()
    }

    /// Returns an accepted specification that removes all causes for which `spec` is refused, one after the
    /// other.
    fn repaired(&self, spec: ScheduleSpec, changes: u32) -> Option<ScheduleSpec> {
        let Some(kind) = self.refusal(&spec) else { return Some(spec) };
        let changes = changes.checked_sub(1)?;
        self.candidates(&spec, &kind).into_iter().find_map(|candidate| self.repaired(candidate, changes))
    }

    /// Returns specifications without the cause of a refusal. They may be refused for another cause.
    fn candidates(&self, spec: &ScheduleSpec, kind: &GenerateErrorKind) -> Vec<ScheduleSpec> {
        let ranks = |ranks| ScheduleSpec { ranks, ..spec.clone() };
        let stages = |stages| ScheduleSpec { stages_per_rank: Some(stages), ..spec.clone() };
        let microbatches = |microbatches| ScheduleSpec { microbatches, ..spec.clone() };
        let group = |group_size| ScheduleSpec { group_size: Some(group_size), ..spec.clone() };
        match *kind {
            GenerateErrorKind::UnknownSchedule { .. }
            | GenerateErrorKind::EntryCount { .. }
            | GenerateErrorKind::Costs(_) => Vec::new(),
            GenerateErrorKind::NoStages { ranks: 0, .. } => vec![ranks(1)],
            GenerateErrorKind::NoStages { .. } => vec![stages(1)],
            GenerateErrorKind::NoMicrobatches => vec![microbatches(1)],
            GenerateErrorKind::TooManyStages { stages_per_rank, layers, .. } => {
                let fewer_stages = (layers / spec.ranks.max(1)).min(stages_per_rank);
                let mut fewer_ranks =
                    (1..=layers / stages_per_rank.max(1)).rev().take(FARTHEST as usize).map(ranks);
                let first = fewer_ranks.clone().find(|spec| self.refusal(spec).is_none());
                let fewer_ranks = first.or_else(|| fewer_ranks.next());
                let fewer_stages = (1..=fewer_stages).rev().take(2).map(stages);
                fewer_ranks.into_iter().chain(fewer_stages).collect()
            }
            GenerateErrorKind::TooLarge { .. } => self.smaller(spec),
            GenerateErrorKind::TooManyToOverlap { .. } => {
                let most_ranks = MAX_OVERLAPPED_STAGE.div_ceil(2);
                let most = spec.microbatches.min(MAX_OVERLAPPED_MICROBATCH + 1);
                vec![ScheduleSpec { ranks: spec.ranks.min(most_ranks), microbatches: most, ..spec.clone() }]
            }
            GenerateErrorKind::TooLargeToSearch { stages, most_actions, .. } => {
                let most = u32::try_from(most_actions / u64::from(stages)).unwrap_or(u32::MAX);
                let fewer_ranks =
                    u64::from(spec.ranks) * most_actions / (u64::from(stages) * u64::from(spec.microbatches));
                vec![microbatches(most), ranks(u32::try_from(fewer_ranks).unwrap_or(u32::MAX))]
            }
            GenerateErrorKind::TooFewMicrobatches { stages, .. } => vec![microbatches(stages)],
            GenerateErrorKind::StagesPerRank { supported, .. } => vec![stages(supported)],
            GenerateErrorKind::OddStagesPerRank { requested, .. } => {
                [requested.checked_add(1), requested.checked_sub(1)]
                    .into_iter()
                    .flatten()
                    .map(stages)
                    .collect()
            }
            GenerateErrorKind::UnevenRounds { .. } => {
                let mut candidates = self.near_microbatches(spec);
                candidates.push(group(spec.ranks.min(spec.microbatches)));
                candidates
            }
            GenerateErrorKind::UnevenGroups { .. } => self.near_microbatches(spec),
            GenerateErrorKind::GroupSize { group_size, smallest, largest, .. } => {
                vec![group(group_size.clamp(smallest, largest.max(smallest)))]
            }
            GenerateErrorKind::UnusedSetting { setting, .. } => vec![spec.without(setting)],
            GenerateErrorKind::NoMemory { .. } => vec![with_room_for_one(spec)],
        }
    }

    /// Returns the nearest accepted numbers of microbatches below and above `spec.microbatches`.
    fn near_microbatches(&self, spec: &ScheduleSpec) -> Vec<ScheduleSpec> {
        let of = |microbatches| ScheduleSpec { microbatches, ..spec.clone() };
        let (own, step) = (spec.microbatches, spec.group_size.unwrap_or(spec.ranks).max(1));
        let multiple = own / step;
        let below = (1..=FARTHEST).map_while(|distance| own.checked_sub(distance)).chain([multiple * step]);
        let above = (1..=FARTHEST).map_while(|distance| own.checked_add(distance));
        let above = above.chain((multiple + 1).checked_mul(step));
        let first = |numbers: &mut dyn Iterator<Item = u32>| {
            numbers.map(of).find(|spec| self.refusal(spec).is_none())
        };
        let (mut below, mut above) = (below.filter(|number| *number > 0), above);
        [first(&mut below), first(&mut above)].into_iter().flatten().collect()
    }

    /// Returns smaller sizes, each with one number that is as large as possible.
    fn smaller(&self, spec: &ScheduleSpec) -> Vec<ScheduleSpec> {
        let with_microbatches = |microbatches| ScheduleSpec { microbatches, ..spec.clone() };
        let with_stages = |stages| ScheduleSpec { stages_per_rank: Some(stages), ..spec.clone() };
        let with_ranks = |ranks| ScheduleSpec { ranks, ..spec.clone() };
        let is_small = |spec: &ScheduleSpec| {
            !matches!(
                self.refusal(spec),
                Some(GenerateErrorKind::TooLarge { .. } | GenerateErrorKind::StagesPerRank { .. })
            )
        };
        let mut candidates = Vec::new();
        candidates.extend(
            largest(spec.microbatches, |number| is_small(&with_microbatches(number))).map(with_microbatches),
        );
        if let Some(stages) = spec.stages_per_rank {
            candidates.extend(largest(stages, |number| is_small(&with_stages(number))).map(with_stages));
        }
        candidates.extend(largest(spec.ranks, |number| is_small(&with_ranks(number))).map(with_ranks));
        if candidates.iter().all(|candidate| self.refusal(candidate).is_some()) {
            // All numbers are far too large. Smaller ones may have a largest one each.
            let (ranks, microbatches) = (spec.ranks.min(1024), spec.microbatches.min(1024));
            let stages_per_rank = spec.stages_per_rank.map(|stages| stages.min(2));
            candidates.push(ScheduleSpec { ranks, stages_per_rank, microbatches, ..spec.clone() });
        }
        candidates
    }
}

/// Returns the largest number from 1 to `most` that is accepted, if smaller ones are too.
fn largest(most: u32, is_accepted: impl Fn(u32) -> bool) -> Option<u32> {
    let (mut accepted, mut refused) = (is_accepted(1).then_some(1)?, most);
    while refused - accepted > 1 {
        let middle = accepted + (refused - accepted) / 2;
        if is_accepted(middle) { accepted = middle } else { refused = middle }
    }
    Some(accepted)
}

/// Returns a specification whose memory limits are at least 1.
fn with_room_for_one(spec: &ScheduleSpec) -> ScheduleSpec {
    let memory_limit = spec.memory_limit.as_ref().map(|limit| match limit {
        PerStage::Same(limit) => PerStage::Same((*limit).max(1)),
        PerStage::Each(limits) => PerStage::Each(limits.iter().map(|limit| (*limit).max(1)).collect()),
    });
    ScheduleSpec { memory_limit, ..spec.clone() }
}
