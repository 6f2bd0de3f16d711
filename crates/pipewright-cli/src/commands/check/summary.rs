//! The summary of a prepared run, which `pipewright check` prints as text or as JSON. The book describes the
//! JSON.
//!
//! Both have the same content. Sizes in the JSON are in bytes, and numbers of layers, stages and ranks begin
//! with 0.

use std::collections::BTreeMap;
use std::ops::Range;

use pipewright::train::Validation;
use pipewright::train::data::{DataSource, MixedRows, RowFill, TokenRows};
use pipewright_document::text::escape;
use pipewright_models::training_memory::MemoryPlan;
use pipewright_models::{CutModel, ParameterSpec};
use pipewright_run::settings::Settings;
use pipewright_run::settings::pipeline::PartitionChoice;
use pipewright_run::settings::run::Exact;
use pipewright_run::training::memory::{
    held_json, line, memory_json, moves_in_words, moves_json, stage_table, table,
};
use pipewright_run::training::prepare::Prepared;
use pipewright_run::training::rank_needs::{needs_json, needs_table, rank_needs};
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::picture::microbatches_in_words;
use pipewright_schedule::recompute::{LayerPart, LayerParts, StageRecompute};
use pipewright_schedule::words::counted;
use pipewright_schedule::{LayerDesc, Recompute, StageBackward, StageIndex};
use serde_json::{Map, Value, json};

/// A prepared run with everything that its summary has.
pub(crate) struct Summary<'a> {
    pub(crate) prepared: &'a Prepared,
    /// The model.
    pub(crate) model: &'a CutModel,
    /// The parameters of each stage.
    pub(crate) stages: &'a [Vec<ParameterSpec>],
    pub(crate) memory: &'a MemoryPlan,
    /// The memory while layers move, if they may.
    pub(crate) moves: Option<&'a MemoryPlan>,
    /// The sentences of a plan.
    pub(crate) planned: &'a [String],
}

/// A cut into stages, and how even it is.
struct CutBalance {
    /// The value of `pipeline.partition`.
    partition: &'static str,
    /// The share of the weights of all layers that the heaviest stage has.
    heaviest: f64,
}

