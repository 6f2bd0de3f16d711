//! Files of published runs: machines, models, and runs with what their authors measured.
//!
//! The form is TOML with the arrays `[[machine]]`, `[[model]]` and `[[run]]`. A machine or a model has a name,
//! which runs refer to. A key that is not known is an error, because a run whose settings are not all known
//! would be predicted as another run. Remarks for readers, such as `notes` or `date`, are listed as not used.

use pipewright_document::{Bound, Problems, Reader, Source, Table, Value, nearest};

use crate::catalogue::{self, hint_at, machines_of};
use crate::implementation::Stack;
use crate::layout::Layout;
use crate::machine::Machine;
pub use crate::published_layout::{RECOMPUTES, SHARDINGS, layout};
use crate::published_model::{self, PublishedModel};
use pipewright_shapes::model::{Division, Matrix, Model};
use pipewright_shapes::training::{AdaptedLayer, AdapterSizes};

/// The largest file that is read, in bytes.
pub const MAX_FILE: usize = 16 << 20;

/// The content of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// The runs, in the order of the file.
    pub runs: Vec<Run>,
    /// The keys that no prediction uses, with their places.
    pub remarks: Vec<String>,
}

/// A published run.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Where it is published.
    pub source: String,
    /// The machine.
    pub machine: Machine,
    /// The model.
    pub model: Model,
    /// The configuration.
    pub layout: Layout,
    /// The measured seconds of a step.
    pub step_seconds: f64,
    /// The measured peak of memory, if it is published.
    pub memory: Option<MeasuredMemory>,
    /// The kind of run, such as `fsdp`; empty if the file does not say it.
    pub group: String,
    /// The share of the measured time that rounding leaves open.
    pub uncertainty: f64,
}

/// A measured peak of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredMemory {
    /// GiB.
    pub gib: f64,
    /// Whether it is the peak of the last rank of the pipeline, and not the largest one.
    pub of_last_rank: bool,
    /// Whether it counts what the framework reserved, and not what it allocated.
    pub is_reserved: bool,
}

/// The keys that are remarks wherever they stand.
const REMARKS: [&str; 9] =
    ["comment", "comments", "date", "link", "note", "notes", "reference", "source_url", "url"];

/// The keys of runs that follow from others: the rate that the authors count follows from the tokens per second, and the
/// bytes that are allocated after a step are a part of the peak.
const NOT_COMPARED: [&str; 2] = ["model_tflops_per_gpu", "state_gib"];

/// Remarks, each with its first byte.
type Remarks = Vec<(usize, String)>;

/// Reads a file.
///
/// # Errors
/// When a key is unknown or missing, a run refers to a machine or a model that does not exist, or nothing was
/// measured.
pub fn read(source: impl Into<Source>) -> Result<Published, Problems> {
    Table::read(source, MAX_FILE, |table, problems| {
        let mut file = Reader::new("the file", table, problems);
        let mut remarks = Remarks::new();
        add_remarks(&mut file, &["source", "title"], "the file", &mut remarks);
        let machines = machines_of(&mut file, catalogue::meant_by, |number, machine| {
            add_remarks(machine, &[], &format!("machine {number}"), &mut remarks);
        });
        let models = rows(&mut file, "model", &["source"], &mut remarks, published_model::read);
        let runs = rows(&mut file, "run", &[], &mut remarks, |row| run(row, &machines, &models));
        file.finish();
        remarks.sort_unstable();
        Some(Published { runs, remarks: remarks.into_iter().map(|(_, remark)| remark).collect() })
    })
}

