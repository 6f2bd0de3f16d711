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
use crate::autodiff::{Rule, inner_of, on_tape_of, record};
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
    /// Whether each rank holds whole experts of a mixture.
    whole_experts: bool,
}

impl Default for TensorParallel {
    /// A rank that is alone: every operation returns its input.
    fn default() -> Self {
        Self::unconnected(TensorRank { index: 0, of: 1 })
    }
}

impl TensorParallel {
    pub(crate) fn new(rank: TensorRank, link: Arc<dyn TensorLink>) -> Self {
        Self { link: Some(link).filter(|_| rank.of > 1), ..Self::unconnected(rank) }
    }

    /// Returns the place of a rank without its connection, to describe what the rank holds. Do not compute with it: sums
    /// contain only this rank's part.
    pub fn unconnected(rank: TensorRank) -> Self {
        Self { rank, link: None, whole_experts: false }
    }

    /// Returns the same rank, which holds whole experts of a mixture if `whole`, and otherwise a slice of each expert
    /// ([`PipelineConfig::expert_parallel`](crate::pipeline::PipelineConfig::expert_parallel)).
    pub fn with_whole_experts(self, whole: bool) -> Self {
        Self { whole_experts: whole, ..self }
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

    /// Returns the experts that this rank holds of a mixture of `count` experts: all if it holds a slice of each of them. If it
    /// holds whole experts, these are neighbours, and the first ranks have one more each if the numbers do not divide. With
    /// fewer experts than ranks, the last ranks have none, which a layer should refuse.
    pub fn experts(&self, count: usize) -> Range<usize> {
        let TensorRank { index, of } = self.rank;
        match self.holds_whole_experts() {
            true => part(count, index as usize, of as usize),
            false => 0..count,
        }
    }

    /// Returns whether several ranks share the experts of a mixture, and each holds whole ones.
    pub fn holds_whole_experts(&self) -> bool {
        self.whole_experts && self.ranks() > 1
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

    /// Returns the sum of `x` over all ranks, whose gradient is the gradient of each `x`. If any rank's `x` needs a
    /// gradient, the sum needs one on all ranks, so that all of them run the same backward.
    ///
    /// # Panics
    /// When a rank of the group fails.
    pub fn sum(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(link) = &self.link else { return x };
        let own = Value::of(inner_of(x.clone()));
        let own = if x.is_tracked() { own } else { own.constant() };
        let of_ranks = gathered(link.as_ref(), own);
        let is_tracked = of_ranks.iter().any(Value::requires_grad);
        let sum = sum(of_ranks);
        match is_tracked && !x.is_tracked() {
            // The trained parameters are on other ranks, such as the experts of a mixture that are not frozen.
            true => on_tape_of(sum, &x).require_grad(),
            false => record([x.clone(), x], sum, Arc::new(SameGradient)),
        }
    }

    /// Returns the tensors of all ranks, in the order of the ranks, off the tape.
    pub(super) fn all_gather(&self, x: Tensor<2>) -> Vec<Tensor<2>> {
        match &self.link {
            None => vec![x],
            Some(link) => gathered(link.as_ref(), Value::of(x)).into_iter().map(tensor_of).collect(),
        }
    }
}

/// Returns a part of `count` things, of `of` parts whose sizes differ by at most one.
fn part(count: usize, index: usize, of: usize) -> Range<usize> {
    let (each, extra) = (count / of, count % of);
    let start = index * each + index.min(extra);
    start..start + each + usize::from(index < extra)
}

/// Returns the tensors of all ranks.
fn gathered(link: &dyn TensorLink, own: Value) -> Values {
    link.all_gather(vec![own]).into_iter().flatten().collect()
}

fn tensor_of(value: Value) -> Tensor<2> {
    Tensor::from_dispatch(value.into_dispatch())
}

/// Returns the sum of the tensors of all ranks.
fn sum(of_ranks: Values) -> Tensor<2> {
    let parts: Vec<Tensor<2>> = of_ranks.into_iter().map(tensor_of).collect();
    let precision = parts[0].dtype();
    let sum = parts.into_iter().map(at_least_single).reduce(|sum, part| sum + part);
    let sum = sum.expect("a group has this rank");
    if sum.dtype() == precision { sum } else { sum.cast(precision) }
}

#[derive(Debug)]
struct SumOfGradients {
    link: Arc<dyn TensorLink>,
}

impl Rule for SumOfGradients {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(sum(gathered(self.link.as_ref(), Value::of(gradient)))), None]
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

    #[test]
    fn a_sum_needs_a_gradient_on_all_ranks_if_one_rank_needs_it() {
        let tracked = |needs: fn(u32) -> bool| {
            on_ranks(3, |tensor| {
                let x = numbers([2, 3], 1.0).autodiff();
                let x = if needs(tensor.rank().index) { x.require_grad() } else { x };
                tensor.sum(x * 2.0).is_tracked()
            })
        };
        assert_eq!(tracked(|_| false), [false; 3]);
        assert_eq!(tracked(|rank| rank == 1), [true; 3]);
        // Without a tape, no rank has a backward.
        let found = on_ranks(2, |tensor| tensor.sum(numbers([2, 3], 1.0)).is_autodiff());
        assert_eq!(found, [false; 2]);
    }

    #[test]
    fn ranks_share_experts_evenly() {
        let experts = |count, of| -> Vec<Range<usize>> {
            let rank = |index| TensorParallel::unconnected(TensorRank { index, of }).with_whole_experts(true);
            (0..of).map(|index| rank(index).experts(count)).collect()
        };
        assert_eq!(experts(8, 2), [0..4, 4..8]);
        assert_eq!(experts(6, 4), [0..2, 2..4, 4..5, 5..6]);
        assert_eq!(experts(2, 3), [0..1, 1..2, 2..2]);
        let sliced = TensorParallel::unconnected(TensorRank { index: 1, of: 2 });
        assert_eq!(sliced.experts(8), 0..8);
        assert!(!TensorParallel::default().with_whole_experts(true).holds_whole_experts());
    }
}
