//! Verified steps: a flipped bit is found and corrected, and the rank that has computed it is named.

mod not_finite;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::failure::Cause;
use pipewright::hook::{ActionHook, BackwardRun, ForwardRun};
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode::{self, Hybrid, Replicated, Sharded};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, StepSummary};
use pipewright::stage::{Stage, StageError, WeightWork};
use pipewright::tensor::{pack, unpack};
use pipewright::transport::World;
use pipewright::verification::{FIRST_NORMS, Suspicion, Verification, Verify};
use pipewright_schedule::{Action, Recompute, StageIndex};

use crate::sharded::modules::mixed;
use crate::support::{Mlp, WIDTH, batch, config, loss, program, split, stage};

/// The steps before the one that is suspicious.
const STEPS: u64 = FIRST_NORMS as u64 + 1;
/// The microbatches of a replica.
const MICROBATCHES: u32 = 2;

type Make = fn(StageIndex, u32) -> Result<Stage, Infallible>;

/// How a pipeline of two ranks is replicated.
#[derive(Clone, Copy, Debug)]
struct Mesh {
    replicas: u32,
    mode: DataParallelMode,
    schedule: &'static str,
    /// Whether each stage computes its forwards again in its backwards.
    recomputes: bool,
}

const fn replicated(replicas: u32) -> Mesh {
    Mesh { replicas, mode: Replicated, schedule: "1f1b", recomputes: false }
}

/// Flips a bit of a result of a rank, in microbatch 1, in the next computations.
struct Flip {
    rank: u32,
    /// `F`, `B` or `W`.
    action: char,
    /// The number of computations that are still wrong.
    left: AtomicU32,
    /// Whether each computation flips a bit of another element.
    moves: bool,
}

impl Flip {
    fn is_due(&self, rank: WorldRank, action: Action) -> bool {
        let kind = match action {
            Action::Forward { .. } => 'F',
            Action::Backward { .. } | Action::InputBackward { .. } => 'B',
            _ => 'W',
        };
        let is_its = rank.get() == self.rank && action.microbatch().is_some_and(|number| number.get() == 1);
        let matches =
            kind == self.action || (self.action == 'W' && matches!(action, Action::Backward { .. }));
        let take = |left: u32| left.checked_sub(1);
        is_its && matches && self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }

    /// Flips the highest bit of the exponent of an element.
    fn flipped(&self, tensor: Tensor<2>) -> Tensor<2> {
        let data = tensor.into_data();
        let shape = data.shape().to_vec();
        let mut elements: Vec<f32> = data.iter().collect();
        let index = if self.moves { self.left.load(Ordering::SeqCst) as usize % elements.len() } else { 0 };
        elements[index] = f32::from_bits(elements[index].to_bits() ^ (1 << 30));
        Tensor::from_data(TensorData::new(elements, shape), &Device::flex())
    }
}

impl ActionHook for Flip {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        if self.action == 'F' && self.is_due(run.rank(), run.action()) {
            let values = unpack::<Tensor<2>>(run.values().clone());
            run.set_values(&pack(self.flipped(values.expect("one output"))));
        }
        Ok(())
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        if self.action == 'B' && self.is_due(run.rank(), run.action()) {
            let gradient =
                unpack::<Tensor<2>>(run.gradients().iter().flatten().cloned().collect()).expect("one input");
            run.set_gradients(pack(self.flipped(gradient)).into_iter().map(Some).collect());
        }
        Ok(())
    }

    fn weights(&self, rank: WorldRank, action: Action, work: &mut WeightWork<'_>) {
        if self.action == 'W' && self.is_due(rank, action) {
            let path = if action.stage().get() == 0 { "layers.0.weight" } else { "layers.4.weight" };
            let zero = Tensor::<2>::zeros([WIDTH, WIDTH], &Device::flex());
            let wrong = self.flipped(zero + 0.5);
            work.add(path, wrong).expect("the stage has the parameter");
        }
    }
}

/// Multiplies the outputs of 0F1 of the first replica by factors in some of its computations, which it counts.
struct Scaled {
    /// The computations of the action since the hook was armed, from 0, and their factors.
    factors: &'static [(u32, f64)],
    /// `u32::MAX` until it is armed.
    count: AtomicU32,
}

impl Scaled {
    fn new(factors: &'static [(u32, f64)]) -> Arc<Self> {
        Arc::new(Self { factors, count: AtomicU32::new(u32::MAX) })
    }

    fn arm(&self) {
        self.count.store(0, Ordering::SeqCst);
    }
}

