//! Stages with adapters: the frozen base leaves no work for `W`, and stages without adapters compute and
//! receive no gradients that nothing uses.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Int, Tensor};
use pipewright::batch::Batch;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::training_memory::{ComputeDevices, layers_in};
use pipewright_models::{
    Adapter, AdapterStart, CutModel, InitialParameters, LoraConfig, LoraTargets, ModelConfig,
};
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{
    ActionKind, LayerDesc, ScheduleSpec, StageBackward, StageIndex, TrainedStages, generate,
};
use serde_json::{Value, json};

/// The blocks of the model.
const BLOCKS: usize = 2;
const MICROBATCHES: u32 = 2;

/// Returns a model with adapters of rank 2 on these layers, or without adapters.
fn model(family: &str, keys: &Value, blocks: usize, targets: Option<LoraTargets>) -> CutModel {
    let mut sizes = DecoderConfig::new(32, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.num_hidden_layers) = (32, 48, blocks);
    let keys = keys.as_object().expect("an object").clone();
    let model = CutModel::from(ModelConfig::of_sizes(family, sizes, keys).expect("it is a model"));
    match targets {
        Some(targets) => {
            let lora = LoraConfig { rank: 2, targets, ..LoraConfig::default() };
            let adapter = Adapter { lora, start: AdapterStart::Seed(1) };
            model.with_adapter(adapter).expect("it has these layers")
        }
        None => model,
    }
}

/// Returns the number of weight gradients that a step leaves for `W`, of a model with adapters on these
/// layers, or of one without adapters.
fn tasks(family: &str, keys: &Value, targets: Option<LoraTargets>) -> usize {
    let model = model(family, keys, BLOCKS, targets);
    let spec = ScheduleSpec { ranks: 2, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let schedule = generate("zb-h1", &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let stages = partition(&model.describe(8).weights(), 2, &Method::Optimal).expect("it divides");
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let make = move |stage| {
        let (range, counted) = (stages.range(stage), counted.clone());
        let stage = model.training_stage(range, &InitialParameters::Seed(3), Device::flex().autodiff());
        stage.map(|stage| {
            stage.with_weight_runner(move |_, work| {
                counted.fetch_add(work.len(), Ordering::Relaxed);
                work.run_all();
            })
        })
    };
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
    let mut pipeline = Pipeline::launch(program, World::local(2), &config, make).expect("it starts");
    let ids = Tensor::<2, Int>::ones([MICROBATCHES as usize, 8], &Device::flex());
    let batch = Batch::split(ids.clone(), ids, MICROBATCHES).expect("it divides");
    pipeline.step_batch(batch, 1e-3).expect("a step");
    count.load(Ordering::Relaxed)
}

#[test]
fn only_adapters_leave_work_for_weight_gradients() {
    let mixture = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8});
    let mut shared = mixture.clone();
    shared["shared_expert_intermediate_size"] = json!(8);
    // Two matrices of each adapter, in each block, for each microbatch.
    let of_adapters = |layers: usize| 2 * layers * BLOCKS * MICROBATCHES as usize;
    // Phi 3 joins the projections of the attention, and those of the gate; GPT-2 has no gate. The shared
    // expert has three.
    for (family, keys, queries, linear) in [
        ("llama", &json!({}), "q_proj", 7),
        ("qwen3_moe", &mixture, "q_proj", 4),
        ("qwen2_moe", &shared, "q_proj", 7),
        ("phi3", &json!({}), "qkv_proj", 4),
        ("gpt2", &json!({}), "c_attn", 4),
    ] {
        let queries = Some(LoraTargets::named([queries]));
        assert_eq!(tasks(family, keys, queries), of_adapters(1), "{family}");
        assert_eq!(tasks(family, keys, Some(LoraTargets::AllLinear)), of_adapters(linear), "{family}");
        assert!(tasks(family, keys, None) > of_adapters(1), "{family}");
    }
}

/// A run of three steps: the bits of its losses and gradient norms, and the number of its actions by stage
/// and kind.
struct Run {
    bits: Vec<u64>,
    actions: BTreeMap<(u32, ActionKind), usize>,
}

