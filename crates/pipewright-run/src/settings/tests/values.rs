//! Tests of single values: types, ranges, words.

use super::{check, check_set, load};
use crate::settings::checkpoints::CheckpointEvery;
use crate::settings::mesh::whole_experts_of_run;
use crate::settings::run::{Exact, UNKNOWN_STEPS};

#[test]
fn wrong_types() {
    check(
        "[run]\nsteps = 2.5",
        &["a.toml:2:9: `steps` is a number with a fraction, where a whole number is expected"],
    );
    check(
        "[data]\nshuffle = 1",
        &["a.toml:2:11: `shuffle` is a whole number, where true or false is expected"],
    );
    check(
        "[data]\npath = [1]",
        &["a.toml:2:8: `path` is a list, where a text or a list of texts is expected"],
    );
    check("[run]\nout = 7", &["a.toml:2:7: `out` is a whole number, where a text is expected"]);
    check("[optimizer]\neps = \"x\"", &["a.toml:2:7: `eps` is a text, where a number is expected"]);
    check(
        "[optimizer]\nbetas = [1]",
        &["a.toml:2:9: `betas` is a list, where a list of two numbers is expected"],
    );
}

/// The planned time is for the file's steps, not for other steps.
#[test]
fn a_planned_time_is_of_the_settings_of_the_plan() {
    let planned = |arguments: &[&str]| {
        let settings = load(Some("[run]\nplanned_step_ms = 12.5"), arguments).expect("settings");
        settings.run.planned_step_ms
    };
    for same in ["run.steps=7", "run.out=elsewhere", "optimizer.learning_rate=1e-4", "data.shuffle=false"] {
        assert_eq!(planned(&[same]), Some(12.5), "{same}");
    }
    for other in [
        "pipeline.microbatches=4",
        "mesh.data_parallel=2",
        "model.hidden_size=64",
        "data.seq_len=32",
        "run.accumulate=2",
    ] {
        assert_eq!(planned(&[other]), None, "{other}");
        assert_eq!(planned(&[other, "run.planned_step_ms=20"]), Some(20.0), "{other}");
    }
    assert_eq!(load(Some(""), &[]).expect("settings").run.planned_step_ms, None);
    check(
        "[run]\nplanned_step_ms = 0.0",
        &["a.toml:2:19: `planned_step_ms` is 0.0, where a finite number above 0 is expected"],
    );
}

#[test]
fn the_length_is_a_number_of_steps_or_of_passes() {
    let length = |text: &str, set: &[&str]| {
        let run = load(Some(text), set).expect("settings").run;
        (run.steps, run.epochs)
    };
    const EPOCHS: &str = "[run]\nepochs = 2.5";
    assert_eq!(length("", &[]), (100, None));
    assert_eq!(length(EPOCHS, &[]), (UNKNOWN_STEPS, Some(2.5)));
    assert_eq!(length(EPOCHS, &["run.steps=7"]), (7, None));
    assert_eq!(length("[run]\nsteps = 7", &["run.epochs=3"]), (UNKNOWN_STEPS, Some(3.0)));
    let refused = "`epochs` and `steps` both choose the length of the run";
    check("[run]\nsteps = 7\nepochs = 2", &[&format!("a.toml:3:10: {refused}")]);
    check_set(&["run.steps=7", "run.epochs=2"], &[&format!("--set run.epochs=2: {refused}")]);
    // The steps are unknown until the data is open, so phases of the learning rate are not compared with them.
    let settings = load(Some(EPOCHS), &["optimizer.warmup_steps=1000"]).expect("settings");
    assert_eq!(load(Some(&settings.to_toml()), &[]), Ok(settings));
}

