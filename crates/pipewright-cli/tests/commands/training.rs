//! Tests of training through the command line: the files, the display, and figures that do not depend on the
//! partition.

use crate::run::{Figures, Run, assert_near, numbers};
use crate::scratch;

fn folder() -> Run {
    Run::of(&scratch::small(2, 4, 4))
}

/// Trains with these overrides. Returns the exact loss and gradient norm of each step.
fn figures(run: &Run, set: &[&str]) -> Vec<Figures> {
    run.train(set);
    run.figures()
}

const TRAIN: [&str; 2] = ["train", "small.toml"];

#[test]
fn a_run_writes_its_results() {
    let run = folder();
    let (out, _) = run.succeed(&TRAIN, &[]);
    assert!(out.is_empty(), "words for people go to standard error");
    let steps = run.metrics();
    assert_eq!(steps.iter().map(|step| step["step"].as_u64()).collect::<Vec<_>>(), [1, 2, 3, 4].map(Some));
    let loss = steps[0]["loss"].as_f64().expect("a number");
    assert!((loss - 128f64.ln()).abs() < 0.1, "a fresh model knows nothing: {loss}");
    assert_eq!(run.peaks().len(), 2);
    let trace = run.read_json("out/timeline.json");
    let events = trace["traceEvents"].as_array().expect("a list");
    let is_there = |action: &str| events.iter().any(|event| event["args"]["action"] == action);
    assert!(
        is_there("1I0") && is_there("1W0"),
        "gradients leave before the gradients of the weights are computed"
    );
    assert!(run.read("out/config.toml").contains("num_hidden_layers = 2"));
}

#[test]
fn a_zero_bubble_run_notes_gradients_that_cannot_wait_once() {
    let run = folder();
    for (schedule, notes) in [("pipeline.schedule=zb-h1", 1), ("pipeline.schedule=1f1b", 0)] {
        let (_, words) = run.succeed(&TRAIN, &[schedule]);
        let found: Vec<&str> = words.lines().filter(|line| line.starts_with("note: `I` computes")).collect();
        assert_eq!(found.len(), notes, "{schedule}: {words}");
        assert!(found.iter().all(|note| note.contains("norm")), "{found:?}");
    }
}

#[test]
fn the_effective_configuration_repeats_the_run() {
    let run = folder();
    let first = figures(&run, &["optimizer.learning_rate=0.01"]);
    let (_, words) = run.succeed(&["train", "out/config.toml"], &[]);
    assert!(words.contains("moved the earlier run to ") && words.contains("out.1"), "{words}");
    assert_eq!(run.read("out/config.toml"), run.read("out.1/config.toml"));
    assert_eq!(run.figures(), first);
}

/// Checks that runs with `common` and each of these overrides have the same digits as one with `alone`.
fn check_same(run: &Run, common: &[&str], alone: &[&str], others: &[&[&str]]) {
    let expected = figures(run, &[common, alone].concat());
    for set in others {
        assert_eq!(figures(run, &[common, set].concat()), expected, "{common:?} {set:?}");
    }
}

#[test]
fn cut_and_schedule_change_no_digit() {
    const ONE: &[&str] = &["pipeline.ranks=1"];
    let run = folder();
    check_same(
        &run,
        &[],
        ONE,
        &[
            &["pipeline.ranks=2"],
            &["pipeline.ranks=4"],
            &["pipeline.ranks=2", "pipeline.schedule=gpipe"],
            &["pipeline.ranks=3", "pipeline.partition=explicit", "pipeline.boundaries=[1, 2]"],
        ],
    );
    assert_eq!(run.figures().len(), 4);
    for model in ["model.tie_word_embeddings=true", "model.architecture=qwen2"] {
        check_same(&run, &[model], ONE, &[&["pipeline.ranks=4"]]);
    }
}

/// A hybrid model of an attention and a Mamba-2 block.
const HYBRID: [&str; 5] = [
    "model.architecture=hybrid",
    "model.pattern=AM",
    "model.mamba_num_heads=2",
    "model.mamba_head_dim=8",
    "model.ssm_state_size=8",
];

