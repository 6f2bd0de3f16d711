//! The parts of a plan's request that follow from the settings of a run.

use pipewright_models::CutModel;
use pipewright_models::training_memory::add_streamed;
use pipewright_planning::failure::Failure;
use pipewright_run::settings::Settings;
use pipewright_run::settings::optimizer::OptimizerName;
use pipewright_run::training::model::streamable;
use pipewright_run::training::optimizer::state_rule;
use pipewright_run::training::prepare::require_whole_layers;
use pipewright_schedule::plan::{PlanRequest, TrainingState};
use pipewright_schedule::profile::Profile;

/// Returns the request for all plans of a run with its settings, without limits of memory. Costs of tensor-parallel
/// ranks are assumed, and only plans that the user asks for rely on them.
pub(crate) fn request_of(settings: &Settings, model: &CutModel) -> Result<PlanRequest, Failure> {
    require_whole_layers(&settings.mesh)?;
    Ok(PlanRequest {
        ranks: settings.mesh.ranks(settings.pipeline.ranks),
        microbatches: settings.pipeline.microbatches,
        microbatch_rows: settings.pipeline.microbatch_size,
        tensor_parallel: Some(1),
        state: training_state(settings, model)?,
        plans: usize::MAX,
        always_streams: model.streams(),
        ..PlanRequest::default()
    })
}

/// Writes into a profile what its layers read if a plan leaves the base in its files.
pub(crate) fn add_reads(profile: &mut Profile, settings: &Settings, model: &CutModel) -> Result<(), Failure> {
    match streamable(settings, model)? {
        Some(streamed) => add_streamed(profile, &streamed, state_rule(settings)).map_err(Failure::input),
        None => Ok(()),
    }
}

/// Returns the bytes of training state per byte of parameters.
pub(crate) fn training_state(settings: &Settings, model: &CutModel) -> Result<TrainingState, Failure> {
    let mesh = &settings.mesh;
    let state = state_rule(settings).per_byte(model, mesh.data_parallel_mode, mesh.gathered_stages());
    let post_validation = settings.optimizer.post_validation;
    let is_delayed = settings.optimizer.delay > 0;
    let state = state.map(|state| TrainingState { post_validation, ..state });
    let state = state.map(|state| if is_delayed { state.delayed() } else { state });
    state.map_err(Failure::input)
}

/// Returns the numbers of parts that a plan for `ranks` tries: for a whole head that can be cut, 1, the
/// number of ranks, and twice that; otherwise none, which leaves the number of the profile. A head that the
/// optimizer updates as a whole is not cut.
pub(crate) fn tried_head_parts(
    settings: &Settings,
    model: &CutModel,
    profile: &Profile,
    ranks: u32,
) -> Vec<u32> {
    // The ranks of a node may become tensor ranks, which split the vocabulary themselves.
    let is_whole = matches!(settings.optimizer.name, OptimizerName::Adafactor | OptimizerName::AdamW8bit);
    if settings.pipeline.head_parts > 1 || profile.node.is_some() || is_whole {
        return Vec::new();
    }
    let can_be = |parts: &u32| model.with_parts(*parts).is_ok();
    [1, ranks, ranks.saturating_mul(2)].into_iter().filter(can_be).collect()
}