impl Summary<'_> {
    /// Returns the summary as JSON.
    pub(crate) fn json(&self) -> Value {
        let numbers = |stages: Vec<StageIndex>| stages.iter().map(|stage| stage.get()).collect::<Vec<u32>>();
        let shared = self.shared().into_iter();
        let shared = shared.map(|(path, stages)| json!({ "parameter": path, "stages": numbers(stages) }));
        let run = &self.prepared.settings.run;
        let layers = &self.prepared.layers.layers;
        json!({
            "planned": self.planned,
            "model": { "layers": layers.len(), "parameters": parameters(layers), "trained": self.prepared.trained },
            "stages": self.stages_json(),
            "cuts": self.cuts().iter().map(|cut| json!({ "partition": cut.partition, "heaviest": cut.heaviest })).collect::<Vec<_>>(),
            "shared": shared.collect::<Vec<Value>>(),
            "schedule": schedule_json(self.prepared),
            "mesh": mesh_json(self.prepared),
            "data": data_json(self.prepared),
            "validation": validation_json(self.prepared),
            "run": { "steps": run.steps, "out": run.out, "exact": run.exact },
            "memory": self.memory_json(),
        })
    }

    fn memory_json(&self) -> Value {
        let mut json = memory_json(self.memory);
        json["machines"] = needs_json(&rank_needs(&self.prepared.settings, self.memory));
        if let Some(moves) = self.moves {
            json["moves"] = moves_json(moves);
        }
        json
    }

    fn stages_json(&self) -> Vec<Value> {
        let placement = self.prepared.program.placement();
        let stages = placement.all_stages().zip(self.prepared.partition.ranges());
        let stage_json = |((stage, range), held): ((StageIndex, Range<usize>), &HeldBytes)| {
            let layers = &self.prepared.layers.layers[range.clone()];
            let mut kinds: Map<String, Value> = Map::new();
            for (kind, count) in kinds_of(layers) {
                kinds.insert(kind.to_owned(), json!(count));
            }
            json!({
                "stage": stage.get(),
                "rank": placement.rank_of(stage).get(),
                "layers": [range.start, range.end - 1],
                "kinds": kinds,
                "parameters": parameters(layers),
                "bytes": held_json(held),
            })
        };
        stages.zip(self.memory.memory().stages()).map(stage_json).collect()
    }

    /// Returns the summary as text.
    pub(crate) fn text(&self) -> String {
        let mut text: String = self.planned.iter().map(|sentence| format!("{sentence}\n")).collect();
        self.write_model(&mut text);
        let prepared = self.prepared;
        let (settings, program) = (&prepared.settings, &prepared.program);
        let size = microbatches_in_words(program.microbatches(), program.slices());
        let ranks = counted(program.ranks(), "rank");
        line(
            &mut text,
            "schedule",
            &format!("{}: {ranks}, {size}, proved sound", settings.pipeline.schedule),
        );
        write_mesh(&mut text, prepared);
        write_data(&mut text, prepared);
        if let Some(validation) = &prepared.validation {
            line(&mut text, "evaluate", &evaluations(validation, settings));
        }
        let steps = counted(settings.run.steps, "step");
        line(&mut text, "run", &format!("{steps}, results in {}", settings.run.out.display()));
        if settings.run.exact == Exact::Everywhere {
            line(&mut text, "run", "the same bits on every processor, without AMX");
        }
        text += &stage_table(program.placement(), self.memory.memory().stages());
        text += &table(self.memory);
        text += &needs_table(&rank_needs(settings, self.memory), self.memory);
        if let Some(moves) = self.moves {
            line(&mut text, "moves", &moves_in_words(moves));
        }
        text
    }

    /// Writes the lines about the model, its stages, and the parameters that they share.
    fn write_model(&self, text: &mut String) {
        let layers = &self.prepared.layers.layers;
        let size = counted(parameters(layers), "parameter");
        line(text, "model", &format!("{}, {size}", counted(layers.len(), "layer")));
        let placement = self.prepared.program.placement();
        for (stage, range) in placement.all_stages().zip(self.prepared.partition.ranges()) {
            let (rank, first, last) = (placement.rank_of(stage), range.start, range.end - 1);
            let layers = &layers[range];
            let kinds: Vec<String> =
                kinds_of(layers).iter().map(|(kind, count)| format!("{count} {kind}")).collect();
            let (kinds, size) = (kinds.join(", "), counted(parameters(layers), "parameter"));
            let frozen = match self.prepared.program.as_program().trained().backward_of(stage) {
                StageBackward::Whole => "",
                StageBackward::Inputs => ", frozen: no weight gradients",
                StageBackward::None => ", frozen: forward only",
            };
            let pipeline = &self.prepared.settings.pipeline;
            let mut recomputed = recomputed(&pipeline.recompute, stage, layers);
            if pipeline.recompute.applies_to(stage) {
                recomputed += &pipeline.offload.words(stage);
            }
            let words =
                format!("on rank {rank}: layers {first} to {last} ({kinds}), {size}{frozen}{recomputed}");
            line(text, &format!("stage {stage}"), &words);
        }
        if let [cut, other] = &self.cuts()[..] {
            let percent = |cut: &CutBalance| format!("{:.1}%", cut.heaviest * 100.0);
            let [own, others] = [cut, other].map(percent);
            let words = format!(
                "{}: the heaviest stage has {own} of the work; with `pipeline.partition = \"{}\"` {others}",
                cut.partition, other.partition
            );
            line(text, "cut", &words);
        }
        for (path, stages) in self.shared() {
            let stages = listed(&stages);
            let (held, size) = if self.has_parts() {
                ("all or some of its rows", "all rows")
            } else {
                ("a copy", "each copy")
            };
            line(text, "shared", &format!("{path}: one parameter, with {held} in each of stages {stages}"));
            let numbers = elements_of(self.prepared, path);
            line(text, "shared", &format!("{path}: {numbers} numbers in {size}"));
        }
    }

    /// Returns the run's cut, and a cut that counts otherwise: by blocks, or by the weights of all layers if the
    /// run's cut is by blocks. There is one only if the blocks fill the stages, and none for a single stage.
    fn cuts(&self) -> Vec<CutBalance> {
        let Prepared { settings, layers, partition: own, .. } = self.prepared;
        let choice = settings.pipeline.partition;
        let (other, method) = match choice {
            PartitionChoice::Blocks => (PartitionChoice::Optimal, Method::Optimal),
            _ => {
                let method = Method::Blocks { blocks: layers.blocks(), boundaries: Vec::new() };
                (PartitionChoice::Blocks, method)
            }
        };
        let weights = layers.weights();
        let cut_of = |choice: PartitionChoice, cut: &Partition| {
            let stages = cut.weights(&weights);
            let heaviest = *stages.iter().max()? as f64 / stages.iter().sum::<u128>() as f64;
            heaviest.is_finite().then(|| CutBalance { partition: choice.name(), heaviest })
        };
        if own.stages() == 1 {
            return Vec::new();
        }
        let other = partition(&weights, own.stages(), &method).ok().and_then(|cut| cut_of(other, &cut));
        cut_of(choice, own).into_iter().chain(other).collect()
    }

    /// Returns whether a stage may have only some rows of a matrix or of a table.
    fn has_parts(&self) -> bool {
        self.model.parts().max(self.model.embedding_parts()) > 1
    }

    /// Returns the parameters that several stages hold, each with the list of its stages. The parts of an
    /// embedding or of a head with a matrix of its own are not copies: together they are the matrix.
    fn shared(&self) -> BTreeMap<&str, Vec<StageIndex>> {
        let mut holders: BTreeMap<&str, (Vec<StageIndex>, usize)> = BTreeMap::new();
        for (stage, specs) in (0..).map(StageIndex::new).zip(self.stages) {
            for spec in specs {
                let (stages, elements) = holders.entry(&spec.path).or_default();
                if stages.last() != Some(&stage) {
                    stages.push(stage);
                }
                *elements += spec.shape.iter().product::<usize>();
            }
        }
        let has_parts = self.has_parts();
        holders.retain(|path, (stages, elements)| {
            stages.len() > 1 && (!has_parts || *elements > elements_of(self.prepared, path))
        });
        holders.into_iter().map(|(path, (stages, _))| (path, stages)).collect()
    }
}

