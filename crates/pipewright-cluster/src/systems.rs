//! What the systems that execute plans can run of a layout.
//!
//! - torchtitan 0.3.0 (`distributed/parallel_dims.py`, `distributed/fsdp.py`) runs any table of computations
//!   with one chunk or several in a loop, or two in a V. Replicas shard parameters or nothing. In a pipeline,
//!   PyTorch's stages keep whole gradients until the end of a step. Without one, the parameters may stay
//!   gathered until the backward of a microbatch ends, so with one microbatch only the gradients and the
//!   optimizer's state are sharded. Ranks of a sequence always shard parameters. Experts are whole on a rank,
//!   and divided among the ranks of all tensor groups, sequences and replicas that shard parameters;
//!   undivided ones are divided by the tensor group.
//! - Megatron Core 0.16.1 (`training/arguments.py`, `core/model_parallel_config.py`) runs 1F1B and
//!   interleaved 1F1B. Replicas of a pipeline shard the optimizer's state or nothing; its FSDP is for one
//!   stage here, because its documentation does not name pipelines. Experts with a tensor group need sequence
//!   parallelism. Models with Mamba-2 (`core/ssm/mamba_block.py`) do not read the layout of a pipeline.
//! - DeepSpeed 0.19.8 (`runtime/pipe/engine.py`) runs 1F1B. Replicas shard the optimizer's state or nothing.
//!   It does not divide sequences.

use pipewright_schedule::generate::{StageRule, find};
use pipewright_schedule::plan::{PlacedSchedule, Refusal, System};
use pipewright_schedule::words::counted;
use thiserror::Error;

use crate::layout::{Layout, Recompute, Scores, Sharding};
use pipewright_shapes::model::{Mixer, Model};

/// The reason why a system cannot run a layout.
#[derive(Clone, Copy, PartialEq, Eq, Error)]
pub enum LayoutRefusal {
    /// It cannot run the pipeline.
    #[error(transparent)]
    Pipeline(#[from] Refusal),
    /// It does not divide sequences.
    #[error("{system}'s pipelines do not divide sequences among ranks, and this plan does")]
    Context {
        /// The system.
        system: System,
    },
    /// The pieces of a sequence that ranks take do not divide it.
    #[error(
        "{system} divides each sequence into {pieces} pieces for its ranks, and {pieces} pieces do not divide {sequence} tokens"
    )]
    Sequence {
        /// The system.
        system: System,
        /// The pieces.
        pieces: u64,
        /// The tokens of a row.
        sequence: u32,
    },
    /// The ranks of a tensor group do not divide the heads of keys and values.
    #[error(
        "torchtitan divides {heads} of keys and values among the ranks of a tensor group, and {tensor} ranks do not divide them",
        heads = counted(*.heads, "head")
    )]
    KeyValueHeads {
        /// The heads of keys and values.
        heads: u64,
        /// The ranks of a tensor group.
        tensor: u32,
    },
    /// Replicas shard other tensors.
    #[error("{system} does not shard {}; it can shard {}", refused_tensors(*.system, *.sharding, *.in_pipeline), tensors(*.system))]
    Sharding {
        /// The system.
        system: System,
        /// The tensors that the layout shards.
        sharding: Sharding,
        /// Whether the layout has a pipeline.
        in_pipeline: bool,
    },
    /// The ranks of a sequence shard parameters, and the layout has whole ones.
    #[error("torchtitan's ranks of a sequence shard the parameters, and in this plan each has all of them")]
    WholeParameters,
    /// Blocks are recomputed in another way.
    #[error(
        "{system} does not recompute the elementwise operations and every second product of a block alone"
    )]
    Recompute {
        /// The system.
        system: System,
    },
    /// The scores of attention are recomputed.
    #[error("{system} does not recompute the scores of attention alone")]
    Scores {
        /// The system.
        system: System,
    },
    /// Experts are divided in another way.
    #[error(
        "torchtitan divides experts among all ranks of a stage that shard parameters, whole ones if there are several \
         groups, and this plan divides them otherwise"
    )]
    Experts,
    /// A tensor group of a model with experts does not divide the sequence.
    #[error(
        "Megatron needs sequence parallelism in tensor groups if the model has experts, and this plan has none"
    )]
    SequenceParallel,
    /// The head of a pipeline uses the table of the embedding.
    #[error("torchtitan's pipelines have no head that uses the table of the embedding, as this model has")]
    Tied,
    /// Blocks predict further tokens in a pipeline or with context parallelism.
    #[error(
        "torchtitan has no blocks that predict further tokens in pipelines or with context parallelism, as this plan has"
    )]
    Predictors,
    /// A pipeline has Mamba-2.
    #[error(
        "Megatron cuts models with Mamba-2 into stages of equal size by itself and does not interleave them; this plan has stages of \
         its own"
    )]
    Mamba,
}

