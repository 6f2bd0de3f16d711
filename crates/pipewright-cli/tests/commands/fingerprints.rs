//! Tests that the fingerprint of a state does not depend on the cut, the schedule, the mesh or the threads, and that the
//! command finds the first difference between two runs.

use pipewright_run::fingerprints::{StepFingerprint, fingerprints};

use super::experts;
use crate::run::Run;
use crate::scratch;

const EVERY: &str = "run.fingerprint_every=1";

pub(super) const ADAMW: &str = "[optimizer]\nlearning_rate = 0.01\n";

fn run() -> Run {
    Run::of(&(scratch::small(4, 4, 3) + ADAMW))
}

/// Trains in a folder of its own, and returns the fingerprints of all steps.
fn trained(set: &[&str]) -> Vec<StepFingerprint> {
    let run = run();
    run.train(&[&[EVERY], set].concat());
    fingerprints(&run.out()).expect("three steps")
}

#[test]
fn all_cuts_schedules_and_threads_have_one_fingerprint() {
    let looped = &["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved1f1b"][..];
    let gpipe = &["pipeline.ranks=3", "pipeline.schedule=gpipe", "pipeline.threads_per_rank=2"][..];
    let zero_bubble =
        &["pipeline.ranks=2", "pipeline.schedule=zbvzerobubble", "pipeline.recompute=stage"][..];
    for kind in [
        &[][..],
        &["model.tie_word_embeddings=true", "optimizer.name=muon"],
        &["run.accumulate=2", "run.precision=bf16"],
        &["optimizer.delay=1"],
    ] {
        let expected = trained(&[&["pipeline.ranks=1"], kind].concat());
        let steps: Vec<u64> = expected.iter().map(|found| found.step).collect();
        assert_eq!(steps, [1, 2, 3]);
        assert!(expected[0].root != expected[1].root && expected[1].root != expected[2].root);
        for cut in [looped, gpipe, zero_bubble] {
            assert_eq!(trained(&[cut, kind].concat()), expected, "{cut:?} {kind:?}");
        }
    }
}

#[test]
fn replicas_have_one_fingerprint_whole_and_sharded() {
    let replicas = &["mesh.data_parallel=2", "pipeline.ranks=2"][..];
    let expected = trained(replicas);
    let sharded = trained(&[replicas, &["mesh.data_parallel_mode=sharded"]].concat());
    assert_eq!(sharded, expected);
    assert!(expected.iter().all(|found| found.unlike_replicas.is_empty()));
}

#[test]
fn replicas_that_hold_experts_together_have_the_fingerprint_of_replicas_with_all() {
    let run = experts::folder();
    let trained = |experts: &str| {
        run.train(&[EVERY, "pipeline.ranks=2", "mesh.data_parallel=2", experts]);
        fingerprints(&run.out()).expect("three steps")
    };
    let (all, parts) = (trained("mesh.expert_parallel=1"), trained("mesh.expert_parallel=2"));
    assert_eq!((all.len(), parts.len()), (3, 3));
    for (all, parts) in all.iter().zip(&parts) {
        assert_eq!(all.parameters.differences(&parts.parameters), [""; 0]);
        assert_eq!(all.root, parts.root, "step {}", all.step);
    }
}

/// Plain descent by so little that no parameter changes.
#[test]
fn tensor_ranks_have_the_fingerprint_of_the_same_parameters() {
    let still = &["optimizer.name=sgd", "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0.0"][..];
    let expected = trained(still)[0].parameters.clone();
    let tensor = trained(&[still, &["mesh.tensor_parallel=2"]].concat())[0].parameters.clone();
    assert_eq!(tensor.differences(&expected), [""; 0]);
    assert_eq!(tensor.root(), expected.root());
}

#[test]
fn a_configuration_has_the_fingerprint_of_its_initial_state() {
    let run = run();
    let print = |set: &[&str]| run.succeed(&["fingerprint", "small.toml", "--layers"], set).0;
    let expected = print(&["pipeline.ranks=1"]);
    assert_eq!(expected.lines().count(), 1 + 7, "the root and seven layers: {expected}");
    for set in [
        &["pipeline.ranks=3", "pipeline.schedule=gpipe"][..],
        &["pipeline.ranks=2", "mesh.tensor_parallel=2", "mesh.data_parallel=2"],
        &["pipeline.ranks=2", "mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"],
        &["pipeline.ranks=2", "mesh.data_parallel=[2, 2]"],
        &["mesh.data_parallel=2", "mesh.batch_shares=[3, 1]", "pipeline.microbatch_size=2"],
    ] {
        assert_eq!(print(set), expected, "{set:?}");
    }
    let other = print(&["run.seed=7"]);
    assert!(expected.lines().zip(other.lines()).filter(|(own, other)| own == other).count() == 1, "{other}");
}

/// The model is wide and has few tokens, so that the copies are larger than the activations.
#[test]
fn check_counts_the_copies_from_which_a_fingerprint_is_made() {
    let run = run();
    let wide = ["model.hidden_size=64", "model.intermediate_size=128", "pipeline.microbatches=1"];
    let (plain, hashed) =
        ([&wide[..], &["pipeline.ranks=2"]].concat(), [&wide[..], &["pipeline.ranks=2", EVERY]].concat());
    let totals = |set: &[&str]| -> Vec<f64> {
        let ranks = run.estimates("small.toml", set).into_iter();
        ranks.map(|rank| rank["total"].as_f64().expect("bytes")).collect()
    };
    let (without, with) = (totals(&plain), totals(&hashed));
    // The command counts its memory, and a program of tests does not.
    run.succeed(&["train", "small.toml"], &hashed);
    for ((without, with), found) in without.iter().zip(&with).zip(run.peaks()) {
        assert!(*with > 1.5 * without, "{without} {with}");
        assert!((0.9..1.1).contains(&(found / with)), "{with}, found {found}");
    }
}

#[test]
fn the_command_finds_the_first_step_and_parameter_in_which_runs_differ() {
    let run = run();
    let train = |out: &str, set: &[&str]| {
        run.succeed(&["train", "small.toml"], &[&[EVERY, &format!("run.out={out}")], set].concat())
    };
    train("one", &[]);
    train("two", &["pipeline.ranks=2", "run.steps=2"]);
    let equal = "the fingerprints of all steps that both runs have are equal";
    run.prints(&["fingerprint", "one", "two"], &[], equal);
    // The third step has another learning rate.
    run.succeed(&["resume", "two"], &["run.steps=3", "optimizer.learning_rate=0.02"]);
    let said = "the runs differ first after step 3, in 39 parameters: `model.embed_tokens.weight`,";
    run.fail(3, &["fingerprint", "one", "two"], &[], &[said, "and step 2 is the last equal one"]);
    let out = run.print(&["fingerprint", "two"]);
    let steps: Vec<&str> = out.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(steps, ["1", "2", "3"], "a resumed run goes on: {out}");
    run.refuse(
        &["fingerprint", "two"],
        &["run.seed=7"],
        "two: `--set` changes a configuration, and this is a folder",
    );
    train("none", &["run.fingerprint_every=0"]);
    run.refuse(
        &["fingerprint", "none"],
        &[],
        "the run has no fingerprints: train it with run.fingerprint_every = 1",
    );
    train("other", &["run.fingerprint_every=5", "run.steps=5"]);
    run.refuse(&["fingerprint", "one", "other"], &[], "no step with a fingerprint in common");
    run.refuse(&["fingerprint", "text.txt"], &[], "text.txt");
    run.refuse(&["fingerprint", "elsewhere"], &[], "elsewhere");
}
