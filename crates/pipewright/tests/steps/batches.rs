//! Batches whose rows do not divide evenly, side inputs and auxiliary losses.
//!
//! Each run is compared with plain Burn: the same layers on one tape, one backward, one optimizer step.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use pipewright::batch::{Batch, SplitRule, SplitSpec};
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Metadata;
use pipewright::transport::World;
use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::support::{
    self, Mlp, WIDTH, config, ending_in_loss, loss, numbers, optimizer, program, program_of,
};

const STAGES: u32 = 4;
const STEPS: u64 = 4;
const MICROBATCHES: u32 = 4;
/// Rows of a step; they make microbatches of 3, 3, 3 and 1.
const ROWS: usize = 10;

/// Layers that add a side input, scale by a value, and report two auxiliary losses.
#[derive(Module, Debug)]
struct Rich {
    layers: Mlp,
}

impl Rich {
    fn new(stage: StageIndex) -> Self {
        Self { layers: Mlp::of_stage(stage, STAGES) }
    }
}

impl StageModule for Rich {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let shift: Tensor<2> = context.side("shift").expect("the step brings it");
        let offset: Tensor<1> = context.side("offset").expect("the step brings it");
        let scale = *context.value::<f32>("scale").expect("the step brings it");
        let output = self.layers.forward(input + (shift + offset.unsqueeze()) * scale, context);
        let (square, magnitude) = auxiliary(&output);
        context.auxiliary_loss("square", 0.3, square);
        context.auxiliary_loss("magnitude", 0.1, magnitude);
        output
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").unwrap_or(local))
    }
}

fn auxiliary(output: &Tensor<2>) -> (Tensor<1>, Tensor<1>) {
    (output.clone().square().mean(), output.clone().abs().mean())
}

fn data(seed: u64) -> Tensor<2> {
    Tensor::from_data(numbers(seed, [ROWS, WIDTH]), &Device::flex())
}

fn offset() -> Tensor<1> {
    Tensor::from_data(numbers(5, [WIDTH]), &Device::flex())
}

fn unclipped() -> PipelineConfig {
    PipelineConfig { clip_norm: None, ..config() }
}

/// Returns the batch of step `step`.
fn brought(step: u64) -> Batch {
    let batch =
        Batch::split(data(step), data(100 + step), SplitRule::uneven(MICROBATCHES)).expect("it splits");
    let batch = batch.with_split("shift", data(200 + step)).expect("it splits");
    batch.with_replicated("offset", offset()).with_value("scale", 0.5f32)
}

fn launch(program: ValidatedProgram) -> Pipeline {
    let make = |stage: StageIndex| {
        let module = Rich::new(stage);
        ending_in_loss(stage.get() + 1 == STAGES, module)
    };
    let world = World::local(program.ranks());
    Pipeline::launch(program, world, &unclipped(), make).expect("it starts")
}

fn train(program: ValidatedProgram) -> Vec<StepSummary> {
    let mut pipeline = launch(program);
    (0..STEPS).map(|step| pipeline.step_batch(brought(step), 1e-2).expect("a step")).collect()
}

/// Returns the loss, "square" and "magnitude" of each step.
fn plain() -> Vec<[f64; 3]> {
    let mut module = Mlp::new(0, support::LAYERS);
    let mut optimizer = optimizer();
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let mut steps = Vec::new();
    for step in 0..STEPS {
        let shift = ((data(200 + step) + offset().unsqueeze()) * 0.5).autodiff();
        let mut hidden = data(step).autodiff();
        let mut sums: Option<(Tensor<1>, Tensor<1>)> = None;
        for stage in 0..STAGES {
            hidden = module.part(stage, STAGES).forward(hidden + shift.clone(), &context);
            let (square, magnitude) = auxiliary(&hidden);
            sums = Some(match sums {
                Some((a, b)) => (a + square, b + magnitude),
                None => (square, magnitude),
            });
        }
        let (square, magnitude) = sums.expect("a stage");
        let loss = loss(hidden, data(100 + step).autodiff());
        let number = |x: &Tensor<1>| f64::from(x.clone().into_scalar::<f32>());
        steps.push([number(&loss), number(&square), number(&magnitude)]);
        let gradients = (loss + square * 0.3 + magnitude * 0.1).backward();
        module = optimizer.step(1e-2, module.clone(), GradientsParams::from_grads(gradients, &module));
    }
    steps
}

fn figures(report: &StepSummary) -> [f64; 3] {
    [report.loss(), report.auxiliary["square"], report.auxiliary["magnitude"]]
}