/// Reads the tables of a list, and the remarks in them. `own` are further keys that are remarks.
fn rows<T>(
    file: &mut Reader<'_>,
    key: &'static str,
    own: &[&'static str],
    remarks: &mut Remarks,
    mut read: impl FnMut(&mut Reader<'_>) -> Option<T>,
) -> Vec<T> {
    let name = format!("[[{key}]]");
    let tables = file.tables(key, &format!("tables {name}")).unwrap_or_default();
    let mut rows = Vec::with_capacity(tables.len());
    for (index, table) in tables.into_iter().enumerate() {
        let mut row = file.inner(&name, table);
        rows.extend(read(&mut row));
        add_remarks(&mut row, own, &format!("{key} {}", index + 1), remarks);
        row.finish();
    }
    rows
}

/// Adds the remarks of a table at `place`. Remarks say something to readers, and nothing to the cost model.
fn add_remarks(table: &mut Reader<'_>, own: &[&'static str], place: &str, remarks: &mut Remarks) {
    let is_plain = |value: &Value| {
        value.as_table().is_none()
            && value.as_list().is_none_or(|items| items.iter().all(|item| item.as_table().is_none()))
    };
    for key in REMARKS.iter().chain(own) {
        if table.read(key, "a remark", |value| is_plain(value).then_some(value)).is_some() {
            remarks.push((table.place(key).start(), format!("`{key}` of {place}")));
        }
    }
}

fn run(row: &mut Reader<'_>, machines: &[Machine], models: &[PublishedModel]) -> Option<Run> {
    row.require(&["source", "machine", "model", "precision", "gpus", "mbs", "gbs", "seq"]);
    let source = row.text("source");
    let (machine, model) = (machine(row, machines), model(row, models));
    let model = adapted(row, model);
    let layout = layout(row);
    let replicas = row.count("dp", 0..=u32::MAX);
    let step_seconds = row.number("step_s", Bound::Positive);
    let per_second = row.number("tokens_per_s_per_gpu", Bound::Positive);
    for key in NOT_COMPARED {
        row.number(key, Bound::NonNegative);
    }
    let memory_gib = row.number("memory_gib", Bound::NonNegative);
    let of_last_rank = row.word("memory_of", &[("last rank", true), ("largest", false)]);
    let is_reserved = row.word("memory_kind", &[("reserved", true), ("allocated", false)]);
    let uncertainty = row.number("uncertainty", Bound::NonNegative).unwrap_or(0.0);
    let group = row.text("group").unwrap_or_default();
    // Fine-tuning without adapters trains as pretraining does.
    let has_adapters = row.word("task", &[("pretraining", false), ("sft", false), ("lora", true)]);
    if has_adapters.is_some_and(|has_adapters| has_adapters != row.is_written("adapter_rank")) {
        let advice = "give `adapter_rank` with task = \"lora\", and with no other task";
        row.report("task", "`task` and `adapter_rank` contradict each other", advice);
    }
    let layout = layout?;
    let memory = memory_gib.map(|gib| MeasuredMemory {
        gib,
        of_last_rank: of_last_rank.unwrap_or(false),
        // The log of torchtitan has what its allocator reserved.
        is_reserved: is_reserved.unwrap_or(layout.implementation.stack == Stack::Torchtitan),
    });
    let of_mesh = layout.data();
    // Some authors count the ranks of a sequence as replicas.
    if let Some(given) = replicas.filter(|&given| given != of_mesh && given != layout.replicas()) {
        let sentence = format!("`dp` is {given}, but the GPUs and the mesh make {of_mesh} replicas");
        row.report("dp", sentence, "leave `dp` out");
    }
    let tokens = layout.step_tokens() / f64::from(layout.gpus);
    let measured = step_seconds.or_else(|| per_second.map(|per_second| tokens / per_second));
    if measured.is_none() {
        let sentence = "there is neither `step_s` nor `tokens_per_s_per_gpu`";
        row.report("step_s", sentence, "give what was measured");
    }
    let step_seconds = measured?;
    let (source, machine, model) = (source?, machine?, model?);
    Some(Run { source, machine, model, layout, step_seconds, memory, group, uncertainty })
}

/// Finds the machine of a run, in the file or among the known ones.
fn machine(row: &mut Reader<'_>, machines: &[Machine]) -> Option<Machine> {
    let name = row.text("machine")?;
    let in_file = machines.iter().find(|machine| machine.name == name).cloned();
    let machine = in_file.or_else(|| catalogue::by_name(&name).ok());
    if machine.is_none() {
        let known = machines.iter().chain(catalogue::machines()).flat_map(Machine::names);
        let hint = nearest(&name, known).map_or_else(String::new, hint_at);
        let sentence = format!("the file has no machine `{name}`, and none is known by this name{hint}");
        row.report("machine", sentence, "add a [[machine]]");
    }
    machine
}

/// Finds the model of a run in the file. A model with a mistake is reported where it stands.
fn model(row: &mut Reader<'_>, models: &[PublishedModel]) -> Option<Model> {
    let name = row.text("model")?;
    let Some((_, model)) = models.iter().find(|(own, _)| *own == name) else {
        let known = models.iter().map(|(name, _)| name.as_str());
        let hint = nearest(&name, known).map_or_else(String::new, hint_at);
        row.report("model", format!("the file has no model `{name}`{hint}"), "add a [[model]]");
        return None;
    };
    model.clone()
}

/// Reads the adapters of a run, and returns the model with them.
fn adapted(row: &mut Reader<'_>, model: Option<Model>) -> Option<Model> {
    const TARGETS: [(&str, Targets); 2] = [("qkv", Targets::QueriesKeysValues), ("all", Targets::All)];
    let rank = row.whole("adapter_rank", 1..=1 << 16);
    let targets = row.words("adapter_targets", &TARGETS);
    if targets.is_some() && !row.is_written("adapter_rank") {
        row.report(
            "adapter_targets",
            "there are `adapter_targets` and no `adapter_rank`",
            "add `adapter_rank`",
        );
    }
    let Some(rank) = rank else { return model };
    let is_all = targets.is_none_or(|targets| targets.contains(&Targets::All));
    let model = model?;
    let layers: Vec<(usize, AdaptedLayer)> = model
        .blocks
        .iter()
        .enumerate()
        .flat_map(|(index, block)| {
            let adapted =
                if is_all { block.matrices(model.hidden) } else { block.mixer.matrices(model.hidden) };
            let chosen = adapted.into_iter().filter(|matrix| matrix.of_experts.is_none());
            let chosen = chosen.filter(move |matrix| is_all || matrix.division == Division::Columns);
            chosen.map(move |Matrix { input, output, division, .. }| {
                (index, AdaptedLayer { input, output, division, shares_input: false })
            })
        })
        .collect();
    let sizes = AdapterSizes { rank, has_magnitudes: false, has_dropout: false };
    match model.with_adapters(sizes, layers) {
        Ok(model) => Some(model),
        Err(error) => {
            row.report_error("adapter_targets", error);
            None
        }
    }
}

/// The layers of a block with an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Targets {
    /// The product that makes queries, keys and values.
    QueriesKeysValues,
    /// All products that are not of experts.
    All,
}
