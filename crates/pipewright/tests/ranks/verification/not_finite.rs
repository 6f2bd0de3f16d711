//! Gradients that are not finite in a step that is computed again: with equal bits they are the model's, and
//! with other bits a rank is named.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor, TensorData};
use pipewright::failure::Cause;
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Pipeline, PipelineError};
use pipewright::stage::WeightWork;
use pipewright::verification::{REPETITIONS, Suspicion, Verify};
use pipewright_schedule::Action;

use super::{STEPS, launch, replicated, step, train};
use crate::support::{WIDTH, stage};

/// Makes elements of a weight gradient of the last stage infinite.
struct Infinite {
    /// Whether every rank makes the first element infinite in each computation, as a model does.
    everywhere: bool,
    /// The element that rank 1 makes infinite besides, in each of the computations from the first one on; 0
    /// for none.
    wrong: &'static [usize],
    is_armed: AtomicBool,
    /// The number of computations on each rank.
    counts: Mutex<BTreeMap<u32, usize>>,
}

impl Infinite {
    fn new(everywhere: bool, wrong: &'static [usize]) -> Arc<Self> {
        Arc::new(Self { everywhere, wrong, is_armed: AtomicBool::new(false), counts: Mutex::default() })
    }

    fn arm(&self, is_armed: bool) {
        self.is_armed.store(is_armed, Ordering::SeqCst);
    }
}

impl ActionHook for Infinite {
    fn weights(&self, rank: WorldRank, action: Action, work: &mut WeightWork<'_>) {
        let is_its = matches!(action, Action::Backward { stage, microbatch }
            if stage.get() == 1 && microbatch.get() == 1);
        if !is_its || !self.is_armed.load(Ordering::SeqCst) {
            return;
        }
        let mut counts = self.counts.lock().expect("no test panics here");
        let count = counts.entry(rank.get()).or_default();
        let wrong = self.wrong.get(*count).copied().filter(|_| rank.get() == 1).unwrap_or(0);
        *count += 1;
        let mut elements = vec![0.0; WIDTH * WIDTH];
        if self.everywhere {
            elements[0] = f32::INFINITY;
        }
        if wrong > 0 {
            elements[wrong] = f32::INFINITY;
        }
        let gradient = TensorData::new(elements, [WIDTH, WIDTH]);
        let gradient = Tensor::<2>::from_data(gradient, &Device::flex());
        work.add("layers.4.weight", gradient).expect("the stage has the parameter");
    }
}

/// A step that has failed.
struct Failed {
    message: String,
    cause: Cause,
    suspicion: Option<Suspicion>,
    repetitions: u32,
    /// The ranks with wrong bits, and the action, if the bits of the last repetition are confirmed.
    wrong: Option<(Vec<u32>, Option<String>)>,
    /// The computations on rank 1.
    computations: usize,
}

/// Takes a step that fails, and checks that the pipeline then takes another one.
fn failed(replicas: u32, verify: Verify, hook: &Arc<Infinite>) -> Failed {
    let mut pipeline: Pipeline = launch(replicated(replicas), verify, Some(hook.clone()), stage);
    hook.arm(true);
    let error = step(&mut pipeline, 0, 1, 1.0).expect_err("the gradient is not finite");
    hook.arm(false);
    let PipelineError::Step(error) = error else { panic!("{error}") };
    let failure = pipeline.step_failure().expect("the step has failed");
    let (suspicion, repetitions) = (failure.suspicion.clone(), failure.repetitions);
    let wrong = failure
        .difference
        .as_ref()
        .map(|difference| (difference.wrong.iter().map(|rank| rank.get()).collect(), difference.action()));
    step(&mut pipeline, 1, 1, 1.0).expect("the pipeline takes further steps");
    let computations = hook.counts.lock().expect("no test panics here")[&1];
    Failed { message: error.to_string(), cause: error.cause, suspicion, repetitions, wrong, computations }
}

fn is_gradient(suspicion: Option<&Suspicion>) -> bool {
    matches!(suspicion, Some(Suspicion::Gradient { .. }))
}

#[test]
fn a_gradient_of_the_model_that_is_not_finite_fails_as_without_verification() {
    for replicas in [1, 2, 3] {
        let of = |verify| failed(replicas, verify, &Infinite::new(true, &[]));
        let (right, found) = (of(Verify::Off), of(Verify::OnSuspicion));
        assert!(matches!(right.cause, Cause::GradientNotFinite { .. }), "{}", right.message);
        assert_eq!(found.message, right.message, "{replicas} replicas");
        assert!(is_gradient(found.suspicion.as_ref()), "{:?}", found.suspicion);
        let counts = [right.repetitions, found.repetitions];
        assert_eq!((counts, right.computations, found.computations), ([0, 1], 1, 2), "{replicas} replicas");
        assert_eq!(found.wrong, None, "{replicas} replicas");
    }
}

#[test]
fn a_gradient_that_is_not_finite_in_one_computation_names_its_rank() {
    for replicas in [1, 2, 3] {
        let (right, _) = train(launch(replicated(replicas), Verify::Off, None, stage), 1, 1.0, || ());
        let hook = Infinite::new(false, &[1]);
        let pipeline = launch(replicated(replicas), Verify::OnSuspicion, Some(hook.clone()), stage);
        let found = train(pipeline, 1, 1.0, || hook.arm(true));
        super::assert_named(&format!("{replicas} replicas"), &found, &right, 1, ("1W", 2, false));
        assert!(is_gradient(Some(&found.1[0].suspicion)), "{:?} in step {STEPS}", found.1);
    }
}

#[test]
fn a_rank_is_also_named_if_the_gradient_of_the_model_is_not_finite() {
    for replicas in [1, 2, 3] {
        let found = failed(replicas, Verify::OnSuspicion, &Infinite::new(true, &[1]));
        assert!(matches!(found.cause, Cause::GradientNotFinite { .. }), "{}", found.message);
        assert_eq!(found.repetitions, 2, "{replicas} replicas");
        assert_eq!(found.wrong, Some((vec![1], Some("1W".to_owned()))), "{replicas} replicas");
    }
}

#[test]
fn gradients_that_are_not_finite_with_other_bits_each_time_are_not_confirmed() {
    let found = failed(1, Verify::OnSuspicion, &Infinite::new(false, &[1, 2, 3, 4]));
    let Cause::Unconfirmed { difference } = &found.cause else { panic!("{}", found.message) };
    assert_eq!((&difference.wrong[..], found.repetitions), (&[WorldRank::new(1)][..], REPETITIONS));
    assert_eq!(found.wrong, None, "the cause has it");
    assert!(is_gradient(found.suspicion.as_ref()), "{:?}", found.suspicion);
}
