//! The plan that a run with `pipeline.schedule = "auto"` takes: its choice, the sentences about it, and the
//! settings that it becomes.

use std::num::NonZeroU32;

use pipewright_models::CutModel;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::plans::config::{is_named, plan_milliseconds};
use pipewright_planning::plans::print::{stages_per_rank, title_of};
use pipewright_run::run_folder::PLAN as SCHEDULE;
use pipewright_run::settings::generator::GeneratorSettings;
use pipewright_run::settings::model::{ModelSettings, Streaming};
use pipewright_run::settings::pipeline::{PartitionChoice, ScheduleChoice};
use pipewright_run::settings::{Scheduled, Settings};
use pipewright_run::training::model::read_model;
use pipewright_schedule::Recompute;
use pipewright_schedule::csv::{parse_schedule, print_schedule};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::plan::{Outcome, OutcomeKind, Plan, PlanReport};
use pipewright_schedule::recompute::StageRecompute;
use serde::{Deserialize, Serialize};

pub(crate) use pipewright_run::run::Chosen;

/// The share by which a plan may be slower than the best one if it is simpler.
const NEAR: f64 = 0.01;

/// The decision of the leader for all processes.
#[derive(Serialize, Deserialize)]
pub(crate) struct Decision {
    choice: Choice,
    sentences: Vec<String>,
    files: Vec<(String, String)>,
}

/// The parts of a plan that become settings.
#[derive(Serialize, Deserialize)]
struct Choice {
    /// The name of the schedule; `None` if it has no name, or settings that a configuration does not have.
    name: Option<String>,
    /// The computations of each rank.
    csv: String,
    /// The name of the file with these rows in the folder of the run, if the schedule has no name.
    file: String,
    stages_per_rank: u32,
    microbatches: u32,
    microbatch_size: u32,
    boundaries: Vec<u32>,
    /// The part of its forwards that each stage recomputes.
    recompute: Vec<Option<StageRecompute>>,
    data_parallel: u32,
    /// The parts of the output head.
    head_parts: u32,
    /// The predicted time of a step in seconds.
    step_s: f64,
    /// The stages of a rank in memory at once, if the base stays in its files.
    stream_window: Option<NonZeroU32>,
}

impl Decision {
    /// Chooses a plan of a report. `source` says where the costs come from, and `files` are for the folder of
    /// the run.
    pub(crate) fn new(
        report: &PlanReport,
        settings: &Settings,
        source: &str,
        mut files: Vec<(String, String)>,
    ) -> Self {
        let plan = simplest(report, settings.pipeline.microbatch_size);
        let choice = Choice::of(plan);
        if choice.name.is_none() {
            files.push((SCHEDULE.to_owned(), choice.csv.clone()));
        }
        Self { sentences: sentences(report, plan, source), choice, files }
    }

    /// Returns the decision with another file for a schedule without a name.
    pub(crate) fn with_schedule_in(mut self, file: &str) -> Self {
        for (name, _) in self.files.iter_mut().filter(|(name, _)| *name == self.choice.file) {
            file.clone_into(name);
        }
        file.clone_into(&mut self.choice.file);
        self
    }

