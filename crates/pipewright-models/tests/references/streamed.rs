//! Adapters on a base that stays in its files: the bits of a base in memory, and errors when the files change.

use std::collections::HashMap;
use std::fs::{self, File};
use std::num::NonZeroU32;
use std::path::Path;
use std::time::{Duration, SystemTime};

use burn::tensor::{bf16, f16};
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_models::{Adapter, AdapterStart, LoraConfig};
use pipewright_schedule::{Recompute, ScheduleSpec};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};
use tempfile::TempDir;

use crate::pipelined_run::{FIRST_STEPS, train_spec, trainer};
use crate::reference::{Reference, Step};

/// The layers of the models: one stage each.
const LAYERS: u32 = 6;

/// A schedule, its ranks, and the stages of each.
type Shape = (&'static str, u32, u32);

fn spec((_, ranks, stages): Shape) -> ScheduleSpec {
    let stages_per_rank = Some(stages).filter(|_| stages > 1);
    ScheduleSpec { ranks, stages_per_rank, microbatches: 4, ..ScheduleSpec::default() }
}

fn run(reference: &Reference, shape: Shape, config: &PipelineConfig) -> Vec<Step> {
    train_spec(reference, shape.0, spec(shape), config, FIRST_STEPS)
}

/// Checks that a base in its files gives the bits of one in memory.
fn check(reference: &mut Reference, shape: Shape, window: u32, config: &PipelineConfig) {
    reference.stream_window = None;
    let resident = run(reference, shape, config);
    reference.stream_window = NonZeroU32::new(window);
    assert_eq!(run(reference, shape, config), resident, "{shape:?}, a window of {window}");
}

/// Modules that are trained whole stay in memory, and so do the rows of GGUF in their order. The matrices of a quantised GPT-2
/// are read like all others.
#[test]
fn saved_modules_are_trained_and_gguf_has_the_bits_of_a_base_in_memory() {
    for name in ["llama-tiny-saved", "llama-gguf", "gpt2-gguf", "gpt2-nf4"] {
        let mut reference = Reference::load_adapted(name);
        check(&mut reference, ("loopedbfs", 1, 4), 2, &PipelineConfig::default());
        check(&mut reference, ("1f1b", 2, 1), 1, &PipelineConfig::default());
    }
}

/// Copies the folder of a model, with its floats in another element type.
fn in_type(reference: &Reference, kind: Dtype) -> (TempDir, Reference) {
    let folder = TempDir::new().expect("a folder");
    let dir = folder.path().join("base");
    fs::create_dir(&dir).expect("a folder");
    for entry in fs::read_dir(&reference.dir).expect("the folder") {
        let path = entry.expect("a file").path();
        fs::copy(&path, dir.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let file = dir.join("model.safetensors");
    let bytes = fs::read(&file).expect("the weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("a file");
    let converted = |view: &TensorView<'_>| -> Vec<u8> {
        let singles = view.data().as_chunks().0.iter().copied().map(f32::from_le_bytes);
        match kind {
            Dtype::BF16 => singles.flat_map(|single| bf16::from_f32(single).to_le_bytes()).collect(),
            Dtype::F16 => singles.flat_map(|single| f16::from_f32(single).to_le_bytes()).collect(),
            _ => view.data().to_vec(),
        }
    };
    let data: Vec<_> = tensors
        .iter()
        .map(|(name, view)| (name.to_owned(), view.shape().to_vec(), converted(&view)))
        .collect();
    let views: HashMap<_, _> = data
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(kind, shape.clone(), bytes).expect("a tensor")))
        .collect();
    serialize_to_file(views, None, &file).expect("it is written");
    let adapter = reference.adapter.clone();
    let other = Reference { dir, adapter, ..Reference::load_adapted("llama-tiny") };
    (folder, other)
}

#[test]
fn every_cut_and_schedule_has_the_bits_of_a_base_in_memory() {
    let config = PipelineConfig::default();
    for base in ["llama-nf4", "llama-tiny"] {
        let mut reference = Reference::load_adapted(base);
        for window in [1, 2, LAYERS] {
            check(&mut reference, ("loopedbfs", 1, LAYERS), window, &config);
        }
        for shape in [
            ("gpipe", 1, 1),
            ("1f1b", 2, 1),
            ("zb-h1", 4, 1),
            ("interleaved1f1b", 2, 3),
            ("zbvzerobubble", 2, 2),
        ] {
            check(&mut reference, shape, 1, &config);
        }
    }
}

#[test]
fn recomputation_precisions_and_forms_have_the_bits_of_a_base_in_memory() {
    let shape = ("loopedbfs", 1, LAYERS);
    let mut quantised = Reference::load_adapted("llama-fp4");
    for recompute in [Recompute::Stage, Recompute::Block, Recompute::Parts] {
        check(&mut quantised, shape, 2, &PipelineConfig { recompute, ..PipelineConfig::default() });
    }
    let plain = Reference::load_adapted("llama-tiny");
    for kind in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        let (_folder, mut reference) = in_type(&plain, kind);
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            check(&mut reference, shape, 2, &PipelineConfig { precision, ..PipelineConfig::default() });
        }
    }
}

