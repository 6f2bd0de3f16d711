//! The options of torchtitan, of 0.3 and of its main branch, and the TOML of earlier versions.

use pipewright_schedule::emit::{CHECKPOINTING, GivenOption, Options, ReadError, ReadPlan};
use pipewright_schedule::generate::{ScheduleSpec, catalogue, find, generate};
use pipewright_schedule::plan::System;

use crate::implementation::{Graphs, Implementation, KernelFusion, Loss, NumberFormat, Stack, StateFormats};
use crate::judge::given_run::{GivenRun, RunContext, cut_of};
use crate::judge::taken::Taken;
use crate::layout::{Layout, Precision, Recompute, ShardedState};

/// The tokens of a row on the main branch.
const LENGTH: &str = "training.max-context-length";

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
const UNPREDICTED: [&str; 5] = [
    "training.enable-cpu-offload",
    "float8.enable-fsdp-float8-all-gather",
    "quantize.linear.float8.enable-fsdp-float8-all-gather",
    "parallelism.enable-fsdp-symm-mem",
    "parallelism.disable-loss-parallel",
];

/// Reads a run. `plan` has its pipeline and its batch.
pub(super) fn read(
    options: &Options,
    plan: &ReadPlan,
    place: &RunContext<'_>,
) -> Result<GivenRun, ReadError> {
    let taken = &Taken::new(options);
    let counts_tokens = counts_tokens(options);
    let sequence = taken.sequence(place, if counts_tokens { LENGTH } else { "training.seq-len" })?;
    let size = |key| taken.number(key).map(|size| size.unwrap_or(1));
    let (tensor, pipeline) = (plan.choice.mesh.tensor, plan.schedule.ranks());
    let (context, expert) =
        (size("parallelism.context-parallel-degree")?, size("parallelism.expert-parallel-degree")?);
    let replicated = size("parallelism.data-parallel-replicate-degree")?;
    let is_sharded = plan.choice.mesh.data > replicated || context > 1;
    let policy = taken.word("parallelism.fsdp-reshard-after-forward")?;
    let [is_compiled, was_compiled] = ["compile.enable", "training.compile"].map(|key| taken.has(key));
    let overlaps = ["compile.enable-async-tensor-parallel", "parallelism.enable-async-tensor-parallel"]
        .map(|key| taken.has(key));
    let has_no_graphs = taken.has("training.disable-cuda-graphs");
    let mut implementation = Implementation {
        // The main branch takes the logits of some tokens at a time.
        loss: if counts_tokens { Loss::Chunked } else { Loss::Separate },
        kernels: if is_compiled || was_compiled { KernelFusion::Fused } else { KernelFusion::Separate },
        graphs: if counts_tokens && !has_no_graphs { Graphs::Full } else { Graphs::None },
        overlaps_tensor: Some(overlaps.contains(&true)),
        reshards: match policy.as_deref() {
            Some("never") => false,
            Some("always") => true,
            _ => pipeline == 1,
        },
        ..Implementation::usual(Stack::Torchtitan)
    };
    if taken.word("training.dtype")?.as_deref() == Some("bfloat16") {
        let format = NumberFormat::Bf16;
        implementation.state =
            Some(StateFormats { weights: format, main_weights: None, moments: format, gradients: format });
    }
    let layout = Layout {
        gpus: place.gpus,
        tensor,
        pipeline,
        chunks: plan.schedule.placement().stages_per_rank(),
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
        ..Layout::on_one_gpu(sequence, precision(taken, place)?)
    };
    let rows = plan.microbatches().saturating_mul(plan.choice.microbatch_rows).saturating_mul(plan.runs);
    let mut run = GivenRun::new(System::Torchtitan, place.model.clone(), Layout { batch: rows, ..layout });
    taken.finish(&PLANNED, &UNPREDICTED, &mut run)?;
    Ok(run)
}

/// Returns whether the options are of the main branch, which counts tokens.
fn counts_tokens(options: &Options) -> bool {
    let is_of_main = |key: &str| key.starts_with("training.num-tokens") || key == LENGTH;
    options.list.iter().any(|entry| is_of_main(&entry.key))
}

/// Returns the options with the tokens of a row of the place, if the options need them and do not have them: the plan
/// would have the default of the main branch.
pub(super) fn with_length(options: &Options, place: &RunContext<'_>) -> Options {
    let mut options = options.clone();
    if let Some(tokens) = place.sequence
        && counts_tokens(&options)
        && options.find(LENGTH).is_none()
    {
        options.list.push(GivenOption::new(LENGTH, vec![tokens.to_string()], 1));
    }
    options
}

fn sequence_parallel(taken: &Taken<'_>) -> bool {
    let key = "parallelism.enable-sequence-parallel";
    let (is_on, is_off) = (taken.has(key), taken.has("parallelism.no-enable-sequence-parallel"));
    !is_off && (is_on || taken.options.find(key).is_none())
}

/// Returns the name of the schedule. A table is compared with the schedules of the same size.
fn schedule(plan: &ReadPlan) -> Result<Option<String>, ReadError> {
    let (schedule, ranks) = (&plan.schedule, plan.schedule.ranks());
    let spec = ScheduleSpec {
        ranks,
        stages_per_rank: Some(schedule.placement().stages_per_rank()),
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
fn precision(taken: &Taken<'_>, place: &RunContext<'_>) -> Result<Precision, ReadError> {
    const FORMATS: [(&str, Precision); 2] = [("bfloat16", Precision::Half), ("float32", Precision::Single)];
    let converters = taken.list("model.converters")?.join(",");
    let parameters = taken.one_of("training.mixed-precision-param", &FORMATS)?;
    Ok(match () {
        () if converters.contains("mx") => Precision::Mxfp8,
        () if converters.contains("float8") => Precision::Fp8,
        () if parameters == Some(Precision::Single) => Precision::Single,
        () => place.precision.or(parameters).unwrap_or(Precision::Half),
    })
}
