//! Functions of a hook that replace `UNSHARD`, `RESHARD`, `REDUCE_GRAD` and `WAIT_REDUCE_GRAD`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use pipewright::hook::{ActionHook, ReduceRun, ReshardRun, UnshardRun};
use pipewright::mesh::DataParallelMode::{self, Replicated, Sharded};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::StageError;
use pipewright::tensor::{OptionalTensors, Value, pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::{Action, StageIndex};

use super::run::{Parameters, batch_of, config_of, program, train};
use crate::support::{Step, stage};

const MICROBATCHES: u32 = 4;

fn launch(mode: DataParallelMode, hook: Option<Arc<dyn ActionHook>>) -> Pipeline {
    let program = program("interleaved1f1b", 2, Some(2), MICROBATCHES, 1);
    let (stages, world) = (program.placement().stages(), World::local(program.ranks() * 2));
    let config = PipelineConfig { hook, ..config_of(2, mode) };
    Pipeline::launch(program, world, &config, move |index| stage(index, stages)).expect("it starts")
}

fn run(mode: DataParallelMode, hook: Option<Arc<dyn ActionHook>>) -> (Vec<Step>, Parameters) {
    train(&mut launch(mode, hook), 0..3, 2 * MICROBATCHES)
}

fn failure(mode: DataParallelMode, hook: Arc<dyn ActionHook>) -> String {
    let step = launch(mode, Some(hook)).step_batch(batch_of(0, 2 * MICROBATCHES), 1e-2);
    step.map(drop).expect_err("the function is wrong").to_string()
}

/// The shape and the elements of a tensor.
type Array = (Vec<usize>, Vec<f32>);
type Numbers = Vec<Option<Array>>;

fn numbers(tensors: OptionalTensors) -> Numbers {
    let numbers = |value: Value| {
        let data = match value.shape().num_dims() {
            1 => unpack::<Tensor<1>>(vec![value]).expect("one list").into_data(),
            _ => unpack::<Tensor<2>>(vec![value]).expect("one matrix").into_data(),
        };
        (data.shape().to_vec(), data.iter::<f32>().collect())
    };
    tensors.into_iter().map(|value| value.map(numbers)).collect()
}

fn tensors(numbers: Numbers) -> OptionalTensors {
    let tensor = |(shape, values): Array| {
        let (data, device) = (TensorData::new(values, shape.clone()), Device::flex());
        let values = match shape.len() {
            1 => pack(Tensor::<1>::from_data(data, &device)),
            _ => pack(Tensor::<2>::from_data(data, &device)),
        };
        values.into_iter().next().expect("one tensor")
    };
    numbers.into_iter().map(|found| found.map(tensor)).collect()
}

fn map(tensors_of: OptionalTensors, change: impl Fn(f32) -> f32) -> OptionalTensors {
    let changed = numbers(tensors_of).into_iter().map(|found| {
        found.map(|(shape, values)| (shape, values.into_iter().map(&change).collect::<Vec<_>>()))
    });
    tensors(changed.collect())
}

/// Exchanges numbers between the two replicas, without the transport.
#[derive(Default)]
struct Board {
    entries: Mutex<BTreeMap<(Action, u32, usize), Numbers>>,
    arrived: Condvar,
    rounds: Mutex<BTreeMap<(Action, u32), usize>>,
}

impl Board {
    fn put(&self, action: Action, replica: u32, own: Numbers) -> usize {
        let mut rounds = self.rounds.lock().expect("no panic");
        let round = rounds.entry((action, replica)).or_default();
        *round += 1;
        self.entries.lock().expect("no panic").insert((action, replica, *round), own);
        self.arrived.notify_all();
        *round
    }

    /// Waits for the numbers of both replicas, in their order.
    fn both(&self, action: Action, round: usize) -> [Numbers; 2] {
        let of = |entries: &BTreeMap<_, Numbers>, replica| entries.get(&(action, replica, round)).cloned();
        let entries = self.entries.lock().expect("no panic");
        let missing =
            |entries: &mut BTreeMap<_, Numbers>| of(entries, 0).is_none() || of(entries, 1).is_none();
        let (entries, late) =
            self.arrived.wait_timeout_while(entries, Duration::from_secs(10), missing).expect("no panic");
        assert!(!late.timed_out(), "{action} of the other replica");
        [0, 1].map(|replica| of(&entries, replica).expect("it has arrived"))
    }
}

/// Gathers and sums in its own way.
#[derive(Default)]
struct Own {
    board: Board,
    reductions: Mutex<BTreeMap<(StageIndex, u32), usize>>,
}

impl ActionHook for Own {
    fn unshard(&self, run: &mut UnshardRun<'_>) -> Result<(), StageError> {
        if !run.is_sharded() {
            return Ok(());
        }
        let round = self.board.put(run.action(), run.replica(), numbers(run.rows()?));
        let [first, second] = self.board.both(run.action(), round);
        let join = |(first, second): (Option<Array>, Option<Array>)| {
            let ((mut shape, mut values), further) = (first?, second);
            if let Some((further, rest)) = further {
                shape[0] += further[0];
                values.extend(rest);
            }
            Some((shape, values))
        };
        run.set_parameters(tensors(first.into_iter().zip(second).map(join).collect()))?;
        assert!(run.is_gathered());
        Ok(())
    }

    fn reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        assert!(run.is_due());
        let round = self.board.put(run.action(), run.replica(), numbers(run.gradients()));
        self.reductions.lock().expect("no panic").insert((run.stage(), run.replica()), round);
        Ok(())
    }

    fn wait_reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        let round = self.reductions.lock().expect("no panic")[&(run.stage(), run.replica())];
        let [first, second] = self.board.both(Action::ReduceGrad { stage: run.stage() }, round);
        let add = |(first, second): (Option<Array>, Option<Array>)| {
            let ((shape, first), (_, second)) = (first?, second?);
            Some((shape, first.into_iter().zip(second).map(|(one, other)| one + other).collect()))
        };
        let sums = tensors(first.into_iter().zip(second).map(add).collect());
        run.set_gradients(run.own_rows(sums))
    }
}

