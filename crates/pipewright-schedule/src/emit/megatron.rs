//! Writes the options of Megatron-LM's `pretrain_gpt.py`.

use std::fmt::Write;

use crate::emit::block_modules::Modules;
use crate::emit::emission::{Dispatch, MeshOptions, NarrowProducts, RecomputedPart};
use crate::emit::emission::{Emission, EmitRequest, EmittedFile};
use crate::emit::layout::print_layout;
use crate::emit::mapping::Mapping;
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::mesh::{Mesh, MeshOrder, ShardedState};
use crate::plan::{Plan, System, group_size};

/// The file of the options.
const OPTIONS: &str = "megatron.args";

/// Returns the files of a plan that Megatron can run.
pub(super) fn megatron(plan: &Plan, request: &EmitRequest<'_>) -> Emission {
    let parts = ModelParts::of(request.profile);
    let stages = parts.stages(&plan.boundaries);
    let file = EmittedFile { name: OPTIONS, text: options(plan, request, &parts, &stages) };
    let mut emission = Emission::new(System::Megatron, vec![file]);
    remarks(&mut emission, plan, &parts);
    if let Some(mesh) = request.mesh() {
        mesh_remarks(&mut emission, mesh, plan.mesh);
    }
    let names = |stage: &StageParts| format!("`{}`", print_layout(std::slice::from_ref(stage)));
    emission.finish(plan, request, &Mapping { system: System::Megatron, names })
}

fn options(plan: &Plan, request: &EmitRequest<'_>, parts: &ModelParts, stages: &[StageParts]) -> String {
    let mut text = String::new();
    let mut option = |key: &str, value: &dyn std::fmt::Display| {
        writeln!(text, "--{key} {value}").expect("a string takes all text");
    };
    let (ranks, microbatches) = (plan.schedule.ranks(), plan.schedule.microbatches());
    option("num-layers", &parts.blocks().len());
    if let Some(tokens) = request.profile.tokens {
        option("seq-length", &tokens);
    }
    option("tensor-model-parallel-size", &plan.mesh.tensor);
    option("pipeline-model-parallel-size", &ranks);
    option("pipeline-model-parallel-layout", &layout(stages, request.mesh()));
    let group = group_size(plan.settings.group_size, ranks, microbatches);
    if stages.len() > ranks as usize && group != ranks {
        option("microbatch-group-size-per-virtual-pipeline-stage", &group);
    }
    option("micro-batch-size", &plan.microbatch_rows);
    option("global-batch-size", &(u64::from(plan.microbatch_rows) * u64::from(plan.microbatches())));
    if plan.recomputes() {
        let most = stages.iter().map(|stage| stage.blocks.len()).max().unwrap_or(1).max(1);
        option("recompute-granularity", &"full");
        option("recompute-method", &"uniform");
        option("recompute-num-layers", &most);
    }
    if let Some(mesh) = request.mesh() {
        text.push_str(&mesh_options(mesh, plan.mesh));
    }
    match request.precision {
        "bf16" => text.push_str("--bf16\n"),
        "f16" => text.push_str("--fp16\n"),
        _ => {}
    }
    if plan.mesh.order == MeshOrder::Pipeline && plan.mesh.data > 1 {
        text.push_str("--use-tp-pp-dp-mapping\n");
    }
    text
}

/// Returns the layout of the stages. Blocks that predict further tokens are before the loss (`m`).
fn layout(stages: &[StageParts], mesh: Option<&MeshOptions>) -> String {
    let layout = print_layout(stages);
    let predictors = mesh.map_or(0, |mesh| mesh.predictors) as usize;
    match layout.strip_suffix('L') {
        Some(blocks) => format!("{blocks}{}L", "m".repeat(predictors)),
        None => layout,
    }
}

