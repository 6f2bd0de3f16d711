//! What the systems that execute plans can run of a layout.
//!
//! - torchtitan 0.3.0 (`distributed/parallel_dims.py`, `distributed/fsdp.py`) runs any table of computations with one
//!   chunk or several in a loop, or two in a V. Replicas divide parameters, and keep the gathered ones for a step or
//!   not, or divide nothing; it has no division of the optimizer's state alone. Ranks of a sequence always divide
//!   parameters. Experts are whole on a rank, and divided among the ranks of all tensor groups, sequences and
//!   replicas that divide parameters; undivided ones are divided by the tensor group.
//! - Megatron Core 0.16.1 (`training/arguments.py`, `core/model_parallel_config.py`) runs 1F1B and interleaved 1F1B.
//!   Replicas of a pipeline divide the optimizer's state or nothing; its FSDP is for one stage here, because its
//!   documentation does not name pipelines. Divided experts with a tensor group need sequence parallelism.
//! - DeepSpeed 0.19.8 (`runtime/pipe/engine.py`) runs 1F1B. Replicas divide the optimizer's state or nothing. It does
//!   not divide sequences.

use pipewright_schedule::generate::{StageRule, find};
use pipewright_schedule::plan::{Refusal, System};
use thiserror::Error;

use crate::layout::{Layout, Recompute, Scores, Sharding};
use crate::model::Model;

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
    /// The ranks of a sequence take two pieces each, and these do not divide it.
    #[error(
        "{system} divides each sequence into two pieces per rank, and {pieces} pieces do not divide {sequence} tokens"
    )]
    Sequence {
        /// The system.
        system: System,
        /// The pieces.
        pieces: u64,
        /// The tokens of a row.
        sequence: u32,
    },
    /// Replicas divide other tensors.
    #[error("{system} has no such replicas, which divide {}; it has {}", tensors(*.sharding), divisions(*.system))]
    Sharding {
        /// The system.
        system: System,
        /// The tensors that the layout divides.
        sharding: Sharding,
    },
    /// The ranks of a sequence divide parameters, and the layout has whole ones.
    #[error("torchtitan's ranks of a sequence divide the parameters, and in this plan each has all of them")]
    WholeParameters,
    /// Blocks are recomputed in another way.
    #[error(
        "{system} does not recompute the elementwise operations and every second product of a block alone"
    )]
    Recompute {
        /// The system.
        system: System,
    },
    /// Experts are divided in another way.
    #[error(
        "torchtitan divides experts among all ranks of a stage that divide parameters, whole ones if there are several \
         groups, and this plan divides them otherwise"
    )]
    Experts,
    /// A tensor group with divided experts does not divide the sequence.
    #[error(
        "Megatron needs sequence parallelism in tensor groups if experts are divided, and this plan has none"
    )]
    SequenceParallel,
    /// The head of a pipeline uses the table of the embedding.
    #[error("torchtitan's pipelines have no head that uses the table of the embedding, as this model has")]
    Tied,
}

pipewright_schedule::message_as_debug!(LayoutRefusal);

/// Returns why a system cannot run a layout of a model; `None` if it can.
pub fn refusal(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    let refusals = [pipeline, context, sharding, recompute, experts, ends];
    refusals.into_iter().find_map(|refusal| refusal(system, layout, model))
}

fn pipeline(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let (name, chunks) = (layout.schedule_name(), layout.chunks);
    let is_plain = layout.schedule.is_none() || matches!(name, "1f1b" | "interleaved1f1b");
    let other = match system {
        System::Torchtitan => {
            let rule = find(name).map(|generator| generator.stages);
            let is_placed = match rule {
                Ok(StageRule::Vs) => chunks == 2,
                Ok(_) => true,
                Err(_) => false,
            };
            (!is_placed).then_some(Refusal::Placement)
        }
        System::Megatron if !is_plain => Some(Refusal::Schedule { system }),
        // Its groups have at least as many microbatches as there are ranks.
        System::Megatron => (chunks > 1 && layout.microbatches() < layout.pipeline).then_some(Refusal::Group),
        System::Deepspeed => (!is_plain || chunks > 1).then_some(Refusal::Schedule { system }),
    };
    other.map(LayoutRefusal::from)
}

fn context(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let &Layout { context, sequence, .. } = layout;
    if context == 1 {
        return None;
    }
    if system == System::Deepspeed {
        return Some(LayoutRefusal::Context { system });
    }
    let pieces = 2 * u64::from(context);
    let divides = u64::from(sequence).is_multiple_of(pieces);
    (!divides).then_some(LayoutRefusal::Sequence { system, pieces, sequence })
}

fn sharding(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let &Layout { sharding, pipeline, context, .. } = layout;
    if layout.replicas() == 1 {
        return None;
    }
    let has_it = match (system, sharding) {
        (System::Torchtitan, Sharding::Replicated) if context > 1 => {
            return Some(LayoutRefusal::WholeParameters);
        }
        (System::Torchtitan, Sharding::Optimizer) => false,
        (System::Megatron, Sharding::Gradients | Sharding::Parameters) => pipeline == 1,
        (System::Deepspeed, Sharding::Gradients | Sharding::Parameters) => false,
        _ => true,
    };
    (!has_it).then_some(LayoutRefusal::Sharding { system, sharding })
}

fn recompute(system: System, layout: &Layout, _model: &Model) -> Option<LayoutRefusal> {
    let is_selective = layout.recompute == Recompute::Selective;
    let has_it = match system {
        System::Torchtitan => true,
        // It recomputes the scores of attention, which fused attention does not keep.
        System::Megatron => layout.scores == Scores::Unfused,
        System::Deepspeed => false,
    };
    (is_selective && !has_it).then_some(LayoutRefusal::Recompute { system })
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
            let needs = expert > 1 && tensor > 1 && !layout.sequence_parallel;
            needs.then_some(LayoutRefusal::SequenceParallel)
        }
        System::Deepspeed => None,
    }
}

fn ends(system: System, layout: &Layout, model: &Model) -> Option<LayoutRefusal> {
    (system == System::Torchtitan && model.tied && layout.pipeline > 1).then_some(LayoutRefusal::Tied)
}

fn tensors(sharding: Sharding) -> &'static str {
    match sharding {
        Sharding::Replicated => "nothing",
        Sharding::Optimizer => "only the state of the optimizer",
        Sharding::Gradients => "gradients and the state of the optimizer",
        Sharding::Parameters => "parameters, gradients and the state of the optimizer",
    }
}

fn divisions(system: System) -> &'static str {
    match system {
        System::Torchtitan => "replicas that divide nothing, or parameters with all that belongs to them",
        System::Megatron => {
            "replicas that divide nothing or the state of the optimizer, and without a pipeline also gradients and parameters"
        }
        System::Deepspeed => "replicas that divide nothing or the state of the optimizer",
    }
}
