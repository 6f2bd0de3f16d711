//! The output of `pipewright check --format json`, which the book describes.
//!
//! It has everything that the text has. Sizes are in bytes, and numbers of layers, stages and ranks begin with 0.

use std::collections::BTreeMap;

use pipewright_schedule::{LayerDesc, StageIndex};
use serde_json::{Map, Value, json};

use crate::training::memory::MemoryPlan;
use crate::training::prepare::Prepared;
use crate::training::stage_memory::StageMemory;

/// Returns the report on a prepared run. `shared` has the stages of each parameter that several stages hold, `memory` what
/// each stage holds, and `planned` the sentences of a plan.
pub(crate) fn report(
    prepared: &Prepared,
    shared: &BTreeMap<&str, Vec<StageIndex>>,
    by_stage: &[StageMemory],
    planned: &[String],
    memory: &MemoryPlan,
) -> Value {
    let stage = |stage: &StageIndex| stage.get();
    let shared = shared.iter().map(|(parameter, stages)| {
        json!({ "parameter": parameter, "stages": stages.iter().map(stage).collect::<Vec<u32>>() })
    });
    json!({
        "planned": planned,
        "model": model(prepared),
        "stages": stages(prepared, by_stage),
        "shared": shared.collect::<Vec<Value>>(),
        "schedule": schedule(prepared),
        "mesh": mesh(prepared),
        "data": data(prepared),
        "validation": validation(prepared),
        "run": { "steps": prepared.settings.run.steps, "out": prepared.settings.run.out },
        "memory": memory.json(),
    })
}

fn model(prepared: &Prepared) -> Value {
    let layers = &prepared.layers.layers;
    json!({ "layers": layers.len(), "parameters": parameters(layers) })
}

fn parameters(layers: &[LayerDesc]) -> u64 {
    layers.iter().map(|layer| layer.parameters).fold(0, u64::saturating_add)
}

fn stages(prepared: &Prepared, by_stage: &[StageMemory]) -> Vec<Value> {
    let placement = prepared.program.placement();
    let stages = placement.all_stages().zip(prepared.partition.ranges()).zip(by_stage);
    let of_stage = |((stage, range), bytes): ((StageIndex, std::ops::Range<usize>), &StageMemory)| {
        let layers = &prepared.layers.layers[range.clone()];
        let mut kinds: Map<String, Value> = Map::new();
        for layer in layers {
            let count = kinds.get(&layer.kind).and_then(Value::as_u64).unwrap_or(0);
            kinds.insert(layer.kind.clone(), json!(count + 1));
        }
        json!({
            "stage": stage.get(),
            "rank": placement.rank_of(stage).get(),
            "layers": [range.start, range.end - 1],
            "kinds": kinds,
            "parameters": parameters(layers),
            "bytes": bytes,
        })
    };
    stages.map(of_stage).collect()
}

fn schedule(prepared: &Prepared) -> Value {
    let (program, pipeline) = (&prepared.program, &prepared.settings.pipeline);
    json!({
        "name": pipeline.schedule.to_string(),
        "ranks": program.ranks(),
        "stages_per_rank": pipeline.stages_per_rank,
        "microbatches": program.microbatches() / program.slices().get(),
        "slices": program.slices().get(),
    })
}

fn mesh(prepared: &Prepared) -> Value {
    let mesh = &prepared.settings.mesh;
    json!({
        "data_parallel": mesh.data_parallel,
        "shards": mesh.shards(),
        "tensor_parallel": mesh.tensor_parallel,
        "ranks": mesh.ranks(prepared.program.ranks()),
    })
}

fn data(prepared: &Prepared) -> Value {
    let (rows, batches) = (&prepared.rows, prepared.settings.run.accumulate.get());
    let of_step = prepared.settings.pipeline.rows() * batches as usize;
    json!({
        "tokens": rows.tokens(),
        "rows": rows.rows(),
        "rows_per_step": of_step,
        "batches_per_step": batches,
        "steps_per_epoch": rows.rows() / of_step,
    })
}

/// Returns how the validation data is used; null if there is none.
fn validation(prepared: &Prepared) -> Value {
    let run = &prepared.settings.run;
    prepared.validation.as_ref().map_or(Value::Null, |validation| {
        json!({
            "rows": validation.rows().rows(),
            "batches": validation.batches(),
            "every": run.eval_every,
            "patience": run.patience,
        })
    })
}
