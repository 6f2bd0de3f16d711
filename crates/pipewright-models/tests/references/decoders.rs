//! The families of the table in `decoder/form.rs` beyond Llama, Qwen2 and Qwen3, each with a tiny model of
//! `data/make_family_references.py`: schedules, tensor ranks, slices and parts of the head retrace
//! transformers, the greedy text is its text with and without a cache, and what is written is what was read.

use std::fs::{read, read_to_string};

use burn::tensor::Device;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::TensorRank;
use pipewright_models::generation::{Request, Sampling, generate};
use pipewright_models::{ModelConfig, ModelSource, Place, hf};
use pipewright_schedule::{ScheduleSpec, Slices};
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::pipelined_run::{Model, train, train_spec};
use crate::reference::Reference;

/// Checks several schedules against one rank, to the bit, and against transformers.
fn check_schedules(name: &'static str) {
    let model = Model::new(name);
    model.check("gpipe", 2, 2);
    model.check("1f1b", 4, 4);
    model.check("interleaved1f1b", 2, 4);
    model.check("zb-h1", 2, 4);
    model.check("zbvzerobubble", 2, 4);
    model.check_recomputed("1f1b", 2, 4);
}

fn check_slices(name: &str) {
    let reference = Reference::load(name);
    let slices = Slices::new(4);
    let spec = ScheduleSpec { ranks: 2, microbatches: 2, slices, ..ScheduleSpec::default() };
    let steps = reference.expected.steps.len();
    let run = train_spec(&reference, "seq1f1b", spec, &PipelineConfig::default(), steps);
    reference.assert_close(&run, &reference.expected.steps);
}

fn check_head_parts(name: &str) {
    let mut reference = Reference::load(name);
    reference.cut.head_parts = 3;
    let run = train(&reference, "1f1b", 2, 4, &PipelineConfig::default());
    reference.assert_close(&run, &reference.expected.steps);
}

fn check_tensor_ranks(name: &str) {
    let reference = Reference::load(name);
    let config = PipelineConfig { tensor_parallel: 2, ..PipelineConfig::default() };
    let run = train(&reference, "1f1b", 2, 4, &config);
    reference.assert_close(&run, &reference.expected.steps);
}

/// Checks the most likely tokens, with and without the cache.
fn check_text(name: &str) {
    let reference = Reference::load(name);
    let model = reference.config.whole(ModelSource::Directory(&reference.dir), &Device::flex());
    let model = model.expect("it loads");
    let rows = read_to_string(reference.tokens()).expect("the file can be read");
    let row: Vec<u32> = serde_json::from_str(rows.lines().next().expect("a row")).expect("it is JSON");
    let (prompt, greedy) = (&row[..reference.expected.prompt], &reference.expected.greedy);
    assert!(!prompt.is_empty() && !greedy.is_empty());
    for uses_cache in [true, false] {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request = Request { prompt, tokens: greedy.len(), sampling, uses_cache, ..Request::default() };
        let mut tokens = Vec::new();
        generate(&*model, &request, &mut |token| tokens.push(token)).expect("it generates");
        assert_eq!(&tokens, greedy, "cache: {uses_cache}");
    }
}

/// Checks that a model is written as it was read: an equal configuration, and the same tensors.
fn check_written(name: &str) {
    let reference = Reference::load(name);
    let json = reference.config.to_json();
    assert_eq!(ModelConfig::from_json(json).ok().as_ref(), Some(&reference.config));
    let folder = TempDir::new().expect("a temporary folder");
    let dir = folder.path().join("m");
    macro_rules! save {
        ($($family:ident)*) => {
            match &reference.config {
                $(ModelConfig::$family(config) => {
                    let layers = 0..reference.config.layers();
                    let stage = hf::load_stage(&reference.dir, config, layers, Device::flex());
                    hf::save(&dir, config, &[&stage.expect("it loads")]).expect("it is written");
                })*
                other => panic!("no reference is of {other:?}"),
            }
        };
    }
    save!(Mistral SmolLm3 Granite Phi3 Olmo2 Gemma2 Qwen2Moe);
    assert_eq!(ModelConfig::read(&dir).ok().as_ref(), Some(&reference.config));
    let files = [&reference.dir, &dir].map(|dir| read(dir.join("model.safetensors")).expect("a file"));
    let [original, written] =
        files.each_ref().map(|file| SafeTensors::deserialize(file).expect("it is sound"));
    let mut names = [&original, &written].map(SafeTensors::names);
    names.iter_mut().for_each(|names| names.sort_unstable());
    assert_eq!(names[0], names[1]);
    for name in &names[0] {
        let [one, other] = [&original, &written].map(|file| file.tensor(name).expect("it has one"));
        assert_eq!((one.shape(), one.data()), (other.shape(), other.data()), "{name}");
    }
}