pipewright_schedule::message_as_debug!(LayoutRefusal);

/// Returns why a system cannot run a layout of a model; `None` if it can.
pub fn refusal(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    first_refusal(system, layout, model).map(|(_, refusal)| refusal)
}

/// Returns why a system runs none of the layouts of a model: the refusal of the layout that passes the most
/// checks. `None` if the system runs one of the layouts, or there are none.
pub(crate) fn refusal_of_all(
    system: System,
    layouts: impl Iterator<Item = Layout>,
    model: &Model,
) -> Option<LayoutRefusal> {
    let mut furthest: Option<(usize, LayoutRefusal)> = None;
    for layout in layouts {
        let refused @ (passed, _) = first_refusal(system, &layout, model)?;
        if furthest.is_none_or(|(most, _)| passed > most) {
            furthest = Some(refused);
        }
    }
    furthest.map(|(_, refusal)| refusal)
}

/// Returns the first refusal of a layout, with the number of checks that it passes.
fn first_refusal(system: System, layout: &Layout, model: &Model) -> Option<(usize, LayoutRefusal)> {
    let checks = [pipeline, tied_embeddings, predictors, mamba, context, heads, sharding, recompute, experts];
    let refusals = checks.into_iter().enumerate();
    refusals.filter_map(|(index, check)| Some((index, check(system, layout, model)?))).next()
}

fn pipeline(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let name = layout.schedule_name();
    let is_loop_or_v = match find(name).map(|generator| generator.stages) {
        Ok(StageRule::V | StageRule::Vs) => layout.chunks == 2,
        Ok(StageRule::One | StageRule::Loops | StageRule::TwoLoops) => true,
        Err(_) => false,
    };
    let schedule = PlacedSchedule {
        name,
        group_size: None,
        ranks: layout.pipeline,
        stages: layout.stages(),
        is_loop_or_v,
        microbatches: layout.microbatches(),
    };
    system.schedule_refusal(&schedule).map(LayoutRefusal::from)
}

fn tied_embeddings(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    (system == System::Torchtitan && model.tied && layout.pipeline > 1).then_some(LayoutRefusal::Tied)
}

fn predictors(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    let refuses = system == System::Torchtitan && (layout.pipeline > 1 || layout.context > 1);
    (refuses && model.predictors > 0).then_some(LayoutRefusal::Predictors)
}

fn mamba(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    let refuses = system == System::Megatron && layout.stages() > 1;
    let has_mamba = || model.blocks.iter().any(|block| matches!(block.mixer, Mixer::Mamba2(_)));
    (refuses && has_mamba()).then_some(LayoutRefusal::Mamba)
}

fn context(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let &Layout { context, sequence, tensor, .. } = layout;
    if context > 1 && system == System::Deepspeed {
        return Some(LayoutRefusal::Context { system });
    }
    let of_context = if context > 1 { 2 * u64::from(context) } else { 1 };
    let of_tensor =
        if system == System::Torchtitan && layout.sequence_parallel { u64::from(tensor) } else { 1 };
    let pieces = of_context * of_tensor;
    let divides = u64::from(sequence).is_multiple_of(pieces);
    (!divides).then_some(LayoutRefusal::Sequence { system, pieces, sequence })
}