impl ActionHook for Scaled {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        if run.rank().get() > 0 || run.action().to_string() != "0F1" {
            return Ok(());
        }
        let next = |count: u32| count.checked_add(1);
        let Ok(number) = self.count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) else {
            return Ok(());
        };
        if let Some((_, factor)) = self.factors.iter().find(|(wrong, _)| *wrong == number) {
            let values = unpack::<Tensor<2>>(run.values().clone()).expect("one output");
            run.set_values(&pack(values.mul_scalar(*factor)));
        }
        Ok(())
    }
}

fn launch(mesh: Mesh, verify: Verify, hook: Option<Arc<dyn ActionHook>>, make: Make) -> Pipeline {
    let Mesh { replicas, mode, schedule, recomputes } = mesh;
    let program = program(schedule, 2, MICROBATCHES);
    let stages = program.placement().stages();
    let (data_parallel, data_parallel_mode) = (replicas, mode);
    let recompute = if recomputes { Recompute::Stage } else { Recompute::None };
    let config = PipelineConfig { verify, hook, data_parallel, data_parallel_mode, recompute, ..config() };
    Pipeline::launch(program, World::local(2 * replicas), &config, move |index| make(index, stages))
        .expect("the pipeline starts")
}

/// The losses and the norm of each step, and the parameters, as bits.
pub(crate) type Bits = (Vec<Vec<u64>>, Vec<(String, Vec<u32>)>);

/// Takes a step of `batches` batches whose inputs are multiplied by `factor`.
pub(crate) fn step(
    pipeline: &mut Pipeline,
    number: u64,
    batches: u64,
    factor: f64,
) -> Result<Vec<StepSummary>, PipelineError> {
    let microbatches = pipeline.microbatches();
    let parts = |seed, factor| split(batch(seed, microbatches).mul_scalar(factor), microbatches);
    let of = |part| Batch::new(parts(10 * number + part, factor), parts(1000 + 10 * number + part, 1.0));
    let mut summaries = Vec::new();
    for part in 1..=batches {
        let is_last = part == batches;
        let mut summary =
            if is_last { pipeline.step_batch(of(0), 1e-2)? } else { pipeline.accumulate(of(part))? };
        let repeated = std::mem::take(&mut summary.repeated);
        if !repeated.is_empty() {
            assert_eq!(repeated.len(), summaries.len(), "all earlier batches");
            summaries = repeated;
        }
        summaries.push(summary);
    }
    Ok(summaries)
}

/// Trains some steps. The last but one is the suspicious one: `before` is called before it, and its
/// inputs are multiplied by `factor`.
pub(crate) fn train(
    mut pipeline: Pipeline,
    batches: u64,
    factor: f64,
    before: impl Fn(),
) -> (Bits, Vec<Verification>) {
    let (mut bits, mut found) = (Vec::new(), Vec::new());
    for number in 0..STEPS + 2 {
        let is_suspicious = number == STEPS;
        if is_suspicious {
            before();
        }
        let factor = if is_suspicious { factor } else { 1.0 };
        for summary in step(&mut pipeline, number, batches, factor).expect("a step") {
            let numbers = summary.losses.iter().chain([&summary.gradient_norm]);
            bits.push(numbers.map(|number| number.to_bits()).collect());
            if let Some(verification) = summary.verification {
                assert!(is_suspicious, "step {number}: {verification:?}");
                found.push(verification);
            }
        }
    }
    let parameters = pipeline.parameters().expect("all ranks answer").into_iter();
    let parameters = parameters.map(|parameter| {
        let bits = parameter.data.iter::<f32>().map(f32::to_bits).collect();
        (format!("{} {:?}", parameter.path, parameter.shard), bits)
    });
    ((bits, parameters.collect()), found)
}

/// Checks that a run has the bits of another one, and that its suspicious step named a rank for an action
/// after some repetitions. The last repetition was suspicious too if `is_reproduced`.
pub(crate) fn assert_named(
    what: &str,
    (found, verified): &(Bits, Vec<Verification>),
    right: &Bits,
    rank: u32,
    (action, repetitions, is_reproduced): (&str, u32, bool),
) {
    let [verification] = &verified[..] else { panic!("{what}: {verified:?}") };
    let difference = verification.difference.as_ref().expect(what);
    assert_eq!(difference.action().as_deref(), Some(action), "{what}: {difference}");
    assert_eq!(difference.wrong, [WorldRank::new(rank)], "{what}: {difference}");
    let outcome = (verification.repetitions, verification.is_reproduced);
    assert_eq!(outcome, (repetitions, is_reproduced), "{what}");
    assert!(found == right, "{what}: other bits than without the fault");
}

