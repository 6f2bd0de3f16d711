//! Tests of values that contradict each other.

use pipewright_schedule::lower::ReduceWait;

use super::{check, check_set, load, surroundings};
use crate::settings::{Base, ConfigError, Settings};

#[test]
fn sizes_that_do_not_fit_each_other() {
    let refuse = |arguments: &[&str], message: &str| {
        let culprit = arguments[arguments.len() - 1];
        check_set(arguments, &[&format!("--set {culprit}: {message}")]);
    };
    refuse(&["model.hidden_size=250"], "`hidden_size = 250` is not divisible by `num_attention_heads = 8`");
    refuse(
        &["model.hidden_size=504"],
        "`head_dim = 63` is out of range: it must be even, because the rotary embedding rotates pairs",
    );
    refuse(
        &["model.num_key_value_heads=3"],
        "`num_attention_heads = 8` is not divisible by `num_key_value_heads = 3`",
    );
    refuse(
        &["pipeline.ranks=4", "pipeline.schedule=dualpipev", "pipeline.microbatches=3"],
        "`dualpipev` needs at least as many microbatches as its 8 stages, not 3; use 8 microbatches",
    );
    refuse(
        &["pipeline.ranks=11"],
        "10 layers cannot fill 11 stages; use at most 10 stages, not 11 ranks with 1 stage each, so use 10 ranks",
    );
    refuse(
        &["pipeline.stages_per_rank=2"],
        "`1f1b` runs 1 stage on each rank, not 2; use 1 stage on each rank",
    );
}

/// The lookahead of a mesh with sharded replicas fits its window and the ranks of the pipeline.
#[test]
fn parameters_are_fetched_ahead_as_configured() {
    const SHARDED: [&str; 2] = ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];
    let lowering = |arguments: &[&str]| {
        let settings = load(None, &[&SHARDED, arguments].concat()).expect("sound arguments");
        let lowering = settings.mesh.lowering();
        (lowering.unshard_lookahead.to_string(), lowering.reduce_wait)
    };
    assert_eq!(lowering(&[]), ("full".to_owned(), ReduceWait::AtEnd));
    for (written, read) in
        [("auto", "auto"), ("2", "2"), ("[1, 2]", "1/2"), ("\"1/2\"", "1/2"), ("1,2", "1/2")]
    {
        let argument = format!("mesh.unshard_lookahead={written}");
        assert_eq!(
            lowering(&[&argument, "mesh.reduce_wait=deferred"]),
            (read.to_owned(), ReduceWait::Deferred)
        );
    }
    let refuse = |value: &str, expected: &str| {
        let argument = format!("mesh.unshard_lookahead={value}");
        let arguments = [&SHARDED[..], &["pipeline.ranks=2", &argument]].concat();
        check_set(&arguments, &[&format!("--set {argument}: `unshard_lookahead`{expected}")]);
    };
    refuse("4", ": rank 0 has a lookahead of 4 stages, and the window has 3; use a lookahead from 1 to 3");
    refuse(
        "[1, 4]",
        ": rank 1 has a lookahead of 4 stages, and the window has 3; use a lookahead from 1 to 3",
    );
    refuse("[1, 1, 1]", ": 3 lookaheads for 2 ranks; give one for each rank, or one number for all");
    for (value, kind) in [("0", "a whole number"), ("[]", "a list"), ("[1.5]", "a list"), ("most", "a text")]
    {
        let expected =
            "\"full\", \"auto\", a number of stages from 1, or a list with one for each rank, such as [1, 2]";
        refuse(value, &format!(" is {kind}, where {expected} is expected"));
    }
    // Without sharding nothing is fetched.
    assert!(load(None, &["mesh.unshard_lookahead=4"]).is_ok());
    check_set(
        &["mesh.reduce_wait=later"],
        &[
            "--set mesh.reduce_wait=later: `reduce_wait` is \"later\", where at-once, deferred, at-end is expected",
        ],
    );
}

