//! Tests that the configurations in `tests/processors` have the same bits on unlike processors: here, and in processes that
//! do not use some instructions of this processor. If the variable [`OTHER_BUILD`] has the command that runs a build for another
//! processor, in words between spaces, that build takes the place of these processes. `.ci/processors` sets it to emulators.
//!
//! Programs that are built with the tests of the workspace have the feature `testing`, which reads [`HIDDEN`].

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use pipewright_run::fingerprints::fingerprints;

use crate::run::{Run, finished, hashes_of};

const OTHER_BUILD: &str = "PIPEWRIGHT_OTHER_BUILD";
const HIDDEN: &str = "PIPEWRIGHT_HIDE_INSTRUCTIONS";

/// The steps of each configuration.
const STEPS: usize = 3;

/// The folder of the run on this processor.
const HERE: &str = "here";

const CONFIGURATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/processors");

/// Turns off the C library's functions for AVX2, AVX-512 and fused multiplications, under the names of old and new versions.
const NO_VECTORS: &str =
    "glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-FMA4,-FMA4_Usable,-AVX512F,-AVX512F_Usable";

/// A process that computes as another processor does.
struct Processor {
    name: String,
    /// The words of the command that runs the program.
    command: Vec<String>,
    variables: Vec<(&'static str, &'static str)>,
}

impl Processor {
    fn this() -> Self {
        let program = assert_cmd::cargo::cargo_bin!("pipewright").display().to_string();
        Self { name: HERE.to_owned(), command: vec![program], variables: Vec::new() }
    }

    /// Returns this processor without some instructions.
    fn without(hidden: &'static str, name: &str) -> Self {
        Self { name: name.to_owned(), variables: vec![(HIDDEN, hidden)], ..Self::this() }
    }

    fn others() -> Vec<Self> {
        if let Ok(command) = std::env::var(OTHER_BUILD) {
            let command = command.split_whitespace().map(str::to_owned).collect();
            return vec![Self { name: "other-build".to_owned(), command, variables: Vec::new() }];
        }
        let mut portable = Self::without("vectors", "without-vectors");
        // The C library then chooses its functions for a processor without them, too.
        portable.variables.push(("GLIBC_TUNABLES", NO_VECTORS));
        vec![Self::without("AVX-512", "without-avx512"), portable]
    }

    /// Runs a command with overrides in the folder of a test. Returns its standard output.
    fn run(&self, folder: &Run, arguments: &[&str], set: &[&str]) -> String {
        let (program, first) = self.command.split_first().expect("a command has a word");
        let mut command = Command::new(program);
        command.current_dir(folder.root()).stdin(Stdio::null()).args(first).args(arguments);
        command.args(set.iter().flat_map(|set| ["--set", *set])).envs(self.variables.iter().copied());
        let (code, out, said) = finished(&mut command);
        assert_eq!(code, Some(0), "{arguments:?} {set:?} on {}: {said}", self.name);
        out
    }

    /// Trains with a configuration, into the folder `out`.
    fn train(&self, folder: &Run, name: &str, out: &str, set: &[&str]) {
        let config = Path::new(CONFIGURATIONS).join(name).with_extension("toml").display().to_string();
        // Emulated processors are slow.
        let own = [&*format!("run.out={out}"), "run.deadline_seconds=600"];
        self.run(folder, &["train", &config], &[&own, set].concat());
    }
}

/// Returns the exact loss and gradient norm of each step.
fn figures(folder: &Run, out: &str) -> Vec<[String; 2]> {
    let steps = folder.metrics_in(out).into_iter().filter(|line| line.get("event").is_none());
    steps.map(|step| ["loss", "grad_norm"].map(|key| step[key].to_string())).collect()
}

/// Returns the hashes of the files of the last checkpoint. They also have what is not trained, and so has no fingerprint.
fn last_checkpoint(folder: &Run, out: &str) -> Vec<(String, String)> {
    hashes_of(&folder.path(out).join("checkpoints").join(format!("step-{STEPS:08}")))
}

