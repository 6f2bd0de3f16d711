//! Overlaps whose halves run by turns: the forward of one microbatch computes while the backward of another
//! waits for the tokens of its experts, and the other way round.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::message::{Direction, Tag};
use pipewright::nn::{SplitBackward, TensorParallel};
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{
    Action, Event, Rank, Recompute, ScheduleSpec, Scope, ScopeKind, StageIndex, ValidatedProgram, generate,
};

use super::experts::{Layer, Mixtures};
use super::model::{MICROBATCHES, Sizes, config_of, sizes, take_step, take_steps};
use crate::support::{LAYERS, Step, WIDTH, loss, numbers};

const EXPERTS: usize = 4;

/// The moment at the end of the forward of a microbatch, or at the beginning of its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    action: Action,
    replica: u32,
}

/// A function that stages call at each moment.
#[derive(Clone)]
struct Fault(Arc<dyn Fn(Moment) + Send + Sync>);

impl std::fmt::Debug for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fault")
    }
}

/// Mixtures that call a fault.
#[derive(Module, Debug)]
struct Watched {
    mixtures: Mixtures,
    bias: Param<Tensor<1>>,
    #[module(skip)]
    fault: Fault,
}

/// Calls the fault in the backward.
struct Trap {
    fault: Fault,
    moment: Moment,
}

impl SplitBackward<2, 2> for Trap {
    type Weights = Tensor<1>;
    type Saved = ();
    type Waiting = Tensor<1>;

    fn forward(&self, input: Tensor<2>, _bias: Tensor<1>) -> (Tensor<2>, ()) {
        (input, ())
    }

    fn backward_input(
        &self,
        (): &(),
        bias: Tensor<1>,
        gradient: Tensor<2>,
        wanted: bool,
    ) -> (Option<Tensor<2>>, Tensor<1>) {
        (self.fault.0)(self.moment);
        (wanted.then_some(gradient), bias.zeros_like())
    }

    fn backward_weights(&self, gradient: Tensor<1>) -> Tensor<1> {
        gradient
    }
}

impl StageModule for Watched {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let (stage, microbatch) = (context.stage(), context.microbatch());
        let replica = self.mixtures.tensor.expert_parallel().rank().index;
        let output = self.mixtures.forward(input, context);
        (self.fault.0)(Moment { action: Action::Forward { stage, microbatch }, replica });
        let moment = Moment { action: Action::Backward { stage, microbatch }, replica };
        Trap { fault: self.fault.clone(), moment }.apply(output, &self.bias)
    }

    fn parameter_path(&self, local: &str) -> String {
        match local.strip_prefix("mixtures.") {
            Some(rest) => self.mixtures.parameter_path(rest),
            None => format!("stages.{}.{local}", self.mixtures.first),
        }
    }

    fn placement(&self, local: &str) -> Placement {
        local.strip_prefix("mixtures.").map_or(Placement::REPLICATED, |rest| self.mixtures.placement(rest))
    }
}

fn config(sizes: Sizes, expert_parallel: u32) -> PipelineConfig {
    PipelineConfig { expert_parallel, ..config_of(sizes) }
}

/// Returns the program of DualPipeV for a pipeline of these sizes.
fn program(sizes: Sizes, config: &PipelineConfig) -> ValidatedProgram {
    let microbatches = MICROBATCHES / sizes.data;
    let spec = ScheduleSpec { ranks: sizes.pipeline, microbatches, ..ScheduleSpec::default() };
    let lowering = TrainingLowering {
        replicas: sizes.data,
        keep_overlaps: config.runs_overlaps(),
        ..TrainingLowering::default()
    };
    for_training(&generate("dualpipev", &spec).expect("a schedule"), &lowering).expect("it is sound")
}

