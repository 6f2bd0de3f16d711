//! Stages with adapters: the frozen base leaves no work for `W`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Int, Tensor};
use pipewright::batch::Batch;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::{
    Adapter, AdapterStart, CutModel, InitialParameters, LoraConfig, LoraTargets, ModelConfig,
};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{ScheduleSpec, generate};
use serde_json::{Value, json};

/// The blocks of the model.
const BLOCKS: usize = 2;
const MICROBATCHES: u32 = 2;

/// Returns the number of weight gradients that a step leaves for `W`, of a model with adapters on these
/// layers, or of one without adapters.
fn tasks(family: &str, keys: &Value, targets: Option<LoraTargets>) -> usize {
    let mut sizes = DecoderConfig::new(32, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.num_hidden_layers) = (32, 48, BLOCKS);
    let keys = keys.as_object().expect("an object").clone();
    let model = CutModel::from(ModelConfig::of_sizes(family, sizes, keys).expect("it is a model"));
    let model = match targets {
        Some(targets) => {
            let lora = LoraConfig { rank: 2, alpha: 2.0, dropout: 0.0, rslora: false, targets };
            let adapter = Adapter { lora, start: AdapterStart::Seed(1) };
            model.with_adapter(adapter).expect("it has these layers")
        }
        None => model,
    };
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
    let queries = || Some(LoraTargets::Named(vec!["q_proj".to_owned()]));
    let mixture = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8});
    // Two matrices of each adapter, in each block, for each microbatch.
    let of_adapters = |layers: usize| 2 * layers * BLOCKS * MICROBATCHES as usize;
    for (family, keys, linear) in [("llama", &json!({}), 7), ("qwen3_moe", &mixture, 4)] {
        assert_eq!(tasks(family, keys, queries()), of_adapters(1), "{family}");
        assert_eq!(tasks(family, keys, Some(LoraTargets::AllLinear)), of_adapters(linear), "{family}");
        assert!(tasks(family, keys, None) > of_adapters(1), "{family}");
    }
}