/// Returns words about what a stage with these layers recomputes; none if it recomputes nothing.
fn recomputed(recompute: &Recompute, stage: StageIndex, own: &[LayerDesc]) -> String {
    let Some(StageRecompute { layers, keep, parts }) = recompute.choice_of(stage) else {
        return String::new();
    };
    let parts = parts.intersection(LayerParts::of_layers(own));
    let results = parts.iter().map(|part| match part {
        LayerPart::Norms => "norms",
        LayerPart::FeedForward => "feed-forward activations",
    });
    let of_layers = match &results.collect::<Vec<_>>()[..] {
        [] => String::new(),
        results => format!("the {} of its layers", results.join(" and the ")),
    };
    let part = match layers {
        _ if recompute.is_by_block() => "all layers one by one".to_owned(),
        None => "all layers".to_owned(),
        Some(0) if of_layers.is_empty() => return of_layers,
        Some(0) => return format!(", recomputes {of_layers}"),
        Some(1) => "its first layer".to_owned(),
        Some(layers) => format!("its first {layers} layers"),
    };
    let of_layers = if of_layers.is_empty() { of_layers } else { format!(", and {of_layers}") };
    let microbatches = match keep {
        0 => String::new(),
        keep => format!(" of the microbatches after the first {keep} in flight"),
    };
    format!(", recomputes {part}{microbatches}{of_layers}")
}

