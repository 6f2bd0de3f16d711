//! DeepSpeed's configuration.

use pipewright_schedule::emit::{DEEPSPEED_SIZES, GivenOption, Options, ReadError, ReadPlan};
use pipewright_schedule::plan::System;

use crate::implementation::{Implementation, NumberFormat, Stack, StateFormats};
use crate::judge::given_run::{GivenRun, RunContext, cut_of};
use crate::judge::taken::Taken;
use crate::layout::{Layout, Precision, Recompute, ShardedState};

/// The keys next to the sizes of a batch that [`ReadPlan`] has, and the sections about whose `device` a note says what is
/// assumed, by their starts.
const PLANNED: [&str; 3] = ["pipeline.", OFFLOADED_STATE, OFFLOADED_PARAMETERS];
const OFFLOADED_STATE: &str = "zero-optimization.offload-optimizer";
const OFFLOADED_PARAMETERS: &str = "zero-optimization.offload-param";

/// Options that change costs which the prediction does not have.
const UNPREDICTED: [&str; 4] = [
    "zero-optimization.zero-hpz-partition-size",
    "zero-optimization.zero-quantized-weights",
    "zero-optimization.zero-quantized-gradients",
    "activation-checkpointing.cpu-checkpointing",
];

/// Reads a run. `plan` has its pipeline and its batch.
pub(super) fn read(
    options: &Options,
    plan: &ReadPlan,
    place: &RunContext<'_>,
) -> Result<GivenRun, ReadError> {
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
            "1, because tensor parallelism of DeepSpeed is not predicted",
        ));
    }
    note_offloading(taken)?;
    let (in_bf16, in_fp16) = (taken.has("bf16.enabled"), taken.has("fp16.enabled"));
    if !(in_bf16 || in_fp16) {
        let reason = "neither `bf16.enabled` nor `fp16.enabled` is true, and runs in f32 are not predicted; set one of them";
        return Err(ReadError { line: None, reason: reason.to_owned() });
    }
    let is_narrow = taken.word("data-types.grad-accum-dtype")?.is_some_and(|dtype| dtype != "fp32");
    let precision = place.precision.unwrap_or(Precision::Half);
    let usual = StateFormats::usual(sharding, precision);
    let state = is_narrow.then_some(StateFormats { gradients: NumberFormat::Bf16, ..usual });
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
        ..Layout::on_one_gpu(taken.sequence(place, "sequence-length")?, precision)
    };
    let mut run = GivenRun::new(System::Deepspeed, place.model.clone(), layout);
    let sizes = DEEPSPEED_SIZES.map(|name| GivenOption::new(name, Vec::new(), 0).key);
    let planned: Vec<&str> = sizes.iter().map(String::as_str).chain(PLANNED).collect();
    taken.finish(&planned, &UNPREDICTED, &mut run)?;
    Ok(run)
}

/// Says what is assumed if the state is not on the GPUs.
fn note_offloading(taken: &Taken<'_>) -> Result<(), ReadError> {
    const STATE: &str = "zero-optimization.offload-optimizer.device";
    const PARAMETERS: &str = "zero-optimization.offload-param.device";
    for (key, what) in [(STATE, "the optimizer's state"), (PARAMETERS, "the parameters")] {
        let device = taken.word(key)?.filter(|device| device != "none");
        let option = taken.options.find(key);
        if let Some((device, option)) = device.zip(option) {
            taken.note(format!(
                "`{}` of line {} is `{device}`, and the prediction keeps {what} on the GPUs: the run needs less memory there, \
                 and more time",
                option.name, option.line
            ));
        }
    }
    Ok(())
}
