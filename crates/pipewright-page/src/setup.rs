//! Reads what the reader has chosen: a schedule, its size and settings, and the costs of a rank.
//!
//! A setup is a list of texts by the keys of [`FIELDS`](crate::fields::FIELDS), as a link has them. Costs are for all
//! layers of a rank, as in `pipewright compare`: a stage has its part of them. So the model stays the same if the
//! schedule or the number of stages changes.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use pipewright_schedule::bytes::{bytes_text, parse_bytes};
use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::generate::{Generator, Limits, PerStage, Setting, check, find, most_cells};
use pipewright_schedule::simulate::UNIT;
use pipewright_schedule::{Costs, ScheduleSpec, Slices};

use crate::fields::FIELDS;

/// The most cells of a schedule on the page. A larger one would take seconds, also to draw.
const MOST_CELLS: u64 = 50_000;

/// The most bytes of an activation. The sum of all activations does not overflow.
const MOST_BYTES: u64 = 1 << 42;

/// The texts of the controls, and the name as `schedule`.
pub(crate) type Texts = BTreeMap<String, String>;

/// A schedule with its size, its settings and its costs.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) generator: &'static Generator,
    pub(crate) spec: ScheduleSpec,
    /// The costs of each stage.
    pub(crate) costs: Costs,
}

impl Setup {
    /// Reads a setup. Texts of controls that the schedule does not have are ignored, because the page hides these
    /// controls.
    ///
    /// # Errors
    /// A sentence for the reader, if a text is wrong or the schedule does not have this size.
    pub(crate) fn read(texts: &Texts) -> Result<Self, String> {
        let generator = find(texts.get("schedule").map_or("1f1b", String::as_str)).map_err(sentence)?;
        let texts = Shown { texts, generator };
        let mut spec = ScheduleSpec {
            ranks: texts.needed("ranks")?,
            microbatches: texts.needed("microbatches")?,
            stages_per_rank: texts.number("stages_per_rank")?,
            group_size: texts.number("group_size")?,
            memory_limit: texts.limits()?,
            slices: texts
                .number("slices")?
                .map(|number| Slices::new(number).ok_or("slices: use at least 1"))
                .transpose()?,
            wide_warmup: texts.is_set("wide_warmup"),
            overlap: texts.is_set("overlap"),
            costs: None,
        };
        let stages_per_rank = check(generator.name, &spec, Limits::default()).map_err(sentence)?;
        let cells = most_cells(generator.name, &spec).map_err(sentence)?;
        if cells > MOST_CELLS {
            return Err(format!(
                "a schedule with up to {cells} cells is too large for this page, which shows up to {MOST_CELLS}; use fewer \
                 microbatches, ranks or stages, or the command line"
            ));
        }
        let mut costs = Costs::from_str(&texts.costs()).map_err(sentence)?.shared(stages_per_rank);
        if generator.settings.contains(&Setting::Costs) {
            spec.costs = Some(costs.clone());
        }
        costs.sizes = texts.sizes(stages_per_rank)?;
        Ok(Self { generator, spec, costs })
    }
}

/// The texts of the controls that a schedule has.
struct Shown<'a> {
    texts: &'a Texts,
    generator: &'static Generator,
}

impl<'a> Shown<'a> {
    /// Returns the text of a control; an empty one if the schedule does not have it.
    fn text(&self, key: &str) -> &'a str {
        let Some(field) = FIELDS.iter().find(|field| field.key == key) else { return "" };
        let text = self.texts.get(key).map_or("", |text| text.trim());
        match (field.is_of(self.generator), text) {
            (false, _) => "",
            (true, "") => field.usual,
            (true, text) => text,
        }
    }

    fn is_set(&self, key: &str) -> bool {
        !self.text(key).is_empty()
    }

    fn number(&self, key: &str) -> Result<Option<u32>, String> {
        Some(self.text(key)).filter(|text| !text.is_empty()).map(|text| read(key, text)).transpose()
    }

    fn needed(&self, key: &str) -> Result<u32, String> {
        read(key, self.text(key))
    }

    fn limits(&self) -> Result<Option<PerStage<u32>>, String> {
        let limits = entries(self.text("memory_limit")).map(|entry| read("memory_limit", entry));
        let limits = limits.collect::<Result<Vec<u32>, String>>()?;
        Ok(match limits.as_slice() {
            [] => None,
            &[limit] => Some(PerStage::Same(limit)),
            _ => Some(PerStage::Each(limits)),
        })
    }

    /// Returns the costs in the form of `--cost`.
    fn costs(&self) -> String {
        let given = FIELDS.iter().filter(|field| field.is_cost && field.key != "activation");
        let given =
            given.map(|field| (field.key, entries(self.text(field.key)).collect::<Vec<_>>().join(":")));
        let given = given.filter(|(_, text)| !text.is_empty()).map(|(key, text)| format!("{key}={text}"));
        given.collect::<Vec<_>>().join(",")
    }

    /// Returns the bytes of activations. One size is for all layers of a rank.
    fn sizes(&self, stages_per_rank: u32) -> Result<Vec<StageSizes>, String> {
        let given =
            self.text("activation").split([',', ':']).map(str::trim).filter(|entry| !entry.is_empty());
        let bytes = given.map(|entry| {
            let bytes = parse_bytes(entry).map_err(|error| format!("memory: `{}`: {error}", short(entry)))?;
            if bytes > MOST_BYTES {
                return Err(format!("memory: use at most {} for an activation", bytes_text(MOST_BYTES)));
            }
            Ok(bytes)
        });
        let bytes = bytes.collect::<Result<Vec<u64>, String>>()?;
        let parts = if bytes.len() == 1 { u64::from(stages_per_rank) } else { 1 };
        // As counted activations: what a backward keeps for the gradients of the weights is as large.
        let sizes = |bytes: u64| StageSizes { activation: bytes / parts, stash: bytes / parts, ..UNIT };
        Ok(bytes.into_iter().map(sizes).collect())
    }
}

/// Returns the entries of a list, which may have commas, colons or blanks between them.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ':', ' ']).filter(|entry| !entry.is_empty())
}

fn read<T: FromStr>(key: &str, text: &str) -> Result<T, String> {
    let name = key.replace('_', " ");
    text.parse().map_err(|_not_a_number| {
        format!("{name}: `{}` is not a whole number; write one such as 4", short(text))
    })
}

/// Returns the start of a text, for a sentence about it.
fn short(text: &str) -> String {
    text.chars().take(64).collect()
}

fn sentence(error: impl Display) -> String {
    error.to_string()
}