fn write_mesh(text: &mut String, prepared: &Prepared) {
    let mesh = &prepared.settings.mesh;
    let all = mesh.ranks(prepared.program.ranks());
    if mesh.tensor_parallel > 1 {
        let all = if mesh.data_parallel == 1 { format!(", {all} ranks altogether") } else { String::new() };
        let tensor_ranks = mesh.tensor_parallel;
        line(text, "mesh", &format!("{tensor_ranks} tensor ranks compute each stage together{all}"));
    }
    if mesh.data_parallel > 1 {
        let (replicas, shards) = (mesh.data_parallel, mesh.shards());
        let holds = match (shards, mesh.expert_parallel) {
            (1, 1) => "each holds all parameters".to_owned(),
            (1, experts) => format!("each holds 1/{experts} of the experts and all other parameters"),
            (shards, experts) if experts > shards => {
                format!(
                    "each holds 1/{experts} of the experts and 1/{shards} of the other parameters, with the optimizer's state"
                )
            }
            _ => format!("each holds 1/{shards} of the parameters and of the optimizer's state"),
        };
        let groups = match replicas / shards.max(1) {
            groups if shards > 1 && groups > 1 => format!(" in {groups} groups of {shards}"),
            _ => String::new(),
        };
        line(text, "mesh", &format!("{replicas} replicas{groups}, {all} ranks altogether; {holds}"));
    }
}

fn write_data(text: &mut String, prepared: &Prepared) {
    let Prepared { settings, rows, .. } = prepared;
    let batches = settings.run.accumulate.get();
    let step_rows = rows_per_step(settings);
    let in_batches = match (batches, settings.run.rampup_steps) {
        (1, _) => String::new(),
        (batches, 0) => format!(", in {batches} batches"),
        (batches, steps) => format!(", in {batches} batches after the first {}", counted(steps, "step")),
    };
    let words = format!(
        "{} tokens, {}, {} of {}{in_batches} an epoch",
        rows.tokens(),
        counted(rows.rows(), "row"),
        counted(rows.rows() / step_rows, "step"),
        counted(step_rows, "row")
    );
    line(text, "data", &words);
    let taken = (settings.run.steps * step_rows as u64) as f64;
    for MixedRows { name, share, rows, tokens, .. } in rows.mixture() {
        let passes = share * taken / rows as f64;
        let (percent, rows, name) = (share * 100.0, counted(rows, "row"), escape(&name));
        let words = format!(
            "{percent:.1}% of the rows, {passes:.2} passes in the run, from {name}: {tokens} tokens, {rows}"
        );
        line(text, "data", &words);
    }
    if !rows.sources().is_empty() {
        line(text, "data", &format!("from {}", sources(rows)));
    }
    if let Some(targets) = prepared.counted_targets {
        line(text, "data", &format!("{targets} of the tokens count in the loss as targets"));
    }
    let is_mixture = !rows.mixture().is_empty();
    if let Some(RowFill { tokens, places, rows, packed_rows }) = rows.row_fill() {
        let percent = 100.0 * tokens as f64 / places.max(1) as f64;
        let packing = if packed_rows < rows && !settings.data.packed && prepared.program.slices().is_one() {
            format!("; with `data.packed = true`, all records fit into {}", counted(packed_rows, "row"))
        } else {
            String::new()
        };
        // A run takes some sources of a mixture more often than others.
        let once = if is_mixture { "with each record once, " } else { "" };
        line(text, "data", &format!("{once}tokens fill {percent:.1}% of the rows{packing}"));
    }
}