#[test]
fn groups_of_replicas_follow_from_a_list() {
    let mesh = |arguments: &[&str]| {
        let arguments = [arguments, &["pipeline.microbatches=16"]].concat();
        let settings = load(None, &arguments).expect("sound arguments");
        (settings.mesh.data_parallel, settings.mesh.shards())
    };
    assert_eq!(mesh(&["mesh.data_parallel=[2, 4]"]), (8, 4));
    assert_eq!(mesh(&["mesh.data_parallel=[1, 4]"]), (4, 4));
    assert_eq!(mesh(&["mesh.data_parallel=[4, 1]"]), (4, 1));
    assert_eq!(mesh(&["mesh.data_parallel=[2, 2]", "mesh.data_parallel_mode=sharded"]), (4, 2));
    let refuse = |list: &str, expected: &str| {
        let argument = format!("mesh.data_parallel={list}");
        check_set(&[&argument], &[&format!("--set {argument}: `data_parallel` is {expected} is expected")]);
    };
    refuse("[0, 4]", "[0, 4], where whole numbers from 1 to 2147483647");
    let two = "two numbers, such as [2, 4] (2 groups of 4 replicas that share the parameters), or one number";
    refuse("[2, 2, 2]", &format!("[2, 2, 2], where {two}"));
    refuse("[]", &format!("[], where {two}"));
    refuse("[65536, 65536]", "[65536, 65536], where two numbers with a product of at most 2147483647");
    refuse("[32768, 65536]", "[32768, 65536], where two numbers with a product of at most 2147483647");
    refuse("two", "a text, where a whole number or a list of two, such as [2, 4]");
    for (list, mode, meant) in [("[2, 4]", "replicated", "sharded"), ("[4, 1]", "sharded", "replicated")] {
        let [list, mode] = [format!("mesh.data_parallel={list}"), format!("mesh.data_parallel_mode={mode}")];
        let (list_only, word) =
            (list.split_once('=').expect("a value").1, mode.split_once('=').expect("a value").1);
        check_set(
            &[&list, &mode],
            &[&format!(
                "--set {mode}: `data_parallel_mode` is \"{word}\", and with `data_parallel = {list_only}` the \
                 parameters are {meant}"
            )],
        );
    }
}

#[test]
fn replicas_have_shares_of_the_batch() {
    let rows = |arguments: &[&str]| {
        let settings = load(None, arguments).expect("sound arguments");
        settings.mesh.microbatch_rows(settings.pipeline.microbatch_size)
    };
    let two = ["mesh.data_parallel=2", "pipeline.microbatch_size=4"];
    assert_eq!(rows(&two), Some(vec![4, 4]));
    assert_eq!(rows(&[&two[..], &["mesh.batch_shares=[3, 1]"]].concat()), Some(vec![6, 2]));
    assert_eq!(rows(&[&two[..], &["mesh.batch_shares=[]"]].concat()), Some(vec![4, 4]));
    let mesh = |arguments: &[&str]| load(None, arguments).expect("sound arguments").mesh;
    assert_eq!(mesh(&[&two[..], &["mesh.batch_shares=[3, 1]"]].concat()).largest_microbatch(4), 6);
    assert_eq!(mesh(&two).largest_microbatch(4), 4);
    let refuse = |shares: &str, expected: &str| {
        let argument = format!("mesh.batch_shares={shares}");
        check_set(&[&two[..], &[&argument]].concat(), &[&format!("--set {argument}: {expected}")]);
    };
    refuse("[3]", "`batch_shares` has 1 share, and the mesh has 2 replicas");
    refuse(
        "[2, 1]",
        "with `batch_shares = [2, 1]`, microbatches of 4 rows (`pipeline.microbatch_size`) on average do not have whole numbers \
         of rows in each replica",
    );
    // The help has numbers that work, also if the shares have a common divisor.
    let help = |shares: &str, size: u32| {
        let arguments = ["mesh.data_parallel=2", &format!("mesh.batch_shares={shares}")].map(str::to_owned);
        let size = format!("pipeline.microbatch_size={size}");
        let error = Settings::load(Base::Sample, &[&arguments[..], &[size]].concat(), &surroundings());
        let Err(ConfigError::Problems(problems)) = error else { panic!("{shares} are refused") };
        problems.0[0].help.clone().unwrap_or_default()
    };
    let multiple = "write a `microbatch_size` that is a multiple of 2, such as";
    assert_eq!(help("[6, 2]", 1), format!("{multiple} 2, or other shares"));
    assert_eq!(help("[3, 1]", 5), format!("{multiple} 6, or other shares"));
    assert_eq!(
        help("[2147483647, 2147483646]", 4),
        "write smaller shares, or shares with a common divisor",
        "no microbatch is as large"
    );
    refuse("[1, 0]", "`batch_shares` is [1, 0], where whole numbers from 1 to 2147483647 is expected");
    refuse(
        "3",
        "`batch_shares` is a whole number, where a list of whole numbers, such as [4, 8] is expected",
    );
    let auto = ["pipeline.schedule=auto", "mesh.batch_shares=[3, 1]"];
    let expected = "--set mesh.batch_shares=[3, 1]: `batch_shares` does not work with the schedule `auto`, which plans for \
                    replicas of equal speed";
    check_set(&[&two[..], &auto].concat(), &[expected]);
}

