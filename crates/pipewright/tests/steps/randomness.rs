//! A model with dropout has the same losses and gradients for every cut, every schedule, and after a resume.

use std::sync::Arc;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::nn::Dropout;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use crate::support::{
    LAYERS, Mlp, Step, batch, brought, config, ending_in_loss, path_in_model, program, split,
};

const MICROBATCHES: u32 = 8;

/// Layers of the tests' model, each followed by dropout.
#[derive(Module, Debug)]
struct Noisy {
    blocks: Vec<Mlp>,
    dropout: Dropout,
    #[module(skip)]
    first: usize,
}

impl Noisy {
    fn of_stage(stage: StageIndex, stages: u32) -> Self {
        let count = LAYERS / stages as usize;
        let first = stage.index() * count;
        let blocks = (first..first + count).map(|layer| Mlp::new(layer, 1)).collect();
        Self { blocks, dropout: Dropout::new(0.3), first }
    }
}

impl StageModule for Noisy {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        (self.first..).zip(&self.blocks).fold(input, |x, (layer, block)| {
            let stream = context.random(&format!("blocks.{layer}.dropout"));
            self.dropout.forward(block.forward(x, context), stream)
        })
    }

    fn parameter_path(&self, local: &str) -> String {
        path_in_model(local, self.first)
    }
}

fn launch(schedule: &str, ranks: u32, config: &PipelineConfig) -> Pipeline {
    launch_for(MICROBATCHES, schedule, ranks, config)
}

fn launch_for(microbatches: u32, schedule: &str, ranks: u32, config: &PipelineConfig) -> Pipeline {
    let program = program(schedule, ranks, microbatches / config.data_parallel);
    let stages = program.placement().stages();
    let make = move |stage: StageIndex| {
        let module = Noisy::of_stage(stage, stages);
        ending_in_loss(stage.get() + 1 == stages, module)
    };
    Pipeline::launch(program, World::local(ranks * config.data_parallel), config, make).expect("it starts")
}

fn step(pipeline: &mut Pipeline, number: u64) -> Step {
    let summary = pipeline.step_batch(brought(number, MICROBATCHES), 1e-2).expect("a step");
    (summary.losses, summary.gradient_norm)
}

fn run(schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    let mut pipeline = launch(schedule, ranks, config);
    (0..3).map(|number| step(&mut pipeline, number)).collect()
}

#[test]
fn every_cut_and_schedule_draws_the_same_masks() {
    let expected = run("1f1b", 1, &config());
    for (schedule, ranks) in [
        ("gpipe", 2),
        ("1f1b", 4),
        ("interleaved1f1b", 2),
        ("zbvzerobubble", 2),
        ("dualpipev", 4),
        ("zb-h1", 8),
    ] {
        assert_eq!(run(schedule, ranks, &config()), expected, "{schedule} on {ranks} ranks");
    }
}

#[test]
fn replicas_draw_the_masks_of_their_own_microbatches() {
    let expected = run("1f1b", 1, &config());
    let replicated = run("1f1b", 2, &PipelineConfig { data_parallel: 2, ..config() });
    assert_eq!(replicated[0].0, expected[0].0, "the first step's losses");
}

#[test]
fn steps_microbatches_and_seeds_differ() {
    let expected = run("1f1b", 1, &config());
    assert_ne!(run("1f1b", 1, &PipelineConfig { seed: 1, ..config() }), expected);
    let mut pipeline = launch("1f1b", 2, &config());
    let (first, second) = (step(&mut pipeline, 0), step(&mut pipeline, 0));
    assert_ne!(first.0, second.0, "the same batch in another step");
}

#[test]
fn an_evaluation_is_not_random() {
    let mut pipeline = launch("1f1b", 2, &config());
    let mut evaluate = || {
        let targets = Some(batch(1, MICROBATCHES));
        pipeline.eval(batch(0, MICROBATCHES), targets).expect("an evaluation").losses
    };
    assert_eq!(evaluate(), evaluate());
}

#[test]
fn a_failed_evaluation_uses_up_no_step() {
    let [mut undisturbed, mut pipeline] = [(); 2].map(|()| launch("1f1b", 2, &config()));
    assert_eq!(step(&mut pipeline, 0), step(&mut undisturbed, 0));
    let too_wide = Tensor::<2>::zeros([MICROBATCHES as usize, 99], &Device::flex());
    pipeline.eval(too_wide, None::<Tensor<2>>).expect_err("the first layer does not take it");
    assert_eq!(step(&mut pipeline, 1), step(&mut undisturbed, 1));
}

#[test]
fn accumulated_batches_draw_the_masks_of_one_batch() {
    let expected = run("1f1b", 1, &config());
    let half = MICROBATCHES / 2;
    let mut pipeline = launch_for(half, "1f1b", 2, &config());
    for (number, expected) in (0..).zip(expected) {
        let parts = |seed| split(batch(seed, MICROBATCHES), MICROBATCHES);
        let (mut inputs, mut targets) = (parts(number), parts(100 + number));
        let later = Batch::new(inputs.split_off(half as usize), targets.split_off(half as usize));
        let first = pipeline.accumulate(Batch::new(inputs, targets)).expect("a part");
        // An evaluation in between draws nothing.
        pipeline.eval(batch(0, half), Some(batch(1, half))).expect("an evaluation");
        let second = pipeline.step_batch(later, 1e-2).expect("a step");
        assert_eq!(([first.losses, second.losses].concat(), second.gradient_norm), expected);
    }
}

#[test]
fn a_resumed_run_draws_what_an_undisturbed_one_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut undisturbed = launch("1f1b", 2, &config());
    step(&mut undisturbed, 0);
    undisturbed.eval(batch(0, MICROBATCHES), Some(batch(1, MICROBATCHES))).expect("an evaluation");
    let state = TrainingState {
        step: 1,
        cursor: Default::default(),
        description: Default::default(),
        ranks: undisturbed.state().expect("a state"),
    };
    let owned = CheckpointFolder::own(folder.path()).expect("nobody else has it");
    let mut writer = CheckpointWriter::start(owned, 1, 1, Duration::from_secs(20)).expect("a writer");
    writer.save(state).expect("it is saved");
    writer.wait().expect("it is written");
    let checkpoint = Arc::new(CheckpointFolder::newest(folder.path()).expect("a checkpoint"));
    let mut resumed = launch("zbvzerobubble", 2, &config());
    resumed.restore(&checkpoint).expect("it is restored");
    assert_eq!(step(&mut resumed, 1), step(&mut undisturbed, 1));
}
