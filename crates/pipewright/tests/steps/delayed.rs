//! Parameters that are delayed by one update: batches overlap, which changes no bit, and a failure of one batch leaves the
//! batch before it as it is.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use burn::module::Module;
use burn::optim::{Sgd, SgdConfig};
use burn::tensor::Tensor;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::ErrorFeedback;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright::verification::Verify;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{Recompute, ScheduleSpec, StageIndex, ValidatedProgram, generate};

use crate::ahead::batches::{MICROBATCHES, RATE, StepResult, begin, numbered, parameters, result_of};
use crate::support::{self, Mlp, config, ending_in_loss};

const BATCHES: u64 = 6;

fn program(schedule: &str, ranks: u32, replicas: u32) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let lowering = TrainingLowering { replicas, ..TrainingLowering::default() };
    for_training(&generate(schedule, &spec).expect("a schedule"), &lowering).expect("it is sound")
}

fn delayed() -> PipelineConfig {
    PipelineConfig { delayed: true, ..config() }
}

type Outcome = (Vec<StepResult>, Vec<(String, Vec<f32>)>);

/// Takes the results of batches, of which every `every`th updates. If `overlaps`, each begins during the one before it.
fn run(pipeline: &mut Pipeline, config: &PipelineConfig, every: u64, overlaps: bool) -> Outcome {
    let mut results = Vec::new();
    for number in 0..BATCHES {
        if !pipeline.has_begun() {
            begin(pipeline, number, every, config);
        }
        if overlaps && number + 1 < BATCHES {
            begin(pipeline, number + 1, every, config);
        }
        results.push(result_of(&pipeline.finish().expect("a batch")));
    }
    (results, parameters(pipeline))
}

/// Checks that runs whose batches begin during the one before have the bits of runs in which each is waited for.
fn check(config: &PipelineConfig, every: u64) {
    let schedules =
        [("1f1b", 2), ("1f1b", 4), ("gpipe", 2), ("zb-h1", 2), ("zbvzerobubble", 2), ("interleaved1f1b", 2)];
    let one_rank =
        run(&mut support::launch(program("gpipe", 1, config.data_parallel), config), config, every, false);
    for (schedule, ranks) in schedules {
        let launch = || support::launch(program(schedule, ranks, config.data_parallel), config);
        let drained = run(&mut launch(), config, every, false);
        assert_eq!(drained, one_rank, "{schedule} on {ranks} ranks, drained");
        let overlapping = run(&mut launch(), config, every, true);
        assert_eq!(overlapping, one_rank, "{schedule} on {ranks} ranks");
    }
}

#[test]
fn overlapping_batches_have_the_bits_of_one_rank() {
    check(&delayed(), 1);
}

#[test]
fn other_settings_keep_their_bits() {
    check(&delayed(), 2);
    check(&PipelineConfig { clip_norm: None, post_validation: true, ..delayed() }, 1);
    check(&PipelineConfig { post_validation: true, ..delayed() }, 1);
    check(&PipelineConfig { recompute: Recompute::Stage, ..delayed() }, 1);
    check(&PipelineConfig { verify: Verify::OnSuspicion, ..delayed() }, 1);
    check(&PipelineConfig { data_parallel: 2, ..delayed() }, 1);
}

#[test]
fn half_precision_keeps_its_bits() {
    for precision in [Precision::Bf16, Precision::F16] {
        check(&PipelineConfig { precision, ..delayed() }, 1);
    }
}

/// Sharded replicas have the bits of whole ones.
#[test]
fn sharded_versions_have_the_bits_of_whole_ones() {
    let whole = PipelineConfig { data_parallel: 2, ..delayed() };
    let sharded = PipelineConfig { data_parallel_mode: DataParallelMode::Sharded, ..whole.clone() };
    for every in [1, 2] {
        let expected = run(&mut support::launch(program("1f1b", 2, 2), &whole), &whole, every, false);
        let found = run(
            &mut support::launch(support::program("1f1b", 2, MICROBATCHES), &sharded),
            &sharded,
            every,
            true,
        );
        assert_eq!(found, expected);
    }
}

/// What the stages of a run have computed, and what they wait for.
#[derive(Debug, Default)]
struct Events {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the test has begun the second batch.
    has_second: bool,
    /// The forwards of each stage.
    forwards: [usize; 2],
}

impl Events {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("no panic"));
        self.changed.notify_all();
    }

    /// Waits for an event that comes if batches overlap. The time is long, and does not pass then.
    fn wait(&self, has_come: impl Fn(&State) -> bool) {
        let state = self.state.lock().expect("no panic");
        let waited =
            self.changed.wait_timeout_while(state, Duration::from_secs(60), |state| !has_come(state));
        assert!(!waited.expect("no panic").1.timed_out(), "the next batch has not begun");
    }
}

/// A stage that says when it computes a forward. The first forward of the last stage waits until the test has begun the
/// second batch, and the last one of the first batch until the first stage has begun that batch too.
#[derive(Module, Debug)]
struct Watched {
    layers: Mlp,
    #[module(skip)]
    stage: usize,
    #[module(skip)]
    events: Arc<Events>,
    /// The forward of the last stage that panics.
    #[module(skip)]
    panics_at: Option<usize>,
}