#[test]
fn another_mistake_does_not_hide_that_a_list_has_another_mode() {
    let other = "--set mesh.data_parallel_mode=replicated: `data_parallel_mode` is \"replicated\", and with \
                 `data_parallel = [2, 4]` the parameters are sharded";
    check_set(
        &["data.seq_len=0", "mesh.data_parallel=[2, 4]", "mesh.data_parallel_mode=replicated"],
        &[
            "--set data.seq_len=0: `seq_len` is 0, where a whole number from 1 to 2147483647 is expected",
            other,
        ],
    );
    // A mode that is not one of the words is one mistake.
    check_set(
        &["mesh.data_parallel=[2, 4]", "mesh.data_parallel_mode=replicate"],
        &[
            "--set mesh.data_parallel_mode=replicate: `data_parallel_mode` is \"replicate\", where replicated, sharded is \
             expected",
        ],
    );
}

#[test]
fn a_warm_up_that_outlasts_the_run() {
    let long = "`warmup_steps` is 100, and the run has 20 steps: the learning rate never reaches its highest";
    check("[optimizer]\nwarmup_steps = 100\n[run]\nsteps = 20", &[&format!("a.toml:2:16: {long}")]);
    check_set(
        &["optimizer.warmup_steps=100", "run.steps=20"],
        &[&format!("--set optimizer.warmup_steps=100: {long}")],
    );
    let file = "[optimizer]\nwarmup_steps = 100";
    let found = load(Some(file), &["run.steps=20"]).err().unwrap_or_default();
    assert_eq!(found, format!("--set run.steps=20: {long}"));
    check("[optimizer]\nwarmup_steps = 100", &[]);
}

#[test]
fn a_learning_rate_that_does_not_fit_into_the_run() {
    let wsd = "optimizer.schedule=wsd";
    check_set(
        &[wsd, "optimizer.decay_steps=91", "optimizer.warmup_steps=10"],
        &["--set optimizer.decay_steps=91: `decay_steps` is 91, and after the warm-up, the run has 90 steps"],
    );
    check_set(&[wsd, "optimizer.decay_steps=90", "optimizer.warmup_steps=10"], &[]);
    check_set(
        &[wsd, "optimizer.decay_steps=2", "optimizer.restart_at=99"],
        &[
            "--set optimizer.decay_steps=2: `decay_steps` is 2, and after `restart_at` = 99 and the warm-up, the run has 1 step",
        ],
    );
    let late = "`restart_at` is 100, and the run has 100 steps";
    check_set(&["optimizer.restart_at=100"], &[&format!("--set optimizer.restart_at=100: {late}")]);
    check_set(
        &["optimizer.restart_at=1", "run.steps=1"],
        &["--set optimizer.restart_at=1: `restart_at` is 1, and the run has 1 step"],
    );
    check_set(
        &["optimizer.restart_at=99", "optimizer.warmup_steps=2"],
        &[
            "--set optimizer.warmup_steps=2: `warmup_steps` is 2, and `restart_at` is 99 of 100 steps: the learning rate \
           never reaches its highest again",
        ],
    );
    check_set(
        &[wsd, "optimizer.min_learning_rate=1e-3"],
        &[
            "--set optimizer.min_learning_rate=1e-3: `min_learning_rate` is 1e-3, which is above `learning_rate`, 3e-4",
        ],
    );
    // A resumed run may change its schedule and keeps the keys of the earlier one.
    check_set(&["optimizer.min_learning_rate=1", "optimizer.decay_steps=5000"], &[]);
}

#[test]
fn gathered_parameters_are_kept_only_between_batches() {
    const KEPT: [&str; 3] =
        ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", "mesh.keep_gathered=true"];
    let message = "--set mesh.keep_gathered=true: `keep_gathered` has no effect without accumulated batches (`accumulate` is 1)";
    check_set(&KEPT, &[message]);
    let settings = load(None, &[&KEPT[..], &["run.accumulate=2"]].concat()).expect("sound arguments");
    assert!(settings.mesh.keep_gathered && settings.mesh.gathered_stages() == u32::MAX);
}

