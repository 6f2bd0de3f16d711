//! `pipeline.schedule = "auto"`: measures the layers of a run, plans it, and puts the plan into the settings.
//!
//! The profile is kept in the folder of the run, under a name with a hash of everything that its figures depend on. A
//! run in the same folder reads it instead of measuring again. The settings that are written into the folder are those of
//! the plan, so a run that resumes does not plan again.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::{Duration, Instant};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};
use pipewright_schedule::analytic::estimate;
use pipewright_schedule::csv::{parse_schedule, print_schedule};
use pipewright_schedule::plan::{Outcome, OutcomeKind, Plan, PlanReport, PlanRequest, plan};
use pipewright_schedule::profile::Profile;
use pipewright_schedule::{Recompute, StageIndex};
use serde::{Deserialize, Serialize};

use crate::config::pipeline::{FoundSchedule, PartitionChoice, ScheduleChoice};
use crate::config::profile::read_for;
use crate::config::{Loaded, Settings};
use crate::display::say;
use crate::failure::{Exit, Failure};
use crate::planning::config::{is_named, plan_milliseconds};
use crate::planning::head_parts::tried_head_parts;
use crate::planning::measure::{measure_run, memory_of_rank, profiled_run, workload};
use crate::planning::print::{refused, stages_per_rank, title_of};
use crate::planning::profile_text::profile_text;
use crate::planning::rates::{assumed_link, assumed_rates, device_name};
use crate::training::layer_sizes::layers_of;
use crate::training::memory::{training_state, with_optimizer_state};
use crate::training::prepare::{read_model, require_whole_layers};
use crate::training::process_group::ProcessGroup;

/// The file of a schedule without a name, in the folder of the run.
const SCHEDULE: &str = "plan.csv";
/// The share by which a plan may be slower than the best one if it is simpler.
const NEAR: f64 = 0.01;
/// The time for measuring, and the longest search.
const MEASURING: Duration = Duration::from_secs(6);
const SEARCH: Duration = Duration::from_secs(5);

/// The settings of a run whose schedule is chosen.
pub(crate) struct Chosen {
    pub(crate) loaded: Loaded,
    /// What was chosen and why; nothing if the settings name a schedule.
    pub(crate) sentences: Vec<String>,
    /// Files for the folder of the run, each with its name and text.
    pub(crate) files: Vec<(String, String)>,
}

/// What the leader decides for all processes.
#[derive(Serialize, Deserialize)]
struct Decision {
    choice: Choice,
    sentences: Vec<String>,
    files: Vec<(String, String)>,
}

/// The parts of a plan that become settings.
#[derive(Serialize, Deserialize)]
struct Choice {
    /// The name of the schedule; `None` if it has no name, or settings that a configuration does not have.
    name: Option<String>,
    /// What each rank computes.
    csv: String,
    stages_per_rank: u32,
    microbatches: u32,
    microbatch_size: u32,
    boundaries: Vec<u32>,
    /// The stages that recompute.
    recompute: Vec<u32>,
    data_parallel: u32,
    /// The parts of the output head.
    head_parts: u32,
    /// The predicted time of a step in seconds.
    step_s: f64,
}

impl Chosen {
    /// Keeps settings that need no plan.
    pub(crate) fn named(loaded: Loaded) -> Self {
        Self { loaded, sentences: Vec::new(), files: Vec::new() }
    }
}