#[test]
fn checkpoints_come_after_steps_or_as_the_run_chooses() {
    let every = |text: &str| load(Some(text), &[]).expect("settings").run.checkpoint_every;
    assert_eq!(every(""), CheckpointEvery::Steps(0));
    assert_eq!(every("[run]\ncheckpoint_every = 7"), CheckpointEvery::Steps(7));
    assert_eq!(every("[run]\ncheckpoint_every = \"auto\""), CheckpointEvery::Auto);
    check(
        "[run]\ncheckpoint_every = \"often\"",
        &["a.toml:2:20: `checkpoint_every` is a text, where a whole number or \"auto\" is expected"],
    );
    let range = "where a time from 1s to 10000d, such as \"90m\", \"24h\" or \"7d\" is expected";
    for wrong in ["24", "0.9s", "-3h", "soon", "10001d", "nan s"] {
        check(
            &format!("[run]\nfailure_every = \"{wrong}\""),
            &[&format!("a.toml:2:17: `failure_every` is \"{wrong}\", {range}")],
        );
    }
    let refused = "`failure_every` has no effect without `checkpoint_every = \"auto\"`";
    for (lines, line) in [("", 2), ("checkpoint_every = 5\n", 3), ("checkpoint_every = 0\n", 3)] {
        check(&format!("[run]\n{lines}failure_every = \"24h\""), &[&format!("a.toml:{line}:17: {refused}")]);
    }
    let file = "[run]\ncheckpoint_every = \"auto\"\nfailure_every = \"24h\"";
    // An argument replaces the choice of the file, and the settings that a run keeps do not have the time.
    let replaced = load(Some(file), &["run.checkpoint_every=5"]).expect("settings");
    assert_eq!(
        (replaced.run.checkpoint_every, replaced.run.failure_every),
        (CheckpointEvery::Steps(5), None)
    );
    let both = ["run.checkpoint_every=5", "run.failure_every=1h"];
    let error = load(Some(file), &both).expect_err("no effect").to_string();
    assert!(error.contains(&format!("--set run.failure_every=1h: {refused}")), "{error}");
    for right in ["1s", "10000d"] {
        let text = format!("[run]\ncheckpoint_every = \"auto\"\nfailure_every = \"{right}\"");
        assert!(load(Some(&text), &[]).is_ok(), "{right}");
    }
    // A written configuration is read back as it was.
    let settings = load(Some("[run]\ncheckpoint_every = \"auto\"\nfailure_every = \"1.5h\""), &[]);
    let text = settings.expect("settings").to_toml();
    assert!(text.contains("checkpoint_every = \"auto\"\nfailure_every = \"5400s\""), "{text}");
    let again = load(Some(&text), &[]).expect("settings");
    assert_eq!(again.to_toml(), text);
}

#[test]
fn numbers_out_of_range() {
    let out_of_range = |argument: &str, range: &str| {
        let (key, value) = argument.split_once('=').expect("section.key=value");
        let key = key.split_once('.').expect("section.key").1;
        check_set(
            &[argument],
            &[&format!("--set {argument}: `{key}` is {value}, where {range} is expected")],
        );
    };
    const COUNTS: [(&str, u32); 12] = [
        ("model.vocab_size", i32::MAX as u32),
        ("model.hidden_size", 1 << 20),
        ("model.intermediate_size", 1 << 20),
        ("model.num_hidden_layers", 1 << 16),
        ("model.num_attention_heads", 1 << 20),
        ("model.num_key_value_heads", 1 << 20),
        ("data.seq_len", i32::MAX as u32),
        ("pipeline.ranks", i32::MAX as u32),
        ("pipeline.stages_per_rank", i32::MAX as u32),
        ("pipeline.microbatches", i32::MAX as u32),
        ("pipeline.microbatch_size", i32::MAX as u32),
        ("pipeline.threads_per_rank", 1024),
    ];
    for (key, most) in COUNTS {
        for value in [0, -1, i64::from(most) + 1] {
            out_of_range(&format!("{key}={value}"), &format!("a whole number from 1 to {most}"));
        }
    }
    out_of_range("run.steps=0", "a whole number from 1 to 9223372036854775807");
    out_of_range("run.keep_checkpoints=0", "a whole number from 1 to 2147483647");
    out_of_range("run.accumulate=0", "a whole number from 1 to 2147483647");
    out_of_range("run.eval_every=-1", "a whole number from 0 to 9223372036854775807");
    out_of_range("data.bos_id=-1", "a whole number from 0 to 2147483647");
    out_of_range("run.seed=-1", "a whole number from 0 to 9223372036854775807");
    for key in ["model.rms_norm_eps", "model.rope_theta", "optimizer.learning_rate", "optimizer.eps"] {
        for value in ["0", "-1", "inf", "nan"] {
            out_of_range(&format!("{key}={value}"), "a finite number above 0");
        }
    }
    out_of_range("optimizer.weight_decay=-0.1", "a finite number, 0 or above");
    out_of_range("optimizer.clip_norm=-1", "a finite number, 0 or above");
    out_of_range("run.deadline_seconds=0", "a finite number above 0");
    out_of_range("run.deadline_seconds=1000000000", "at most 100000000");
}