fn launch(
    world: World,
    sizes: Sizes,
    config: &PipelineConfig,
    fault: impl Fn(Moment) + Send + Sync + 'static,
) -> Pipeline {
    let program = program(sizes, config);
    let (stages, fault) = (program.placement().stages(), Fault(Arc::new(fault)));
    let launched = Pipeline::launch_split(program, world, config, move |stage: StageIndex, tensor| {
        let tensor: &TensorParallel = tensor;
        let count = LAYERS / stages as usize;
        let first = stage.index() * count;
        let layers =
            (first..first + count).map(|layer| Layer::new(layer, EXPERTS, tensor.experts(EXPERTS))).collect();
        let placement = match tensor.expert_parallel().ranks() {
            1 => Placement::REPLICATED,
            _ => Placement::ON_ONE_REPLICA,
        };
        let mixtures = Mixtures { layers, first, tensor: tensor.clone(), placement };
        let bias = Param::from_data(numbers(first as u64, [WIDTH]), &Device::flex().autodiff());
        let module = Watched { mixtures, bias, fault: fault.clone() };
        Ok::<_, Infallible>(if stage.get() + 1 == stages {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    });
    launched.expect("it starts")
}

fn launch_local(sizes: Sizes, config: &PipelineConfig) -> Pipeline {
    launch(World::local(sizes.pipeline * sizes.data), sizes, config, |_| ())
}

/// Returns the halves of the overlaps of a rank, in order.
fn overlaps(program: &ValidatedProgram, rank: u32) -> Vec<[Action; 2]> {
    let row = program.row(Rank::new(rank)).iter();
    let overlaps = row.filter(|action| matches!(action, Action::Overlap(_)));
    overlaps.map(|action| action.parts().collect::<Vec<_>>().try_into().expect("two halves")).collect()
}

fn check(sizes: Sizes, recompute: &Recompute) {
    let run = |experts| -> (Vec<Step>, StepSummary) {
        let config = PipelineConfig { recompute: recompute.clone(), ..config(sizes, experts) };
        let mut pipeline = launch_local(sizes, &config);
        (take_steps(&mut pipeline, 0..3), take_step(&mut pipeline, 3).expect("a step"))
    };
    let (expected, alone) = run(1);
    assert!(alone.timeline.scopes().is_empty(), "nothing runs by turns");
    assert!(alone.expert_exchange.iter().all(|exchange| exchange.total.is_zero()));
    for experts in [2, 4].into_iter().filter(|&experts| sizes.data.is_multiple_of(experts)) {
        let (steps, last) = run(experts);
        assert_eq!(steps, expected, "{sizes:?}, {experts} replicas hold the experts together");
        assert_eq!(last.losses, alone.losses);
        let is_overlap = |event: &&Event| matches!(event.action, Action::Overlap(_));
        assert!(last.timeline.events().iter().any(|event| is_overlap(&event)), "overlaps are one action");
        for exchange in &last.expert_exchange {
            assert!(exchange.total >= exchange.exposed && !exchange.total.is_zero(), "{exchange:?}");
        }
    }
}

#[test]
fn halves_that_run_by_turns_have_the_bits_of_replicas_with_all_experts() {
    check(sizes(1, 4, 1), &Recompute::None);
    check(sizes(2, 2, 1), &Recompute::None);
}

#[test]
fn a_backward_that_runs_by_turns_may_compute_its_forward_again() {
    check(sizes(1, 2, 1), &Recompute::Stage);
    check(sizes(1, 2, 1), &Recompute::Block);
}

/// The tokens for the forward of an overlap arrive only when the backward of the same rank has computed.
#[test]
fn a_backward_computes_while_the_tokens_of_the_forward_travel() {
    let sizes = sizes(1, 2, 1);
    let config = config(sizes, 2);
    let (world, in_flight) = World::controlled(sizes.data);
    let is_done = Arc::new(AtomicBool::new(false));
    let deliveries = {
        let is_done = is_done.clone();
        thread::spawn(move || {
            // The exchanges that the backwards of each rank have begun.
            let mut begun = vec![0; sizes.data as usize];
            while !is_done.load(Ordering::SeqCst) {
                in_flight.release_if(|from, to, tag| match tag {
                    Tag::ExpertGroup { half: Some(Direction::Backward), round } => {
                        begun[from.index()] = round + 1;
                        true
                    }
                    Tag::ExpertGroup { half: Some(Direction::Forward), round } => begun[to.index()] > round,
                    _ => true,
                });
                thread::sleep(Duration::from_micros(50));
            }
        })
    };
    let mut pipeline = launch(world, sizes, &config, |_| ());
    let summary = take_step(&mut pipeline, 0);
    drop(pipeline);
    is_done.store(true, Ordering::SeqCst);
    deliveries.join().expect("no panic");
    let summary = summary.expect("a rank that only waits would wait for ever");

    let expected = take_steps(&mut launch_local(sizes, &config), 0..1);
    assert_eq!(expected, [(summary.losses.clone(), summary.gradient_norm)]);
    let scopes = summary.timeline.scopes();
    for rank in (0..sizes.data).map(Rank::new) {
        let first = |kind: ScopeKind| -> &Scope {
            let found = scopes.iter().find(|scope| scope.rank == rank && scope.kind == kind);
            found.expect("a span")
        };
        let overlaps = overlaps(&program(sizes, &config), 0);
        assert!(!overlaps.is_empty());
        for [forward, backward] in overlaps {
            let exchange = first(ScopeKind::Exchange(forward));
            let computation = first(ScopeKind::Computation(backward));
            assert!(
                exchange.start <= computation.start && computation.start < exchange.end,
                "{forward} and {backward}: {exchange:?} {computation:?}"
            );
        }
    }
}

#[test]
fn a_failure_in_either_half_ends_the_step_of_all() {
    let sizes = sizes(1, 2, 1);
    let config = config(sizes, 2);
    let expected = take_steps(&mut launch_local(sizes, &config), 0..2);
    let halves = overlaps(&program(sizes, &config), 0)[1];
    for half in halves {
        let failed = AtomicBool::new(false);
        let at = Moment { action: half, replica: 1 };
        let fault = move |moment| {
            assert!(moment != at || failed.swap(true, Ordering::SeqCst), "out of cheese");
        };
        let mut pipeline = launch(World::local(sizes.data), sizes, &config, fault);
        let error = take_step(&mut pipeline, 0).expect_err("a half fails").to_string();
        for expected in ["rank 1", "OVERLAP_F_B", "out of cheese"] {
            assert!(error.contains(expected), "{half}: {error}");
        }
        assert_eq!(take_steps(&mut pipeline, 0..2), expected, "{half}: as if nothing had failed");
    }
}