#[test]
fn functions_may_gather_and_sum_in_their_own_way() {
    for mode in [Sharded, Replicated] {
        assert!(run(mode, Some(Arc::new(Own::default()))) == run(mode, None), "{mode:?}");
    }
}

/// Leaves parameters gathered, and counts the exchanges that are left.
#[derive(Default)]
struct Keep {
    gathers: AtomicUsize,
}

impl ActionHook for Keep {
    fn unshard(&self, run: &mut UnshardRun<'_>) -> Result<(), StageError> {
        if !run.is_gathered() {
            self.gathers.fetch_add(1, Ordering::Relaxed);
        }
        run.run();
        Ok(())
    }

    fn reshard(&self, _run: &mut ReshardRun<'_>) -> Result<(), StageError> {
        Ok(())
    }
}

#[test]
fn parameters_may_stay_gathered_between_their_uses() {
    let hook = Arc::new(Keep::default());
    assert!(run(Sharded, Some(hook.clone())) == run(Sharded, None));
    // Four stages on each of two replicas, in three steps.
    assert_eq!(hook.gathers.load(Ordering::Relaxed), 4 * 2 * 3);
}

/// A hook that overrides one function.
struct With<U, R, W> {
    unshard: U,
    reduce: R,
    wait: W,
}

impl<U, R, W> ActionHook for With<U, R, W>
where
    U: Fn(&mut UnshardRun<'_>) -> Result<(), StageError> + Send + Sync,
    R: Fn(&mut ReduceRun<'_>) -> Result<(), StageError> + Send + Sync,
    W: Fn(&mut ReduceRun<'_>) -> Result<(), StageError> + Send + Sync,
{
    fn unshard(&self, run: &mut UnshardRun<'_>) -> Result<(), StageError> {
        (self.unshard)(run)
    }

    fn reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        (self.reduce)(run)
    }

    fn wait_reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        (self.wait)(run)
    }
}

fn gather(run: &mut UnshardRun<'_>) -> Result<(), StageError> {
    run.run();
    Ok(())
}

fn sum(run: &mut ReduceRun<'_>) -> Result<(), StageError> {
    run.run();
    Ok(())
}

fn nothing(_run: &mut ReduceRun<'_>) -> Result<(), StageError> {
    Ok(())
}

#[test]
fn gradients_may_change_before_and_after_their_sum() {
    let double = |run: &mut ReduceRun<'_>| run.set_gradients(map(run.gradients(), |gradient| 2.0 * gradient));
    let double_and_sum = move |run: &mut ReduceRun<'_>| {
        double(run)?;
        sum(run)
    };
    let norm = |hook: Option<Arc<dyn ActionHook>>| {
        let mut pipeline = launch(Sharded, hook);
        pipeline.step_batch(batch_of(0, 2 * MICROBATCHES), 1e-2).expect("a step").gradient_norm
    };
    let plain = norm(None);
    assert_eq!(
        norm(Some(Arc::new(With { unshard: gather, reduce: double_and_sum, wait: nothing }))),
        2.0 * plain
    );
    assert_eq!(norm(Some(Arc::new(With { unshard: gather, reduce: sum, wait: double }))), 2.0 * plain);
}

#[test]
fn functions_that_leave_something_out_are_named() {
    let wrong = |hook: Arc<dyn ActionHook>, mode, expected: &str| {
        let error = failure(mode, hook);
        assert!(error.contains(expected), "{error}");
    };
    let leave = |_: &mut UnshardRun<'_>| Ok(());
    let not_gathered =
        "are not gathered: the function that runs its UNSHARD must call `run` or `set_parameters`";
    wrong(Arc::new(With { unshard: leave, reduce: sum, wait: nothing }), Sharded, not_gathered);
    let few = |run: &mut UnshardRun<'_>| run.set_parameters(Vec::new());
    // Both stages do so, and each has another number of parameters.
    let expected = "the function gave 0 tensors, and the stage has ";
    wrong(Arc::new(With { unshard: few, reduce: sum, wait: nothing }), Sharded, expected);
    let rows = |run: &mut UnshardRun<'_>| run.set_parameters(run.rows()?);
    let shape = "which takes a float tensor of shape [";
    wrong(Arc::new(With { unshard: rows, reduce: sum, wait: nothing }), Sharded, shape);
    // The function takes over the sum of a shard, and leaves the whole gradient.
    wrong(Arc::new(With { unshard: gather, reduce: nothing, wait: nothing }), Sharded, shape);
    let replicated = |run: &mut UnshardRun<'_>| run.rows().map(drop);
    let expected = "the function failed: parameters are not sharded, so there are no rows";
    wrong(Arc::new(With { unshard: replicated, reduce: sum, wait: nothing }), Replicated, expected);
    let fail = |_: &mut ReduceRun<'_>| Err(StageError::function("no wire"));
    wrong(
        Arc::new(With { unshard: gather, reduce: sum, wait: fail }),
        Replicated,
        "the function failed: no wire",
    );
}
