//! Tests of `resume`, `inspect` and `export` with runs that were interrupted, killed or damaged.
//!
//! `PIPEWRIGHT_KILLS` sets how often the long tests kill a run. The default is 6. Some tests use half or
//! twice that number.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;

use crate::run::{self, Figures, Run, assert_near, seeded};

/// Returns the number of kills in a test with many kills.
fn kills(default: u32) -> u32 {
    std::env::var("PIPEWRIGHT_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(default)
}

/// Returns the output of `inspect` for the newest checkpoint.
fn inspected(run: &Run) -> serde_json::Value {
    run.json(&["inspect", "out"], &[])
}

/// Returns all parameters and the optimizer state of the newest checkpoint, for any distribution over shards.
/// An exported model or later losses would not show the optimizer state.
fn final_state(run: &Run) -> Vec<(String, Vec<u8>)> {
    let newest = inspected(run)["checkpoint"].as_str().expect("a path").to_owned();
    run::tensors(&run.path(&newest))
}

const CUTS: &[&[&str]] = &[
    &["pipeline.ranks=2", "pipeline.schedule=1f1b"],
    &["pipeline.ranks=1", "pipeline.schedule=gpipe"],
    &["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved1f1b"],
    &["pipeline.ranks=4", "pipeline.stages_per_rank=1", "pipeline.schedule=1f1b"],
    &["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.schedule=zbvzerobubble"],
    &["pipeline.ranks=4", "pipeline.stages_per_rank=1", "pipeline.schedule=gpipe"],
];

/// Trains 40 steps with kills at random moments. After each kill the run resumes with
/// `changes(number of the kill)`. The result is compared with an undisturbed run. The last kill may happen
/// after the run has saved its last step. In that case the next resume finds the run finished, and its state
/// is in the shards of the last changes.
fn check_kills(kills: u32, set: &[&str], changes: impl Fn(u32) -> Vec<&'static str>) {
    let whole = Run::new();
    let started = std::time::Instant::now();
    let set = &[set, &["run.checkpoint_every=3"]].concat();
    whole.train(set);
    let longest = started.elapsed();
    let (expected, state) = (whole.figures(), final_state(&whole));
    assert_eq!(expected.len(), 40);

    let (seed, mut random) = seeded();
    let killed = Run::new();
    let mut under_way = 0;
    // How many kills meet a run between its steps depends on the machine and its load, so the kills continue
    // until enough of them did.
    for kill in 0.. {
        let mut child = if killed.has_config() {
            killed.start("resume", &["out"], &changes(kill))
        } else {
            killed.start("train", &["small.toml"], set)
        };
        // Early kills are as likely as late kills, and most kills must come before the run is finished.
        let moment = longest.mul_f64(0.6 * random());
        std::thread::sleep(moment);
        child.kill().and_then(|()| child.wait()).expect("the run is ours to kill");
        let steps = killed.figures().len();
        under_way += u32::from(steps > 0 && steps < 40);
        if kill + 1 >= kills && under_way * 3 >= kills {
            break;
        }
        assert!(kill < 10 * kills, "only {under_way} kills met a run between its steps, seed {seed}");
        if steps == 40 {
            // A finished run is compared and deleted, so that each later kill happens during a run.
            assert_eq!(figures_after_resume(&killed, set), expected, "seed {seed}");
            fs::remove_dir_all(killed.out()).expect("a folder");
        }
    }
    assert_eq!(figures_after_resume(&killed, set), expected, "seed {seed}");
    assert_eq!(final_state(&killed), state, "seed {seed}");
}

fn figures_after_resume(run: &Run, set: &[&str]) -> Vec<Figures> {
    if run.has_config() {
        run.resume(&[]);
    } else {
        run.train(set);
    }
    run.figures()
}

#[test]
fn a_run_that_is_killed_at_random_ends_as_if_undisturbed() {
    check_kills(kills(6), &[], |_| Vec::new());
}

#[test]
fn a_run_that_is_killed_and_cut_anew_ends_as_if_undisturbed() {
    check_kills(kills(6), &[], |kill| CUTS[kill as usize % CUTS.len()].to_vec());
}

#[test]
fn delayed_weights_that_are_killed_end_as_if_undisturbed() {
    check_kills(kills(6) / 2, &["optimizer.delay=1"], |kill| CUTS[kill as usize % CUTS.len()].to_vec());
    check_kills(kills(6) / 3, &["optimizer.delay=1", "mesh.tensor_parallel=2"], |kill| {
        vec![["pipeline.ranks=4", "pipeline.ranks=2"][kill as usize % 2]]
    });
}

#[test]
fn replicas_that_are_killed_and_hold_wholes_or_parts_in_turn_end_as_if_undisturbed() {
    const PARTS: &[&str] = &["mesh.data_parallel_mode=sharded", "mesh.unshard_window=1"];
    const WHOLES: &[&str] = &["mesh.data_parallel_mode=replicated", "pipeline.ranks=1"];
    check_kills(kills(6) / 2, &["mesh.data_parallel=2"], |kill| {
        if kill % 2 == 0 { PARTS.to_vec() } else { WHOLES.to_vec() }
    });
}

#[test]
fn a_run_of_tensor_ranks_resumes_under_any_mesh() {
    // The learning rate must not depend on the number of steps.
    const SETTINGS: [&str; 2] = ["model.num_attention_heads=4", "optimizer.schedule=constant"];
    let whole = Run::new();
    whole.train(&[&SETTINGS[..], &["run.steps=8"]].concat());
    for mesh in [
        ["pipeline.ranks=1", "mesh.data_parallel=2", "mesh.tensor_parallel=1"],
        ["pipeline.ranks=4", "mesh.data_parallel=1", "mesh.tensor_parallel=1"],
        ["pipeline.ranks=1", "mesh.data_parallel=1", "mesh.tensor_parallel=4"],
    ] {
        let run = Run::new();
        run.train(&[&SETTINGS[..], &["run.steps=4", "mesh.tensor_parallel=2"]].concat());
        run.resume(&[&mesh[..], &["run.steps=8"]].concat());
        assert_near(&run.losses(), &whole.losses(), 2e-5, &format!("{mesh:?}"));
        assert_eq!(inspected(&run)["step"].as_u64(), Some(8));
    }
}

#[test]
fn a_kill_while_saving_loses_nothing() {
    let run = Run::new();
    let (seed, mut random) = seeded();
    // The run has too many steps to finish and saves a checkpoint after each, so that kills often happen
    // while saving.
    run.train(&["run.checkpoint_every=1", "run.steps=2"]);
    let (mut newest, mut half_written, mut kill) = (2, 0, 0);
    // How many kills meet a checkpoint half-written depends on the machine and its load, so the test
    // continues until enough of them did.
    let wanted = kills(6) / 2;
    while half_written < wanted {
        kill += 1;
        assert!(kill <= 40 * wanted, "only {half_written} kills met a checkpoint half-written, seed {seed}");
        let mut child = run.start("resume", &["out"], &["run.steps=1000000"]);
        run.wait_for_step(newest + 1);
        // A busy machine delays the thread that saves, so the range of the moments grows until the kills meet
        // it.
        let range = 60.0 * (1.0 + f64::from(kill) / 8.0);
        std::thread::sleep(Duration::from_millis((range * random()) as u64));
        child.kill().and_then(|()| child.wait()).expect("the run is ours to kill");
        half_written += u32::from(run.checkpoints()[0].starts_with(".saving-"));
        let found = inspected(&run)["step"].as_u64().expect("a step");
        assert!(found >= newest, "kill {kill} of seed {seed}: step {found} after {newest}");
        newest = found;
    }
}

#[test]
fn a_signal_ends_the_run_after_its_step_with_a_checkpoint() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        if signal == Signal::HUP && run::ignores_hangup() {
            continue;
        }
        let run = Run::new();
        let endless = ["run.steps=1000000", "optimizer.schedule=constant"];
        let mut child = run.start("train", &["small.toml"], &endless);
        run.wait_for_step(2);
        run::signal(&child, signal);
        assert_eq!(child.wait().expect("it ends").code(), Some(5), "{signal:?}");
        let steps = run.figures().len() as u64;
        assert_eq!(inspected(&run)["step"].as_u64(), Some(steps), "the last step's state is saved");
        run.resume(&[&format!("run.steps={}", steps + 2)]);
        let whole = Run::new();
        whole.train(&[&format!("run.steps={}", steps + 2), endless[1]]);
        assert_eq!(run.figures(), whole.figures());
    }
}