#[test]
fn words() {
    let refuse =
        |argument: &str, message: &str| check_set(&[argument], &[&format!("--set {argument}: {message}")]);
    refuse(
        "model.architecture=lama",
        "`architecture` is \"lama\", where llama, qwen2, qwen3, qwen3_moe, qwen2_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, mistral, ministral3, mixtral, smollm3, granite, granitemoehybrid, phi3, olmo2, olmo3, gemma2, gemma3_text, starcoder2, gpt2, gpt_oss, deepseek_v2, deepseek_v3, glm4_moe, nemotron_h, hybrid is expected",
    );
    refuse("pipeline.schedule=1f1", "unknown schedule `1f1`; did you mean `1f1b`?");
    refuse(
        "pipeline.schedule=ForwardOnly",
        "`schedule` is \"forwardonly\", which has no backward and cannot train",
    );
    refuse(
        "pipeline.partition=best",
        "`partition` is \"best\", where even, weighted, optimal, explicit, pattern, parameters, blocks is expected",
    );
    #[cfg(not(feature = "mpi"))]
    refuse("pipeline.transport=mpi", "`transport` is \"mpi\", which is not compiled into this binary");
    refuse("pipeline.transport=tcp", "`transport` is \"tcp\", where local, mpi is expected");
    refuse(
        "pipeline.transport=nccl",
        "`transport` is \"nccl\", which this version of Pipewright does not support",
    );
    let known = "where flex, cuda, rocm, metal, vulkan, wgpu is expected";
    refuse("run.device=felx", &format!("`device` is \"felx\", {known}"));
    refuse("run.devices=[\"flex\", \"cudda:1\"]", &format!("`devices` is \"cudda\", {known}"));
    refuse("run.device=flex:1", "`flex:1` is not a device: the processor is `flex`, without a number");
    #[cfg(not(feature = "cuda"))]
    refuse(
        "run.device=cuda:0",
        "this build cannot compute on `cuda:0`: build it with `cargo build --release --features cuda`",
    );
    refuse(
        "optimizer.name=adams",
        "`name` is \"adams\", where adamw, adamw_8bit, lion, adam, sgd, muon, adafactor is expected",
    );
    refuse(
        "optimizer.schedule=step",
        "`schedule` is \"step\", where constant, cosine, linear, wsd, inverse_sqrt is expected",
    );
    refuse("run.out=", "`out` is empty");
    refuse("data.path=[]", "`path` is empty");
    refuse("data.path=$NOWHERE/*.rs", "`path` begins with $NOWHERE, which is not set in the environment");
    assert!(load(Some(""), &["pipeline.schedule=GPipe"]).is_ok());
}

#[test]
fn what_is_recomputed_is_a_word_or_a_list_of_stages() {
    let found = |set: &str| load(None, &[set]).map(|settings| settings.pipeline.recompute.to_string());
    assert_eq!(found("pipeline.ranks=2"), Ok("none".to_owned()));
    for (set, expected) in [
        ("stage", "stage"),
        ("\"block\"", "block"),
        ("[1, 0]", "0,1"),
        ("[1, 1]", "1"),
        ("[0, { stage = 1, layers = 2 }]", "0,1:layers=2"),
        ("[{ stage = 1, layers = 1, keep = 3 }]", "1:layers=1:keep=3"),
        ("[{ stage = 0, keep = 1 }]", "0:keep=1"),
        ("parts", "parts"),
        ("[{ stage = 1, parts = ['norms'] }]", "1:parts=norms"),
        (
            "[{ stage = 0, layers = 'all', parts = ['feed-forward', 'norms'] }]",
            "0:layers=all:parts=norms+feed-forward",
        ),
    ] {
        assert_eq!(found(&format!("pipeline.recompute={set}")).as_deref(), Ok(expected));
    }
    for (set, expected) in [
        ("[0, 2]", "`recompute` is 2"),
        ("[-1]", "`recompute`"),
        ("stages", "where none, stage, block, parts is expected"),
        ("true", "a word, or a list of whole numbers"),
        ("[{ layers = 1 }]", "{ stage = 1, layers = 3 }"),
        ("[{ stage = 1, layers = 0 }]", "{ stage = 1, layers = 3 }"),
        ("[{ stage = 1, first = 2 }]", "{ stage = 1, layers = 3 }"),
        ("[{ stage = 1, parts = [] }]", "parts = [\"norms\", \"feed-forward\"]"),
        ("[{ stage = 1, parts = ['scores'] }]", "parts = [\"norms\", \"feed-forward\"]"),
        ("[{ stage = 1, keep = 1, parts = ['norms'] }]", "parts = [\"norms\", \"feed-forward\"]"),
        ("[1, { stage = 1, keep = 2 }]", "one for a stage"),
        ("[{ stage = 7, keep = 2 }]", "`recompute` is 7"),
    ] {
        let error = found(&format!("pipeline.recompute={set}")).expect_err(set);
        assert!(error.contains(expected), "{set}: {error}");
    }
}

