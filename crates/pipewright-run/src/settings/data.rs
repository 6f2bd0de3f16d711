//! The `[data]` section: the training data, the validation data, and the length of a row.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pipewright::train::data::{ChatTemplate, Date, Feature, LongRecords, MixSource, RecordKeys, TrainOn};
use pipewright_document::{Bound, Reader, advice_for_unknown};
use pipewright_gguf::container::locate;
use pipewright_gguf::files;
use pipewright_models::hf;
use serde::Serialize;
use serde_json::Value as Json;

use crate::settings::document::Document;
use crate::settings::mix;
use crate::settings::model::ModelSettings;
use crate::settings::paths::Surroundings;
use crate::settings::sample::BUILT_IN;
use crate::settings::section::Section;

/// The training data and the validation data.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSettings {
    /// Absolute patterns of files, as [`pipewright::train::data::DataConfig::path`] takes them, or
    /// `BUILT_IN` alone; empty if there is a mixture.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<String>,
    /// The sources of a mixture, in place of `path`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<MixSource>,
    /// `bytes`, or the absolute path of a `tokenizer.json`.
    pub tokenizer: String,
    /// The number of tokens per row that the model receives.
    pub seq_len: u32,
    /// Whether rows come in a seeded random order.
    pub shuffle: bool,
    /// A file with side inputs for each row.
    pub side: Option<PathBuf>,
    /// Absolute patterns of the files of the validation data; empty without such files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub validation: Vec<String>,
    /// The share of the data that is held out from its end as validation data.
    pub validation_share: Option<f64>,
    /// A file with side inputs for each row of the files in `validation`.
    pub validation_side: Option<PathBuf>,
    /// The token id that begins each document.
    pub bos_id: Option<u32>,
    /// Whether a token sees nothing of the other documents in its row.
    pub packed: bool,
    /// Whether positions begin again in each document.
    pub restart_positions: bool,
    /// The names of the keys of records, if some have other names.
    pub keys: Option<RecordKeys>,
    /// The name of a chat template, or the absolute path of a file with one.
    pub chat_template: Option<String>,
    /// Further variables of the chat template.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub chat_template_kwargs: BTreeMap<String, Json>,
    /// The tokens of chats and completions that count in the loss, if it is not the default.
    pub train_on: Option<TrainOn>,
    /// The names of the labels of texts and chats; none for other training.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// The treatment of chats and completions that do not fit into a row.
    #[serde(skip_serializing_if = "is_default")]
    pub long_records: LongRecords,
    /// The most records of each source that are left out because they cannot be used.
    pub bad_records: u32,
    /// The date that chat templates ask for.
    pub date: Option<Date>,
}

fn is_default(long: &LongRecords) -> bool {
    *long == LongRecords::default()
}

/// The name of the tokenizer whose tokens are bytes.
pub const BYTES: &str = "bytes";

/// Returns the file of a tokenizer that is named by its folder or itself.
pub fn tokenizer_file(path: &Path) -> PathBuf {
    if !path.is_dir() && locate(path).is_none() {
        return path.to_owned();
    }
    // A cache folder of the hub has the files in a folder below.
    hf::resolve(path).unwrap_or_else(|_| path.to_owned()).join(hf::TOKENIZER)
}

impl DataSettings {
    /// Returns whether the data is the text in the binary.
    pub(crate) fn is_built_in(&self) -> bool {
        matches!(self.path.as_slice(), [only] if only == BUILT_IN)
    }

    /// Returns the given keys that do not work with training on labels, rewards or preferences.
    pub(crate) fn unfit_for_labels(&self) -> Vec<&'static str> {
        let keys = [("train_on", self.train_on.is_some()), ("side", self.side.is_some())];
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key).collect()
    }

    /// Returns whether there is validation data.
    pub(crate) fn has_validation(&self) -> bool {
        !self.validation.is_empty() || self.validation_share.is_some()
    }
}

