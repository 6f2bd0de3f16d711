//! `pipeline.schedule = "auto"`: measures the layers of a run, plans it, and puts the plan into the settings.
//!
//! The settings that are written into the folder of the run are the plan's, so a run that resumes does not
//! plan again.

use std::time::{Duration, Instant};

use pipewright_models::CutModel;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::plans::print::refused;
use pipewright_run::settings::Settings;
use pipewright_run::training::memory::memory_of_rank;
use pipewright_run::training::model::described;
use pipewright_run::training::optimizer::state_rule;
use pipewright_run::training::process_group::ProcessGroup;
use pipewright_schedule::analytic::estimate;
use pipewright_schedule::plan::{PlanRequest, plan};
use pipewright_schedule::profile::Profile;

use crate::planning::decision::{Chosen, Decision};
use crate::planning::measure::{measure_run, workload};
use crate::planning::profile_cache::{profile_file, read_profile};
use crate::planning::profile_text::profile_text;
use crate::planning::rates::{assumed_link, assumed_rates};
use crate::planning::request::{add_reads, request_of, tried_head_parts};

/// The time for measuring, and the longest search.
const MEASURING: Duration = Duration::from_secs(6);
const SEARCH: Duration = Duration::from_secs(5);

/// Measures the run, or reads its profile, and plans it. All processes call it with the same settings.
pub(crate) fn choose(
    settings: Settings,
    model: &CutModel,
    processes: &mut ProcessGroup,
) -> Result<Chosen, Failure> {
    processes.join_for(settings.pipeline.transport)?;
    let file = profile_file(&settings, model);
    let path = settings.run.out.join(&file);
    let known = if processes.is_leader() { read_profile(&settings, model, &path) } else { None };
    // Every process measures, or none.
    let is_known = processes.share(known.is_some().to_string())? == "true";
    let start = Instant::now();
    let (profile, source, files) = match known.filter(|_| is_known) {
        Some((profile, text)) => (profile, format!("measured before ({file})"), vec![(file, text)]),
        None if is_known => (Profile::default(), String::new(), Vec::new()),
        None => {
            processes.note("auto: measuring the layers and links for a few seconds");
            let measurement = measure_run(&settings, model, processes, MEASURING)?;
            let text = profile_text(&measurement.profile, &measurement.measured, &measurement.layers);
            let seconds = start.elapsed().as_secs_f64();
            (measurement.profile, format!("measured in {seconds:.1} s"), vec![(file, text)])
        }
    };
    let decided = if processes.is_leader() {
        decide(&settings, model, profile, &source, files).map(|decision| {
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
    let decision: Decision = serde_json::from_str(&shared).map_err(|error| Failure::new(Exit::Bug, error))?;
    decision.apply(settings, model)
}

/// Plans a run for estimated costs, without measuring.
pub(crate) fn choose_without_profile(settings: Settings, model: &CutModel) -> Result<Chosen, Failure> {
    let rates = assumed_rates(&settings);
    let profile = assumed_profile(&settings, model);
    let source = format!(
        "for assumed costs: {:.0} GFLOP/s and {:.0} GB/s a rank; `train` measures first",
        rates.flops_per_s * 1e-9,
        rates.bytes_per_s * 1e-9
    );
    decide(&settings, model, profile, &source, Vec::new())?.apply(settings, model)
}

/// Returns the profile of a run at assumed rates.
pub(crate) fn assumed_profile(settings: &Settings, model: &CutModel) -> Profile {
    let layers = described(settings, model);
    estimate(&workload(settings, &layers), assumed_rates(settings), assumed_link(settings))
}

/// Plans a run at the costs of its profile.
fn decide(
    settings: &Settings,
    model: &CutModel,
    mut profile: Profile,
    source: &str,
    files: Vec<(String, String)>,
) -> Result<Decision, Failure> {
    // A plan for unlike ranks may leave some out, and the run has started with all of them.
    (profile.ranks, profile.pairs) = (Vec::new(), Vec::new());
    let request = request_of(settings, model)?;
    let request = PlanRequest {
        head_parts: tried_head_parts(settings, model, &profile, request.ranks),
        memory: memory_of_rank(settings),
        data_parallel: settings.mesh.is_sharded().then_some(settings.mesh.data_parallel),
        ..request
    };
    let start = Instant::now();
    state_rule(settings).add_to(&mut profile, model).map_err(Failure::input)?;
    add_reads(&mut profile, settings, model)?;
    let report = plan(&profile, &request, &mut || start.elapsed() < SEARCH).map_err(refused)?;
    Ok(Decision::new(&report, settings, source, files))
}
