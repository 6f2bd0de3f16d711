//! Tests that an audit names the step and the stage of planted lies, and finds nothing in honest runs with other cuts,
//! schedules, replicas and threads.

use std::fs;
use std::path::Path;

use pipewright_run::audit::{Audit, audit};
use pipewright_run::fingerprints::{StepFingerprint, fingerprints};
use safetensors::SafeTensors;
use serde_json::Value;

use super::adapters;
use super::fingerprints::ADAMW;
use crate::run::Run;
use crate::scratch;

const STAGES: u32 = 3;
const STEPS: u64 = 4;

/// Settings of a run whose every step can be audited. Its data has a fixed order, and its noise depends on the seed.
const AUDITED: &[&str] = &[
    "run.fingerprint_every=1",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=9",
    "run.neftune_alpha=5.0",
    "data.shuffle=false",
];

fn run() -> Run {
    Run::of(&(scratch::small(4, 4, u32::try_from(STEPS).expect("few")) + ADAMW))
}

fn audited(run: &Path, step: u64, stage: u32) -> Audit {
    audit(run, step, stage).unwrap_or_else(|error| panic!("step {step}, stage {stage}: {}", error.text()))
}

/// Checks that all stages of all steps of a run are as recorded. Returns the number of audits.
fn check_honest(set: &[&str], stages: u32) -> u32 {
    check_honest_in(&run(), set, stages)
}

/// Like [`check_honest`], in a folder.
fn check_honest_in(run: &Run, set: &[&str], stages: u32) -> u32 {
    run.train(&[AUDITED, set].concat());
    for step in 1..=STEPS {
        for stage in 0..stages {
            let found = audited(&run.out(), step, stage);
            assert_eq!(found.findings, [], "{set:?}, step {step}, stage {stage}");
            assert!(found.parameters > 0, "{set:?}");
        }
    }
    u32::try_from(STEPS).expect("few") * stages
}

#[test]
fn honest_runs_with_other_cuts_and_schedules_raise_no_alarm() {
    let looped = &["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved1f1b"][..];
    let v = &["pipeline.ranks=2", "pipeline.schedule=zbvzerobubble"][..];
    let audits = [
        check_honest(&["pipeline.ranks=1"], 1),
        check_honest(&["pipeline.ranks=2", "pipeline.threads_per_rank=2"], 2),
        check_honest(&["pipeline.ranks=3", "pipeline.schedule=gpipe", "optimizer.clip_norm=0.5"], 3),
        check_honest(&["pipeline.ranks=3", "pipeline.boundaries=[2, 3]", "pipeline.partition=explicit"], 3),
        check_honest(looped, 4),
        check_honest(&[looped, &["model.tie_word_embeddings=true", "run.accumulate=2"]].concat(), 4),
        check_honest(&[v, &["run.precision=bf16", "optimizer.name=muon"]].concat(), 4),
        check_honest(&[v, &["run.precision=f16", "pipeline.recompute=block"]].concat(), 4),
        check_honest(&["pipeline.ranks=2", "mesh.data_parallel=2"], 2),
        check_honest(&["pipeline.ranks=2", "mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"], 2),
        check_honest(&["pipeline.ranks=2", "optimizer.delay=1", "run.rampup_steps=3", "run.accumulate=2"], 2),
    ];
    assert!(audits.iter().sum::<u32>() >= 100, "{audits:?}");
}

#[test]
fn honest_runs_of_ranks_that_compute_together_raise_no_alarm() {
    let tensor = &["pipeline.ranks=2", "mesh.tensor_parallel=2"][..];
    check_honest(tensor, 2);
    let shared = ["mesh.sequence_parallel=true", "run.precision=bf16", "run.accumulate=2"];
    check_honest(&[tensor, &shared].concat(), 2);
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "model.output_router_logits=true"];
    check_honest(&[tensor, &experts, &["mesh.whole_experts=true", "mesh.data_parallel=2"]].concat(), 2);
    let held = ["pipeline.ranks=2", "mesh.data_parallel=4", "mesh.expert_parallel=2"];
    check_honest(&[&experts[..], &held].concat(), 2);
    check_honest(
        &[&experts[..], &held, &["mesh.data_parallel_mode=sharded", "run.accumulate=2"]].concat(),
        2,
    );
}

