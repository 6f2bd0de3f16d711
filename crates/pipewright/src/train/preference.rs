//! Preference training: the log-probabilities of a reference, and the values that its losses report.
//!
//! The last stage's loss takes the log-probability of each sequence under the reference from a side input. They are
//! computed once, by evaluations in which the batch has the value [`REFERENCE_PASS`]: layers with an adapter then
//! compute without it, and the loss reports the log-probability of each sequence by its number.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::batch::SplitRule;
use crate::pipeline::{Pipeline, PipelineError};
use crate::train::token_batch::split;
use pipewright_data::TokenRows;

/// The value of a batch that asks for the log-probabilities of the reference.
pub const REFERENCE_PASS: &str = "reference_pass";
/// The name under which the loss then reports them, each as a part with the number of its sequence.
pub const REFERENCE: &str = "reference_log_probs";
/// The beginning of the names of the values that losses of preference training report, which are not losses.
pub const PREFERENCE: &str = "preference/";
/// The share of the sequences whose label the model predicts, which the loss of a model with labels reports.
pub const LABEL_ACCURACY: &str = "label_accuracy";
/// The share of the records whose completion is desirable, if only some are. The sums over chosen and over rejected
/// completions are then divided by the number of all records.
pub const SHARE_CHOSEN: &str = "share/chosen";

/// The log-probabilities of all sequences under a reference, by their numbers, which begin with 1. Sequences that are
/// in no row have 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReferenceLogProbs {
    /// The values of the training data.
    pub training: Vec<f32>,
    /// The values of the validation data; empty without it.
    pub validation: Vec<f32>,
}

/// Computes the log-probabilities of the sequences of all rows under the reference, in batches of `batch_rows` rows.
pub(super) fn log_probs_of(
    rows: &TokenRows,
    batch_rows: usize,
    pipeline: &mut Pipeline,
) -> Result<Vec<f32>, PipelineError> {
    let mut log_probs = vec![0.0; rows.sequences()];
    let (places, rule) = (rows.all_places(), SplitRule::equal(pipeline.eval_microbatches()));
    for start in (0..places.len()).step_by(batch_rows) {
        // The last batch has rows of the one before it too.
        let start = start.min(places.len().saturating_sub(batch_rows));
        let batch = rows.batch(&places[start..places.len().min(start + batch_rows)])?;
        let batch = split(batch, (&rule, pipeline.slices()), rows.ignores_targets(), None)?;
        let summary = pipeline.eval_losses(batch.summed().with_value(REFERENCE_PASS, true))?;
        if summary.interrupted {
            return Err(PipelineError::Interrupted);
        }
        for (number, log_prob) in summary.auxiliary_by_layer.get(REFERENCE).into_iter().flatten() {
            let place =
                number.parse::<usize>().ok().and_then(|number| log_probs.get_mut(number.checked_sub(1)?));
            place.into_iter().for_each(|place| *place = *log_prob as f32);
        }
    }
    Ok(log_probs)
}

/// Returns the values of preference training among the auxiliary losses of a step, by their names in metrics.
pub(super) fn preference_values(auxiliary: &BTreeMap<Arc<str>, f64>) -> BTreeMap<String, f64> {
    let named = auxiliary
        .iter()
        .filter_map(|(name, value)| Some((name.strip_prefix(PREFERENCE)?.to_owned(), *value)));
    let mut values: BTreeMap<String, f64> = named.collect();
    let Some(chosen) = values.remove(SHARE_CHOSEN) else { return values };
    for (side, share) in [("chosen", chosen), ("rejected", 1.0 - chosen)] {
        for key in ["rewards", "logps"].map(|kind| format!("{kind}/{side}")) {
            match values.remove(&key) {
                Some(sum) if share > 0.0 => drop(values.insert(key, sum / share)),
                _ => {}
            }
        }
    }
    if let (Some(chosen), Some(rejected)) = (values.get("rewards/chosen"), values.get("rewards/rejected")) {
        values.insert("rewards/margins".to_owned(), chosen - rejected);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_labels_become_means() {
        let of = |pairs: &[(&str, f64)]| {
            let named = pairs.iter().map(|(name, value)| (format!("{PREFERENCE}{name}").into(), *value));
            preference_values(&named.chain([("moe_z".into(), 1.0)]).collect())
        };
        let found = of(&[("rewards/chosen", 0.5), ("rewards/rejected", -0.75), (SHARE_CHOSEN, 0.25)]);
        let expected = [("rewards/chosen", 2.0), ("rewards/rejected", -1.0), ("rewards/margins", 3.0)];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value)).into());
        // A mean over nothing is left out.
        let found = of(&[("rewards/chosen", 0.5), ("rewards/rejected", 0.0), (SHARE_CHOSEN, 1.0)]);
        assert_eq!(found, [("rewards/chosen".to_owned(), 0.5)].into());
    }
}
