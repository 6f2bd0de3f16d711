//! Plans a run for other ranks while it continues after a fault.
//!
//! The run keeps its microbatches, their rows, and the parts of its head, and the schedule still adds the
//! gradients of microbatches in ascending order. So another number of ranks gives the same bits.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pipewright_models::CutModel;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::plans::print::refused;
use pipewright_run::run_folder::is_profile;
use pipewright_run::settings::Settings;
use pipewright_run::settings::pipeline::ScheduleChoice;
use pipewright_run::training::optimizer::state_rule;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::plan::{Plan, PlanRequest, plan};
use pipewright_schedule::profile::Profile;

use crate::planning::auto::assumed_profile;
use crate::planning::decision::{Chosen, Decision};
use crate::planning::profile_cache::read_profile;
use crate::planning::request::{add_reads, request_of};

/// The longest search for one number of ranks. The run waits for it.
const SEARCH: Duration = Duration::from_secs(2);

/// Returns whether the planner chooses how a run continues on other ranks: the run has a profile in its
/// folder, or its settings come from a plan, or they state a schedule or a cut that exists for one number
/// of ranks only. If the schedule of the run adds gradients in another order, a plan would change the bits.
pub(crate) fn is_replanned(settings: &Settings, source: &ProgramSource, model: &CutModel) -> bool {
    let pipeline = &settings.pipeline;
    let is_planned = settings.run.planned_step_ms.is_some()
        || pipeline.boundaries.is_some()
        || matches!(pipeline.schedule, ScheduleChoice::Csv(_));
    (is_planned || known_profile(settings, model).is_some())
        && source.computation().is_ok_and(|schedule| schedule.adds_in_order())
}

/// Plans a run for the ranks and replicas of `settings`. Each rank has `memory` bytes; `None` if the memory
/// is not known. A schedule without a name becomes the file `file` in the folder of the run.
///
/// # Errors
/// Fails if no plan fits into the memory of the ranks and keeps the bits of the run.
pub(crate) fn replan(
    settings: Settings,
    model: &CutModel,
    file: &str,
    memory: Option<u64>,
) -> Result<Chosen, Failure> {
    let (mut profile, source) = match known_profile(&settings, model) {
        Some((profile, file)) => (profile, format!("for the times in {file}")),
        None => (assumed_profile(&settings, model), "for assumed times".to_owned()),
    };
    let request = PlanRequest {
        memory,
        data_parallel: Some(settings.mesh.data_parallel),
        larger_microbatches: false,
        ..request_of(&settings, model)?
    };
    let start = Instant::now();
    // The profile has the ranks before the fault.
    (profile.ranks, profile.pairs) = (Vec::new(), Vec::new());
    state_rule(&settings).add_to(&mut profile, model).map_err(Failure::input)?;
    add_reads(&mut profile, &settings, model)?;
    let mut report = plan(&profile, &request, &mut || start.elapsed() < SEARCH).map_err(refused)?;
    report.plans.retain(|plan| keeps_bits(plan, &settings));
    if report.plans.is_empty() {
        return Err(Failure::new(Exit::CheckFailed, "no plan keeps the bits of the run"));
    }
    Decision::new(&report, &settings, &source, Vec::new()).with_schedule_in(file).apply(settings, model)
}

/// Returns the profile in the folder of a run, with the name of its file.
fn known_profile(settings: &Settings, model: &CutModel) -> Option<(Profile, String)> {
    let entries = fs::read_dir(&settings.run.out).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_profile(path)).collect();
    files.sort_unstable();
    files.into_iter().find_map(|file| {
        let (profile, _) = read_profile(settings, model, &file)?;
        Some((profile, file.file_name()?.to_string_lossy().into_owned()))
    })
}

/// Returns whether the losses and gradients of a plan have the bits of the run.
fn keeps_bits(plan: &Plan, settings: &Settings) -> bool {
    let pipeline = &settings.pipeline;
    (plan.microbatches(), plan.microbatch_rows, plan.head_parts)
        == (pipeline.microbatches, pipeline.microbatch_size, pipeline.head_parts)
        && plan.schedule.adds_in_order()
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::ScheduleSpec;
    use pipewright_schedule::generate::generate;

    use super::*;
    use pipewright_run::training::load::load_settings;
    use pipewright_run::training::model::read_model;

    fn settings(set: &[&str]) -> (Settings, ProgramSource, CutModel) {
        let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
        let loaded = load_settings(None, &set).expect("the sample").scheduled().expect("a schedule");
        let model = read_model(&loaded.settings).expect("the model of the sample");
        (loaded.settings, loaded.source, model)
    }

    #[test]
    fn only_schedules_that_add_in_order_keep_the_bits() {
        let check = |name: &str, stages_per_rank: u32, expected: bool| {
            let spec = ScheduleSpec {
                ranks: 2,
                stages_per_rank: Some(stages_per_rank),
                microbatches: 4,
                ..ScheduleSpec::default()
            };
            assert_eq!(generate(name, &spec).expect("a schedule").adds_in_order(), expected, "{name}");
        };
        check("1f1b", 1, true);
        check("gpipe", 1, true);
        check("interleaved-1f1b", 2, true);
        check("looped-bfs", 2, false);
    }

    #[test]
    fn a_run_with_a_plan_is_planned_again() {
        let check = |set: &[&str], expected: bool| {
            let (settings, source, model) = settings(set);
            assert_eq!(is_replanned(&settings, &source, &model), expected, "{set:?}");
        };
        check(&[], false);
        check(&["run.planned_step_ms=12.0"], true);
        check(&["pipeline.partition=explicit", "pipeline.boundaries=[4]"], true);
        check(&["pipeline.partition=blocks", "pipeline.boundaries=[2]"], true);
        check(&["pipeline.partition=blocks"], false);
    }

    #[test]
    fn a_plan_for_fewer_ranks_keeps_the_microbatches() {
        let set = [
            "pipeline.ranks=3",
            if cfg!(feature = "mpi") { "pipeline.transport=mpi" } else { "pipeline.transport=local" },
            "pipeline.microbatches=6",
            "pipeline.microbatch_size=2",
        ];
        let (settings, _, model) = settings(&set);
        let chosen = replan(settings.clone(), &model, "plan-1x3.csv", None).expect("a plan");
        let planned = &chosen.scheduled.settings;
        let sizes = |settings: &Settings| {
            let pipeline = &settings.pipeline;
            (pipeline.ranks, settings.mesh.data_parallel, pipeline.microbatches, pipeline.microbatch_size)
        };
        assert_eq!(sizes(planned), sizes(&settings));
        assert!(chosen.scheduled.source.computation().expect("a schedule").adds_in_order());
        assert!(chosen.sentences[0].ends_with("; for assumed times"), "{:?}", chosen.sentences);
        if let ScheduleChoice::Csv(file) = &planned.pipeline.schedule {
            assert!(file.ends_with("plan-1x3.csv") && chosen.files[0].0 == "plan-1x3.csv", "{file:?}");
        }
    }
}