#[test]
#[cfg(unix)]
fn a_closed_terminal_ends_a_run_once_and_nohup_never() {
    const ENDLESS: [&str; 2] = ["run.steps=1000000", "optimizer.schedule=constant"];
    if run::ignores_hangup() {
        return;
    }
    let twice = Run::new();
    let mut child = twice.start_saying("train", &["small.toml"], &ENDLESS);
    twice.wait_for_step(2);
    // A shell passes the signal on, and the system sends it as well.
    run::signal(&child, Signal::HUP);
    twice.wait_until(|| twice.said().contains("SIGHUP has arrived"));
    run::signal(&child, Signal::HUP);
    assert_eq!(child.wait().expect("it ends").code(), Some(5));
    let ignored = Run::new();
    let mut child = ignored.start_without_hangup("train", &["small.toml"], &ENDLESS);
    ignored.wait_for_step(2);
    run::signal(&child, Signal::HUP);
    ignored.wait_for_step(ignored.figures().len() as u64 + 3);
    run::signal(&child, Signal::TERM);
    assert_eq!(child.wait().expect("it ends").code(), Some(5));
}

#[test]
fn a_second_signal_ends_the_run_at_once() {
    let run = Run::new();
    // Each step takes many seconds, and the first signal waits for the end of the step.
    run.write("text.txt", "to be or not to be ".repeat(20_000));
    let long = ["data.seq_len=64", "pipeline.microbatches=5000"];
    let mut child = run.start_saying("train", &["small.toml"], &long);
    // The run watches for signals before it says on which device it trains.
    run.wait_until(|| run.said().contains("  device "));
    run::signal(&child, Signal::INT);
    run.wait_until(|| run.said().contains("SIGINT has arrived"));
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().expect("it is ours").is_none(), "the first signal waits for the step");
    run::signal(&child, Signal::INT);
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

