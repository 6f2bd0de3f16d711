//! Adapters on a frozen base, trained by the pipeline: within tolerance of PEFT
//! (`data/make_lora_references.py`), and bit-identical for every cut and schedule.

use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_kernel::bf16_product::testing::run_without_instruction;
use pipewright_models::{Adapter, AdapterStart, LoraConfig};
use pipewright_schedule::Recompute;

use crate::pipelined_run::{FIRST_STEPS, in_part, train, train_first, train_steps};
use crate::reference::{Reference, Step, Within};

/// The adapters with references.
const ADAPTERS: [&str; 9] = [
    "qwen3-tiny",
    "llama-tiny",
    "gpt2-tiny",
    "qwen2-tiny-dora",
    "granite-hybrid-tiny",
    SAVED,
    HEAD,
    EMBEDDING,
    TIED_EMBEDDING,
];

/// An adapter on the head too.
const HEAD: &str = "llama-tiny-head";

/// An adapter on the embedding too.
const EMBEDDING: &str = "llama-tiny-embedding";

/// The same of a model whose head multiplies by the table of the embedding.
const TIED_EMBEDDING: &str = "llama-tied-tiny-embedding";

/// An adapter with modules that are trained whole: the embedding, the head and norms.
const SAVED: &str = "llama-tiny-saved";

/// An adapter of a family with experts, whose dense and shared layers PEFT has as parameters.
const OF_EXPERTS: &str = "deepseek-v3-tiny";

/// Adapters of the experts that a router chooses: of gate, up and down, of down alone, next to the matrices of Mamba-2, and of the
/// experts' own layers in transformers 4.
const ROUTED: [&str; 4] =
    ["qwen3-moe-tiny-experts", "mixtral-tiny-experts", "granite-hybrid-rope-tiny-mamba", OWN_EXPERTS];
const OWN_EXPERTS: &str = "qwen3-moe-tiny-own-experts";

/// Trains the adapter of a model for the first steps with other settings.
fn check_first_steps(model: &str, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    let reference = Reference::load_adapted(model);
    let run = train_steps(&reference, schedule, ranks, 8, config, FIRST_STEPS);
    reference.assert_close(&run, &reference.expected.steps[..FIRST_STEPS]);
    run
}

#[test]
fn one_rank_trains_as_peft_does() {
    for adapter in ADAPTERS.into_iter().chain([OF_EXPERTS]).chain(ROUTED) {
        let reference = Reference::load_adapted(adapter);
        let run = train(&reference, "gpipe", 1, 1, &PipelineConfig::default());
        reference.assert_close(&run, &reference.expected.steps);
    }
}

#[test]
fn schedules_have_the_bits_of_one_rank() {
    for adapter in ADAPTERS.into_iter().chain(ROUTED) {
        let reference = Reference::load_adapted(adapter);
        let one_rank = train_first(&reference, "gpipe", 1, 4, &PipelineConfig::default());
        reference.assert_close(&one_rank, &reference.expected.steps[..one_rank.len()]);
        for schedule in ["1f1b", "zb-h1", "zbvzerobubble"] {
            let run = train_first(&reference, schedule, 2, 4, &PipelineConfig::default());
            assert_eq!(run, one_rank, "{adapter}, {schedule}");
        }
    }
}

#[test]
fn other_cuts_and_recomputation_have_the_bits_of_one_rank() {
    let plain = PipelineConfig::default();
    for adapter in ["qwen3-tiny", "qwen2-tiny-dora"] {
        let one_rank = check_first_steps(adapter, "gpipe", 1, &plain);
        for (schedule, ranks) in [("zb-h1", 4), ("interleavedzerobubble", 2), ("dualpipev", 2)] {
            assert_eq!(check_first_steps(adapter, schedule, ranks, &plain), one_rank, "{schedule}");
        }
        for recompute in [Recompute::Stage, Recompute::Block, in_part(), Recompute::Parts] {
            let config = PipelineConfig { recompute, ..PipelineConfig::default() };
            assert_eq!(check_first_steps(adapter, "1f1b", 2, &config), one_rank);
        }
    }
}