    /// Puts the decision into the settings.
    pub(crate) fn apply(self, mut settings: Settings, model: &CutModel) -> Result<Chosen, Failure> {
        let Self { choice, sentences, files } = self;
        let schedule = parse_schedule(&choice.csv).map_err(|error| Failure::new(Exit::Bug, error))?;
        let pipeline = &mut settings.pipeline;
        pipeline.ranks = schedule.ranks();
        pipeline.stages_per_rank = choice.stages_per_rank;
        pipeline.schedule = match choice.name {
            Some(name) => ScheduleChoice::Named(name),
            None => ScheduleChoice::Csv(settings.run.out.join(choice.file)),
        };
        pipeline.microbatches = choice.microbatches;
        pipeline.microbatch_size = choice.microbatch_size;
        (pipeline.partition, pipeline.boundaries) = if choice.boundaries.is_empty() {
            (PartitionChoice::Even, None)
        } else {
            (PartitionChoice::Explicit, Some(choice.boundaries))
        };
        pipeline.layout = None;
        // A plan does not have the settings of generators.
        pipeline.generator = GeneratorSettings::default();
        pipeline.head_parts = choice.head_parts;
        pipeline.recompute = Recompute::of_stages(&choice.recompute);
        settings.mesh.data_parallel = choice.data_parallel;
        settings.run.planned_step_ms = plan_milliseconds(choice.step_s, settings.run.accumulate.get());
        let changes = choice.stream_window.is_some() && !model.streams();
        if let (Some(window), ModelSettings::From { streaming, .. }) =
            (choice.stream_window, &mut settings.model)
        {
            *streaming = Streaming { stream: Some(true), window: Some(window) };
        }
        let streaming = changes.then(|| read_model(&settings)).transpose()?;
        let model =
            streaming.as_ref().unwrap_or(model).with_parts(choice.head_parts).map_err(Failure::input)?;
        let scheduled = Scheduled { settings, source: ProgramSource::Schedule(schedule) };
        Ok(Chosen { scheduled, model, sentences, files })
    }
}

/// Returns the plan to run. Among the plans that are nearly as fast as the best, it is the one that differs
/// least from the configuration and has the fewest stages.
fn simplest(report: &PlanReport, microbatch_size: u32) -> &Plan {
    let best = &report.plans[0];
    // Of plans that read the base from its files, the first one reads the least.
    if best.stream.is_some() {
        return best;
    }
    let near = report.plans.iter().filter(|plan| plan.step_s <= best.step_s * (1.0 + NEAR));
    let simplest = near.min_by_key(|plan| {
        let is_other_size = plan.microbatch_rows != microbatch_size;
        (is_other_size, plan.recomputes(), plan.head_parts, !is_named(plan), plan.boundaries.len())
    });
    simplest.unwrap_or(best)
}

/// Says what was chosen and why.
fn sentences(report: &PlanReport, best: &Plan, source: &str) -> Vec<String> {
    let chosen = format!(
        "auto: {}: {:.1} ms a step, bubble {:.1}%, within {:.1}% of the best possible; {source}",
        title_of(best),
        best.step_s * 1e3,
        best.bubble_fraction * 100.0,
        (best.step_s / report.lower_bound_s.max(f64::MIN_POSITIVE) - 1.0).max(0.0) * 100.0
    );
    let other = report.plans.iter().find(|plan| plan.name != best.name);
    let next = other.map(|next| {
        let longer = (next.step_s / best.step_s - 1.0) * 100.0;
        let takes = |outcome: &&Outcome| matches!(outcome.result, OutcomeKind::Takes(_));
        let tried = report.outcomes.iter().filter(takes).count();
        let compared = if longer >= 0.0 {
            format!("takes {longer:.1}% longer")
        } else {
            format!("is {:.1}% faster, which is below the accuracy of the prediction", -longer)
        };
        format!("auto: the best other of {tried} schedules, {}, {compared}", title_of(next))
    });
    [Some(chosen), next].into_iter().flatten().collect()
}

