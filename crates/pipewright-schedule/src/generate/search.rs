//! Schedules that are the shortest of several simulated runs: the checks, the sizes and the search.

use crate::costs::Costs;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::Grid;
use crate::generate::settings::Setting;
use crate::generate::spec::{PerStage, ScheduleSpec};
use crate::generate::ticks::{StageTicks, ticks};
use crate::ids::StageIndex;
use crate::placement::Placement;

/// The largest number of actions for which a search runs: 10 to 15 seconds on one core.
const MAX_SEARCHED: u64 = 1 << 24;

/// A schedule that is the best of several simulated runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Search {
    pub(super) schedule: &'static str,
    /// The number of actions of a stage for each microbatch.
    pub(super) actions: u32,
    /// A similar schedule that does not search.
    pub(super) other: &'static str,
}

impl Search {
    /// Checks the costs and the memory limits, and refuses a size whose search would take too long.
    pub(super) fn check(self, spec: &ScheduleSpec, stages_per_rank: u32) -> Result<(), GenerateErrorKind> {
        let Self { schedule, actions, other } = self;
        let (stages, microbatches) = (spec.ranks * stages_per_rank, spec.microbatches);
        let most_actions = MAX_SEARCHED / u64::from(actions);
        if u64::from(stages) * u64::from(microbatches) > most_actions {
            return Err(GenerateErrorKind::TooLargeToSearch {
                schedule,
                stages,
                microbatches,
                most_actions,
                other,
            });
        }
        if let Some(costs) = &spec.costs {
            costs.check(stages)?;
        }
        spec.memory_limit.as_ref().map_or(Ok(()), |limit| check_memory_limits(limit, stages))
    }
}

/// The simulated runs of a schedule.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) placement: &'a Placement,
    pub(super) microbatches: u32,
    /// The costs of each stage in ticks.
    pub(super) costs: Vec<StageTicks>,
    /// The most microbatches whose activations each stage holds.
    pub(super) limits: Vec<u32>,
}

impl<'a> Task<'a> {
    /// Returns the task for a size that was checked, with a limit of `usual` if the specification has none.
    pub(super) fn of(spec: &ScheduleSpec, placement: &'a Placement, usual: u32) -> Self {
        let costs = ticks(spec.costs.as_ref().unwrap_or(&Costs::default()), placement);
        let limits = match &spec.memory_limit {
            None => vec![usual; costs.len()],
            Some(PerStage::Same(limit)) => vec![*limit; costs.len()],
            Some(PerStage::Each(limits)) => limits.clone(),
        };
        Self { placement, microbatches: spec.microbatches, costs, limits }
    }
}

/// The result of a simulated run.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The end of the last action, in ticks.
    pub(super) makespan: u64,
    pub(super) rows: Grid,
}

/// Returns the shortest run of all candidates; the first of several. `run` simulates a candidate; it returns
/// nothing if the run does not end before a tick, so that it can stop when it is longer than the best one.
pub(super) fn shortest<Candidate>(
    candidates: impl IntoIterator<Item = Candidate>,
    run: impl Fn(Candidate, u64) -> Option<Outcome>,
) -> Option<Outcome> {
    candidates.into_iter().fold(None, |best: Option<Outcome>, candidate| {
        let before = best.as_ref().map_or(u64::MAX, |best| best.makespan);
        run(candidate, before).or(best)
    })
}

/// Refuses a list of another length than the number of stages, and a limit of 0.
fn check_memory_limits(limit: &PerStage<u32>, stages: u32) -> Result<(), GenerateErrorKind> {
    let zero = match limit {
        PerStage::Same(value) => (*value == 0).then_some(0),
        PerStage::Each(values) if values.len() == stages as usize => {
            values.iter().position(|value| *value == 0)
        }
        PerStage::Each(values) => {
            let (setting, found) = (Setting::MemoryLimit, values.len());
            return Err(GenerateErrorKind::EntryCount { setting, found, stages });
        }
    };
    match zero {
        Some(stage) => Err(GenerateErrorKind::NoMemory { stage: StageIndex::new(stage as u32) }),
        None => Ok(()),
    }
}