/// Reads the section.
pub(super) fn read(
    document: &mut Document,
    surroundings: &Surroundings,
    model: &ModelSettings,
) -> DataSettings {
    mix::remove_replaced(document);
    let mut section = Section::new(document, surroundings, "data");
    let mix = mix::read(&mut section);
    let path = if section.is_written("path") {
        section.patterns("path").unwrap_or_default()
    } else if section.is_written("mix") {
        Vec::new()
    } else {
        vec![BUILT_IN.to_owned()]
    };
    let files: Vec<&str> =
        path.iter().chain(mix.iter().flat_map(|source| &source.path)).map(String::as_str).collect();
    let tokenizer = match section.text("tokenizer") {
        None if section.is_written("tokenizer") => BYTES.to_owned(),
        None => tokenizer_of(&mut section, model, may_be_ids(&files)).unwrap_or_else(|| BYTES.to_owned()),
        Some(name) if name == BYTES => name,
        Some(_) => {
            section.path("tokenizer").map_or_else(String::new, |path| path.to_string_lossy().into_owned())
        }
    };
    let needed = needed_features(&tokenizer, &files);
    if let Some((feature, keys)) = needed.into_iter().find(|(feature, _)| !feature.is_compiled_in()) {
        report_first(&mut section, keys, feature);
    }
    let seq_len = section.count("seq_len");
    let (shuffle, side) = (section.flag("shuffle"), section.path("side"));
    let (validation, validation_share) = read_validation(&mut section);
    let validation_side = section.path("validation_side");
    let (keys, chat_template) = (read_keys(&mut section), read_chat_template(&mut section));
    let chat_template_kwargs = read_kwargs(&mut section);
    let (train_on, long_records) = read_loss(&mut section);
    let labels = read_labels(&mut section);
    let bad_records = section.count("bad_records");
    let date = read_date(&mut section);
    let bos_id = section.given_count("bos_id");
    let (packed, restart_positions) = (section.flag("packed"), section.flag("restart_positions"));
    let mut require = |is_needed: bool, key, other, advice| {
        if is_needed && section.is_sound() {
            section.report_without(key, other, advice);
        }
    };
    require(
        packed && bos_id.is_none() && path == [BUILT_IN],
        "packed",
        "`bos_id`",
        "write `bos_id`, the token id that begins each document",
    );
    require(
        side.is_some() && !mix.is_empty(),
        "side",
        "`path`",
        "name the data as `path`: side inputs belong to the rows of one source",
    );
    require(restart_positions && !packed, "restart_positions", "`packed`", "write `packed = true`");
    DataSettings {
        path,
        mix,
        tokenizer,
        seq_len,
        shuffle,
        side,
        validation,
        validation_share,
        validation_side,
        bos_id,
        packed,
        restart_positions,
        keys,
        chat_template,
        chat_template_kwargs,
        train_on,
        labels,
        long_records,
        bad_records,
        date,
    }
}

/// Reads the names of labels. A choice needs two, and each has a name of its own.
fn read_labels(section: &mut Section<'_>) -> Vec<String> {
    let Some(labels) = section.texts("labels") else { return Vec::new() };
    let names: BTreeSet<&String> = labels.iter().collect();
    if names.len() < labels.len().max(2) {
        section.report(
            "labels",
            "`labels` has fewer than two different names, or one name twice",
            "write each label once",
        );
    }
    labels
}

/// Reads the name of a chat template, or the path of a file with one.
fn read_chat_template(section: &mut Section<'_>) -> Option<String> {
    let text = section.text("chat_template")?;
    if let ChatTemplate::Named(name) = ChatTemplate::of(&text) {
        if ChatTemplate::NAMES.contains(&name.as_str()) {
            return Some(name);
        }
        section.unknown_word("chat_template", &name, ChatTemplate::NAMES);
        return None;
    }
    section.path("chat_template").map(|path| path.to_string_lossy().into_owned())
}

