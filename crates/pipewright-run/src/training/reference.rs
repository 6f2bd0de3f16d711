//! The log-probabilities of the data of preference training under the reference, which the base of the adapters gives.
//!
//! They are computed once, before the first step, and written into the folder of the run. A resumed run reads them, and
//! another run may too. The file has a fingerprint of what they depend on: the weights of the base, the precision, and the
//! token ids and completions of the data, on which the tokenizer and the chat template have their effect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{read_regular_text, write_fresh};
use pipewright::pipeline::PipelineError;
use pipewright::train::{ReferenceLogProbs, Trainer};
use pipewright_schedule::error_text::with_causes as sentence;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{ErrorKind, RunError};
use crate::run_folder::{LARGEST, REFERENCE};
use crate::training::identity::describe;
use crate::training::launch::failure;
use crate::training::prepare::Prepared;
use crate::training::process_group::ProcessGroup;

/// The reference of a run.
pub(crate) struct Reference {
    fingerprint: BTreeMap<String, String>,
    /// The numbers of sequences of the training data and of the validation data.
    sequences: [usize; 2],
    /// The file that the settings name.
    given: Option<PathBuf>,
    /// The file in the folder of the run.
    own: PathBuf,
    /// Whether training changes modules of the base ([`LoraConfig::modules_to_save`]).
    ///
    /// [`LoraConfig::modules_to_save`]: pipewright_models::LoraConfig::modules_to_save
    changes_base: bool,
}

/// The content of a file.
#[derive(Serialize, Deserialize)]
struct ReferenceFile {
    fingerprint: BTreeMap<String, String>,
    log_probs: ReferenceLogProbs,
    /// The BLAKE3 hash of the bits of all log-probabilities.
    hash: String,
}

/// Checks the file with the log-probabilities that the settings name, if they name one. May read all data.
///
/// # Errors
/// When the file cannot be read, is damaged, or is of another run.
pub fn check_file(prepared: &Prepared) -> Result<(), RunError> {
    let preference = prepared.settings.preference.as_ref();
    let Some(given) = preference.and_then(|preference| preference.reference.as_ref()) else { return Ok(()) };
    if given.starts_with(&prepared.settings.run.out) {
        return Err(RunError::input(format!(
            "{}: `preference.reference` lies in the folder of the run (`run.out`), which a new run moves aside: copy the file to \
             another place, or write another folder as `out`",
            given.display()
        )));
    }
    let reference = Reference::of(prepared, &describe(prepared)?);
    reference.map_or(Ok(()), |reference| reference.read(given).map(drop))
}

impl Reference {
    /// Returns the reference of a run with this `description`; `None` if its loss needs none.
    pub(crate) fn of(prepared: &Prepared, description: &Map<String, Value>) -> Option<Self> {
        let preference = prepared.settings.preference.as_ref()?;
        if !preference.loss.needs_reference() {
            return None;
        }
        let text = |part: &str, key: &str| description.get(part).and_then(|part| part[key].as_str());
        let precision = format!("{:?}", prepared.settings.run.precision);
        let validation = prepared.validation_identity().map(|identity| identity.hash.as_str());
        let parts = [
            ("weights of the base", text("adapter", "base_weights")),
            ("data", text("data", "hash")),
            ("validation data", validation),
            ("precision", Some(precision.as_str())),
        ];
        let fingerprint =
            parts.into_iter().map(|(name, value)| (name.to_owned(), value.unwrap_or("none").to_owned()));
        let validation = prepared.validation.as_ref().map_or(0, |validation| validation.rows().sequences());
        Some(Self {
            fingerprint: fingerprint.collect(),
            sequences: [prepared.rows.sequences(), validation],
            given: preference.reference.clone(),
            own: prepared.settings.run.out.join(REFERENCE),
            changes_base: prepared
                .model
                .adapter()
                .is_some_and(|adapter| !adapter.lora.modules_to_save.is_empty()),
        })
    }