#[test]
fn the_newest_checkpoints_are_kept() {
    let run = Run::new();
    run.train(&["run.checkpoint_every=4", "run.keep_checkpoints=2", "run.steps=10"]);
    assert_eq!(run.checkpoints(), ["step-00000008", "step-00000010"], "the last step has one too");
}

/// Runs a command that succeeds. Returns its standard error.
fn said(run: &Run, arguments: &[&str]) -> String {
    run.succeed(arguments, &[]).1
}

#[test]
fn time_tokens_and_epochs_go_on_where_the_checkpoint_was_taken() {
    let run = Run::new();
    run.train(&["run.checkpoint_every=3", "run.steps=5"]);
    let figures = || {
        let figure = |step: &serde_json::Value| {
            let number = |key: &str| step[key].as_f64().expect("a number");
            (number("elapsed_s"), step["tokens"].as_u64(), number("epoch"))
        };
        run.steps().iter().map(figure).collect::<Vec<_>>()
    };
    let before = figures();
    // The time between the two runs does not count.
    std::thread::sleep(Duration::from_millis(1500));
    let resumed = std::time::Instant::now();
    run.resume(&["run.steps=8"]);
    let longest = before[4].0 + resumed.elapsed().as_secs_f64();
    let after = figures();
    assert_eq!(after.len(), 8);
    assert!(after.windows(2).all(|pair| pair[0].0 < pair[1].0), "{after:?}");
    assert!(after[7].0 < longest && after[5].0 > before[4].0, "{after:?} after {before:?}");
    // A step uses 4 of the 32 rows, with 8 tokens each.
    for (step, (_, tokens, epoch)) in (1..).zip(&after) {
        assert_eq!(*tokens, Some(32 * step));
        assert!((epoch - 4.0 * step as f64 / 32.0).abs() < 1e-9, "{epoch} after step {step}");
    }
}

