//! Tests of the configuration as a whole: the template, unknown names, many problems at once.

use std::path::Path;

use pipewright::loss_scale::LossScaling;
use pipewright_schedule::lower::UnshardConfig;

use super::{check, check_set, load};
use crate::settings::{Base, Settings, Surroundings, template};

#[test]
fn the_template_holds_the_defaults() {
    let defaults = load(Some(""), &[]).expect("the defaults are sound");
    assert_eq!((defaults.run.loss_scale, defaults.run.loss_scale_interval), {
        let scaling = LossScaling::default();
        (scaling.initial as u64, scaling.interval)
    });
    assert_eq!(defaults.mesh.unshard_window, UnshardConfig::default().window.get());
    assert_eq!(load(Some(&template()), &[]), Ok(defaults));
}

#[test]
fn settings_survive_being_written_and_read() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let schedule = folder.path().join("a.csv");
    std::fs::write(&schedule, "0F0,0B0\n1F0,1B0\n").expect("it can be written");
    let schedule = format!("pipeline.schedule={}", schedule.display());
    let cases: [&[&str]; 21] = [
        &[],
        &["mesh.tensor_parallel=2", "mesh.sequence_parallel=true"],
        &["mesh.data_parallel=[2, 2]"],
        &["mesh.data_parallel=[4, 1]", "mesh.tensor_parallel=2", "mesh.whole_experts=true"],
        &["mesh.data_parallel=[1, 4]", "mesh.data_parallel_mode=sharded"],
        &["mesh.data_parallel_mode=sharded", "mesh.unshard_lookahead=[1, 2]", "mesh.reduce_wait=deferred"],
        &["mesh.unshard_lookahead=2", "mesh.reduce_wait=at-once"],
        &[
            "mesh.data_parallel=2",
            "mesh.data_parallel_mode=sharded",
            "mesh.keep_gathered=true",
            "run.accumulate=2",
        ],
        &["mesh.unshard_lookahead=auto"],
        &[
            "data.validation=[\"v/*.txt\"]",
            "run.eval_every=5",
            "run.patience=3",
            "optimizer.no_decay=[\"bias\"]",
        ],
        &["pipeline.schedule=group-interleaved", "pipeline.microbatches=6", "pipeline.group_size=1"],
        &["pipeline.schedule=zb-greedy", "pipeline.memory_limit=[2, 1]", "pipeline.costs=F=1,I=2,W=1"],
        &["pipeline.schedule=seq1f1b", "pipeline.slices=8"],
        &[
            "optimizer.name=muon",
            "optimizer.momentum=0.9",
            "optimizer.clip_value=0.5",
            "optimizer.post_validation=true",
            "optimizer.groups=[{ parameters = [\"norm\"], clip_norm = 1 }, { parameters = [\"a.*\"], learning_rate = 1e-5 }]",
        ],
        &[
            "data.validation=0.1",
            "data.bos_id=0",
            "data.packed=true",
            "run.eval_every=5",
            "run.eval_batches=2",
            "run.sample_prompts=[\"a \\\"b\", \"c\"]",
            "run.sample_tokens=3",
        ],
        &["data.mix=[{ path = [\"a.txt\", \"!b\"], weight = 3 }, { path = \"b.txt\", weight = 0.1 }]"],
        &[
            "data.long_records=skip",
            "data.bad_records=0",
            "data.chat_template_kwargs={ a = { b = [1, 2.5, true] }, c = \"d\" }",
        ],
        &["model.architecture=qwen2", "model.tie_word_embeddings=true"],
        &[
            "model.from=models/a",
            "data.path=[\"a b/*.jsonl\", \"!**/c/**\"]",
            "data.tokenizer=tokenizer.json",
        ],
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
fn a_file_that_cannot_be_read() {
    let surroundings = Surroundings { working_folder: "/".into(), variable: |_| None };
    let error = Settings::load(Base::File(Path::new("no-such.toml")), &[], &surroundings)
        .expect_err("there is no file");
    assert_eq!(error.to_string(), "no-such.toml: cannot read the configuration");
    assert!(std::error::Error::source(&error).is_some());
}
