//! Adapters on a base that is quantised by bitsandbytes, or whose experts are in MXFP4: within tolerance of PEFT on the
//! same base, and with the bits of the decoded base and of every cut.

use std::fs;

use burn::tensor::Device;
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_models::{Adapter, AdapterStart, LoraConfig, hf};
use pipewright_schedule::{Method, Recompute};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::pipelined_run::{FIRST_STEPS, in_part, train, train_steps};
use crate::reference::{Cut, Reference, Step, Within};

/// The bases: double quantisation, single quantisation, experts, and matrices that files without quantisation have transposed.
const BASES: [&str; 4] = ["llama-nf4", "llama-fp4", "gpt-oss-mxfp4", "gpt2-nf4"];

fn run(reference: &Reference, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    train_steps(reference, schedule, ranks, 8, config, FIRST_STEPS)
}

#[test]
fn one_rank_trains_as_peft_does() {
    for base in BASES {
        let reference = Reference::load_adapted(base);
        let run = train(&reference, "gpipe", 1, 1, &PipelineConfig::default());
        assert_eq!(run.len(), reference.expected.steps.len());
        Reference::assert_within(&run, &reference.expected.steps, Within { loss: 5e-6, grad_norm: 5e-6 });
    }
}

#[test]
fn cuts_and_recomputation_have_the_bits_of_one_rank() {
    for base in BASES {
        let reference = Reference::load_adapted(base);
        let one_rank = run(&reference, "gpipe", 1, &PipelineConfig::default());
        for (schedule, ranks) in [("zb-h1", 4), ("zbvzerobubble", 2), ("1f1b", 2)] {
            assert_eq!(run(&reference, schedule, ranks, &PipelineConfig::default()), one_rank, "{schedule}");
        }
        for recompute in [Recompute::Stage, in_part(), Recompute::Parts] {
            let config = PipelineConfig { recompute, ..PipelineConfig::default() };
            assert_eq!(run(&reference, "1f1b", 2, &config), one_rank);
        }
    }
}

#[test]
fn replicas_and_tensor_ranks_train_as_peft_does() {
    let within = Within { loss: 5e-6, grad_norm: 5e-6 };
    for base in BASES {
        let reference = Reference::load_adapted(base);
        // Cuts of the inputs go through blocks of 64 or 32 elements.
        for (tensor_parallel, data_parallel) in [(1, 2), (2, 1), (4, 1)] {
            let config = PipelineConfig { tensor_parallel, data_parallel, ..PipelineConfig::default() };
            Reference::assert_within(&run(&reference, "1f1b", 2, &config), &reference.expected.steps, within);
        }
        // Each replica has the quantised matrices whole, and shares the adapters and all else.
        let replicas = |data_parallel_mode| {
            let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..PipelineConfig::default() };
            run(&reference, "1f1b", 2, &config)
        };
        for (sharded, whole) in
            replicas(DataParallelMode::Sharded).iter().zip(&replicas(DataParallelMode::Replicated))
        {
            assert_eq!(sharded.loss, whole.loss, "{base}");
        }
    }
}

/// Returns the same run on a base with the decoded elements.
fn on_decoded(reference: &Reference, name: &str) -> (TempDir, Reference) {
    let folder = TempDir::new().expect("a folder");
    let dir = folder.path().join("decoded");
    let config = &*reference.config;
    let stage = hf::load_stage(&reference.dir, config, 0..config.layers(), Device::flex()).expect("it loads");
    hf::save(&dir, config, &[&stage]).expect("it is written");
    fs::copy(reference.tokens(), dir.join("tokens.jsonl")).expect("the rows");
    let (adapter, cut) = (reference.adapter.clone(), reference.cut.clone());
    let same = if name == TIED { Reference::load(name) } else { Reference::load_adapted(name) };
    (folder, Reference { dir, adapter, cut, ..same })
}

