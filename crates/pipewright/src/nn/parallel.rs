//! Layers whose weights are split over the ranks of a tensor group, which compute each stage together.
//!
//! A layer that is split by its outputs ("column-parallel") takes the same inputs on every rank, and returns the rank's
//! part of the outputs. A layer that is split by its inputs ("row-parallel") takes the rank's part of the inputs, and adds
//! the results of all ranks ([`Linear::forward_split_inputs`](super::Linear::forward_split_inputs)). Between the two, the
//! ranks compute without communication. [`TensorParallel::enter`] begins such a region: the backward adds there what each
//! rank's part of the layers contributes to the gradient of the inputs.
//!
//! Sums are added in the order of the ranks, in single precision, so all ranks have the same bits.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::composed::at_least_single;
use crate::autodiff::{Rule, inner_of, record};
use crate::tensor::{Placement, Slice, TensorRank, Value, Values};

/// The exchange of tensors between the ranks of a group.
pub(crate) trait TensorLink: Debug + Send + Sync {
    /// Returns the tensors of all ranks, in the order of the ranks. All ranks of the group must call it.
    ///
    /// If a rank of the group fails, the call unwinds with the cause as its payload.
    fn all_gather(&self, tensors: Values) -> Vec<Values>;
}

/// A rank's place in its tensor group, and its connection to the other ranks.
///
/// All ranks of a group must call the same operations in the same order. They do if they have the same stages and run the
/// same program.
#[derive(Clone, Debug)]
pub struct TensorParallel {
    rank: TensorRank,
    /// `None` if the rank is alone.
    link: Option<Arc<dyn TensorLink>>,
}

impl Default for TensorParallel {
    /// A rank that is alone: every operation returns its input.
    fn default() -> Self {
        Self { rank: TensorRank { index: 0, of: 1 }, link: None }
    }
}

impl TensorParallel {
    pub(crate) fn new(rank: TensorRank, link: Arc<dyn TensorLink>) -> Self {
        Self { rank, link: Some(link).filter(|_| rank.of > 1) }
    }

    /// Returns the place of a rank without its connection, to describe what the rank holds. Do not compute with it: sums
    /// contain only this rank's part.
    pub fn unconnected(rank: TensorRank) -> Self {
        Self { rank, link: None }
    }

    /// Returns the rank's place in the group.
    pub fn rank(&self) -> TensorRank {
        self.rank
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> u32 {
        self.rank.of
    }

    /// Returns the slice of a parameter that this rank holds.
    pub fn slice(&self, placement: Placement) -> Slice {
        placement.slice_of(self.rank)
    }

    /// Returns this rank's range of a dimension of this size that is split over all ranks.
    pub fn range(&self, size: usize) -> Range<usize> {
        self.slice(Placement::split(0, self.rank.of)).range(size)
    }

    /// Returns `x`, which is equal on all ranks. The gradients of the result are added over all ranks.
    ///
    /// # Panics
    /// In the backward, when a rank of the group fails.
    pub fn enter(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(link) = &self.link else { return x };
        let rule = Arc::new(SumOfGradients { link: link.clone() });
        record([x.clone(), x.clone()], inner_of(x), rule)
    }

    /// Returns the sum of `x` over all ranks, whose gradient is the gradient of each `x`.
    ///
    /// # Panics
    /// When a rank of the group fails.
    pub fn sum(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(link) = &self.link else { return x };
        let sum = sum(link.as_ref(), inner_of(x.clone()));
        record([x.clone(), x], sum, Arc::new(SameGradient))
    }

    /// Returns the tensors of all ranks, in the order of the ranks, off the tape.
    pub(super) fn all_gather(&self, x: Tensor<2>) -> Vec<Tensor<2>> {
        match &self.link {
            None => vec![x],
            Some(link) => gathered(link.as_ref(), x),
        }
    }
}

fn gathered(link: &dyn TensorLink, x: Tensor<2>) -> Vec<Tensor<2>> {
    let of_ranks = link.all_gather(vec![Value::of(x)]).into_iter().flatten();
    of_ranks.map(|value| Tensor::from_dispatch(value.into_dispatch())).collect()
}

fn sum(link: &dyn TensorLink, x: Tensor<2>) -> Tensor<2> {
    let precision = x.dtype();
    let parts = gathered(link, x).into_iter().map(at_least_single);
    let sum = parts.reduce(|sum, part| sum + part).expect("a group has this rank");
    if sum.dtype() == precision { sum } else { sum.cast(precision) }
}

#[derive(Debug)]
struct SumOfGradients {
    link: Arc<dyn TensorLink>,
}

impl Rule for SumOfGradients {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(sum(self.link.as_ref(), gradient)), None]
    }
}

#[derive(Debug)]
struct SameGradient;

impl Rule for SameGradient {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(gradient), None]
    }
}

/// Ranks on threads of a test.
#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Barrier, Mutex};

    use super::super::check::numbers;
    use super::*;

    /// The tensors of all ranks of a test's group.
    #[derive(Debug)]
    struct Shared {
        tensors: Mutex<Vec<Values>>,
        barrier: Barrier,
    }

    #[derive(Debug)]
    struct Member {
        shared: Arc<Shared>,
        index: usize,
    }

    impl TensorLink for Member {
        fn all_gather(&self, tensors: Values) -> Vec<Values> {
            self.shared.tensors.lock().expect("no panic")[self.index] = tensors;
            self.shared.barrier.wait();
            let all = self.shared.tensors.lock().expect("no panic").clone();
            self.shared.barrier.wait();
            all
        }
    }

    /// Runs `rank` on each rank of a group and returns the results.
    pub(in super::super) fn on_ranks<T: Send>(of: u32, rank: impl Fn(TensorParallel) -> T + Sync) -> Vec<T> {
        let tensors = Mutex::new(vec![Values::new(); of as usize]);
        let shared = Arc::new(Shared { tensors, barrier: Barrier::new(of as usize) });
        std::thread::scope(|scope| {
            let start = |index| {
                let link = Arc::new(Member { shared: shared.clone(), index: index as usize });
                let tensor = TensorParallel::new(TensorRank { index, of }, link);
                let rank = &rank;
                scope.spawn(move || rank(tensor))
            };
            let threads: Vec<_> = (0..of).map(start).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn a_sum_has_one_gradient_and_an_entrance_the_sum_of_gradients() {
        let found = on_ranks(3, |tensor| {
            let scale = f64::from(tensor.rank().index + 1);
            let x = numbers([2, 3], 1.0).autodiff().require_grad();
            let y = tensor.sum(tensor.enter(x.clone()) * scale);
            let gradient = x.grad(&(y.clone() * 2.0).sum().backward()).expect("it is a leaf");
            (y.inner().into_data(), gradient.into_data())
        });
        let x = numbers([2, 3], 1.0);
        let expected = (x.clone() + x.clone() * 2.0 + x.clone() * 3.0).into_data();
        for (y, gradient) in found {
            assert_eq!(y, expected);
            assert_eq!(gradient, (x.zeros_like() + 12.0).into_data(), "2 * (1 + 2 + 3)");
        }
    }
}