/// Returns the kinds of files of the data.
fn sources(rows: &TokenRows) -> String {
    rows.sources().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Returns how the validation data is used.
fn evaluations(validation: &Validation, settings: &Settings) -> String {
    let run = &settings.run;
    let (rows, batches) = (validation.rows().rows(), validation.batches());
    let ends = match run.patience {
        0 => String::new(),
        patience => format!(", until {patience} in a row find no lower loss"),
    };
    match run.eval_every {
        0 => format!("{rows} rows of validation data, never: `run.eval_every` is 0"),
        every => format!(
            "every {every} steps on {batches} batches of {} rows, from {rows} rows of validation data{ends}",
            settings.pipeline.rows()
        ),
    }
}

fn schedule_json(prepared: &Prepared) -> Value {
    let (program, pipeline) = (&prepared.program, &prepared.settings.pipeline);
    json!({
        "name": pipeline.schedule.to_string(),
        "ranks": program.ranks(),
        "stages_per_rank": pipeline.stages_per_rank,
        "microbatches": program.microbatches() / program.slices().get(),
        "slices": program.slices().get(),
        "recompute": pipeline.recompute,
        "offload": pipeline.offload,
    })
}

fn mesh_json(prepared: &Prepared) -> Value {
    let mesh = &prepared.settings.mesh;
    json!({
        "data_parallel": mesh.data_parallel,
        "shards": mesh.shards(),
        "tensor_parallel": mesh.tensor_parallel,
        "expert_parallel": mesh.expert_parallel,
        "ranks": mesh.ranks(prepared.program.ranks()),
    })
}

fn data_json(prepared: &Prepared) -> Value {
    let (rows, step_rows) = (&prepared.rows, rows_per_step(&prepared.settings));
    json!({
        "tokens": rows.tokens(),
        "rows": rows.rows(),
        "rows_per_step": step_rows,
        "batches_per_step": prepared.settings.run.accumulate.get(),
        "rampup_steps": prepared.settings.run.rampup_steps,
        "steps_per_epoch": rows.rows() / step_rows,
        "counted_targets": prepared.counted_targets,
        "fill": rows.row_fill(),
        "long_records": rows.long_records(),
        "bad_records": rows.bad_records(),
        "sources": rows.sources().iter().map(source_json).collect::<Vec<Value>>(),
        "mix": rows.mixture().iter().map(mixed_json).collect::<Vec<Value>>(),
    })
}

fn mixed_json(MixedRows { name, weight, share, rows, tokens }: &MixedRows) -> Value {
    json!({ "path": name, "weight": weight, "share": share, "rows": rows, "tokens": tokens })
}

fn source_json(source: &DataSource) -> Value {
    json!({ "format": source.format.to_string(), "packing": source.packing, "files": source.files })
}

/// Returns how the validation data is used; null if the run has no validation data.
fn validation_json(prepared: &Prepared) -> Value {
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

/// Returns the number of rows that an update takes.
fn rows_per_step(settings: &Settings) -> usize {
    settings.pipeline.rows() * settings.run.accumulate.get() as usize
}

/// Returns the number of parameters of these layers.
fn parameters(layers: &[LayerDesc]) -> u64 {
    layers.iter().map(|layer| layer.parameters).fold(0, u64::saturating_add)
}

/// Returns the kinds of these layers in the order of their first layer, with the number of layers of each
/// kind.
fn kinds_of(layers: &[LayerDesc]) -> Vec<(&str, usize)> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for layer in layers {
        match counts.iter_mut().find(|(kind, _)| *kind == layer.kind) {
            Some((_, count)) => *count += 1,
            None => counts.push((&layer.kind, 1)),
        }
    }
    counts
}

/// Returns the number of elements of a parameter, of all tensor ranks together.
fn elements_of(prepared: &Prepared, path: &str) -> usize {
    let whole = prepared.model.parameters().unwrap_or_default();
    let spec = whole.iter().find(|spec| spec.path == path);
    spec.map_or(0, |spec| spec.shape.iter().product())
}

/// Returns the numbers of stages as a list, such as `0, 1 and 2`.
fn listed(stages: &[StageIndex]) -> String {
    let mut numbers: Vec<String> = stages.iter().map(ToString::to_string).collect();
    let last = numbers.pop().unwrap_or_default();
    if numbers.is_empty() { last } else { format!("{} and {last}", numbers.join(", ")) }
}
