//! Writes the options of torchtitan, and the table of computations that they name.

use std::fmt::Write;

use crate::csv::print_schedule;
use crate::emit::emission::{Emission, EmitRequest, EmittedFile};
use crate::emit::mapping::{Mapping, torchtitan_names};
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::emit::modules::PYTORCH;
use crate::plan::{MeshOrder, Plan, PlanSettings, System, is_loop};

/// The file of the options.
const OPTIONS: &str = "torchtitan.args";
/// The file of the table.
const TABLE: &str = "schedule.csv";

/// Returns the files of a plan that torchtitan can run.
pub(super) fn torchtitan(plan: &Plan, request: &EmitRequest<'_>) -> Emission {
    let stages = ModelParts::of(request.profile).stages(&plan.boundaries);
    let files = vec![
        EmittedFile { name: OPTIONS, text: options(plan, request, &stages) },
        EmittedFile { name: TABLE, text: print_schedule(&plan.schedule) },
    ];
    let mut emission = Emission::new(System::Torchtitan, files);
    remarks(&mut emission, plan, request);
    let names = |stage: &StageParts| torchtitan_names(stage).join(", ");
    emission.finish(plan, request, &Mapping { system: System::Torchtitan, names })
}

/// Returns PyTorch's name of a plan's schedule, and whether it has this schedule. Otherwise the name stands
/// for the placement of the stages, which torchtitan reads from it.
fn pytorch_name(plan: &Plan) -> (&'static str, bool) {
    let placement = plan.schedule.placement();
    let named = PYTORCH.iter().find(|(own, _)| *own == plan.name);
    match named {
        Some((_, name)) => (name, plan.settings == PlanSettings::default()),
        None if !is_loop(placement) => ("ZBVZeroBubble", false),
        None if placement.stages() == placement.ranks() => ("1F1B", false),
        None => ("Interleaved1F1B", false),
    }
}

fn options(plan: &Plan, request: &EmitRequest<'_>, stages: &[StageParts]) -> String {
    let mut text = String::new();
    let mut option = |key: &str, value: &dyn std::fmt::Display| {
        writeln!(text, "--{key} {value}").expect("a string takes all text");
    };
    let modules: Vec<String> = stages.iter().map(|stage| torchtitan_names(stage).join(",")).collect();
    let slash = if request.folder.is_empty() || request.folder.ends_with('/') { "" } else { "/" };
    let rows = u64::from(plan.microbatch_rows);
    option("parallelism.pipeline_parallel_degree", &plan.schedule.ranks());
    option("parallelism.pipeline_parallel_schedule", &pytorch_name(plan).0);
    option("parallelism.pipeline_parallel_schedule_csv", &format!("{}{slash}{TABLE}", request.folder));
    option("parallelism.pipeline_parallel_microbatch_size", &plan.microbatch_rows);
    option("parallelism.module_fqns_per_model_part", &modules.join(" "));
    let shards = request.shards.min(plan.data_parallel).max(1);
    option("parallelism.data_parallel_replicate_degree", &(plan.data_parallel / shards));
    option("parallelism.data_parallel_shard_degree", &shards);
    option("parallelism.tensor_parallel_degree", &plan.tensor_parallel);
    option("training.local_batch_size", &(rows * u64::from(plan.schedule.microbatches())));
    option("training.global_batch_size", &(rows * u64::from(plan.microbatches())));
    if let Some(tokens) = request.profile.tokens {
        option("training.seq_len", &tokens);
    }
    let precision = if request.precision == "bf16" { "bfloat16" } else { "float32" };
    option("training.mixed_precision_param", &precision);
    let checkpointing = if plan.recomputes() { "full" } else { "none" };
    writeln!(text, "activation-checkpoint:{checkpointing}").expect("a string takes all text");
    text
}

fn remarks(emission: &mut Emission, plan: &Plan, request: &EmitRequest<'_>) {
    let (name, has_schedule) = pytorch_name(plan);
    let text = if has_schedule {
        format!("PyTorch has this schedule as `{name}`, so `pipeline_parallel_schedule_csv` may be left out")
    } else {
        format!(
            "PyTorch has no name for it and runs the table; `pipeline_parallel_schedule` is `{name}`, from which torchtitan reads \
             only where the stages are"
        )
    };
    emission.remark("schedule", text);
    if plan.recomputes() {
        let text = "each block is recomputed by itself, and keeps its input; the embedding and the head are not recomputed. \
                    The plan keeps the input of a stage only";
        emission.remark("recomputation", text);
    }
    if request.precision == "f16" {
        emission.remark("precision", "there is no f16; the options have float32");
    }
    let is_whole = request.shards <= 1 || plan.data_parallel <= 1;
    if request.precision == "bf16" && is_whole {
        let text = "`mixed_precision_param` counts only if replicas share the parameters; without that, \
                    `--training.dtype bfloat16` computes in bf16, and keeps parameters and optimizer state in it too";
        emission.remark("precision", text);
    }
    if plan.mesh_order == MeshOrder::Pipeline && plan.data_parallel > 1 {
        let text = "the replicas of a stage have consecutive numbers, and in the plan the ranks of a pipeline have them. \
                    Without nodes, the prediction is the same for both";
        emission.remark("order of ranks", text);
    }
}
