//! Tests that turn text into settings. Tests of the binary check how the errors look on a terminal.

use std::path::Path;

use pipewright_schedule::generate::PerStage;
use pipewright_schedule::{ScheduleSpec, generate};

use crate::config::model::ModelSettings;
use crate::config::pipeline::{FoundSchedule, PartitionChoice};
use crate::config::{ConfigError, Loaded, Settings, Surroundings, TEMPLATE};

/// Loads the settings from a file's text in a scratch folder. On failure, returns the problems, one per line, without
/// the path of the folder.
fn load(text: Option<&str>, arguments: &[&str]) -> Result<Settings, String> {
    load_all(text, arguments).map(|loaded| loaded.settings)
}

/// As [`load`], with the schedule.
fn load_all(text: Option<&str>, arguments: &[&str]) -> Result<Loaded, String> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("a.toml");
    if let Some(text) = text {
        std::fs::write(&file, text).expect("the scratch folder takes files");
    }
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let surroundings =
        Surroundings { working_folder: Path::new(env!("CARGO_MANIFEST_DIR")).to_owned(), variable: |_| None };
    let file = text.is_some().then_some(file.as_path());
    let loaded = Settings::load(file, &arguments, &surroundings);
    loaded.map_err(|error| match error {
        ConfigError::Problems(problems) => {
            let prefix = format!("{}/", folder.path().display());
            let lines: Vec<String> =
                problems.iter().map(|problem| problem.to_string().replace(&prefix, "")).collect();
            lines.join("\n")
        }
        error @ ConfigError::Read { .. } => error.to_string(),
    })
}

fn check(text: &str, problems: &[&str]) {
    let found = load(Some(text), &[]).err().unwrap_or_default();
    assert_eq!(found.lines().collect::<Vec<_>>(), problems);
}

fn check_set(arguments: &[&str], problems: &[&str]) {
    let found = load(Some(""), arguments).err().unwrap_or_default();
    assert_eq!(found.lines().collect::<Vec<_>>(), problems);
}

#[test]
fn every_model_family_can_be_asked_for() {
    for family in pipewright_models::ModelConfig::MODEL_TYPES {
        let settings = load(None, &[&format!("model.architecture={family}")]).expect(family);
        let ModelSettings::Fresh(model) = settings.model else { panic!("no folder was named") };
        assert_eq!(model.config().to_json()["model_type"], *family);
    }
}