#[test]
fn packed_documents_train_the_same_under_any_cut() {
    // Each word is a document.
    const PACKED: [&str; 2] = ["data.bos_id=32", "data.packed=true"];
    let run = folder();
    for model in [
        &["model.architecture=llama"][..],
        &["model.architecture=nemotron_h", "model.hybrid_override_pattern=M*"],
        &HYBRID,
    ] {
        let packed = [model, &PACKED].concat();
        let one = figures(&run, &[&packed[..], &["pipeline.ranks=1"]].concat());
        assert_eq!(figures(&run, &[&packed[..], &["pipeline.ranks=4"]].concat()), one, "{model:?}");
        let open = figures(&run, &[model, &["data.bos_id=32", "pipeline.ranks=1"]].concat());
        assert_ne!(open, one, "{model:?}");
    }
    let restarted = [&PACKED[..], &["data.restart_positions=true"]].concat();
    let one = figures(&run, &[&restarted[..], &["pipeline.ranks=1"]].concat());
    assert_eq!(figures(&run, &[&restarted[..], &["pipeline.recompute=block"]].concat()), one);
}

#[test]
fn beginnings_of_documents_that_do_not_fit_are_refused() {
    let run = folder();
    let beyond = "documents begin with the token id 128, which lies beyond the vocabulary of 128";
    run.refuse(&TRAIN, &["data.bos_id=128"], beyond);
    let own = [&HYBRID[..], &["model.bos_token_id=1", "data.bos_id=2", "data.packed=true"]].concat();
    run.refuse(&TRAIN, &own, "`data.bos_id` is 2, and the model's documents begin with 1");
}

#[test]
fn a_schedule_from_a_file_brings_its_sizes() {
    let run = folder();
    let named = figures(&run, &["pipeline.ranks=4"]);
    run.print(&["schedule", "1f1b", "--ranks", "4", "--microbatches", "4", "-o", "s.csv"]);
    assert_eq!(figures(&run, &["pipeline.schedule=s.csv"]), named);
    assert_eq!(run.read_toml("out/config.toml")["pipeline"]["ranks"].as_integer(), Some(4));
}

#[test]
fn a_step_that_is_not_finite_is_refused_and_told() {
    let run = folder();
    let (code, _, words) = run.call(&TRAIN, &["optimizer.learning_rate=1e30", "optimizer.clip_norm=0"]);
    assert_eq!(code, Some(4), "{words}");
    let told = words.contains("error: step 2: rank ")
        && words.contains("the parameters are still those before this step");
    assert!(told, "{words}");
    assert_eq!(run.metrics().len(), 1, "the first step is kept");
}

#[test]
fn an_update_that_is_skipped_is_told_and_recorded() {
    let run = folder();
    let set = ["run.steps=8", "run.precision=f16", "run.loss_scale=4194304", "run.loss_scale_interval=2"];
    let (_, words) = run.succeed(&TRAIN, &set);
    assert!(
        words.contains("step 1/8  loss ") && words.contains("loss scale 4194304, update skipped"),
        "{words}"
    );
    let steps = run.steps();
    let is_skipped = |step: &serde_json::Value| step["skipped"] == true;
    assert!(is_skipped(&steps[0]) && steps[0]["grad_norm"].is_null(), "{steps:?}");
    assert!(steps.iter().any(|step| !is_skipped(step) && step["grad_norm"].is_number()), "{steps:?}");
    for pair in steps.windows(2) {
        let [before, after] =
            [&pair[0], &pair[1]].map(|step| step["loss_scale"].as_f64().expect("f16 has one"));
        assert_eq!(after < before, is_skipped(&pair[0]), "{steps:?}");
        assert!([0.5, 1.0, 2.0].contains(&(after / before)), "{steps:?}");
    }
}

#[test]
fn weights_that_cannot_be_read_are_wrong_input() {
    let run = folder();
    run.refuse(&TRAIN, &["model.from=nowhere"], "nowhere/config.json");
    assert!(!run.out().exists());
}

