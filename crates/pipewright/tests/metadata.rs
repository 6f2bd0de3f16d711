//! Metadata of boundaries is given or taken from the first microbatch, and is checked on both sides.

mod support;

use std::sync::Arc;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig};
use burn::tensor::{DType, Device, Tensor};
use pipewright::batch::{Batch, SplitRule};
use pipewright::failure::{Cause, StepError};
use pipewright::hook::{ActionHook, BackwardRun};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageError, StageModule};
use pipewright::tensor::{
    CheckMetadata, Dim, Metadata, MetadataError, Mismatch, OnMismatch, OptionalTensors, TensorSpec, Values,
    pack, unpack,
};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;
use support::{Mlp, WIDTH, batch, config, ending_in_loss, loss, program, split, stage};

/// The layers; stage 0 repeats its features if the step has a `width`.
#[derive(Module, Debug)]
struct Wider {
    layers: Mlp,
}

impl StageModule for Wider {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let output = self.layers.forward(input.narrow(1, 0, WIDTH), context);
        let times =
            context.value::<Vec<usize>>("times").map_or(1, |times| times[context.microbatch().index()]);
        if context.stage().get() == 0 { output.repeat_dim(1, times) } else { output }
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").unwrap_or(local))
    }
}

fn launch(schedule: &str, config: &PipelineConfig) -> Result<Pipeline, PipelineError> {
    let program = program(schedule, 2, 4);
    let stages = program.placement().stages();
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Wider { layers: Mlp::of_stage(stage, stages) };
        ending_in_loss(stage.get() + 1 == stages, module)
    };
    Pipeline::launch(program, World::local(2), config, make)
}

/// Returns a step in which stage 0 repeats each microbatch's features `widths` times.
fn brought(times: [usize; 4]) -> Batch {
    let batch = Batch::new(split(batch(0, 4), 4), split(batch(1, 4), 4));
    batch.with_value("times", times.to_vec())
}

fn mismatch(result: Result<impl Sized, PipelineError>) -> MetadataError {
    match result.err().expect("the sides differ") {
        PipelineError::Step(StepError { cause: Cause::Metadata(error), .. }) => *error,
        error => panic!("{error}"),
    }
}

fn with(metadata: Metadata, check_metadata: CheckMetadata) -> PipelineConfig {
    PipelineConfig { metadata, check_metadata, ..config() }
}

fn given(stages: usize) -> Metadata {
    Metadata::Static { stages: vec![vec![TensorSpec::of_rows(DType::F32, [WIDTH])]; stages - 1] }
}

#[test]
fn a_microbatch_of_another_shape_is_reported_with_both_sides() {
    for schedule in ["1f1b", "zbvzerobubble"] {
        let mut pipeline = launch(schedule, &config()).expect("it starts");
        let error = mismatch(pipeline.step_batch(brought([1, 1, 2, 1]), 1e-2));
        assert_eq!((error.microbatch.get(), error.mismatch), (2, Mismatch::Tensor(0)), "{schedule}");
        let text = error.to_string();
        let expected = "microbatch 2: tensor 0 differs: stage 0 on rank 0 sent F32 [3, 12], stage 1 on rank 1 expects \
                        F32 [_, 6]; if a dimension may differ between microbatches, name it in \
                        `PipelineConfig::metadata`";
        assert_eq!(text, expected);
        // The metadata of the failed step is forgotten.
        pipeline.step_batch(brought([2, 2, 2, 2]), 1e-2).expect("all alike");
    }
}

#[test]
fn later_steps_are_checked_when_asked() {
    let always = with(Metadata::default(), CheckMetadata::Always);
    for (config, is_checked) in [(config(), false), (always, true)] {
        let mut pipeline = launch("1f1b", &config).expect("it starts");
        pipeline.step_batch(brought([1; 4]), 1e-2).expect("all alike");
        let second = pipeline.step_batch(brought([1, 2, 1, 1]), 1e-2);
        assert_eq!(second.is_err(), is_checked);
    }
}

#[test]
fn a_free_dimension_may_differ() {
    let free = with(Metadata::Dynamic { free: vec![0, 1] }, CheckMetadata::Always);
    let mut pipeline = launch("1f1b", &free).expect("it starts");
    pipeline.step_batch(brought([1, 2, 3, 1]), 1e-2).expect("features may differ");
    let spec = TensorSpec { dtype: DType::F32, shape: vec![Dim::Any, Dim::Any] };
    let free = with(Metadata::Static { stages: vec![vec![spec]] }, CheckMetadata::Always);
    let mut pipeline = launch("1f1b", &free).expect("it starts");
    pipeline.step_batch(brought([1, 2, 3, 1]), 1e-2).expect("features may differ");
}

