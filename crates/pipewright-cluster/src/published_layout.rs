//! The configurations of files of published runs: the mesh, the batch, and how the stack trains.

use pipewright_document::Reader;
use pipewright_schedule::emit::{StageLetters, parse_stage_letters};

use crate::implementation::{
    Dispatcher, Format, Graphs, Implementation, Kernels, Loss, Optimizer, Stack, StateFormats, USUAL_LOAD,
};
use crate::layout::{Cut, Layout, Modules, Precision, Recompute, Scores, ShardedState};

const PRECISIONS: [(&str, Precision); 7] = [
    ("f16", Precision::Half),
    ("fp16", Precision::Half),
    ("bf16", Precision::Half),
    ("fp8", Precision::Fp8),
    ("mxfp8", Precision::Mxfp8),
    ("nvfp4", Precision::Nvfp4),
    ("f32", Precision::Single),
];
const SHARDINGS: [(&str, ShardedState); 6] = [
    ("none", ShardedState::Nothing),
    ("replicated", ShardedState::Nothing),
    ("optimizer", ShardedState::Optimizer),
    ("gradients", ShardedState::Gradients),
    ("parameters", ShardedState::Parameters),
    ("sharded", ShardedState::Parameters),
];
const SCORES: [(&str, Scores); 3] =
    [("fused", Scores::Fused), ("flash", Scores::Fused), ("unfused", Scores::Unfused)];
const FORMATS: [(&str, Format); 5] = [
    ("f32", Format::F32),
    ("bf16", Format::Bf16),
    ("fp8", Format::Fp8),
    ("nvfp4", Format::Nvfp4),
    ("int8", Format::Int8),
];
const LOSSES: [(&str, Loss); 3] =
    [("separate", Loss::Separate), ("fused", Loss::Fused), ("chunked", Loss::Chunked)];
const GRAPHS: [(&str, Graphs); 3] =
    [("none", Graphs::None), ("partial", Graphs::Partial), ("full", Graphs::Full)];
const DISPATCHERS: [(&str, Dispatcher); 3] =
    [("alltoall", Dispatcher::AllToAll), ("deepep", Dispatcher::DeepEp), ("hybridep", Dispatcher::HybridEp)];

/// Reads the keys of a run's configuration, such as `gpus`, `tp` and `mbs`. Returns `None` if a key that is needed is
/// missing or has a mistake, which is reported. The caller reports missing keys ([`Reader::require`]).
pub fn layout(row: &mut Reader<'_>) -> Option<Layout> {
    let [gpus, microbatch, batch, sequence, expert_tensor] =
        ["gpus", "mbs", "gbs", "seq", "etp"].map(|key| row.count(key, 1..=u32::MAX));
    let [tensor, pipeline, chunks, context, expert] =
        ["tp", "pp", "vp", "cp", "ep"].map(|key| row.count(key, 1..=u32::MAX).unwrap_or(1));
    let [pass_rows, shards, document_tokens, recompute_layers] =
        ["pass_rows", "shards", "document_tokens", "recompute_layers"]
            .map(|key| row.count(key, 1..=u32::MAX));
    let precision = row.word("precision", &PRECISIONS);
    let sharding = row.word("data_parallel", &SHARDINGS).unwrap_or(ShardedState::Optimizer);
    let cut = cut(row);
    let mut layout = Layout {
        schedule: row.text("schedule"),
        recompute: recompute(row),
        recompute_layers,
        offload_layers: row.count("offload_layers", 0..=u32::MAX).unwrap_or(0),
        sequence_parallel: row.flag("sequence_parallel").unwrap_or(tensor > 1),
        scores: row.word("attention", &SCORES).unwrap_or(Scores::Fused),
        sharding,
        shards,
        document_tokens,
        implementation: implementation(row, sharding, precision?),
        gpus: gpus?,
        tensor,
        pipeline,
        chunks,
        context,
        expert,
        expert_tensor: expert_tensor.unwrap_or(tensor),
        microbatch: microbatch?,
        batch: batch?,
        cut: cut.unwrap_or(Cut::Even),
        ..Layout::on_one_gpu(sequence?, precision?)
    };
    layout.pass_microbatches = pass_rows.map(|rows| (rows / layout.microbatch.max(1)).max(1));
    // If the replicas are too few for the experts' ranks, these are drawn from tensor groups, too.
    if expert_tensor.is_none() && !layout.replicas().is_multiple_of(layout.expert) {
        layout.expert_tensor = 1;
    }
    Some(layout)
}

