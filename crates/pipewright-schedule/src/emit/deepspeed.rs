//! Writes DeepSpeed's configuration, and a module whose `PipelineModule` has the stages of the plan.

use std::slice::from_ref;

use serde_json::{Map, Value, json};

use crate::emit::emission::{Emission, EmitRequest, EmittedFile};
use crate::emit::emission::{MeshOptions, RecomputedPart};
use crate::emit::layout::print_layout;
use crate::emit::mapping::Mapping;
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::mesh::{MeshOrder, ShardedState};
use crate::plan::{Plan, System};
use crate::words::counted;

/// The file of the configuration.
const CONFIG: &str = "deepspeed.json";
/// The file of the module. `PipelineModule` takes the name of a method, and no list of layers, so a class of
/// its own sets the stages.
const MODULE: EmittedFile = EmittedFile { name: "planned_pipeline.py", text: String::new() };

/// The text of the module.
const MODULE_TEXT: &str = r#""""A DeepSpeed PipelineModule whose stages have the layers that "parts" in deepspeed.json says.

    PlannedPipelineModule(layers=specs, num_stages=PIPELINE["stages"], loss_fn=loss_fn)

`specs` has one entry per layer of the plan: the embedding, the blocks, and the head with its norm.
"""

import json
from pathlib import Path

from deepspeed.pipe import PipelineModule

PIPELINE = json.loads(Path(__file__).with_name("deepspeed.json").read_text())["pipeline"]


class PlannedPipelineModule(PipelineModule):
    def _partition_layers(self, method="parts"):
        parts = PIPELINE["parts"]
        if self._num_layers != parts[-1] or self.num_stages != len(parts) - 1:
            raise ValueError(
                f"the plan has {parts[-1]} layers in {len(parts) - 1} stages, and the model has "
                f"{self._num_layers} in {self.num_stages}; give it one entry per layer of the plan"
            )
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = parts
        self._set_bounds(start=parts[stage], stop=parts[stage + 1])
"#;

/// Returns the files of a plan that DeepSpeed can run.
pub(super) fn deepspeed(plan: &Plan, request: &EmitRequest<'_>) -> Emission {
    let parts = ModelParts::of(request.profile);
    let files = vec![
        EmittedFile { name: CONFIG, text: config(plan, request, &parts) },
        EmittedFile { text: MODULE_TEXT.to_owned(), ..MODULE },
    ];
    let mut emission = Emission::new(System::Deepspeed, files);
    remarks(&mut emission, plan);
    if let Some(mesh) = request.mesh() {
        mesh_remarks(&mut emission, plan, mesh);
    }
    let names = |stage: &StageParts| {
        let words = print_layout(from_ref(stage));
        format!("{} entries of `layers` (`{words}`)", words.len())
    };
    emission.finish(plan, request, &Mapping { system: System::Deepspeed, names })
}

fn config(plan: &Plan, request: &EmitRequest<'_>, parts: &ModelParts) -> String {
    let mut ends = vec![0];
    ends.extend(&plan.boundaries);
    ends.push(parts.layers());
    let most = ends.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(1);
    let interval = match request.mesh() {
        None if plan.recomputes() => most,
        Some(MeshOptions { recompute: RecomputedPart::Block, .. }) => 1,
        _ => 0,
    };
    let mut config = Map::new();
    let rows = u64::from(plan.microbatch_rows);
    config.insert("train_batch_size".into(), json!(rows * u64::from(plan.microbatches())));
    config.insert("train_micro_batch_size_per_gpu".into(), json!(rows));
    config.insert("gradient_accumulation_steps".into(), json!(plan.schedule.microbatches()));
    match request.precision {
        "bf16" => drop(config.insert("bf16".into(), json!({ "enabled": true }))),
        "f16" => drop(config.insert("fp16".into(), json!({ "enabled": true }))),
        _ => {}
    }
    if request.mesh().is_some_and(|mesh| mesh.sharded == ShardedState::Optimizer) {
        config.insert("zero_optimization".into(), json!({ "stage": 1 }));
        // By default, ZeRO sums gradients in the type of the parameters. Without ZeRO, the pipeline's
        // optimizer for bf16 sums them in FP32, and DeepSpeed refuses this key.
        if request.precision == "bf16" {
            config.insert("data_types".into(), json!({ "grad_accum_dtype": "fp32" }));
        }
    }
    let pipeline = json!({
        "stages": plan.schedule.ranks(),
        "parts": ends,
        "activation_checkpoint_interval": interval,
    });
    config.insert("pipeline".into(), pipeline);
    format!("{:#}\n", Value::Object(config))
}

fn mesh_remarks(emission: &mut Emission, plan: &Plan, mesh: &MeshOptions) {
    if mesh.sequence_parallel && plan.mesh.tensor > 1 {
        let text = "the tensor-parallel ranks of the plan also divide the sequence between their products; the model that you \
                    bring does that";
        emission.remark("sequence parallelism", text);
    }
    if plan.mesh.experts > 1 {
        let text = format!(
            "`ep_size` of the model's `MoE` layers is {}; the configuration has no key for it",
            plan.mesh.experts
        );
        emission.remark("experts", text);
    }
    if mesh.recompute == RecomputedPart::Block {
        let text = "DeepSpeed recomputes each entry of `layers` that has parameters, also the embedding and the head, which the \
                    plan does not; the argument `checkpointable_layers` of the class takes the names of the classes of blocks only";
        emission.remark("recomputation", text);
    }
    if mesh.predictors > 0 {
        let text = format!(
            "the last entry of `layers` has the head and the {} that predict further tokens",
            counted(mesh.predictors, "block")
        );
        emission.remark("predictors", text);
    }
    if let Some(narrow) = mesh.narrow {
        let text = format!("{} is a matter of the model's layers, not of the configuration", narrow.name());
        emission.remark("precision", text);
    }
}

fn remarks(emission: &mut Emission, plan: &Plan) {
    let text = "`PipelineModule` takes a method and no layers of stages, so `planned_pipeline.py` has a class that takes them \
                from `pipeline.parts`; DeepSpeed itself does not read that key";
    emission.remark("cut", text);
    if plan.recomputes() {
        let text = "`activation_checkpoint_interval` is the largest number of layers of a stage, so each stage is recomputed as a \
                    whole, as in the plan";
        emission.remark("recomputation", text);
    }
    if plan.mesh.tensor > 1 {
        let text = format!(
            "DeepSpeed's pipelines have no tensor-parallel layers; bring them with the model, and a topology with {} of them",
            plan.mesh.tensor
        );
        emission.remark("tensor-parallel ranks", text);
    }
    if plan.mesh.order == MeshOrder::Pipeline && plan.mesh.data > 1 {
        let text = "the replicas of a stage have consecutive numbers, and in the plan the ranks of a pipeline have them. \
                    Without nodes, the prediction is the same for both";
        emission.remark("order of ranks", text);
    }
}