#[test]
fn the_precision_is_one_of_those_that_there_are() {
    let found = |set: &[&str]| load(None, set).map(|settings| settings.run.precision.to_string());
    assert_eq!(found(&[]).as_deref(), Ok("f32"));
    for precision in ["f32", "bf16", "f16"] {
        let set = format!("run.precision={precision}");
        assert_eq!(found(&[&set]).as_deref(), Ok(precision));
        let written = load(None, &[&set]).expect("it is known").to_toml();
        assert!(written.contains(&format!("precision = \"{precision}\"")), "{written}");
    }
    let error = found(&["run.precision=bf6"]).expect_err("there is none");
    assert!(error.contains("`precision` is \"bf6\"") && error.contains("f32, bf16, f16"), "{error}");
}

#[test]
fn a_run_is_exact_on_one_processor_or_everywhere() {
    let exact = |set: &[&str]| load(None, set).map(|settings| settings.run.exact);
    assert_eq!(exact(&[]), Ok(Exact::Processor));
    assert_eq!(exact(&["run.exact=everywhere"]), Ok(Exact::Everywhere));
    let error = exact(&["run.exact=always"]).expect_err("there is none");
    assert!(error.contains("`exact` is \"always\"") && error.contains("processor, everywhere"), "{error}");
}

#[test]
fn the_loss_scale_is_a_power_of_two() {
    let found = load(None, &["run.loss_scale=1024", "run.loss_scale_interval=7"]).expect("they are in range");
    assert_eq!((found.run.loss_scale, found.run.loss_scale_interval), (1024, 7));
    assert_eq!(load(Some(&found.to_toml()), &[]), Ok(found));
    for (set, expected) in [
        ("run.loss_scale=1000", "`loss_scale` is 1000"),
        ("run.loss_scale=0", "`loss_scale` is 0"),
        ("run.loss_scale_interval=0", "`loss_scale_interval` is 0"),
    ] {
        let error = load(None, &[set]).expect_err(set);
        assert!(error.contains(expected), "{set}: {error}");
    }
}

#[test]
fn groups_without_decay_are_named() {
    let groups = |set: &str| load(None, &[set]).map(|settings| settings.optimizer.no_decay.len());
    assert_eq!(groups("optimizer.no_decay=[\"norm\", \"bias\", \"embedding\"]"), Ok(3));
    assert_eq!(groups("optimizer.no_decay=norm"), Ok(1));
    assert_eq!(groups("optimizer.no_decay=[]"), Ok(0));
    check_set(
        &["optimizer.no_decay=[\"norms\"]"],
        &[
            "--set optimizer.no_decay=[\"norms\"]: `no_decay` is \"norms\", where norm, bias, embedding is expected",
        ],
    );
}

#[test]
fn groups_of_parameters_are_checked() {
    let refuse = |value: &str, message: &str| {
        let argument = format!("optimizer.groups={value}");
        check_set(&[&argument], &[&format!("--set {argument}: {message}")]);
    };
    refuse("norm", "`groups` is a text, where a list of tables, each below [[optimizer.groups]] is expected");
    refuse("[{}]", "`parameters` is missing in [[optimizer.groups]]");
    refuse("[{ parameters = [] }]", "`parameters` is empty");
    refuse(
        "[{ parameters = [\"norms\"] }]",
        "`parameters` is \"norms\", where norm, bias, embedding is expected",
    );
    refuse("[{ parameters = [\"norm\"], lr = 1 }]", "unknown key `lr` in [[optimizer.groups]]");
    refuse(
        "[{ parameters = [\"norm\"], learning_rate = 0 }]",
        "`learning_rate` is 0, where a finite number above 0 is expected",
    );
    refuse(
        "[{ parameters = [\"a.[\"] }]",
        "`parameters` is a.[, where a path, in which * means any letters is expected",
    );
    refuse(
        "[{ parameters = [\"norm\"] }, { parameters = [\"norm\"], lr = 1 }]",
        "table 2: unknown key `lr` in [[optimizer.groups]]",
    );
    let file = "[optimizer]\nweight_decay = 0.2\n[[optimizer.groups]]\nparameters = [\"norm\", \"a.b.*\"]\nweight_decay = 0\n";
    let groups = load(Some(file), &[]).expect("a sound file").optimizer.groups;
    assert_eq!(groups[0].parameters, ["norm", "a.b.*"]);
    assert_eq!((groups[0].weight_decay, groups[0].learning_rate), (Some(0.0), None));
}