/// Reads the blocks of each stage in Megatron's letters.
fn cut(row: &mut Reader<'_>) -> Option<Cut> {
    let text = row.text("pipeline_layout")?;
    match parse_stage_letters(&text) {
        Ok(stages) => Some(Cut::of_letters(&stages)),
        Err(error) => {
            row.report_error("pipeline_layout", error);
            None
        }
    }
}

impl Cut {
    /// Returns the cut of stages in Megatron's letters.
    pub fn of_letters(stages: &[StageLetters]) -> Self {
        let last = stages.len().saturating_sub(1);
        let predictors = stages.iter().position(|stage| stage.predictors > 0).unwrap_or(last);
        Self::Given {
            blocks: stages.iter().map(|stage| stage.blocks).collect(),
            predictors: predictors.try_into().unwrap_or(u32::MAX),
        }
    }
}

fn recompute(row: &mut Reader<'_>) -> Recompute {
    const RECOMPUTED: [(&str, Recompute); 3] =
        [("none", Recompute::None), ("selective", Recompute::Selective), ("full", Recompute::Full)];
    let recompute = row.word("recompute", &RECOMPUTED).unwrap_or(Recompute::None);
    let modules = row.words("recompute_modules", &Modules::NAMES).unwrap_or_default();
    match recompute {
        Recompute::Selective if !modules.is_empty() => {
            Recompute::Modules(modules.into_iter().fold(Modules::default(), Modules::with))
        }
        other => other,
    }
}

fn implementation(row: &mut Reader<'_>, sharding: ShardedState, precision: Precision) -> Implementation {
    // Only Megatron's replicas shard the optimizer's state alone.
    let is_fsdp = sharding == ShardedState::Parameters;
    let usual_stack = if is_fsdp { Stack::Torchtitan } else { Stack::Megatron };
    let usual = Implementation::usual(row.word("stack", &Stack::NAMES).unwrap_or(usual_stack));
    let formats = StateFormats::usual(sharding, precision);
    let [weights, moments, gradients] =
        ["weights", "moments", "gradients"].map(|key| row.word(key, &FORMATS));
    let main = [("f32", Some(Format::F32)), ("bf16", Some(Format::Bf16)), ("none", None)];
    let main_weights = row.word("main_weights", &main);
    let weights = weights.unwrap_or(match main_weights {
        Some(None) => precision.element_format(),
        _ => formats.weights,
    });
    let expert_load = match row.flag("balanced") {
        Some(false) => USUAL_LOAD,
        Some(true) | None => usual.expert_load,
    };
    Implementation {
        state: Some(StateFormats {
            weights,
            // Other weights than the usual ones have a copy that the optimizer updates.
            main_weights: main_weights.unwrap_or(if weights == formats.weights {
                formats.main_weights
            } else {
                Some(Format::F32)
            }),
            moments: moments.unwrap_or(formats.moments),
            gradients: gradients.unwrap_or(formats.gradients),
        }),
        optimizer: row
            .word("optimizer", &[("adam", Optimizer::Adam), ("muon", Optimizer::Muon)])
            .unwrap_or_default(),
        loss: row.word("loss", &LOSSES).unwrap_or_default(),
        kernels: if row.flag("compiled").unwrap_or(true) { Kernels::Fused } else { Kernels::Separate },
        graphs: row.word("cuda_graphs", &GRAPHS).unwrap_or_default(),
        overlaps_tensor: row.flag("tensor_overlap"),
        overlaps_experts: row.flag("expert_overlap").unwrap_or(false),
        dispatcher: row.word("dispatcher", &DISPATCHERS).unwrap_or_default(),
        dispatched: row.word("dispatch_precision", &FORMATS).unwrap_or(Format::Bf16),
        expert_load,
        reshards: row.flag("reshard_after_forward").unwrap_or(true),
        ..usual
    }
}
