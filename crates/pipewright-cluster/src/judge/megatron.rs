//! The options of Megatron-LM, and the YAML of Megatron-Bridge and NeMo, which has the same names in sections.

use pipewright_schedule::emit::{GivenOption, ModelParts, Options, ReadError, megatron_stages};
use pipewright_schedule::plan::System;

use crate::emit::profile_of;
use crate::implementation::{
    Dispatcher, Graphs, Implementation, Loss, NumberFormat, Optimizer, Stack, StateFormats,
};
use crate::judge::given_run::{GivenRun, RunContext};
use crate::judge::taken::Taken;
use crate::layout::{Cut, Layout, Modules, Precision, Recompute, Scores, ShardedState};
use pipewright_shapes::model::Model;

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
const PLANNED: [&str; 21] = [
    "cross-entropy-fusion-impl",
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
    Options { list: options.list.into_iter().map(renamed).collect(), ..options }
}

/// Returns a layout in Megatron's letters. A document may have a list of the layers of each stage.
fn letters(stages: &[String]) -> String {
    const LAYERS: [(&str, &str); 4] = [("embedding", "E"), ("decoder", "t"), ("mtp", "m"), ("loss", "L")];
    let replaced = |text: String, (name, letter): &(&str, &str)| text.replace(name, letter);
    LAYERS.iter().fold(stages.join("|"), replaced).replace(',', "")
}