#[test]
fn a_family_has_keys_of_its_own() {
    let text = "\
[model]
architecture = \"qwen3_moe\"
hidden_size = 64
num_attention_heads = 4
head_dim = 24
num_experts = 6
num_experts_per_tok = 3
mlp_only_layers = [0]
output_router_logits = true
rope_scaling = { rope_type = \"llama3\", factor = 8, low_freq_factor = 1.0, high_freq_factor = 4.0, \
                 original_max_position_embeddings = 64 }
";
    let settings = load(Some(text), &[]).expect("it is sound");
    let ModelSettings::Fresh(model) = &settings.model else { panic!("no folder was named") };
    let json = model.config().to_json();
    let found = ["head_dim", "num_experts", "num_experts_per_tok", "mlp_only_layers", "output_router_logits"]
        .map(|key| json[key].to_string());
    assert_eq!(found, ["24", "6", "3", "[0]", "true"]);
    assert_eq!(json["rope_parameters"]["rope_type"], "llama3");
    assert_eq!(load(Some(&settings.to_toml()), &[]), Ok(settings));
}

#[test]
fn keys_of_a_family_are_checked_where_they_are_written() {
    let check = |keys: &str, problem: &str| {
        // The place is that of the value.
        let column = keys.find("= ").expect("a key with a value") + 3;
        let text = format!("[model]\narchitecture = \"qwen3_moe\"\n{keys}\n");
        check(&text, &[&format!("a.toml:3:{column}: {problem}")]);
    };
    check(
        "num_experts_per_tok = 9",
        "`num_experts_per_tok = 9` is out of range: it must be from 1 to the number of experts",
    );
    check("num_experts = 0", "`num_experts = 0` is out of range: it must be from 1 to 16384");
    check(
        "rope_scaling = { rope_type = \"yarn\" }",
        "`rope_scaling.rope_type = yarn` is not supported: only default or llama3 is",
    );
    check("num_experts = \"many\"", "the value of `num_experts` cannot be used");
    check_set(
        &["model.num_experts=4"],
        &["--set model.num_experts=4: `num_experts` is not a key of `llama`: only qwen3_moe, hybrid have it"],
    );
}

#[test]
fn habitual_names_of_schedules_become_their_own() {
    let settings = load(None, &["pipeline.schedule=ZB-V"]).expect("an alias");
    assert_eq!(settings.pipeline.schedule.to_string(), "zbvzerobubble");
    assert_eq!(settings.pipeline.stages_per_rank, 2);
}

#[test]
fn the_template_holds_the_defaults() {
    let defaults = load(Some(""), &[]).expect("the defaults are sound");
    assert_eq!(load(Some(TEMPLATE), &[]), Ok(defaults));
}

#[test]
fn the_template_names_every_key() {
    for (section, keys) in super::keys::SECTIONS {
        assert!(TEMPLATE.contains(&format!("\n[{section}]")), "[{section}]");
        for key in *keys {
            assert!(
                TEMPLATE.contains(&format!("\n{key} = ")) || TEMPLATE.contains(&format!("\n# {key} = ")),
                "{key}"
            );
        }
    }
}

#[test]
fn settings_survive_being_written_and_read() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let schedule = folder.path().join("a.csv");
    std::fs::write(&schedule, "0F0,0B0\n1F0,1B0\n").expect("it can be written");
    let schedule = format!("pipeline.schedule={}", schedule.display());
    let cases: [&[&str]; 10] = [
        &[],
        &[
            "data.validation=[\"v/*.txt\"]",
            "run.eval_every=5",
            "run.patience=3",
            "optimizer.no_decay=[\"bias\"]",
        ],
        &["pipeline.schedule=group-interleaved", "pipeline.microbatches=6", "pipeline.group_size=1"],
        &["pipeline.schedule=zb-greedy", "pipeline.memory_limit=[2, 1]", "pipeline.costs=F=1,I=2,W=1"],
        &[
            "optimizer.name=muon",
            "optimizer.momentum=0.9",
            "optimizer.clip_value=0.5",
            "optimizer.groups=[{ parameters = [\"norm\"], clip_norm = 1 }, { parameters = [\"a.*\"], learning_rate = 1e-5 }]",
        ],
        &[
            "data.validation=0.1",
            "data.bos_id=0",
            "data.packed=true",
            "run.eval_every=5",
            "run.eval_batches=2",
        ],
        &["model.architecture=qwen2", "model.tie_word_embeddings=true"],
        &["model.from=models/a", "data.path=[\"a b/*.txt\", \"!**/c/**\"]", "data.tokenizer=tokenizer.json"],
        &[&schedule, "optimizer.learning_rate=0.1234567890123456", "run.deadline_seconds=0.5"],
        &["pipeline.partition=explicit", "pipeline.boundaries=[3]", "run.seed=9223372036854775807"],
    ];
    for arguments in cases {
        let settings = load(None, arguments).expect("sound arguments");
        assert_eq!(load(Some(&settings.to_toml()), &[]), Ok(settings));
    }
}

#[test]
fn unknown_names() {
    check("[pipeline]\nrnaks = 2", &["a.toml:2:1: unknown key `rnaks` in [pipeline]"]);
    check("[pipline]\nranks = 2", &["a.toml:1:2: unknown section `pipline`"]);
    check("steps = 2", &["a.toml:1:1: `steps` is outside of any section"]);
    check("[run]\nsteps = 2\nsteps = 3", &["a.toml:3:1: not valid TOML: duplicate key"]);
    check_set(&["pipeline.rnaks=2"], &["--set pipeline.rnaks=2: unknown key `rnaks` in [pipeline]"]);
}

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

