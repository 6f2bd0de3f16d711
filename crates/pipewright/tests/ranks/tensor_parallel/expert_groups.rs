//! Replicas that hold the experts of each mixture together: the bits of replicas that hold all experts,
//! checkpoints, failures, and settings that do not work with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pipewright::hook::{ActionHook, ReduceRun, UnshardRun};
use pipewright::ids::WorldRank;
use pipewright::mesh::{DataParallelMode, Mesh};
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, SeededPipeline};
use pipewright::stage::{Stage, StageError};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright_schedule::{Action, Recompute, StageIndex};

use super::checkpoints::{save, stored};
use super::experts::{Layer, Mixtures};
use super::model::{MICROBATCHES, config_of, sizes, take_step, take_steps};
use crate::support::{LAYERS, Step, batch, loss, program, split, stage};

/// The experts of a layer.
const EXPERTS: usize = 4;
const RANKS: u32 = 2;
const REPLICAS: u32 = 4;

/// Returns the settings of four replicas; so many of them hold the experts together.
pub(super) fn config(expert_parallel: u32) -> PipelineConfig {
    PipelineConfig { expert_parallel, ..config_of(sizes(RANKS, REPLICAS, 1)) }
}

/// Returns the placement of experts if each replica builds some of them.
fn placement_of(tensor: &TensorParallel) -> Placement {
    match tensor.expert_parallel().ranks() {
        1 => Placement::REPLICATED,
        _ => Placement::ON_ONE_REPLICA,
    }
}

fn try_launch(schedule: &str, config: &PipelineConfig) -> Result<Pipeline, PipelineError> {
    let own = |layer, tensor: &TensorParallel| Layer::new(layer, EXPERTS, tensor.experts(EXPERTS));
    try_launch_with(schedule, config, own, placement_of)
}