#[test]
fn rows_may_differ() {
    for metadata in [Metadata::default(), given(2)] {
        let config = with(metadata, CheckMetadata::Always);
        let program = program("1f1b", 2, 4);
        let mut pipeline =
            Pipeline::launch(program, World::local(2), &config, |index| stage(index, 2)).expect("it starts");
        for rows in [10, 16, 5] {
            let part = |seed| batch(seed, 8).narrow(0, 0, rows);
            // Five rows in runs of two leave no fourth microbatch, so the microbatches are given one by one.
            let batch = match rows {
                5 => Batch::new(parts(&part(0)), parts(&part(1))),
                _ => Batch::split(part(0), part(1), SplitRule::uneven(4)).expect("it splits"),
            };
            pipeline.step_batch(batch, 1e-2).expect("rows differ");
        }
    }
}

/// Returns four microbatches of 2, 1, 1 and 1 rows.
fn parts(tensor: &Tensor<2>) -> Vec<Values> {
    [(0, 2), (2, 1), (3, 1), (4, 1)].map(|(start, rows)| pack(tensor.clone().narrow(0, start, rows))).to_vec()
}

#[test]
fn static_metadata_is_checked_from_the_first_microbatch() {
    let mut pipeline = launch("1f1b", &with(given(2), CheckMetadata::FirstStep)).expect("it starts");
    let error = mismatch(pipeline.step_batch(brought([2, 1, 1, 1]), 1e-2));
    assert_eq!((error.from.stage.get(), error.to.stage.get()), (0, 1));
    assert_eq!((error.sent.as_str(), error.expected.as_str()), ("F32 [3, 12]", "F32 [_, 6]"));
    let two = vec![TensorSpec::of_rows(DType::F32, [WIDTH]), TensorSpec::of_rows(DType::I64, [])];
    let config = with(Metadata::Static { stages: vec![two] }, CheckMetadata::FirstStep);
    let error = mismatch(launch("1f1b", &config).expect("it starts").step_batch(brought([1; 4]), 1e-2));
    assert_eq!(error.mismatch, Mismatch::Count);
    assert_eq!((error.sent.as_str(), error.expected.as_str()), ("1 tensor", "2 tensors"));
    let wrong = vec![TensorSpec::of_rows(DType::F64, [WIDTH])];
    let config = with(Metadata::Static { stages: vec![wrong] }, CheckMetadata::FirstStep);
    let error = mismatch(launch("1f1b", &config).expect("it starts").step_batch(brought([1; 4]), 1e-2));
    assert_eq!((error.sent.as_str(), error.expected.as_str()), ("F32 [3, 6]", "F64 [_, 6]"));
}

#[test]
fn every_boundary_needs_its_description() {
    let error =
        launch("zbvzerobubble", &with(given(2), CheckMetadata::FirstStep)).err().expect("three are missing");
    assert_eq!(
        error.to_string(),
        "metadata is given for 1 boundaries, the program has 3: one before each stage but the first"
    );
}