/// Reads a run of Megatron. `is_recipe` says whether the other options are in a recipe of Megatron-Bridge.
pub(super) fn read(
    options: &Options,
    place: &RunContext<'_>,
    is_recipe: bool,
) -> Result<GivenRun, ReadError> {
    let taken = &Taken::new(options);
    let mut model = place.model.clone();
    check_model(taken, place)?;
    let missing =
        |key: &str| ReadError { line: None, reason: format!("`{key}` is missing; Megatron needs it") };
    let size = |key| taken.number(key).map(|size| size.unwrap_or(1));
    let (tensor, pipeline) = (size("tensor-model-parallel-size")?, size("pipeline-model-parallel-size")?);
    let blocks = model.blocks.len();
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
    let recompute_layers = recompute_layers(taken, granularity, blocks, is_recipe)?;
    let precision = precision(taken, place, is_recipe)?;
    let offloaded = taken.count("cpu-offloading-num-layers")?.unwrap_or(0);
    if offloaded as usize >= blocks.max(1) {
        let expected = format!("fewer than {blocks}, the blocks of the model");
        return Err(options.wrong("cpu-offloading-num-layers", &offloaded.to_string(), &expected));
    }
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
        recompute_layers,
        offload_layers: offloaded,
        implementation: implementation(taken, (sharding, precision), &model, is_recipe)?,
        ..Layout::on_one_gpu(sequence, precision)
    };
    if expert_tensor.is_none() && !layout.replicas().is_multiple_of(layout.expert) {
        layout.expert_tensor = 1;
    }
    let copies = taken.number("num-distributed-optimizer-instances")?.filter(|&copies| copies > 1);
    for (replicas, of) in [(layout.data(), ""), (layout.expert_replicas(), " of the experts")] {
        if let Some(copies) = copies.filter(|&copies| !replicas.is_multiple_of(copies)) {
            let expected = format!("a divisor of {replicas}, the replicas{of}");
            return Err(options.wrong("num-distributed-optimizer-instances", &copies.to_string(), &expected));
        }
    }
    layout.shards = copies.map(|copies| layout.data() / copies);
    let batch = taken.either("global-batch-size", place.batch, "--global-batch")?;
    layout.batch = batch.unwrap_or(microbatch.saturating_mul(layout.data()));
    for (key, what) in
        [("overlap-grad-reduce", "reduces gradients"), ("overlap-param-gather", "gathers parameters")]
    {
        let overlaps = taken.has(key);
        if !overlaps && layout.replicas() > 1 && !is_recipe && sharding == ShardedState::Optimizer {
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
fn check_model(taken: &Taken<'_>, place: &RunContext<'_>) -> Result<(), ReadError> {
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
        let Some(given) = taken.number(key)?.filter(|&given| Some(u64::from(given)) != own) else { continue };
        let expected = match own {
            Some(own) => format!("{own}, as the model has; use the configuration of this model"),
            None => "no experts, because the model has none; use the configuration of this model".to_owned(),
        };
        return Err(taken.options.wrong(key, &given.to_string(), &expected));
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
    let (is_torch, is_megatron) = (taken.has("use-torch-fsdp2"), taken.has("use-megatron-fsdp"));
    if is_torch {
        return Ok(ShardedState::Parameters);
    }
    if is_megatron {
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
    let is_selective = taken.has("recompute-activations");
    let mut names = taken.list("recompute-modules")?;
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
    if is_selective {
        return Ok(Recompute::Modules(modules));
    }
    match granularity.as_deref() {
        None | Some("none") => Ok(Recompute::None),
        Some("full") => Ok(Recompute::Full),
        Some("selective") => Ok(Recompute::Modules(modules)),
        Some(other) => Err(taken.options.wrong("recompute-granularity", other, "full or selective")),
    }
}

/// Returns the blocks of each stage that are computed again whole; `None` for all.
fn recompute_layers(
    taken: &Taken<'_>,
    granularity: Recompute,
    blocks: usize,
    is_recipe: bool,
) -> Result<Option<u32>, ReadError> {
    const METHOD: &str = "recompute-method";
    const LAYERS: &str = "recompute-num-layers";
    let (method, layers) = (taken.word(METHOD)?, taken.count(LAYERS)?);
    if granularity != Recompute::Full {
        return Ok(None);
    }
    if let Some(layers) = layers.filter(|&layers| layers as usize > blocks) {
        let expected = format!("at most {blocks}, the blocks of the model");
        return Err(taken.options.wrong(LAYERS, &layers.to_string(), &expected));
    }
    match method.as_deref() {
        Some("block") => Ok(layers),
        Some("uniform") => {
            if let Some(layers) = layers.filter(|&layers| layers > 1) {
                taken.note(format!(
                    "the checkpoints of {layers} blocks each are predicted as one checkpoint for each block; the run keeps fewer \
                     inputs of blocks, and more activations during the backward"
                ));
            }
            Ok(None)
        }
        Some(other) => Err(taken.options.wrong(METHOD, other, "uniform or block")),
        None if is_recipe => Ok(None),
        None => Err(ReadError {
            line: taken.options.find("recompute-granularity").map(|option| option.line),
            reason: "`--recompute-method` is missing; with `--recompute-granularity full`, Megatron needs `uniform` or `block`"
                .to_owned(),
        }),
    }
}

fn precision(taken: &Taken<'_>, place: &RunContext<'_>, is_recipe: bool) -> Result<Precision, ReadError> {
    let (in_bf16, in_fp16) = (taken.has("bf16"), taken.has("fp16"));
    let recipe = taken.word("fp8-recipe")?;
    let mixed = taken.word("mixed-precision")?.unwrap_or_default();
    let (fp8, fp4) = (taken.word("fp8-format")?, taken.word("fp4-format")?);
    if (fp4.is_some() && taken.has("fp4-format")) || mixed.contains("nvfp4") {
        return Ok(Precision::Nvfp4);
    }
    if mixed.contains("mxfp8") {
        return Ok(Precision::Mxfp8);
    }
    let has_fp8 = (fp8.is_some() && taken.has("fp8-format")) || mixed.contains("fp8");
    match recipe.as_deref().filter(|_| has_fp8) {
        Some("mxfp8") => return Ok(Precision::Mxfp8),
        Some("delayed" | "tensorwise" | "blockwise" | "custom") => return Ok(Precision::Fp8),
        Some(other) => {
            return Err(taken.options.wrong(
                "fp8-recipe",
                other,
                "one of delayed, tensorwise, blockwise, mxfp8",
            ));
        }
        None if has_fp8 => return Ok(Precision::Fp8),
        None => {}
    }
    if in_bf16 || in_fp16 || mixed.contains("16") {
        return Ok(Precision::Half);
    }
    Ok(place.precision.unwrap_or_else(|| {
        if is_recipe {
            return Precision::Half;
        }
        taken.note("neither `--bf16` nor `--fp16` is given, so Megatron trains in f32");
        Precision::Single
    }))
}

/// Returns the library that sends tokens to experts. `has_experts` says whether the model has experts.
fn dispatcher(taken: &Taken<'_>, has_experts: bool, is_recipe: bool) -> Result<Dispatcher, ReadError> {
    const DISPATCHERS: [(&str, &str); 3] =
        [("alltoall", "alltoall"), ("allgather", "allgather"), ("flex", "flex")];
    let backend = taken.word("moe-flex-dispatcher-backend")?;
    let is_deep = taken.has("moe-enable-deepep") || backend.as_deref() == Some("deepep");
    let given = taken.one_of("moe-token-dispatcher-type", &DISPATCHERS)?;
    let gathers = match given {
        Some(name) => name == "allgather",
        None => !is_recipe && !is_deep,
    };
    if gathers && has_experts {
        let given = if given.is_some() { "" } else { ", Megatron's default," };
        taken.note(format!(
            "the dispatcher `allgather`{given} is predicted as `alltoall`; the run sends all tokens to all ranks of the experts, \
             which takes longer"
        ));
    }
    Ok(match given {
        Some("flex") if backend.as_deref() == Some("hybridep") => Dispatcher::HybridEp,
        Some("flex") => Dispatcher::DeepEp,
        None if is_deep => Dispatcher::DeepEp,
        _ => Dispatcher::AllToAll,
    })
}

fn implementation(
    taken: &Taken<'_>,
    (sharding, precision): (ShardedState, Precision),
    model: &Model,
    is_recipe: bool,
) -> Result<Implementation, ReadError> {
    const FORMATS: [(&str, NumberFormat); 8] = [
        ("fp32", NumberFormat::F32),
        ("float32", NumberFormat::F32),
        ("bf16", NumberFormat::Bf16),
        ("bfloat16", NumberFormat::Bf16),
        ("fp16", NumberFormat::Bf16),
        ("float16", NumberFormat::Bf16),
        ("fp8", NumberFormat::Fp8),
        ("uint8", NumberFormat::Fp8),
    ];
    const OPTIMIZERS: [(&str, Optimizer); 6] = [
        ("adam", Optimizer::Adam),
        ("adamw", Optimizer::Adam),
        ("fused_adam", Optimizer::Adam),
        ("distributed_fused_adam", Optimizer::Adam),
        ("muon", Optimizer::Muon),
        ("dist_muon", Optimizer::Muon),
    ];
    let usual = StateFormats::usual(sharding, precision);
    let format = |key, usual: NumberFormat| taken.one_of(key, &FORMATS).map(|format| format.unwrap_or(usual));
    let (in_bf16, in_f32) = (taken.has("grad-reduce-in-bf16"), taken.has("grad-reduce-in-fp32"));
    let is_given = taken.options.find("grad-reduce-in-fp32").is_some();
    let in_16_bits = in_bf16 || (is_given && !in_f32);
    let is_said = is_given || !is_recipe;
    let gradients = if in_16_bits {
        NumberFormat::Bf16
    } else if is_said {
        NumberFormat::F32
    } else {
        usual.gradients
    };
    let has_formats = taken.has("use-precision-aware-optimizer");
    let [main, moment, square, sums] = [
        format("main-params-dtype", NumberFormat::F32)?,
        format("exp-avg-dtype", usual.moments)?,
        format("exp-avg-sq-dtype", usual.moments)?,
        format("main-grads-dtype", gradients)?,
    ];
    let weights = if taken.has("fp8-param-gather") { NumberFormat::Fp8 } else { usual.weights };
    if has_formats && moment != square {
        taken.note("`--exp-avg-dtype` and `--exp-avg-sq-dtype` differ, and the prediction has one format of both moments");
    }
    let state = StateFormats {
        weights,
        main_weights: if has_formats { usual.main_weights.map(|_| main) } else { usual.main_weights },
        moments: if has_formats { moment } else { usual.moments },
        gradients: if has_formats { sums } else { gradients },
    };
    let scope = taken.list("cuda-graph-scope")?.join(",");
    let (captures, is_external) = (taken.has("enable-cuda-graph"), taken.has("external-cuda-graph"));
    let graphs = match taken.word("cuda-graph-impl")?.as_deref() {
        Some("local" | "full_iteration") if scope.is_empty() || scope.contains("full") => Graphs::Full,
        Some("local" | "transformer_engine") => Graphs::Partial,
        _ if captures || is_external => Graphs::Partial,
        _ => Graphs::None,
    };
    let fusion = "cross-entropy-loss-fusion";
    let is_assumed = is_recipe && taken.options.find(fusion).is_none();
    if is_assumed {
        taken.note("`model.cross_entropy_loss_fusion` is not in the file, and the recipes of Megatron-Bridge have true");
    }
    let is_fused = taken.has(fusion) || is_assumed;
    Ok(Implementation {
        state: (state != usual).then_some(state),
        optimizer: taken.one_of("optimizer", &OPTIMIZERS)?.unwrap_or_default(),
        loss: if is_fused { Loss::Fused } else { Loss::Separate },
        graphs,
        overlaps_tensor: Some(taken.has("tp-comm-overlap")),
        overlaps_experts: taken.has("overlap-moe-expert-parallel-comm"),
        dispatcher: dispatcher(taken, model.has_experts(), is_recipe)?,
        ..Implementation::usual(Stack::Megatron)
    })
}