/// Launches a pipeline with these layers, whose experts have this placement.
fn try_launch_with(
    schedule: &str,
    config: &PipelineConfig,
    make: impl Fn(usize, &TensorParallel) -> Layer + Send + Sync + 'static,
    placement: impl Fn(&TensorParallel) -> Placement + Send + Sync + 'static,
) -> Result<Pipeline, PipelineError> {
    let program = program(schedule, RANKS, MICROBATCHES / config.data_parallel);
    let stages = program.placement().stages();
    let world = World::local(RANKS * config.data_parallel * config.tensor_parallel);
    Pipeline::launch_split(program, world, config, move |stage: StageIndex, tensor: &TensorParallel| {
        let count = LAYERS / stages as usize;
        let first = stage.index() * count;
        let layers = (first..first + count).map(|layer| make(layer, tensor)).collect();
        let module = Mixtures { layers, first, tensor: tensor.clone(), placement: placement(tensor) };
        Ok::<_, std::convert::Infallible>(if stage.get() + 1 == stages {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    })
}

pub(super) fn launch(schedule: &str, config: &PipelineConfig) -> Pipeline {
    try_launch(schedule, config).expect("it starts")
}

/// Returns the parameters of the whole model.
fn parameters(pipeline: &mut Pipeline, experts: u32) -> Vec<(String, Vec<f32>)> {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    stored(&save(pipeline, RANKS * experts, scratch.path()))
}

/// Returns the settings of replicas that hold the other parameters together in `mode`.
pub(super) fn sharded(
    replicas: u32,
    data_parallel_mode: DataParallelMode,
    expert_parallel: u32,
) -> PipelineConfig {
    PipelineConfig { data_parallel_mode, data_parallel: replicas, ..config(expert_parallel) }
}

/// Returns the number of files in which ranks with these settings store their state.
fn files(config: &PipelineConfig) -> u32 {
    RANKS * config.data_parallel_mode.shards(config.data_parallel).max(config.expert_parallel)
}

/// Checks that `run` has the same results for groups of 1, 2 and 4 replicas.
fn check<T: PartialEq + std::fmt::Debug>(what: &str, run: impl Fn(u32) -> T) {
    let expected = run(1);
    for experts in [2, 4] {
        assert_eq!(run(experts), expected, "{what}: {experts} replicas hold the experts together");
    }
}

#[test]
fn bits_do_not_depend_on_the_replicas_that_hold_the_experts_together() {
    for schedule in ["1f1b", "zb-h1"] {
        check(schedule, |experts| {
            let mut pipeline = launch(schedule, &config(experts));
            let steps = take_steps(&mut pipeline, 0..3);
            let parameters = parameters(&mut pipeline, experts);
            assert_eq!(parameters.len(), LAYERS * (1 + 3 * EXPERTS), "each parameter is stored once");
            (steps, parameters)
        });
    }
}

/// Matrices have 6 or 4 rows, so shares of rows differ, and some replicas have no rows of a matrix.
#[test]
fn bits_of_sharded_parameters_do_not_depend_on_the_replicas_that_hold_the_experts() {
    let modes = [
        ("1f1b", 4, DataParallelMode::Sharded),
        ("zb-h1", 4, DataParallelMode::Hybrid { shards: 2 }),
        ("1f1b", 8, DataParallelMode::Hybrid { shards: 4 }),
    ];
    for (schedule, replicas, mode) in modes {
        check(&format!("{schedule}, {replicas} replicas, {mode:?}"), |experts| {
            let config = sharded(replicas, mode, experts);
            let mut pipeline = launch(schedule, &config);
            let steps = take_steps(&mut pipeline, 0..3);
            let scratch = tempfile::tempdir().expect("a scratch folder");
            let parameters = stored(&save(&mut pipeline, files(&config), scratch.path()));
            assert_eq!(parameters.len(), LAYERS * (1 + 3 * EXPERTS), "each parameter is stored once");
            (steps, parameters)
        });
    }
}

#[test]
fn accumulated_batches_of_sharded_parameters_have_the_same_bits() {
    check("sharded, accumulated, recomputed", |experts| {
        let config = sharded(REPLICAS, DataParallelMode::Sharded, experts);
        let mut pipeline = launch("1f1b", &PipelineConfig { recompute: Recompute::Stage, ..config });
        let split = |seed| split(batch(seed, MICROBATCHES), MICROBATCHES);
        let half = pipewright::batch::Batch::new(split(7), split(107));
        pipeline.accumulate(half).expect("half a step");
        let steps = take_steps(&mut pipeline, 0..2);
        let batch = pipewright::batch::Batch::new(split(0), split(100));
        (steps, pipeline.eval_losses(batch).expect("an evaluation").losses)
    });
}

/// Frozen experts are whole on several replicas, and the first of these replicas stores them.
#[test]
fn some_experts_of_sharded_parameters_may_be_frozen() {
    for mode in [DataParallelMode::Sharded, DataParallelMode::Hybrid { shards: 2 }] {
        check(&format!("frozen, {mode:?}"), |experts| {
            let config = sharded(REPLICAS, mode, experts);
            let make = |layer, tensor: &TensorParallel| {
                Layer::new(layer, EXPERTS, tensor.experts(EXPERTS)).with_frozen(3)
            };
            let mut pipeline = try_launch_with("1f1b", &config, make, placement_of).expect("it starts");
            let mut steps = take_steps(&mut pipeline, 0..2);
            pipeline.freeze(|path| path.contains(".experts.1.")).expect("they are frozen");
            steps.extend(take_steps(&mut pipeline, 2..4));
            let scratch = tempfile::tempdir().expect("a scratch folder");
            (steps, stored(&save(&mut pipeline, files(&config), scratch.path())))
        });
    }
}

#[test]
fn accumulated_and_recomputed_batches_have_the_same_bits() {
    check("accumulated, recomputed", |experts| {
        let config = PipelineConfig { recompute: Recompute::Stage, ..config(experts) };
        let mut pipeline = launch("1f1b", &config);
        let split = |seed| split(batch(seed, MICROBATCHES), MICROBATCHES);
        let half = pipewright::batch::Batch::new(split(7), split(107));
        pipeline.accumulate(half).expect("half a step");
        take_steps(&mut pipeline, 0..2)
    });
}

#[test]
fn an_evaluation_has_the_same_bits() {
    check("evaluation", |experts| {
        let split = |seed| split(batch(seed, MICROBATCHES), MICROBATCHES);
        let batch = pipewright::batch::Batch::new(split(0), split(100));
        launch("1f1b", &config(experts)).eval_losses(batch).expect("an evaluation").losses
    });
}

/// All layers between the trained expert and the last layer are frozen.
#[test]
fn one_expert_may_be_trained_while_all_others_are_frozen() {
    check("frozen", |experts| {
        let config = PipelineConfig { deadline: Duration::from_secs(20), ..config(experts) };
        let mut pipeline = launch("1f1b", &config);
        let is_trained =
            |path: &str| path.starts_with("layers.1.experts.3.") || path.starts_with("layers.7.");
        pipeline.freeze(move |path| !is_trained(path)).expect("they are frozen");
        let before = parameters(&mut pipeline, experts);
        let steps = take_steps(&mut pipeline, 0..2);
        let after = parameters(&mut pipeline, experts);
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            if !is_trained(path) {
                assert_eq!(before, after, "{path} is frozen");
            } else if path.starts_with("layers.1.") {
                assert_ne!(before, after, "{path} is trained");
            }
        }
        (steps, after)
    });
}

/// Only the replica that holds the frozen expert has a parameter that is not trained.
#[test]
fn an_expert_may_be_frozen_before_the_launch() {
    check("frozen before", |experts| {
        let config = PipelineConfig { deadline: Duration::from_secs(20), ..config(experts) };
        let make = |layer, tensor: &TensorParallel| {
            Layer::new(layer, EXPERTS, tensor.experts(EXPERTS)).with_frozen(3)
        };
        let mut pipeline = try_launch_with("1f1b", &config, make, placement_of).expect("it starts");
        take_steps(&mut pipeline, 0..2)
    });
}

#[test]
fn the_placement_has_no_effect_if_every_replica_holds_all_experts() {
    let config = PipelineConfig { data_parallel_mode: DataParallelMode::Sharded, ..config(1) };
    let run = |placement| {
        let make = |layer, _: &TensorParallel| Layer::new(layer, EXPERTS, 0..EXPERTS);
        let mut pipeline = try_launch_with("1f1b", &config, make, move |_| placement).expect("it starts");
        take_steps(&mut pipeline, 0..2)
    };
    assert_eq!(run(Placement::ON_ONE_REPLICA), run(Placement::REPLICATED));
}

#[test]
fn replicas_that_hold_other_experts_than_they_say_are_refused() {
    let refused = |holds_all: bool, placement, expected: &str| {
        let make = move |layer, tensor: &TensorParallel| {
            let held = if holds_all { 0..EXPERTS } else { tensor.experts(EXPERTS) };
            Layer::new(layer, EXPERTS, held)
        };
        let launched = try_launch_with("1f1b", &config(2), make, move |_| placement);
        let error = launched.err().expect("it is refused").to_string();
        assert!(error.contains(expected) && error.contains("`Placement::ON_ONE_REPLICA`"), "{error}");
    };
    let parameter = "`layers.0.experts.0.down_proj.weight` of stage 0";
    let on = |held: &str| format!("{parameter} is on {held}");
    refused(
        false,
        Placement::REPLICATED,
        &on("1 replica that hold the experts together, and should be on 2: build only"),
    );
    refused(
        true,
        Placement::ON_ONE_REPLICA,
        &on("2 replicas that hold the experts together, and should be on 1: build only"),
    );
}

/// Gathers parameters, or sets them itself.
struct Unshards {
    sets: bool,
}

impl ActionHook for Unshards {
    fn unshard(&self, run: &mut UnshardRun<'_>) -> Result<(), StageError> {
        if self.sets {
            return run.set_parameters(run.rows()?);
        }
        run.run();
        Ok(())
    }
}

#[test]
fn a_hook_may_not_gather_the_rows_of_experts() {
    let launched = |hook: Option<Unshards>| {
        let hook = hook.map(|hook| Arc::new(hook) as Arc<dyn ActionHook>);
        launch("1f1b", &PipelineConfig { hook, ..sharded(REPLICAS, DataParallelMode::Sharded, 2) })
    };
    let mut pipeline = launched(Some(Unshards { sets: true }));
    let error = take_step(&mut pipeline, 0).expect_err("the experts differ").to_string();
    assert!(error.contains("call `UnshardRun::run`, or set `expert_parallel` to 1"), "{error}");
    let steps = |hook| take_steps(&mut launched(hook), 0..2);
    assert_eq!(steps(Some(Unshards { sets: false })), steps(None));
}

/// Leaves out the sum over the replicas, or only looks on.
struct Reduces {
    sums: bool,
    calls: AtomicUsize,
}

impl ActionHook for Reduces {
    fn reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.sums {
            run.run();
        }
        Ok(())
    }
}