#[test]
fn all_problems_at_once() {
    check(
        "[pipeline]\nranks = 0\nrnaks = 1\n[optimizer]\nbetas = [0.9, 1.0]\n[run]\nsteps = true\n",
        &[
            "a.toml:3:1: unknown key `rnaks` in [pipeline]",
            "a.toml:2:9: `ranks` is 0, where a whole number from 1 to 2147483647 is expected",
            "a.toml:5:9: `betas` is [0.9, 1.0], where for each of the two a number from 0 to below 1 is expected",
            "a.toml:7:9: `steps` is true or false, where a whole number is expected",
        ],
    );
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
        "`architecture` is \"lama\", where llama, qwen2, qwen3, qwen3_moe, nemotron_h, hybrid is expected",
    );
    refuse("pipeline.schedule=1f1", "unknown schedule `1f1`; did you mean `1f1b`?");
    refuse(
        "pipeline.schedule=ForwardOnly",
        "`schedule` is \"forwardonly\", which has no backward and cannot train",
    );
    refuse(
        "pipeline.partition=best",
        "`partition` is \"best\", where even, weighted, optimal, explicit, pattern is expected",
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
        "`name` is \"adams\", where adamw, adam, sgd, muon, adafactor is expected",
    );
    refuse("optimizer.schedule=step", "`schedule` is \"step\", where constant, cosine, linear is expected");
    refuse("run.out=", "`out` is empty");
    refuse("data.path=[]", "`path` is empty");
    refuse("data.path=$NOWHERE/*.rs", "`path` begins with $NOWHERE, which is not set in the environment");
    assert!(load(Some(""), &["pipeline.schedule=GPipe"]).is_ok());
}

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
        &["pipeline.ranks=4", "pipeline.microbatches=3"],
        "3 microbatches cannot fill the 4 stages of `1f1b`; use at least 4",
    );
    refuse(&["pipeline.ranks=9"], "8 microbatches cannot fill the 9 stages of `1f1b`; use at least 9");
    refuse(
        &["pipeline.microbatches=16", "pipeline.ranks=11"],
        "10 layers cannot fill 11 stages; use at most 10 stages",
    );
    refuse(&["pipeline.stages_per_rank=2"], "`1f1b` runs 1 stage(s) on each rank, not 2; use 1");
}

#[test]
fn boundaries() {
    let refuse = |arguments: &[&str], message: &str| {
        let culprit = arguments[arguments.len() - 1];
        check_set(arguments, &[&format!("--set {culprit}: {message}")]);
    };
    let explicit = "pipeline.partition=explicit";
    refuse(&[explicit], "`partition` is \"explicit\", and there are no `boundaries`");
    refuse(&["pipeline.boundaries=[4]"], "`boundaries` are given, and `partition` is not \"explicit\"");
    refuse(&[explicit, "pipeline.boundaries=[2, 4]"], "2 boundaries do not make 2 stages; give 1 boundaries");
    refuse(
        &[explicit, "pipeline.ranks=3", "pipeline.boundaries=[4, 4]"],
        "boundary 4 does not come after 4; every stage needs a layer, so boundaries ascend from 1",
    );
    refuse(
        &[explicit, "pipeline.boundaries=[10]"],
        "boundary 10 is above the last of 10 layers; use one below 10",
    );
}