#[test]
fn honest_runs_of_experts_and_of_adapters_raise_no_alarm() {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "model.output_router_logits=true"];
    check_honest(&[&["pipeline.ranks=2", "pipeline.schedule=zb-h1"], &experts[..]].concat(), 2);
    for stream in ["model.stream=false", "model.stream=true"] {
        check_honest_in(&adapters::folder(), &["pipeline.ranks=2", stream], 2);
    }
}

/// A run, and copies of it in which something is not as recorded.
struct Lies {
    run: Run,
    config: String,
}

/// The place where an audit must find a lie.
struct Planted {
    step: u64,
    stage: u32,
    /// Whether the lie is in one stage, so that the others are as recorded.
    is_of_one_stage: bool,
}

impl Lies {
    fn new() -> Self {
        let run = run();
        // All stages are in one file of a checkpoint.
        let cut = ["pipeline.ranks=1", "pipeline.stages_per_rank=3", "pipeline.schedule=interleaved1f1b"];
        let cut = [&cut[..], &["pipeline.partition=explicit", "pipeline.boundaries=[2, 4]"]].concat();
        run.train(&[AUDITED, &cut].concat());
        let config = run.read("out/config.toml");
        fs::rename(run.out(), run.path("honest")).expect("a folder");
        Self { run, config }
    }

    /// Starts from a copy of the honest run.
    fn restore(&self) {
        let _ = fs::remove_dir_all(self.run.out());
        copy(&self.run.path("honest"), &self.run.out());
    }

    /// Takes `step` again, with other settings, from its checkpoint, and claims the settings of the run.
    fn retake(&self, step: u64, set: &str) {
        let steps = format!("run.steps={step}");
        let run = pipewright_run::Run::reopen(self.checkpoint(step - 1)).set([set, &steps]);
        run.train().unwrap_or_else(|error| panic!("step {step}, {set}: {}", error.text()));
        self.run.write("out/config.toml", &self.config);
    }

    fn checkpoint(&self, step: u64) -> std::path::PathBuf {
        self.run.out().join("checkpoints").join(name_of(step))
    }

    /// Replaces the hashes that are recorded after a step.
    fn record(&self, step: u64, change: impl Fn(&mut StepFingerprint)) {
        let mut records = fingerprints(&self.run.out()).expect("fingerprints");
        for found in records.iter_mut().filter(|found| found.step == step) {
            change(found);
            found.root = found.parameters.root();
        }
        self.write_records(&records);
    }

    fn write_records(&self, records: &[StepFingerprint]) {
        let line = |found: &StepFingerprint| serde_json::to_string(found).expect("a line") + "\n";
        self.run.write("out/fingerprints.jsonl", records.iter().map(line).collect::<String>());
    }

    /// Changes a bit of a weight of a stage in the checkpoint of a step.
    fn change_weight(&self, step: u64, stage: u32) {
        self.run.change_checkpoint(&name_of(step), |bytes| {
            let file = SafeTensors::deserialize(bytes).expect("a sound file");
            let weight = file.tensor(weight_of(stage)).expect("the weight");
            let place = weight.data().as_ptr() as usize - bytes.as_ptr() as usize;
            // The update would round a change of the last bits away, and the state would be the honest one.
            bytes[place + 2] ^= 1;
        });
    }

    /// Takes `step` again at a changed weight, and puts the checkpoint back.
    fn retake_at_other_weight(&self, step: u64, stage: u32) {
        self.change_weight(step - 1, stage);
        self.retake(step, "run.seed=42");
        copy(&self.run.path("honest/checkpoints").join(name_of(step - 1)), &self.checkpoint(step - 1));
    }

    /// Takes `step` again with the rows of another one, and puts the checkpoint back.
    fn retake_with_other_rows(&self, step: u64) {
        let manifest = self.checkpoint(step - 1).join("manifest.json");
        let text = fs::read_to_string(&manifest).expect("a manifest");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let index = json["cursor"]["index"].as_u64().expect("a row");
        let moved = text.replace(&format!("\"index\": {index}"), &format!("\"index\": {}", index + 1));
        let (body, _) = moved.rsplit_once(",\n  \"hash\"").expect("the manifest's own hash");
        let hash = blake3::hash(body.as_bytes()).to_hex();
        fs::write(&manifest, format!("{body},\n  \"hash\": \"{hash}\"\n}}\n")).expect("a file");
        self.retake(step, "run.seed=42");
        fs::write(&manifest, text).expect("a file");
    }