#[test]
fn replicas_and_tensor_ranks_train_as_peft_does() {
    for data_parallel_mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..PipelineConfig::default() };
        check_first_steps("qwen3-tiny", "1f1b", 2, &config);
        check_first_steps("qwen2-tiny-dora", "1f1b", 2, &config);
        check_first_steps(SAVED, "1f1b", 2, &config);
        check_first_steps(TIED_EMBEDDING, "1f1b", 2, &config);
    }
    let config = PipelineConfig { tensor_parallel: 2, sequence_parallel: true, ..PipelineConfig::default() };
    check_first_steps(EMBEDDING, "1f1b", 2, &config);
    // The outputs of joined projections are in groups.
    let config = PipelineConfig { tensor_parallel: 2, ..PipelineConfig::default() };
    check_first_steps("gpt2-tiny", "zb-h1", 2, &config);
    for (tensor_parallel, ranks) in [(2, 2), (4, 1)] {
        let config = PipelineConfig { tensor_parallel, ..PipelineConfig::default() };
        check_first_steps("qwen3-tiny", "zb-h1", ranks, &config);
        check_first_steps("llama-tiny", "1f1b", ranks, &config);
        check_first_steps(SAVED, "zb-h1", ranks, &config);
        check_first_steps(HEAD, "zb-h1", ranks, &config);
        check_first_steps(EMBEDDING, "zb-h1", ranks, &config);
        // The norms of columns are sums over the ranks where inputs are split.
        check_first_steps("qwen2-tiny-dora", "zb-h1", ranks, &config);
    }
    // Each rank has a part of every expert, or whole experts.
    for whole_experts in [false, true] {
        let config = PipelineConfig { tensor_parallel: 2, whole_experts, ..PipelineConfig::default() };
        for adapter in ROUTED {
            check_first_steps(adapter, "zb-h1", 2, &config);
        }
    }
    // Each replica holds half of the experts, and has the bits of one that holds all.
    for adapter in ROUTED {
        let run = |expert_parallel| {
            let config = PipelineConfig { data_parallel: 2, expert_parallel, ..PipelineConfig::default() };
            check_first_steps(adapter, "zb-h1", 2, &config)
        };
        assert_eq!(run(2), run(1), "{adapter}");
    }
}

/// Returns a model with new adapters.
fn with_new(lora: LoraConfig) -> Reference {
    let adapter = Some(Adapter { lora, start: AdapterStart::Seed(5) });
    Reference { adapter, ..Reference::load_adapted("qwen3-tiny") }
}

#[test]
fn masks_and_first_values_do_not_depend_on_the_cut() {
    let plain = PipelineConfig::default();
    let recomputing = [Recompute::Stage, in_part()]
        .map(|recompute| PipelineConfig { recompute, ..PipelineConfig::default() });
    let run = |reference: &Reference, schedule, ranks, config| {
        train_steps(reference, schedule, ranks, 8, config, FIRST_STEPS)
    };
    let without_dropout = Reference::load_adapted("qwen3-tiny").expected.steps;
    for dora in [false, true] {
        let reference =
            with_new(LoraConfig { rank: 4, alpha: 8.0, dropout: 0.3, dora, ..LoraConfig::default() });
        let one_rank = run(&reference, "gpipe", 1, &plain);
        assert_eq!(run(&reference, "zbvzerobubble", 2, &plain), one_rank);
        for config in &recomputing {
            assert_eq!(run(&reference, "1f1b", 4, config), one_rank);
        }
        assert_ne!(one_rank[1].grad_norm, without_dropout[1].grad_norm, "nothing is dropped");
        // New adapters add zero, so the first loss is the base's.
        assert!((one_rank[0].loss - without_dropout[0].loss).abs() < 1e-6 * one_rank[0].loss);
    }
}

/// The base computes in half precision, and the adapters in single precision.
#[test]
fn half_precision_stays_near_single_precision() {
    let config = PipelineConfig { precision: Precision::Bf16, ..PipelineConfig::default() };
    for adapter in ["llama-tiny", "qwen2-tiny-dora", SAVED, EMBEDDING] {
        let reference = Reference::load_adapted(adapter);
        let run = train_steps(&reference, "1f1b", 2, 8, &config, 3);
        Reference::assert_within(&run, &reference.expected.steps, Within { loss: 4e-3, grad_norm: 5e-2 });
    }
}

#[test]
fn half_precision_has_the_same_bits_for_every_cut() {
    let reference = Reference::load_adapted("llama-tiny");
    let run = |schedule, ranks, recompute| {
        let config = PipelineConfig { precision: Precision::Bf16, recompute, ..PipelineConfig::default() };
        train_steps(&reference, schedule, ranks, 8, &config, FIRST_STEPS)
    };
    let one_rank = run("gpipe", 1, Recompute::None);
    for (schedule, recompute) in
        [("zb-h1", Recompute::None), ("zbvzerobubble", Recompute::Parts), ("1f1b", Recompute::Stage)]
    {
        assert_eq!(run(schedule, 2, recompute), one_rank, "{schedule}");
    }
}

#[test]
fn half_precision_has_the_same_bits_without_the_instruction() {
    run_without_instruction("lora::half_precision_has_the_same_bits_for_every_cut");
}
