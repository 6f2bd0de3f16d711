//! The options of Megatron-LM, and the YAML of Megatron-Bridge and NeMo, which has the same names in sections.

use pipewright_schedule::emit::{GivenOption, ModelParts, Options, ReadError, megatron_stages};
use pipewright_schedule::plan::System;

use crate::emit::profile_of;
use crate::implementation::{
    Dispatcher, Format, Graphs, Implementation, Loss, Optimizer, Stack, StateFormats,
};
use crate::judge::given_run::{GivenRun, Place};
use crate::judge::taken::Taken;
use crate::layout::{Cut, Layout, Modules, Precision, Recompute, Scores, ShardedState};

/// The sections of YAML whose keys are options.
const SECTIONS: [&str; 14] = [
    "model",
    "train",
    "ddp",
    "optimizer",
    "optim",
    "dist",
    "comm_overlap",
    "mixed_precision",
    "dataset",
    "data",
    "trainer",
    "strategy",
    "config",
    "training",
];

/// Other names of options in YAML.
const OTHER_NAMES: [(&str, &str); 9] = [
    ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"),
    ("num-layers-in-first-pipeline-stage", "decoder-first-pipeline-num-layers"),
    ("num-layers-in-last-pipeline-stage", "decoder-last-pipeline-num-layers"),
    ("activations-checkpoint-granularity", "recompute-granularity"),
    ("activations-checkpoint-method", "recompute-method"),
    ("activations-checkpoint-num-layers", "recompute-num-layers"),
    ("encoder-seq-length", "seq-length"),
    ("fp8", "fp8-format"),
    ("fp4", "fp4-format"),
];

/// Options that change costs which the prediction does not have.
const UNPREDICTED: [&str; 22] = [
    "microbatch-group-size-per-virtual-pipeline-stage",
    "optimizer-cpu-offload",
    "optimizer-offload-fraction",
    "fine-grained-activation-offloading",
    "offload-modules",
    "moe-expert-capacity-factor",
    "moe-pad-expert-input-to-capacity",
    "delay-wgrad-compute",
    "defer-embedding-wgrad-compute",
    "overlap-p2p-communication-warmup-flush",
    "no-overlap-p2p-communication",
    "hierarchical-context-parallel-sizes",
    "hybrid-context-parallel",
    "cp-comm-type",
    "distribute-saved-activations",
    "tp-only-amax-red",
    "first-last-layers-bf16",
    "fp8-dot-product-attention",
    "fp8-multi-head-attention",
    "empty-unused-memory-level",
    "rampup-batch-size",
    "high-priority-stream-groups",
];

/// Options that change nothing in the prediction although their names have a word of the layout, and options that
/// [`megatron_stages`] reads.
const PLANNED: [&str; 20] = [
    "pipeline-model-parallel-layout",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "use-tp-pp-dp-mapping",
    "no-async-tensor-model-parallel-allreduce",
    "overlap-param-gather-with-optimizer-step",
    "recompute-num-layers",
    "pipeline-dtype",
    "async-tensor-model-parallel-allreduce",
    "deallocate-pipeline-outputs",
    "parallel-output",
    "cpu-offloading",
    "min-offloaded-tensor-size",
    "fsdp-double-buffer",
    "ckpt",
    "dist-ckpt",
];

/// Returns YAML's options under the names of Megatron-LM.
pub(super) fn from_yaml(options: Options) -> Options {
    let renamed = |option: GivenOption| {
        let mut path: Vec<&str> = option.name.split('.').collect();
        let last = path.pop().unwrap_or_default().replace('_', "-");
        let key = match OTHER_NAMES.iter().find(|(other, _)| *other == last) {
            _ if !path.iter().all(|section| SECTIONS.contains(section)) => option.key.clone(),
            Some((_, key)) => (*key).to_owned(),
            None => last,
        };
        let values = if key == "pipeline-model-parallel-layout" {
            vec![letters(&option.values)]
        } else {
            option.values
        };
        GivenOption { key, values, ..option }
    };
    Options { list: options.list.into_iter().map(renamed).collect() }
}

