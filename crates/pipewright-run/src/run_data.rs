//! Opens the training data and the validation data of a run.

use std::path::Path;

use pipewright::train::Validation;
use pipewright::train::data::{
    ChatTemplate, DOCUMENTS, DataConfig, Documents, POSITIONS, SideRows, TokenRows, Tokenizer, VALID_TOKENS,
};
use pipewright_models::ModelConfig;
use serde_json::Value;

use crate::error::RunError;
use crate::settings::data::{BYTES, DataSettings};
use crate::settings::model::ModelSettings;
use crate::settings::{Settings, sample};

/// Returns the training data and the validation data.
pub(crate) fn open_data(
    settings: &Settings,
    model: DataModel<'_>,
) -> Result<(TokenRows, Option<Validation>), RunError> {
    let data = &settings.data;
    let (rows, mut held_out) = open_files(settings, model, settings.pipeline.rows())?;
    if !data.validation.is_empty() {
        let config = DataConfig {
            path: data.validation.clone(),
            mix: Vec::new(),
            shuffle: false,
            ..data_config(settings)
        };
        let opened = config.open(model.vocab_size, 0).map_err(RunError::input)?;
        held_out = Some(with_side(opened, data.validation_side.as_deref(), settings, model)?);
    }
    Ok((rows, held_out.map(|rows| validation_of(rows, settings)).transpose()?))
}

/// Returns the validation data with these rows.
pub(crate) fn validation_of(rows: TokenRows, settings: &Settings) -> Result<Validation, RunError> {
    let batches = Some(settings.run.eval_batches as usize).filter(|batches| *batches > 0);
    Validation::new(rows, settings.pipeline.rows(), batches).map_err(RunError::input)
}

/// Returns the training data, at least `batch_rows` rows. Files of validation data are not read.
pub(crate) fn open_training(
    settings: &Settings,
    model: DataModel<'_>,
    batch_rows: usize,
) -> Result<TokenRows, RunError> {
    open_files(settings, model, batch_rows).map(|(training, _)| training)
}

/// The sizes that the data must fit.
#[derive(Clone, Copy)]
pub(crate) struct DataModel<'a> {
    /// The number of token ids.
    pub(crate) vocab_size: usize,
    /// Checks that the model takes some side inputs.
    pub(crate) check_side: &'a dyn Fn(&SideRows) -> Result<(), RunError>,
}

/// Opens the files of `data.path` or `data.mix`. Returns the training data, and the part that is held out for
/// validation.
fn open_files(
    settings: &Settings,
    model: DataModel<'_>,
    batch_rows: usize,
) -> Result<(TokenRows, Option<TokenRows>), RunError> {
    let (data, vocab_size) = (&settings.data, model.vocab_size);
    let config = data_config(settings);
    // Which part of the data is too short is only known when a share of it is held out.
    let least = if data.validation_share.is_some() { 0 } else { batch_rows };
    let opened = if data.is_built_in() {
        config.open_text(sample::TEXT, vocab_size, least)
    } else {
        config.open(vocab_size, least)
    };
    let rows = with_side(opened.map_err(RunError::input)?, data.side.as_deref(), settings, model)?;
    let Some(share) = data.validation_share else { return Ok((rows, None)) };
    let (training, held_out) = rows.hold_out(share).map_err(RunError::input)?;
    training.require_batch(batch_rows).map_err(RunError::input)?;
    Ok((training, Some(held_out)))
}

/// Returns the tokenizer of a name: `bytes`, or the path of a file.
pub fn tokenizer(name: &str) -> Tokenizer {
    if name == BYTES { Tokenizer::Bytes } else { Tokenizer::File(name.into()) }
}

/// Returns the tokenizer of the data, with the tokens that the settings add.
pub(crate) fn tokenizer_of(settings: &Settings) -> Tokenizer {
    let tokens = settings.model.added_tokens();
    match tokenizer(&settings.data.tokenizer) {
        Tokenizer::File(file) if !tokens.is_empty() => Tokenizer::Extended(file, tokens.to_vec()),
        other => other,
    }
}

/// Returns the settings of the data source.
pub fn data_config(settings: &Settings) -> DataConfig {
    let data = &settings.data;
    let chat_template = data.chat_template.as_deref().map(ChatTemplate::of);
    DataConfig {
        path: data.path.clone(),
        mix: data.mix.clone(),
        tokenizer: tokenizer_of(settings),
        seq_len: data.seq_len as usize,
        shuffle: data.shuffle,
        seed: settings.run.seed,
        documents: data.bos_id.map(|bos_id| Documents {
            bos_id,
            packed: data.packed,
            restart_positions: data.restart_positions,
        }),
        keys: data.keys.clone().unwrap_or_default(),
        chat_template,
        chat_template_kwargs: data.chat_template_kwargs.clone(),
        train_on: data.train_on,
        long_records: data.long_records,
        bad_records: data.bad_records.into(),
        packs_examples: data.packed,
        date: data.date,
        preference: settings.preference.as_ref().map(|loss| loss.data(settings.pipeline.microbatch_size)),
        labels: labels_of(settings),
    }
}

/// Returns the labels of texts and chats: those of the settings, or of the model. A model that cannot be read has none here, and
/// reading it reports the error.
fn labels_of(settings: &Settings) -> Vec<String> {
    match &settings.model {
        _ if settings.preference.is_some() => Vec::new(),
        _ if !settings.data.labels.is_empty() => settings.data.labels.clone(),
        ModelSettings::From { from, .. } => {
            ModelConfig::read(from).map_or_else(|_| Vec::new(), |model| model.labels().to_vec())
        }
        ModelSettings::Fresh(_) => Vec::new(),
    }
}

/// Adds the side inputs in the file `side`, if there is one.
fn with_side(
    rows: TokenRows,
    side: Option<&Path>,
    settings: &Settings,
    model: DataModel<'_>,
) -> Result<TokenRows, RunError> {
    let Some(side) = side else { return Ok(rows) };
    let side = SideRows::read(side).map_err(RunError::input)?;
    (model.check_side)(&side)?;
    let (packed, filled) = (settings.data.packed, rows.ignores_targets());
    let documents = "is made from the token ids if `data.packed` is true: remove it from the file, or unset `data.packed`";
    let made = [
        (DOCUMENTS, packed, documents),
        (POSITIONS, packed, documents),
        (
            VALID_TOKENS,
            filled,
            "is counted for chats and completions, whose rows are filled: remove it from the file",
        ),
    ];
    if let Some((name, _, problem)) = made.into_iter().find(|(name, is_made, _)| *is_made && side.has(name)) {
        return Err(RunError::input(side.error(name, problem.to_owned())));
    }
    rows.with_side(side).map_err(RunError::input)
}

/// Refuses packed documents that begin with another id than the model's own.
pub(crate) fn require_one_beginning(data: &DataSettings, model: &Value) -> Result<(), RunError> {
    let model_id = model["bos_token_id"].as_u64();
    match (model_id, data.bos_id) {
        (Some(model), Some(data_id)) if data.packed && model != u64::from(data_id) => {
            Err(RunError::input(format!(
                "`data.bos_id` is {data_id}, and the model's documents begin with {model} (`model.bos_token_id`): write \
                 the same id"
            )))
        }
        _ => Ok(()),
    }
}
