//! Parameters that several stages share have one gradient sum and stay equal to the bit.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::nn::Linear;
use pipewright::pipeline::{NamedParameter, Pipeline, PipelineError, SeededPipeline};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::support::{
    Step, WIDTH, batch, config, ending_in_loss, lose_each, loss, numbers, program, program_of, split,
    take_steps,
};

/// `x + tanh(x w + b)` with a weight that all stages share and one bias per stage.
#[derive(Module, Debug)]
struct Sharing {
    layer: Linear,
    #[module(skip)]
    stage: StageIndex,
}

impl Sharing {
    fn new(stage: StageIndex) -> Self {
        let device = Device::flex().autodiff();
        let layer = Linear {
            weight: Param::from_data(numbers(7, [WIDTH, WIDTH]), &device),
            bias: Some(Param::from_data(numbers(100 + u64::from(stage.get()), [WIDTH]), &device)),
        };
        Self { layer, stage }
    }
}

impl StageModule for Sharing {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + self.layer.forward(input).tanh()
    }

    fn parameter_path(&self, local: &str) -> String {
        match local {
            "layer.weight" => "shared.weight".to_owned(),
            local => format!("stages.{}.{local}", self.stage),
        }
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec!["shared.weight".to_owned()]
    }
}

pub(super) fn stage(stage: StageIndex, stages: u32) -> Result<Stage, std::convert::Infallible> {
    let module = Sharing::new(stage);
    ending_in_loss(stage.get() + 1 == stages, module)
}

fn train(program: ValidatedProgram) -> (Vec<Step>, Vec<NamedParameter>) {
    let (ranks, stages, microbatches) =
        (program.ranks(), program.placement().stages(), program.microbatches());
    let make = move |index| stage(index, stages);
    let mut pipeline = Pipeline::launch(program, World::local(ranks), &config(), make).expect("it starts");
    let steps = take_steps(&mut pipeline, 0..4, microbatches);
    (steps, pipeline.parameters().expect("they are there"))
}

/// Four stages on one rank, in a V placement on two ranks, and on four ranks.
const ONE: &str = "0F0,1F0,2F0,3F0,3B0,2B0,1B0,0B0,0F1,1F1,2F1,3F1,3B1,2B1,1B1,0B1\n";
const V: &str = "0F0,,,3F0,3B0,0F1,,,3F1,3B1,,,0B0,,0B1\n,1F0,2F0,,,2B0,1F1,2F1,1B0,,2B1,1B1,,,\n";
const FOUR: &str = "0F0,,,,,,0F1,0B0,,,,,,0B1\n,1F0,,,,1F1,1B0,,,,,,1B1,\n,,2F0,,2F1,2B0,,,,,,2B1,,\n,,,3F0,3B0,3F1,,,,,3B1,,,\n";

#[test]
fn copies_stay_equal_and_the_cut_changes_no_bit() {
    let (expected, parameters) = train(program_of(ONE));
    assert_eq!(train(program_of(V)).0, expected);
    let (found, others) = train(program_of(FOUR));
    assert_eq!(found, expected);
    for parameters in [parameters, others] {
        let mut by_path: HashMap<String, Vec<TensorData>> = HashMap::new();
        for parameter in parameters {
            by_path.entry(parameter.path.to_string()).or_default().push(parameter.data);
        }
        let copies = &by_path["shared.weight"];
        assert_eq!(copies.len(), 4);
        assert!(copies.iter().all(|copy| *copy == copies[0]));
        assert_ne!(copies[0], numbers(7, [WIDTH, WIDTH]));
    }
}

/// A checkpoint has a shared parameter once, whichever ranks hold it, and each placement resumes from it.
#[test]
fn each_placement_resumes_from_the_state_of_another() {
    let placements = [ONE, V, FOUR].map(program_of);
    let launch = |program: &ValidatedProgram| {
        let make = |index| stage(index, 4);
        Pipeline::launch(program.clone(), World::local(program.ranks()), &config(), make).expect("it starts")
    };
    let steps = |pipeline: &mut Pipeline, steps: std::ops::Range<u64>| -> Vec<f64> {
        let step = |step| pipeline.step(batch(step, 2), batch(100 + step, 2), 1e-2).expect("a step").loss();
        steps.map(step).collect()
    };
    let expected = steps(&mut launch(&placements[0]), 0..5);
    for (index, program) in placements.iter().enumerate() {
        let mut before = launch(program);
        let mut losses = steps(&mut before, 0..2);
        let scratch = tempfile::tempdir().expect("a folder");
        let ranks = before.state().expect("a state");
        let state = TrainingState {
            step: 2,
            cursor: Cursor { epoch: 1, index: 2 },
            description: Default::default(),
            ranks,
        };
        let folder = CheckpointFolder::own(scratch.path()).expect("it is free");
        let mut writer = CheckpointWriter::start(folder, 1, 1, Duration::from_secs(20)).expect("it starts");
        writer.save(state).expect("it is saved");
        writer.wait().expect("it is written");
        drop(writer);
        let checkpoint = Arc::new(CheckpointFolder::newest(scratch.path()).expect("a checkpoint"));
        let mut after = launch(&placements[(index + 1) % 3]);
        after.restore(&checkpoint).expect("it is restored");
        losses.extend(steps(&mut after, 2..4));
        // The copies that a rank holds once are restored again.
        after.restore(&checkpoint).expect("it is restored");
        assert_eq!(steps(&mut after, 2..5), expected[2..], "into placement {index}");
        assert_eq!(losses, expected[..4], "from placement {index}");
    }
}

