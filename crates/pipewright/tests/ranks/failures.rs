//! Failures in a step: the first cause is reported with its place, nothing hangs, and the next step is clean.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::batch::Batch;
use pipewright::failure::{Cause, StepError};
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::{Rank, StageIndex};

use crate::support::{Mlp, batch, config, descent, loss, program, stage};

/// A fault of a stage, and when it occurs.
#[derive(Clone, Debug)]
struct Fault {
    stage: u32,
    microbatch: u32,
    kind: FaultKind,
    armed: Arc<AtomicBool>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum FaultKind {
    Panic,
    NotANumber,
    Sleep(Duration),
}

#[derive(Module, Debug)]
struct Faulty {
    inner: Mlp,
    #[module(skip)]
    fault: Option<Fault>,
}

impl StageModule for Faulty {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let strikes = |fault: &&Fault| {
            fault.stage == context.stage().get()
                && fault.microbatch == context.microbatch().get()
                && fault.armed.swap(false, Ordering::SeqCst)
        };
        let fault = self.fault.as_ref().filter(strikes).map(|fault| fault.kind);
        let output = self.inner.forward(input, context);
        match fault {
            None => output,
            Some(FaultKind::Panic) => panic!("out of cheese"),
            Some(FaultKind::NotANumber) => output * f32::NAN,
            Some(FaultKind::Sleep(time)) => {
                std::thread::sleep(time);
                output
            }
        }
    }

    fn parameter_path(&self, local: &str) -> String {
        self.inner.parameter_path(local.strip_prefix("inner.").expect("the inner module's"))
    }
}

/// Longer than anything in these tests takes, also on a machine that is busy with other work.
const NEVER_REACHED: Duration = Duration::from_secs(60);

