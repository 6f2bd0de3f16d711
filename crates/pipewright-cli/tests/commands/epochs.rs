//! Tests of runs whose length is a number of passes over the data.

use crate::run::Run;

#[test]
fn epochs_are_steps_and_have_their_bits() {
    const CONSTANT: &str = "optimizer.schedule=constant";
    let run = Run::new();
    let data = run.json(&["check", "small.toml"], &[])["data"].clone();
    let number = |key: &str| data[key].as_u64().expect("a number");
    let steps = |epochs: f64| (epochs * number("rows") as f64 / number("rows_per_step") as f64).ceil() as u64;
    let (half, whole) = (steps(0.5), steps(1.0));
    assert!(0 < half && half < whole, "{half} {whole}");
    let checked = run.json(&["check", "small.toml"], &["run.epochs=0.5"]);
    assert_eq!(checked["run"]["steps"], half);
    let said =
        format!("`run.epochs` is 0.5, and an epoch has {} rows: the run has {half} step", number("rows"));
    run.says(&["check", "small.toml"], &["run.epochs=0.5"], &said);
    run.says(&["train", "small.toml"], &["run.epochs=0.5", CONSTANT], &said);
    assert_eq!(run.figures().len() as u64, half);
    run.succeed(&["resume", "out"], &["run.epochs=1"]);

    let of_steps = Run::new();
    of_steps.train(&[&format!("run.steps={whole}"), CONSTANT]);
    assert_eq!(run.figures(), of_steps.figures());
    // The stored length is the number of steps, so a later change of it counts.
    let more = format!("run.steps={}", whole + 1);
    run.succeed(&["resume", "out"], &[&more]);
    assert_eq!(run.figures().len() as u64, whole + 1);
}

#[test]
fn a_schedule_of_the_rate_has_the_length_of_the_epochs() {
    let [epochs, steps] = [Run::new(), Run::new()];
    epochs.train(&["run.epochs=0.5"]);
    let length = format!("run.steps={}", epochs.figures().len());
    steps.train(&[&length]);
    assert_eq!(epochs.figures(), steps.figures());
}

#[test]
fn epochs_that_do_not_fit_are_refused() {
    let run = Run::new();
    run.refuse_settings(&["run.epochs=1", "run.steps=3"], "`epochs` and `steps` both choose the length");
    run.refuse_settings(&["run.epochs=0"], "`epochs` is 0");
    run.refuse_settings(
        &["run.epochs=0.01", "optimizer.warmup_steps=9"],
        "`warmup_steps` is 9, and the run has 1 step",
    );
    let mix = "data.mix=[{ path = \"text.txt\", weight = 1 }]";
    run.refuse_settings(&["run.epochs=1", mix], "`run.epochs` needs data that ends");
}
