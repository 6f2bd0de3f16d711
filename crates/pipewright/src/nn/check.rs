//! Compares an operation with its plain composition, forward and backward, and runs ranks on threads of a
//! test.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData, Tolerance};

use super::deferred::{Deferred, WeightTask};
use super::expert_parallel::ExpertParallel;
use super::parallel::TensorParallel;
use super::tensor_link::TensorLink;
use crate::tensor::{ExpertRank, TensorRank, Value, Values};

/// Returns numbers between `-scale` and `scale` with a long period.
pub(super) fn numbers<const D: usize>(shape: [usize; D], scale: f32) -> Tensor<D> {
    let count = shape.iter().product();
    let value = |index: usize| ((index * 7919 + count * 31) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..count).map(|index| value(index) * scale).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// Checks that the results and the gradients of all inputs agree, for an upstream gradient that is not
/// uniform. On a tape with gradient checkpointing, the operation itself is composed of Burn's.
pub(super) fn check<const N: usize>(
    inputs: [Tensor<1>; N],
    operation: impl Fn([Tensor<1>; N]) -> Tensor<2>,
    composition: impl Fn([Tensor<1>; N]) -> Tensor<2>,
) {
    let run = |function: &dyn Fn([Tensor<1>; N]) -> Tensor<2>, device: &Device| {
        let leaves =
            inputs.clone().map(|input| Tensor::<1>::from_data(input.into_data(), device).require_grad());
        let result = function(leaves.clone());
        let upstream = (numbers(result.dims(), 1.0) + 0.5).into_data();
        let gradients = (result.clone() * Tensor::from_data(upstream, device)).sum().backward();
        let gradients = leaves.map(|leaf| leaf.grad(&gradients).expect("each input is differentiated"));
        (result.into_data(), gradients.map(Tensor::into_data))
    };
    let device = Device::flex().autodiff();
    let found = run(&operation, &device);
    let with_checkpointing = run(&operation, &device.clone().gradient_checkpointing());
    let (expected, expected_gradients) = run(&composition, &device);
    let tolerance = Tolerance::<f32>::rel_abs(2e-5, 2e-5);
    for (result, gradients) in [&found, &with_checkpointing] {
        result.assert_approx_eq::<f32>(&expected, tolerance);
        for (found, expected) in gradients.iter().zip(&expected_gradients) {
            found.assert_approx_eq::<f32>(expected, tolerance);
        }
    }
    // Without a tape the result has the same bits.
    let plain = operation(inputs.clone()).into_data();
    assert_eq!(plain, found.0);
}

/// Like [`check`], but the composition is `operation` in double precision: hand-written operations are in
/// single precision only.
pub(super) fn check_in_f64<const N: usize>(
    inputs: [Tensor<1>; N],
    operation: impl Fn([Tensor<1>; N]) -> Tensor<2>,
) {
    let precise =
        |inputs: [Tensor<1>; N]| operation(inputs.map(|input| input.cast(DType::F64))).cast(DType::F32);
    check(inputs, &operation, precise);
}

/// Returns a parameter as [`check_deferral`] takes it. The number of dimensions does not matter there.
pub(super) fn leaf<const D: usize>(parameter: &Param<Tensor<D>>) -> (ParamId, Tensor<1>) {
    (parameter.id, Tensor::from_dispatch(parameter.val().into_dispatch()))
}

/// Checks a layer whose gradients of `weights` wait as functions: its backward in a stage computes the gradient
/// of `input` alone, and all numbers have the bits of a backward outside a stage.
pub(super) fn check_deferral(
    weights: &[(ParamId, Tensor<1>)],
    input: &Tensor<2>,
    forward: impl Fn() -> Tensor<2>,
) {
    let backward = |y: &Tensor<2>| {
        let upstream = (numbers(y.dims(), 1.0) + 0.3).cast(y.dtype()).autodiff();
        (y.clone() * upstream).sum().backward()
    };
    let y = forward();
    let expected = backward(&y);
    let gradient = |weight: &Tensor<1>, gradients: &Gradients| weight.grad(gradients).map(Tensor::into_data);
    for at_once in [false, true] {
        let deferred = Deferred::new(Arc::new(weights.iter().map(|(id, _)| *id).collect()));
        if at_once {
            deferred.run_at_once();
        }
        let found_y = deferred.collect(&forward);
        assert!(deferred.take().is_empty(), "nothing waits before the backward");
        let found = backward(&found_y);
        assert_eq!(found_y.into_data(), y.to_data());
        let of_input = |gradients: &Gradients| input.grad(gradients).map(Tensor::into_data);
        assert_eq!(of_input(&found), of_input(&expected));
        let mut waiting = HashMap::new();
        for task in deferred.take() {
            let WeightTask::Split(task) = task else { continue };
            for (gradient, weight) in (task.compute)().into_iter().zip(task.wanted.iter()) {
                let gradient = Tensor::<1>::from_dispatch(gradient.into_dispatch()).into_data();
                assert!(waiting.insert(weight.expect("it is wanted"), gradient).is_none(), "one task each");
            }
        }
        for (id, weight) in weights {
            assert_eq!(gradient(weight, &found), None, "it waits");
            assert_eq!(waiting.remove(id), gradient(weight, &expected));
        }
    }
}

/// The tensors that each rank of a test's group sends to each rank.
#[derive(Debug)]
struct Shared {
    tensors: Mutex<Vec<Vec<Values>>>,
    /// The bytes that all ranks have sent to others.
    sent: AtomicUsize,
    barrier: Barrier,
}

#[derive(Debug)]
struct Member {
    shared: Arc<Shared>,
    index: usize,
}

impl TensorLink for Member {
    fn exchange(&self, to_ranks: Vec<Values>) -> Vec<Values> {
        let others = to_ranks.iter().enumerate().filter(|(rank, _)| *rank != self.index);
        let bytes: usize = others.flat_map(|(_, values)| values).map(Value::bytes).sum();
        self.shared.sent.fetch_add(bytes, Ordering::Relaxed);
        self.shared.tensors.lock().expect("no panic")[self.index] = to_ranks;
        self.shared.barrier.wait();
        let all = self.shared.tensors.lock().expect("no panic").clone();
        self.shared.barrier.wait();
        all.into_iter().map(|mut of_rank| of_rank.swap_remove(self.index)).collect()
    }

    fn keep_alive(&self) {}
}

/// Runs `rank` on each rank of a group and returns the results.
pub(super) fn on_ranks<T: Send>(of: u32, rank: impl Fn(TensorParallel) -> T + Sync) -> Vec<T> {
    counted(of, rank).0
}

/// Like [`on_ranks`], but with the bytes that all ranks together have sent to others.
pub(super) fn counted<T: Send>(of: u32, rank: impl Fn(TensorParallel) -> T + Sync) -> (Vec<T>, usize) {
    linked(of, |index, link| rank(TensorParallel::new(TensorRank { index, of }, link)))
}

/// Runs `replica` on each of the replicas that hold the experts together and returns the results.
pub(super) fn on_replicas<T: Send>(of: u32, replica: impl Fn(ExpertParallel) -> T + Sync) -> Vec<T> {
    linked(of, |index, link| replica(ExpertParallel::new(ExpertRank { index, of }, link))).0
}

/// Runs `rank` on each rank of a group with its index and its link. Returns the results, and the bytes that
/// all ranks together have sent to others.
fn linked<T: Send>(of: u32, rank: impl Fn(u32, Arc<dyn TensorLink>) -> T + Sync) -> (Vec<T>, usize) {
    let tensors = Mutex::new(vec![Vec::new(); of as usize]);
    let shared = Arc::new(Shared { tensors, sent: AtomicUsize::new(0), barrier: Barrier::new(of as usize) });
    let results = std::thread::scope(|scope| {
        let start = |index| {
            let link = Arc::new(Member { shared: shared.clone(), index: index as usize });
            let rank = &rank;
            scope.spawn(move || rank(index, link))
        };
        let threads: Vec<_> = (0..of).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    (results, shared.sent.load(Ordering::Relaxed))
}