fn faulty(ranks: u32, stage: u32, microbatch: u32, kind: FaultKind, deadline: Duration) -> Pipeline {
    let fault = Fault { stage, microbatch, kind, armed: Arc::new(AtomicBool::new(true)) };
    let make = move |index: StageIndex| {
        let module = Faulty { inner: Mlp::of_stage(index, ranks), fault: Some(fault.clone()) };
        Ok::<_, std::convert::Infallible>(if index.get() + 1 == ranks {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    };
    let config = PipelineConfig { deadline, ..config() };
    Pipeline::launch(program("1f1b", ranks, 4), World::local(ranks), &config, make)
        .expect("the pipeline starts")
}

fn step(pipeline: &mut Pipeline) -> Result<Vec<f64>, StepError> {
    match pipeline.step(batch(0, 4), batch(100, 4), 1e-2) {
        Ok(report) => Ok(report.losses),
        Err(PipelineError::Step(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

fn healthy(schedule: &str, ranks: u32) -> Vec<f64> {
    let make = move |index| stage(index, ranks);
    let mut pipeline = Pipeline::launch(program(schedule, ranks, 4), World::local(ranks), &config(), make)
        .expect("it starts");
    step(&mut pipeline).expect("a step")
}

/// A fault occurs once; the next step must equal the first step of a healthy pipeline.
fn check(ranks: u32, stage: u32, microbatch: u32, kind: FaultKind, expected: &str) {
    let mut pipeline = faulty(ranks, stage, microbatch, kind, NEVER_REACHED);
    let start = Instant::now();
    let error = step(&mut pipeline).expect_err("the fault strikes");
    assert!(start.elapsed() < NEVER_REACHED / 2, "it took {:?}", start.elapsed());
    assert!(error.to_string().starts_with(expected), "{error}\nexpected {expected}");
    assert_eq!(step(&mut pipeline).expect("a step"), healthy("1f1b", ranks));
}

#[test]
fn a_panic_is_reported_with_its_place() {
    check(
        2,
        0,
        0,
        FaultKind::Panic,
        "step 1: rank 0, stage 0, microbatch 0, action 0F0: the stage panicked: out of",
    );
    check(
        2,
        1,
        3,
        FaultKind::Panic,
        "step 1: rank 1, stage 1, microbatch 3, action 1F3: the stage panicked: out of",
    );
    check(
        4,
        2,
        1,
        FaultKind::Panic,
        "step 1: rank 2, stage 2, microbatch 1, action 2F1: the stage panicked: out of",
    );
}

#[test]
fn a_panic_in_the_loss_names_the_loss() {
    let make = |index| {
        let module = Mlp::of_stage(index, 2);
        let broken = |_: Tensor<2>, _: Tensor<2>| -> Tensor<1> { panic!("out of cheese") };
        Ok::<_, std::convert::Infallible>(match index.get() {
            0 => Stage::new(module),
            _ => Stage::with_loss(module, broken),
        })
    };
    let mut pipeline = Pipeline::launch(program("1f1b", 2, 4), World::local(2), &config(), make)
        .expect("the pipeline starts");
    let error = step(&mut pipeline).expect_err("the loss panics").to_string();
    let expected =
        "step 1: rank 1, stage 1, microbatch 0, action 1F0: the stage panicked: the loss: out of cheese";
    assert!(error.starts_with(expected), "{error}");
}

/// The output of a failure: the grid with one mark, the ranks' last actions, and the events until the
/// failure.
#[test]
fn a_failure_shows_the_schedule_and_the_ranks() {
    let mut pipeline = faulty(2, 1, 2, FaultKind::Panic, NEVER_REACHED);
    assert!(pipeline.step_failure().is_none());
    let error = step(&mut pipeline).expect_err("the fault strikes");
    let failure = pipeline.step_failure().expect("the step failed");
    assert_eq!(failure.error.to_string(), error.to_string());
    let text = failure.to_string();
    let marked: Vec<&str> = text.split_whitespace().filter(|word| word.ends_with('!')).collect();
    assert_eq!(marked, ["1F2!"], "{text}");
    let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
    assert!(line("rank 0").contains(" 0F2 ") && line("rank 1").contains(" 1B1 "), "{text}");
    let before = "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1";
    let expected = format!("  rank 1: 10 of 20 done ({before}), is at 1F2, computes");
    assert_eq!(line("  rank 1"), expected, "{text}");
    assert!(line("  rank 0").starts_with("  rank 0: "), "{text}");
    let events = failure.timeline.events_of(Rank::new(1));
    assert_eq!(events.last().map(|event| event.action.to_string()).as_deref(), Some("1F2"));
    assert!(!failure.timeline.events_of(Rank::new(0)).is_empty());
    step(&mut pipeline).expect("the fault strikes once");
    assert!(pipeline.step_failure().is_none());
}

#[test]
fn a_step_that_is_refused_has_no_failure() {
    let mut pipeline = faulty(2, 1, 2, FaultKind::Panic, NEVER_REACHED);
    step(&mut pipeline).expect_err("the fault strikes");
    assert!(pipeline.step_failure().is_some());
    pipeline.step_batch(Batch::new(Vec::new(), Vec::new()), 1.0).expect_err("it has no microbatches");
    assert!(pipeline.step_failure().is_none());
}

#[test]
fn a_loss_that_is_not_finite_is_marked_after_the_program() {
    let mut pipeline = faulty(2, 1, 2, FaultKind::NotANumber, NEVER_REACHED);
    step(&mut pipeline).expect_err("the loss is not finite");
    let text = pipeline.step_failure().expect("the step failed").to_string();
    let row = text.lines().find(|line| line.starts_with("rank 1")).unwrap_or_default();
    assert!(row.ends_with(" !"), "{text}");
    assert!(text.contains("rank 1: all 20 actions done ("), "{text}");
}

#[test]
fn every_stage_and_microbatch_may_panic() {
    for stage in 0..4 {
        for microbatch in 0..4 {
            let place = format!("step 1: rank {stage}, stage {stage}, microbatch {microbatch}, ");
            check(4, stage, microbatch, FaultKind::Panic, &place);
        }
    }
}

#[test]
fn a_loss_that_is_not_finite_changes_no_parameter() {
    check(
        2,
        0,
        2,
        FaultKind::NotANumber,
        "step 1: rank 1: the loss of microbatch 2 is NaN; the parameters are still",
    );
    check(
        1,
        0,
        3,
        FaultKind::NotANumber,
        "step 1: rank 0: the loss of microbatch 3 is NaN; the parameters are still",
    );
}

#[test]
fn a_failed_update_is_reported_with_its_stage_and_ends_the_training() {
    let calls = AtomicU32::new(0);
    let optimizer = descent(move || {
        // The fifth parameter of rank 1.
        let is_on_rank_1 = std::thread::current().name() == Some("rank-1");
        assert!(!is_on_rank_1 || calls.fetch_add(1, Ordering::SeqCst) != 4, "out of cheese");
    });
    let config = PipelineConfig { optimizer: Some(optimizer), ..config() };
    // Rank 1 has the stages 1 and 3, with four parameters each.
    let program = program("interleaved1f1b", 2, 4);
    let mut pipeline = Pipeline::launch(program, World::local(2), &config, |index| stage(index, 4))
        .expect("the pipeline starts");
    let error = step(&mut pipeline).expect_err("the optimizer panics");
    assert_eq!(error.to_string(), "step 1: rank 1, stage 3, update: the optimizer panicked: out of cheese");
    // Rank 0 has updated.
    let next = pipeline.step(batch(0, 4), batch(100, 4), 1e-2);
    assert!(matches!(next, Err(PipelineError::Diverged { .. })), "{next:?}");
}

#[test]
fn a_failure_between_the_norm_and_the_update_ends_the_training_with_its_cause() {
    /// Lets rank 1 fail in its first update when rank 0 has updated.
    struct Fails(Arc<AtomicBool>);
    impl ActionHook for Fails {
        fn begin_update(&self, rank: WorldRank) {
            if rank.get() == 1 {
                while !self.0.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                panic!("out of cheese");
            }
        }
    }
    let updated = Arc::new(AtomicBool::new(false));
    let hook: Arc<dyn ActionHook> = Arc::new(Fails(updated.clone()));
    let optimizer = Some(descent(move || updated.store(true, Ordering::SeqCst)));
    let config = PipelineConfig { optimizer, hook: Some(hook), ..config() };
    let mut pipeline =
        Pipeline::launch(program("1f1b", 2, 4), World::local(2), &config, |index| stage(index, 2))
            .expect("the pipeline starts");
    let error = step(&mut pipeline).expect_err("the hook panics").to_string();
    assert_eq!(error, "step 1: rank 1: the stage panicked: out of cheese");
    let next = pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect_err("rank 0 has updated");
    let PipelineError::Diverged { step, first } = next else { panic!("{next}") };
    assert_eq!((step.get(), first.to_string()), (1, error));
}

#[test]
fn a_slow_stage_is_waited_for() {
    let slow = FaultKind::Sleep(Duration::from_millis(250));
    let mut pipeline = faulty(2, 0, 1, slow, Duration::from_secs(10));
    assert_eq!(step(&mut pipeline).expect("it is only slow"), healthy("1f1b", 2));
}

#[test]
fn a_stage_that_does_not_return_is_reported_with_all_ranks() {
    let stuck = FaultKind::Sleep(Duration::from_secs(20));
    let mut pipeline = faulty(2, 0, 1, stuck, Duration::from_secs(1));
    let start = Instant::now();
    let error = step(&mut pipeline).expect_err("it does not come back");
    assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    let Cause::Deadline { report, .. } = &error.cause else { panic!("{error}") };
    assert!(report.contains("is at 0F1, computes"), "{report}");
    assert!(report.contains("waits for the activations of microbatch 1 for stage 1 from rank 0"), "{report}");
}

#[test]
fn a_stage_that_cannot_be_made_is_named() {
    let make = |index: StageIndex| match index.get() {
        1 => Err("no such file".to_owned()),
        _ => stage(index, 2).map_err(|never| match never {}),
    };
    let error =
        Pipeline::launch(program("1f1b", 2, 2), World::local(2), &config(), make).err().expect("it fails");
    assert_eq!(error.to_string(), "step 0: rank 1: the stage cannot be made: stage 1: no such file");
}

#[test]
fn a_batch_that_does_not_divide_runs_nothing() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let make = move |index| {
        counted.fetch_add(1, Ordering::SeqCst);
        stage(index, 2)
    };
    let mut pipeline = Pipeline::launch(program("gpipe", 2, 2), World::local(2), &config(), make)
        .expect("the pipeline starts");
    let error = pipeline.step(batch(0, 3), batch(100, 3), 1e-2).expect_err("nine rows do not halve");
    assert!(error.to_string().contains("9 rows do not divide into 2 microbatches"), "{error}");
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    pipeline.step(batch(0, 2), batch(100, 2), 1e-2).expect("six do");
}

#[test]
fn boundaries_that_do_not_fit_are_named() {
    #[derive(Module, Debug)]
    struct Cube {
        inner: Mlp,
    }
    impl StageModule for Cube {
        type Input = Tensor<3>;
        type Output = Tensor<2>;
        fn forward(&self, input: Tensor<3>, _context: &StageContext) -> Tensor<2> {
            input.flatten(0, 1)
        }
    }
    let make = |index: StageIndex| match index.get() {
        0 => stage(index, 2),
        _ => Ok(Stage::with_loss(Cube { inner: Mlp::of_stage(index, 2) }, loss)),
    };
    let mut pipeline = Pipeline::launch(program("gpipe", 2, 2), World::local(2), &config(), make)
        .expect("the pipeline starts");
    let error = pipeline.step(batch(0, 2), batch(100, 2), 1e-2).expect_err("the ranks differ");
    let expected = "step 1: rank 1, stage 1, microbatch 0, action 1F0: the stage cannot take its input: expected a \
                    float tensor of rank 3, found a float tensor of shape";
    assert!(error.to_string().starts_with(expected), "{error}");
}