/// Reads the further variables of the chat template.
fn read_kwargs(section: &mut Section<'_>) -> BTreeMap<String, Json> {
    const EXPECTED: &str = "a table of values, such as { enable_thinking = false }";
    let kwargs = section.read("chat_template_kwargs", EXPECTED, |value| {
        value.as_table()?;
        json_of(value.to_toml())?.as_object().cloned()
    });
    kwargs.into_iter().flatten().collect()
}

/// Returns the value that chat templates read; `None` for a date or a number that is not finite.
pub fn json_of(value: toml::Value) -> Option<Json> {
    Some(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => serde_json::Number::from_f64(number)?.into(),
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(_) => return None,
        toml::Value::Array(items) => items.into_iter().map(json_of).collect::<Option<Vec<Json>>>()?.into(),
        toml::Value::Table(table) => {
            let pairs = table.into_iter().map(|(key, value)| Some((key, json_of(value)?)));
            Json::Object(pairs.collect::<Option<_>>()?)
        }
    })
}

/// Reads which tokens count in the loss, and what becomes of long records.
fn read_loss(section: &mut Section<'_>) -> (Option<TrainOn>, LongRecords) {
    let parts = TrainOn::ALL.map(|train_on| (train_on.key(), train_on));
    let train_on = section.given_word("train_on", &parts);
    let long = [("refuse", LongRecords::Refuse), ("cut", LongRecords::Cut), ("skip", LongRecords::Skip)];
    (train_on, section.given_word("long_records", &long).unwrap_or_default())
}

/// Reads the date that chat templates ask for.
fn read_date(section: &mut Section<'_>) -> Option<Date> {
    let text = section.text("date")?;
    let date = text.parse();
    if date.is_err() {
        section.out_of_range::<()>("date", &text, "a date such as \"2024-07-26\"");
    }
    date.ok()
}

/// Reads the names of the keys of records, as in `keys = { text = "content" }`.
fn read_keys(section: &mut Section<'_>) -> Option<RecordKeys> {
    const KEY: &str = "keys";
    const EXPECTED: &str = "a table of names, such as { text = \"content\" }";
    let names = section.read(KEY, EXPECTED, |value| {
        let names = value.as_table()?.entries.iter();
        names.map(|(key, entry)| Some((key.as_str(), entry.value.as_text()?))).collect::<Option<Vec<_>>>()
    })?;
    let mut keys = RecordKeys::default();
    for (key, name) in names {
        if name.is_empty() {
            section.empty::<()>(KEY);
        } else if !keys.rename(key, name) {
            let help = advice_for_unknown(key, &RecordKeys::KEYS);
            section.report(KEY, format!("unknown key `{key}` in data.keys"), help);
        }
    }
    Some(keys)
}

/// Returns the features that the data needs, each with the keys that say so. Data that may be ids may need no tokenizer.
fn needed_features(tokenizer: &str, files: &[&str]) -> Vec<(Feature, &'static [&'static str])> {
    let has_parquet = has_ending(files, &[".parquet"]);
    let is_text = tokenizer != BYTES && (has_parquet || !may_be_ids(files));
    let parquet = has_parquet.then_some((Feature::Parquet, &["path", "mix"][..]));
    parquet.into_iter().chain(is_text.then_some((Feature::Tokenizers, &["tokenizer"][..]))).collect()
}

/// Reports a feature that the build lacks, before all other problems.
fn report_first(section: &mut Section<'_>, keys: &[&str], feature: Feature) {
    let key = section.first_of(keys);
    let sentence = format!("the value of `{key}` needs {feature}, which this build does not read");
    section.report(key, sentence, feature.advice());
    section.problems.rotate_right(1);
}

/// Returns whether the data may be token ids, which need no tokenizer.
fn may_be_ids(path: &[&str]) -> bool {
    has_ending(path, &[".jsonl", ".ndjson", ".bin", ".pwtok"])
}

