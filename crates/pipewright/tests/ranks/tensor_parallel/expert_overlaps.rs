//! Overlaps whose halves run by turns: the forward of one microbatch computes while the backward of another
//! waits for the tokens of its experts, and the other way round.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Tag};
use pipewright::nn::{SplitBackward, TensorParallel};
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright_schedule::csv::parse_schedule;
use pipewright_schedule::lower::{TrainingLowering, UnshardConfig, for_training};
use pipewright_schedule::{
    Action, Event, Rank, Recompute, Schedule, ScheduleSpec, Scope, ScopeKind, StageIndex, ValidatedProgram,
    generate,
};

use super::experts::{Layer, Mixtures};
use super::model::{MICROBATCHES, Sizes, Trap, config_of, sizes, take_step, take_steps};
use crate::support::{LAYERS, Step, WIDTH, loss, numbers};

const EXPERTS: usize = 4;

/// The moment at the end of the forward of a microbatch, or at the beginning of its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) action: Action,
    pub(super) replica: u32,
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
    /// A parameter that the first microbatch does not use.
    offset: Param<Tensor<1>>,
    #[module(skip)]
    fault: Fault,
}

impl StageModule for Watched {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let (stage, microbatch) = (context.stage(), context.microbatch());
        let replica = self.mixtures.tensor.expert_parallel().rank().index;
        let input = if microbatch.get() > 0 { input + self.offset.val().unsqueeze() } else { input };
        let output = self.mixtures.forward(input, context);
        (self.fault.0)(Moment { action: Action::Forward { stage, microbatch }, replica });
        let moment = Moment { action: Action::Backward { stage, microbatch }, replica };
        let fault = self.fault.clone();
        let call = move || {
            (fault.0)(moment);
            0.0
        };
        Trap(Box::new(call)).apply(output, &self.bias)
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

pub(super) fn config(sizes: Sizes, expert_parallel: u32) -> PipelineConfig {
    PipelineConfig { expert_parallel, ..config_of(sizes) }
}

/// Returns the program of DualPipeV for a pipeline of these sizes.
pub(super) fn program(sizes: Sizes, config: &PipelineConfig) -> ValidatedProgram {
    generated("dualpipev", sizes, config)
}

pub(super) fn lowered(schedule: &Schedule, sizes: Sizes, config: &PipelineConfig) -> ValidatedProgram {
    let is_sharded = config.data_parallel_mode.shards(sizes.data) > 1;
    let lowering = TrainingLowering {
        replicas: sizes.data,
        keep_overlaps: config.runs_overlaps(),
        unshard_window: is_sharded.then(|| UnshardConfig::default().window),
        ..TrainingLowering::default()
    };
    for_training(schedule, &lowering).expect("it is sound")
}

pub(super) fn launch(
    world: World,
    sizes: Sizes,
    config: &PipelineConfig,
    fault: impl Fn(Moment) + Send + Sync + 'static,
) -> Pipeline {
    launch_with(program(sizes, config), world, config, |first, _| vector(first as u64), fault)
}

/// Launches a pipeline under a schedule without overlaps.
pub(super) fn launch_schedule(
    schedule: &str,
    sizes: Sizes,
    config: &PipelineConfig,
    fault: impl Fn(Moment) + Send + Sync + 'static,
) -> Pipeline {
    let (program, world) = (generated(schedule, sizes, config), World::local(sizes.ranks()));
    launch_with(program, world, config, |first, _| vector(first as u64), fault)
}

/// Returns the program of a schedule for a pipeline of these sizes.
pub(super) fn generated(schedule: &str, sizes: Sizes, config: &PipelineConfig) -> ValidatedProgram {
    let microbatches = MICROBATCHES / sizes.data;
    let spec = ScheduleSpec { ranks: sizes.pipeline, microbatches, ..ScheduleSpec::default() };
    lowered(&generate(schedule, &spec).expect("a schedule"), sizes, config)
}

fn vector(seed: u64) -> Param<Tensor<1>> {
    Param::from_data(numbers(seed, [WIDTH]), &Device::flex().autodiff())
}

/// Launches a program. `offset_of` returns the offset of a stage from its first layer and the replica.
fn launch_with(
    program: ValidatedProgram,
    world: World,
    config: &PipelineConfig,
    offset_of: impl Fn(usize, u32) -> Param<Tensor<1>> + Send + Sync + 'static,
    fault: impl Fn(Moment) + Send + Sync + 'static,
) -> Pipeline {
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
        let bias = vector(first as u64);
        let offset = offset_of(first, tensor.expert_parallel().rank().index);
        let module = Watched { mixtures, bias, offset, fault: fault.clone() };
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

/// Calls `run` with a world that delivers a message when `is_due` returns true, which gets the sender, the
/// receiver and the tag.
pub(super) fn with_deliveries<R>(
    ranks: u32,
    mut is_due: impl FnMut(WorldRank, WorldRank, Tag) -> bool + Send + 'static,
    run: impl FnOnce(World) -> R,
) -> R {
    let (world, in_flight) = World::controlled(ranks);
    let is_done = Arc::new(AtomicBool::new(false));
    let deliveries = {
        let is_done = is_done.clone();
        thread::spawn(move || {
            while !is_done.load(Ordering::SeqCst) {
                in_flight.release_if(&mut is_due);
                thread::sleep(Duration::from_micros(50));
            }
        })
    };
    let result = run(world);
    is_done.store(true, Ordering::SeqCst);
    deliveries.join().expect("no panic");
    result
}

/// Takes a step with such a world.
pub(super) fn take_delivered_step(
    sizes: Sizes,
    config: &PipelineConfig,
    is_due: impl FnMut(WorldRank, WorldRank, Tag) -> bool + Send + 'static,
) -> StepSummary {
    let run = |world| take_step(&mut launch(world, sizes, config, |_| ()), 0);
    with_deliveries(sizes.pipeline * sizes.data, is_due, run).expect("all messages are delivered in the end")
}

/// Returns a function that is true at once for most messages of a step, and after `delay` if `is_late` returns
/// true.
pub(super) fn delays(
    delay: Duration,
    is_late: impl Fn(Tag) -> bool,
) -> impl FnMut(WorldRank, WorldRank, Tag) -> bool {
    let mut sent: HashMap<(WorldRank, WorldRank, Tag), Instant> = HashMap::new();
    move |from, to, tag| {
        let since = *sent.entry((from, to, tag)).or_insert_with(Instant::now);
        !is_late(tag) || since.elapsed() > delay
    }
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

/// Overlaps that a pass has made from the order of another schedule.
#[test]
fn paired_overlaps_have_the_bits_of_the_schedule_without_them() {
    for (name, sizes, stages_per_rank) in [
        ("zbvzerobubble", sizes(1, 2, 1), 2),
        ("zbvzerobubble", sizes(2, 2, 1), 2),
        ("interleaved1f1b", sizes(1, 2, 1), 4),
        ("interleaved1f1b", sizes(2, 2, 1), 2),
    ] {
        let run = |experts, overlap| {
            let spec = ScheduleSpec {
                ranks: sizes.pipeline,
                stages_per_rank: Some(stages_per_rank),
                microbatches: MICROBATCHES / sizes.data,
                overlap,
                ..ScheduleSpec::default()
            };
            let config = config(sizes, experts);
            let program = lowered(&generate(name, &spec).expect("a schedule"), sizes, &config);
            let has_overlaps = (0..sizes.pipeline).any(|rank| !overlaps(&program, rank).is_empty());
            assert_eq!(has_overlaps, overlap && experts > 1, "{name} on {} ranks", sizes.pipeline);
            let world = World::local(sizes.pipeline * sizes.data);
            let mut pipeline = launch_with(program, world, &config, |first, _| vector(first as u64), |_| ());
            let steps = take_steps(&mut pipeline, 0..3);
            let last = take_step(&mut pipeline, 3).expect("a step");
            let is_turn = |scope: &&Scope| matches!(scope.kind, ScopeKind::Computation(_));
            let turns = last.timeline.scopes().iter().filter(is_turn).count();
            assert_eq!(turns > 0, has_overlaps, "halves of {name} run by turns");
            (steps, last.losses)
        };
        let expected = run(1, false);
        for (experts, overlap) in [(2, false), (1, true), (2, true)] {
            assert_eq!(run(experts, overlap), expected, "{name}, {sizes:?}, {experts}, {overlap}");
        }
    }
}

/// The tokens for the forward of an overlap arrive only when the backward of the same rank has computed.
#[test]
fn a_backward_computes_while_the_tokens_of_the_forward_travel() {
    let sizes = sizes(1, 2, 1);
    let config = config(sizes, 2);
    // The exchanges that the backwards of each rank have begun. A rank that only waits would wait for ever.
    let mut begun = vec![0; sizes.data as usize];
    let summary = take_delivered_step(sizes, &config, move |from, to, tag| match tag {
        Tag::ExpertGroup { half: Some(Direction::Backward), round } => {
            begun[from.index()] = round + 1;
            true
        }
        Tag::ExpertGroup { half: Some(Direction::Forward), round } => begun[to.index()] > round,
        _ => true,
    });

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

/// Returns the receive that a half of an overlap needs, and the send of its result.
fn receive_and_send(half: Action) -> [Action; 2] {
    match half {
        Action::Forward { stage, microbatch } => {
            [Action::RecvForward { stage, microbatch }, Action::SendForward { stage, microbatch }]
        }
        Action::Backward { stage, microbatch } => {
            [Action::RecvBackward { stage, microbatch }, Action::SendBackward { stage, microbatch }]
        }
        _ => unreachable!("an overlap has a forward and a backward"),
    }
}

/// Gradients arrive late, so the forward of an overlap could begin before the messages of its backward
/// arrive.
#[test]
fn an_overlap_begins_after_its_messages_and_sends_after_both_halves() {
    let sizes = sizes(2, 2, 1);
    let config = config(sizes, 2);
    let is_gradient = |tag| matches!(tag, Tag::Boundary { direction: Direction::Backward, .. });
    let summary = take_delivered_step(sizes, &config, delays(Duration::from_millis(2), is_gradient));
    let (mut received, mut sent) = (0, 0);
    for rank in (0..sizes.pipeline * sizes.data).map(Rank::new) {
        let events = summary.timeline.events_of(rank);
        let event_of = |action: Action| events.iter().find(|event| event.action == action);
        for overlap in events.iter().filter(|event| matches!(event.action, Action::Overlap(_))) {
            let halves: Vec<Action> = overlap.action.parts().collect();
            let is_of_half = |scope: &&Scope| match scope.kind {
                ScopeKind::Computation(half) => halves.contains(&half),
                _ => false,
            };
            let computed = summary.timeline.scopes_of(rank).iter().filter(is_of_half);
            let (start, end) = computed.fold((f64::MAX, f64::MIN), |(start, end), scope| {
                (scope.start.min(start), scope.end.max(end))
            });
            assert!(start < end, "{} computes", overlap.action);
            for [receive, send] in halves.iter().copied().map(receive_and_send) {
                if let Some(event) = event_of(receive) {
                    assert!(event.end <= start, "{event:?} and {start}");
                    received += 1;
                }
                if let Some(event) = event_of(send) {
                    assert!(end <= event.start, "{event:?} and {end}");
                    sent += 1;
                }
            }
        }
    }
    assert!(received > 0 && sent > 0, "{received} and {sent}");
}

/// Checks that a step has exchanges, and that no halves have run by turns.
fn check_no_turns(summary: &StepSummary) {
    let scopes = summary.timeline.scopes();
    assert!(!scopes.is_empty() && scopes.iter().all(Scope::is_exchange), "{scopes:?}");
}

#[test]
fn a_stage_that_overlaps_with_itself_runs_one_half_after_the_other() {
    let sizes = sizes(1, 2, 1);
    let schedule = "0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0B1)OVERLAP_F_B,(0F3;0B2)OVERLAP_F_B,0B3\n";
    let schedule = parse_schedule(schedule).expect("a schedule");
    let config = config(sizes, 2);
    let program = lowered(&schedule, sizes, &config);
    assert_eq!(overlaps(&program, 0).len(), 3);
    let launch = |config: &PipelineConfig| {
        launch_with(program.clone(), World::local(sizes.data), config, |_, _| vector(0), |_| ())
    };
    let summary = take_step(&mut launch(&config), 0).expect("a step");
    check_no_turns(&summary);
    let alone = PipelineConfig { expert_parallel: 1, ..config };
    let expected = take_steps(&mut launch(&alone), 0..1);
    assert_eq!([(summary.losses, summary.gradient_norm)], expected[..]);
}

/// A hook that runs everything as it runs by default.
struct Plain {
    runs_overlaps: bool,
}

impl ActionHook for Plain {
    fn runs_overlaps(&self) -> bool {
        self.runs_overlaps
    }
}

#[test]
fn a_hook_runs_one_half_after_the_other() {
    let sizes = sizes(1, 2, 1);
    let expected = take_steps(&mut launch_local(sizes, &config(sizes, 2)), 0..1);
    for runs_overlaps in [false, true] {
        let hook: Arc<dyn ActionHook> = Arc::new(Plain { runs_overlaps });
        let config = PipelineConfig { hook: Some(hook), ..config(sizes, 2) };
        assert_eq!(!overlaps(&program(sizes, &config), 0).is_empty(), runs_overlaps);
        let summary = take_step(&mut launch_local(sizes, &config), 0).expect("a step");
        check_no_turns(&summary);
        assert_eq!([(summary.losses, summary.gradient_norm)], expected[..], "{runs_overlaps}");
    }
}

/// The forward of one stage computes while the backward of another one waits for its tokens. The backward
/// must not lock the copy of the parameter that the forward needs.
#[test]
fn stages_of_a_rank_may_hold_copies_of_one_parameter() {
    let sizes = sizes(1, 2, 1);
    // The first backward of the second microbatch is a half of an overlap. Burn separates the graphs of a
    // leaf when a backward of the leaf ends, and the first forward of a stage runs such a backward.
    let overlaps = "0F0,1F0,1B0,0F1,1F1,(0F2;1B1)OVERLAP_F_B,(1F2;0B0)OVERLAP_F_B,\
                    (0F3;1B2)OVERLAP_F_B,(1F3;0B1)OVERLAP_F_B,1B3,0B2,0B3\n";
    let schedule = parse_schedule(overlaps).expect("a schedule");
    let steps = move |offset_of: Box<dyn Fn(usize, u32) -> Param<Tensor<1>> + Send + Sync>| {
        let config = config(sizes, 2);
        let is_late = |tag| matches!(tag, Tag::ExpertGroup { half: Some(_), .. });
        let tokens_are_late = delays(Duration::from_millis(2), is_late);
        with_deliveries(sizes.data, tokens_are_late, |world| {
            let program = lowered(&schedule, sizes, &config);
            let mut pipeline = launch_with(program, world, &config, offset_of, |_| ());
            take_steps(&mut pipeline, 0..2)
        })
    };
    let expected = steps(Box::new(|_, _| vector(0)));
    let offsets: Vec<_> = (0..sizes.data).map(|_| Mutex::new(vector(0))).collect();
    let copy = move |_, replica: u32| offsets[replica as usize].lock().expect("no panic").clone();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(steps(Box::new(copy))));
    let found = receiver.recv_timeout(Duration::from_secs(60)).expect("neither half waits for ever");
    assert_eq!(found, expected);
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