/// Returns a layout in Megatron's letters. A document may have a list of the layers of each stage.
fn letters(stages: &[String]) -> String {
    const LAYERS: [(&str, &str); 4] = [("embedding", "E"), ("decoder", "t"), ("mtp", "m"), ("loss", "L")];
    let replaced = |text: String, (name, letter): &(&str, &str)| text.replace(name, letter);
    LAYERS.iter().fold(stages.join("|"), replaced).replace(',', "")
}

/// Reads a run of Megatron. `is_recipe` says whether the other options are in a recipe of Megatron-Bridge.
pub(super) fn read(options: &Options, place: &Place<'_>, is_recipe: bool) -> Result<GivenRun, ReadError> {
    let taken = &Taken::new(options);
    let mut model = place.model.clone();
    check_model(taken, place)?;
    let missing =
        |key: &str| ReadError { line: None, reason: format!("`{key}` is missing; Megatron needs it") };
    let size = |key| taken.number(key).map(|size| size.unwrap_or(1));
    let (tensor, pipeline) = (size("tensor-model-parallel-size")?, size("pipeline-model-parallel-size")?);
    let parts = ModelParts::of(&profile_of(&model, 1));
    let stages = megatron_stages(options, &parts, pipeline)?;
    let predictors = taken.count("mtp-num-layers")?;
    if let Some(given) = predictors.filter(|&given| given > model.predictors) {
        let expected = format!("at most {}, the predictors of the model", model.predictors);
        return Err(options.wrong("mtp-num-layers", &given.to_string(), &expected));
    }
    // A script without the option trains without predictors. The recipe of a YAML file has the predictors of the model.
    model.predictors = predictors.unwrap_or(if is_recipe { model.predictors } else { 0 });
    let microbatch = taken.number("micro-batch-size")?.ok_or_else(|| missing("--micro-batch-size"))?;
    let sequence = taken.sequence(place, "seq-length")?;
    let sharding = sharding(taken, is_recipe)?;
    let expert_tensor = taken.number("expert-tensor-parallel-size")?;
    let granularity = recompute(taken)?;
    let precision = precision(taken, place)?;
    let mut layout = Layout {
        gpus: place.gpus,
        tensor,
        pipeline,
        chunks: (stages.len() as u32 / pipeline.max(1)).max(1),
        context: size("context-parallel-size")?,
        expert: size("expert-model-parallel-size")?,
        expert_tensor: expert_tensor.unwrap_or(tensor),
        microbatch,
        cut: Cut::of_letters(&stages),
        sequence_parallel: taken.has("sequence-parallel") && tensor > 1,
        scores: match taken.word("attention-backend")?.as_deref() {
            Some("unfused" | "local" | "attnbackend.unfused" | "attnbackend.local") => Scores::Unfused,
            _ => Scores::Fused,
        },
        sharding,
        recompute: granularity,
        recompute_layers: match (granularity, taken.word("recompute-method")?.as_deref()) {
            (Recompute::Full, Some("block")) => taken.count("recompute-num-layers")?,
            _ => None,
        },
        offload_layers: taken.count("cpu-offloading-num-layers")?.unwrap_or(0),
        implementation: implementation(taken, (sharding, precision), is_recipe)?,
        ..Layout::on_one_gpu(sequence, precision)
    };
    if expert_tensor.is_none() && !layout.replicas().is_multiple_of(layout.expert) {
        layout.expert_tensor = 1;
    }
    let copies = taken.number("num-distributed-optimizer-instances")?.filter(|&copies| copies > 1);
    layout.shards = copies.map(|copies| (layout.data() / copies).max(1));
    let batch = taken.either("global-batch-size", place.batch, "--global-batch")?;
    layout.batch = batch.unwrap_or(microbatch.saturating_mul(layout.data()));
    for (key, what) in
        [("overlap-grad-reduce", "reduces gradients"), ("overlap-param-gather", "gathers parameters")]
    {
        if !taken.has(key) && layout.replicas() > 1 && !is_recipe && sharding == ShardedState::Optimizer {
            taken.note(format!(
                "the prediction {what} beside the computation, which the file does not (`--{key}`)"
            ));
        }
    }
    let mut run = GivenRun::new(System::Megatron, model, layout);
    taken.finish(&PLANNED, &UNPREDICTED, &mut run)?;
    Ok(run)
}

