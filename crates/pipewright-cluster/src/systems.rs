//! The parts that the systems that execute plans can run of a layout.
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
//!   parallelism, and as many groups of shards as the other parameters (`core/parallel_state.py`). Models with
//!   Mamba-2 (`core/ssm/mamba_block.py`) do not read the layout of a pipeline.
//! - DeepSpeed 0.19.8 (`runtime/pipe/engine.py`) runs 1F1B. Replicas shard the optimizer's state or nothing.
//!   It does not divide sequences.

use pipewright_schedule::generate::{StageRule, find};
use pipewright_schedule::plan::{PlacedSchedule, Refusal, System};
use pipewright_schedule::words::counted;

use crate::expert_overlap;
use crate::implementation::Stack;
use crate::layout::{Layout, Modules, Precision, Recompute, Scores, ShardedState};
use pipewright_shapes::model::{Mixer, Model};

/// Returns why a system cannot run a layout of a model; `None` if it can.
pub fn refusal(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    first_refusal(system, layout, model).map(|(_, refusal)| refusal)
}

/// Returns why a system runs none of the layouts of a model: the refusal of the layout that passes the most
/// checks. `None` if the system runs one of the layouts, or there are none.
pub(crate) fn refusal_of_all(
    system: System,
    layouts: impl Iterator<Item = Layout>,
    model: &Model,
) -> Option<Refusal> {
    let mut furthest: Option<(usize, Refusal)> = None;
    for layout in layouts {
        let refused @ (passed, _) = first_refusal(system, &layout, model)?;
        if furthest.as_ref().is_none_or(|(most, _)| passed > *most) {
            furthest = Some(refused);
        }
    }
    furthest.map(|(_, refusal)| refusal)
}

/// Returns the first refusal of a layout, with the number of checks that it passes.
fn first_refusal(system: System, layout: &Layout, model: &Model) -> Option<(usize, Refusal)> {
    let checks = [
        pipeline,
        tied_embeddings,
        predictors,
        mamba,
        context,
        heads,
        sharding,
        shard_groups,
        recompute,
        experts,
        overlap,
        products,
    ];
    let refusals = checks.into_iter().enumerate();
    refusals.filter_map(|(index, check)| Some((index, check(system, layout, model)?))).next()
}

fn pipeline(system: System, layout: &Layout, _model: &Model) -> Option<Refusal> {
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
    system.schedule_refusal(&schedule)
}

fn tied_embeddings(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    (system == System::Torchtitan && model.tied && layout.pipeline > 1).then(|| {
        Refusal::new(
            "torchtitan's pipelines have no head that uses the table of the embedding, as this model has",
        )
    })
}

fn predictors(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    let refuses = system == System::Torchtitan && (layout.pipeline > 1 || layout.context > 1);
    (refuses && model.predictors > 0).then(|| {
        Refusal::new(
            "torchtitan has no blocks that predict further tokens in pipelines or with context parallelism, as this plan has",
        )
    })
}

fn mamba(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    let refuses = system == System::Megatron && layout.stages() > 1;
    let has_mamba = || model.blocks.iter().any(|block| matches!(block.mixer, Mixer::Mamba2(_)));
    (refuses && has_mamba()).then(|| {
        Refusal::new(
            "Megatron cuts models with Mamba-2 into stages of equal size by itself and does not interleave them; this plan \
             has stages of its own",
        )
    })
}

fn context(system: System, layout: &Layout, _model: &Model) -> Option<Refusal> {
    let &Layout { context, sequence, tensor, .. } = layout;
    if context > 1 && system == System::Deepspeed {
        return Some(Refusal::new(format!(
            "{system}'s pipelines do not divide sequences among ranks, and this plan does"
        )));
    }
    let of_context = if context > 1 { 2 * u64::from(context) } else { 1 };
    let of_tensor =
        if system == System::Torchtitan && layout.sequence_parallel { u64::from(tensor) } else { 1 };
    let pieces = of_context * of_tensor;
    let divides = u64::from(sequence).is_multiple_of(pieces);
    (!divides).then(|| {
        Refusal::new(format!(
            "{system} divides each sequence into {pieces} pieces for its ranks, and {pieces} pieces do not divide {sequence} \
             tokens"
        ))
    })
}

fn heads(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
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
    heads.map(|heads| {
        Refusal::new(format!(
            "torchtitan divides {} of keys and values among the ranks of a tensor group, and {tensor} ranks do not divide \
             them",
            counted(heads, "head")
        ))
    })
}

fn sharding(system: System, layout: &Layout, _model: &Model) -> Option<Refusal> {
    let &Layout { sharding, pipeline, context, .. } = layout;
    if layout.replicas() == 1 {
        return None;
    }
    let in_pipeline = pipeline > 1;
    let has_it = match (system, sharding) {
        (System::Torchtitan, ShardedState::Nothing) if context > 1 => {
            return Some(Refusal::new(
                "torchtitan's ranks of a sequence shard the parameters, and in this plan each has all of them",
            ));
        }
        (System::Torchtitan, ShardedState::Optimizer) => false,
        // The next microbatch would gather the parameters again.
        (System::Torchtitan, ShardedState::Gradients) => !in_pipeline && layout.microbatches() == 1,
        (System::Megatron, ShardedState::Gradients | ShardedState::Parameters) => !in_pipeline,
        (System::Deepspeed, ShardedState::Gradients | ShardedState::Parameters) => false,
        _ => true,
    };
    (!has_it).then(|| {
        let (refused, known) = (refused_tensors(system, sharding, in_pipeline), tensors(system));
        Refusal::new(format!("{system} does not shard {refused}; it can shard {known}"))
    })
}

