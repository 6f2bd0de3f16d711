//! The models of `golden.rs` with their embeddings cut into parts: the losses of a whole embedding to the bit,
//! for every cut between and through the parts.

use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_schedule::{Method, Recompute, ScheduleSpec, Slices};

use crate::pipelined_run::{first_steps, train_first, train_spec};
use crate::reference::{Cut, Reference, Step};

const MICROBATCHES: u32 = 8;

fn reference(name: &str, head_parts: u32, embedding_parts: u32) -> Reference {
    let whole = Reference::load(name);
    Reference { cut: Cut { head_parts, embedding_parts, method: Method::Optimal }, ..whole }
}

/// Returns the microbatches of a step, which have a row at least.
fn microbatches(reference: &Reference) -> u32 {
    MICROBATCHES.min(reference.expected.batch as u32)
}

fn run(reference: &Reference, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    train_first(reference, schedule, ranks, microbatches(reference), config)
}

/// Requires that all losses are equal. The gradient norm is a sum over parts, so its last bit may differ.
fn assert_same(found: &[Step], expected: &[Step], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.loss, expected.loss, "{what}: step {step}");
        let error = (found.grad_norm - expected.grad_norm).abs() / expected.grad_norm;
        assert!(error <= 1e-14, "{what}: step {step}: {found:?} {expected:?}");
    }
}

/// Each has its embedding in `embedding_parts` and its head in `head_parts` parts, which a tied head has in
/// common with the embedding.
#[test]
fn parts_have_the_losses_of_a_whole_embedding() {
    let schedules = ["1f1b", "interleaved1f1b", "zb-h1", "zbvzerobubble"];
    for (name, head_parts, embedding_parts, schedules) in [
        ("llama-tiny", 1, 3, &schedules[..]),
        ("llama-tiny", 3, 2, &schedules[2..3]),
        ("qwen2-tiny", 1, 5, &schedules[1..2]),
        ("llama-tied-tiny", 3, 3, &schedules[..]),
        ("gpt2-tiny", 2, 2, &schedules[1..3]),
        ("gemma3-tiny", 1, 4, &schedules[..1]),
        ("nemotron-h-tiny", 1, 3, &schedules[1..3]),
    ] {
        let what = format!("{name} in {embedding_parts} parts");
        let whole = reference(name, head_parts, 1);
        let expected = run(&whole, "gpipe", 1, &PipelineConfig::default());
        whole.assert_close(&expected, &whole.steps(microbatches(&whole))[..expected.len()]);
        let cut = reference(name, head_parts, embedding_parts);
        let one_rank = run(&cut, "gpipe", 1, &PipelineConfig::default());
        assert_same(&one_rank, &expected, &what);
        for schedule in schedules {
            let found = run(&cut, schedule, 2, &PipelineConfig::default());
            assert_eq!(found, one_rank, "{what}: {schedule}");
        }
    }
}

/// The first stages of all ranks are parts of the embedding and nothing else. The parts of a tied head share
/// their shards.
#[test]
fn every_rank_has_a_part() {
    for (name, head_parts) in [("llama-tiny", 1), ("llama-tied-tiny", 3)] {
        let whole = run(&reference(name, head_parts, 1), "gpipe", 1, &PipelineConfig::default());
        let one_rank = run(&reference(name, head_parts, 3), "gpipe", 1, &PipelineConfig::default());
        assert_same(&one_rank, &whole, name);
        let cut = Cut {
            head_parts,
            embedding_parts: 3,
            method: Method::Explicit { boundaries: vec![1, 2, 3, 4, 5] },
        };
        let cut = Reference { cut, ..Reference::load(name) };
        for schedule in ["interleaved1f1b", "interleavedzerobubble"] {
            let found = run(&cut, schedule, 3, &PipelineConfig::default());
            assert_eq!(found, one_rank, "{name}: {schedule}");
        }
    }
}

#[test]
fn recomputed_parts_have_the_same_bits() {
    let cut = reference("llama-tiny", 1, 3);
    let one_rank = run(&cut, "gpipe", 1, &PipelineConfig::default());
    for recompute in [Recompute::Stage, Recompute::Block] {
        let config = PipelineConfig { recompute, ..PipelineConfig::default() };
        assert_eq!(run(&cut, "1f1b", 4, &config), one_rank);
    }
}

#[test]
fn parts_of_sharded_replicas() {
    for (name, head_parts) in [("llama-tiny", 1), ("llama-tied-tiny", 3)] {
        let replicas = |embedding_parts, data_parallel_mode| {
            let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..PipelineConfig::default() };
            run(&reference(name, head_parts, embedding_parts), "1f1b", 2, &config)
        };
        let expected = replicas(1, DataParallelMode::Replicated);
        for mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
            assert_same(&replicas(3, mode), &expected, name);
        }
    }
}

#[test]
fn parts_in_half_precision() {
    for precision in [Precision::Bf16, Precision::F16] {
        let loss_scaling = pipewright::loss_scale::LossScaling { initial: 256.0, ..Default::default() };
        let config = PipelineConfig { precision, loss_scaling, ..PipelineConfig::default() };
        for (name, head_parts) in [("llama-tiny", 1), ("llama-tied-tiny", 3)] {
            let whole = run(&reference(name, head_parts, 1), "gpipe", 1, &config);
            let found = run(&reference(name, head_parts, 3), "1f1b", 4, &config);
            assert_same(&found, &whole, &format!("{name}, {precision}"));
        }
    }
}

/// The ids of a slice travel with it. GPT-2 also has positions, which continue from slice to slice.
#[test]
fn parts_in_slices() {
    for (name, parts) in [("llama-tiny", 3), ("gpt2-scaled-tiny", 2)] {
        let sliced = |embedding_parts, ranks| {
            let reference = reference(name, 1, embedding_parts);
            let slices = Slices::new(4);
            let spec = ScheduleSpec { ranks, microbatches: 4, slices, ..ScheduleSpec::default() };
            train_spec(&reference, "seq1f1b", spec, &PipelineConfig::default(), first_steps(&reference))
        };
        assert_same(&sliced(parts, 2), &sliced(1, 2), name);
    }
}