#[test]
fn results_have_the_bits_of_the_decoded_base() {
    let dora = LoraConfig { rank: 4, dora: true, dropout: 0.2, ..LoraConfig::default() };
    for base in BASES {
        let mut reference = Reference::load_adapted(base);
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let config = PipelineConfig { precision, ..PipelineConfig::default() };
            let (_folder, decoded) = on_decoded(&reference, base);
            assert_eq!(run(&reference, "1f1b", 2, &config), run(&decoded, "1f1b", 2, &config), "{precision}");
        }
        reference.adapter = Some(Adapter { lora: dora.clone(), start: AdapterStart::Seed(5) });
        let (_folder, decoded) = on_decoded(&reference, base);
        let config = PipelineConfig::default();
        assert_eq!(run(&reference, "1f1b", 2, &config), run(&decoded, "1f1b", 2, &config), "with magnitudes");
    }
}

/// A model whose head is its table.
const TIED: &str = "llama-tied-tiny";

/// Returns a copy of the model whose table has elements of FP8 in blocks of 16 rows and 8 columns.
fn tied_in_eight_bits() -> (TempDir, Reference) {
    let folder = TempDir::new().expect("a folder");
    let same = Reference::load(TIED);
    let from = fs::read(same.dir.join("model.safetensors")).expect("the weights");
    let tensors = SafeTensors::deserialize(&from).expect("it is sound").tensors();
    let table = tensors.iter().position(|(name, _)| name == "model.embed_tokens.weight").expect("a table");
    let shape = tensors[table].1.shape().to_vec();
    let codes: Vec<u8> = (0..shape[0] * shape[1]).map(|index| (index * 37 % 251) as u8 & 0xbf).collect();
    let blocks = [shape[0].div_ceil(16), shape[1].div_ceil(8)];
    let scale = |index: usize| ((index % 11) as f32 / 970.0).to_le_bytes();
    let scales: Vec<u8> = (0..blocks[0] * blocks[1]).flat_map(scale).collect();
    let name = tensors[table].0.clone();
    let mut written: Vec<(String, TensorView<'_>)> =
        tensors.into_iter().filter(|(other, _)| *other != name).collect();
    let view = |dtype, shape, bytes| TensorView::new(dtype, shape, bytes).expect("they fit");
    written.push((format!("{name}_scale_inv"), view(Dtype::F32, blocks.to_vec(), &scales)));
    written.push((name, view(Dtype::F8_E4M3, shape, &codes)));
    let written = safetensors::serialize(written, None).expect("it is sound");
    fs::write(folder.path().join("model.safetensors"), written).expect("it is writable");
    let config = fs::read_to_string(same.dir.join("config.json")).expect("the configuration");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["quantization_config"] =
        serde_json::json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]});
    fs::write(folder.path().join("config.json"), config.to_string()).expect("it is writable");
    fs::copy(same.tokens(), folder.path().join("tokens.jsonl")).expect("the rows");
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let adapter = Some(Adapter { lora, start: AdapterStart::Seed(5) });
    let dir = folder.path().to_owned();
    (folder, Reference { dir, adapter, ..same })
}

#[test]
fn tied_tables_have_the_bits_of_their_decoded_rows() {
    let (_folder, mut quantised) = tied_in_eight_bits();
    let (_other, mut decoded) = on_decoded(&quantised, TIED);
    for (precision, schedule, ranks, tensor_parallel, parts) in [
        (Precision::F32, "gpipe", 1, 1, 1),
        (Precision::F32, "1f1b", 2, 1, 1),
        (Precision::F32, "zb-h1", 2, 1, 3),
        (Precision::F32, "1f1b", 2, 2, 1),
        (Precision::Bf16, "zbvzerobubble", 2, 1, 3),
        (Precision::Bf16, "1f1b", 1, 2, 1),
    ] {
        let cut = Cut { head_parts: parts, embedding_parts: parts, method: Method::Optimal };
        (quantised.cut, decoded.cut) = (cut.clone(), cut);
        let config = PipelineConfig { precision, tensor_parallel, ..PipelineConfig::default() };
        let (found, expected) =
            (run(&quantised, schedule, ranks, &config), run(&decoded, schedule, ranks, &config));
        assert_eq!(found, expected, "{precision}, {schedule}, {tensor_parallel} tensor ranks, {parts} parts");
    }
}