/// Returns the options of the parts of a plan for a cluster that a plan without a cluster does not have.
fn mesh_options(mesh: &MeshOptions, sizes: Mesh) -> String {
    let mut lines = Vec::new();
    if sizes.context > 1 {
        lines.push(format!("--context-parallel-size {}", sizes.context));
    }
    if let Some(expert_tensor) = mesh.expert_tensor {
        lines.push(format!("--expert-model-parallel-size {}", sizes.experts));
        lines.push(format!("--expert-tensor-parallel-size {expert_tensor}"));
    }
    lines.extend(mesh.dispatch.map(|dispatch| {
        match dispatch {
            Dispatch::AllToAll => "--moe-token-dispatcher-type alltoall",
            Dispatch::DeepEp => "--moe-token-dispatcher-type flex\n--moe-flex-dispatcher-backend deepep",
            Dispatch::HybridEp => "--moe-token-dispatcher-type flex\n--moe-flex-dispatcher-backend hybridep",
        }
        .to_owned()
    }));
    if mesh.overlaps_experts {
        lines.push("--overlap-moe-expert-parallel-comm\n--delay-wgrad-compute".to_owned());
    }
    if mesh.sequence_parallel {
        lines.push("--sequence-parallel".to_owned());
    }
    if mesh.predictors > 0 {
        lines.push(format!("--mtp-num-layers {}", mesh.predictors));
    }
    let with_fsdp = |strategy: &str| {
        format!(
            "--use-megatron-fsdp\n--use-distributed-optimizer\n--data-parallel-sharding-strategy {strategy}\n\
             --no-gradient-accumulation-fusion\n--ckpt-format fsdp_dtensor"
        )
    };
    match mesh.sharded {
        ShardedState::Nothing => lines.push("--overlap-grad-reduce".to_owned()),
        ShardedState::Optimizer => {
            lines.push(
                "--use-distributed-optimizer\n--overlap-grad-reduce\n--overlap-param-gather".to_owned(),
            );
        }
        ShardedState::Gradients => lines.push(with_fsdp("optim_grads")),
        ShardedState::Parameters => lines.push(with_fsdp("optim_grads_params")),
    }
    if mesh.shard_groups > 1 && mesh.sharded != ShardedState::Nothing {
        lines.push(format!("--num-distributed-optimizer-instances {}", mesh.shard_groups));
    }
    if mesh.bf16_gradients {
        lines.push("--grad-reduce-in-bf16".to_owned());
    }
    match mesh.recompute {
        RecomputedPart::Nothing | RecomputedPart::Elementwise => {}
        RecomputedPart::Scores => lines.push("--recompute-granularity selective".to_owned()),
        RecomputedPart::Modules(modules) => {
            lines.push(format!(
                "--recompute-granularity selective\n--recompute-modules {}",
                modules.names().join(" ")
            ));
            // Megatron has these activations only with one product of all experts of a rank.
            if modules.has(Modules::EXPERT_ACTIVATIONS) {
                lines.push("--moe-grouped-gemm".to_owned());
            }
        }
        RecomputedPart::Block => {
            let (method, blocks) = mesh.recomputed_blocks.map_or(("uniform", 1), |blocks| ("block", blocks));
            lines.push(format!(
                "--recompute-granularity full\n--recompute-method {method}\n--recompute-num-layers {blocks}"
            ));
        }
    }
    if mesh.offloaded_blocks > 0 {
        lines.push(format!("--cpu-offloading-num-layers {}", mesh.offloaded_blocks));
    }
    lines.extend(mesh.narrow.map(|narrow| {
        match narrow {
            // The default recipe, delayed scales, would quantize these parts twice, and Megatron refuses that.
            NarrowProducts::Fp8 if recomputes_quantized(mesh) => {
                "--fp8-format hybrid\n--fp8-recipe tensorwise"
            }
            NarrowProducts::Fp8 => "--fp8-format hybrid",
            NarrowProducts::Mxfp8 => "--fp8-format e4m3\n--fp8-recipe mxfp8",
            NarrowProducts::Nvfp4 => "--fp4-format e2m1\n--fp4-recipe nvfp4",
        }
        .to_owned()
    }));
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Returns whether a part is computed again whose result a narrow product takes.
fn recomputes_quantized(mesh: &MeshOptions) -> bool {
    let RecomputedPart::Modules(modules) = mesh.recompute else { return false };
    modules.has(Modules::NORMS) || modules.has(Modules::EXPERT_ACTIVATIONS)
}

fn mesh_remarks(emission: &mut Emission, mesh: &MeshOptions, sizes: Mesh) {
    if mesh.overlaps_experts {
        let text = "the overlap of experts' exchange needs PyTorch 2.6 and Transformer Engine 2.8, and an environment in which \
                    `CUDA_DEVICE_MAX_CONNECTIONS` is above 1, such as 32, on GPUs before Blackwell";
        emission.remark("environment", text);
    } else if matches!(mesh.sharded, ShardedState::Gradients | ShardedState::Parameters) {
        let text = "Megatron's FSDP needs an environment in which `CUDA_DEVICE_MAX_CONNECTIONS` is not 1";
        emission.remark("replicas", text);
    } else if sizes.tensor > 1 || sizes.context > 1 {
        let text = "tensor and context parallelism need an environment in which `CUDA_DEVICE_MAX_CONNECTIONS` is 1, on GPUs \
                    before Blackwell";
        emission.remark("environment", text);
    }
    if mesh.expert_tensor.is_some() {
        let text =
            "the numbers of experts, and of experts of a token, are options of the model; set them yourself";
        emission.remark("experts", text);
    }
}

fn remarks(emission: &mut Emission, plan: &Plan, parts: &ModelParts) {
    if let Some(other) = parts.blocks().iter().find(|kind| **kind != parts.blocks()[0]) {
        let first = &parts.blocks()[0];
        let text = format!(
            "the layout writes `t` for blocks of all kinds, such as `{first}` and `{other}`; the other options of the model say the \
             kind of each block"
        );
        emission.remark("layers", text);
    }
    if plan.recomputes() {
        let text =
            "blocks are recomputed, but neither the embedding nor the head, which the plan recomputes too";
        emission.remark("recomputation", text);
    }
    if plan.mesh.data > 1 {
        let text = format!(
            "no option says the {} replicas; they follow from the number of processes, {}",
            plan.mesh.data,
            u64::from(plan.schedule.ranks())
                * u64::from(plan.mesh.data)
                * u64::from(plan.mesh.tensor)
                * u64::from(plan.mesh.context)
        );
        emission.remark("replicas", text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::emission::NO_OPTIONS;

    /// Replicas without FSDP reduce their gradients during the backward.
    const REDUCE: &str = "--overlap-grad-reduce";

    fn check(mesh: MeshOptions, expected: &[&str]) {
        check_mesh(mesh, Mesh::default(), expected);
    }

    fn check_mesh(mesh: MeshOptions, sizes: Mesh, expected: &[&str]) {
        assert_eq!(mesh_options(&mesh, sizes).lines().collect::<Vec<_>>(), expected, "{mesh:?}");
    }

    #[test]
    fn each_part_has_its_option() {
        check(NO_OPTIONS, &[REDUCE]);
        let context = Mesh { context: 2, ..Mesh::default() };
        check_mesh(NO_OPTIONS, context, &["--context-parallel-size 2", REDUCE]);
        check_mesh(
            MeshOptions { expert_tensor: Some(2), ..NO_OPTIONS },
            Mesh { experts: 4, ..Mesh::default() },
            &["--expert-model-parallel-size 4", "--expert-tensor-parallel-size 2", REDUCE],
        );
        check(MeshOptions { sequence_parallel: true, ..NO_OPTIONS }, &["--sequence-parallel", REDUCE]);
        check(MeshOptions { predictors: 1, ..NO_OPTIONS }, &["--mtp-num-layers 1", REDUCE]);
        let groups = MeshOptions { sharded: ShardedState::Optimizer, shard_groups: 4, ..NO_OPTIONS };
        let [first, last] = ["--use-distributed-optimizer", "--num-distributed-optimizer-instances 4"];
        check(groups, &[first, REDUCE, "--overlap-param-gather", last]);
        check(MeshOptions { shard_groups: 4, ..NO_OPTIONS }, &[REDUCE]);
        check(MeshOptions { bf16_gradients: true, ..NO_OPTIONS }, &[REDUCE, "--grad-reduce-in-bf16"]);
        let offloaded = [REDUCE, "--cpu-offloading-num-layers 3"];
        check(MeshOptions { offloaded_blocks: 3, ..NO_OPTIONS }, &offloaded);
        let overlap = ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", REDUCE];
        check(MeshOptions { overlaps_experts: true, ..NO_OPTIONS }, &overlap);
    }

    #[test]
    fn each_format_of_products_has_its_options() {
        let of = |narrow, options: &[&str]| {
            check(MeshOptions { narrow: Some(narrow), ..NO_OPTIONS }, &[&[REDUCE], options].concat());
        };
        of(NarrowProducts::Fp8, &["--fp8-format hybrid"]);
        of(NarrowProducts::Mxfp8, &["--fp8-format e4m3", "--fp8-recipe mxfp8"]);
        of(NarrowProducts::Nvfp4, &["--fp4-format e2m1", "--fp4-recipe nvfp4"]);
    }

    #[test]
    fn each_dispatcher_has_its_options() {
        let of = |dispatch, options: &[&str]| {
            check(MeshOptions { dispatch: Some(dispatch), ..NO_OPTIONS }, &[options, &[REDUCE]].concat());
        };
        of(Dispatch::AllToAll, &["--moe-token-dispatcher-type alltoall"]);
        let flex = "--moe-token-dispatcher-type flex";
        of(Dispatch::DeepEp, &[flex, "--moe-flex-dispatcher-backend deepep"]);
        of(Dispatch::HybridEp, &[flex, "--moe-flex-dispatcher-backend hybridep"]);
    }

    #[test]
    fn each_recomputed_part_has_its_options() {
        let recompute = |recompute| MeshOptions { recompute, ..NO_OPTIONS };
        check(recompute(RecomputedPart::Scores), &[REDUCE, "--recompute-granularity selective"]);
        let block =
            ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"];
        check(recompute(RecomputedPart::Block), &[&[REDUCE], &block[..]].concat());
        let some = MeshOptions { recomputed_blocks: Some(3), ..recompute(RecomputedPart::Block) };
        let block = ["--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 3"];
        check(some, &[&[REDUCE], &block[..]].concat());
        let modules = RecomputedPart::Modules(Modules::LATENT.with(Modules::NORMS));
        let named = ["--recompute-granularity selective", "--recompute-modules mla_up_proj layernorm"];
        check(recompute(modules), &[&[REDUCE], &named[..]].concat());
        let selective = "--recompute-granularity selective";
        let activations = [REDUCE, selective, "--recompute-modules moe_act", "--moe-grouped-gemm"];
        check(recompute(RecomputedPart::Modules(Modules::EXPERT_ACTIVATIONS)), &activations);
    }

    /// Delayed scales, the default recipe of FP8, are refused if their inputs are computed again.
    #[test]
    fn quantized_parts_that_are_recomputed_need_scales_of_their_own() {
        let of = |narrow, modules, options: &[&str]| {
            let recompute = RecomputedPart::Modules(modules);
            let mesh = MeshOptions { narrow: Some(narrow), recompute, ..NO_OPTIONS };
            let text = mesh_options(&mesh, Mesh::default());
            let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("--fp")).collect();
            assert_eq!(lines, options, "{mesh:?}");
        };
        let tensorwise = ["--fp8-format hybrid", "--fp8-recipe tensorwise"];
        of(NarrowProducts::Fp8, Modules::NORMS, &tensorwise);
        of(NarrowProducts::Fp8, Modules::SCORES.with(Modules::EXPERT_ACTIVATIONS), &tensorwise);
        of(NarrowProducts::Fp8, Modules::SCORES, &["--fp8-format hybrid"]);
        of(NarrowProducts::Mxfp8, Modules::NORMS, &["--fp8-format e4m3", "--fp8-recipe mxfp8"]);
    }

    #[test]
    fn each_sharding_has_its_options() {
        let sharded = |sharded| MeshOptions { sharded, ..NO_OPTIONS };
        let optimizer = ["--use-distributed-optimizer", REDUCE, "--overlap-param-gather"];
        check(sharded(ShardedState::Optimizer), &optimizer);
        let with_fsdp = |sharding, strategy: &str| {
            let strategy = format!("--data-parallel-sharding-strategy {strategy}");
            let options = [
                "--use-megatron-fsdp",
                "--use-distributed-optimizer",
                &strategy,
                "--no-gradient-accumulation-fusion",
                "--ckpt-format fsdp_dtensor",
            ];
            check(sharded(sharding), &options);
        };
        with_fsdp(ShardedState::Gradients, "optim_grads");
        with_fsdp(ShardedState::Parameters, "optim_grads_params");
    }
}
