//! Tests of validation data: its loss, the best checkpoint, and the early end of a run.

use std::fs;

use serde_json::Value;

use crate::run::Run;

/// Returns a member of each line of the metrics as text; empty where a line does not have it.
fn members(run: &Run, member: &str) -> Vec<String> {
    let text = |step: &Value| step.get(member).map(ToString::to_string).unwrap_or_default();
    run.steps().iter().map(text).collect()
}

/// Trains six steps in a folder of its own, and returns the loss and the validation loss of each.
fn losses(set: &[&str]) -> (Vec<String>, Vec<String>) {
    let run = Run::new();
    run.write("held.txt", "a slow green turtle walks under the fence and into the pond ".repeat(4));
    run.train(&[&["run.steps=6", "optimizer.schedule=constant"], set].concat());
    (members(&run, "loss"), members(&run, "validation_loss"))
}

/// Settings with which a step changes no parameter.
const FROZEN: [&str; 3] =
    ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "optimizer.warmup_steps=0"];

#[test]
fn the_validation_loss_has_the_same_bits_for_every_cut() {
    const SHARE: [&str; 2] = ["data.validation_share=0.25", "run.eval_every=2"];
    let expected = losses(&[&SHARE[..], &["pipeline.ranks=1"]].concat());
    let is_there: Vec<bool> = expected.1.iter().map(|loss| !loss.is_empty()).collect();
    assert_eq!(is_there, [false, true, false, true, false, true]);
    for set in [
        &["pipeline.ranks=2"][..],
        &["pipeline.ranks=4", "pipeline.schedule=gpipe"],
        &["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2"],
        &["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2"],
        &["pipeline.recompute=stage"],
    ] {
        assert_eq!(losses(&[&SHARE[..], set].concat()), expected, "{set:?}");
    }
    let losses_of = |mode: &str| losses(&[&SHARE[..], &["mesh.data_parallel=2", mode]].concat());
    let [whole, parts] = ["replicated", "sharded"].map(|mode| format!("mesh.data_parallel_mode={mode}"));
    assert_eq!(losses_of(&parts), losses_of(&whole));
}

#[test]
fn the_accuracy_and_the_perplexity_are_equal_for_every_cut() {
    let figures = |set: &[&str]| {
        let run = Run::new();
        run.train(&[&["run.steps=4", "data.validation_share=0.25", "run.eval_every=2"], set].concat());
        let steps = run.steps();
        let number = |step: &Value, member: &str| step[member].as_f64();
        let evaluated = steps.iter().filter(|step| step.get("validation_loss").is_some());
        let figures: Vec<[Option<f64>; 2]> = evaluated
            .map(|step| {
                let loss = number(step, "validation_loss").expect("a loss");
                let perplexity = number(step, "validation_perplexity").expect("a perplexity");
                assert!((perplexity - loss.exp()).abs() < 1e-9 * perplexity, "{perplexity} for {loss}");
                [Some(loss), number(step, "validation_accuracy")]
            })
            .collect();
        assert_eq!((figures.len(), steps[0].get("validation_accuracy")), (2, None));
        figures
    };
    let expected = figures(&["pipeline.ranks=1"]);
    assert!(
        expected.iter().all(|[_, share]| share.is_some_and(|share| 0.0 < share && share < 1.0)),
        "{expected:?}"
    );
    for set in [
        &["pipeline.ranks=2"][..],
        &["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2"],
        &["pipeline.schedule=seq1f1b", "pipeline.slices=2"],
        &["mesh.data_parallel=2"],
        &["mesh.tensor_parallel=2"],
    ] {
        let accuracies = figures(set).into_iter().map(|[_, share]| share).collect::<Vec<_>>();
        assert_eq!(accuracies, expected.iter().map(|[_, share]| *share).collect::<Vec<_>>(), "{set:?}");
    }
    let parts = figures(&["pipeline.head_parts=2"]);
    assert!(parts.iter().all(|[_, share]| share.is_none()), "no part has all logits of a token: {parts:?}");
}

