//! Parameters that are delayed by one update: batches overlap, which changes no bit, and a failure of one batch leaves the
//! batch before it as it is.

mod dropped;
mod kinds;

use self::kinds::Kind;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::{Sgd, SgdConfig};
use burn::tensor::Tensor;
use pipewright::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::{AdamW, ErrorFeedback, Lion, ParameterGradient};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::Precision;
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright::verification::Verify;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{Recompute, ScheduleSpec, StageIndex, ValidatedProgram, generate};

use crate::ahead::batches::{MICROBATCHES, RATE, StepResult, begin, numbered, parameters, result_of};
use crate::support::count::Count;
use crate::support::{self, Mlp, config};

const BATCHES: u64 = 6;
/// The forwards of a stage in a batch.
const PER_BATCH: u64 = MICROBATCHES as u64;

fn program(schedule: &str, ranks: u32, replicas: u32) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let lowering = TrainingLowering { replicas, delayed: true, ..TrainingLowering::default() };
    for_training(&generate(schedule, &spec).expect("a schedule"), &lowering).expect("it is sound")
}

fn delayed() -> PipelineConfig {
    PipelineConfig { delayed: true, ..config() }
}

type Outcome = (Vec<StepResult>, Vec<(String, Vec<f32>)>);

/// Takes the results of batches. Every `every`th of them updates. If `overlaps`, each begins during the one before it.
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
    let schedules = [
        ("1f1b", 2),
        ("1f1b", 4),
        ("gpipe", 2),
        ("zb-h1", 2),
        ("zbvzerobubble", 2),
        ("interleaved1f1b", 2),
        ("v-min", 2),
        ("hanayo", 2),
    ];
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