#[test]
fn a_run_made_with_defaults_leaves_a_model_and_knows_that_it_is_finished() {
    let run = Run::new();
    run.train(&["run.steps=4", "optimizer.schedule=constant"]);
    assert_eq!(run.checkpoints(), ["step-00000004"]);
    assert_eq!(inspected(&run)["step"], 4);
    said(&run, &["export", "out", "model"]);
    assert!(run.path("model/model.safetensors").exists());

    let before = fs::read(run.path("out/metrics.jsonl")).expect("metrics");
    for path in ["out", "out/checkpoints", "out/checkpoints/step-00000004"] {
        let words = said(&run, &["resume", path]);
        assert!(words.contains("the run is finished: all 4 steps are taken"), "{words}");
        assert!(words.contains("out --set run.steps=8"), "{words}");
    }
    assert_eq!(fs::read(run.path("out/metrics.jsonl")).expect("metrics"), before);
    run.resume(&["run.steps=6"]);
    let whole = Run::new();
    whole.train(&["run.steps=6", "optimizer.schedule=constant"]);
    assert_eq!(run.figures(), whole.figures());
    assert_eq!(final_state(&run), final_state(&whole));
}

#[test]
fn an_earlier_checkpoint_is_gone_on_from_and_what_came_later_is_kept() {
    let run = Run::new();
    run.train(&["run.steps=6", "run.checkpoint_every=2"]);
    let (expected, state) = (run.figures(), final_state(&run));
    let words = said(&run, &["resume", "out/checkpoints/step-00000002", "--set", "pipeline.ranks=1"]);
    assert!(words.contains("resuming from step 2"), "{words}");
    assert!(
        words.contains("moved the metrics of steps after 2 to ") && words.contains("metrics.1.jsonl"),
        "{words}"
    );
    assert!(words.contains("moved 2 checkpoints of steps after 2 to "), "{words}");
    assert_eq!(run.figures(), expected);
    assert_eq!(final_state(&run), state);
    assert_eq!(run.read("out/metrics.1.jsonl").lines().count(), 4);
    for step in ["step-00000004", "step-00000006"] {
        run.print(&["inspect", &format!("out/checkpoints.1/{step}")]);
    }
}

#[test]
fn sharded_replicas_store_the_tensors_of_whole_ones() {
    let state = |mode: &str| {
        let run = Run::new();
        run.train(&["run.steps=2", "mesh.data_parallel=2", &format!("mesh.data_parallel_mode={mode}")]);
        final_state(&run)
    };
    assert_eq!(state("sharded"), state("replicated"));
}

#[test]
fn groups_of_replicas_store_what_any_mesh_goes_on_with() {
    // The learning rate must not depend on the number of steps.
    const SETTINGS: [&str; 2] = ["optimizer.schedule=constant", "pipeline.microbatches=8"];
    let run = |mesh: &[&str], steps: &str| {
        let run = Run::new();
        run.train(&[&SETTINGS[..], mesh, &[steps]].concat());
        run
    };
    let whole = run(&["mesh.data_parallel=4"], "run.steps=4");
    let in_groups = run(&["mesh.data_parallel=[2, 2]"], "run.steps=2");
    assert_eq!(final_state(&in_groups), final_state(&run(&["mesh.data_parallel=4"], "run.steps=2")));
    // The parts of the replicas do not change a bit, so the run ends as if it had never changed.
    in_groups.resume(&["run.steps=3", "mesh.data_parallel=4", "pipeline.ranks=1"]);
    in_groups.resume(&["run.steps=4", "mesh.data_parallel=[2, 2]", "pipeline.ranks=2"]);
    assert_eq!(in_groups.figures(), whole.figures());
    assert_eq!(final_state(&in_groups), final_state(&whole));
    // To one pipeline and back, whose gradients are added in another order.
    in_groups.resume(&["run.steps=5", "mesh.data_parallel=1", "mesh.data_parallel_mode=replicated"]);
    in_groups.resume(&["run.steps=6", "mesh.data_parallel=[2, 2]", "mesh.data_parallel_mode=sharded"]);
    assert_eq!(in_groups.figures().len(), 6);
}

