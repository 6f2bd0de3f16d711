//! The model that the settings name, and sentences about its files that the user should know, although the
//! run can start.

use std::collections::BTreeSet;
use std::path::Path;

use pipewright::train::data::TokenRows;
use pipewright_models::training_memory::{ComputeDevices, layers_in};
use pipewright_models::{
    Adapter, AdapterStart, CutModel, LoraConfig, ModelConfig, ParameterSpec, PreferenceKind, QuantisedSizes,
    TrainingForm, adapted_experts, adapted_layers, hf, usual_label,
};
use pipewright_schedule::ModelDesc;
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_schedule::words::counted;
use pipewright_system::machine_memory::machine_bytes;

use crate::error::RunError;
use crate::run_model::RunModel;
use crate::settings::Settings;
use crate::settings::adapter::{AdapterSettings, AdapterSource};
use crate::settings::data::BYTES;
use crate::settings::model::ModelSettings;
use crate::settings::pipeline::TransportChoice;
use crate::settings::preference::PreferenceSettings;

/// The number of different bytes.
pub(crate) const BYTE_TOKENS: usize = 256;

/// Returns the configuration of the model that the settings name, with its embedding and its head in as many parts.
pub fn read_model(settings: &Settings) -> Result<CutModel, RunError> {
    let model = match &settings.model {
        ModelSettings::From { from, add_tokens, .. } => {
            let model = ModelConfig::read(from).map_err(RunError::input)?;
            with_tokens(model, from, settings.data.tokenizer.as_ref(), add_tokens)?
        }
        ModelSettings::Fresh(model) => model.config(),
    };
    model.check_length(settings.data.seq_len as usize).map_err(RunError::input)?;
    let model = with_head(settings, model)?;
    let adapter =
        settings.adapter.as_ref().map(|adapter| read_adapter(settings, adapter, &model)).transpose()?;
    let model = CutModel::new(model, settings.pipeline.head_parts).map_err(RunError::input)?;
    let model = model.with_embedding_parts(settings.pipeline.embedding_parts).map_err(RunError::input)?;
    let model = model.with_form(settings.run.training_form());
    let quantised = quantised_sizes(settings, &model)?;
    let streamed = streamed_sizes(settings, &model)?;
    let model = match adapter {
        Some(adapter) => {
            let model = model.with_adapter(adapter).map_err(RunError::input)?.with_quantised(quantised);
            match &streamed {
                Some(streamed) => model.with_streamed(streamed),
                None => model,
            }
        }
        None => model,
    };
    match &settings.preference {
        Some(preference) => {
            require_base(preference, &model)?;
            model.with_preference(preference.loss()).map_err(RunError::input)
        }
        None => Ok(model),
    }
}

/// Returns the model in a folder with the token ids that `tokens` get from this tokenizer.
fn with_tokens(
    model: ModelConfig,
    from: &Path,
    tokenizer: &Path,
    tokens: &[String],
) -> Result<ModelConfig, RunError> {
    if tokens.is_empty() {
        return Ok(model);
    }
    let refused = |reason: String| RunError::input(format!("`model.add_tokens`: {reason}"));
    if hf::is_config_alone(from) {
        return Err(refused(format!(
            "{}: there are no weights, and a model without weights has the ids that its config.json says: \
             change `vocab_size` there",
            from.display()
        )));
    }
    let added =
        hf::added_rows(from, &*model, tokenizer, tokens).map_err(|error| refused(sentence(&error)))?;
    model.with_vocab_size(added.vocab_size).map_err(|error| refused(sentence(&error)))
}

/// Returns a warning if tokens are added and adapters leave their rows as they are.
pub(crate) fn untrained_tokens(
    settings: &Settings,
    model: &dyn RunModel,
) -> Result<Option<String>, RunError> {
    if settings.model.added_tokens().is_empty() || model.adapter().is_none() {
        return Ok(None);
    }
    let trained = model.trained_parameters()?;
    let is_trained = |module: &str| {
        trained.iter().any(|spec| spec.path.strip_prefix(module).is_some_and(|rest| rest.starts_with('.')))
    };
    let untrained = hf::vocabulary_modules(&model.parameters()?);
    let untrained: Vec<String> = untrained.into_iter().filter(|module| !is_trained(module)).collect();
    Ok((!untrained.is_empty()).then(|| {
        format!(
            "warning: nothing trains the rows of the tokens in `model.add_tokens` in {}: name the modules in \
             `adapter.modules_to_save`, such as [\"embed_tokens\", \"lm_head\"]",
            quoted(&untrained)
        )
    }))
}

