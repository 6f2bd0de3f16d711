//! Files of published runs: machines, models, and runs with what their authors measured.
//!
//! The form is TOML with the arrays `[[machine]]`, `[[model]]` and `[[run]]`. A machine or a model has a name,
//! which runs refer to. A key that is not known is an error, because a run whose settings are not all known
//! would be predicted as another run. Remarks for readers, such as `notes` or `date`, are listed as not used.

use serde::Deserialize;
use thiserror::Error;

use crate::catalogue;
use crate::layout::{Cut, Kernels, Layout, Precision, Recompute, Scores, ShardedState};
use crate::machine::Machine;
use crate::published_model::ModelTable;
use crate::remarks::{Plain, without_remarks};
use crate::run_error::RunError;
use crate::suggest::nearest;
use crate::toml_file::TomlFileError;
use pipewright_shapes::model::Model;

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
    /// The measured peak of memory in GiB, if it is published.
    pub memory_gib: Option<f64>,
}

/// The errors of a file.
#[derive(Clone, PartialEq, Error)]
pub enum PublishedError {
    /// The text is not TOML of this form.
    #[error("the file is not a list of machines, models and runs")]
    Unreadable(#[source] toml::de::Error),
    /// The file is too large.
    #[error("the file has more than {MAX_FILE} bytes; divide its runs into several files")]
    TooLarge,
    /// A machine is described badly.
    #[error(transparent)]
    Machine(#[from] TomlFileError),
    /// A run is wrong.
    #[error("run {number} (`{model}`): {kind}")]
    Run {
        /// The number of the run, from 1.
        number: usize,
        /// Its model.
        model: String,
        /// The cause.
        kind: RunError,
    },
}

pipewright_schedule::message_as_debug!(PublishedError);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTable {
    /// Machines, which the catalogue reads.
    #[serde(default, rename = "machine")]
    _machine: Vec<toml::Table>,
    #[serde(default)]
    model: Vec<ModelTable>,
    #[serde(default)]
    run: Vec<RunTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunTable {
    source: String,
    machine: String,
    model: String,
    precision: PrecisionName,
    gpus: u32,
    #[serde(default = "one")]
    tp: u32,
    #[serde(default = "one")]
    pp: u32,
    #[serde(default = "one")]
    vp: u32,
    #[serde(default = "one")]
    cp: u32,
    #[serde(default = "one")]
    ep: u32,
    /// The ranks that divide each expert.
    etp: Option<u32>,
    /// The replicas, which follow from the GPUs and the mesh.
    dp: Option<u32>,
    mbs: u32,
    gbs: u32,
    seq: u32,
    schedule: Option<String>,
    #[serde(default)]
    recompute: RecomputeName,
    sequence_parallel: Option<bool>,
    #[serde(default)]
    attention: AttentionName,
    data_parallel: Option<DataName>,
    compiled: Option<bool>,
    step_s: Option<f64>,
    tokens_per_s_per_gpu: Option<f64>,
    /// The rate that the authors count. It follows from the tokens per second, so it is not compared.
    #[serde(rename = "model_tflops_per_gpu")]
    _model_tflops_per_gpu: Option<f64>,
    memory_gib: Option<f64>,
}

fn one() -> u32 {
    1
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PrecisionName {
    #[serde(alias = "fp16")]
    F16,
    Bf16,
    Fp8,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RecomputeName {
    #[default]
    None,
    Selective,
    Full,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AttentionName {
    #[default]
    #[serde(alias = "flash")]
    Fused,
    Unfused,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DataName {
    #[serde(alias = "replicated")]
    None,
    Optimizer,
    Gradients,
    #[serde(alias = "sharded")]
    Parameters,
}

/// Reads the text of a file.
///
/// # Errors
/// When a key is unknown or missing, a run refers to a machine or a model that does not exist, or nothing was
/// measured.
pub fn read(text: &str) -> Result<Published, PublishedError> {
    if text.len() > MAX_FILE {
        return Err(PublishedError::TooLarge);
    }
    let Plain { text, remarks } = without_remarks(text);
    let file: FileTable = toml::from_str(&text).map_err(PublishedError::Unreadable)?;
    let machines = catalogue::in_file(&text, catalogue::meant_by)?;
    let run = |(index, table): (usize, &RunTable)| {
        let at = |kind| PublishedError::Run { number: index + 1, model: table.model.clone(), kind };
        table.run(&machines, &file.model).map_err(at)
    };
    let runs = file.run.iter().enumerate().map(run).collect::<Result<_, _>>()?;
    Ok(Published { runs, remarks })
}

impl RunTable {
    fn run(&self, machines: &[Machine], models: &[ModelTable]) -> Result<Run, RunError> {
        let model = models.iter().find(|model| model.name == self.model).ok_or_else(|| RunError::Model {
            hint: nearest(&self.model, models.iter().map(|model| model.name.as_str())),
        })?;
        let in_file = machines.iter().find(|machine| machine.name == self.machine).cloned();
        let machine = in_file.or_else(|| catalogue::by_name(&self.machine).ok()).ok_or_else(|| {
            let known = catalogue::machines();
            let hint = nearest(&self.machine, machines.iter().chain(known).flat_map(Machine::names));
            RunError::Machine { name: self.machine.clone(), hint }
        })?;
        let layout = self.layout();
        let replicas = layout.data();
        // Some authors count the ranks of a sequence as replicas.
        let is_right = |given: u32| given == replicas || given == layout.replicas();
        if let Some(given) = self.dp.filter(|&given| !is_right(given)) {
            return Err(RunError::Replicas { given, replicas });
        }
        let positive = |value: &f64| value.is_finite() && *value > 0.0;
        let tokens = layout.step_tokens() / f64::from(layout.gpus.max(1));
        let by_tokens = self.tokens_per_s_per_gpu.filter(positive).map(|per_second| tokens / per_second);
        let measured = self.step_s.filter(positive).or(by_tokens).ok_or(RunError::NotMeasured)?;
        Ok(Run {
            source: self.source.clone(),
            machine,
            model: model.model()?,
            layout,
            step_seconds: measured,
            memory_gib: self.memory_gib,
        })
    }

    fn layout(&self) -> Layout {
        let sharding = match self.data_parallel {
            Some(DataName::None) => ShardedState::Nothing,
            Some(DataName::Optimizer) | None => ShardedState::Optimizer,
            Some(DataName::Gradients) => ShardedState::Gradients,
            Some(DataName::Parameters) => ShardedState::Parameters,
        };
        let mut layout = Layout {
            gpus: self.gpus,
            tensor: self.tp,
            pipeline: self.pp,
            chunks: self.vp,
            context: self.cp,
            expert: self.ep,
            expert_tensor: self.etp.unwrap_or(self.tp),
            microbatch: self.mbs,
            batch: self.gbs,
            sequence: self.seq,
            schedule: self.schedule.clone(),
            cut: Cut::Even,
            precision: match self.precision {
                PrecisionName::F16 | PrecisionName::Bf16 => Precision::Half,
                PrecisionName::Fp8 => Precision::Fp8,
            },
            recompute: match self.recompute {
                RecomputeName::None => Recompute::None,
                RecomputeName::Selective => Recompute::Selective,
                RecomputeName::Full => Recompute::Full,
            },
            sequence_parallel: self.sequence_parallel.unwrap_or(self.tp > 1),
            scores: match self.attention {
                AttentionName::Fused => Scores::Fused,
                AttentionName::Unfused => Scores::Unfused,
            },
            sharding,
            kernels: if self.compiled == Some(false) { Kernels::Separate } else { Kernels::Fused },
        };
        // If the replicas are too few for the experts' ranks, these are drawn from tensor groups, too.
        if self.etp.is_none() && !layout.replicas().is_multiple_of(self.ep.max(1)) {
            layout.expert_tensor = 1;
        }
        layout
    }
}