/// Checks that a run has the fingerprints, losses and norms of the run in [`HERE`] in all steps, and its last checkpoint.
#[track_caller]
fn assert_equal(folder: &Run, out: &str, what: &str) {
    let (code, _, said) = folder.call(&["fingerprint", HERE, out], &[]);
    assert_eq!(code, Some(0), "{what}, {out}: {said}");
    assert_eq!(fingerprints(&folder.path(out)).expect("the file").len(), STEPS, "{what}, {out}");
    assert_eq!(figures(folder, out), figures(folder, HERE), "{what}, {out}");
    assert_eq!(last_checkpoint(folder, out), last_checkpoint(folder, HERE), "{what}, {out}");
}

/// Trains with a configuration here and on all other processors.
fn check(name: &str) {
    let folder = Run::empty();
    Processor::this().train(&folder, name, HERE, &[]);
    for other in Processor::others() {
        other.train(&folder, name, &other.name, &[]);
        assert_equal(&folder, &other.name, name);
    }
}

/// Begins a run on one processor and continues it on another, in both directions.
fn check_resumed(name: &str) {
    let folder = Run::empty();
    let this = Processor::this();
    this.train(&folder, name, HERE, &[]);
    for other in Processor::others() {
        for (first, then) in [(&this, &other), (&other, &this)] {
            let out = format!("{}-{}", first.name, then.name);
            first.train(&folder, name, &out, &["run.steps=1"]);
            then.run(&folder, &["resume", &out], &[&format!("run.steps={STEPS}")]);
            assert_equal(&folder, &out, name);
        }
    }
}

/// Computes a stage of a run again on another processor.
fn check_audited(name: &str, parameters: &str) {
    let folder = Run::empty();
    let this = Processor::this();
    for other in Processor::others() {
        for (first, then) in [(&this, &other), (&other, &this)] {
            let out = format!("{}-{}", first.name, then.name);
            first.train(&folder, name, &out, &["run.checkpoint_every=1"]);
            let found = then.run(&folder, &["audit", &out, "--step", "2", "--stage", "1"], &[]);
            assert_eq!(found, format!("step 2, stage 1: {parameters} as recorded\n"), "{name}, {out}");
        }
    }
}

macro_rules! configurations {
    ($($test:ident $name:literal)*) => {
        $(#[test]
        fn $test() {
            check($name);
        })*

        #[test]
        fn every_configuration_is_trained() {
            let files = fs::read_dir(CONFIGURATIONS).expect("the folder").map(|entry| entry.expect("an entry").path());
            let configurations = files.filter(|path| path.extension().is_some_and(|name| name == "toml"));
            let mut names: Vec<_> = configurations.map(|path| path.file_stem().expect("a name").to_owned()).collect();
            names.sort();
            assert_eq!(names, [$($name),*]);
        }
    };
}

configurations! {
    latent_attention_on_tensor_ranks "deepseek-v2"
    latent_attention_with_muon "deepseek-v3"
    adapters_with_norms_on_sharded_replicas "dora"
    windows_on_two_ranks "gemma2"
    sinks_and_experts "gpt-oss"
    mamba_and_attention "granite-hybrid"
    dense_layers "llama"
    adapters "lora"
    mamba_and_experts_on_two_ranks "nemotron-h"
    experts_of_two_replicas "qwen3-moe"
    linear_attention "qwen3-next"
    layer_norms "starcoder2"
}

#[test]
fn runs_continue_on_another_processor() {
    check_resumed("nemotron-h");
}

#[test]
fn runs_in_bfloat16_continue_on_another_processor() {
    check_resumed("deepseek-v2");
}

#[test]
fn audits_on_another_processor_raise_no_alarm() {
    check_audited("gemma2", "11 parameters");
}