/// The schedule of a run that always drains keeps its order.
#[test]
fn batches_of_runs_that_drain_do_not_overlap() {
    assert!(delayed().may_overlap());
    let drain = [config(), PipelineConfig { verify: Verify::OnSuspicion, ..delayed() }];
    assert!(drain.iter().all(|config| !config.may_overlap()));
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

/// Numbers for which stages wait. They come if batches overlap.
#[derive(Debug, Default)]
struct Events {
    /// The number of batches that the test has begun.
    begun: Count,
    /// The forwards of each stage.
    forwards: [Count; 4],
    has_panicked: AtomicBool,
}

/// A stage that says when it computes a forward. The first forward of the second stage waits until the test has begun the
/// second batch, and of two stages, the last one of the first batch until the first stage has begun that batch too.
#[derive(Module, Debug)]
struct Watched {
    layers: Mlp,
    #[module(skip)]
    stage: usize,
    #[module(skip)]
    stages: u32,
    #[module(skip)]
    events: Arc<Events>,
    /// The forward of the second stage that panics.
    #[module(skip)]
    panics_at: Option<u64>,
    /// If rank 1 hangs after the panic until another rank gives up, what that one logs.
    #[module(skip)]
    gives_up: Option<String>,
}

impl StageModule for Watched {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let Events { begun, forwards, has_panicked } = &*self.events;
        let number = forwards[self.stage].add_one();
        if self.stage == 1 {
            begun.wait_for(2);
            if self.stages == 2 && number == PER_BATCH {
                forwards[0].wait_for(PER_BATCH + 1);
            }
            if self.panics_at == Some(number) {
                if self.gives_up.is_some() {
                    // By then, rank 0 has sent the next microbatch, and waits for a message of the first batch.
                    forwards[0].wait_for(number + 1);
                    // The deadline counts from the panic, which is in the middle of that wait.
                    std::thread::sleep(Duration::from_secs(1));
                }
                has_panicked.store(true, Ordering::SeqCst);
                panic!("out of cheese");
            }
        }
        if let Some(text) = &self.gives_up
            && has_panicked.load(Ordering::SeqCst)
        {
            hang_until_logged(text);
        }
        self.layers.forward(input, context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").expect("a layer"))
    }
}

/// Launches two ranks whose batches overlap, and begins two batches.
fn watched(schedule: &str, config: &PipelineConfig, panics_at: Option<u64>) -> Pipeline {
    hanging(schedule, &Kind::of(config.clone()), panics_at, None)
}

/// Like [`watched`], but rank 1 hangs after a panic if `gives_up` has what another rank logs when it gives up.
fn hanging(schedule: &str, kind: &Kind, panics_at: Option<u64>, gives_up: Option<String>) -> Pipeline {
    let (program, events) = (kind.program(schedule, 2), Arc::new(Events::default()));
    let (stages, of_stages) = (program.placement().stages(), events.clone());
    let (config, kind) = (&kind.config, kind.clone());
    let make = move |index: StageIndex| {
        let (layers, events) = (Mlp::of_stage(index, stages), of_stages.clone());
        let gives_up = gives_up.clone();
        let watched = Watched { layers, stage: index.index(), stages, events, panics_at, gives_up };
        kind.stage(index.get() + 1 == stages, watched)
    };
    let mut pipeline = Pipeline::launch(program, World::local(2), config, make).expect("it starts");
    for number in 0..2 {
        pipeline.begin(numbered(number, config), RATE).expect("it begins");
    }
    events.begun.set(2);
    pipeline
}

#[test]
fn a_batch_begins_before_the_one_before_has_ended() {
    let config = PipelineConfig { deadline: Duration::from_secs(120), ..delayed() };
    let mut pipeline = watched("1f1b", &config, None);
    let mut plain = support::launch(program("1f1b", 2, 1), &config);
    for number in 0..2 {
        let expected = plain.step_batch(numbered(number, &config), RATE).expect("a step");
        assert_eq!(result_of(&pipeline.finish().expect("a step")), result_of(&expected));
    }
    assert_eq!(parameters(&mut pipeline), parameters(&mut plain));
}

/// The second batch fails on the last rank while the first rank has not ended the first batch. The first batch counts, the
/// failure has its place, and the pipeline continues as if the second batch had not been.
fn check_failure(kind: &Kind) {
    let config = kind.config.clone();
    let mut pipeline = hanging("1f1b", kind, Some(PER_BATCH + 2), None);
    let mut plain = kind.launch("1f1b", 2);
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

#[test]
fn a_failure_leaves_the_batch_before_as_it_is() {
    check_failure(&Kind::of(PipelineConfig { deadline: Duration::from_secs(120), ..delayed() }));
}

/// A batch that fails takes the one behind it along, wherever that is.
#[test]
fn a_failure_drops_the_batch_behind() {
    let config = PipelineConfig { deadline: Duration::from_secs(120), ..delayed() };
    let mut pipeline = watched("1f1b", &config, Some(PER_BATCH));
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

fn collect_log() {
    static LOG: Once = Once::new();
    LOG.call_once(support::collect_log);
}

/// If rank 1 calls this, it returns when another rank has logged a text.
fn hang_until_logged(text: &str) {
    let is_logged = || support::logged(|_| true).iter().any(|logged| logged.contains(text));
    let until = Instant::now() + Duration::from_secs(60);
    while std::thread::current().name() == Some("rank-1") && !is_logged() {
        assert!(Instant::now() < until, "no rank logs `{text}`");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns a configuration with a deadline, and what a rank logs that gives up.
fn with_deadline(milliseconds: u64) -> (PipelineConfig, String) {
    collect_log();
    let deadline = Duration::from_millis(milliseconds);
    (
        PipelineConfig { deadline, ..delayed() },
        format!("no rank has moved for {:.1} s", deadline.as_secs_f64()),
    )
}

/// The first batch fails because rank 0 gives up. The pipeline continues as if there had been neither batch.
fn check_given_up(mut pipeline: Pipeline, schedule: &str, (config, text): (PipelineConfig, String)) {
    let error = pipeline.finish().expect_err("a rank hangs").to_string();
    assert!(error.starts_with("step 1: rank 0") && error.contains(&text), "{error}");
    let mut plain = support::launch(program(schedule, 2, 1), &config);
    for number in 5..8 {
        let expected = plain.step_batch(numbered(number, &config), RATE).expect("a step");
        let found = pipeline.step_batch(numbered(number, &config), RATE).expect("a step");
        assert_eq!(result_of(&found).1, result_of(&expected).1, "batch {number}");
    }
}

/// Rank 1 has computed the first batch and hangs. Rank 0 waits for the norm of that batch, and for a message of the second one.
#[test]
fn a_deadline_fails_the_earlier_batch() {
    let (config, text) = with_deadline(1300);
    let logged = text.clone();
    let hook = move |_: &mut ParameterGradient<'_>| hang_until_logged(&logged);
    let hanging = PipelineConfig { gradient_hook: Some(Arc::new(hook)), ..config.clone() };
    check_given_up(watched("1f1b", &hanging, None), "1f1b", (config, text));
}

/// The second batch fails on rank 1, which then hangs in a backward of the first one, for which it computes a forward again.
/// Rank 0 waits for that backward, and has begun the second batch too.
#[test]
fn a_batch_that_has_failed_elsewhere_ends_no_wait() {
    let (config, text) = with_deadline(3700);
    let config = PipelineConfig { recompute: Recompute::Stage, ..config };
    let panics_at = Some(PER_BATCH + 1);
    let pipeline = hanging("looped-bfs", &Kind::of(config.clone()), panics_at, Some(text.clone()));
    check_given_up(pipeline, "looped-bfs", (config, text));
}

/// The moments of another optimizer are not dropped, with or without the last updates.
#[test]
fn a_corrected_run_resumes_with_its_own_optimizer() {
    let (lion, adamw) = (Lion::default(), AdamW::default());
    let launch = |optimizer| {
        let config = PipelineConfig { optimizer: Some(optimizer), ..delayed() };
        support::launch(program("1f1b", 2, 1), &config)
    };
    let mut written = launch(ErrorFeedback(lion).init());
    written.step_batch(numbered(0, &delayed()), RATE).expect("a step");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let checkpoint = saved(&mut written, 1, scratch.path());
    for other in [ErrorFeedback(adamw).init(), adamw.init()] {
        let error = launch(other).restore(&checkpoint).expect_err("AdamW has other moments").to_string();
        assert!(error.contains("resume with the optimizer that wrote it"), "{error}");
    }
    for own in [ErrorFeedback(lion).init(), lion.init()] {
        launch(own).restore(&checkpoint).expect("it has its moments");
    }
}

/// Writes a checkpoint after a step.
fn saved(pipeline: &mut Pipeline, step: u64, folder: &Path) -> Arc<Checkpoint> {
    let ranks = pipeline.state().expect("a state");
    let cursor = Cursor { epoch: 1, index: 1 };
    let state = TrainingState { step, cursor, description: Default::default(), ranks };
    let own = CheckpointFolder::own(folder).expect("a folder");
    let mut writer = CheckpointWriter::start(own, 1, 1, Duration::from_secs(20)).expect("it starts");
    writer.save(state).expect("it is taken");
    writer.wait().expect("it is saved");
    Arc::new(CheckpointFolder::newest(folder).expect("a sound checkpoint"))
}

/// Gradient descent at a learning rate of 0 changes a parameter only by the error of the update before it.
#[test]
fn a_parameter_that_is_trained_again_has_no_error_from_before() {
    let sgd: Sgd = SgdConfig::new().build();
    let config = PipelineConfig { optimizer: Some(ErrorFeedback(sgd).init()), ..delayed() };
    let is_first = |path: &str| path.starts_with("layers.0.");
    let mut pipeline = support::launch(program("1f1b", 2, 1), &config);
    let step = |pipeline: &mut Pipeline, number, rate| {
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