impl Choice {
    fn of(plan: &Plan) -> Self {
        let layer = |&layer: &usize| u32::try_from(layer).unwrap_or(u32::MAX);
        Self {
            name: is_named(plan).then(|| plan.name.to_owned()),
            csv: print_schedule(&plan.schedule),
            file: SCHEDULE.to_owned(),
            stages_per_rank: stages_per_rank(plan.schedule.placement()),
            microbatches: plan.microbatches(),
            microbatch_size: plan.microbatch_rows,
            boundaries: plan.boundaries.iter().map(layer).collect(),
            recompute: plan.recompute.clone(),
            data_parallel: plan.mesh.data,
            head_parts: plan.head_parts,
            step_s: plan.step_s,
            stream_window: plan.stream.map(|stream| stream.window),
        }
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::mesh::Mesh;
    use pipewright_schedule::plan::{Collectives, PlanSettings};

    use super::*;
    use pipewright_run::training::identity::shared_settings;
    use pipewright_run::training::load::load_settings;
    use pipewright_run::training::prepare::prepare_settings;

    /// Returns the settings of the sample, with overrides.
    fn settings(set: &[&str]) -> Settings {
        let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
        load_settings(None, &set).expect("the sample").settings
    }

    /// Returns the settings with a schedule that has no name, and that schedule.
    fn planned(settings: Settings) -> (Chosen, String) {
        let choice = Choice {
            name: None,
            csv: "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n".to_owned(),
            file: SCHEDULE.to_owned(),
            stages_per_rank: 1,
            microbatches: 2,
            microbatch_size: 4,
            boundaries: vec![5],
            recompute: vec![Some(StageRecompute::WHOLE), None],
            data_parallel: 1,
            head_parts: 1,
            step_s: 0.25,
            stream_window: None,
        };
        let csv = choice.csv.clone();
        let decision = Decision { choice, sentences: Vec::new(), files: Vec::new() };
        let model = read_model(&settings).expect("the model of the sample");
        (decision.apply(settings, &model).expect("a schedule"), csv)
    }

    /// A schedule without a name is stored in the folder of the run, which may then be moved.
    #[test]
    fn a_searched_schedule_is_read_from_the_folder() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let out = format!("run.out={}", scratch.path().join("out").display());
        let (planned, csv) = planned(settings(&["pipeline.schedule=auto", &out]));
        let text = planned.scheduled.settings.to_toml();
        assert!(text.contains("schedule = \"plan.csv\""), "{text}");
        let moved = scratch.path().join("moved");
        std::fs::create_dir(&moved).expect("a folder");
        std::fs::write(moved.join("config.toml"), text).expect("a file");
        std::fs::write(moved.join(SCHEDULE), csv).expect("a file");
        let again = load_settings(Some(&moved.join("config.toml")), &[]).expect("the stored plan");
        let again = again.scheduled().expect("a schedule");
        let recompute = |scheduled: &Scheduled| scheduled.settings.pipeline.recompute.clone();
        assert_eq!(recompute(&again), recompute(&planned.scheduled));
        let [again, planned] = [again, planned.scheduled].map(|scheduled| {
            prepare_settings(scheduled, std::sync::Arc::new(planned.model.clone()))
                .expect("a sound plan")
                .program
        });
        assert_eq!(again.as_program(), planned.as_program());
    }

    /// The processes of a run may have different folders.
    #[test]
    fn a_searched_schedule_is_the_same_setting_in_every_folder() {
        let of = |out: &str| {
            shared_settings(&planned(settings(&["pipeline.schedule=auto", out])).0.scheduled.settings)
        };
        assert_eq!(of("run.out=/here/out"), of("run.out=/elsewhere/out"));
    }

    #[test]
    fn a_schedule_that_was_not_possible_is_not_counted() {
        let plan = |name, step_s| Plan {
            name,
            settings: PlanSettings::default(),
            schedule: parse_schedule("0F0,0B0\n").expect("a schedule"),
            head_parts: 1,
            boundaries: Vec::new(),
            machines: Vec::new(),
            batch_shares: Vec::new(),
            recompute: vec![None],
            mesh: Mesh::default(),

            collectives: Collectives::default(),
            microbatch_rows: 1,
            step_s,
            bubble_fraction: 0.0,
            peak_bytes: vec![0],
            stream: None,
        };
        let outcome = |name, result| Outcome { name, result, mesh: None, on_best_mesh_s: None };
        let report = PlanReport {
            machines: Vec::new(),
            plans: vec![plan("gpipe", 1.0), plan("1f1b", 2.0)],
            lower_bound_s: 1.0,
            outcomes: vec![
                outcome("gpipe", OutcomeKind::Takes(1.0)),
                outcome("1f1b", OutcomeKind::Takes(2.0)),
                outcome("hanayo", OutcomeKind::Refused("it needs two ranks".to_owned())),
            ],
            simulated: 2,
            stopped: false,
        };
        let said = sentences(&report, &report.plans[0], "by hand");
        assert!(said[1].starts_with("auto: the best other of 2 schedules, 1f1b: "), "{said:?}");
    }
}
