//! The options of torchtitan, of 0.3 and of its main branch, and the TOML of earlier versions.

use pipewright_schedule::emit::{CHECKPOINTING, Options, ReadError, ReadPlan};
use pipewright_schedule::generate::{ScheduleSpec, catalogue, find, generate};
use pipewright_schedule::plan::System;

use crate::implementation::{Format, Graphs, Implementation, Kernels, Loss, Stack, StateFormats};
use crate::judge::given_run::{GivenRun, Place, cut_of};
use crate::judge::taken::Taken;
use crate::layout::{Layout, Precision, Recompute, ShardedState};

/// The keys that [`ReadPlan`] has, or that its reader checks, by their starts.
const PLANNED: [&str; 6] = [
    "parallelism.",
    "training.local-batch-size",
    "training.global-batch-size",
    "training.num-tokens",
    "training.mixed-precision-reduce",
    CHECKPOINTING,
];

/// Options that change costs which the prediction does not have.
const UNPREDICTED: [&str; 6] = [
    "training.enable-cpu-offload",
    "float8.enable-fsdp-float8-all-gather",
    "quantize.linear.float8.enable-fsdp-float8-all-gather",
    "parallelism.enable-fsdp-symm-mem",
    "parallelism.disable-loss-parallel",
    "training.mixed-precision-param",
];

/// Reads a run. `plan` has its pipeline and its batch.
pub(super) fn read(options: &Options, plan: &ReadPlan, place: &Place<'_>) -> Result<GivenRun, ReadError> {
    let taken = &Taken::new(options);
    let counts_tokens = options.list.iter().any(|entry| entry.key.starts_with("training.num-tokens"));
    let sequence = taken
        .sequence(place, if counts_tokens { "training.max-context-length" } else { "training.seq-len" })?;
    let size = |key| taken.number(key).map(|size| size.unwrap_or(1));
    let (tensor, pipeline) = (plan.choice.mesh.tensor, plan.schedule.ranks());
    let (context, expert) =
        (size("parallelism.context-parallel-degree")?, size("parallelism.expert-parallel-degree")?);
    let replicated = size("parallelism.data-parallel-replicate-degree")?;
    let is_sharded = plan.choice.mesh.data > replicated || context > 1;
    let policy = taken.word("parallelism.fsdp-reshard-after-forward")?;
    let is_compiled = taken.has("compile.enable") || taken.has("training.compile");
    let mut implementation = Implementation {
        // The main branch takes the logits of some tokens at a time.
        loss: if counts_tokens { Loss::Chunked } else { Loss::Separate },
        kernels: if is_compiled { Kernels::Fused } else { Kernels::Separate },
        graphs: if counts_tokens && !taken.has("training.disable-cuda-graphs") {
            Graphs::Full
        } else {
            Graphs::None
        },
        overlaps_tensor: Some(
            taken.has("compile.enable-async-tensor-parallel")
                || taken.has("parallelism.enable-async-tensor-parallel"),
        ),
        reshards: match policy.as_deref() {
            Some("never") => false,
            Some("always") => true,
            _ => pipeline == 1,
        },
        ..Implementation::usual(Stack::Torchtitan)
    };
    if taken.word("training.dtype")?.as_deref() == Some("bfloat16") {
        let format = Format::Bf16;
        implementation.state =
            Some(StateFormats { weights: format, main_weights: None, moments: format, gradients: format });
    }
    let layout = Layout {
        gpus: place.gpus,
        tensor,
        pipeline,
        chunks: plan.schedule.placement().stages() / pipeline.max(1),
        context,
        expert,
        expert_tensor: if expert > 1 { 1 } else { tensor },
        microbatch: plan.choice.microbatch_rows,
        schedule: schedule(plan)?,
        cut: cut_of(plan, place.model),
        recompute: recompute(taken)?,
        sequence_parallel: tensor > 1 && sequence_parallel(taken),
        sharding: if is_sharded { ShardedState::Parameters } else { ShardedState::Nothing },
        shards: (is_sharded && replicated > 1).then(|| (plan.choice.mesh.data / replicated).max(1)),
        pass_microbatches: (plan.runs > 1).then(|| plan.schedule.microbatches()),
        implementation,
        ..Layout::on_one_gpu(sequence, precision(taken, place))
    };
    let rows = plan.microbatches().saturating_mul(plan.choice.microbatch_rows).saturating_mul(plan.runs);
    let mut run = GivenRun::new(System::Torchtitan, place.model.clone(), Layout { batch: rows, ..layout });
    taken.finish(&PLANNED, &UNPREDICTED, &mut run)?;
    Ok(run)
}

fn sequence_parallel(taken: &Taken<'_>) -> bool {
    let key = "parallelism.enable-sequence-parallel";
    let is_off = taken.options.find(key).is_some() && !taken.has(key);
    taken.has(key);
    !is_off && !taken.has("parallelism.no-enable-sequence-parallel")
}

/// Returns the name of the schedule. A table is compared with the schedules of the same size.
fn schedule(plan: &ReadPlan) -> Result<Option<String>, ReadError> {
    let (schedule, ranks) = (&plan.schedule, plan.schedule.ranks());
    let spec = ScheduleSpec {
        ranks,
        stages_per_rank: Some(schedule.placement().stages() / ranks.max(1)),
        microbatches: schedule.microbatches(),
        ..ScheduleSpec::default()
    };
    let named = find(&plan.schedule_name).ok().map(|generator| generator.name);
    let names = || catalogue().iter().map(|generator| generator.name);
    let same = || names().find(|name| generate(name, &spec).is_ok_and(|other| other == *schedule));
    let name = named.or_else(same).ok_or_else(|| ReadError {
        line: None,
        reason: "the table of actions is of no schedule that the prediction knows; name one with \
                 `--parallelism.pipeline_parallel_schedule` and without a table"
            .to_owned(),
    })?;
    Ok((!["1f1b", "interleaved1f1b"].contains(&name)).then(|| name.to_owned()))
}

fn recompute(taken: &Taken<'_>) -> Result<Recompute, ReadError> {
    let chosen = taken.options.list.iter().rev().find(|entry| entry.key.starts_with(CHECKPOINTING));
    match chosen.map(|entry| &entry.key[CHECKPOINTING.len()..]) {
        Some("none") => Ok(Recompute::None),
        Some("full") => Ok(Recompute::Full),
        Some("selective") => Ok(Recompute::Selective),
        Some(other) => {
            taken.note(format!("the checkpointing `{other}` is predicted as `selective`"));
            Ok(Recompute::Selective)
        }
        None => {
            taken.note("no activation checkpointing is given; it is `selective` by default");
            Ok(Recompute::Selective)
        }
    }
}

/// Returns the precision: older versions name a converter, and later ones have it in the configuration of the model.
fn precision(taken: &Taken<'_>, place: &Place<'_>) -> Precision {
    let converters = taken.list("model.converters").join(",");
    match () {
        () if converters.contains("mx") => Precision::Mxfp8,
        () if converters.contains("float8") => Precision::Fp8,
        () => place.precision,
    }
}
