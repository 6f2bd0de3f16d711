//! A trained model with its tokenizer: from the folder of a run, a checkpoint, or a Hugging Face directory.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};
use pipewright::checkpoint::{Checkpoint, CheckpointFolder};
use pipewright::train::data::{ChatTemplate, DataConfig, TokenCodec, Tokenizer};
use pipewright::transport::Fields;
use pipewright_gguf::files;
use pipewright_models::{AdaptedCheckpoint, LoraConfig, ModelConfig, ModelSource, hf};
use pipewright_schedule::error_text::with_causes as sentence;
use serde_json::Value;

use crate::error::RunError;
use crate::run_data;
use crate::run_folder::{CONFIG, checkpoints_of};
use crate::settings::data::{BYTES, json_of};
use crate::settings::mesh::whole_experts_of_run;
use crate::training::identity::{MODEL, checkpoint_files, weight_files};
use crate::training::model::BYTE_TOKENS;
use crate::training::run_adapter::{ADAPTER, StoredAdapter};
use crate::training::{checkpoint_path, origin};

/// The file of a Hugging Face directory that describes the model.
const HF_CONFIG: &str = "config.json";

/// A trained model.
pub struct TrainedModel {
    /// The model.
    pub model: ModelConfig,
    /// Where its parameters are.
    pub origin: Origin,
    /// The tokenizer of texts.
    pub codec: TokenCodec,
    /// The tokenizer, the chat template with its variables, and the date of the training data; nothing else of it.
    pub chat: DataConfig,
    /// The token that begins each document of the training data.
    pub bos_id: Option<u32>,
    /// The tokens that end a text.
    pub ends: Vec<u32>,
    /// The length of the rows that the model was trained on, if it is known.
    pub trained_length: Option<usize>,
    /// The ranks of the run, if it is known.
    pub run: Option<RunRanks>,
}

/// The ranks of a run that compute one copy of the model together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRanks {
    /// The ranks of the pipeline.
    pub ranks: u32,
    /// The ranks that compute each stage together.
    pub tensor: u32,
    /// Whether each of them holds whole experts.
    pub whole_experts: bool,
    /// The devices, as the configuration names them: rank `r` has entry `r` modulo their number.
    pub devices: Vec<String>,
}

/// Where the parameters are.
pub enum Origin {
    /// In a Hugging Face directory.
    Directory(PathBuf),
    /// In a checkpoint.
    Checkpoint(Box<Checkpoint>),
    /// Adapters in a checkpoint, and the folder of their base.
    Adapted(Box<(Checkpoint, LoraConfig, PathBuf)>),
}