/// Returns the number of labels that the settings give a model in place of its head; `None` if its head stays.
pub fn given_labels(settings: &Settings) -> Option<usize> {
    match &settings.preference {
        Some(loss) => (loss.loss == PreferenceKind::Reward).then_some(1),
        None => Some(settings.data.labels.len()).filter(|labels| *labels > 0),
    }
}

/// Returns the model with a head of labels, if it is trained on rewards or labels.
fn with_head(settings: &Settings, model: ModelConfig) -> Result<ModelConfig, RunError> {
    let (labels, found) = (&settings.data.labels, model.labels().len());
    let is_reward = settings.preference.as_ref().is_some_and(|loss| loss.loss == PreferenceKind::Reward);
    let labelled = |labels: &[String]| model.with_labels(labels).map_err(RunError::input);
    let problem = match found {
        0 if is_reward => return labelled(&[usual_label(0)]),
        0 if labels.is_empty() => return Ok(model),
        0 => return labelled(labels),
        // The loss checks the head.
        _ if settings.preference.is_some() => return Ok(model),
        1 => "has one label, whose output is a reward: write `loss = \"reward\"` in [preference]".to_owned(),
        // The settings alone do not say it if the labels are the model's.
        _ if labels.is_empty() => match settings.data.unfit_for_labels().first() {
            None => return Ok(model),
            Some(key) => {
                format!("has labels, and `data.{key}` does not work with training on them: remove `{key}`")
            }
        },
        _ if labels.len() == found => return labelled(labels),
        _ => format!(
            "has {}, and `data.labels` has {}: remove the key, or write as many",
            counted(found, "label"),
            labels.len()
        ),
    };
    Err(RunError::input(format!("the model in `model.from` {problem}")))
}

/// Refuses settings that change a model of a family, if the program trains a model of its own.
pub(crate) fn require_family(settings: &Settings) -> Result<(), RunError> {
    let key = if settings.preference.is_some() {
        "`preference.loss` changes"
    } else if !settings.data.labels.is_empty() {
        "`data.labels` changes"
    } else if settings.run.training_form() != TrainingForm::default() {
        "`run.label_smoothing` and `run.neftune_alpha` change"
    } else {
        return Ok(());
    };
    Err(RunError::input(format!(
        "{key} models of the families, and the program trains a model of its own: remove what the settings say about it, and \
         change that model"
    )))
}

/// Refuses adapters from a directory with whole modules as the start of a training with a reference: the reference is the
/// base, and these modules would take the place of the base's.
fn require_base(preference: &PreferenceSettings, model: &CutModel) -> Result<(), RunError> {
    let starts_elsewhere = model.adapter().is_some_and(|adapter| {
        matches!(adapter.start, AdapterStart::Directory(_)) && !adapter.lora.modules_to_save.is_empty()
    });
    if preference.loss.needs_reference() && starts_elsewhere {
        return Err(RunError::input(
            "`adapter.path` has whole modules (`modules_to_save`), which would be a part of the reference of `preference.loss`: \
             name adapters without them, or export the merged model and train on that",
        ));
    }
    Ok(())
}

/// Returns the sizes of the matrices that stay in the files of the base, if the settings ask for it, or leave the choice
/// and the machine has less memory than the files need.
fn streamed_sizes(settings: &Settings, model: &CutModel) -> Result<Option<QuantisedSizes>, RunError> {
    let ModelSettings::From { from, streaming, .. } = &settings.model else { return Ok(None) };
    let refusal = stream_refusal(settings, from);
    match (streaming.stream, refusal) {
        (Some(false), _) | (None, Some(_)) => Ok(None),
        (Some(true), Some(refusal)) => {
            let place = from.display();
            Err(RunError::input(format!(
                "{place}: the base cannot stay in its files (`model.stream`): {refusal}"
            )))
        }
        // Processes may be on several machines, and all need the same program.
        (None, None) if settings.pipeline.transport != TransportChoice::Local => Ok(None),
        (stream, None) => {
            let sizes = sizes_in_files(from, model)?;
            let is_too_large = || machine_bytes().is_some_and(|machine| sizes.total() > machine);
            Ok((stream.is_some() || is_too_large()).then_some(sizes))
        }
    }
}

/// Returns why the base cannot stay in its files; `None` if it can.
fn stream_refusal(settings: &Settings, from: &Path) -> Option<&'static str> {
    if settings.adapter.is_none() {
        Some("training changes the whole model: add a section [adapter]")
    } else if !settings.run.devices.are_processor() {
        Some("its matrices are multiplied on processors only: set `run.device` to \"flex\"")
    } else if settings.mesh.is_sharded() {
        Some("it is not divided among replicas: set `mesh.data_parallel_mode` to \"replicated\"")
    } else if hf::is_config_alone(from) {
        Some("the folder has no weights")
    } else {
        None
    }
}