impl StageModule for Watched {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let mut number = 0;
        self.events.change(|state| {
            state.forwards[self.stage] += 1;
            number = state.forwards[self.stage];
        });
        if self.stage == 1 {
            self.events.wait(|state| state.has_second);
            if number == MICROBATCHES as usize {
                self.events.wait(|state| state.forwards[0] > MICROBATCHES as usize);
            }
            assert!(self.panics_at != Some(number), "out of cheese");
        }
        self.layers.forward(input, context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").expect("a layer"))
    }
}

/// Launches two stages whose batches overlap, and begins two batches.
fn watched(config: &PipelineConfig, panics_at: Option<usize>) -> Pipeline {
    let events = Arc::new(Events::default());
    let of_stages = events.clone();
    let make = move |index: StageIndex| {
        let (layers, events) = (Mlp::of_stage(index, 2), of_stages.clone());
        ending_in_loss(index.get() == 1, Watched { layers, stage: index.index(), events, panics_at })
    };
    let mut pipeline =
        Pipeline::launch(program("1f1b", 2, 1), World::local(2), config, make).expect("it starts");
    for number in 0..2 {
        pipeline.begin(numbered(number, config), RATE).expect("it begins");
    }
    events.change(|state| state.has_second = true);
    pipeline
}

#[test]
fn a_batch_begins_before_the_one_before_has_ended() {
    let config = PipelineConfig { deadline: Duration::from_secs(120), ..delayed() };
    let mut pipeline = watched(&config, None);
    let mut plain = support::launch(program("1f1b", 2, 1), &config);
    for number in 0..2 {
        let expected = plain.step_batch(numbered(number, &config), RATE).expect("a step");
        assert_eq!(result_of(&pipeline.finish().expect("a step")), result_of(&expected));
    }
    assert_eq!(parameters(&mut pipeline), parameters(&mut plain));
}

/// The second batch fails on the last rank while the first rank has not ended the first batch. The first batch counts, the
/// failure has its place, and the pipeline goes on as if the second batch had not been.
#[test]
fn a_failure_leaves_the_batch_before_as_it_is() {
    let config = PipelineConfig { deadline: Duration::from_secs(120), ..delayed() };
    let mut pipeline = watched(&config, Some(MICROBATCHES as usize + 2));
    let mut plain = support::launch(program("1f1b", 2, 1), &config);
    let expected = plain.step_batch(numbered(0, &config), RATE).expect("a step");
    assert_eq!(result_of(&pipeline.finish().expect("the first step")), result_of(&expected));
    let error = pipeline.finish().expect_err("its forward panics").to_string();
    assert!(error.starts_with("step 2: rank 1, stage 1, microbatch 1, action 1F1: "), "{error}");
    assert!(error.ends_with("out of cheese"), "{error}");
    for number in 5..8 {
        let expected = plain.step_batch(numbered(number, &config), RATE).expect("a step");
        let found = pipeline.step_batch(numbered(number, &config), RATE).expect("a step");
        assert_eq!(result_of(&found).1, result_of(&expected).1, "batch {number}");
    }
    assert_eq!(parameters(&mut pipeline), parameters(&mut plain));
}

/// A batch that fails takes the one behind it along, wherever that is.
#[test]
fn a_failure_drops_the_batch_behind() {
    let config = PipelineConfig { deadline: Duration::from_secs(120), ..delayed() };
    let mut pipeline = watched(&config, Some(MICROBATCHES as usize));
    pipeline.finish().expect_err("its forward panics");
    assert!(!pipeline.has_begun(), "the second batch is dropped");
    let mut plain = support::launch(program("1f1b", 2, 1), &config);
    for number in 5..8 {
        let expected = plain.step_batch(numbered(number, &config), RATE).expect("a step");
        let found = pipeline.step_batch(numbered(number, &config), RATE).expect("a step");
        assert_eq!(result_of(&found).1, result_of(&expected).1, "batch {number}");
    }
    assert_eq!(parameters(&mut pipeline), parameters(&mut plain));
}

/// Gradient descent at a learning rate of 0 changes a parameter only by the error of the update before it.
#[test]
fn a_parameter_that_is_trained_again_has_no_error_from_before() {
    let sgd: Sgd = SgdConfig::new().build();
    let config = PipelineConfig { optimizer: Some(ErrorFeedback(sgd).init()), ..delayed() };
    let is_first = |path: &str| path.starts_with("layers.0.");
    let mut pipeline = support::launch(program("1f1b", 2, 1), &config);
    let mut step = |pipeline: &mut Pipeline, number, rate| {
        pipeline.step_batch(numbered(number, &config), rate).expect("a step");
        parameters(pipeline)
    };
    step(&mut pipeline, 0, RATE);
    assert!(pipeline.freeze(is_first).expect("every rank answers") > 0);
    step(&mut pipeline, 1, RATE);
    pipeline.unfreeze(is_first).expect("every rank answers");
    let before = parameters(&mut pipeline);
    let after = step(&mut pipeline, 2, 0.0);
    for ((path, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(before == after, is_first(path), "{path}");
    }
    let last = step(&mut pipeline, 3, RATE);
    assert!(after.iter().zip(&last).all(|(after, last)| after != last), "all are trained");
}