#[test]
fn a_cut_by_hand() {
    let settings = load(None, &["pipeline.layout=E A*3 | (A A)*2 A L"]).expect("a layout of the sample");
    let found = (settings.pipeline.partition, settings.pipeline.boundaries);
    assert_eq!(found, (PartitionChoice::Explicit, Some(vec![4])));
    let refuse = |layout: &str, column: usize, message: &str| {
        let set = format!("pipeline.layout={layout}");
        let first = format!("--set {set}: column {column}: {message}");
        let caret = format!("  {}^", " ".repeat(column - 1));
        check_set(&[&set], &[&first, &format!("  {layout}"), &caret]);
    };
    refuse("E A*4 | | A*4 L", 9, "this stage has no layer; remove the bar, or write a layer");
    refuse("E A*4 | A*3 L", 14, "the layout has 9 layers and the model 10; write one letter for each");
    refuse(
        "E A*4 | A*5 L",
        9,
        "layer 9 of the model is of the kind `head`, and `A` is of the kind `decoder` before it; write another letter",
    );
    check_set(
        &["pipeline.partition=even", "pipeline.layout=E A*4 | A*4 L"],
        &[
            "--set pipeline.layout=E A*4 | A*4 L: `layout` is written beside `partition`, which says the same in another way",
        ],
    );
    check_set(
        &["pipeline.layout=E A*4 | A*3 | A L"],
        &["--set pipeline.layout=E A*4 | A*3 | A L: 2 boundaries do not make 2 stages; give 1 boundaries"],
    );
}