fn shard_groups(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    let groups = layout.shard_groups();
    let copies = layout.expert_replicas();
    match system {
        System::Deepspeed if groups > 1 => Some(Refusal::new(format!(
            "{system} divides the optimizer's state among all replicas, and this plan has {groups} groups that each have all of it"
        ))),
        System::Megatron if model.has_experts() && !copies.is_multiple_of(groups) => {
            Some(Refusal::new(format!(
                "{system} divides the replicas of the experts into as many groups as all replicas, and {groups} groups do not \
                 divide {}",
                counted(copies, "replica")
            )))
        }
        System::Torchtitan | System::Megatron | System::Deepspeed => None,
    }
}

fn overlap(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    if !layout.overlaps_experts(model) {
        return None;
    }
    let stack = match system {
        System::Megatron => Stack::Megatron,
        System::Torchtitan => Stack::Torchtitan,
        System::Deepspeed => {
            return Some(Refusal::new(format!(
                "{system} does not send tokens to experts while it computes another microbatch, and this plan does"
            )));
        }
    };
    let why = expert_overlap::fault(layout, stack, model)?;
    Some(Refusal::new(format!(
        "this plan sends tokens to experts while it computes another microbatch, and {system} {why}"
    )))
}

fn products(system: System, layout: &Layout, _model: &Model) -> Option<Refusal> {
    (system == System::Torchtitan && layout.precision == Precision::Nvfp4).then(|| {
        Refusal::new(format!("{system} has products in FP8 and MXFP8, and this plan has them in NVFP4"))
    })
}

fn recompute(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    if layout.recomputed_blocks().is_some() && system != System::Megatron {
        return Some(Refusal::new(format!(
            "{system} does not recompute some blocks of a stage only, as this plan does"
        )));
    }
    if let Recompute::Modules(modules) = layout.recompute {
        let names = modules.names().join(", ");
        let has_latent = || model.blocks.iter().any(|block| matches!(block.mixer, Mixer::Latent(_)));
        return match system {
            System::Megatron if modules == Modules::default() => Some(Refusal::new(
                "Megatron recomputes the scores of attention if no part of a block is named, and this plan names none",
            )),
            System::Megatron if modules.has(Modules::LATENT) && !has_latent() => Some(Refusal::new(
                "Megatron recomputes `mla_up_proj` in models with latent attention only, which this model does not have",
            )),
            System::Megatron => None,
            System::Torchtitan | System::Deepspeed => Some(Refusal::new(format!(
                "{system} does not recompute parts of a block by their names, and this plan recomputes {names}"
            ))),
        };
    }
    if layout.recompute != Recompute::Selective {
        return None;
    }
    // With unfused attention, the scores are recomputed, which fused attention does not keep.
    match (system, layout.scores) {
        (System::Torchtitan, Scores::Fused) | (System::Megatron, Scores::Unfused) => None,
        (_, Scores::Fused) => Some(Refusal::new(format!(
            "{system} does not recompute the elementwise operations and every second product of a block alone"
        ))),
        (_, Scores::Unfused) => {
            Some(Refusal::new(format!("{system} does not recompute the scores of attention alone")))
        }
    }
}

fn experts(system: System, layout: &Layout, model: &Model) -> Option<Refusal> {
    if !model.has_experts() {
        return None;
    }
    let &Layout { expert, expert_tensor, tensor, context, .. } = layout;
    match system {
        System::Torchtitan => {
            let has_shards = matches!(layout.sharding, ShardedState::Gradients | ShardedState::Parameters);
            let shards = if has_shards { layout.data() / layout.shard_groups() } else { 1 };
            let ranks = u64::from(shards) * u64::from(context) * u64::from(tensor);
            let is_whole = expert_tensor == if expert > 1 { 1 } else { tensor };
            (!is_whole || !ranks.is_multiple_of(u64::from(expert))).then(|| {
                Refusal::new(
                    "torchtitan divides experts among all ranks of a stage that shard parameters, whole ones if there are \
                     several groups, and this plan divides them otherwise",
                )
            })
        }
        System::Megatron => {
            let needs = tensor > 1 && !layout.sequence_parallel;
            needs.then(|| {
                Refusal::new(
                    "Megatron needs sequence parallelism in tensor groups if the model has experts, and this plan has none",
                )
            })
        }
        System::Deepspeed => None,
    }
}

/// Returns the tensors that a system does not shard.
fn refused_tensors(system: System, sharding: ShardedState, in_pipeline: bool) -> &'static str {
    match (system, sharding) {
        (_, ShardedState::Nothing) => "nothing",
        (_, ShardedState::Optimizer) => "the optimizer's state alone",
        (System::Torchtitan, ShardedState::Gradients) if !in_pipeline => {
            "gradients without the parameters over several microbatches"
        }
        (System::Torchtitan, ShardedState::Gradients) => "gradients without the parameters in a pipeline",
        (System::Megatron | System::Deepspeed, ShardedState::Gradients) => "gradients in a pipeline",
        (_, ShardedState::Parameters) => "parameters in a pipeline",
    }
}

/// Returns the tensors that a system shards in every layout.
fn tensors(system: System) -> &'static str {
    match system {
        System::Torchtitan => "the parameters with their gradients and optimizer's state, or nothing",
        System::Megatron | System::Deepspeed => "the optimizer's state, or nothing",
    }
}
