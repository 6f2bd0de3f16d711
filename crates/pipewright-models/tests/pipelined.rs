//! The same small Llama as in `golden.rs`, trained by PyTorch, retraced by the pipeline: every number of ranks and
//! microbatches under every schedule, within tolerance of PyTorch and bit-identical to one rank.

use std::path::Path;
use std::sync::OnceLock;

use burn::tensor::Device;
use pipewright::data::{DataConfig, Tokenizer};
use pipewright::learning_rate::{Decay, LearningRate};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::Stage;
use pipewright::trainer::Trainer;
use pipewright::transport::World;
use pipewright_models::hf::HfError;
use pipewright_models::{ModelConfig, ModelFamily, cross_entropy, hf};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{
    Level, LowerConfig, Method, ScheduleSpec, StageIndex, ValidatedProgram, generate, lower, partition,
    validate,
};
use serde::Deserialize;

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tiny");
const SEQ_LEN: usize = 64;
const BATCH: usize = 8;
const STEPS: usize = 12;

#[derive(Deserialize)]
struct Expected {
    expected: Vec<Step>,
}

/// What a step shows.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
struct Step {
    loss: f64,
    grad_norm: f64,
}

fn expected() -> Vec<Step> {
    let text = std::fs::read_to_string(format!("{DIR}/expected.json")).expect("the file is here");
    serde_json::from_str::<Expected>(&text).expect("it is JSON").expected
}

fn program(schedule: &str, ranks: u32, microbatches: u32) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("it lowers");
    validate(program, Level::Comms).expect("it is sound")
}

fn train(program: ValidatedProgram) -> Vec<Step> {
    let config = match hf::read_config(Path::new(DIR)) {
        Ok(ModelConfig::Llama(config)) => config,
        other => panic!("llama-tiny is a Llama, not {other:?}"),
    };
    let (ranks, count) = (program.ranks(), program.placement().stages());
    let stages = partition(&config.describe(SEQ_LEN).weights(), count, &Method::Optimal).expect("it divides");
    let make = move |stage: StageIndex| -> Result<Stage, HfError> {
        let device = Device::flex().autodiff();
        let module = hf::load_stage(Path::new(DIR), &config, stages.range(stage), &device)?;
        Ok(if stage.get() + 1 == count {
            Stage::with_loss(module, cross_entropy)
        } else {
            Stage::new(module)
        })
    };
    let adam = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 };
    let config =
        PipelineConfig { optimizer: Some(adam.init()), clip_norm: Some(1.0), ..PipelineConfig::default() };
    let world = World::local(ranks);
    let pipeline = Pipeline::launch(program, world, &config, make).expect("it starts");
    let data = DataConfig {
        path: vec![format!("{DIR}/tokens.jsonl")],
        tokenizer: Tokenizer::Bytes,
        seq_len: SEQ_LEN,
        shuffle: false,
        seed: 0,
    };
    let rows = data.open(256, BATCH).expect("the data is here");
    let rate = LearningRate { peak: 2e-3, decay: Decay::Constant, warmup_steps: 0, steps: STEPS as u64 };
    let mut trainer = Trainer::new(pipeline, rows, BATCH, rate);
    let step = |_| {
        let (metrics, _) = trainer.step().expect("a step");
        Step { loss: metrics.loss, grad_norm: metrics.grad_norm }
    };
    (0..STEPS).map(step).collect()
}

/// The runs of one rank, which those of more ranks with as many microbatches must equal.
fn one_rank(microbatches: u32) -> &'static [Step] {
    static RUNS: [OnceLock<Vec<Step>>; 4] = [const { OnceLock::new() }; 4];
    RUNS[microbatches.ilog2() as usize].get_or_init(|| train(program("gpipe", 1, microbatches)))
}

fn check(schedule: &str, ranks: u32, microbatches: u32) {
    let run = train(program(schedule, ranks, microbatches));
    check_tolerance(&run);
    assert_eq!(run, one_rank(microbatches), "the bits of one rank");
}