impl Run {
    /// Trains `model` on two ranks by `schedule`, with a program that knows that these stages are trained.
    fn of(model: &CutModel, schedule: &str, trained: TrainedStages) -> Self {
        let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
        let schedule = generate(schedule, &spec).expect("a schedule");
        let stages = schedule.placement().stages();
        let lowering = TrainingLowering { trained, ..TrainingLowering::default() };
        let program = for_training(&schedule, &lowering).expect("it is sound");
        let cut =
            partition(&vec![1; model.describe(8).layers.len()], stages, &Method::Even).expect("it divides");
        let model = model.clone();
        let make = move |stage| {
            model.training_stage(cut.range(stage), &InitialParameters::Seed(3), Device::flex().autodiff())
        };
        let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
        let mut pipeline = Pipeline::launch(program, World::local(2), &config, make).expect("it starts");
        let ids = Tensor::<1, Int>::arange(0..32, &Device::flex()).reshape([4, 8]);
        let (mut bits, mut actions) = (Vec::new(), BTreeMap::new());
        for _ in 0..3 {
            let batch = Batch::split(ids.clone(), ids.clone(), 4).expect("it divides");
            let step = pipeline.step_batch(batch, 1e-2).expect("a step");
            bits.extend(step.losses.iter().chain([&step.gradient_norm]).map(|figure| figure.to_bits()));
            for action in step.timeline.events().iter().flat_map(|event| event.action.parts()) {
                *actions.entry((action.stage().get(), action.kind())).or_insert(0) += 1;
            }
        }
        Self { bits, actions }
    }

    /// Returns the number of actions of these kinds on a stage.
    fn count(&self, stage: u32, kinds: &[ActionKind]) -> usize {
        kinds.iter().filter_map(|&kind| self.actions.get(&(stage, kind))).sum()
    }
}

#[test]
fn layers_weigh_what_the_training_of_adapters_computes() {
    let targets = LoraTargets::named(["*.layers.3.*"]);
    let whole = model("llama", &json!({}), 6, None).describe(8).layers;
    let adapted = model("llama", &json!({}), 6, Some(targets)).describe(8).layers;
    for (index, (layer, whole)) in adapted.iter().zip(&whole).enumerate() {
        // The embedding and the first three blocks are below the first adapter.
        let expected = if index < 4 {
            (whole.weight / 3, whole.products / 3)
        } else {
            let unused = (whole.products - whole.mixing) / 3;
            (whole.weight - unused / 8, whole.products - unused)
        };
        assert_eq!((layer.weight, layer.products), expected, "{}", layer.path);
        assert_eq!(layer.activation_bytes, whole.activation_bytes, "{}", layer.path);
    }
    let cut = |layers: &[LayerDesc]| {
        let weights: Vec<u64> = layers.iter().map(|layer| layer.weight).collect();
        partition(&weights, 2, &Method::Optimal).expect("it divides").range(StageIndex::new(0)).end
    };
    assert!(cut(&adapted) > cut(&whole), "the first stage has more layers if these run forward only");
}

#[test]
fn magnitudes_weigh_more_in_short_rows() {
    let weight = |dora, tokens| {
        let lora = LoraConfig { rank: 2, dora, ..LoraConfig::default() };
        let whole = model("llama", &json!({}), 2, None);
        let adapted = whole.with_adapter(Adapter { lora, start: AdapterStart::Seed(1) }).expect("it fits");
        adapted.describe(tokens).weights()
    };
    let more = |tokens| {
        let [without, with] = [false, true].map(|dora| weight(dora, tokens));
        [0, 1, 3].map(|layer| with[layer] - without[layer])
    };
    let ([embedding, short, head], [_, long, _]) = (more(8), more(800));
    assert!(embedding == 0 && head == 0 && short > long && long > 0, "{short} {long}");
}

/// Without dropout in single precision, the results of the first matrices: rank 2 for each of seven layers.
#[test]
fn estimates_have_what_adapters_keep() {
    let kept = |targets| {
        let layers =
            layers_in(&model("llama", &json!({}), 6, targets), 8, Precision::F32, ComputeDevices::Processor)
                .layers;
        layers.into_iter().map(|layer| layer.activation_bytes).collect::<Vec<_>>()
    };
    let (whole, all) = (kept(None), kept(Some(LoraTargets::AllLinear)));
    for (index, (adapted, whole)) in all.iter().zip(&whole).enumerate() {
        let own = if (1..7).contains(&index) { 4 * 8 * 2 * 7 } else { 0 };
        assert_eq!(*adapted, whole + own, "{index}");
    }
}