/// Refuses a file for a model of other sizes.
fn check_model(taken: &Taken<'_>, place: &Place<'_>) -> Result<(), ReadError> {
    let model = place.model;
    let experts =
        model.blocks.iter().find_map(|block| block.feed_forward.experts()).map(|experts| experts.count);
    let sizes = [
        ("num-layers", Some(model.blocks.len() as u64)),
        ("hidden-size", Some(model.hidden)),
        ("num-experts", experts),
        ("num-moe-experts", experts),
    ];
    for (key, own) in sizes {
        let given = taken.number(key)?;
        if let (Some(given), Some(own)) = (given, own)
            && u64::from(given) != own
        {
            let expected = format!("{own}, as the model has; use the configuration of this model");
            return Err(taken.options.wrong(key, &given.to_string(), &expected));
        }
    }
    Ok(())
}

fn sharding(taken: &Taken<'_>, is_recipe: bool) -> Result<ShardedState, ReadError> {
    const STRATEGIES: [(&str, ShardedState); 4] = [
        ("no_shard", ShardedState::Nothing),
        ("optim", ShardedState::Optimizer),
        ("optim_grads", ShardedState::Gradients),
        ("optim_grads_params", ShardedState::Parameters),
    ];
    let strategy = taken.one_of("data-parallel-sharding-strategy", &STRATEGIES)?;
    let has_optimizer = taken.has("use-distributed-optimizer");
    if taken.has("use-torch-fsdp2") {
        return Ok(ShardedState::Parameters);
    }
    if taken.has("use-megatron-fsdp") {
        return Ok(strategy.unwrap_or(ShardedState::Nothing));
    }
    if is_recipe && taken.options.find("use-distributed-optimizer").is_none() {
        taken.note("`ddp.use_distributed_optimizer` is not in the file, and the recipes of Megatron-Bridge have true");
        return Ok(ShardedState::Optimizer);
    }
    Ok(if has_optimizer { ShardedState::Optimizer } else { ShardedState::Nothing })
}

fn recompute(taken: &Taken<'_>) -> Result<Recompute, ReadError> {
    let granularity = taken.word("recompute-granularity")?;
    let mut names = taken.list("recompute-modules");
    if names.is_empty() {
        names.push("core_attn".to_owned());
    }
    let mut modules = Modules::default();
    for name in names {
        let known = Modules::NAMES.iter().find(|(known, _)| *known == name).map(|(_, module)| *module);
        let expected = || Modules::NAMES.map(|(known, _)| known).join(", ");
        modules = modules.with(known.ok_or_else(|| {
            taken.options.wrong("recompute-modules", &name, &format!("some of {}", expected()))
        })?);
    }
    // The older flag decides if both are given.
    if taken.has("recompute-activations") {
        return Ok(Recompute::Modules(modules));
    }
    match granularity.as_deref() {
        None | Some("none") => Ok(Recompute::None),
        Some("full") => Ok(Recompute::Full),
        Some("selective") => Ok(Recompute::Modules(modules)),
        Some(other) => Err(taken.options.wrong("recompute-granularity", other, "full or selective")),
    }
}

fn precision(taken: &Taken<'_>, place: &Place<'_>) -> Result<Precision, ReadError> {
    taken.has("bf16");
    taken.has("fp16");
    let recipe = taken.word("fp8-recipe")?;
    let mixed = taken.word("mixed-precision")?.unwrap_or_default();
    if taken.word("fp4-format")?.is_some() || mixed.contains("nvfp4") {
        return Ok(Precision::Nvfp4);
    }
    if mixed.contains("mxfp8") {
        return Ok(Precision::Mxfp8);
    }
    let has_fp8 = taken.word("fp8-format")?.is_some_and(|format| format != "false") || mixed.contains("fp8");
    match recipe.as_deref().filter(|_| has_fp8) {
        Some("mxfp8") => Ok(Precision::Mxfp8),
        Some("delayed" | "tensorwise" | "blockwise" | "custom") => Ok(Precision::Fp8),
        Some(other) => {
            Err(taken.options.wrong("fp8-recipe", other, "one of delayed, tensorwise, blockwise, mxfp8"))
        }
        None if has_fp8 => Ok(Precision::Fp8),
        None => Ok(place.precision),
    }
}

