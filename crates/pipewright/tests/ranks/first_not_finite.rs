//! A step that fails because of a number that is not finite names the first layer with such a value, and leaves no trace
//! in the steps after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::failure::{Cause, FirstNotFinite, NotFiniteOrigin};
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineError};
use pipewright::stage::{FirstValue, StageContext, StageModule};
use pipewright::tensor::pack;
use pipewright::verification::Verify;
use pipewright_schedule::{Microbatch, Recompute, StageIndex};

use crate::support::{Block, LAYERS, ROWS, WIDTH, batch, config, loss, parameters, split};

const MICROBATCHES: u32 = 4;
/// The layer and the microbatch of its replica with the fault.
const LAYER: usize = 5;
const MICROBATCH: u32 = 2;

/// The mistake of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Its output overflows.
    Output,
    /// Its output is finite, and the gradient of its input is not.
    Gradient,
    /// It names a number of its own.
    Inside,
    /// Its auxiliary loss is not finite.
    Auxiliary,
}

/// A block that can have a fault in one microbatch.
#[derive(Module, Debug)]
struct Faulty {
    block: Block,
    #[module(skip)]
    fault: Option<Fault>,
    #[module(skip)]
    is_armed: Arc<AtomicBool>,
}

impl StageModule for Faulty {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let output = self.block.forward(input.clone(), context);
        let is_its = context.microbatch().get() == MICROBATCH && self.is_armed.load(Ordering::SeqCst);
        match self.fault.filter(|_| is_its) {
            Some(Fault::Output) => output.mul_scalar(1e30).mul_scalar(1e30),
            Some(Fault::Gradient) => output + input.mul_scalar(0.0).sqrt(),
            Some(Fault::Inside) => {
                context.not_finite("a score of the router `r`");
                output
            }
            Some(Fault::Auxiliary) => {
                context.auxiliary_loss(
                    "balance",
                    1.0,
                    output.clone().mean().mul_scalar(1e30).mul_scalar(1e30),
                );
                output
            }
            None => output,
        }
    }
}

/// A pipeline whose layer [`LAYER`] has a fault when it is armed.
fn pipeline(
    fault: Option<Fault>,
    is_armed: &Arc<AtomicBool>,
    set: impl Fn(PipelineBuilder) -> PipelineBuilder,
) -> Pipeline {
    let is_armed = is_armed.clone();
    let make = move |layer| Faulty {
        block: Block::new(layer),
        fault: fault.filter(|_| layer == LAYER),
        is_armed: is_armed.clone(),
    };
    let builder =
        Pipeline::builder(Layers::new(LAYERS, make)).config(config()).ranks(4).microbatches(MICROBATCHES);
    set(builder.loss(loss).name_not_finite(true)).launch().expect("it starts")
}

fn rows(step: u64, replicas: u32) -> [Tensor<2>; 2] {
    [step, step + 100].map(|seed| batch(seed, MICROBATCHES * replicas))
}

/// Takes a step that fails, and returns what it says. The steps after it have the bits of a pipeline without the fault.
fn origin_of(
    fault: Fault,
    replicas: u32,
    set: impl Fn(PipelineBuilder) -> PipelineBuilder,
) -> NotFiniteOrigin {
    let is_armed = Arc::new(AtomicBool::new(false));
    let set = |builder| set(builder).data_parallel(replicas).microbatches(MICROBATCHES * replicas);
    let mut faulty = pipeline(Some(fault), &is_armed, set);
    let mut sound = pipeline(None, &is_armed, set);
    let step = |pipeline: &mut Pipeline, step| {
        let [input, target] = rows(step, replicas);
        pipeline.step(input, target, 1e-2)
    };
    step(&mut faulty, 0).expect("no fault");
    is_armed.store(true, Ordering::SeqCst);
    let error = step(&mut faulty, 1).expect_err("a number is not finite");
    is_armed.store(false, Ordering::SeqCst);
    let PipelineError::Step(error) = error else { panic!("{error}") };
    let failure = faulty.step_failure().expect("the step has failed");
    assert_eq!(failure.error.to_string(), error.to_string());
    assert!(!failure.grid.is_empty(), "{failure}");
    let Cause::Located { cause, origin } = error.cause else { panic!("{error}") };
    assert!(!matches!(*cause, Cause::Located { .. }));
    for number in [0, 2] {
        let expected = step(&mut sound, number).expect("no fault");
        if number > 0 {
            let found = step(&mut faulty, number).expect("no fault");
            assert_eq!(found.losses, expected.losses, "{fault:?}");
            assert_eq!(found.gradient_norm, expected.gradient_norm, "{fault:?}");
        }
    }
    assert_eq!(parameters(&mut faulty), parameters(&mut sound), "{fault:?}");
    *origin
}

/// The layers and stages of a pipeline of 4 ranks with as many stages: layer 5 is on rank 2.
fn first(value: FirstValue) -> NotFiniteOrigin {
    NotFiniteOrigin::First(FirstNotFinite {
        value,
        stage: StageIndex::new(2),
        microbatch: Microbatch::new(MICROBATCH),
        rank: WorldRank::new(2),
        parameter: None,
    })
}