#[test]
fn replicas_tensor_ranks_and_other_families_have_the_bits_of_a_base_in_memory() {
    for base in ["llama-nf4", "llama-tiny"] {
        let mut reference = Reference::load_adapted(base);
        for (tensor_parallel, data_parallel) in [(1, 2), (2, 1)] {
            let config = PipelineConfig { tensor_parallel, data_parallel, ..PipelineConfig::default() };
            check(&mut reference, ("1f1b", 2, 1), 1, &config);
        }
    }
    // Matrices of GPT-2 stay in memory. New magnitudes are computed from the base.
    for family in ["qwen3-tiny", "deepseek-v3-tiny", "gpt2-tiny"] {
        check(&mut Reference::load_adapted(family), ("1f1b", 2, 1), 1, &PipelineConfig::default());
    }
    let lora = LoraConfig { rank: 4, dora: true, dropout: 0.2, ..LoraConfig::default() };
    let adapter = Some(Adapter { lora, start: AdapterStart::Seed(5) });
    let mut reference = Reference { adapter, ..Reference::load_adapted("llama-nf4") };
    check(&mut reference, ("loopedbfs", 1, LAYERS), 2, &PipelineConfig::default());
}

/// Checks that a change of the file after some steps ends the next one with an error.
fn check_change(steps: usize, change: &dyn Fn(&Path), expected: &str) {
    let (_folder, mut reference) = in_type(&Reference::load_adapted("llama-tiny"), Dtype::BF16);
    let file = reference.dir.join("model.safetensors");
    // Some file systems have coarse times.
    let old = SystemTime::now() - Duration::from_secs(60);
    File::options().append(true).open(&file).and_then(|file| file.set_modified(old)).expect("a time");
    reference.stream_window = NonZeroU32::new(2);
    let (mut trainer, _) =
        trainer(&reference, "loopedbfs", spec(("loopedbfs", 1, LAYERS)), &PipelineConfig::default());
    for _ in 0..steps {
        trainer.step().expect("the file is unchanged");
    }
    change(&file);
    let error = trainer.step().expect_err("the file has changed").to_string();
    for part in [
        "rank 0, stage 0",
        "the base of stage 0 cannot be read at `model.layers.0.",
        &file.display().to_string(),
        expected,
        "put back the file",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_file_that_changes_during_training_ends_the_run_in_any_step() {
    for steps in 0..3 {
        let cut = |file: &Path| {
            let file = File::options().write(true).open(file).expect("the file");
            file.set_len(20_000).expect("it is cut");
        };
        check_change(steps, &cut, "cut short while it was in use");
        check_change(
            steps,
            &|file| fs::remove_file(file).expect("it is there"),
            "removed while it was in use",
        );
        let touched = |file: &Path| {
            let file = File::options().write(true).open(file).expect("the file");
            file.set_modified(SystemTime::now()).expect("a time");
        };
        check_change(steps, &touched, "changed while it was in use");
    }
}
