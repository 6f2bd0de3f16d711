//! The configurations of files of published runs: the mesh, the batch, and how the stack trains.

use pipewright_document::Reader;
use pipewright_schedule::emit::{StageLetters, parse_stage_letters};

use crate::implementation::{
    Dispatcher, Graphs, Implementation, KernelFusion, Loss, NumberFormat, Optimizer, Stack, StateFormats,
};
use crate::layout::{Cut, Layout, Modules, Precision, Recompute, Scores, ShardedState};

/// What replicas shard, by the words of files.
pub const SHARDINGS: [(&str, ShardedState); 6] = [
    ("none", ShardedState::Nothing),
    ("replicated", ShardedState::Nothing),
    ("optimizer", ShardedState::Optimizer),
    ("gradients", ShardedState::Gradients),
    ("parameters", ShardedState::Parameters),
    ("sharded", ShardedState::Parameters),
];
/// What is recomputed, by the words of files.
pub const RECOMPUTES: [(&str, Recompute); 3] =
    [("none", Recompute::None), ("selective", Recompute::Selective), ("full", Recompute::Full)];
const SCORES: [(&str, Scores); 3] =
    [("fused", Scores::Fused), ("flash", Scores::Fused), ("unfused", Scores::Unfused)];
pub(crate) const FORMATS: [(&str, NumberFormat); 5] = [
    ("f32", NumberFormat::F32),
    ("bf16", NumberFormat::Bf16),
    ("fp8", NumberFormat::Fp8),
    ("nvfp4", NumberFormat::Nvfp4),
    ("int8", NumberFormat::Int8),
];
pub(crate) const LOSSES: [(&str, Loss); 3] =
    [("separate", Loss::Separate), ("fused", Loss::Fused), ("chunked", Loss::Chunked)];
pub(crate) const GRAPHS: [(&str, Graphs); 3] =
    [("none", Graphs::None), ("partial", Graphs::Partial), ("full", Graphs::Full)];
pub(crate) const OPTIMIZERS: [(&str, Optimizer); 2] = [("adam", Optimizer::Adam), ("muon", Optimizer::Muon)];
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
    let precision = row.word("precision", &Precision::NAMES);
    let sharding = row.word("data_parallel", &SHARDINGS).unwrap_or(ShardedState::Optimizer);
    let (cut, recompute) = (cut(row), recompute(row));
    if recompute_layers.is_some() && recompute != Recompute::Full {
        let sentence = format!("`recompute_layers` is given, and `recompute` is \"{}\"", recompute.name());
        row.report("recompute_layers", sentence, "use recompute = \"full\", or leave it out");
    }
    let schedule = row.text("schedule");
    let offload_layers = row.count("offload_layers", 0..=u32::MAX).unwrap_or(0);
    let sequence_parallel = row.flag("sequence_parallel").unwrap_or(tensor > 1);
    let scores = row.word("attention", &SCORES).unwrap_or(Scores::Fused);
    let implementation = implementation(row, sharding, precision.unwrap_or(Precision::Half));
    let mut layout = Layout {
        schedule,
        recompute,
        recompute_layers,
        offload_layers,
        sequence_parallel,
        scores,
        sharding,
        shards,
        document_tokens,
        implementation,
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
    if let Some(rows) = pass_rows.filter(|rows| !rows.is_multiple_of(layout.microbatch)) {
        let range = format!("a multiple of the {} rows of a microbatch", layout.microbatch);
        row.out_of_range::<()>("pass_rows", &rows.to_string(), &range);
    }
    layout.pass_microbatches = pass_rows.map(|rows| (rows / layout.microbatch).max(1));
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
    let recompute = row.word("recompute", &RECOMPUTES).unwrap_or(Recompute::None);
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
    let main = [("f32", Some(NumberFormat::F32)), ("bf16", Some(NumberFormat::Bf16)), ("none", None)];
    let main_weights = row.word("main_weights", &main);
    let weights = weights.unwrap_or(match main_weights {
        Some(None) => precision.element_format(),
        _ => formats.weights,
    });
    let expert_load = if row.flag("balanced") == Some(true) { 100 } else { usual.expert_load };
    let state = StateFormats {
        weights,
        // Other weights than the usual ones have a copy that the optimizer updates.
        main_weights: main_weights.unwrap_or(if weights == formats.weights {
            formats.main_weights
        } else {
            Some(NumberFormat::F32)
        }),
        moments: moments.unwrap_or(formats.moments),
        gradients: gradients.unwrap_or(formats.gradients),
    };
    Implementation {
        state: (state != formats).then_some(state),
        optimizer: row.word("optimizer", &OPTIMIZERS).unwrap_or_default(),
        loss: row.word("loss", &LOSSES).unwrap_or_default(),
        kernels: if row.flag("compiled").unwrap_or(true) {
            KernelFusion::Fused
        } else {
            KernelFusion::Separate
        },
        graphs: row.word("cuda_graphs", &GRAPHS).unwrap_or_default(),
        overlaps_tensor: row.flag("tensor_overlap"),
        overlaps_experts: row.flag("expert_overlap").unwrap_or(false),
        dispatcher: row.word("dispatcher", &DISPATCHERS).unwrap_or_default(),
        dispatched: row.word("dispatch_precision", &FORMATS),
        expert_load,
        reshards: row.flag("reshard_after_forward").unwrap_or(true),
        ..usual
    }
}