#[test]
fn a_schedule_that_needs_more_stages_says_which_setting_is_missing() {
    let run = Run::new();
    run.train(&["run.steps=2"]);
    let set = ["run.steps=4", "pipeline.schedule=zbv"];
    let expected =
        ["`zbvzerobubble` runs 2 stages on each rank, not 1", "help: add --set pipeline.stages_per_rank=2"];
    run.fail(2, &["resume", "out"], &set, &expected);
    run.resume(&["run.steps=4", "pipeline.schedule=zb-v", "pipeline.stages_per_rank=2"]);
}

#[test]
fn a_run_that_was_killed_before_its_first_checkpoint_starts_again() {
    let run = Run::new();
    let endless = ["run.steps=1000000", "optimizer.schedule=constant"];
    let mut child = run.start("train", &["small.toml"], &endless);
    run.wait_for_step(2);
    child.kill().and_then(|()| child.wait()).expect("the run is ours to kill");
    let before = fs::read(run.path("out/metrics.jsonl")).expect("metrics");
    let words = said(&run, &["resume", "out", "--set", "run.steps=4"]);
    assert!(words.contains("no checkpoint: starting again from step 1"), "{words}");
    assert_eq!(fs::read(run.path("out/metrics.1.jsonl")).expect("the lines that were cut off"), before);
    let whole = Run::new();
    whole.train(&["run.steps=4", endless[1]]);
    assert_eq!(run.figures(), whole.figures());
}

#[test]
fn a_resumed_run_says_that_its_pipeline_is_never_full() {
    let run = Run::new();
    run.train(&["run.steps=1"]);
    let set = ["run.steps=2", "pipeline.ranks=4", "pipeline.microbatches=2"];
    let (_, said) = run.succeed(&["resume", "out"], &set);
    assert_eq!(said.matches("2 microbatches cannot fill the pipeline of 4 ranks").count(), 1, "{said}");
}

#[test]
fn a_run_goes_on_wherever_it_was_moved() {
    let run = Run::new();
    run.train(&["run.steps=4", "run.checkpoint_every=2"]);
    fs::rename(run.out(), run.path("elsewhere")).expect("a folder");
    run.print(&["resume", "elsewhere", "--set", "run.steps=6"]);
    assert!(!run.out().exists());
    assert_eq!(run.metrics_in("elsewhere").len(), 6);
}

/// Checks that `resume` refuses a run after `prepare` has changed it, with an error that contains `words`.
fn check_refused(prepare: impl FnOnce(&Run), set: &[&str], words: &[&str]) {
    let run = Run::new();
    run.train(&["run.steps=4", "run.checkpoint_every=2"]);
    let metrics = fs::read(run.path("out/metrics.jsonl")).expect("metrics");
    prepare(&run);
    words.iter().for_each(|words| run.refuse(&["resume", "out"], set, words));
    assert_eq!(fs::read(run.path("out/metrics.jsonl")).expect("metrics"), metrics, "nothing is cut off");
}

