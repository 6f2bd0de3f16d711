//! Checks the keys about validation data and evaluations against each other.

use crate::config::data::DataSettings;
use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::problem::ProblemKind;
use crate::config::run::RunSettings;
use crate::config::section::Section;

/// Refuses keys that have no effect, or would evaluate a model on inputs that it does not have in training.
pub(super) fn check(
    document: &mut Document,
    surroundings: &Surroundings,
    data: &DataSettings,
    run: &RunSettings,
) {
    if !document.problems.is_empty() {
        return;
    }
    let mut refuse = |section, key, other, advice| {
        let kind = ProblemKind::Without { key, other, advice };
        Section::new(document, surroundings, section).report(key, kind);
    };
    if run.eval_every > 0 && !data.has_validation() {
        let advice = "write `validation` or `validation_share` in [data], or `eval_every = 0`";
        refuse("run", "eval_every", "validation data", advice);
    }
    if run.eval_every == 0 {
        let advice = "write `eval_every` in [run], or remove the key";
        for (key, is_written) in [("patience", run.patience > 0), ("eval_batches", run.eval_batches > 0)] {
            if is_written {
                refuse("run", key, "evaluations (`eval_every` is 0)", advice);
            }
        }
    }
    let has_files = !data.validation.is_empty();
    if data.validation_side.is_some() && !has_files {
        let advice =
            "the rows that `validation_share` holds out have the side inputs of `side`: remove the key";
        refuse("data", "validation_side", "`validation`", advice);
    }
    if data.side.is_some() && has_files && data.validation_side.is_none() {
        let advice = "write `validation_side`, a file with side inputs for the rows of `validation`";
        refuse("data", "validation", "side inputs, which the training data has", advice);
    }
}