#[test]
fn frozen_stages_compute_and_receive_no_gradients_that_nothing_uses() {
    use ActionKind::{Backward, InputBackward, RecvBackward, SendBackward, WeightBackward};
    // The embedding, six blocks and the head: with four stages, two layers each. The third stage has
    // adapters.
    let targets = LoraTargets::named(["*.layers.3.*"]);
    let model = model("llama", &json!({}), 6, Some(targets));
    for schedule in ["1f1b", "gpipe", "zb-h1", "interleaved1f1b", "zbvzerobubble", "dualpipev"] {
        let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
        let stages = generate(schedule, &spec).expect("a schedule").placement().stages();
        let cut = partition(&[1; 8], stages, &Method::Even).expect("it divides");
        let trained = model.trained_stages(&cut).expect("it has adapters");
        let (aware, whole) =
            (Run::of(&model, schedule, trained.clone()), Run::of(&model, schedule, TrainedStages::ALL));
        assert_eq!(aware.bits, whole.bits, "{schedule}");
        for stage in 0..stages {
            let backward = trained.backward_of(StageIndex::new(stage));
            let gradients = aware.count(stage, &[Backward, InputBackward, RecvBackward]);
            let weights = aware.count(stage, &[Backward, WeightBackward]);
            assert_eq!(gradients > 0, backward != StageBackward::None, "{schedule}, stage {stage}");
            assert_eq!(weights > 0, backward == StageBackward::Whole, "{schedule}, stage {stage}");
            assert!(whole.count(stage, &[Backward, WeightBackward]) > 0, "{schedule}, stage {stage}");
        }
        let first =
            (0..stages).find(|&stage| trained.runs_backward(StageIndex::new(stage))).expect("a stage");
        assert_eq!(aware.count(first, &[SendBackward]), 0, "{schedule}");
    }
}

#[test]
fn a_program_without_the_gradients_of_a_trained_stage_is_refused() {
    let model = model("llama", &json!({}), 6, Some(LoraTargets::AllLinear));
    let schedule = generate("1f1b", &ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() });
    let trained = TrainedStages::of(&[false, true]);
    let lowering = TrainingLowering { trained, ..TrainingLowering::default() };
    let program = for_training(&schedule.expect("a schedule"), &lowering).expect("it is sound");
    let make = move |stage: StageIndex| {
        let range = [0..4, 4..8][stage.index()].clone();
        model.training_stage(range, &InitialParameters::Seed(3), Device::flex().autodiff())
    };
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
    let launched = Pipeline::launch(program, World::local(2), &config, make);
    let error = launched.err().expect("stage 0 has adapters");
    let text = with_causes(&error);
    assert!(text.contains("lora_A.weight") && text.contains("no weight gradients"), "{text}");
}

/// Returns the bytes that this thread has read from files; `None` if the system does not count them.
fn bytes_read() -> Option<u64> {
    let counts = std::fs::read_to_string("/proc/thread-self/io").ok()?;
    counts.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

/// PEFT has the matrices of all experts of a block in one tensor, which has many parameters here.
#[test]
fn the_tensors_of_experts_are_read_once() {
    let data = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"));
    let (base, dir) = (data.join("qwen3-moe-tiny"), data.join("lora/qwen3-moe-tiny-experts"));
    let config = ModelConfig::read(&base).expect("a model");
    let lora = config.read_adapter(&dir).expect("it fits the model");
    let layers = 0..config.layers();
    let initial = InitialParameters::Directory { path: base, seed: 0 };
    let read = |start: AdapterStart| {
        let adapter = Adapter { lora: lora.clone(), start };
        let model = CutModel::from(config.clone()).with_adapter(adapter).expect("it has these layers");
        let before = bytes_read()?;
        model.training_stage(layers.clone(), &initial, Device::flex().autodiff()).expect("a stage");
        Some(bytes_read()? - before)
    };
    let [drawn, stored] = [AdapterStart::Seed(1), AdapterStart::Directory(dir.clone())].map(read);
    let Some((drawn, stored)) = drawn.zip(stored) else {
        let _said = writeln!(std::io::stderr(), "SKIPPED: the system does not count what a thread reads");
        return;
    };
    let size = std::fs::metadata(dir.join("adapter_model.safetensors")).expect("the weights").len();
    let own = stored - drawn;
    assert!((size / 2..size + size / 8).contains(&own), "{own} bytes of a file of {size} bytes are read");
}