/// Measures the run, or reads its profile, and plans it. All processes call it with the same settings.
pub(crate) fn choose(loaded: Loaded, processes: &mut ProcessGroup) -> Result<Chosen, Failure> {
    let settings = loaded.settings;
    processes.join_for(settings.pipeline.transport)?;
    let file = processes.all_succeed(profile_file(&settings), Exit::WrongInput)?;
    let known =
        if processes.is_leader() { read_profile(&settings, &settings.run.out.join(&file)) } else { None };
    // Every process measures, or none.
    let is_known = processes.share(known.is_some().to_string())? == "true";
    let start = Instant::now();
    let (profile, source, files) = match known.filter(|_| is_known) {
        Some((profile, text)) => (profile, format!("measured before ({file})"), vec![(file, text)]),
        None if is_known => (Profile::default(), String::new(), Vec::new()),
        None => {
            if processes.is_leader() {
                say("auto: measuring the layers and links for a few seconds");
            }
            let measurement = measure_run(&settings, processes, MEASURING)?;
            let text = profile_text(&measurement.profile, &measurement.measured, &measurement.layers);
            let seconds = start.elapsed().as_secs_f64();
            (measurement.profile, format!("measured in {seconds:.1} s"), vec![(file, text)])
        }
    };
    let decided = if processes.is_leader() {
        decide(&settings, &profile, &source, files).map(|decision| {
            serde_json::to_string(&decision).expect("texts and numbers can be written as JSON")
        })
    } else {
        Ok(String::new())
    };
    // If there is no plan, the others get an empty text.
    let shared = processes.share(decided.as_deref().unwrap_or_default().to_owned())?;
    decided?;
    if shared.is_empty() {
        return Err(Failure::already_reported(Exit::WrongInput));
    }
    let decision = serde_json::from_str(&shared).map_err(|error| Failure::new(Exit::Bug, error))?;
    apply(settings, decision)
}

/// Plans a run for estimated costs, without measuring.
pub(crate) fn choose_without_profile(loaded: Loaded) -> Result<Chosen, Failure> {
    let settings = loaded.settings;
    let layers = layers_of(&settings, &read_model(&settings)?);
    let (rates, link) = (assumed_rates(&settings), assumed_link(&settings));
    let profile = estimate(&workload(&settings, &layers), rates, link);
    let source = format!(
        "for assumed costs: {:.0} GFLOP/s and {:.0} GB/s a rank; `train` measures first",
        rates.flops_per_s * 1e-9,
        rates.bytes_per_s * 1e-9
    );
    let decision = decide(&settings, &profile, &source, Vec::new())?;
    apply(settings, decision)
}

/// Plans a run at the costs of its profile.
fn decide(
    settings: &Settings,
    profile: &Profile,
    source: &str,
    mut files: Vec<(String, String)>,
) -> Result<Decision, Failure> {
    require_whole_layers(&settings.mesh)?;
    let ranks = settings.mesh.ranks(settings.pipeline.ranks);
    let request = PlanRequest {
        ranks,
        head_parts: tried_head_parts(settings, profile, ranks)?,
        microbatches: settings.pipeline.microbatches,
        microbatch_rows: settings.pipeline.microbatch_size,
        memory: memory_of_rank(settings),
        data_parallel: settings.mesh.is_sharded().then_some(settings.mesh.data_parallel),
        // The cost of tensor-parallel ranks is assumed, and only plans that the user asks for rely on it.
        tensor_parallel: Some(1),
        state: training_state(settings, read_model(settings)?.model())?,
        plans: usize::MAX,
        ..PlanRequest::default()
    };
    let start = Instant::now();
    let profile = with_optimizer_state(profile.clone(), settings)?;
    let report = plan(&profile, &request, &mut || start.elapsed() < SEARCH).map_err(refused)?;
    let chosen = chosen(&report, settings.pipeline.microbatch_size);
    let choice = Choice::of(chosen);
    if choice.name.is_none() {
        files.push((SCHEDULE.to_owned(), choice.csv.clone()));
    }
    Ok(Decision { sentences: sentences(&report, chosen, source), choice, files })
}