#[test]
fn evaluations_that_contradict_the_data() {
    let refuse = |arguments: &[&str], place: &str, message: &str| {
        check_set(arguments, &[&format!("--set {place}: {message}")]);
    };
    refuse(&["run.eval_every=5"], "run.eval_every=5", "`eval_every` has no effect without validation data");
    for argument in ["run.patience=2", "run.eval_batches=2"] {
        let key = &argument[4..argument.len() - 2];
        refuse(
            &["data.validation_share=0.5", argument],
            argument,
            &format!("`{key}` has no effect without evaluations (`eval_every` is 0)"),
        );
    }
    refuse(
        &["data.validation_share=0.1", "data.validation=a.txt"],
        "data.validation=a.txt",
        "`validation` and `validation_share` both choose the validation data",
    );
    refuse(
        &["data.validation_share=0.1", "data.validation_side=a"],
        "data.validation_side=a",
        "`validation_side` has no effect without `validation`",
    );
    refuse(
        &["data.validation=a.jsonl", "data.side=a"],
        "data.validation=a.jsonl",
        "`validation` has no effect without side inputs, which the training data has",
    );
    let range = "where a number above 0 and below 1 is expected";
    for value in ["0", "1", "-0.1", "2", "nan"] {
        for key in ["validation", "validation_share"] {
            let argument = format!("data.{key}={value}");
            refuse(&[&argument], &argument, &format!("`{key}` is {value}, {range}"));
        }
    }
    let share = |argument: &str| load(None, &[argument]).map(|settings| settings.data.validation_share);
    assert_eq!(share("data.validation=0.25"), Ok(Some(0.25)));
    assert_eq!(share("data.validation_share=0.25"), Ok(Some(0.25)));
}

#[test]
fn slices_need_rows_that_divide() {
    const SLICES: [&str; 2] = ["pipeline.schedule=seq1f1b", "pipeline.slices=3"];
    let refuse = |arguments: &[&str], place: &str, message: &str| {
        check_set(&[&SLICES[..], arguments].concat(), &[&format!("{place}: {message}")]);
    };
    let sum = "`seq_len` is 256, where a multiple of 3, the number of slices, is expected";
    refuse(&[], "--set pipeline.slices=3", sum);
    refuse(&["data.seq_len=256"], "--set data.seq_len=256", sum);
    let set = ["data.seq_len=255", "pipeline.recompute=block"];
    let beside = "`recompute` does not work with a schedule that cuts microbatches into slices";
    refuse(&set, "--set pipeline.recompute=block", beside);
    assert!(load(None, &[&SLICES[..], &["data.seq_len=255"]].concat()).is_ok());
    check_set(
        &["pipeline.slices=2"],
        &["--set pipeline.slices=2: `1f1b` has no setting `slices`; leave it out"],
    );
}

#[test]
fn shares_of_tokens_need_rows_that_divide() {
    let sentence = "`seq_len` is 255, and 2 tensor ranks that share the tokens of a row (`mesh.sequence_parallel`) need a multiple \
                    of 2";
    check_set(
        &["data.seq_len=255", "mesh.tensor_parallel=2", "mesh.sequence_parallel=true"],
        &[&format!("--set data.seq_len=255: {sentence}")],
    );
    assert!(load(None, &["data.seq_len=255", "mesh.tensor_parallel=2"]).is_ok());
    assert!(load(None, &["mesh.tensor_parallel=2", "mesh.sequence_parallel=true"]).is_ok());
}

#[test]
fn documents_need_their_beginnings() {
    check_set(&["data.packed=true"], &["--set data.packed=true: `packed` has no effect without `bos_id`"]);
    check_set(
        &["data.bos_id=0", "data.restart_positions=true"],
        &["--set data.restart_positions=true: `restart_positions` has no effect without `packed`"],
    );
    assert!(load(None, &["data.bos_id=0", "data.packed=true", "data.restart_positions=true"]).is_ok());
}

#[test]
fn copies_on_a_neighbour_need_copies_and_processes() {
    let check = |further: &[&str], expected: &str| {
        check_set(
            &[&["run.copies=neighbour"], further].concat(),
            &[&format!("--set run.copies=neighbour: `copies` has no effect without {expected}")],
        );
    };
    check(&[], "copies of the state (`copy_every` is 0)");
    check(&["run.copy_every=1"], "processes (`pipeline.transport` is \"local\")");
    check_set(
        &["run.copies=other"],
        &["--set run.copies=other: `copies` is \"other\", where machine, neighbour is expected"],
    );
}
