//! Writes the options of torchtitan, and the table of computations that they name.

use std::fmt::Write;

use crate::csv::print_schedule;
use crate::emit::emission::{Emission, EmitRequest, EmittedFile};
use crate::emit::emission::{MeshOptions, RecomputedPart, Release};
use crate::emit::mapping::{Mapping, torchtitan_names};
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::emit::modules::PYTORCH;
use crate::mesh::{Mesh, MeshOrder, ShardedState};
use crate::plan::{Plan, PlanSettings, System, is_loop};
use crate::words::counted;

/// The file of the options.
const OPTIONS: &str = "torchtitan.args";
/// The file of the table.
const TABLE: &str = "schedule.csv";

/// Returns the files of a plan that torchtitan can run.
pub(super) fn torchtitan(plan: &Plan, request: &EmitRequest<'_>) -> Emission {
    let stages = ModelParts::of(request.profile).stages(&plan.boundaries);
    let mut files = vec![EmittedFile { name: OPTIONS, text: options(plan, request, &stages) }];
    if needs_table(plan) {
        files.push(EmittedFile { name: TABLE, text: print_schedule(&plan.schedule) });
    }
    let mut emission = Emission::new(System::Torchtitan, files);
    remarks(&mut emission, plan, request);
    if request.release == Release::Main && request.profile.tokens.is_none() {
        let text = "the profile does not say the tokens of a row, which the options of the main branch need; these are of 0.3";
        emission.remark("tokens", text);
    }
    if let Some(mesh) = request.mesh() {
        mesh_remarks(&mut emission, mesh, plan.mesh);
    }
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

/// Returns whether torchtitan needs the table of computations, because PyTorch does not make the schedule by itself.
fn needs_table(plan: &Plan) -> bool {
    plan.schedule.placement().stages() > 1 && !pytorch_name(plan).1
}

/// Returns the options, without the ones that have torchtitan's defaults.
fn options(plan: &Plan, request: &EmitRequest<'_>, stages: &[StageParts]) -> String {
    let mut text = String::new();
    let mut option = |key: &str, value: &dyn std::fmt::Display| {
        writeln!(text, "{}", format!("--{key} {value}").trim_end()).expect("a string takes all text");
    };
    let modules: Vec<String> = stages.iter().map(|stage| torchtitan_names(stage).join(",")).collect();
    let slash = if request.folder.is_empty() || request.folder.ends_with('/') { "" } else { "/" };
    let rows = u64::from(plan.microbatch_rows);
    let (ranks, replicas) = (plan.schedule.ranks(), plan.mesh.data);
    if stages.len() > 1 {
        option("parallelism.pipeline_parallel_degree", &ranks);
        option("parallelism.pipeline_parallel_schedule", &pytorch_name(plan).0);
        option("parallelism.module_fqns_per_model_part", &modules.join(" "));
    }
    if needs_table(plan) {
        option("parallelism.pipeline_parallel_schedule_csv", &format!("{}{slash}{TABLE}", request.folder));
    }
    let shards = request.shards(replicas);
    if replicas > shards {
        option("parallelism.data_parallel_replicate_degree", &(replicas / shards));
    }
    option("parallelism.data_parallel_shard_degree", &shards);
    if plan.mesh.tensor > 1 {
        option("parallelism.tensor_parallel_degree", &plan.mesh.tensor);
    }
    // Without a pipeline, a local batch is one microbatch, and a step accumulates several.
    let microbatches = u64::from(if ranks > 1 { plan.schedule.microbatches() } else { 1 });
    let step_rows = rows * u64::from(plan.microbatches());
    // Graphs of CUDA capture neither pipelines nor the usual exchanges of tokens between experts.
    let has_no_graphs = ranks > 1 || plan.mesh.experts > 1;
    match (request.release, request.profile.tokens) {
        (Release::Main, Some(tokens)) => {
            let tokens = u64::from(tokens);
            option("training.max_context_length", &tokens);
            option("training.num_tokens_per_microbatch_per_dp_rank", &(rows * tokens));
            option("training.num_tokens_per_train_step", &(step_rows * tokens));
            if ranks > 1 {
                option("parallelism.num_pp_microbatches", &microbatches);
            }
            if has_no_graphs {
                option("training.disable_cuda_graphs", &"");
            }
        }
        (_, tokens) => {
            if ranks > 1 && rows > 1 {
                option("parallelism.pipeline_parallel_microbatch_size", &rows);
            }
            option("training.local_batch_size", &(rows * microbatches));
            option("training.global_batch_size", &step_rows);
            if let Some(tokens) = tokens {
                option("training.seq_len", &tokens);
            }
        }
    }
    if request.precision != "bf16" {
        option("training.mixed_precision_param", &"float32");
    }
    option("compile.enable", &"");
    let checkpointing = match request.mesh() {
        None if plan.recomputes() => "full",
        None => "none",
        Some(mesh) => {
            text.push_str(&mesh_options(mesh, plan.mesh));
            checkpointing(mesh)
        }
    };
    writeln!(text, "activation-checkpoint:{checkpointing}").expect("a string takes all text");
    text
}

/// Returns the options of the parts of a plan for a cluster that a plan without a cluster does not have.
fn mesh_options(mesh: &MeshOptions, sizes: Mesh) -> String {
    let mut lines = Vec::new();
    if sizes.context > 1 {
        lines.push(format!("--parallelism.context_parallel_degree {}", sizes.context));
    }
    if mesh.expert_tensor.is_some() {
        lines.push(format!("--parallelism.expert_parallel_degree {}", sizes.experts));
    }
    if sizes.tensor > 1 && !mesh.sequence_parallel {
        lines.push("--parallelism.no_enable_sequence_parallel".to_owned());
    }
    // The default differs between runs with and without a pipeline, so the policy is always written. A
    // pipeline with `always` would gather the parameters again for each microbatch, and the plan gathers them
    // once per step.
    let policy = match mesh.sharded {
        ShardedState::Nothing | ShardedState::Optimizer => None,
        ShardedState::Gradients => Some("never"),
        ShardedState::Parameters => Some(if sizes.pipeline > 1 { "never" } else { "always" }),
    };
    lines.extend(policy.map(|policy| format!("--parallelism.fsdp_reshard_after_forward {policy}")));
    lines.into_iter().map(|line| line + "\n").collect()
}

fn checkpointing(mesh: &MeshOptions) -> &'static str {
    match mesh.recompute {
        RecomputedPart::Nothing => "none",
        RecomputedPart::Scores | RecomputedPart::Modules(_) | RecomputedPart::Elementwise => "selective",
        RecomputedPart::Block => "full",
    }
}

