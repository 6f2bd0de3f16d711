//! The families of the table in `decoder/form.rs` beyond Llama, Qwen2 and Qwen3, each with a tiny model of
//! `data/make_family_references.py`: schedules, tensor ranks, slices and parts of the head retrace
//! transformers, the greedy text is its text with and without a cache, and what is written is what was read.

use std::fs::{read, read_to_string};
use std::path::Path;
use std::time::Duration;

use burn::tensor::Device;
use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::{Precision, TensorRank};
use pipewright_models::generation::{Request, Sampling, generate};
use pipewright_models::generation_ranks::{GenerationRanks, RankStage, RanksConfig};
use pipewright_models::{CutModel, ModelConfig, ModelSource, ParameterSpec, Place, ROUTER_CORRECTION, hf};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{ScheduleSpec, Slices};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::pipelined_run::{Model, train, train_spec};
use crate::reference::{Reference, Step};

/// Checks several schedules against one rank, to the bit, and against transformers.
fn check_schedules(name: &'static str) {
    let model = Model::new(name);
    model.check("gpipe", 2, 2);
    model.check_to_the_end("1f1b", 4, 4);
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
    if !WITHOUT_TEXT.contains(&name) {
        check_text_on_tensor_ranks(&reference, false);
    }
}

/// Checks two tensor ranks with whole experts each.
fn check_whole_experts(name: &str) {
    let reference = Reference::load(name);
    let config = PipelineConfig { tensor_parallel: 2, whole_experts: true, ..PipelineConfig::default() };
    let run = train(&reference, "1f1b", 2, 4, &config);
    reference.assert_close(&run, &reference.expected.steps);
    if !WITHOUT_TEXT.contains(&name) {
        check_text_on_tensor_ranks(&reference, true);
    }
}

/// Checks the losses with the balance loss of the routers.
fn check_balance(name: &str) {
    let reference = Reference::load_balanced(name);
    for (schedule, ranks, microbatches) in [("gpipe", 1, 2), ("zb-h1", 2, 4)] {
        let run = train(&reference, schedule, ranks, microbatches, &PipelineConfig::default());
        reference.assert_close(&run, &reference.steps(microbatches));
    }
}

/// Checks the most likely tokens, with and without the cache, on one rank and on several.
pub(crate) fn check_text(name: &str) {
    let reference = Reference::load(name);
    let model = reference.config.whole(ModelSource::Directory(&reference.dir), &Device::flex());
    let model = model.expect("it loads");
    let (prompt, greedy) = (&prompt_of(&reference)[..], &reference.expected.greedy);
    assert!(!prompt.is_empty() && !greedy.is_empty());
    for uses_cache in [true, false] {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request = Request { prompt, tokens: greedy.len(), sampling, uses_cache, ..Request::default() };
        let mut tokens = Vec::new();
        generate(&*model, &request, &mut |token| tokens.push(token)).expect("it generates");
        assert_eq!(&tokens, greedy, "cache: {uses_cache}");
    }
    check_text_on_ranks(&reference, prompt, greedy);
}

/// Returns the tokens before the most likely ones of a reference.
fn prompt_of(reference: &Reference) -> Vec<u32> {
    let rows = read_to_string(reference.tokens()).expect("the file can be read");
    let mut row: Vec<u32> = serde_json::from_str(rows.lines().next().expect("a row")).expect("it is JSON");
    row.truncate(reference.expected.prompt);
    row
}

/// References without the most likely tokens after a prompt.
const WITHOUT_TEXT: [&str; 6] =
    ["llama-tiny", "llama-tied-tiny", "llama31-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3-moe-tiny"];

/// Checks the most likely tokens on two stages of two tensor ranks each. Their sums are not those of one rank
/// to the bit, so only the tokens are compared.
fn check_text_on_tensor_ranks(reference: &Reference, whole_experts: bool) {
    let (prompt, greedy) = (&prompt_of(reference)[..], &reference.expected.greedy);
    assert!(!prompt.is_empty() && !greedy.is_empty());
    let cut = partition(&vec![1; reference.config.layers()], 2, &Method::Even).expect("enough layers");
    let stages = cut.ranges().flat_map(|layers| [layers.clone(), layers]);
    let stages = stages.map(|layers| RankStage { layers, device: Device::flex() }).collect();
    let ranks =
        RanksConfig { tensor_ranks: 2, whole_experts, ..RanksConfig::new(stages, Duration::from_secs(60)) };
    let (config, dir) = (reference.config.clone(), reference.dir.clone());
    let make =
        move |layers, place: &Place| config.generation_stage(layers, ModelSource::Directory(&dir), place);
    let mut ranks = GenerationRanks::start(&ranks, make).expect("it loads");
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let request = Request { prompt, tokens: greedy.len(), sampling, ..Request::default() };
    let uncached = Request { uses_cache: false, ..request };
    let texts = ranks.generate(&[request, uncached], &mut |_, _| {}).expect("it generates");
    assert!(texts.iter().all(|text| text.tokens == *greedy), "{texts:?}, not {greedy:?}");
    check_turns(&mut ranks, prompt, greedy);
}