#[test]
fn a_report_names_the_rank_that_waits_for_a_lost_gradient() {
    let launch = || {
        SeededPipeline::new(program("gpipe", 2, 2), &config(), 0, |index| stage(index, 2)).expect("it starts")
    };
    let lost = lose_each(launch, || Batch::new(split(batch(0, 2), 2), split(batch(100, 2), 2)));
    assert!(lost.contains("the gradient of shared parameter 0 from stage 1"), "{lost}");
}

#[test]
fn a_report_names_the_rank_that_waits_for_a_lost_sum() {
    let launch = || {
        SeededPipeline::new(program("gpipe", 3, 3), &config(), 0, |index| stage(index, 3)).expect("it starts")
    };
    let lost = lose_each(launch, || Batch::new(split(batch(0, 3), 3), split(batch(100, 3), 3)));
    assert!(lost.contains("the sum of the gradients of shared parameter 0"), "{lost}");
}

#[test]
fn copies_of_different_shapes_are_named() {
    #[derive(Module, Debug)]
    struct Scale {
        weight: Param<Tensor<1>>,
    }
    impl StageModule for Scale {
        type Input = Tensor<2>;
        type Output = Tensor<2>;
        fn shared_parameters(&self) -> Vec<String> {
            vec!["weight".to_owned()]
        }
        fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
            input * self.weight.val().unsqueeze()
        }
    }
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let width = if stage.get() == 0 { WIDTH } else { 1 };
        let weight = Param::from_data(numbers(1, [width]), &Device::flex().autodiff());
        Ok(if stage.get() == 1 {
            Stage::with_loss(Scale { weight }, loss)
        } else {
            Stage::new(Scale { weight })
        })
    };
    let launched = Pipeline::launch(program("1f1b", 2, 2), World::local(2), &config(), make);
    let error = launched.err().expect("the shapes differ");
    let PipelineError::Step(step) = &error else { panic!("{error}") };
    let expected = "stages 0 and 1 share the parameter `weight`, but hold it with shapes";
    assert!(step.cause.to_string().starts_with(expected), "{error}");
}

/// A module whose two parameters have the same paths in every stage. A test may declare them as shared.
#[derive(Module, Debug)]
struct Unnamed {
    layer: Linear,
    #[module(skip)]
    shared: Vec<String>,
}

impl StageModule for Unnamed {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.layer.forward(input)
    }

    fn shared_parameters(&self) -> Vec<String> {
        self.shared.clone()
    }
}

fn unnamed(index: StageIndex, shared: &[&str]) -> Stage {
    let device = Device::flex().autodiff();
    let weight = Param::from_data(numbers(7, [WIDTH, WIDTH]), &device);
    let bias = Some(Param::from_data(numbers(8, [WIDTH]), &device));
    let shared = shared.iter().map(|&path| path.to_owned()).collect();
    let module = Unnamed { layer: Linear { weight, bias }, shared };
    if index.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) }
}

/// Returns the error of launching `program` with two stages that share `first` and `second`, on threads and
/// with a seed.
fn refused(program: &ValidatedProgram, first: &'static [&str], second: &'static [&str]) -> Option<String> {
    let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        Ok(unnamed(index, if index.get() == 0 { first } else { second }))
    };
    let launched = Pipeline::launch(program.clone(), World::local(program.ranks()), &config(), make);
    let seeded = SeededPipeline::new(program.clone(), &config(), 0, make).err();
    let refusal = launched.err().map(|error| {
        let PipelineError::Step(step) = &error else { panic!("{error}") };
        step.cause.to_string()
    });
    let PipelineError::Step(seeded) = seeded? else { panic!("both are refused") };
    assert_eq!(refusal, Some(seeded.cause.to_string()));
    refusal
}

#[test]
fn equal_paths_that_no_stage_declares_are_refused() {
    let one_rank = program_of("0F0,1F0,1B0,0B0\n");
    for program in [one_rank, program("1f1b", 2, 2)] {
        let refusal = refused(&program, &[], &[]).expect("both stages have the paths");
        let expected =
            "stages 0 and 1 each have a parameter `layer.bias`, and stage 0 does not declare it as shared: ";
        assert!(refusal.starts_with(expected), "{refusal}");
        for way_out in
            ["`StageModule::parameter_path`", "`Stage::with_prefix`", "`StageModule::shared_parameters`"]
        {
            assert!(refusal.contains(way_out), "{refusal}");
        }
        let refusal =
            refused(&program, &["layer.weight", "layer.bias"], &["layer.bias"]).expect("one does not");
        assert!(refusal.contains("`layer.weight`, and stage 1 does not declare it"), "{refusal}");
        assert_eq!(refused(&program, &["layer.weight", "layer.bias"], &["layer.weight", "layer.bias"]), None);
    }
}

#[test]
fn a_prefix_names_the_parameters_of_a_stage() {
    let make = |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        Ok(unnamed(index, &["layer.bias"]).with_prefix(&format!("blocks.{index}")))
    };
    let mut pipeline =
        Pipeline::launch(program("1f1b", 2, 2), World::local(2), &config(), make).expect("it starts");
    pipeline.step(batch(0, 2), batch(1, 2), 1e-2).expect("a step");
    let parameters = pipeline.parameters().expect("they are there");
    let paths: Vec<&str> = parameters.iter().map(|parameter| &*parameter.path).collect();
    assert_eq!(paths, ["blocks.0.layer.weight", "layer.bias", "blocks.1.layer.weight", "layer.bias"]);
    assert_eq!(parameters[1].data, parameters[3].data, "it is shared");
    assert_ne!(parameters[0].data, parameters[2].data);
}
