//! The number of steps of a run whose length is a number of passes over the data (`run.epochs`).
//!
//! Batches continue over the end of a pass: the first row of the next pass follows the last row of a pass in the
//! same batch. So the run takes as many steps as give every row `epochs` times, and the last one may begin a
//! further pass.

use pipewright::train::data::TokenRows;
use pipewright::train::steps_of_batches;
use pipewright_schedule::words::counted;

use crate::error::RunError;
use crate::settings::Settings;
use crate::settings::cross_checks::long_phase;

/// The largest number of rows that a run may take: numbers of rows up to here are exact as `f64`.
const MOST_ROWS: f64 = 9_007_199_254_740_992.0;

/// Sets the number of steps of the settings if they have a number of passes over the data, and returns a sentence about
/// it.
pub(crate) fn resolve(settings: &mut Settings, rows: &TokenRows) -> Result<Option<String>, RunError> {
    let Some(epochs) = settings.run.epochs else { return Ok(None) };
    if !rows.mixture().is_empty() {
        return Err(RunError::input(
            "`run.epochs` needs data that ends, and the sources of a mixture (`data.mix`) end at different times and begin \
             again: write `run.steps`",
        ));
    }
    let passes = epochs * rows.rows() as f64;
    if passes > MOST_ROWS {
        return Err(RunError::input(format!(
            "`run.epochs` is {epochs}, more than a run can take of {}: write a smaller number",
            counted(rows.rows(), "row")
        )));
    }
    // A product such as 0.1 * 30 may be a little above the whole number that is meant.
    let wanted = (passes * (1.0 - 1e-12)).ceil() as u64;
    let (run, batch) = (&mut settings.run, settings.pipeline.rows() as u64);
    run.steps = steps_of_batches(wanted.div_ceil(batch), run.accumulate, run.rampup_steps);
    run.epochs = None;
    let length = format!(
        "`run.epochs` is {epochs}, and an epoch has {}: the run has {} of {}",
        counted(rows.rows(), "row"),
        counted(run.steps, "step"),
        counted(batch * u64::from(run.accumulate.get()), "row")
    );
    match long_phase(settings) {
        Some((key, sentence)) => Err(RunError::input(format!(
            "{length}; {sentence}: lower `{key}` in [optimizer], or raise `epochs` in [run]"
        ))),
        None => Ok(Some(length)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_data::{DataModel, open_training};
    use crate::training::load::load_settings;

    /// Returns the outcome for rows of 4 tokens of a text that has so many.
    fn outcome(rows: usize, set: &[&str]) -> Result<(u64, Option<String>), String> {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let text = folder.path().join("a.txt");
        std::fs::write(&text, "a".repeat(4 * rows + 1)).expect("the scratch folder takes files");
        let mut texts: Vec<String> = set.iter().map(ToString::to_string).collect();
        texts.extend(
            ["data.seq_len=4", "pipeline.microbatches=4", "pipeline.microbatch_size=1"].map(str::to_owned),
        );
        if !set.iter().any(|text| text.starts_with("data.mix")) {
            texts.push(format!("data.path={text:?}"));
        }
        let texts: Vec<String> =
            texts.iter().map(|set| set.replace("TEXT", text.to_str().expect("UTF-8"))).collect();
        let mut settings = load_settings(None, &texts).map_err(|error| error.text())?.settings;
        let model = DataModel { vocab_size: 256, check_side: &|_| Ok(()) };
        let rows = open_training(&settings, model, 4).map_err(|error| error.text())?;
        let note = resolve(&mut settings, &rows).map_err(|error| error.text())?;
        assert_eq!(settings.run.epochs, None);
        Ok((settings.run.steps, note))
    }

    fn check(rows: usize, set: &[&str], expected: u64) {
        assert_eq!(outcome(rows, set).map(|(steps, _)| steps), Ok(expected), "{rows} {set:?}");
    }

    #[test]
    fn the_steps_give_every_row_so_often() {
        check(8, &["run.epochs=1"], 2);
        check(9, &["run.epochs=1"], 3);
        check(9, &["run.epochs=4"], 9);
        check(30, &["run.epochs=0.4"], 3);
        check(30, &["run.epochs=0.41"], 4);
        check(30, &["run.epochs=1e-9"], 1);
        // A step of three batches has 12 rows.
        check(30, &["run.epochs=2", "run.accumulate=3"], 5);
        // The first two steps have one and two batches.
        check(30, &["run.epochs=2", "run.accumulate=3", "run.rampup_steps=2"], 6);
        check(30, &["run.epochs=0.1", "run.accumulate=3", "run.rampup_steps=2"], 1);
    }

    #[test]
    fn the_length_is_said() {
        let (_, note) = outcome(9, &["run.epochs=2", "run.accumulate=2"]).expect("a length");
        let expected = "`run.epochs` is 2, and an epoch has 9 rows: the run has 3 steps of 8 rows";
        assert_eq!(note.as_deref(), Some(expected));
        assert_eq!(outcome(9, &["run.steps=7"]), Ok((7, None)));
    }

    #[test]
    fn a_length_that_does_not_fit_is_refused() {
        let refused = |set: &[&str], expected: &str| {
            let error = outcome(9, set).expect_err("it is refused");
            assert!(error.contains(expected), "{error}");
        };
        refused(
            &["run.epochs=1", "optimizer.warmup_steps=4"],
            "`warmup_steps` is 4, and the run has 3 steps",
        );
        refused(&["run.epochs=1e18"], "more than a run can take of 9 rows");
        refused(
            &["run.epochs=1", "data.mix=[{path=\"TEXT\",weight=1}]"],
            "`run.epochs` needs data that ends",
        );
    }
}