#[test]
fn a_hook_may_not_sum_the_gradients_of_experts() {
    let launched = |sums| {
        let hook = Arc::new(Reduces { sums, calls: AtomicUsize::new(0) });
        let config = PipelineConfig { hook: Some(hook.clone()), ..config(2) };
        (launch("1f1b", &config), hook)
    };
    let (mut pipeline, _) = launched(false);
    let error = take_step(&mut pipeline, 0).expect_err("the experts differ").to_string();
    assert!(error.contains("call `ReduceRun::run`, or set `expert_parallel` to 1"), "{error}");
    let (mut pipeline, hook) = launched(true);
    let split = |seed| split(batch(seed, MICROBATCHES), MICROBATCHES);
    pipeline.accumulate(pipewright::batch::Batch::new(split(7), split(107))).expect("half a step");
    assert_eq!(hook.calls.load(Ordering::SeqCst), 0, "nothing is summed yet");
    take_step(&mut pipeline, 0).expect("a step");
}

#[test]
fn a_run_resumes_under_any_number() {
    let expected: Vec<Step> = take_steps(&mut launch("1f1b", &config(1)), 0..6);
    for (before, after) in [(4, 1), (4, 2), (1, 4)] {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let mut first = launch("1f1b", &config(before));
        take_steps(&mut first, 0..3);
        let checkpoint = save(&mut first, RANKS * before, scratch.path());
        let mut resumed = launch("zb-h1", &config(after));
        resumed.restore(&checkpoint).expect("it is restored");
        assert_eq!(take_steps(&mut resumed, 3..6), expected[3..], "{before} to {after}");
    }
}