    /// Checks that an audit names the step and the stage, and that the audits of what came before find nothing.
    fn check(&self, what: &str, planted: &Planted) {
        let &Planted { step, stage, is_of_one_stage } = planted;
        let found = audited(&self.run.out(), step, stage);
        let names =
            |finding: &pipewright_run::audit::Finding| (finding.step, finding.stage) == (step, Some(stage));
        assert!(found.findings.iter().any(names), "{what}, step {step}, stage {stage}: {:?}", found.findings);
        let first = found.findings.first().expect("a finding");
        assert_eq!(first.step, step, "{what}: {first}");
        if is_of_one_stage {
            let other = audited(&self.run.out(), step, (stage + 1) % STAGES);
            assert_eq!(other.findings, [], "{what}, step {step}");
        }
        if step > 1 {
            assert_eq!(audited(&self.run.out(), step - 1, stage).findings, [], "{what}, before step {step}");
        }
    }
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns a parameter of each stage.
fn weight_of(stage: u32) -> &'static str {
    ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
        [stage as usize]
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("a file");
        }
    }
}

#[test]
fn a_hundred_planted_lies_are_named_with_step_and_stage() {
    let lies = Lies::new();
    let mut planted = 0;
    let mut check = |what: &str, step, stage, is_of_one_stage, plant: &dyn Fn()| {
        lies.restore();
        plant();
        lies.check(what, &Planted { step, stage, is_of_one_stage });
        planted += 1;
    };
    for step in 1..=STEPS {
        for stage in 0..STAGES {
            let later = step > 1;
            for rate in ["0.0100001", "0.02", "0.005"] {
                let set = format!("optimizer.learning_rate={rate}");
                if later {
                    check("rate", step, stage, false, &|| lies.retake(step, &set));
                }
            }
            for seed in [1, 43, 7] {
                if later {
                    check("seed", step, stage, false, &|| lies.retake(step, &format!("run.seed={seed}")));
                }
            }
            if later {
                check("rows", step, stage, false, &|| lies.retake_with_other_rows(step));
                check("weight", step, stage, false, &|| lies.retake_at_other_weight(step, stage));
            }
            let honest = fingerprints(&lies.run.path("honest")).expect("fingerprints");
            let before = |step: u64| honest.iter().find(|found| found.step + 1 == step);
            if let Some(before) = before(step) {
                check("skipped step", step, stage, false, &|| {
                    lies.record(step, |found| found.parameters = before.parameters.clone());
                });
                check("late layer", step, stage, true, &|| {
                    lies.record(step, |found| late(found, before, weight_of(stage)));
                });
            }
            check("weight of a record", step, stage, true, &|| {
                let other = honest.iter().find(|found| found.step != step).expect("another step");
                lies.record(step, |found| late(found, other, weight_of(stage)));
            });
        }
    }
    assert!(planted >= 100, "{planted}");
}

/// Lets a parameter have the hash of another step.
fn late(found: &mut StepFingerprint, other: &StepFingerprint, path: &str) {
    let text = serde_json::to_value(&found.parameters).expect("a list");
    let hash = other.parameters.parameters().find(|(other, _)| *other == path).expect("a parameter").1;
    let mut pairs: Vec<(String, String)> = serde_json::from_value(text).expect("pairs");
    for pair in pairs.iter_mut().filter(|pair| pair.0 == path) {
        pair.1 = hash.to_string();
    }
    found.parameters = serde_json::from_value(serde_json::json!(pairs)).expect("a fingerprint");
}

#[test]
fn a_checkpoint_that_is_not_the_recorded_state_is_named_with_its_stage() {
    let lies = Lies::new();
    lies.restore();
    lies.change_weight(2, 1);
    for stage in 0..STAGES {
        let first = audited(&lies.run.out(), 3, stage).findings.swap_remove(0);
        assert_eq!((first.step, first.stage), (2, Some(1)), "{first}");
        let said = "its checkpoint is not the state of the fingerprint: 1 of 18 parameters differ, the first `model.layers.1.mlp.up_proj";
        assert!(first.sentence.starts_with(said), "{first}");
    }
    lies.restore();
    lies.retake_with_other_rows(3);
    lies.retake(4, "run.seed=42");
    // The checkpoint after the lie continues after one row more.
    let first = audited(&lies.run.out(), 4, 0).findings.swap_remove(0);
    assert_eq!((first.step, first.stage), (4, None), "{first}");
    assert!(
        first.sentence.contains("continues after 13 rows of the data, and the configuration takes 12 rows"),
        "{first}"
    );
}