/// Checks that turns of a chat have the most likely tokens of their whole texts without a cache: a turn that
/// adds several tokens to the text so far, the same one again, and a turn that has only the beginning of the text.
fn check_turns(ranks: &mut GenerationRanks, prompt: &[u32], greedy: &[u32]) {
    let further = [prompt, &greedy[..4], &prompt[2..6]].concat();
    let changed = [&prompt[..6], &prompt[1..6]].concat();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    for turn in [prompt, &further, &further, &changed, prompt] {
        let request = Request { prompt: turn, tokens: 4, sampling, ..Request::default() };
        let uncached = Request { uses_cache: false, ..request };
        let whole = ranks.generate(&[uncached], &mut |_, _| {}).expect("it generates");
        let found = ranks.answer(&request, &mut |_| {}).expect("it generates");
        assert!(found.is_cached && !whole[0].is_cached);
        assert_eq!(found.tokens, whole[0].tokens, "{turn:?}");
    }
}

/// Checks that the most likely tokens are the same if the layers are distributed over ranks, of which each
/// has the parameters of its own layers alone, and that a text does not depend on the others.
fn check_text_on_ranks(reference: &Reference, prompt: &[u32], greedy: &[u32]) {
    let layers = reference.config.layers();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let request = Request { prompt, tokens: greedy.len(), sampling, ..Request::default() };
    let uncached = Request { uses_cache: false, ..request };
    let requests = [request, Request { prompt: &prompt[..1], tokens: 3, ..request }, uncached];
    for ranks in [2, layers as u32] {
        let cut = partition(&vec![1; layers], ranks, &Method::Even).expect("each rank has a layer");
        let stages = cut.ranges().map(|layers| RankStage { layers, device: Device::flex() });
        let (config, dir) = (reference.config.clone(), reference.dir.clone());
        let make =
            move |layers, place: &Place| config.generation_stage(layers, ModelSource::Directory(&dir), place);
        let ranks_config = RanksConfig::new(stages.collect(), Duration::from_secs(60));
        let started = GenerationRanks::start(&ranks_config, make);
        let mut started = started.expect("it loads");
        let outline = |layers| {
            let model = CutModel::from(reference.config.clone());
            let specs = model.outline(layers, &TensorParallel::default()).expect("the layers exist");
            specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum::<usize>()
        };
        assert!(started.parameters().eq(cut.ranges().map(outline)), "each rank has its own parameters");
        let texts = started.generate(&requests, &mut |_, _| {}).expect("it generates");
        assert_eq!((&texts[0].tokens[..], &texts[2].tokens[..]), (greedy, greedy), "{ranks} ranks");
        assert_eq!(texts[1].tokens.len(), 3);
        check_turns(&mut started, prompt, greedy);
    }
}