fn implementation(
    taken: &Taken<'_>,
    (sharding, precision): (ShardedState, Precision),
    is_recipe: bool,
) -> Result<Implementation, ReadError> {
    const FORMATS: [(&str, Format); 8] = [
        ("fp32", Format::F32),
        ("float32", Format::F32),
        ("bf16", Format::Bf16),
        ("bfloat16", Format::Bf16),
        ("fp16", Format::Bf16),
        ("float16", Format::Bf16),
        ("fp8", Format::Fp8),
        ("uint8", Format::Fp8),
    ];
    const DISPATCHERS: [(&str, Option<Dispatcher>); 3] =
        [("alltoall", Some(Dispatcher::AllToAll)), ("allgather", Some(Dispatcher::AllToAll)), ("flex", None)];
    let usual = StateFormats::usual(sharding, precision);
    let format = |key, usual: Format| taken.one_of(key, &FORMATS).map(|format| format.unwrap_or(usual));
    let in_16_bits = taken.has("grad-reduce-in-bf16")
        || (taken.options.find("grad-reduce-in-fp32").is_some() && !taken.has("grad-reduce-in-fp32"));
    let is_said = taken.options.find("grad-reduce-in-fp32").is_some() || !is_recipe;
    let gradients = if in_16_bits {
        Format::Bf16
    } else if is_said {
        Format::F32
    } else {
        usual.gradients
    };
    let has_formats = taken.has("use-precision-aware-optimizer");
    let [main, moment, square, sums] = [
        format("main-params-dtype", Format::F32)?,
        format("exp-avg-dtype", usual.moments)?,
        format("exp-avg-sq-dtype", usual.moments)?,
        format("main-grads-dtype", gradients)?,
    ];
    let weights = if taken.has("fp8-param-gather") { Format::Fp8 } else { usual.weights };
    if has_formats && moment != square {
        taken.note("`--exp-avg-dtype` and `--exp-avg-sq-dtype` differ, and the prediction has one format of both moments");
    }
    let state = StateFormats {
        weights,
        main_weights: if has_formats { usual.main_weights.map(|_| main) } else { usual.main_weights },
        moments: if has_formats { moment } else { usual.moments },
        gradients: if has_formats { sums } else { gradients },
    };
    let backend = taken.word("moe-flex-dispatcher-backend")?;
    let is_deep = taken.has("moe-enable-deepep") || backend.as_deref() == Some("deepep");
    let dispatcher = match taken.one_of("moe-token-dispatcher-type", &DISPATCHERS)? {
        Some(Some(dispatcher)) => dispatcher,
        Some(None) if backend.as_deref() == Some("hybridep") => Dispatcher::HybridEp,
        Some(None) => Dispatcher::DeepEp,
        None if is_deep => Dispatcher::DeepEp,
        None => Dispatcher::AllToAll,
    };
    let scope = taken.list("cuda-graph-scope").join(",");
    let graphs = match taken.word("cuda-graph-impl")?.as_deref() {
        Some("local" | "full_iteration") if scope.is_empty() || scope.contains("full") => Graphs::Full,
        Some("local" | "transformer_engine") => Graphs::Partial,
        _ if taken.has("enable-cuda-graph") || taken.has("external-cuda-graph") => Graphs::Partial,
        _ => Graphs::None,
    };
    if is_recipe && taken.options.find("cross-entropy-loss-fusion").is_none() {
        taken.note("`model.cross_entropy_loss_fusion` is not in the file, and the recipes of Megatron-Bridge have true");
    }
    let is_fused = taken.has("cross-entropy-loss-fusion")
        || (is_recipe && taken.options.find("cross-entropy-loss-fusion").is_none());
    taken.word("cross-entropy-fusion-impl")?;
    Ok(Implementation {
        state: (state != usual).then_some(state),
        optimizer: match taken.word("optimizer")?.as_deref() {
            Some("muon" | "dist_muon") => Optimizer::Muon,
            _ => Optimizer::Adam,
        },
        loss: if is_fused { Loss::Fused } else { Loss::Separate },
        graphs,
        overlaps_tensor: Some(taken.has("tp-comm-overlap")),
        overlaps_experts: taken.has("overlap-moe-expert-parallel-comm"),
        dispatcher,
        ..Implementation::usual(Stack::Megatron)
    })
}