fn mesh_remarks(emission: &mut Emission, mesh: &MeshOptions, sizes: Mesh) {
    if mesh.predictors > 0 {
        let text = format!(
            "`module_fqns_per_model_part` does not name the {} that predict further tokens, which the plan has in the last \
             stage; add the names of your model to it",
            counted(mesh.predictors, "block")
        );
        emission.remark("predictors", text);
    }
    if let Some(narrow) = mesh.narrow {
        let name = narrow.name();
        let text = format!(
            "{name} is a choice of the model's configuration, not an option; products are in bf16 without it"
        );
        emission.remark("precision", text);
    }
    if mesh.sharded == ShardedState::Gradients {
        let text = "`never` gathers the parameters once per microbatch, of which the plan has one, and keeps them until its \
                    backward ends; between steps they are sharded, which the plan does not need";
        emission.remark("replicas", text);
    }
    if sizes.context > 1 {
        let text = "context parallelism needs a configuration of the model with FlexAttention; torchtitan refuses its other kinds";
        emission.remark("attention", text);
    }
}

fn remarks(emission: &mut Emission, plan: &Plan, request: &EmitRequest<'_>) {
    let (name, has_schedule) = pytorch_name(plan);
    let text = if has_schedule {
        format!("PyTorch has this schedule as `{name}`")
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
    if plan.mesh.order == MeshOrder::Pipeline && plan.mesh.data > 1 {
        let text = "the replicas of a stage have consecutive numbers, and in the plan the ranks of a pipeline have them. \
                    Without nodes, the prediction is the same for both";
        emission.remark("order of ranks", text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::emission::NO_OPTIONS;

    fn check(mesh: MeshOptions, [pipeline, tensor]: [u32; 2], expected: &str) {
        check_mesh(mesh, Mesh { pipeline, tensor, ..Mesh::default() }, expected);
    }

    fn check_mesh(mesh: MeshOptions, sizes: Mesh, expected: &str) {
        assert_eq!(mesh_options(&mesh, sizes), expected, "{mesh:?}");
    }

    #[test]
    fn each_part_has_its_option() {
        check(NO_OPTIONS, [4, 1], "");
        let context = Mesh { context: 2, ..Mesh::default() };
        check_mesh(NO_OPTIONS, context, "--parallelism.context_parallel_degree 2\n");
        let experts = Mesh { experts: 4, ..Mesh::default() };
        let with_experts = MeshOptions { expert_tensor: Some(1), ..NO_OPTIONS };
        check_mesh(with_experts, experts, "--parallelism.expert_parallel_degree 4\n");
        check(NO_OPTIONS, [1, 2], "--parallelism.no_enable_sequence_parallel\n");
        check(MeshOptions { sequence_parallel: true, ..NO_OPTIONS }, [1, 2], "");
        let policy = |sharded, pipeline, expected: &str| {
            let expected = format!("--parallelism.fsdp_reshard_after_forward {expected}\n");
            check(MeshOptions { sharded, ..NO_OPTIONS }, [pipeline, 1], &expected);
        };
        policy(ShardedState::Gradients, 1, "never");
        policy(ShardedState::Parameters, 1, "always");
        policy(ShardedState::Parameters, 4, "never");
    }

    #[test]
    fn each_recomputed_part_has_its_checkpointing() {
        let of = |recompute| checkpointing(&MeshOptions { recompute, ..NO_OPTIONS });
        assert_eq!(of(RecomputedPart::Nothing), "none");
        assert_eq!(of(RecomputedPart::Elementwise), "selective");
        assert_eq!(of(RecomputedPart::Block), "full");
    }
}
