//! DeepSpeed's configuration.

use pipewright_schedule::emit::{Options, ReadError, ReadPlan};
use pipewright_schedule::plan::System;

use crate::implementation::{Format, Implementation, Stack, StateFormats};
use crate::judge::given_run::{GivenRun, Place, cut_of};
use crate::judge::taken::Taken;
use crate::layout::{Layout, Recompute, ShardedState};

/// The keys that [`ReadPlan`] has, by their starts.
const PLANNED: [&str; 4] =
    ["train-batch-size", "train-micro-batch-size-per-gpu", "gradient-accumulation-steps", "pipeline."];

/// Options that change costs which the prediction does not have.
const UNPREDICTED: [&str; 6] = [
    "zero-optimization.offload-optimizer.device",
    "zero-optimization.offload-param.device",
    "zero-optimization.zero-hpz-partition-size",
    "zero-optimization.zero-quantized-weights",
    "zero-optimization.zero-quantized-gradients",
    "activation-checkpointing.cpu-checkpointing",
];

/// Reads a run. `plan` has its pipeline and its batch.
pub(super) fn read(options: &Options, plan: &ReadPlan, place: &Place<'_>) -> Result<GivenRun, ReadError> {
    const STAGES: [(&str, ShardedState); 4] = [
        ("0", ShardedState::Nothing),
        ("1", ShardedState::Optimizer),
        ("2", ShardedState::Gradients),
        ("3", ShardedState::Parameters),
    ];
    let taken = &Taken::new(options);
    let sharding = taken.one_of("zero-optimization.stage", &STAGES)?.unwrap_or(ShardedState::Nothing);
    if let Some(ranks) = taken.number("tensor-parallel.autotp-size")?.filter(|&ranks| ranks > 1) {
        return Err(options.wrong(
            "tensor-parallel.autotp-size",
            &ranks.to_string(),
            "1: it is not predicted",
        ));
    }
    if !(taken.has("bf16.enabled") | taken.has("fp16.enabled")) {
        let reason = "neither `bf16.enabled` nor `fp16.enabled` is true, and runs in f32 are not predicted; set one of them";
        return Err(ReadError { line: None, reason: reason.to_owned() });
    }
    let is_narrow = taken.word("data-types.grad-accum-dtype")?.is_some_and(|dtype| dtype != "fp32");
    let usual = StateFormats::usual(sharding, place.precision);
    let state = is_narrow.then_some(StateFormats { gradients: Format::Bf16, ..usual });
    let recomputes = plan.choice.recompute.iter().any(Option::is_some);
    let layout = Layout {
        gpus: place.gpus,
        pipeline: plan.schedule.ranks(),
        microbatch: plan.choice.microbatch_rows,
        batch: plan.microbatches().saturating_mul(plan.choice.microbatch_rows),
        cut: cut_of(plan, place.model),
        recompute: if recomputes { Recompute::Full } else { Recompute::None },
        sharding,
        implementation: Implementation { state, ..Implementation::usual(Stack::default()) },
        ..Layout::on_one_gpu(taken.sequence(place, "sequence-length")?, place.precision)
    };
    let mut run = GivenRun::new(System::Deepspeed, place.model.clone(), layout);
    taken.finish(&PLANNED, &UNPREDICTED, &mut run)?;
    Ok(run)
}