#[test]
fn sharded_replicas_train_as_whole_ones_digit_for_digit() {
    let run = folder();
    for set in [
        &["pipeline.ranks=1"][..],
        &["pipeline.ranks=2", "model.tie_word_embeddings=true"],
        &["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2", "mesh.unshard_window=1"],
        &[
            "pipeline.schedule=interleaved1f1b",
            "pipeline.stages_per_rank=2",
            "mesh.unshard_window=2",
            "mesh.unshard_lookahead=[1, 2]",
            "mesh.reduce_wait=deferred",
        ],
    ] {
        let [whole, parts] = ["mesh.data_parallel_mode=replicated", "mesh.data_parallel_mode=sharded"];
        check_same(&run, &[set, &["mesh.data_parallel=2"]].concat(), &[whole], &[&[parts]]);
    }
}

#[test]
fn groups_of_replicas_train_as_whole_ones_digit_for_digit() {
    let run = folder();
    for set in [
        &["pipeline.ranks=1", "pipeline.microbatches=4"][..],
        &["pipeline.ranks=2", "pipeline.microbatches=8", "model.tie_word_embeddings=true"],
        &["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2", "pipeline.microbatches=16"],
    ] {
        let groups = ["mesh.data_parallel=[2, 2]", "mesh.data_parallel=[1, 4]", "mesh.data_parallel=[4, 1]"];
        let others: Vec<&[&str]> = groups.chunks(1).collect();
        check_same(&run, &[set, &["mesh.unshard_window=1"]].concat(), &["mesh.data_parallel=4"], &others);
    }
}

#[test]
fn a_schedule_that_never_gathers_is_refused_where_parameters_are_sharded() {
    let run = folder();
    let sharded = ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", "pipeline.schedule=s.csv"];
    for level in ["compute", "full", "comms"] {
        let rows = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--level", level];
        run.print(&[&rows[..], &["-o", "s.csv"]].concat());
        if level == "comms" {
            run.refuse(&TRAIN, &sharded, "never gathers parameters");
        } else {
            run.train(&sharded);
        }
    }
}

#[test]
fn replicas_and_tensor_ranks_train_as_one() {
    let run = folder();
    run.train(&[]);
    let expected = numbers(&run.steps());
    for (set, share) in [
        (&["mesh.data_parallel=2"][..], 1e-6),
        (&["mesh.data_parallel=4", "pipeline.ranks=1"], 1e-6),
        (&["mesh.tensor_parallel=2"], 1e-5),
        (&["mesh.tensor_parallel=2", "mesh.data_parallel=2"], 1e-5),
    ] {
        run.train(set);
        assert_near(&numbers(&run.steps()), &expected, share, &format!("{set:?}"));
    }
    // Replicas with unequal shares see the same rows, in other microbatches.
    let shares = ["mesh.data_parallel=2", "mesh.batch_shares=[3, 1]", "pipeline.microbatch_size=2"];
    run.train(&["pipeline.microbatch_size=2"]);
    let expected = numbers(&run.steps());
    run.train(&shares);
    assert_near(&numbers(&run.steps()), &expected, 1e-6, "unequal shares");
    let uneven = "which 3 replicas (`mesh.data_parallel`) cannot share evenly";
    run.refuse(&TRAIN, &["mesh.data_parallel=3"], uneven);
}

#[test]
fn a_model_that_tensor_ranks_cannot_share_is_refused_before_the_run() {
    let run = folder();
    let expected = "stage 0: `model.layers.0.self_attn` cannot be split over 3 tensor ranks: \
                    `model.layers.0.self_attn.q_proj.weight` is split by `num_attention_heads = 2`";
    run.refuse_settings(&["mesh.tensor_parallel=3"], expected);
    assert!(!run.out().exists());
    let two = "mesh.tensor_parallel=2";
    let expected = "`profile` and the schedule `auto` know only layers that one rank computes, and \
                    `mesh.tensor_parallel` is 2: set it to 1, or name a schedule";
    run.refuse(&["profile", "small.toml"], &[two], expected);
    run.refuse_settings(&[two, "pipeline.schedule=auto"], expected);
}

