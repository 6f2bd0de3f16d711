//! The named schedules that the search tries, with their parameters.

use crate::costs::Costs;
use crate::generate::{
    GenerateError, Generator, Limits, PerStage, ScheduleSpec, Setting, catalogue, check, generate,
};
use crate::plan::class::MAX_CHUNKS;
use crate::plan::order::Order;
use crate::plan::report::PlanSettings;
use crate::schedule::Schedule;

/// A named schedule at one size, with settings.
#[derive(Debug, Clone)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) settings: PlanSettings,
    pub(super) ranks: u32,
    pub(super) chunks: u32,
    pub(super) microbatches: u32,
    /// Whether the schedule depends on the costs of its stages.
    pub(super) is_made_to_measure: bool,
}

impl Family {
    /// Returns all families for a size. If `has_exchanges` is true, those with the setting `overlap` are
    /// included with it and without it.
    pub(super) fn all(ranks: u32, microbatches: u32, layers: usize, has_exchanges: bool) -> Vec<Self> {
        let mut families = Vec::new();
        for generator in catalogue().iter().filter(|generator| generator.trains) {
            for chunks in (1..=MAX_CHUNKS).filter(|chunks| (ranks * chunks) as usize <= layers) {
                for settings in settings(generator, ranks, microbatches, has_exchanges) {
                    let is_made_to_measure = generator.settings.contains(&Setting::Costs);
                    let name = generator.name;
                    families.push(Self { name, settings, ranks, chunks, microbatches, is_made_to_measure });
                }
            }
        }
        families
    }

    /// Returns the order of the family at these costs. If `has_exchanges`, the halves of overlaps run
    /// together.
    pub(super) fn order(&self, costs: &Costs, has_exchanges: bool) -> Result<Order, GenerateError> {
        self.schedule(costs).map(|schedule| Order::with_overlaps(&schedule, has_exchanges))
    }

    /// Returns the schedule of the family at these costs.
    pub(super) fn schedule(&self, costs: &Costs) -> Result<Schedule, GenerateError> {
        let spec = ScheduleSpec {
            ranks: self.ranks,
            stages_per_rank: Some(self.chunks),
            microbatches: self.microbatches,
            group_size: self.settings.group_size,
            wide_warmup: self.settings.wide_warmup,
            costs: self.is_made_to_measure.then(|| costs.clone()),
            memory_limit: self.settings.memory_limit.map(PerStage::Same),
            slices: None,
            overlap: self.settings.overlap,
        };
        generate(self.name, &spec)
    }
}

fn settings(generator: &Generator, ranks: u32, microbatches: u32, has_exchanges: bool) -> Vec<PlanSettings> {
    let mut all = vec![PlanSettings::default()];
    if generator.settings.contains(&Setting::WideWarmup) {
        all.push(PlanSettings { wide_warmup: true, ..PlanSettings::default() });
    }
    if generator.settings.contains(&Setting::GroupSize) {
        let accepts = |group: &u32| {
            let group_size = Some(*group);
            let spec = ScheduleSpec { ranks, microbatches, group_size, ..ScheduleSpec::default() };
            check(generator.name, &spec, Limits::default()).is_ok()
        };
        let groups = group_sizes(ranks, microbatches).filter(accepts);
        all.extend(groups.map(|group| PlanSettings { group_size: Some(group), ..PlanSettings::default() }));
    }
    if generator.settings.contains(&Setting::MemoryLimit) {
        let limits = [2 * ranks, microbatches].into_iter().filter(|&limit| limit > ranks);
        all.extend(limits.map(|limit| PlanSettings { memory_limit: Some(limit), ..PlanSettings::default() }));
    }
    if has_exchanges && generator.settings.contains(&Setting::Overlap) {
        let overlapped: Vec<_> = all.iter().map(|&plain| PlanSettings { overlap: true, ..plain }).collect();
        all.extend(overlapped);
    }
    all
}

/// Returns the group sizes that are tried in addition to the default: below the number of ranks, divisors of
/// the microbatches, for the schedule that has them, and the number of ranks if it does not divide the
/// microbatches, for interleaved schedules.
fn group_sizes(ranks: u32, microbatches: u32) -> impl Iterator<Item = u32> {
    let small = (ranks.div_ceil(2)..ranks).filter(move |group| microbatches.is_multiple_of(*group));
    let whole = Some(ranks).filter(|ranks| !microbatches.is_multiple_of(*ranks));
    small.chain(whole).filter(move |group| *group <= microbatches)
}