/// Flips a bit of `action` on `rank` in `times` computations of one step. Checks that the run has the bits of a
/// run without the fault, and that the rank is named.
fn check(mesh: Mesh, action: char, rank: u32, times: u32, expected: (&str, u32)) {
    let what = format!("{mesh:?}, {action} on rank {rank}, {times} times");
    let (right, none) = train(launch(mesh, Verify::Off, None, stage), 1, 1.0, || ());
    assert!(none.is_empty(), "{what}: {none:?}");
    let flip = Arc::new(Flip { rank, action, left: AtomicU32::new(0), moves: false });
    let pipeline = launch(mesh, Verify::OnSuspicion, Some(flip.clone()), stage);
    let found = train(pipeline, 1, 1.0, || flip.left.store(times, Ordering::SeqCst));
    assert_named(&what, &found, &right, rank, (expected.0, expected.1, false));
}

#[test]
fn a_flipped_bit_names_its_rank_and_changes_nothing() {
    for replicas in [1, 2, 4] {
        check(replicated(replicas), 'F', 0, 1, ("0F1", 2));
        check(replicated(replicas), 'B', 1, 1, ("1B1", 2));
        check(replicated(replicas), 'W', 1, 1, ("1W", 2));
    }
    check(replicated(2), 'B', 3, 1, ("1B1", 2));
    check(replicated(2), 'W', 2, 1, ("0W", 2));
    check(replicated(3), 'F', 2, 1, ("0F1", 2));
    check(replicated(4), 'W', 6, 1, ("0W", 2));
    check(Mesh { schedule: "zbv", ..replicated(1) }, 'B', 1, 1, ("2I1", 2));
}

/// Changes results of a step of several batches in some computations. Checks that all summaries that count and the
/// parameters have the bits of a run without the fault, and how often the action was computed.
fn check_accumulated(batches: u64, factors: &'static [(u32, f64)], computations: u32) {
    let (right, _) = train(launch(replicated(1), Verify::Off, None, stage), batches, 1.0, || ());
    let hook = Scaled::new(factors);
    let pipeline = launch(replicated(1), Verify::OnSuspicion, Some(hook.clone()), stage);
    let (found, verified) = train(pipeline, batches, 1.0, || hook.arm());
    let names: Vec<_> = verified.iter().filter_map(|one| one.difference.as_ref()?.action()).collect();
    assert!(!names.is_empty() && names.iter().all(|name| name == "0F1"), "{factors:?}: {verified:?}");
    assert!(found == right, "{factors:?}: other bits than without the fault: {verified:?}");
    // The step after the suspicious one is computed once.
    assert_eq!(hook.count.load(Ordering::SeqCst), computations + batches as u32, "{factors:?}");
}

#[test]
fn repetitions_replace_the_results_of_all_batches_of_a_step() {
    // The wrong first batch makes the norm jump at the end of the second one. A repetition stops after the first batch,
    // because it differs, and two more confirm its results and the sums of the weight gradients.
    check_accumulated(2, &[(0, 1e4)], 7);
    // The loss of the second batch is infinite, so the first two are repeated, twice because of the second one.
    check_accumulated(3, &[(1, 1e30)], 7);
    // After that, the third one is computed for the first time, and is suspicious too.
    check_accumulated(3, &[(1, 1e30), (6, 1e4)], 13);
}

#[test]
fn modules_do_not_change_while_batches_wait_that_may_be_repeated() {
    let refused = |verify| {
        let mut pipeline = launch(replicated(1), verify, None, stage);
        let microbatches = pipeline.microbatches();
        let part = |seed| split(batch(seed, microbatches), microbatches);
        pipeline.accumulate(Batch::new(part(1), part(2))).expect("a batch");
        let results =
            [pipeline.freeze(|_| false), pipeline.unfreeze(|_| false), pipeline.shift(BTreeMap::new())];
        let refused =
            results.iter().filter(|result| matches!(result, Err(PipelineError::ChangeBeforeUpdate))).count();
        pipeline.step_batch(Batch::new(part(3), part(4)), 1e-2).expect("the step that updates");
        pipeline.freeze(|_| false).expect("no batch waits");
        refused
    };
    assert_eq!((refused(Verify::OnSuspicion), refused(Verify::Off)), (3, 0));
}

#[test]
fn a_flipped_bit_of_sharded_parameters_names_its_rank() {
    check(Mesh { mode: Sharded, ..replicated(2) }, 'B', 1, 1, ("1B1", 2));
    check(Mesh { mode: Sharded, ..replicated(3) }, 'F', 4, 1, ("0F1", 2));
    check(Mesh { mode: Hybrid { shards: 2 }, ..replicated(4) }, 'W', 5, 1, ("1W", 2));
}