impl Origin {
    /// Returns the source of the parameters for a stage.
    pub fn source(&self) -> ModelSource<'_> {
        match self {
            Self::Directory(directory) => ModelSource::Directory(directory),
            Self::Checkpoint(checkpoint) => ModelSource::Checkpoint(checkpoint),
            Self::Adapted(adapted) => {
                let (checkpoint, lora, base) = &**adapted;
                ModelSource::Adapted(AdaptedCheckpoint { checkpoint, lora, base })
            }
        }
    }

    /// Returns what must be equal in all processes that read the parameters, by name. Paths may differ.
    pub fn identity(&self) -> Fields {
        let fields = match self {
            Self::Directory(folder) => vec![("files of the weights", weight_files(folder))],
            Self::Checkpoint(checkpoint) => vec![("checkpoint", checkpoint_files(checkpoint))],
            Self::Adapted(adapted) => {
                let (checkpoint, _, base) = &**adapted;
                // It says on which weights the adapters were trained, and those of the base are the same.
                let adapters = checkpoint.manifest().description.get(ADAPTER);
                vec![
                    ("checkpoint", checkpoint_files(checkpoint)),
                    ("adapters", adapters.map(Value::to_string).unwrap_or_default()),
                    ("files of the base", weight_files(base)),
                ]
            }
        };
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// Opens the model that a path names. `tokenizer` is `bytes` or a file, in place of the model's own.
pub fn open(path: &Path, tokenizer: Option<&str>, base: Option<&Path>) -> Result<TrainedModel, RunError> {
    let path = &hf::resolve(path).map_err(RunError::input)?;
    let is_of_run = CheckpointFolder::is_checkpoint(path)
        || checkpoints_of(path).is_dir()
        || CheckpointFolder::list(path).is_ok_and(|checkpoints| !checkpoints.is_empty());
    match (is_of_run, files::exists(&path.join(HF_CONFIG))) {
        (true, _) => of_checkpoint(checkpoint_path::open(path)?, tokenizer, base),
        (false, true) => of_directory(path, tokenizer),
        (false, false) => Err(RunError::input(format!(
            "{}: there is no model here: neither checkpoints nor a {HF_CONFIG}; name the folder of a run, a checkpoint, or \
             a Hugging Face directory",
            path.display()
        ))),
    }
}

fn of_directory(path: &Path, tokenizer: Option<&str>) -> Result<TrainedModel, RunError> {
    let model = ModelConfig::read(path).map_err(RunError::input)?;
    let own = path.join(hf::TOKENIZER);
    let tokenizer = match tokenizer {
        Some(name) => run_data::tokenizer(name),
        None if files::exists(&own) => Tokenizer::File(own),
        None if model.vocab_size() <= BYTE_TOKENS => Tokenizer::Bytes,
        None => return Err(no_tokenizer(&path.display().to_string())),
    };
    Ok(TrainedModel {
        codec: TokenCodec::open(&tokenizer).map_err(RunError::input)?,
        chat: DataConfig { tokenizer, ..DataConfig::default() },
        ends: hf::end_tokens(path, None).map_err(RunError::input)?,
        bos_id: None,
        trained_length: None,
        run: None,
        model,
        origin: Origin::Directory(path.to_owned()),
    })
}

/// Returns the model that a checkpoint holds.
///
/// # Errors
/// When the checkpoint does not say it, or its family is not known.
pub fn model_of(checkpoint: &Checkpoint) -> Result<ModelConfig, RunError> {
    let place = checkpoint.path().display();
    let Some(model) = checkpoint.manifest().description.get(MODEL).cloned() else {
        return Err(RunError::input(format!(
            "{place}: the checkpoint does not say which model it holds; name one that pipewright train wrote"
        )));
    };
    ModelConfig::from_json(model)
        .map_err(|error| RunError::input(format!("{place}: the checkpoint's model: {}", sentence(&error))))
}

fn of_checkpoint(
    checkpoint: Checkpoint,
    tokenizer: Option<&str>,
    base: Option<&Path>,
) -> Result<TrainedModel, RunError> {
    let place = checkpoint.path().display().to_string();
    let model = model_of(&checkpoint)?;
    let kept = origin::of_checkpoint(&checkpoint);
    let mut config = config_of_run(&checkpoint)?.unwrap_or_default();
    let run = ranks_of(&mut config);
    let data = table_of(&mut config, "data");
    let text = |key: &str| data.as_ref().and_then(|data| data.get(key)?.as_str());
    let number = |key: &str| data.as_ref().and_then(|data| data.get(key)?.as_integer());
    let tokenizer = match (tokenizer, text("tokenizer")) {
        (Some(name), _) => run_data::tokenizer(name),
        (None, Some(BYTES)) => Tokenizer::Bytes,
        (None, Some(of_run)) => {
            // The run has kept a copy.
            let copy = kept.as_ref().map(|kept| kept.join(hf::TOKENIZER)).filter(|copy| copy.is_file());
            Tokenizer::File(copy.unwrap_or_else(|| of_run.into()))
        }
        (None, None) if model.vocab_size() <= BYTE_TOKENS => Tokenizer::Bytes,
        (None, None) => return Err(no_tokenizer(&place)),
    };
    let ends = kept.as_deref().map_or(Ok(Vec::new()), |kept| hf::end_tokens(kept, None));
    let origin = match StoredAdapter::of(&checkpoint)? {
        Some(adapter) => {
            let base = adapter.base(base, base_of(&mut config))?;
            Origin::Adapted(Box::new((checkpoint, adapter.lora, base)))
        }
        None => Origin::Checkpoint(Box::new(checkpoint)),
    };
    Ok(TrainedModel {
        codec: TokenCodec::open(&tokenizer).map_err(RunError::input)?,
        chat: DataConfig {
            tokenizer,
            chat_template: text("chat_template").map(ChatTemplate::of),
            chat_template_kwargs: kwargs_of(data.as_ref()),
            date: text("date").and_then(|date| date.parse().ok()),
            ..DataConfig::default()
        },
        ends: ends.map_err(RunError::input)?,
        bos_id: number("bos_id").and_then(|id| u32::try_from(id).ok()),
        trained_length: number("seq_len").and_then(|length| usize::try_from(length).ok()),
        run,
        model,
        origin,
    })
}

/// Returns the further variables of the chat template of a run.
fn kwargs_of(data: Option<&toml::Table>) -> BTreeMap<String, Value> {
    let kwargs = data.and_then(|data| json_of(data.get("chat_template_kwargs")?.clone()));
    kwargs.and_then(|kwargs| kwargs.as_object().cloned()).into_iter().flatten().collect()
}

/// Returns the ranks of a replica of a run.
fn ranks_of(config: &mut toml::Table) -> Option<RunRanks> {
    let count = |table: &toml::Table, key: &str| u32::try_from(table.get(key)?.as_integer()?).ok();
    let ranks = count(&table_of(config, "pipeline")?, "ranks")?;
    let mesh = table_of(config, "mesh").unwrap_or_default();
    let tensor = count(&mesh, "tensor_parallel").unwrap_or(1);
    let whole_experts = whole_experts_of_run(&mesh);
    let run = table_of(config, "run").unwrap_or_default();
    let text = |value: &toml::Value| value.as_str().map(str::to_owned);
    let list = run.get("devices").and_then(toml::Value::as_array);
    let devices = match (list, run.get("device")) {
        (Some(list), _) => list.iter().filter_map(text).collect(),
        (None, device) => device.and_then(text).into_iter().collect(),
    };
    Some(RunRanks { ranks, tensor, whole_experts, devices })
}

fn no_tokenizer(place: &str) -> RunError {
    RunError::input(format!(
        "{place}: there is no tokenizer next to the model: add --tokenizer FILE, or --tokenizer bytes if it was trained on \
         bytes"
    ))
}

/// Returns the folder of the base of a run's adapters, which its configuration names.
pub fn base_of_run(checkpoint: &Checkpoint) -> Result<Option<PathBuf>, RunError> {
    Ok(config_of_run(checkpoint)?.as_mut().and_then(base_of))
}

fn base_of(config: &mut toml::Table) -> Option<PathBuf> {
    Some(table_of(config, "model")?.get("from")?.as_str()?.into())
}

/// Takes a section out of a configuration.
fn table_of(config: &mut toml::Table, section: &str) -> Option<toml::Table> {
    match config.remove(section) {
        Some(toml::Value::Table(table)) => Some(table),
        _ => None,
    }
}

/// Returns the configuration of a checkpoint's run; `None` if the checkpoint is not in a run.
fn config_of_run(checkpoint: &Checkpoint) -> Result<Option<toml::Table>, RunError> {
    let path = std::path::absolute(checkpoint.path()).unwrap_or_else(|_| checkpoint.path().to_owned());
    let config = path.parent().and_then(Path::parent).map(|run| run.join(CONFIG));
    let Some(config) = config.filter(|config| config.is_file()) else { return Ok(None) };
    let unreadable = |error: &(dyn Error + 'static)| {
        let reason = sentence(error);
        RunError::input(format!(
            "{}: the configuration of the run cannot be read: {reason}",
            config.display()
        ))
    };
    let text = read_regular_text(&config, SMALL_TEXT).map_err(|error| unreadable(&error))?;
    text.parse().map(Some).map_err(|error| unreadable(&error))
}
