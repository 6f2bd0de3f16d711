//! The families beyond Llama and Qwen2, trained by the pipeline as in `pipelined.rs`: each curve, on any
//! number of ranks under several schedules, within tolerance of PyTorch and bit-identical to one rank. With
//! experts, each part of the loss by itself, for each number of microbatches.

use pipewright::tensor::Precision;

use crate::pipelined_run::Model;

static LLAMA31: Model = Model::new("llama31-tiny");
static QWEN3: Model = Model::new("qwen3-tiny");
static MOE: Model = Model::new("qwen3-moe-tiny");
static MOE_WITHOUT_BALANCE: Model = Model::unbalanced("qwen3-moe-tiny");

/// Schedules with one stage per rank, with several, with weight gradients at once and put off.
const SCHEDULES: [&str; 6] = ["gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev", "zb-h1"];

/// Runs every schedule on this number of ranks with eight microbatches.
fn check_schedules(model: &Model, ranks: u32) {
    for schedule in SCHEDULES {
        model.check(schedule, ranks, 8);
    }
}

/// Does the same on two ranks, for one schedule to the end.
fn check_two_ranks(model: &Model) {
    for schedule in SCHEDULES.into_iter().filter(|schedule| *schedule != "1f1b") {
        model.check(schedule, 2, 8);
    }
    model.check_to_the_end("1f1b", 2, 8);
}

/// Runs one stage on each of eight ranks.
fn check_eight_ranks(model: &Model) {
    for schedule in ["gpipe", "1f1b", "zb-h1"] {
        model.check(schedule, 8, 8);
    }
}

/// Runs numbers of microbatches that divide the batch.
fn check_microbatches(model: &Model) {
    model.check("gpipe", 1, 1);
    model.check("gpipe", 2, 2);
    model.check("1f1b", 2, 2);
    model.check("zb-h1", 2, 4);
    model.check("1f1b", 4, 4);
    model.check("interleaved1f1b", 2, 4);
}

/// Every schedule of the catalogue puts off or merges the gradients of experts in its own order.
#[test]
fn every_schedule_trains_experts() {
    MOE.check_every_schedule(2, 8);
}

macro_rules! cases {
    ($($model:ident: $one:ident, $two:ident, $four:ident, $eight:ident, $microbatches:ident;)*) => {$(
        #[test]
        fn $one() {
            check_schedules(&$model, 1);
        }

        #[test]
        fn $two() {
            check_two_ranks(&$model);
        }

        #[test]
        fn $four() {
            check_schedules(&$model, 4);
        }

        #[test]
        fn $eight() {
            check_eight_ranks(&$model);
        }

        #[test]
        fn $microbatches() {
            check_microbatches(&$model);
        }
    )*};
}

cases! {
    LLAMA31: llama31_1_rank, llama31_2_ranks, llama31_4_ranks, llama31_8_ranks, llama31_microbatches;
    QWEN3: qwen3_1_rank, qwen3_2_ranks, qwen3_4_ranks, qwen3_8_ranks, qwen3_microbatches;
    MOE: moe_1_rank, moe_2_ranks, moe_4_ranks, moe_8_ranks, moe_microbatches;
    MOE_WITHOUT_BALANCE: unbalanced_1_rank, unbalanced_2_ranks, unbalanced_4_ranks, unbalanced_8_ranks,
        unbalanced_microbatches;
}

#[test]
fn recomputation_changes_no_bit() {
    MOE.check_recomputed("1f1b", 4, 8);
}

#[test]
#[ignore = "takes long; `.ci/run nightly` runs it"]
fn half_precision_has_the_same_bits_for_every_cut() {
    // Three times the difference that bfloat16 makes in PyTorch: `data/measure_bfloat16.py`.
    MOE.check_in(Precision::Bf16, 2, 8, 3.0 * 1.6e-4);
    QWEN3.check_in(Precision::Bf16, 2, 8, 3.0 * 3.2e-4);
}