#[test]
fn a_flipped_bit_of_a_stage_that_recomputes_names_its_rank() {
    for action in ['F', 'B', 'W'] {
        let rank = u32::from(action != 'F');
        let name = if action == 'F' {
            "0F1"
        } else if action == 'B' {
            "1B1"
        } else {
            "1W"
        };
        check(Mesh { recomputes: true, ..replicated(2) }, action, rank, 1, (name, 2));
    }
}

#[test]
fn wrong_bits_that_a_rank_computes_twice_are_found_on_other_ranks() {
    // The rank gets the microbatches of another replica each time.
    check(replicated(4), 'B', 1, 2, ("1B1", 2));
    check(replicated(4), 'B', 1, 3, ("1B1", 3));
}

/// Trains with a step whose inputs are large, with and without verification. Checks that both have the same
/// bits.
pub(crate) fn assert_genuine(what: &str, launch: impl Fn(Verify) -> Pipeline, batches: u64, factor: f64) {
    let [(right, _), (found, verified)] =
        [Verify::Off, Verify::OnSuspicion].map(|verify| train(launch(verify), batches, factor, || ()));
    let [Verification { suspicion: Suspicion::Jump { norm, usual }, repetitions, difference, is_reproduced }] =
        &verified[..]
    else {
        panic!("{what}: {verified:?}")
    };
    assert!(norm > &(10.0 * usual), "{what}: {norm} and {usual}");
    assert_eq!((*repetitions, difference, *is_reproduced), (1, &None, true), "{what}");
    assert!(found == right, "{what}: other bits than without verification");
}

fn check_genuine(mesh: Mesh, make: Make, batches: u64) {
    assert_genuine(&format!("{mesh:?}"), |verify| launch(mesh, verify, None, make), batches, 1e3);
}

#[test]
fn a_genuine_jump_goes_on_with_the_same_bits() {
    for replicas in 1..5 {
        check_genuine(replicated(replicas), stage, 1);
    }
    // The mean of running statistics, auxiliary losses, and gradients of several batches.
    check_genuine(replicated(3), mixed, 1);
    check_genuine(replicated(2), stage, 3);
    check_genuine(Mesh { mode: Sharded, ..replicated(3) }, mixed, 2);
    check_genuine(Mesh { mode: Hybrid { shards: 2 }, ..replicated(4) }, stage, 1);
}

/// Takes a step without usual norms that fails, and another one. Returns the message of the error.
fn failed(mesh: Mesh, verify: Verify, flip: Option<Arc<Flip>>, factor: f64) -> String {
    let hook = flip.clone().map(|flip| flip as Arc<dyn ActionHook>);
    let mut pipeline = launch(mesh, verify, hook, stage);
    let error = step(&mut pipeline, 0, 1, factor).expect_err("the step fails");
    if let Some(flip) = flip {
        flip.left.store(0, Ordering::SeqCst);
    }
    step(&mut pipeline, 1, 1, 1.0).expect("the pipeline takes further steps");
    error.to_string()
}

#[test]
fn a_genuine_loss_that_is_not_finite_is_computed_twice_and_fails_as_without_verification() {
    let hook = Scaled::new(&[]);
    let mut pipeline = launch(replicated(1), Verify::OnSuspicion, Some(hook.clone()), stage);
    hook.arm();
    step(&mut pipeline, 0, 1, 1e30).expect_err("the loss is infinite");
    assert_eq!(hook.count.load(Ordering::SeqCst), 2, "computations");
    let failure = pipeline.step_failure().expect("the step has failed");
    assert!(matches!(failure.error.cause, Cause::LossNotFinite { .. }), "{failure:?}");
    assert!(matches!(failure.suspicion, Some(Suspicion::Loss { .. })), "{failure:?}");
    assert_eq!(failure.repetitions, 1);
    for replicas in [1, 2] {
        let error = |verify| failed(replicated(replicas), verify, None, 1e30);
        // With verification, losses are read after the program. Replicas fail at the same time, so the
        // microbatch may be another one.
        let words = |error: String| {
            let (_, rest) = error.split_once("the loss of microbatch ").unwrap_or_default();
            rest.trim_start_matches(|letter: char| letter.is_ascii_digit()).to_owned()
        };
        let expected = words(error(Verify::Off));
        assert!(
            expected.starts_with(" is inf; the parameters are still those before this step"),
            "{expected}"
        );
        assert_eq!(words(error(Verify::OnSuspicion)), expected);
    }
}