#[test]
fn samples_are_the_greedy_text_and_change_no_loss() {
    const SHARE: [&str; 3] = ["run.steps=3", "data.validation_share=0.25", "run.eval_every=3"];
    let trained = |set: &[&str]| {
        let run = Run::new();
        run.train(&[&SHARE[..], set].concat());
        run
    };
    let prompts = ["run.sample_prompts=[\"the\", \"quick\"]", "run.sample_tokens=4"];
    let plain = trained(&[]);
    let run = trained(&prompts);
    let samples = members(&run, "samples");
    assert_eq!(samples[..2], ["", ""]);
    assert_eq!(
        (members(&run, "loss"), members(&run, "grad_norm")),
        (members(&plain, "loss"), members(&plain, "grad_norm"))
    );
    let cut = ["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2", "pipeline.ranks=2"];
    assert_eq!(members(&trained(&[&prompts[..], &cut].concat()), "samples"), samples);
    // The row has 8 tokens, and the second prompt has 5.
    for (index, prompt, tokens) in [(0, "the", "4"), (1, "quick", "3")] {
        let greedy =
            ["generate", "out", "--json", "--temperature", "0", "--prompt", prompt, "--tokens", tokens];
        let text: Value = serde_json::from_str(&run.print(&greedy)).expect("an object");
        let samples: Value = serde_json::from_str(&samples[2]).expect("a list");
        assert_eq!(
            (&samples[index]["prompt"], &samples[index]["text"]),
            (&prompt.into(), &text["texts"][0]["text"])
        );
    }
    // A text ends before the token that ends texts, here its first byte.
    let listed: Value = serde_json::from_str(&samples[2]).expect("a list");
    let first = listed[0]["text"].as_str().and_then(|text| text.bytes().next()).expect("a text");
    let ended =
        members(&trained(&[&prompts[..], &[&format!("model.eos_token_id={first}")]].concat()), "samples");
    let ended: Value = serde_json::from_str(&ended[2]).expect("a list");
    assert_eq!(ended[0]["text"], "");
    for (set, message) in [
        ("run.sample_prompts=longer than a row", "has 17 tokens: give from 1 to 7"),
        ("run.sample_prompts=caf\u{e9}", "token id 195 lies beyond the vocabulary"),
    ] {
        let set = ["data.validation_share=0.25", "run.eval_every=3", set];
        run.fail(2, &["check", "small.toml"], &set, &["`run.sample_prompts`: ", message]);
    }
}

#[test]
fn the_validation_loss_is_the_loss_of_training_on_that_data() {
    let evaluated = losses(
        &[&FROZEN[..], &["data.validation=held.txt", "run.eval_every=1", "run.eval_batches=3"]].concat(),
    );
    let trained = losses(&[&FROZEN[..], &["data.path=held.txt", "data.shuffle=false"]].concat()).0;
    let numbers = trained[..3].iter().map(|loss| loss.parse::<f64>().expect("a number"));
    let mean = numbers.sum::<f64>() / 3.0;
    assert_eq!(evaluated.1, vec![mean.to_string(); 6]);
}

#[test]
fn an_event_file_has_each_validation_loss() {
    let run = Run::new();
    run.train(&["run.steps=6", "data.validation_share=0.25", "run.eval_every=2", "run.tensorboard=true"]);
    let files = fs::read_dir(run.out()).expect("a folder").map(|entry| entry.expect("an entry").path());
    let events = files.filter(|path| path.display().to_string().contains("tfevents"));
    let events: Vec<Vec<u8>> = events.map(|path| fs::read(path).expect("a file")).collect();
    let name = b"validation/loss";
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].windows(name.len()).filter(|window| window == name).count(), 3);
}

#[test]
fn what_is_held_out_is_never_trained_on() {
    let run = Run::new();
    let text = run.read("text.txt");
    let cut = text.len() - (text.len() as f64 * 0.25).round() as usize;
    run.write("text.txt", &text[..cut]);
    run.train(&["run.steps=12"]);
    let expected = run.figures();
    run.write("text.txt", &text);
    run.train(&["run.steps=12", "data.validation_share=0.25", "run.eval_every=3"]);
    assert_eq!(run.figures(), expected);
}