#[test]
fn everything_at_once_agrees_with_plain_burn() {
    for (found, expected) in train(program("1f1b", STAGES, MICROBATCHES)).iter().zip(plain()) {
        assert_eq!(found.loss_weights, [1.2, 1.2, 1.2, 0.4]);
        for (found, expected) in figures(found).iter().zip(expected) {
            assert!((found - expected).abs() < 2e-6 * expected.abs(), "{found} {expected}");
        }
        let [loss, square, magnitude] = figures(found);
        let total = loss + 0.3 * square + 0.1 * magnitude;
        assert!((found.total() - total).abs() < 1e-12 * total, "{} {total}", found.total());
    }
}

#[test]
fn the_cut_changes_no_bit_of_it() {
    let one = (0..MICROBATCHES).map(|m| format!("0F{m},1F{m},2F{m},3F{m},3B{m},2B{m},1B{m},0B{m}"));
    let one = train(program_of(&(one.collect::<Vec<_>>().join(",") + "\n")));
    for (schedule, ranks) in [("1f1b", 4), ("gpipe", 4), ("zbvzerobubble", 2), ("zb-h1", 4)] {
        let other = train(program(schedule, ranks, MICROBATCHES));
        for (one, other) in one.iter().zip(&other) {
            assert_eq!((&one.losses, one.gradient_norm), (&other.losses, other.gradient_norm), "{schedule}");
            assert_eq!((&one.auxiliary, one.total()), (&other.auxiliary, other.total()), "{schedule}");
        }
    }
}

#[test]
fn an_evaluation_brings_it_too() {
    let mut pipeline = launch(program("zbvzerobubble", 2, MICROBATCHES));
    let evaluated = pipeline.eval_batch(brought(0)).expect("an evaluation");
    let trained = pipeline.step_batch(brought(0), 1e-2).expect("a step");
    assert_eq!((evaluated.losses, evaluated.loss_weights), (trained.losses, trained.loss_weights));
    assert_eq!(evaluated.auxiliary, trained.auxiliary);
}

#[test]
fn a_missing_side_input_is_named() {
    let mut pipeline = launch(program("1f1b", STAGES, MICROBATCHES));
    let batch = Batch::split(data(0), data(1), SplitRule::uneven(MICROBATCHES)).expect("it splits");
    let error = pipeline.step_batch(batch.with_value("scale", 1f32), 1e-2).expect_err("no shift").to_string();
    assert!(error.contains("no side input `shift`") && error.contains("scale"), "{error}");
}

#[test]
fn too_few_rows_for_the_last_microbatch_are_refused() {
    let two = || data(0).narrow(0, 0, 5);
    // Runs of two rows make three microbatches, not four.
    assert!(Batch::split(two(), two(), SplitRule::uneven(4)).is_err());
    assert!(Batch::split(two(), two(), SplitRule::uneven(3)).is_ok());
}

/// The layers with inputs `[features, rows]`, and a table that every microbatch adds.
#[derive(Module, Debug)]
struct Sideways {
    layers: Mlp,
}

impl StageModule for Sideways {
    type Input = (Tensor<2>, Tensor<1>);
    type Output = (Tensor<2>, Tensor<1>);

    fn forward(&self, (columns, table): Self::Input, context: &StageContext) -> Self::Output {
        let rows = columns.transpose() + table.clone().unsqueeze();
        (self.layers.forward(rows, context).transpose(), table)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").unwrap_or(local))
    }
}

#[test]
fn tensors_split_along_the_dimension_that_their_spec_names() {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Sideways { layers: Mlp::of_stage(stage, STAGES) };
        let loss = |(output, _): (Tensor<2>, Tensor<1>), target: Tensor<2>| loss(output.transpose(), target);
        Ok(if stage.get() + 1 == STAGES { Stage::with_loss(module, loss) } else { Stage::new(module) })
    };
    let program = program("1f1b", STAGES, MICROBATCHES);
    // The last microbatch has fewer columns.
    let config = PipelineConfig { metadata: Metadata::Dynamic { free: vec![1] }, ..unclipped() };
    let mut pipeline = Pipeline::launch(program, World::local(STAGES), &config, make).expect("it starts");
    let specs = (SplitSpec::Along(1), SplitSpec::Replicate);
    let inputs = (data(0).transpose(), offset());
    let batch =
        Batch::split(inputs, data(100), SplitRule::uneven(MICROBATCHES).inputs(specs)).expect("it splits");
    let report = pipeline.step_batch(batch, 1e-2).expect("a step");
    assert_eq!(report.loss_weights, [1.2, 1.2, 1.2, 0.4], "columns count, not rows");

    let module = Mlp::new(0, support::LAYERS);
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let mut hidden = data(0);
    for stage in 0..STAGES {
        hidden = module.part(stage, STAGES).forward(hidden + offset().unsqueeze(), &context);
    }
    let expected = f64::from(loss(hidden, data(100)).into_scalar::<f32>());
    assert!((report.loss() - expected).abs() < 2e-6 * expected, "{} {expected}", report.loss());
}