#[test]
fn a_step_without_two_equal_computations_fails_and_changes_nothing() {
    let always = |moves| Some(Arc::new(Flip { rank: 0, action: 'F', left: AtomicU32::new(100), moves }));
    let message = failed(replicated(1), Verify::OnSuspicion, always(true), 1.0);
    assert_eq!(
        message,
        "step 1: rank 0: rank 0 has computed wrong bits in action 0F1; the parameters are still those before this step: \
         leave out the host of the wrong rank, and resume from the newest checkpoint; if a layer, the loss or a hook \
         computes other bits each time, do not verify steps"
    );
    // If two ranks compute different bits each time, none is named.
    let message = failed(replicated(2), Verify::OnSuspicion, always(false), 1.0);
    let expected =
        "the ranks 0 and 2 have different bits in action 0F1, and which one is wrong is not known; ";
    assert!(message.contains(expected), "{message}");
    // Two ranks out of three agree.
    let message = failed(replicated(3), Verify::OnSuspicion, always(false), 1.0);
    assert!(message.contains("rank 0 has computed wrong bits in action 0F1; "), "{message}");
}

#[test]
fn an_error_of_another_kind_is_not_repeated() {
    struct Panics(AtomicU32);
    impl ActionHook for Panics {
        fn before(&self, _rank: WorldRank, action: Action) {
            if action.to_string() == "1F0" {
                self.0.fetch_add(1, Ordering::SeqCst);
                panic!("out of cheese");
            }
        }
    }
    let hook = Arc::new(Panics(AtomicU32::new(0)));
    let config = PipelineConfig { verify: Verify::OnSuspicion, hook: Some(hook.clone()), ..config() };
    let mut pipeline =
        Pipeline::launch(program("1f1b", 2, 2), World::local(2), &config, |index| stage(index, 2))
            .expect("it starts");
    let Err(PipelineError::Step(error)) = step(&mut pipeline, 0, 1, 1.0) else { panic!("the step fails") };
    assert!(matches!(error.cause, Cause::Panic { .. }), "{error}");
    assert_eq!(hook.0.load(Ordering::SeqCst), 1);
}

#[test]
fn without_verification_a_flipped_bit_is_not_noticed() {
    let flip = Arc::new(Flip { rank: 1, action: 'B', left: AtomicU32::new(1), moves: false });
    let mut pipeline = launch(replicated(1), Verify::Off, Some(flip.clone()), stage);
    let [summary] = &step(&mut pipeline, 0, 1, 1.0).expect("a step")[..] else { panic!("one batch") };
    assert!(summary.gradient_norm > 1e30 && summary.verification.is_none(), "{summary:?}");
    assert_eq!(flip.left.load(Ordering::SeqCst), 0);
}

/// Makes parameters larger.
struct Larger;

impl ModuleMapper for Larger {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A new leaf of the tape.
        parameter.map(|tensor| {
            let device = tensor.device();
            Tensor::from_data(tensor.mul_scalar(1.5).into_data(), &device).require_grad()
        })
    }
}

/// A rank has other parameters than its replicas, as after a bit has flipped in its memory.
#[test]
fn replicas_with_different_parameters_are_an_error() {
    let message = |replicas: u32| {
        let config = PipelineConfig { verify: Verify::OnSuspicion, data_parallel: replicas, ..config() };
        let make = move |index: StageIndex| -> Result<Stage, Infallible> {
            let module = Mlp::of_stage(index, 1);
            // Each rank makes its stages on its own thread.
            let is_other = thread::current().name() == Some("rank-1");
            let module = if is_other { module.map(&mut Larger) } else { module };
            Ok(Stage::with_loss(module, loss))
        };
        let world = World::local(replicas);
        let pipeline = Pipeline::launch(program("1f1b", 1, MICROBATCHES), world, &config, make);
        step(&mut pipeline.expect("it starts"), 0, 1, 1e30).expect_err("the step fails").to_string()
    };
    let end = "the parameters of stage 0; the parameters are still those before this step: start again from a checkpoint, \
               without the host of the wrong rank";
    let of_two = message(2);
    let expected = "the ranks 0 and 1 have different bits in the parameters of stage 0, and which one is wrong is not known; \
                    the parameters are still those before this step: start again from a checkpoint, without the hosts of \
                    these ranks, or test their memory before";
    assert!(of_two.contains(expected), "{of_two}");
    let of_three = message(3);
    assert!(of_three.ends_with(&format!("rank 1 has wrong bits in {end}")), "{of_three}");
}
