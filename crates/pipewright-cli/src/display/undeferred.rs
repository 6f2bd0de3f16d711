//! The note on parameters whose gradients cannot wait for `W`, under a schedule that lets gradients wait.

use pipewright::pipeline::UndeferredParameter;
use pipewright_run::observer::Overview;
use pipewright_schedule::words::counted;

use crate::display::figures::percent;

/// Returns the note; `None` if all gradients can wait, or the schedule lets none wait.
pub(super) fn note(overview: &Overview, found: &[UndeferredParameter]) -> Option<String> {
    if !overview.defers_weights {
        return None;
    }
    // The first one of the largest.
    let largest = found.iter().rev().max_by_key(|parameter| parameter.elements)?;
    let elements: usize = found.iter().map(|parameter| parameter.elements).sum();
    let share = elements as f64 / overview.parameters.max(1) as f64;
    Some(format!(
        "note: `I` computes the gradients of {} ({} of the model), which their layers cannot leave to `W`; the largest is {}",
        counted(found.len(), "parameter"),
        percent(share),
        largest.path,
    ))
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::StageIndex;

    use super::*;

    fn check(defers_weights: bool, found: &[(&str, usize)], expected: Option<&str>) {
        let overview = Overview { parameters: 2000, defers_weights, ..Overview::default() };
        let found: Vec<_> = found
            .iter()
            .map(|&(path, elements)| UndeferredParameter {
                stage: StageIndex::new(0),
                path: path.into(),
                elements,
            })
            .collect();
        assert_eq!(note(&overview, &found).as_deref(), expected);
    }

    #[test]
    fn the_note_counts_parameters_and_names_the_largest() {
        let found = [("a.norm", 8), ("b.matrix", 64), ("c.matrix", 64)];
        let text = "note: `I` computes the gradients of 3 parameters (6.8% of the model), which their layers cannot leave \
                    to `W`; the largest is b.matrix";
        check(true, &found, Some(text));
        check(false, &found, None);
        check(true, &[], None);
    }
}