fn sizes_in_files(from: &Path, model: &CutModel) -> Result<QuantisedSizes, RunError> {
    let specs = model.model().parameters().map_err(RunError::input)?;
    hf::streamed_sizes(from, &specs).map_err(RunError::input)
}

/// Returns the model with its base in files, if a plan may leave it there: `model.stream` is true or not written, and nothing
/// is in the way.
///
/// # Errors
/// When the files of the base cannot be read.
pub fn streamable(settings: &Settings, model: &CutModel) -> Result<Option<CutModel>, RunError> {
    if model.streams() {
        return Ok(Some(model.clone()));
    }
    let ModelSettings::From { from, streaming, .. } = &settings.model else { return Ok(None) };
    if streaming.stream == Some(false) || stream_refusal(settings, from).is_some() {
        return Ok(None);
    }
    Ok(Some(model.clone().with_streamed(&sizes_in_files(from, model)?)))
}

/// Returns the sizes of the quantised matrices of the base that the settings name, if the run can train on it.
fn quantised_sizes(settings: &Settings, model: &CutModel) -> Result<QuantisedSizes, RunError> {
    let ModelSettings::From { from, .. } = &settings.model else { return Ok(QuantisedSizes::default()) };
    if hf::is_config_alone(from) {
        return Ok(QuantisedSizes::default());
    }
    let specs = model.model().parameters().map_err(RunError::input)?;
    let sizes = match hf::quantised_sizes(from, &specs) {
        // A command may need the configuration alone, and loading reports the error.
        Err(_) if settings.adapter.is_none() => return Ok(QuantisedSizes::default()),
        sizes => sizes.map_err(RunError::input)?,
    };
    let advice = if sizes.is_empty() {
        return Ok(sizes);
    } else if settings.adapter.is_none() {
        "so only adapters can be trained on it: add a section [adapter], or use the model from which it was made"
    } else if !settings.run.devices.are_processor() {
        "and quantised weights are computed on processors only: set `run.device` to \"flex\""
    } else {
        return Ok(sizes);
    };
    Err(RunError::input(format!("{}: the model is quantised, {advice}", from.display())))
}

/// Returns the adapters that the settings name: new ones, or those of a PEFT directory.
fn read_adapter(
    settings: &Settings,
    adapter: &AdapterSettings,
    model: &ModelConfig,
) -> Result<Adapter, RunError> {
    if let ModelSettings::From { from, .. } = &settings.model
        && hf::is_config_alone(from)
    {
        return Err(RunError::input(format!(
            "{}: there are no weights, and adapters change a trained model: name a folder with weights (`model.from`), or \
             remove the section [adapter]",
            from.display()
        )));
    }
    adapter_of(settings, adapter, model)
}

/// Returns the adapters that the settings name, for a model that may have no weights.
pub fn adapter_of(
    settings: &Settings,
    adapter: &AdapterSettings,
    model: &ModelConfig,
) -> Result<Adapter, RunError> {
    Ok(match &adapter.source {
        AdapterSource::From { path, dropout } => {
            let lora = model.read_adapter(path).map_err(RunError::input)?;
            let lora = LoraConfig { dropout: dropout.unwrap_or(lora.dropout), ..lora };
            Adapter { lora, start: AdapterStart::Directory(path.clone()) }
        }
        new @ AdapterSource::New { .. } => {
            let lora = new.new_lora().expect("these are the settings of new adapters");
            Adapter { lora, start: AdapterStart::Seed(settings.run.seed) }
        }
    })
}

/// Returns the number of trained parameters of a model with adapters and a sentence about it; `None` without
/// adapters. `all` is the number of the model's own parameters.
pub(crate) fn trained_adapters(model: &dyn RunModel, all: u64) -> Result<Option<(u64, String)>, RunError> {
    let Some(adapter) = model.adapter() else { return Ok(None) };
    let specs = model.trained_parameters()?;
    let trained = elements(&specs);
    let layers = counted(adapted_layers(&adapter.lora, &specs).len(), "layer");
    let stacks = adapted_experts(&specs);
    let blocks: BTreeSet<_> =
        stacks.iter().filter_map(|stack| stack.rsplit_once('.')).map(|(block, _)| block).collect();
    let experts = match blocks.len() {
        0 => String::new(),
        blocks => format!(" and the experts of {}", counted(blocks, "block")),
    };
    let saved = match adapter.lora.saved_modules(specs.iter().map(|spec| &*spec.path)).len() {
        0 => String::new(),
        saved => format!(" and {} as a whole", counted(saved, "module")),
    };
    let kind = if adapter.lora.dora { "dora" } else { "lora" };
    let share = trained as f64 / (all + trained).max(1) as f64 * 100.0;
    let note = format!(
        "adapter: {kind} of rank {} on {layers}{experts}{saved}: {} trained, {share:.2}% of all",
        adapter.lora.rank,
        counted(trained, "parameter")
    );
    Ok(Some((trained, note)))
}