#[test]
fn a_run_ends_early_and_keeps_its_best_checkpoint() {
    let run = Run::new();
    let set = ["data.validation_share=0.25", "run.eval_every=2", "run.patience=2", "run.keep_checkpoints=1"];
    let (_, said) = run.succeed(&["train", "small.toml"], &[&set[..], &FROZEN].concat());
    assert_eq!(run.figures().len(), 6, "the first evaluation is the best, and two more are not better");
    assert!(said.contains("ended early after step 6, saved in out/checkpoints/step-00000006"), "{said}");
    assert!(said.contains(" at best (step 2, checkpoints/best)"), "{said}");
    assert_eq!(run.checkpoints(), ["best", "step-00000002", "step-00000006"]);

    run.prints(&["inspect", "out/checkpoints/best"], &[], "step        2\n");
    run.print(&["export", "out/checkpoints/best", "exported"]);
    assert!(run.path("exported/model.safetensors").exists());

    let (_, said) = run.succeed(&["resume", "out"], &[]);
    assert!(said.contains("the run ended early, after step 6: 2 evaluations had found no lower"), "{said}");
    assert!(said.trim_end().ends_with("/out --set run.patience=0"), "{said}");
    run.resume(&["run.patience=3"]);
    assert_eq!(run.figures().len(), 8, "one more evaluation is not better");

    run.print(&["resume", "out/checkpoints/best", "--set", "run.steps=4", "--set", "run.patience=0"]);
    assert_eq!(run.figures().len(), 4);
    assert_eq!(run.checkpoints(), ["best", "step-00000002", "step-00000004"]);
}

#[test]
fn a_resumed_run_evaluates_as_an_undisturbed_one() {
    const SET: [&str; 4] =
        ["data.validation_share=0.25", "run.eval_every=2", "run.patience=9", "optimizer.schedule=constant"];
    let whole = Run::new();
    whole.train(&[&SET[..], &["run.steps=10"]].concat());
    let parts = Run::new();
    parts.train(&[&SET[..], &["run.steps=5", "pipeline.ranks=1"]].concat());
    parts.resume(&["run.steps=10", "pipeline.schedule=gpipe"]);
    assert_eq!(parts.figures(), whole.figures());
    assert_eq!(members(&parts, "validation_loss"), members(&whole, "validation_loss"));
    let best = |run: &Run| fs::read_link(run.path("out/checkpoints/best")).expect("a link");
    assert_eq!(best(&parts), best(&whole));
}

#[test]
fn going_back_before_the_best_checkpoint_forgets_it() {
    let run = Run::new();
    run.train(&["data.validation_share=0.25", "run.eval_every=2", "run.checkpoint_every=3", "run.steps=8"]);
    assert_eq!(
        fs::read_link(run.path("out/checkpoints/best")).expect("a link").to_str(),
        Some("step-00000008")
    );
    run.print(&["resume", "out/checkpoints/step-00000006", "--set", "run.steps=7"]);
    assert_eq!(
        fs::read_link(run.path("out/checkpoints/best")).expect("a link").to_str(),
        Some("step-00000006")
    );
}

#[test]
fn data_that_is_too_short_is_named() {
    let run = Run::new();
    run.write("short.txt", "a few words");
    let refuse = |set: &[&str], message: &str| run.refuse(&["check", "small.toml"], set, message);
    let few = "the validation data has 1 rows of seq_len 8, and a batch takes 4";
    refuse(&["data.validation=short.txt", "run.eval_every=1"], few);
    refuse(&["data.validation_share=0.05", "run.eval_every=1"], few);
    refuse(
        &["data.validation_share=0.95", "run.eval_every=1"],
        "the data has 1 rows of seq_len 8, and a step's batch",
    );
    refuse(&["data.validation=none.txt", "run.eval_every=1"], "none.txt: there is no such data file");
    refuse(
        &["data.validation_share=0.25", "run.eval_every=1", "run.eval_batches=3"],
        "an evaluation takes 3 batches of 4 rows, and the validation data has 2",
    );
    let set = ["data.validation_share=0.25", "run.eval_every=5", "run.patience=2"];
    let line = "evaluate  every 5 steps on 2 batches of 4 rows, from 8 rows of validation data, until 2 in a row find no \
                lower loss";
    run.prints(&["check", "small.toml"], &set, line);
}