#[test]
fn the_model_from_a_folder() {
    let file = "[model]\nhidden_size = 8\n";
    assert!(load(Some(file), &["model.from=m"]).is_ok(), "an argument replaces the file's section");
    check(
        "[model]\nfrom = \"m\"\nhidden_size = 8\n",
        &[
            "a.toml:3:15: `hidden_size` is written beside `from`, and with `from` the model follows from its config.json",
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
fn documents_need_their_beginnings() {
    check_set(&["data.packed=true"], &["--set data.packed=true: `packed` has no effect without `bos_id`"]);
    check_set(
        &["data.bos_id=0", "data.restart_positions=true"],
        &["--set data.restart_positions=true: `restart_positions` has no effect without `packed`"],
    );
    assert!(load(None, &["data.bos_id=0", "data.packed=true", "data.restart_positions=true"]).is_ok());
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
fn sizes_beside_a_schedule_from_a_file() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let schedule = folder.path().join("s.csv");
    std::fs::write(&schedule, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").expect("a file");
    let schedule = schedule.display();
    let check_both = |sizes: &str, argument: &str, problems: &[&str]| {
        let file = format!("[pipeline]\nschedule = \"{schedule}\"\n{sizes}");
        let arguments: &[&str] = if argument.is_empty() { &[] } else { &[argument] };
        let found = load(Some(&file), arguments).err().unwrap_or_default();
        assert_eq!(found.lines().collect::<Vec<_>>(), problems);
    };
    check_both("ranks = 2\nstages_per_rank = 1\nmicrobatches = 2", "", &[]);
    check_both("", "", &[]);
    check_both(
        "ranks = 3\nmicrobatches = 8",
        "",
        &[
            &format!("a.toml:3:9: `ranks` is 3, and the schedule in {schedule} has 2"),
            &format!("a.toml:4:16: `microbatches` is 8, and the schedule in {schedule} has 2"),
        ],
    );
    check_both(
        "",
        "pipeline.stages_per_rank=2",
        &[&format!(
            "--set pipeline.stages_per_rank=2: `stages_per_rank` is 2, and the schedule in {schedule} has 1"
        )],
    );
    check_both("microbatches = 4", "mesh.data_parallel=2", &[]);
    let argument = format!("pipeline.schedule={schedule}");
    assert!(
        load(Some("[pipeline]\nranks = 3"), &[&argument]).is_ok(),
        "an argument replaces the file's sizes"
    );
}

#[test]
fn a_file_that_cannot_be_read() {
    let surroundings = Surroundings { working_folder: "/".into(), variable: |_| None };
    let error =
        Settings::load(Some(Path::new("no-such.toml")), &[], &surroundings).expect_err("there is no file");
    assert_eq!(error.to_string(), "no-such.toml: cannot read the configuration");
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn what_is_recomputed_is_a_word_or_a_list_of_stages() {
    let found = |set: &str| load(None, &[set]).map(|settings| settings.pipeline.recompute.to_string());
    assert_eq!(found("pipeline.ranks=2"), Ok("none".to_owned()));
    for (set, expected) in [("stage", "stage"), ("\"block\"", "block"), ("[1, 0]", "0,1")] {
        assert_eq!(found(&format!("pipeline.recompute={set}")).as_deref(), Ok(expected));
    }
    for (set, expected) in [
        ("[0, 2]", "`recompute` is 2"),
        ("[-1]", "`recompute`"),
        ("stages", "where none, stage, block is expected"),
        ("true", "a word, or a list of whole numbers"),
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

#[test]
fn settings_of_generators_are_for_schedules_that_have_them() {
    let refuse = |arguments: &[&str], place: &str, message: &str| {
        let found = load(None, arguments).expect_err("it is refused");
        assert!(found.starts_with(&format!("--set {place}: {message}")), "{found}");
    };
    for (set, setting) in [
        ("pipeline.group_size=2", "group"),
        ("pipeline.wide_warmup=true", "wide_warmup"),
        ("pipeline.memory_limit=2", "memory_limit"),
        ("pipeline.costs=F=2", "costs"),
    ] {
        refuse(&[set], set, &format!("`1f1b` has no setting `{setting}`; leave it out"));
        let key = set.split(['.', '=']).nth(1).expect("a key");
        let without = format!("`{key}` has no effect without a schedule by name");
        refuse(&["pipeline.schedule=auto", set], set, &without);
    }
    let greedy = "pipeline.schedule=zb-greedy";
    refuse(&[greedy, "pipeline.costs=G=1"], "pipeline.costs=G=1", "");
    refuse(&[greedy, "pipeline.memory_limit=[1, 2, 3]"], "pipeline.memory_limit=[1, 2, 3]", "");
    refuse(
        &[greedy, "pipeline.memory_limit=0"],
        "pipeline.memory_limit=0",
        "`memory_limit` is 0, where a whole number from 1 to 2147483647 is expected",
    );
    let grouped = "pipeline.schedule=group-interleaved";
    refuse(&[grouped, "pipeline.ranks=4", "pipeline.group_size=1"], "pipeline.group_size=1", "");
    let generated = |set: &[&str]| match load_all(None, set).expect("sound arguments").schedule {
        FoundSchedule::Generated(schedule) => schedule,
        other => panic!("{other:?}"),
    };
    let four = ["pipeline.ranks=4", "pipeline.microbatches=8", "model.num_hidden_layers=8"];
    let small = generated(&[&[grouped, "pipeline.group_size=2"], &four[..]].concat());
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, group: Some(2), ..ScheduleSpec::default() };
    assert_eq!(Ok(small), generate("group-interleaved", &spec));
    let costs = "pipeline.costs=F=1,I=1,W=3";
    let limited = generated(&[&[greedy, "pipeline.memory_limit=[4, 3, 2, 2]", costs], &four[..]].concat());
    let memory_limit = Some(PerStage::Each(vec![4, 3, 2, 2]));
    let costs = Some("F=1,I=1,W=3".parse().expect("costs"));
    let spec = ScheduleSpec { group: None, memory_limit, costs, ..spec };
    assert_eq!(Ok(limited), generate("zb-greedy", &spec));
    let wide = generated(
        &[&["pipeline.schedule=interleaved-zb-h1", "pipeline.wide_warmup=true"], &four[..]].concat(),
    );
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, wide_warmup: true, ..ScheduleSpec::default() };
    assert_eq!(Ok(wide), generate("interleaved-zb-h1", &spec));
}