#[test]
fn metadata_may_be_given_for_some_boundaries() {
    let given = |stages: &[u32]| {
        let spec = || vec![TensorSpec::of_rows(DType::F32, [WIDTH])];
        let stages = stages.iter().map(|&stage| (StageIndex::new(stage), spec())).collect();
        with(Metadata::Partial { stages, free: vec![0] }, CheckMetadata::FirstStep)
    };
    // The first microbatch that stage 0 sends has a width that no later one has.
    let first_wrong = |config: &PipelineConfig| {
        let mut pipeline = launch("zbvzerobubble", config).expect("it starts");
        let error = mismatch(pipeline.step_batch(brought([2, 1, 1, 1]), 1e-2));
        (error.microbatch.get(), error.sent, error.expected)
    };
    let text = |text: &str| text.to_owned();
    assert_eq!(first_wrong(&given(&[1])), (0, text("F32 [3, 12]"), text("F32 [_, 6]")));
    assert_eq!(first_wrong(&given(&[2, 3])), (1, text("F32 [3, 6]"), text("F32 [_, 12]")));
    for stage in [0, 4] {
        let error = launch("zbvzerobubble", &given(&[1, stage])).err().expect("it has no boundary");
        let expected =
            format!("metadata is given for the inputs of stage {stage}, and the program has 4 stages: ");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}

#[test]
fn a_mismatch_may_be_a_warning() {
    support::collect_log();
    let warns =
        PipelineConfig { on_mismatch: OnMismatch::Warn, check_metadata: CheckMetadata::Always, ..config() };
    let mut pipeline = launch("1f1b", &warns).expect("it starts");
    let warned = pipeline.step_batch(brought([1, 2, 2, 3]), 1e-2).expect("stage 1 takes any width");
    pipeline.step_batch(brought([1, 1, 1, 2]), 1e-2).expect("stage 1 takes any width");
    let plain = launch("1f1b", &config()).expect("it starts").step_batch(brought([1; 4]), 1e-2);
    assert_eq!(warned.losses, plain.expect("all alike").losses, "stage 1 uses the first features");
    let found = support::logged(|text| text.starts_with("microbatch"));
    // Both sides of the boundary find the mismatch.
    let sent = "microbatch 1: tensor 0 differs: stage 0 on rank 0 sent F32 [3, 12], stage 1 on rank 1 expects F32 [_, 6]";
    assert_eq!(found.iter().filter(|text| text.starts_with(sent)).count(), 2, "{found:#?}");
    assert_eq!(found.len(), 2, "each side logs one: {found:#?}");
    let messages = support::logged(|text| text.contains("bytes, f32 [3, 12]"));
    for expected in [
        "rank 0: 0SEND_F1 to rank 1: 144 bytes, f32 [3, 12]",
        "rank 1: 1RECV_F1 from rank 0: 144 bytes, f32 [3, 12]",
    ] {
        assert!(messages.iter().any(|message| message == expected), "{messages:#?}");
    }
}

#[test]
fn gradients_have_the_metadata_of_their_tensors() {
    /// Replaces the gradients that stage 1 returns.
    struct Replaces(fn(Tensor<2>) -> OptionalTensors);
    impl ActionHook for Replaces {
        fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
            run.run_all()?;
            if run.stage().get() == 1 {
                let gradient = run.gradients().iter().flatten().cloned().collect();
                run.set_gradients((self.0)(unpack(gradient).map_err(StageError::Input)?));
            }
            Ok(())
        }
    }
    let some = |gradient: Tensor<2>| pack(gradient).into_iter().map(Some).collect();
    let narrow: fn(Tensor<2>) -> OptionalTensors =
        |gradient| pack(gradient.narrow(1, 0, 5)).into_iter().map(Some).collect();
    for (metadata, evaluates) in
        [Metadata::default(), given(2)].into_iter().flat_map(|given| [(given.clone(), false), (given, true)])
    {
        let config = with(metadata, CheckMetadata::FirstStep);
        let config = PipelineConfig { hook: Some(Arc::new(Replaces(narrow))), ..config };
        let mut pipeline = launch("1f1b", &config).expect("it starts");
        if evaluates {
            // An evaluation has no gradients: the gradients of the first step are checked nevertheless.
            pipeline.eval_batch(brought([1; 4])).expect("an evaluation");
        }
        let error = mismatch(pipeline.step_batch(brought([1; 4]), 1e-2));
        assert_eq!((error.from.stage.get(), error.to.stage.get()), (1, 0));
        assert_eq!(error.mismatch, Mismatch::Gradient(0));
        assert_eq!(
            error.to_string(),
            "microbatch 0: the gradient of tensor 0 differs: stage 1 on rank 1 sent F32 [3, 5], stage 0 on rank 0 expects \
             F32 [3, 6]; return a gradient of the shape and type of each input, or `None`"
        );
    }
    let same = PipelineConfig { hook: Some(Arc::new(Replaces(some))), ..config() };
    launch("1f1b", &same).expect("it starts").step_batch(brought([1; 4]), 1e-2).expect("the same gradients");
}

#[test]
fn metadata_has_comparable_fingerprints() {
    let kinds = [Metadata::default(), Metadata::Dynamic { free: vec![1] }, given(2), given(3)];
    for (place, kind) in kinds.iter().enumerate() {
        for (other, kind_of_other) in kinds.iter().enumerate() {
            assert_eq!(kind.fingerprint() == kind_of_other.fingerprint(), place == other);
        }
    }
}

/// A stage whose forward changes buffers and draws random numbers.
#[derive(Module, Debug)]
struct Random {
    norm: BatchNorm,
    dropout: Dropout,
    layers: Mlp,
}

impl StageModule for Random {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.layers.forward(self.dropout.forward(self.norm.forward(input)), context)
    }
}

/// Returns the losses of steps and of an evaluation that reads the buffers. One rank, so that random numbers
/// are drawn in one order.
fn with_traces(metadata: Metadata) -> (Vec<Vec<f64>>, Vec<f64>) {
    let device = Device::flex();
    device.seed(7);
    let text = "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n";
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let device = Device::flex().autodiff();
        let module = Random {
            norm: BatchNormConfig::new(WIDTH).init(&device),
            dropout: DropoutConfig::new(0.5).init(),
            layers: Mlp::of_stage(stage, 2),
        };
        let made = if stage.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) };
        Ok(made.with_prefix(&format!("parts.{stage}")))
    };
    let config = with(metadata, CheckMetadata::Always);
    let mut pipeline =
        Pipeline::launch(support::program_of(text), World::local(1), &config, make).expect("it starts");
    let steps =
        (0..3).map(|step| pipeline.step(batch(step, 2), batch(9, 2), 1e-2).expect("a step").losses).collect();
    (steps, pipeline.eval(batch(5, 2), Some(batch(6, 2))).expect("an evaluation").losses)
}

#[test]
fn finding_metadata_out_leaves_no_trace() {
    let found_out = with_traces(Metadata::default());
    assert_eq!(found_out, with_traces(given(2)));
    assert_ne!(found_out.0[0], found_out.0[1], "it learns");
}
