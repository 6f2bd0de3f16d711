//! Writes a plan for a cluster in the options of another system.
//!
//! The pipeline becomes a [`Plan`] of the schedule crate, which has the writers; [`MeshOptions`] have the rest.

use pipewright_schedule::emit::{
    Dispatch, Emission, EmitRequest, MeshOptions, NarrowProducts, PlanScope, RecomputedPart, Release,
    emit as emit_plan,
};
use pipewright_schedule::generate::{ScheduleSpec, find};
use pipewright_schedule::plan::{Collectives, Plan, PlanSettings, Refusal, System};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
use pipewright_schedule::{GenerateError, generate};

use crate::implementation::{Dispatcher, NumberFormat};
use crate::layout::{Layout, Precision, Recompute, Scores, ShardedState};
use crate::search::{ClusterPlan, Request};
use crate::systems::refusal;
use crate::unwritten::unwritten;
use pipewright_shapes::model::{Block, FeedForward, Mixer, Model};

/// Returns the files of a plan for a release of `system`. `folder` is where they are, which options name.
///
/// # Errors
/// When the system cannot run the plan, or its schedule does not exist in its size.
pub fn emit(
    system: System,
    release: Release,
    request: &Request,
    plan: &ClusterPlan,
    folder: &str,
) -> Result<Emission, Refusal> {
    if let Some(refusal) = refusal(system, &plan.layout, &request.model) {
        return Err(refusal);
    }
    if let Some(refusal) = unwritten(system, &plan.layout) {
        return Err(refusal);
    }
    let profile = profile_of(&request.model, plan.layout.sequence);
    let emit_request = EmitRequest {
        profile: &profile,
        precision: plan.layout.precision.outside_products().name(),
        scope: PlanScope::Cluster(mesh_options(&plan.layout, &request.model)),
        folder,
        release,
    };
    let pipeline = pipeline_of(plan).map_err(|error| Refusal::new(error.to_string()))?;
    emit_plan(system, &pipeline, &emit_request)
}

/// Returns the layers of a model by their kinds. Nothing is said about their costs, which files do not have.
pub(crate) fn profile_of(model: &Model, sequence: u32) -> Profile {
    let layer = |kind: String| LayerProfile { kind, count: 1, ..LayerProfile::default() };
    let blocks = model.blocks.iter().map(|block| kind_of(model, block));
    let kinds = ["embedding".to_owned()].into_iter().chain(blocks).chain(["head".to_owned()]);
    Profile {
        tokens: Some(sequence),
        link: LinkProfile::new(0.0, 1.0),
        layers: kinds.map(layer).collect(),
        ..Profile::default()
    }
}

/// Returns the kind of a block: `block`, unless the blocks of the model differ in it.
fn kind_of(model: &Model, block: &Block) -> String {
    let names = |block: &Block| {
        let mixer = match block.mixer {
            Mixer::Attention(_) => Some("attention"),
            Mixer::Latent(_) => Some("latent attention"),
            Mixer::Mamba2(_) => Some("Mamba-2"),
            Mixer::Delta(_) => Some("linear attention"),
            Mixer::None => None,
        };
        let feed_forward = match block.feed_forward {
            FeedForward::Dense(_) => Some("a dense feed-forward part"),
            FeedForward::Experts(_) | FeedForward::LatentExperts { .. } => Some("experts"),
            FeedForward::None => None,
        };
        [mixer, feed_forward].into_iter().flatten().collect::<Vec<_>>().join(" and ")
    };
    let own = names(block);
    if model.blocks.iter().all(|other| names(other) == own) { "block".to_owned() } else { own }
}

/// Returns a plan's pipeline: its schedule, its cut and its replicas.
fn pipeline_of(plan: &ClusterPlan) -> Result<Plan, GenerateError> {
    let layout = &plan.layout;
    let name = layout.schedule_name();
    let spec = ScheduleSpec {
        ranks: layout.pipeline,
        stages_per_rank: Some(layout.chunks),
        microbatches: layout.microbatches(),
        ..ScheduleSpec::default()
    };
    // The embedding is the first layer.
    let boundaries: Vec<usize> = plan.prediction.boundaries().into_iter().map(|block| block + 1).collect();
    Ok(Plan {
        name: find(name)?.name,
        settings: PlanSettings::default(),
        schedule: generate(name, &spec)?,
        head_parts: 1,
        recompute: vec![None; boundaries.len() + 1],
        boundaries,
        mesh: layout.mesh(),
        machines: Vec::new(),
        batch_shares: Vec::new(),
        collectives: Collectives::default(),
        microbatch_rows: layout.microbatch,
        step_s: plan.prediction.seconds,
        bubble_fraction: plan.shares.bubble,
        peak_bytes: plan.prediction.memory.iter().map(|memory| memory.total() as u64).collect(),
        stream: None,
    })
}

fn mesh_options(layout: &Layout, model: &Model) -> MeshOptions {
    MeshOptions {
        expert_tensor: model.has_experts().then_some(layout.expert_tensor),
        dispatch: (model.has_experts() && layout.expert > 1).then_some(
            match layout.implementation.dispatcher {
                Dispatcher::AllToAll => Dispatch::AllToAll,
                Dispatcher::DeepEp => Dispatch::DeepEp,
                Dispatcher::HybridEp => Dispatch::HybridEp,
            },
        ),
        overlaps_experts: layout.overlaps_experts(model),
        shard_groups: layout.shard_groups(),
        bf16_gradients: layout.state_formats().gradients == NumberFormat::Bf16,
        recomputed_blocks: layout.recomputed_blocks(),
        offloaded_blocks: layout.offload_layers,
        sequence_parallel: layout.sequence_parallel,
        sharded: if layout.replicas() == 1 { ShardedState::Nothing } else { layout.sharding },
        recompute: match (layout.recompute, layout.scores) {
            (Recompute::None, _) => RecomputedPart::Nothing,
            (Recompute::Selective, Scores::Unfused) => RecomputedPart::Scores,
            (Recompute::Selective, Scores::Fused) => RecomputedPart::Elementwise,
            (Recompute::Modules(modules), _) => RecomputedPart::Modules(modules),
            (Recompute::Full, _) => RecomputedPart::Block,
        },
        predictors: model.predictors,
        narrow: match layout.precision {
            Precision::Fp8 => Some(NarrowProducts::Fp8),
            Precision::Mxfp8 => Some(NarrowProducts::Mxfp8),
            Precision::Nvfp4 => Some(NarrowProducts::Nvfp4),
            Precision::Half | Precision::Single => None,
        },
    }
}