    /// Gives the trainer the log-probabilities: the ones of a file, or else computed ones, which the leader writes into the
    /// folder of the run. All processes call it.
    pub(crate) fn provide(
        &self,
        trainer: &mut Trainer,
        processes: &mut ProcessGroup,
    ) -> Result<(), RunError> {
        let stored = if processes.is_leader() { self.stored() } else { Ok(None) };
        let shared = processes.share_value(&stored.map_err(|error| error.text()))?;
        let log_probs = match shared.map_err(RunError::input)? {
            Some(log_probs) => log_probs,
            // The modules of the base that are trained are not the reference's any more.
            None if self.changes_base && trainer.steps_done() > 0 => {
                return Err(RunError::input(format!(
                    "{}: the log-probabilities of the reference are missing, and cannot be computed after the first step, because \
                     `adapter.modules_to_save` has changed the base: put the file back, or start a new run",
                    self.own.display()
                )));
            }
            None => {
                processes.note("reference: the base computes the log-probabilities of all sequences");
                let computed = trainer.compute_reference().map_err(|error| match error {
                    PipelineError::Interrupted => RunError::new(
                        ErrorKind::Interrupted,
                        "the end of the run was requested before its first step, and nothing is saved",
                    ),
                    error => failure(&error),
                })?;
                if processes.is_leader() {
                    self.write(&computed)?;
                }
                computed
            }
        };
        trainer.set_reference(log_probs);
        Ok(())
    }

    fn stored(&self) -> Result<Option<ReferenceLogProbs>, RunError> {
        match &self.given {
            Some(given) => self.read(given).map(Some),
            None if self.own.exists() => self.read(&self.own).map(Some),
            None => Ok(None),
        }
    }

    fn read(&self, path: &Path) -> Result<ReferenceLogProbs, RunError> {
        let advice = if path == self.own && self.changes_base {
            "put the file of this run back, or start a new run, because `adapter.modules_to_save` changes the base"
        } else if path == self.own {
            "remove the file, and the run computes them again"
        } else {
            "name the file of a run with this model and data, or remove `preference.reference`"
        };
        let refused = |problem: String| {
            RunError::input(format!(
                "{}: the log-probabilities of the reference {problem}: {advice}",
                path.display()
            ))
        };
        let text = read_regular_text(path, LARGEST)
            .map_err(|error| refused(format!("cannot be read ({})", sentence(&error))))?;
        let file: ReferenceFile = serde_json::from_str(&text)
            .map_err(|error| refused(format!("are damaged ({})", sentence(&error))))?;
        let differing = |name: &&String| file.fingerprint.get(*name) != self.fingerprint.get(*name);
        let names: Vec<&str> = self.fingerprint.keys().filter(differing).map(String::as_str).collect();
        if !names.is_empty() {
            return Err(refused(format!("are of another run, which differs in: {}", names.join(", "))));
        }
        let ReferenceLogProbs { training, validation } = &file.log_probs;
        if [training.len(), validation.len()] != self.sequences || file.hash != hash_of(&file.log_probs) {
            return Err(refused("are damaged (numbers are missing or were changed)".to_owned()));
        }
        Ok(file.log_probs)
    }

    fn write(&self, log_probs: &ReferenceLogProbs) -> Result<(), RunError> {
        let file = ReferenceFile {
            fingerprint: self.fingerprint.clone(),
            log_probs: log_probs.clone(),
            hash: hash_of(log_probs),
        };
        let draft = self.own.with_extension("json.draft");
        let text = serde_json::to_string(&file).unwrap_or_default();
        let written = write_fresh(&draft, text.as_bytes()).and_then(|()| std::fs::rename(&draft, &self.own));
        written.map_err(|error| {
            RunError::input(format!(
                "{}: the file cannot be written: {}",
                self.own.display(),
                sentence(&error)
            ))
        })
    }
}

fn hash_of(log_probs: &ReferenceLogProbs) -> String {
    let mut hasher = blake3::Hasher::new();
    for values in [&log_probs.training, &log_probs.validation] {
        hasher.update(&(values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| {
            hasher.update(&value.to_bits().to_le_bytes());
        });
    }
    hasher.finalize().to_hex().to_string()
}