/// Checks that the description has the number of parameters of the model.
fn check_parameters(name: &str) {
    let reference = Reference::load(name);
    let described: u64 = reference.config.describe(24).layers.iter().map(|layer| layer.parameters).sum();
    let parameters = reference.config.parameters().expect("it has layers");
    let is_tied = reference.config.to_json()["tie_word_embeddings"] == true;
    // The head of a tied model lists the table of the embedding again.
    let count = |spec: &pipewright_models::ParameterSpec| spec.shape.iter().product::<usize>() as u64;
    let listed = parameters.iter().map(count).sum::<u64>();
    assert_eq!(listed - if is_tied { count(&parameters[0]) } else { 0 }, described);
}

macro_rules! cases {
    ($($check:ident: $($name:ident $model:literal)*;)*) => {$($(
        #[test]
        fn $name() {
            $check($model);
        }
    )*)*};
}

cases! {
    check_schedules: mistral_schedules "mistral-tiny" smollm3_schedules "smollm3-tiny"
        granite_schedules "granite-tiny" phi3_schedules "phi3-tiny" olmo2_schedules "olmo2-tiny" gemma2_schedules "gemma2-tiny" qwen2_moe_schedules "qwen2-moe-tiny";
    check_slices: mistral_slices "mistral-tiny" smollm3_slices "smollm3-tiny" granite_slices "granite-tiny"
        phi3_slices "phi3-tiny" olmo2_slices "olmo2-tiny" gemma2_slices "gemma2-tiny" qwen2_moe_slices "qwen2-moe-tiny";
    check_head_parts: mistral_head_parts "mistral-tiny" granite_head_parts "granite-tiny" phi3_head_parts "phi3-tiny" olmo2_head_parts "olmo2-tiny" gemma2_head_parts "gemma2-tiny" qwen2_moe_head_parts "qwen2-moe-tiny";
    check_tensor_ranks: mistral_tensor_ranks "mistral-tiny" smollm3_tensor_ranks "smollm3-tiny"
        granite_tensor_ranks "granite-tiny" gemma2_tensor_ranks "gemma2-tiny" qwen2_moe_tensor_ranks "qwen2-moe-tiny";
    check_text: mistral_text "mistral-tiny" smollm3_text "smollm3-tiny" granite_text "granite-tiny"
        phi3_text "phi3-tiny" olmo2_text "olmo2-tiny" gemma2_text "gemma2-tiny" qwen2_moe_text "qwen2-moe-tiny";
    check_written: mistral_written "mistral-tiny" smollm3_written "smollm3-tiny"
        granite_written "granite-tiny" phi3_written "phi3-tiny" olmo2_written "olmo2-tiny" gemma2_written "gemma2-tiny" qwen2_moe_written "qwen2-moe-tiny";
    check_parameters: mistral_parameters "mistral-tiny" smollm3_parameters "smollm3-tiny"
        granite_parameters "granite-tiny" phi3_parameters "phi3-tiny" olmo2_parameters "olmo2-tiny" gemma2_parameters "gemma2-tiny" qwen2_moe_parameters "qwen2-moe-tiny";
}

#[test]
fn joined_projections_are_not_split_over_tensor_ranks() {
    let Reference { config, .. } = Reference::load("phi3-tiny");
    let ModelConfig::Phi3(config) = config else { panic!("it is a Phi 3") };
    let tensor = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
    let place = Place { tensor, ..Device::flex().into() };
    let error =
        pipewright_models::ModelFamily::init_stage(&config, 1..2, 1, place).expect_err("it is joined");
    assert_eq!(
        error.to_string(),
        "`model.layers.0.self_attn.qkv_proj` has several parts in one matrix, which 2 tensor ranks cannot split: set \
         `mesh.tensor_parallel` to 1"
    );
}

#[test]
fn a_norm_of_all_heads_is_not_split_over_tensor_ranks() {
    let Reference { config, .. } = Reference::load("olmo2-tiny");
    let ModelConfig::Olmo2(config) = config else { panic!("it is an OLMo 2") };
    let tensor = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
    let place = Place { tensor, ..Device::flex().into() };
    let error =
        pipewright_models::ModelFamily::init_stage(&config, 1..2, 1, place).expect_err("it is joined");
    assert_eq!(
        error.to_string(),
        "`model.layers.0.self_attn.q_norm` is a norm of all heads, which 2 tensor ranks cannot split: set \
         `mesh.tensor_parallel` to 1"
    );
}