#[test]
fn momentum_belongs_to_algorithms_that_have_it() {
    let momentum = |set: &[&str]| load(None, set).map(|settings| settings.optimizer.momentum);
    assert_eq!(momentum(&["optimizer.name=sgd"]), Ok(Some(0.0)));
    assert_eq!(momentum(&["optimizer.name=muon"]), Ok(Some(0.95)));
    assert_eq!(momentum(&[]), Ok(None));
    check_set(
        &["optimizer.momentum=0.9"],
        &["--set optimizer.momentum=0.9: `momentum` has no effect without `name = \"sgd\"` or \"muon\""],
    );
}

/// The optimizer computes in single precision, so a number must be in its range there too.
#[test]
fn lion_has_the_decay_rates_of_its_authors_unless_they_are_written() {
    let betas = |set: &[&str]| load(None, set).map(|settings| settings.optimizer.betas);
    assert_eq!(betas(&["optimizer.name=lion"]), Ok([0.9, 0.99]));
    assert_eq!(betas(&["optimizer.name=lion", "optimizer.betas=[0.9, 0.95]"]), Ok([0.9, 0.95]));
    assert_eq!(betas(&["optimizer.name=adamw_8bit"]), Ok([0.9, 0.95]));
}

#[test]
fn numbers_of_the_optimizer_hold_in_single_precision() {
    const POSITIVE: &str = "a finite number above 0";
    const NON_NEGATIVE: &str = "a finite number, 0 or above";
    const FRACTION: &str = "a number from 0 to below 1";
    let refused = |key: &str, value: &str, range: &str, number: &str, rounded: &str| {
        check(
            &format!("[optimizer]\nname = \"sgd\"\n{key} = {value}"),
            &[&format!(
                "a.toml:3:{}: `{key}` is {value}, where {range} in single precision, which rounds {number} to {rounded}, is \
                 expected",
                key.len() + 4
            )],
        );
    };
    let infinite = |key: &str, range: &str| refused(key, "1e308", range, "1e308", "inf");
    ["learning_rate", "eps"].iter().for_each(|key| infinite(key, POSITIVE));
    ["weight_decay", "clip_norm", "clip_value"].iter().for_each(|key| infinite(key, NON_NEGATIVE));
    refused("learning_rate", "1e-60", POSITIVE, "1e-60", "0");
    refused("eps", "1e-46", POSITIVE, "1e-46", "0");
    refused("momentum", "0.99999999", FRACTION, "0.99999999", "1");
    let each = format!("for each of the two {FRACTION}");
    refused("betas", "[0.9, 0.99999999]", &each, "0.99999999", "1");
    refused("betas", "[0.999999999, 0.5]", &each, "0.999999999", "1");
    check(
        "[optimizer]\ngroups = [{ parameters = [\"norm\"], learning_rate = 1e39 }]",
        &[
            "a.toml:2:52: `learning_rate` is 1e39, where a finite number above 0 in single precision, which rounds 1e39 to inf, \
           is expected",
        ],
    );
    check(
        "[optimizer]\nlearning_rate = 3e38\nbetas = [0.9, 0.9999999]\neps = 1e-44\nweight_decay = 1e-300",
        &[],
    );
}

#[test]
fn the_former_flag_of_whole_experts_is_read() {
    let check = |keys: &str, expected: bool| {
        let settings = load(Some(&format!("[mesh]\n{keys}")), &[]).expect("settings");
        assert_eq!((settings.mesh.whole_experts, settings.mesh.expert_parallel), (expected, 1), "{keys}");
        assert_eq!(whole_experts_of_run(&keys.parse().expect("a table")), expected, "{keys}");
    };
    check("expert_parallel = true", true);
    check("expert_parallel = false", false);
    check("expert_parallel = 1", false);
    check("whole_experts = true\nexpert_parallel = 1", true);
    check("whole_experts = false\nexpert_parallel = true", false);
    check("", false);
}