fn heads(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    let &Layout { tensor, .. } = layout;
    if system != System::Torchtitan || tensor == 1 {
        return None;
    }
    let heads = model.blocks.iter().find_map(|block| match block.mixer {
        Mixer::Attention(attention) if !attention.key_value_heads.is_multiple_of(u64::from(tensor)) => {
            Some(attention.key_value_heads)
        }
        _ => None,
    });
    heads.map(|heads| LayoutRefusal::KeyValueHeads { heads, tensor })
}

fn sharding(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let &Layout { sharding, pipeline, context, .. } = layout;
    if layout.replicas() == 1 {
        return None;
    }
    let in_pipeline = pipeline > 1;
    let has_it = match (system, sharding) {
        (System::Torchtitan, Sharding::Replicated) if context > 1 => {
            return Some(LayoutRefusal::WholeParameters);
        }
        (System::Torchtitan, Sharding::Optimizer) => false,
        // The next microbatch would gather the parameters again.
        (System::Torchtitan, Sharding::Gradients) => !in_pipeline && layout.microbatches() == 1,
        (System::Megatron, Sharding::Gradients | Sharding::Parameters) => !in_pipeline,
        (System::Deepspeed, Sharding::Gradients | Sharding::Parameters) => false,
        _ => true,
    };
    (!has_it).then_some(LayoutRefusal::Sharding { system, sharding, in_pipeline })
}

fn recompute(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    if layout.recompute != Recompute::Selective {
        return None;
    }
    // With unfused attention, the scores are recomputed, which fused attention does not keep.
    match (system, layout.scores) {
        (System::Torchtitan, Scores::Fused) | (System::Megatron, Scores::Unfused) => None,
        (_, Scores::Fused) => Some(LayoutRefusal::Recompute { system }),
        (_, Scores::Unfused) => Some(LayoutRefusal::Scores { system }),
    }
}

fn experts(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    if !model.has_experts() {
        return None;
    }
    let &Layout { expert, expert_tensor, tensor, context, .. } = layout;
    match system {
        System::Torchtitan => {
            let has_shards = matches!(layout.sharding, Sharding::Gradients | Sharding::Parameters);
            let shards = if has_shards { layout.data() } else { 1 };
            let ranks = u64::from(shards) * u64::from(context) * u64::from(tensor);
            let is_whole = expert_tensor == if expert > 1 { 1 } else { tensor };
            (!is_whole || !ranks.is_multiple_of(u64::from(expert))).then_some(LayoutRefusal::Experts)
        }
        System::Megatron => {
            let needs = tensor > 1 && !layout.sequence_parallel;
            needs.then_some(LayoutRefusal::SequenceParallel)
        }
        System::Deepspeed => None,
    }
}

/// Returns the tensors that a system does not shard.
fn refused_tensors(system: System, sharding: Sharding, in_pipeline: bool) -> &'static str {
    match (system, sharding) {
        (_, Sharding::Replicated) => "nothing",
        (_, Sharding::Optimizer) => "the optimizer's state alone",
        (System::Torchtitan, Sharding::Gradients) if !in_pipeline => {
            "gradients without the parameters over several microbatches"
        }
        (System::Torchtitan, Sharding::Gradients) => "gradients without the parameters in a pipeline",
        (System::Megatron | System::Deepspeed, Sharding::Gradients) => "gradients in a pipeline",
        (_, Sharding::Parameters) => "parameters in a pipeline",
    }
}

/// Returns the tensors that a system shards in every layout.
fn tensors(system: System) -> &'static str {
    match system {
        System::Torchtitan => "the parameters with their gradients and optimizer's state, or nothing",
        System::Megatron | System::Deepspeed => "the optimizer's state, or nothing",
    }
}