/// Returns whether a pattern of files has one of these endings, perhaps with the ending of a packing.
fn has_ending(path: &[&str], endings: &[&str]) -> bool {
    let unpacked = |pattern: &str| {
        let packed = [".gz", ".zst"].into_iter().find_map(|packing| pattern.strip_suffix(packing));
        packed.unwrap_or(pattern).to_owned()
    };
    let named = path.iter().filter(|pattern| !pattern.starts_with('!'));
    named.map(|pattern| unpacked(pattern)).any(|name| endings.iter().any(|ending| name.ends_with(ending)))
}

/// Returns the tokenizer in the folder of the model, if there is one. A tokenizer in a form that is not read
/// is a problem, except that data that may be ids is read first.
fn tokenizer_of(section: &mut Section<'_>, model: &ModelSettings, may_be_ids: bool) -> Option<String> {
    /// Other forms of a tokenizer.
    const OTHERS: [&str; 5] = ["tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt"];
    let ModelSettings::From { from, .. } = model else { return None };
    let gguf = locate(from);
    let folder = if from.is_file() { from.parent()? } else { from };
    let own = gguf.as_deref().unwrap_or(folder).join(hf::TOKENIZER);
    if files::exists(&own) {
        return Some(own.to_string_lossy().into_owned());
    }
    if let Some(file) = OTHERS.into_iter().find(|name| folder.join(name).exists()) {
        if may_be_ids {
            return Some(folder.join(file).to_string_lossy().into_owned());
        }
        let sentence = format!(
            "`tokenizer` is not written, and the tokenizer of {} is in a form that is not read ({file}): the text would be \
             trained as bytes",
            folder.display()
        );
        let help = "write a `tokenizer.json` (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers), or \
                    `tokenizer = \"bytes\"`";
        section.report("tokenizer", sentence, help);
    }
    None
}

/// Reads the files of the validation data, and its share of the data. `validation` may be the share too.
fn read_validation(section: &mut Section<'_>) -> (Vec<String>, Option<f64>) {
    let is_number = section.value("validation").is_some_and(|value| value.as_number().is_some());
    let share = section.given_number("validation_share");
    let (files, own_share) = if is_number {
        (None, Reader::number(section, "validation", Bound::Share))
    } else {
        (section.patterns("validation"), None)
    };
    if section.is_written("validation") && share.is_some() && section.is_sound() {
        section.report_twice("validation", "validation_share", "the validation data");
    }
    (files.unwrap_or_default(), share.or(own_share))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokenizer: &str, files: &[&str], expected: &[Feature]) {
        let found: Vec<Feature> =
            needed_features(tokenizer, files).iter().map(|(feature, _)| *feature).collect();
        assert_eq!(found, expected, "{tokenizer} {files:?}");
    }

    #[test]
    fn features_are_needed_for_the_files_that_they_read() {
        check(BYTES, &["a.txt"], &[]);
        check("t.json", &["a.txt"], &[Feature::Tokenizers]);
        check("t.json", &["a.pwtok"], &[]);
        check("t.json", &["a.jsonl.gz"], &[]);
        check(BYTES, &["a.txt", "b.parquet.zst"], &[Feature::Parquet]);
        check("t.json", &["a.parquet"], &[Feature::Parquet, Feature::Tokenizers]);
    }

    #[test]
    fn a_feature_that_is_missing_comes_first() {
        let text = "[data]\npath = \"a.parquet\"\nseq_len = 0\n[run]\nsteps = -1\n".to_owned();
        let mut document = Document::new(pipewright_document::Source { name: "a.toml".into(), text }, &[]);
        let surroundings = Surroundings { working_folder: "/work".into(), variable: |_| None };
        let mut section = Section::new(&mut document, &surroundings, "data");
        section.count("seq_len");
        report_first(&mut section, &["path", "mix"], Feature::Parquet);
        let problems: Vec<String> = document.problems.iter().map(ToString::to_string).collect();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("a.toml:2:8: the value of `path` needs Parquet"), "{problems:?}");
    }
}
