//! Writes the options of Megatron-LM's `pretrain_gpt.py`.

use std::fmt::Write;

use crate::emit::emission::{Emission, EmitRequest, EmittedFile};
use crate::emit::layout::print_layout;
use crate::emit::mapping::Mapping;
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::plan::{MeshOrder, Plan, System, group_size};

/// The file of the options.
const OPTIONS: &str = "megatron.args";

/// Returns the files of a plan that Megatron can run.
pub(super) fn megatron(plan: &Plan, request: &EmitRequest<'_>) -> Emission {
    let parts = ModelParts::of(request.profile);
    let stages = parts.stages(&plan.boundaries);
    let file = EmittedFile { name: OPTIONS, text: options(plan, request, &parts, &stages) };
    let mut emission = Emission::new(System::Megatron, vec![file]);
    remarks(&mut emission, plan, &parts);
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
    option("tensor-model-parallel-size", &plan.tensor_parallel);
    option("pipeline-model-parallel-size", &ranks);
    option("pipeline-model-parallel-layout", &print_layout(stages));
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
    match request.precision {
        "bf16" => text.push_str("--bf16\n"),
        "f16" => text.push_str("--fp16\n"),
        _ => {}
    }
    if plan.mesh_order == MeshOrder::Pipeline && plan.data_parallel > 1 {
        text.push_str("--use-tp-pp-dp-mapping\n");
    }
    text
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
    if plan.data_parallel > 1 {
        let text = format!(
            "no option says the {} replicas; they follow from the number of processes, {}",
            plan.data_parallel,
            u64::from(plan.schedule.ranks())
                * u64::from(plan.data_parallel)
                * u64::from(plan.tensor_parallel)
        );
        emission.remark("replicas", text);
    }
}