/// Returns the plan to run: of those that are nearly as fast as the best, the one that differs least from what the user
/// wrote and has the fewest stages.
fn chosen(report: &PlanReport, microbatch_size: u32) -> &Plan {
    let best = &report.plans[0];
    let near = report.plans.iter().filter(|plan| plan.step_s <= best.step_s * (1.0 + NEAR));
    let simplest = near.min_by_key(|plan| {
        let is_other_size = plan.microbatch_rows != microbatch_size;
        (
            is_other_size,
            plan.recompute.contains(&true),
            plan.head_parts,
            !is_named(plan),
            plan.boundaries.len(),
        )
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
        let recomputing = (0..).zip(&plan.recompute).filter(|(_, recomputes)| **recomputes);
        Self {
            name: is_named(plan).then(|| plan.name.to_owned()),
            csv: print_schedule(&plan.schedule),
            stages_per_rank: stages_per_rank(plan),
            microbatches: plan.microbatches(),
            microbatch_size: plan.microbatch_rows,
            boundaries: plan.boundaries.iter().map(layer).collect(),
            recompute: recomputing.map(|(stage, _)| stage).collect(),
            data_parallel: plan.data_parallel,
            head_parts: plan.head_parts,
            step_s: plan.step_s,
        }
    }
}

/// Puts a decision into the settings.
fn apply(mut settings: Settings, decision: Decision) -> Result<Chosen, Failure> {
    let Decision { choice, sentences, files } = decision;
    let schedule = parse_schedule(&choice.csv).map_err(|error| Failure::new(Exit::Bug, error))?;
    let pipeline = &mut settings.pipeline;
    pipeline.ranks = schedule.ranks();
    pipeline.stages_per_rank = choice.stages_per_rank;
    pipeline.schedule = match choice.name {
        Some(name) => ScheduleChoice::Named(name),
        None => ScheduleChoice::Csv(settings.run.out.join(SCHEDULE)),
    };
    pipeline.microbatches = choice.microbatches;
    pipeline.microbatch_size = choice.microbatch_size;
    (pipeline.partition, pipeline.boundaries) = if choice.boundaries.is_empty() {
        (PartitionChoice::Even, None)
    } else {
        (PartitionChoice::Explicit, Some(choice.boundaries))
    };
    pipeline.layout = None;
    pipeline.head_parts = choice.head_parts;
    pipeline.recompute = if choice.recompute.is_empty() {
        Recompute::None
    } else {
        Recompute::Stages(choice.recompute.into_iter().map(StageIndex::new).collect())
    };
    settings.mesh.data_parallel = choice.data_parallel;
    settings.run.planned_step_ms = plan_milliseconds(choice.step_s, Some(&settings));
    let loaded = Loaded { settings, schedule: FoundSchedule::Generated(schedule), notes: Vec::new() };
    Ok(Chosen { loaded, sentences, files })
}

/// Returns the name of the profile's file, with a hash of the model, the device, and the settings that change the times
/// of a layer.
fn profile_file(settings: &Settings) -> Result<String, Failure> {
    const KEYS: [&str; 14] = [
        "data.bos_id",
        "data.packed",
        "data.restart_positions",
        "data.seq_len",
        "data.side",
        "pipeline.microbatch_size",
        "pipeline.threads_per_rank",
        "pipeline.transport",
        "pipeline.head_parts",
        "optimizer.momentum",
        "optimizer.name",
        "run.device",
        "run.devices",
        "run.precision",
    ];
    let mut hasher = DefaultHasher::new();
    read_model(settings)?.model().to_json().to_string().hash(&mut hasher);
    let by_key = settings.by_key();
    KEYS.map(|key| by_key.get(key)).hash(&mut hasher);
    settings.mesh.ranks(settings.pipeline.ranks).hash(&mut hasher);
    device_name(settings).hash(&mut hasher);
    (env!("CARGO_PKG_VERSION"), cfg!(debug_assertions)).hash(&mut hasher);
    Ok(format!("profile-{:016x}.toml", hasher.finish()))
}

/// Reads a profile that an earlier run has left, with its text. A profile that cannot be used is measured again.
fn read_profile(settings: &Settings, file: &Path) -> Option<(Profile, String)> {
    let text = read_regular_text(file, SMALL_TEXT).ok()?;
    let layers = layers_of(settings, &read_model(settings).ok()?);
    let run = profiled_run(settings, workload(settings, &layers));
    Some((read_for(file, &run).ok()?, text))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use pipewright_schedule::plan::{Collectives, MeshOrder, PlanSettings};

    use super::*;
    use crate::training::arguments::load_settings;
    use crate::training::prepare::{prepare_settings, shared_settings};

    /// Returns the settings of the sample, with overrides.
    fn settings(set: &[&str]) -> Settings {
        let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
        load_settings(None, &set).expect("the sample").settings
    }

    /// Returns the settings with a schedule that has no name, and that schedule.
    fn planned(settings: Settings) -> (Loaded, String) {
        let choice = Choice {
            name: None,
            csv: "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n".to_owned(),
            stages_per_rank: 1,
            microbatches: 2,
            microbatch_size: 4,
            boundaries: vec![5],
            recompute: vec![0],
            data_parallel: 1,
            head_parts: 1,
            step_s: 0.25,
        };
        let csv = choice.csv.clone();
        let decision = Decision { choice, sentences: Vec::new(), files: Vec::new() };
        (apply(settings, decision).expect("a schedule").loaded, csv)
    }

    /// A schedule without a name is stored in the folder of the run, which may then be moved.
    #[test]
    fn a_searched_schedule_is_read_from_the_folder() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let out = format!("run.out={}", scratch.path().join("out").display());
        let (planned, csv) = planned(settings(&["pipeline.schedule=auto", &out]));
        let text = planned.settings.to_toml();
        assert!(text.contains("schedule = \"plan.csv\""), "{text}");
        let moved = scratch.path().join("moved");
        std::fs::create_dir(&moved).expect("a folder");
        std::fs::write(moved.join("config.toml"), text).expect("a file");
        std::fs::write(moved.join(SCHEDULE), csv).expect("a file");
        let again = load_settings(Some(&moved.join("config.toml")), &[]).expect("the stored plan");
        assert_eq!(again.settings.pipeline.recompute, planned.settings.pipeline.recompute);
        let [again, planned] =
            [again, planned].map(|loaded| prepare_settings(loaded).expect("a sound plan").program);
        assert_eq!(again.as_program(), planned.as_program());
    }

    /// The processes of a run may have different folders.
    #[test]
    fn a_searched_schedule_is_the_same_setting_in_every_folder() {
        let of = |out: &str| shared_settings(&planned(settings(&["pipeline.schedule=auto", out])).0.settings);
        assert_eq!(of("run.out=/here/out"), of("run.out=/elsewhere/out"));
    }

    #[test]
    fn a_profile_is_of_the_settings_that_change_its_figures() {
        let of = |set: &[&str]| profile_file(&settings(set)).expect("the model of the sample");
        let plain = of(&[]);
        assert_eq!(of(&["run.seed=7", "run.steps=5"]), plain);
        let documents = of(&["data.bos_id=1"]);
        let packed = of(&["data.bos_id=1", "data.packed=true"]);
        let kept = of(&["data.bos_id=1", "data.packed=true", "data.restart_positions=true"]);
        let side = of(&["data.side=side.safetensors"]);
        let half = of(&["run.precision=bf16"]);
        let names = [plain, documents, packed, kept, side, half];
        let different: HashSet<&String> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
    }

    #[test]
    fn a_schedule_that_was_not_possible_is_not_counted() {
        let plan = |name, step_s| Plan {
            name,
            settings: PlanSettings::default(),
            schedule: parse_schedule("0F0,0B0\n").expect("a schedule"),
            head_parts: 1,
            boundaries: Vec::new(),
            recompute: vec![false],
            data_parallel: 1,
            tensor_parallel: 1,
            mesh_order: MeshOrder::default(),
            collectives: Collectives::default(),
            microbatch_rows: 1,
            step_s,
            bubble_fraction: 0.0,
            peak_bytes: vec![0],
        };
        let outcome = |name, result| Outcome { name, result, mesh: None, on_best_mesh_s: None };
        let report = PlanReport {
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