#[test]
fn recomputation_changes_no_figure() {
    let run = folder();
    let in_part = "pipeline.recompute=[{ stage = 0, layers = 2 }, { stage = 1, keep = 1 }]";
    let choices = ["pipeline.recompute=stage", "pipeline.recompute=block", "pipeline.recompute=[0]", in_part];
    let choices: Vec<&[&str]> = choices.chunks(1).collect();
    // The gradients of two ranks that compute a stage together may arrive before and after the second
    // forward.
    for common in [&[][..], &["mesh.tensor_parallel=2"]] {
        check_same(&run, common, &[], &choices);
    }
}

/// A group size, with a short last group, orders the same computations as any other schedule. So does a
/// pipeline that is never full, which the run says.
#[test]
fn groups_and_few_microbatches_train_to_the_same_bits() {
    let run = folder();
    let seven = "pipeline.microbatches=7";
    let expected = figures(&run, &[seven, "pipeline.ranks=1"]);
    for schedule in ["interleaved1f1b", "interleavedzerobubble", "interleaved-zb-h1"] {
        for group in [2, 3, 7] {
            let (schedule, group) =
                (format!("pipeline.schedule={schedule}"), format!("pipeline.group_size={group}"));
            assert_eq!(figures(&run, &[seven, &schedule, &group]), expected, "{schedule} {group}");
        }
    }
    let two = "pipeline.microbatches=2";
    let expected = figures(&run, &[two, "pipeline.ranks=1"]);
    for schedule in ["pipeline.schedule=gpipe", "pipeline.schedule=1f1b"] {
        let (_, said) = run.succeed(&TRAIN, &[two, "pipeline.ranks=4", schedule]);
        assert_eq!(run.figures(), expected, "{schedule}");
        let note = "2 microbatches cannot fill the pipeline of 4 ranks: the bubble is 50% of a step";
        assert!(said.contains(note), "{said}");
    }
}

#[test]
fn noise_and_smoothed_targets_are_of_training_alone_and_resume() {
    const FORM: [&str; 2] = ["run.neftune_alpha=5", "run.label_smoothing=0.1"];
    const EVALUATED: [&str; 6] = [
        "run.steps=4",
        "data.validation_share=0.25",
        "run.eval_every=2",
        "optimizer.learning_rate=1e-30",
        "optimizer.weight_decay=0",
        "optimizer.schedule=constant",
    ];
    let trained = |set: &[&str]| {
        let run = Run::new();
        run.train(&[&EVALUATED[..], set].concat());
        run
    };
    let (plain, formed) = (trained(&[]), trained(&FORM));
    let member = |run: &Run, name: &str| -> Vec<serde_json::Value> {
        run.steps().iter().filter_map(|step| step.get(name).cloned()).collect()
    };
    assert_eq!(member(&formed, "validation_loss"), member(&plain, "validation_loss"));
    for form in FORM {
        let one = trained(&[form]);
        assert!(
            member(&one, "loss").iter().zip(member(&plain, "loss")).all(|(one, plain)| *one != plain),
            "{form}"
        );
    }
    // Slices add up in another order, and each draws its own noise.
    const SLICES: [&str; 2] = ["pipeline.schedule=seq1f1b", "pipeline.slices=2"];
    let slices = |form: &str| numbers(&trained(&[&[form], &SLICES[..]].concat()).steps());
    assert_near(&slices(FORM[1]), &numbers(&trained(&FORM[1..]).steps()), 1e-5, "slices");
    assert_ne!(slices(FORM[0]), slices("run.neftune_alpha=0"));
    let resumed = Run::new();
    resumed.train(&[&EVALUATED[..], &FORM, &["run.steps=2"]].concat());
    resumed.succeed(&["resume", "out"], &["run.steps=4"]);
    assert_eq!(resumed.figures(), formed.figures());
}