/// Checks that a model is written as it was read: an equal configuration, and the same tensors.
fn check_written(name: &str) {
    let reference = Reference::load(name);
    let json = reference.config.to_json();
    assert_eq!(ModelConfig::from_json(json).ok().as_ref(), Some(&reference.config));
    let folder = TempDir::new().expect("a temporary folder");
    let dir = folder.path().join("m");
    let config = &*reference.config;
    let stage = hf::load_stage(&reference.dir, config, 0..config.layers(), Device::flex());
    hf::save(&dir, config, &[&stage.expect("it loads")]).expect("it is written");
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

/// Checks that the description has the number of parameters of the model. As in transformers, the correction of a
/// router's scores is not a parameter, because it has no gradient.
fn check_parameters(name: &str) {
    let reference = Reference::load(name);
    let described: u64 = reference.config.describe(24).layers.iter().map(|layer| layer.parameters).sum();
    let parameters = reference.config.parameters().expect("it has layers");
    let is_tied = reference.config.to_json()["tie_word_embeddings"] == true;
    // The head of a tied model lists the table of the embedding again.
    let count = |spec: &ParameterSpec| spec.shape.iter().product::<usize>() as u64;
    let is_trained = |spec: &&ParameterSpec| !spec.path.ends_with(ROUTER_CORRECTION);
    let listed = parameters.iter().filter(is_trained).map(count).sum::<u64>();
    assert_eq!(listed - if is_tied { count(&parameters[0]) } else { 0 }, described);
}

/// Makes a module for each model, with a test for each of its checks.
macro_rules! models {
    ($($name:ident $model:literal: $($check:ident)*;)*) => {$(
        mod $name {
            $(
                #[test]
                fn $check() {
                    super::$check($model);
                }
            )*
        }
    )*};
}

models! {
    mistral "mistral-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    qwen2_window "qwen2-window-tiny": check_schedules check_slices check_tensor_ranks check_text check_written;
    qwen3_window "qwen3-window-tiny": check_schedules check_slices check_tensor_ranks check_text check_written;
    mixtral "mixtral-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_balance
        check_text check_written check_parameters;
    smollm3 "smollm3-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    granite "granite-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    granite_hybrid "granite-hybrid-tiny": check_schedules check_head_parts check_tensor_ranks check_text check_written
        check_parameters;
    granite_hybrid_experts "granite-hybrid-rope-tiny": check_schedules check_head_parts check_tensor_ranks
        check_whole_experts check_text check_written check_parameters;
    phi3 "phi3-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    olmo2 "olmo2-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    olmo3 "olmo3-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    ministral3 "ministral3-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    glm4_moe "glm4-moe-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    glm4_moe_plain "glm4-moe-plain-tiny": check_schedules check_tensor_ranks check_text check_written
        check_parameters;
    qwen3_next "qwen3-next-tiny": check_schedules check_head_parts check_tensor_ranks check_text check_written
        check_parameters;
    qwen3_5 "qwen3-5-tiny": check_schedules check_head_parts check_tensor_ranks check_text check_written
        check_parameters;
    qwen3_5_moe "qwen3-5-moe-tiny": check_schedules check_head_parts check_tensor_ranks check_text check_written
        check_parameters;
    gemma2 "gemma2-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    gemma3 "gemma3-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    starcoder2 "starcoder2-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    gpt2 "gpt2-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text check_written
        check_parameters;
    gpt2_scaled "gpt2-scaled-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    qwen2_moe "qwen2-moe-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    gpt_oss "gpt-oss-tiny": check_schedules check_slices check_head_parts check_tensor_ranks
        check_whole_experts check_balance check_text check_written check_parameters;
    qwen2_moe_window "qwen2-moe-window-tiny": check_schedules check_tensor_ranks check_text check_written
        check_parameters;
    qwen3_moe_window "qwen3-moe-window-tiny": check_schedules check_tensor_ranks check_text check_written
        check_parameters;
    smollm3_window "smollm3-window-tiny": check_schedules check_slices check_text check_written;
    deepseek_v2_greedy "deepseek-v2-greedy-tiny": check_schedules check_tensor_ranks check_text check_written
        check_parameters;
    deepseek_v3_plain "deepseek-v3-plain-tiny": check_schedules check_tensor_ranks check_text check_written
        check_parameters;
    deepseek_v2 "deepseek-v2-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
    deepseek_v3 "deepseek-v3-tiny": check_schedules check_slices check_head_parts check_tensor_ranks check_text
        check_written check_parameters;
}

/// The corrections of routers change after each step as in a training by hand in PyTorch, on one rank, on two
/// stages, with replicas whose loads differ, and with two tensor ranks.
#[test]
fn corrections_of_scores_balance_the_experts() {
    let mut reference = Reference::load("deepseek-v3-tiny");
    reference.balance_speed = Some(reference.expected.balance_speed);
    let expected = reference.expected.balanced.clone();
    assert_ne!(expected.last(), reference.expected.steps.last(), "the corrections change the choices");
    let replicas = |data_parallel, data_parallel_mode| PipelineConfig {
        data_parallel,
        data_parallel_mode,
        ..PipelineConfig::default()
    };
    for (schedule, ranks, microbatches, config) in [
        ("gpipe", 1, 1, PipelineConfig::default()),
        ("zb-h1", 2, 4, PipelineConfig::default()),
        ("1f1b", 2, 4, replicas(2, DataParallelMode::Replicated)),
        ("1f1b", 2, 4, replicas(2, DataParallelMode::Sharded)),
        ("1f1b", 2, 2, PipelineConfig { tensor_parallel: 2, ..PipelineConfig::default() }),
    ] {
        let run = train(&reference, schedule, ranks, microbatches, &config);
        reference.assert_close(&run, &expected);
    }
}

/// Trains in half precision on one rank and on two, with the same bits, near the losses of single precision.
/// `difference` is the one that bfloat16 makes in PyTorch (`data/measure_bfloat16.py`).
fn check_half(name: &str, difference: f64) {
    let reference = Reference::load(name);
    for precision in [Precision::Bf16, Precision::F16] {
        let loss_scaling = LossScaling { initial: 256.0, ..LossScaling::default() };
        let config = PipelineConfig { precision, loss_scaling, ..PipelineConfig::default() };
        let one_rank = train(&reference, "gpipe", 1, 4, &config);
        assert_eq!(train(&reference, "zb-h1", 2, 4, &config), one_rank, "{name}, {precision}");
        let error = |(found, expected): (&Step, &Step)| (found.loss - expected.loss).abs() / expected.loss;
        let largest = one_rank.iter().zip(&reference.expected.steps).map(error).fold(0.0, f64::max);
        assert!((1e-6..3.0 * difference).contains(&largest), "{name}, {precision}: {largest:.1e}");
    }
}

#[test]
fn half_precision_stays_near_single_precision() {
    check_half("gpt2-tiny", 3.3e-4);
    check_half("gpt-oss-tiny", 7.9e-4);
    check_half("qwen3-5-tiny", 8.3e-4);
}

/// Published files of GPT-2 have no prefix, and the masks of their attentions.
#[test]
fn files_of_gpt2_may_have_other_names() {
    let reference = Reference::load("gpt2-tiny");
    let folder = TempDir::new().expect("a temporary folder");
    let original = read(reference.dir.join("model.safetensors")).expect("a file");
    let original = SafeTensors::deserialize(&original).expect("it is sound");
    let mask: Vec<u8> = [1.0f32; 4].into_iter().flat_map(f32::to_le_bytes).collect();
    let masks: Vec<_> = ["h.0.attn.bias", "h.0.attn.masked_bias", "h.2.attn.bias"]
        .into_iter()
        .map(|name| (name.to_owned(), TensorView::new(Dtype::F32, vec![1, 1, 2, 2], &mask).expect("a mask")))
        .collect();
    let renamed = original.tensors().into_iter().map(|(name, tensor)| {
        let name = name.strip_prefix("transformer.").expect("each name has the prefix");
        (name.to_owned(), tensor)
    });
    let tensors: Vec<_> = renamed.chain(masks).collect();
    safetensors::serialize_to_file(tensors, None, &folder.path().join("model.safetensors")).expect("written");
    let parameters = reference.config.parameters().expect("it has layers");
    assert_eq!(hf::check_weights(folder.path(), &parameters).expect("they fit"), [""; 0]);
    let whole = |dir: &Path| {
        let model = reference.config.whole(ModelSource::Directory(dir), &Device::flex()).expect("it loads");
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request = Request { prompt: &[1, 2, 3], tokens: 8, sampling, ..Request::default() };
        generate(&*model, &request, &mut |_| {}).expect("it generates").tokens
    };
    assert_eq!(whole(folder.path()), whole(&reference.dir));
    // A row of the model's 32 positions is computed, and a longer one is refused.
    let request = |tokens| Request {
        prompt: &[1, 2],
        tokens,
        longest: reference.config.longest(),
        ..Request::default()
    };
    let model =
        reference.config.whole(ModelSource::Directory(&reference.dir), &Device::flex()).expect("it loads");
    assert_eq!(generate(&*model, &request(30), &mut |_| {}).map(|text| text.tokens.len()), Ok(30));
    let error = generate(&*model, &request(31), &mut |_| {}).expect_err("too long").to_string();
    assert!(error.contains("above the 32 positions"), "{error}");
}

/// Returns the error of `ranks` tensor ranks that should hold a block of the model with changed keys.
fn not_split(name: &str, changes: &serde_json::Value, ranks: u32) -> String {
    let mut json = Reference::load(name).config.to_json();
    json.as_object_mut().expect("a table").extend(changes.as_object().expect("a table").clone());
    let config = ModelConfig::from_json(json).expect("it is valid");
    let tensor = TensorParallel::unconnected(TensorRank { index: 0, of: ranks });
    let place = Place { tensor, ..Device::flex().into() };
    let refused = config.build_stage(1..2, &mut *config.initial(1), &place).map(drop);
    refused.expect_err(name).to_string()
}

#[test]
fn joined_projections_have_groups_for_each_tensor_rank() {
    let keys = serde_json::json!({"num_key_value_heads": 1});
    assert_eq!(
        not_split("phi3-tiny", &keys, 2),
        "`model.layers.0.self_attn.qkv_proj` cannot be split over 2 tensor ranks: \
         `model.layers.0.self_attn.qkv_proj.weight` is split by `num_key_value_heads = 1`, which is not a multiple of the \
         number of ranks; use another `mesh.tensor_parallel`",
    );
    let keys = serde_json::json!({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24});
    let error = not_split("phi3-tiny", &keys, 3);
    assert!(
        error.contains("`intermediate_size = 28`, which is cut into groups whose number, a power of 2 up to"),
        "{error}"
    );
}
