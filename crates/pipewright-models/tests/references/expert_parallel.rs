//! Models whose experts several replicas hold together: the results are within the tolerance of PyTorch, and
//! have the bits of replicas that hold all experts.

use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_schedule::Recompute;

use crate::pipelined_run::{FIRST_STEPS, train, train_first, train_steps};
use crate::reference::Reference;

/// The models with experts, the microbatches of their batches, and numbers of replicas that divide their
/// experts.
const MIXTURES: [(&str, u32, &[u32]); 4] = [
    ("qwen3-moe-tiny", 8, &[2, 4]),
    ("nemotron-h-tiny", 8, &[2, 4]),
    ("qwen2-moe-tiny", 4, &[4]),
    ("deepseek-v3-tiny", 4, &[2]),
];

/// Returns the settings of four replicas; `expert_parallel` of them hold the experts together.
fn four_replicas(expert_parallel: u32) -> PipelineConfig {
    PipelineConfig { data_parallel: 4, expert_parallel, ..PipelineConfig::default() }
}

#[test]
fn replicas_that_hold_experts_together_have_the_results_of_the_reference() {
    for (model, microbatches, groups) in MIXTURES {
        let reference = Reference::load(model);
        let whole = train(&reference, "1f1b", 2, microbatches, &four_replicas(1));
        reference.assert_close(&whole, &reference.steps(microbatches));
        for &experts in groups {
            let run = train_first(&reference, "1f1b", 2, microbatches, &four_replicas(experts));
            assert_eq!(run, whole[..run.len()], "{model}, {experts} replicas hold the experts together");
        }
    }
}

#[test]
fn groups_of_experts_have_the_same_bits_in_every_order_of_actions() {
    for model in ["qwen3-moe-tiny", "nemotron-h-tiny"] {
        let reference = Reference::load(model);
        // Weight gradients that wait, and a forward and a backward at once.
        for (schedule, ranks) in [("zb-h1", 2), ("dualpipev", 1)] {
            let [whole, pairs, all] = [1, 2, 4].map(|experts| {
                train_steps(&reference, schedule, ranks, 8, &four_replicas(experts), FIRST_STEPS)
            });
            assert_eq!([&pairs, &all], [&whole; 2], "{model}, {schedule}");
        }
    }
}

#[test]
fn groups_of_experts_have_the_same_bits_if_parameters_are_sharded() {
    for (model, schedule, ranks, mode) in [
        ("qwen3-moe-tiny", "1f1b", 2, DataParallelMode::Sharded),
        ("qwen3-moe-tiny", "zb-h1", 2, DataParallelMode::Hybrid { shards: 2 }),
        ("nemotron-h-tiny", "1f1b", 2, DataParallelMode::Sharded),
        ("nemotron-h-tiny", "dualpipev", 1, DataParallelMode::Hybrid { shards: 2 }),
    ] {
        let reference = Reference::load(model);
        let run = |experts, data_parallel_mode| {
            let config = PipelineConfig { data_parallel_mode, ..four_replicas(experts) };
            train_steps(&reference, schedule, ranks, 8, &config, FIRST_STEPS)
        };
        let whole = run(1, DataParallelMode::Replicated);
        for experts in [1, 2, 4] {
            assert_eq!(run(experts, mode), whole, "{model}, {schedule}, {mode:?}, {experts}");
        }
    }
}

#[test]
fn tensor_ranks_of_groups_have_the_bits_of_tensor_ranks_with_all_experts() {
    for (model, schedule, ranks, mode) in [
        ("qwen3-moe-tiny", "1f1b", 2, DataParallelMode::Replicated),
        ("nemotron-h-tiny", "1f1b", 1, DataParallelMode::Sharded),
        ("qwen3-moe-tiny", "dualpipev", 1, DataParallelMode::Replicated),
    ] {
        let reference = Reference::load(model);
        let run = |expert_parallel| {
            let config = PipelineConfig {
                data_parallel: 2,
                tensor_parallel: 2,
                data_parallel_mode: mode,
                expert_parallel,
                ..PipelineConfig::default()
            };
            train_steps(&reference, schedule, ranks, 8, &config, FIRST_STEPS)
        };
        assert_eq!(run(2), run(1), "{model}, {schedule}, {mode:?}");
    }
}

#[test]
fn recomputed_stages_exchange_tokens_again() {
    let reference = Reference::load("qwen3-moe-tiny");
    let run = |experts, recompute| {
        let config = PipelineConfig { recompute, ..four_replicas(experts) };
        train_steps(&reference, "1f1b", 2, 8, &config, FIRST_STEPS)
    };
    let whole = run(1, Recompute::None);
    for recompute in [Recompute::Stage, Recompute::Block] {
        assert_eq!(run(2, recompute), whole);
    }
}

#[test]
fn groups_of_experts_have_the_same_bits_in_half_precision() {
    let reference = Reference::load("qwen3-moe-tiny");
    let [whole, pairs] = [1, 2].map(|experts| {
        let config = PipelineConfig { precision: Precision::Bf16, ..four_replicas(experts) };
        train_steps(&reference, "1f1b", 2, 8, &config, FIRST_STEPS)
    });
    assert_eq!(pairs, whole);
}