#[test]
fn what_cannot_go_on_is_refused_by_name() {
    let nothing = |_: &Run| {};
    check_refused(nothing, &["model.hidden_size=32"], &["model.hidden_size was 16 and is 32"]);
    check_refused(nothing, &["data.seq_len=4"], &["data.seq_len was 8 and is 4"]);
    check_refused(nothing, &["run.seed=7"], &["data.shuffle_seed was 42 and is 7"]);
    check_refused(nothing, &["run.steps=3"], &["the checkpoint is of step 4", "run.steps = 3"]);
    check_refused(nothing, &["run.out=other"], &["leave out run.out"]);
    let other_text = |run: &Run| run.write("text.txt", "to be or not to be ".repeat(14));
    check_refused(other_text, &[], &["data.hash was"]);
}

#[test]
fn damage_is_told_by_file() {
    const SHARD: &str = "out/checkpoints/step-00000004/rank-0001.safetensors";
    let flip = |run: &Run| {
        let mut bytes = fs::read(run.path(SHARD)).expect("a shard");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(run.path(SHARD), bytes).expect("a shard");
    };
    check_refused(flip, &[], &[SHARD, "damaged"]);
    check_refused(|run| fs::remove_file(run.path(SHARD)).expect("a shard"), &[], &[SHARD, "missing"]);
}

#[test]
fn a_folder_without_a_run_is_refused() {
    let run = Run::new();
    for command in [&["resume", "out"][..], &["inspect", "out"], &["export", "out", "model"]] {
        let (code, _, said) = run.call(command, &[]);
        assert!(code == Some(2) && (said.contains("/out") || said.contains("out:")), "{said}");
    }
    assert!(!run.out().exists(), "looking leaves no trace");
}

#[test]
fn two_processes_do_not_train_in_one_folder() {
    let run = Run::new();
    let mut first = run.start("train", &["small.toml"], &["run.steps=1000000"]);
    run.wait_for_step(1);
    for command in [&["resume", "out"][..], &["train", "small.toml"]] {
        run.refuse(command, &[], &format!("process {} is at work", first.id()));
    }
    first.kill().and_then(|()| first.wait()).expect("the run is ours to kill");
}

#[test]
fn inspect_shows_what_is_in_a_checkpoint() {
    let run = Run::new();
    run.train(&["run.steps=4", "run.checkpoint_every=2"]);
    let json = inspected(&run);
    assert_eq!(json["step"], 4);
    assert_eq!(json["losses"].as_array().map(Vec::len), Some(4));
    assert_eq!(json["description"]["model"]["hidden_size"], 16);
    let parameters = json["parameters"].as_array().expect("a list");
    assert_eq!(parameters.len(), 2 * 9 + 3, "embedding, norm, head, and nine a layer");
    let embedding = parameters.iter().find(|found| found["path"] == "model.embed_tokens.weight");
    assert_eq!(embedding.map(|found| found["shape"].clone()), Some(serde_json::json!([128, 16])));
    let text = run.print(&["inspect", "out/checkpoints/step-00000002"]);
    assert!(text.contains("step        2\n") && text.contains("lm_head.weight"), "{text}");
}

#[test]
fn an_exported_model_trains_on_where_the_run_stopped() {
    for model in ["model.tie_word_embeddings=true", "model.architecture=qwen2"] {
        let run = Run::new();
        run.train(&["run.steps=3", "run.checkpoint_every=3", "pipeline.ranks=4", model]);
        run.print(&["export", "out", "model"]);
        // With a learning rate near 0, the loss of the fourth step depends only on the parameters.
        run.resume(&["run.steps=4", "pipeline.ranks=1"]);
        let expected = run.figures()[3].clone();
        let from = Run::new();
        fs::rename(run.path("model"), from.path("model")).expect("a folder");
        from.train(&[
            "run.steps=4",
            "model.from=model",
            "optimizer.learning_rate=1e-30",
            "optimizer.weight_decay=0",
        ]);
        assert_eq!(from.figures()[3], expected, "{model}");
        let again = run.command(&["export", "out", "."]);
        assert_eq!(again.status.code(), Some(2), "a folder with content is not touched");
    }
}