/// Returns the number of elements of parameters.
fn elements(specs: &[ParameterSpec]) -> u64 {
    specs.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
}

/// Returns what the ranks of a run compute on, as far as it decides which tensors they keep.
pub fn compute_devices(settings: &Settings) -> ComputeDevices {
    settings.run.devices.compute_devices(settings.mesh.ranks(settings.pipeline.ranks))
}

/// Returns the layers of the model of a run, with their sizes in the precision and on the devices of the run.
pub fn described(settings: &Settings, model: &CutModel) -> ModelDesc {
    let devices = compute_devices(settings);
    layers_in(model, settings.data.seq_len as usize, settings.run.precision, devices)
}

/// Returns the sentences about the `config.json` of the model that the settings name.
pub fn model_notes(settings: &Settings) -> Result<Vec<String>, RunError> {
    let ModelSettings::From { from, .. } = &settings.model else { return Ok(Vec::new()) };
    let mut notes: Vec<String> = unknown_note(from)?.into_iter().chain(dropout_note(from)?).collect();
    if hf::is_config_alone(from) {
        let place = from.display();
        notes.push(format!("{place}: there are no weights: training starts from random ones (`run.seed`)"));
    }
    Ok(notes)
}

/// Returns a note about a window of a base that is in memory.
pub(crate) fn window_note(settings: &Settings, streams: bool) -> Option<String> {
    let is_in_vain = settings.model.streaming().window.is_some() && !streams;
    is_in_vain.then(|| {
        "`model.stream_window` has no effect, because the base is in memory: remove it, or set model.stream=true".to_owned()
    })
}

/// Returns the sentence about text that is trained as bytes although the model has more token ids.
pub(crate) fn tokenizer_note(settings: &Settings, vocab_size: usize, rows: &TokenRows) -> Option<String> {
    let ModelSettings::From { from, .. } = &settings.model else { return None };
    // The text in the binary is of no file.
    let sources = rows.sources();
    let is_text = sources.is_empty() || sources.iter().any(|source| source.format.is_text());
    let is_note = is_text && settings.data.tokenizer == BYTES && vocab_size > BYTE_TOKENS;
    is_note.then(|| {
        format!(
            "warning: {}: the text is trained as bytes, and the model has {vocab_size} token ids: name its \
             tokenizer (`data.tokenizer`)",
            from.display()
        )
    })
}

/// Returns the sentence about the keys of a `config.json` that are not known, if there are any.
pub fn unknown_note(from: &Path) -> Result<Option<String>, RunError> {
    let unknown = ModelConfig::unknown_keys(from).map_err(RunError::input)?;
    let note = || {
        format!(
            "warning: {}: config.json has keys that are not known: {}; they are ignored, which is wrong if they change what the \
             model computes",
            from.display(),
            quoted(&unknown)
        )
    };
    Ok((!unknown.is_empty()).then(note))
}

/// Returns the sentence about the dropout of a `config.json`, if it asks for some. Only training drops
/// elements, so the sentence is for commands that train.
fn dropout_note(from: &Path) -> Result<Option<String>, RunError> {
    let keys = ModelConfig::dropout_keys(from).map_err(RunError::input)?;
    let note = || {
        format!(
            "warning: {}: config.json asks for dropout in training ({}); the model trains without it",
            from.display(),
            quoted(&keys)
        )
    };
    Ok((!keys.is_empty()).then(note))
}

/// Checks the weights in a directory. Returns sentences about the tensors that the model does not use, and about a head that
/// the directory does not have.
pub fn check_weights(directory: &Path, parameters: &[ParameterSpec]) -> Result<Vec<String>, RunError> {
    let unused = hf::check_weights(directory, parameters).map_err(RunError::input)?;
    let (place, mut notes) = (directory.display(), Vec::new());
    if !unused.is_empty() {
        let (count, names) = (counted(unused.len(), "tensor"), listed(&unused));
        notes.push(format!("warning: {place}: the model does not use {count} of the files: {names}"));
    }
    if hf::lacks_labels(directory, parameters).map_err(RunError::input)? {
        notes.push(format!("{place}: there is no head of labels: `score.weight` is drawn (`run.seed`)"));
    }
    Ok(notes)
}

/// Returns the first three names.
fn listed(names: &[String]) -> String {
    let more = if names.len() > 3 { ", ..." } else { "" };
    format!("{}{more}", quoted(&names[..names.len().min(3)]))
}

fn quoted(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}