/// As [`check`], for a schedule whose stages visit their microbatches in another order than 0, 1, 2 and so on.
fn check_out_of_order(schedule: &str, ranks: u32, microbatches: u32) {
    let run = train(program(schedule, ranks, microbatches));
    check_tolerance(&run);
    for (found, expected) in run.iter().zip(one_rank(microbatches)) {
        assert!(
            (found.loss - expected.loss).abs() <= 1e-6 * expected.loss,
            "{} {}",
            found.loss,
            expected.loss
        );
    }
}

fn check_tolerance(run: &[Step]) {
    for (step, (found, expected)) in run.iter().zip(expected()).enumerate() {
        let close =
            |found: f64, expected: f64, tolerance: f64| ((found - expected) / expected).abs() <= tolerance;
        assert!(
            close(found.loss, expected.loss, 5e-6),
            "step {step}: loss {} for {}",
            found.loss,
            expected.loss
        );
        let (norm, expected) = (found.grad_norm, expected.grad_norm);
        assert!(close(norm, expected, 5e-5), "step {step}: gradient norm {norm} for {expected}");
    }
}

macro_rules! cases {
    ($($name:ident: $schedule:literal, $ranks:literal, $microbatches:literal;)*) => {$(
        #[test]
        fn $name() {
            check($schedule, $ranks, $microbatches);
        }
    )*};
}

// A pipeline is filled by no fewer microbatches than it has stages.
cases! {
    gpipe_1_rank_1_microbatch: "gpipe", 1, 1;
    gpipe_1_rank_2_microbatches: "gpipe", 1, 2;
    gpipe_1_rank_4_microbatches: "gpipe", 1, 4;
    gpipe_1_rank_8_microbatches: "gpipe", 1, 8;
    gpipe_2_ranks_2_microbatches: "gpipe", 2, 2;
    gpipe_2_ranks_4_microbatches: "gpipe", 2, 4;
    gpipe_2_ranks_8_microbatches: "gpipe", 2, 8;
    gpipe_4_ranks_4_microbatches: "gpipe", 4, 4;
    gpipe_4_ranks_8_microbatches: "gpipe", 4, 8;
    gpipe_8_ranks_8_microbatches: "gpipe", 8, 8;
    one_f_one_b_1_rank_1_microbatch: "1f1b", 1, 1;
    one_f_one_b_1_rank_2_microbatches: "1f1b", 1, 2;
    one_f_one_b_1_rank_4_microbatches: "1f1b", 1, 4;
    one_f_one_b_1_rank_8_microbatches: "1f1b", 1, 8;
    one_f_one_b_2_ranks_2_microbatches: "1f1b", 2, 2;
    one_f_one_b_2_ranks_4_microbatches: "1f1b", 2, 4;
    one_f_one_b_2_ranks_8_microbatches: "1f1b", 2, 8;
    one_f_one_b_4_ranks_4_microbatches: "1f1b", 4, 4;
    one_f_one_b_4_ranks_8_microbatches: "1f1b", 4, 8;
    one_f_one_b_8_ranks_8_microbatches: "1f1b", 8, 8;
}

/// Every schedule of the catalogue that trains, so that one which is added is tested too.
#[test]
fn every_schedule_retraces_the_reference() {
    for generator in catalogue().iter().filter(|generator| generator.name != "forwardonly") {
        match generator.name {
            "loopedbfs" => check_out_of_order(generator.name, 2, 8),
            name => check(name, 2, 8),
        }
    }
}

#[test]
fn the_turns_and_splits_of_more_ranks_retrace_it_too() {
    for schedule in ["zbvzerobubble", "dualpipev", "v-min", "interleavedzerobubble", "hanayo"] {
        check(schedule, 3, 8);
    }
    check("zb-h2", 4, 8);
}
