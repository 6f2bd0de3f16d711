//! Tests of runs that a signal stops: during an evaluation, while texts are continued, and during a step. The signal
//! is named at once, the run ends soon, and what it has left out is made up for when it resumes.

use std::fs::{self, File};
use std::time::Duration;

use rustix::process::Signal;

use crate::run::{self, Run};

/// A run whose evaluation takes a long time.
struct LongEvaluation {
    run: Run,
    /// The setting that makes the evaluation long, and the one that makes it short.
    long: String,
    short: &'static str,
    set: Vec<String>,
}

impl LongEvaluation {
    /// Returns a run of so many steps with an evaluation of many batches after each step.
    fn of_batches(steps: u64) -> Self {
        Self::new(steps, "run.eval_batches=50000".to_owned(), "run.eval_batches=2")
    }

    /// Returns a run with an evaluation after each step in which many texts are continued.
    fn of_samples(steps: u64) -> Self {
        let prompts = vec!["\"the\""; 20_000].join(",");
        let short = "run.sample_prompts=[\"the\"]";
        let mut evaluation = Self::new(steps, format!("run.sample_prompts=[{prompts}]"), short);
        evaluation.set.push("run.eval_batches=2".to_owned());
        evaluation
    }

    fn new(steps: u64, long: String, short: &'static str) -> Self {
        let run = Run::new();
        let held = "a slow green turtle walks under the fence and into the pond ".repeat(30_000);
        run.write("held.txt", held);
        let steps = format!("run.steps={steps}");
        let common = ["data.validation=held.txt", "run.eval_every=1", "optimizer.schedule=constant", &steps];
        Self { run, long, short, set: common.map(str::to_owned).into() }
    }

    fn with(mut self, set: &[&str]) -> Self {
        self.set.extend(set.iter().map(|set| (*set).to_owned()));
        self
    }

    /// Runs a command, sends it a signal while its first evaluation is under way, and returns what it has said.
    fn stop(&self, command: &str, of: &str) -> String {
        let set: Vec<&str> = self.set.iter().map(String::as_str).chain([self.long.as_str()]).collect();
        let mut child = self.run.start_saying(command, &[of], &set);
        self.run.wait_for_metrics_file();
        // The run is in the evaluation after its first step, or on the way to it.
        self.run.wait_until(|| self.run.said().contains("  device "));
        std::thread::sleep(Duration::from_millis(300));
        run::signal(&child, Signal::TERM);
        let status = child.wait().expect("the process is ours");
        assert_eq!(status.code(), Some(5), "{}", self.run.said());
        self.run.said()
    }

    /// Checks that the run ends at a signal without a part of its evaluation, also if it resumes, and that it then
    /// ends as an undisturbed run does.
    fn check(&self) {
        for (command, of) in [("train", "small.toml"), ("resume", "out")] {
            let said = self.stop(command, of);
            assert_eq!(said.matches("SIGTERM has arrived: ").count(), 1, "{said}");
            assert!(self.run.figures().len() <= 1, "{said}");
            let metrics = fs::read_to_string(self.run.path("out/metrics.jsonl")).expect("metrics");
            assert!(!metrics.contains("validation") && !metrics.contains("samples"), "{metrics}");
        }
        let short: Vec<&str> = self.set.iter().map(String::as_str).chain([self.short]).collect();
        self.run.succeed(&["resume", "out"], &short);
        let whole = Run::new();
        fs::copy(self.run.path("held.txt"), whole.path("held.txt")).expect("a file");
        whole.train(&short);
        assert_eq!(self.run.figures(), whole.figures());
        let evaluations = |run: &Run| {
            let members =
                |step: &serde_json::Value| [&step["validation_loss"], &step["samples"]].map(Clone::clone);
            run.metrics().iter().map(members).collect::<Vec<_>>()
        };
        assert_eq!(evaluations(&self.run), evaluations(&whole));
        assert_eq!(self.run.hashes(), whole.hashes());
        self.run.says(&["resume", "out"], &[], "the run is finished");
    }
}

#[test]
fn a_signal_ends_an_evaluation_before_its_next_batch() {
    LongEvaluation::of_batches(3).check();
}

#[test]
fn a_signal_in_the_last_evaluation_leaves_it_to_the_resumed_run() {
    LongEvaluation::of_batches(1).with(&["pipeline.ranks=2"]).check();
}

#[test]
fn a_signal_ends_the_continuation_of_texts_before_the_next_token() {
    LongEvaluation::of_samples(2).check();
}

/// Trains two ranks whose every action takes a while, and sends a signal when a line of step 2 is written. Returns
/// the number of steps that the run has taken.
fn steps_until_end(set: &[&str]) -> usize {
    let run = Run::new();
    let mut command = run.binary();
    command.args(["train", "small.toml"]).env("PIPEWRIGHT_FAULT", "slow:0:1:1000");
    let set = set.iter().chain(&["pipeline.ranks=2", "pipeline.microbatches=16"]);
    command.args(set.flat_map(|set| ["--set", *set]));
    let said = File::create(run.path("said")).expect("the scratch folder takes files");
    let mut child = command.stderr(said).spawn().expect("the binary starts");
    run.wait_for_step(2);
    run::signal(&child, Signal::INT);
    assert_eq!(child.wait().expect("the process is ours").code(), Some(5), "{}", run.said());
    run.figures().len()
}

#[test]
fn a_signal_lets_only_the_step_under_way_end() {
    assert_eq!(steps_until_end(&[]), 3);
    assert_eq!(steps_until_end(&["run.accumulate=2"]), 3);
    assert_eq!(steps_until_end(&["run.verify=on-suspicion"]), 3);
}