#[test]
fn the_command_ends_with_the_code_of_its_finding() {
    let lies = Lies::new();
    lies.restore();
    let audit = |step, stage| ["audit", "out", "--step", step, "--stage", stage];
    lies.run.prints(&audit("1", "0"), &[], "step 1, stage 0: 10 parameters as recorded\n");
    lies.retake(3, "optimizer.learning_rate=0.02");
    lies.run.fail(
        3,
        &audit("3", "1"),
        &[],
        &["step 3, stage 1: 18 of 18 parameters differ, the first `model.layers.1."],
    );
    let refuse = |arguments: &[&str], said| lies.run.refuse(arguments, &[], said);
    refuse(&audit("2", "3"), "stage 3 cannot be audited: the run has 3 stages");
    refuse(&audit("9", "0"), "the run has no fingerprint of step 9; it has those of steps 1, 2, 3");
    fs::remove_dir_all(lies.checkpoint(1)).expect("a folder");
    refuse(
        &audit("2", "0"),
        "an audit of step 2 needs the checkpoint of step 1, which the run does not have: audit one of the steps 1, 3, or train with \
         another run.checkpoint_every",
    );
    lies.record(3, |found| found.uses_amx = Some(true));
    refuse(&audit("3", "0"), "the run added the products of step 3 with AMX");
    let text = lies.run.read("out/fingerprints.jsonl");
    let root = fingerprints(&lies.run.out()).expect("fingerprints")[0].root.to_string();
    lies.run.write(
        "out/fingerprints.jsonl",
        text.replace(&format!("\"root\":\"{root}\""), "\"root\":\"0123456789abcdef\""),
    );
    refuse(&audit("1", "0"), "the root of step 1 is not the hash of its parameters");
}

#[test]
fn the_command_says_what_it_cannot_compare() {
    let lies = Lies::new();
    lies.restore();
    let audit = ["audit", "out", "--step", "3", "--stage", "0"];
    lies.run.prints(&audit, &[], "step 3, stage 0: 10 parameters as recorded\n");
    let records = fingerprints(&lies.run.out()).expect("fingerprints");
    lies.write_records(&records[2..3]);
    let checkpoint = "; not compared: the checkpoint of step 2 (the step has no fingerprint)";
    lies.run.prints(&audit, &[], &format!("10 parameters as recorded{checkpoint}\n"));
    lies.run.write("out/metrics.jsonl", lies.run.read("out/metrics.jsonl").replace("grad_norm", "other"));
    let norm = ", the gradient norm (the metrics do not have it)";
    lies.run.prints(&audit, &[], &format!("10 parameters as recorded{checkpoint}{norm}\n"));
    fs::remove_dir_all(lies.checkpoint(2)).expect("a folder");
    lies.run.refuse(
        &audit,
        &[],
        "step 2, which the run does not have: train with another run.checkpoint_every",
    );
}

/// Sums in half precision depend on the order, and sums of slices on the slices.
#[test]
fn honest_runs_that_add_in_another_order_raise_no_alarm() {
    let run = run();
    run.write("reversed.csv", "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n");
    check_honest_in(&run, &["pipeline.ranks=1", "pipeline.schedule=reversed.csv", "run.precision=bf16"], 1);
    let looped = ["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.schedule=looped-bfs"];
    check_honest(&[&looped[..], &["run.precision=bf16"]].concat(), 4);
    let slices = ["pipeline.ranks=2", "pipeline.schedule=seq1f1b", "pipeline.slices=2"];
    check_honest(&slices, 2);
    // The second stage is frozen.
    let first = ["adapter.kind=lora", r#"adapter.targets=["*.layers.0.*"]"#];
    check_honest_in(&adapters::folder_without_path(), &[&slices[..], &first].concat(), 1);
}