/// All of them have the same bits, because no two parts of rows are added to the norm in another order.
#[test]
fn a_run_with_sharded_parameters_resumes_under_any_number_and_mode() {
    use DataParallelMode::{Replicated, Sharded};
    let expected: Vec<Step> = take_steps(&mut launch("1f1b", &config(1)), 0..6);
    for ((mode, before), (mode_after, after)) in [
        ((Sharded, 2), (Replicated, 1)),
        ((Sharded, 2), (Sharded, 4)),
        ((Sharded, 4), (Sharded, 1)),
        ((Sharded, 1), (Sharded, 2)),
        ((Replicated, 4), (Sharded, 2)),
    ] {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let before = sharded(REPLICAS, mode, before);
        let mut first = launch("1f1b", &before);
        take_steps(&mut first, 0..3);
        let checkpoint = save(&mut first, files(&before), scratch.path());
        let mut resumed = launch("zb-h1", &sharded(REPLICAS, mode_after, after));
        resumed.restore(&checkpoint).expect("it is restored");
        let found = take_steps(&mut resumed, 3..6);
        assert_eq!(found, expected[3..], "{mode:?} to {mode_after:?}, {after}");
    }
}

/// Groups of two and four replicas store other rows of the same experts.
#[test]
fn a_run_in_shard_groups_resumes_in_others() {
    let all = |replicas, shards, experts| sharded(replicas, DataParallelMode::Hybrid { shards }, experts);
    let mut first = launch("1f1b", &all(8, 4, 2));
    take_steps(&mut first, 0..2);
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let checkpoint = save(&mut first, files(&all(8, 4, 2)), scratch.path());
    for config in [all(4, 2, 4), all(4, 2, 2), all(8, 4, 1), sharded(2, DataParallelMode::Sharded, 2)] {
        let mut resumed = launch("1f1b", &config);
        resumed.restore(&checkpoint).expect("it is restored");
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let again = save(&mut resumed, files(&config), scratch.path());
        assert_eq!(stored(&again), stored(&checkpoint), "{:?}", config.data_parallel_mode);
    }
}

/// Fails once, before the second forward of stage 1 on the second replica.
struct FailsOnce(AtomicBool);

impl ActionHook for FailsOnce {
    fn before(&self, rank: WorldRank, action: Action) {
        let is_here = rank == WorldRank::new(3) && action.to_string() == "1F1";
        assert!(!is_here || self.0.swap(true, Ordering::SeqCst), "out of cheese");
    }
}

#[test]
fn a_replica_that_fails_ends_the_step_of_all() {
    let start = Instant::now();
    let hook = Some(Arc::new(FailsOnce(AtomicBool::new(false))) as Arc<dyn ActionHook>);
    let mut pipeline = launch("1f1b", &PipelineConfig { hook, ..config(4) });
    let error = take_step(&mut pipeline, 0).expect_err("a replica fails").to_string();
    assert!(error.contains("rank 3") && error.contains("out of cheese"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(50), "the other ranks are woken");
    let expected = take_steps(&mut launch("1f1b", &config(1)), 0..2);
    assert_eq!(take_steps(&mut pipeline, 0..2), expected, "as if nothing had failed");
}

#[test]
fn settings_that_do_not_work_with_expert_groups_are_refused() {
    let refused = |config: PipelineConfig, expected: &str| {
        let error = try_launch("1f1b", &config).err().expect("it is refused").to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(
        config(3),
        "4 replicas cannot form groups of 3 that hold the experts together: set `expert_parallel` to a divisor",
    );
    let whole = PipelineConfig { tensor_parallel: 2, whole_experts: true, ..config(2) };
    refused(whole, "which does not work with whole experts of tensor ranks");
    refused(
        sharded(6, DataParallelMode::Hybrid { shards: 3 }, 2),
        "groups of 2 replicas that hold the experts together do not fit groups of 3 that hold the other \
         parameters together: set `expert_parallel` to 1",
    );
    for (data, shards, expected) in [(6, 3, vec![1]), (6, 2, vec![1, 2, 6]), (8, 4, vec![1, 2, 4, 8])] {
        let mesh = Mesh { pipeline: 2, data, shards, ..Mesh::default() };
        assert_eq!(mesh.expert_sizes(), expected, "{mesh:?}");
    }
    let outcome = SeededPipeline::new(program("1f1b", 1, 2), &config(2), 0, |index| stage(index, 1));
    let error = outcome.err().expect("the ranks would wait for each other").to_string();
    assert!(error.contains("does not work with a seeded pipeline"), "{error}");
}