fn layer() -> String {
    format!("layers.{LAYER}")
}

fn expected(fault: Fault) -> FirstValue {
    match fault {
        Fault::Output => FirstValue::Output { layer: layer() },
        Fault::Gradient => FirstValue::InputGradient { layer: layer() },
        Fault::Inside => FirstValue::Inside { what: "a score of the router `r`".to_owned() },
        Fault::Auxiliary => FirstValue::Auxiliary { name: "balance".to_owned() },
    }
}

const FAULTS: [Fault; 4] = [Fault::Output, Fault::Gradient, Fault::Inside, Fault::Auxiliary];

#[test]
fn the_first_layer_is_named_under_each_schedule() {
    for fault in FAULTS {
        for schedule in ["1f1b", "gpipe", "zb-h1"] {
            let origin = origin_of(fault, 1, |builder| builder.schedule(schedule));
            assert_eq!(origin, first(expected(fault)), "{schedule}");
        }
    }
}

#[test]
fn the_first_layer_is_named_if_forwards_are_recomputed_or_bits_are_verified() {
    for fault in FAULTS {
        for recompute in [Recompute::Stage, Recompute::Block] {
            let origin = origin_of(fault, 1, |builder| builder.recompute(recompute.clone()));
            assert_eq!(origin, first(expected(fault)), "{recompute:?}");
        }
        let origin = origin_of(fault, 1, |builder| builder.verify(Verify::OnSuspicion));
        assert_eq!(origin, first(expected(fault)), "verified");
    }
}

#[test]
fn with_replicas_the_first_rank_that_finds_the_value_counts() {
    for fault in FAULTS {
        let NotFiniteOrigin::First(origin) = origin_of(fault, 2, |builder| builder) else {
            panic!("{fault:?} has an origin");
        };
        assert_eq!((origin.value, origin.stage.get()), (expected(fault), 2));
        let place = (origin.rank.get(), origin.microbatch.get());
        assert!([(2, MICROBATCH), (6, MICROBATCHES + MICROBATCH)].contains(&place), "{place:?}");
    }
}

#[test]
fn a_batch_of_an_accumulated_step_is_found() {
    for fault in FAULTS {
        let is_armed = Arc::new(AtomicBool::new(true));
        let mut pipeline = pipeline(Some(fault), &is_armed, |builder| builder);
        let accumulate = |pipeline: &mut Pipeline| {
            let [inputs, targets] = rows(1, 1).map(|rows| split(rows, MICROBATCHES));
            pipeline.accumulate(Batch::new(inputs, targets))
        };
        let accumulated = accumulate(&mut pipeline);
        // A gradient is read with the update.
        let outcome = accumulated.and_then(|_| {
            let [input, target] = rows(2, 1);
            pipeline.step(input, target, 1e-2)
        });
        let Err(PipelineError::Step(error)) = outcome else { panic!("{fault:?} fails the step") };
        let Cause::Located { origin, .. } = error.cause else { panic!("{error}") };
        assert_eq!(*origin, first(expected(fault)));
    }
}

/// Replaces all parameters by numbers that are not finite.
struct Ruin;

impl ModuleMapper for Ruin {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|values| values.mul_scalar(f32::NAN).detach().require_grad())
    }
}

/// Takes a step with these microbatches, and returns the sentence of its failure behind the advice.
fn sentence(pipeline: &mut Pipeline, change: impl Fn(Tensor<2>, bool) -> Tensor<2>) -> String {
    let [inputs, targets] = [false, true].map(|is_target| {
        let microbatch = |number| {
            let rows = batch(u64::from(number) + 50, 1);
            pack(if number == MICROBATCH { change(rows, is_target) } else { rows })
        };
        (0..MICROBATCHES).map(microbatch).collect::<Vec<_>>()
    });
    let error = pipeline.step_batch(Batch::new(inputs, targets), 1e-2).expect_err("a number is not finite");
    let text = error.to_string();
    let (_, origin) = text.split_once("; the step was computed again with checks: ").expect("an origin");
    origin.to_owned()
}

#[test]
fn data_losses_and_parameters_are_named() {
    let is_armed = Arc::default();
    let mut pipeline = pipeline(None, &is_armed, |builder| builder);
    let nan = || Tensor::<2>::full([ROWS, WIDTH], f32::NAN, &Device::flex());
    assert_eq!(
        sentence(&mut pipeline, |rows, is_target| if is_target { rows } else { nan() }),
        "`layers.0` is the first layer with a value that is not finite: the input that it was given, in microbatch 2 of stage \
         0 on rank 0"
    );
    assert_eq!(
        sentence(&mut pipeline, |rows, is_target| if is_target { nan() } else { rows }),
        "the first value that is not finite is the loss, in microbatch 2 of stage 3 \
         on rank 3"
    );
    pipeline.change_module(LAYER, |layer: Faulty| layer.map(&mut Ruin)).expect("the layer exists");
    assert_eq!(
        sentence(&mut pipeline, |rows, _| rows),
        "`layers.5` is the first layer with a value that is not finite: its output, in microbatch 0 of stage 2 on rank 2, \
         where the parameter `layers.5.block.linear.weight` has 36 elements that are NaN"
    );
}
