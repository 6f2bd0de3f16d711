//! Layers whose weights are split over the ranks of a tensor group, which compute each stage together.
//!
//! A layer that is split by its outputs ("column-parallel") takes the same inputs on every rank, and returns
//! the rank's part of the outputs. A layer that is split by its inputs ("row-parallel") takes the rank's part
//! of the inputs, and adds the results of all ranks
//! ([`Linear::forward_split_inputs`](super::Linear::forward_split_inputs)). Between the two, the ranks
//! compute without communication. [`TensorParallel::enter`] begins such a region: the backward adds there
//! what each rank's part of the layers contributes to the gradient of the inputs. [`Region`](super::Region) also
//! has the form in which ranks have shares of the tokens outside of the region.
//!
//! Sums are added in the order of the ranks, in single precision, so all ranks have the same bits.

use std::ops::Range;
use std::sync::{Arc, Weak};

use burn::tensor::Tensor;
use pipewright_kernel::quantised::QuantisedMatrix;

use super::composed::at_least_single;
use super::expert_parallel::ExpertParallel;
use super::remade::note_same;
use super::tensor_link::{TensorLink, part};
use crate::autodiff::{Rule, inner_of, on_tape_of, record};
use crate::memory::{FrozenTensors, StreamedMatrix};
use crate::random::is_probing;
use crate::tensor::{Placement, TensorRank, TensorShard, Value, Values};

/// A rank's place in its tensor group, and its connection to the other ranks.
///
/// All ranks of a group must call the same operations in the same order. They do if they have the same stages
/// and run the same program.
#[derive(Clone, Debug)]
pub struct TensorParallel {
    rank: TensorRank,
    /// `None` if the rank is alone.
    link: Option<Arc<dyn TensorLink>>,
    /// Where the rank reports progress. It is weak, because modules that outlive the pipeline have it too.
    progress: Option<Weak<dyn TensorLink>>,
    /// Whether each rank holds whole experts of a mixture.
    whole_experts: bool,
    /// Whether each rank has a share of the tokens between the layers that the ranks compute together.
    sequence_parallel: bool,
    /// The replica's place among the replicas that hold the experts together.
    experts: ExpertParallel,
    /// The frozen tensors that the ranks of the process share.
    frozen: FrozenTensors,
}

impl Default for TensorParallel {
    /// A rank that is alone: every operation returns its input.
    fn default() -> Self {
        Self::unconnected(TensorRank { index: 0, of: 1 })
    }
}

impl TensorParallel {
    pub(crate) fn new(rank: TensorRank, link: Arc<dyn TensorLink>) -> Self {
        let progress = Some(Arc::downgrade(&link));
        Self { link: Some(link).filter(|_| rank.of > 1), progress, ..Self::unconnected(rank) }
    }

    /// Returns the place of a rank without its connection, to describe what the rank holds. Do not compute
    /// with it: sums contain only this rank's part.
    pub fn unconnected(rank: TensorRank) -> Self {
        let (experts, frozen) = (ExpertParallel::default(), FrozenTensors::default());
        Self {
            rank,
            link: None,
            progress: None,
            whole_experts: false,
            sequence_parallel: false,
            experts,
            frozen,
        }
    }

    /// Returns the same rank, which holds whole experts of a mixture if `whole`, and otherwise a shard of
    /// each expert ([`PipelineConfig::whole_experts`](crate::pipeline::PipelineConfig::whole_experts)).
    pub fn with_whole_experts(self, whole: bool) -> Self {
        Self { whole_experts: whole, ..self }
    }

    /// Returns the same rank, which has a share of the tokens of each row between the layers that the ranks compute
    /// together if `shares`, and otherwise all tokens
    /// ([`PipelineConfig::sequence_parallel`](crate::pipeline::PipelineConfig::sequence_parallel)).
    pub fn with_sequence_parallel(self, shares: bool) -> Self {
        Self { sequence_parallel: shares, ..self }
    }

    /// Returns the same rank in a replica that has this place among the replicas that hold the experts
    /// together.
    pub fn with_expert_parallel(self, experts: ExpertParallel) -> Self {
        Self { experts, ..self }
    }

    pub(crate) fn with_frozen(self, frozen: FrozenTensors) -> Self {
        Self { frozen, ..self }
    }

    /// Returns the values of a frozen parameter, such as one of the base of an adapter. If another rank of this
    /// process has made the parameter at `path` with the same bits in this launch, the result shares its
    /// storage. So replicas on threads hold a base once. `path` is the parameter's path in the whole model.
    pub fn share_frozen<const D: usize>(&self, path: &str, values: Tensor<D>) -> Tensor<D> {
        let shared = self.frozen.shared(path, Value::of(inner_of(values.clone())));
        on_tape_of(Tensor::from_dispatch(shared.into_dispatch()), &values)
    }

    /// Like [`TensorParallel::share_frozen`], for a quantised matrix.
    pub fn share_quantised(&self, path: &str, matrix: QuantisedMatrix) -> Arc<QuantisedMatrix> {
        self.frozen.shared_quantised(path, matrix)
    }

    /// Like [`TensorParallel::share_frozen`], for a matrix that is in memory only while its stage computes.
    pub fn share_streamed(&self, matrix: StreamedMatrix) -> Arc<StreamedMatrix> {
        self.frozen.shared_streamed(matrix)
    }

    /// Returns the replica's place among the replicas that hold the experts of each mixture together.
    pub fn expert_parallel(&self) -> &ExpertParallel {
        &self.experts
    }

    /// Returns the connection to the other ranks, if tensors are exchanged.
    pub(super) fn link(&self) -> Option<&Arc<dyn TensorLink>> {
        self.link.as_ref().filter(|_| !is_probing())
    }

    /// Records that this rank makes progress. While a rank makes its stages, call this after each parameter:
    /// a rank that makes no progress for the whole deadline of the pipeline is treated as failed.
    pub fn keep_alive(&self) {
        if let Some(rank) = self.progress.as_ref().and_then(Weak::upgrade) {
            rank.keep_alive();
        }
    }

    /// Returns the rank's place in the group.
    pub fn rank(&self) -> TensorRank {
        self.rank
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> u32 {
        self.rank.of
    }

    /// Returns the shard of a parameter that this rank holds.
    pub fn shard(&self, placement: Placement) -> TensorShard {
        placement.shard_of(self.rank)
    }

    /// Returns this rank's range of a dimension of this size that is split over all ranks.
    pub fn range(&self, size: usize) -> Range<usize> {
        self.shard(Placement::split(0, self.rank.of)).range(size)
    }

    /// Returns the experts of a mixture of `count` experts that this rank holds: all if it holds a shard of
    /// each of them, and the replica holds all. If it holds whole experts, these are neighbours, and the first
    /// ranks have one more each if the numbers do not divide. With fewer experts than ranks, the last ranks
    /// have no expert, which a layer should refuse.
    pub fn experts(&self, count: usize) -> Range<usize> {
        if self.experts.ranks() > 1 {
            return self.experts.experts(count);
        }
        let TensorRank { index, of } = self.rank;
        if self.holds_whole_experts() { part(count, index as usize, of as usize) } else { 0..count }
    }

    /// Returns whether several ranks share the experts of a mixture, and each holds whole ones.
    pub fn holds_whole_experts(&self) -> bool {
        self.whole_experts && self.ranks() > 1
    }

    /// Returns whether each of several ranks has a share of the tokens between the layers that they compute
    /// together.
    pub fn shares_tokens(&self) -> bool {
        self.sequence_parallel && self.ranks() > 1
    }

    /// Returns `x`, which is equal on all ranks. The gradients of the result are added over all ranks.
    ///
    /// # Panics
    /// In the backward, when a rank of the group fails.
    pub fn enter(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(link) = self.link() else { return x };
        let rule = Arc::new(SumOfGradients { link: link.clone(), ranks: self.rank.of });
        let entered = record([x.clone(), x.clone()], inner_of(x.clone()), rule);
        note_same(&x, &entered);
        entered
    }

    /// Returns the sum of `x` over all ranks, whose gradient is the gradient of each `x`. If any rank's `x`
    /// needs a gradient, the sum needs one on all ranks, so that all of them run the same backward.
    ///
    /// # Panics
    /// When a rank of the group fails.
    pub fn sum(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(link) = self.link() else { return x };
        let (sum, is_tracked) = sum(link.as_ref(), self.rank.of, inner_of(x.clone()), x.is_tracked());
        if is_tracked && !x.is_tracked() {
            // The trained parameters are on other ranks, such as the experts of a mixture that are not
            // frozen.
            on_tape_of(sum, &x).require_grad()
        } else {
            record([x.clone(), x], sum, Arc::new(SameGradient))
        }
    }

    /// Returns the tensors of all ranks, in the order of the ranks, off the tape.
    pub(super) fn all_gather(&self, x: Tensor<2>) -> Vec<Tensor<2>> {
        match self.link() {
            None => vec![x; self.rank.of as usize],
            Some(link) => exchanged(link.as_ref(), vec![Value::of(x); self.rank.of as usize])
                .into_iter()
                .map(tensor_of)
                .collect(),
        }
    }
}

/// Sends a tensor to each rank, and returns the tensors that all ranks have sent to this one.
pub(super) fn exchanged(link: &dyn TensorLink, to_ranks: Values) -> Values {
    link.exchange(to_ranks.into_iter().map(|tensor| vec![tensor]).collect()).into_iter().flatten().collect()
}

pub(super) fn tensor_of(value: Value) -> Tensor<2> {
    Tensor::from_dispatch(value.into_dispatch())
}

/// Returns the sum of the ranks' `x`, and whether any of them is `marked`.
///
/// With three and more ranks, each rank adds a part of the rows, and the ranks then exchange the sums: a rank
/// sends `2 (n - 1) / n` of its `x` instead of `n - 1` times all of it. The additions are the same, in the
/// same order.
fn sum(link: &dyn TensorLink, ranks: u32, x: Tensor<2>, marked: bool) -> (Tensor<2>, bool) {
    let ranks = ranks as usize;
    let [rows, _] = x.dims();
    let in_parts = ranks > 2 && rows >= ranks;
    if !in_parts {
        return sum_of_sent(link, vec![x; ranks].into_iter(), marked);
    }
    let parts = (0..ranks).map(|rank| x.clone().slice(part(rows, rank, ranks)));
    let (sum, any_marked) = sum_of_sent(link, parts, marked);
    let sums = exchanged(link, vec![Value::of(sum); ranks]);
    (Tensor::cat(sums.into_iter().map(tensor_of).collect(), 0), any_marked)
}

/// Sends a tensor to each rank. Returns the sum of the tensors that all ranks have sent to this one, and whether any
/// of these ranks is `marked`.
pub(super) fn sum_of_sent(
    link: &dyn TensorLink,
    to_ranks: impl Iterator<Item = Tensor<2>>,
    marked: bool,
) -> (Tensor<2>, bool) {
    let mark = |value: Value| if marked { value } else { value.constant() };
    let of_ranks = exchanged(link, to_ranks.map(Value::of).map(mark).collect());
    let any_marked = of_ranks.iter().any(Value::requires_grad);
    (sum_of_ranks(of_ranks.into_iter().map(tensor_of).collect()), any_marked)
}

/// Returns the sum of tensors, added in their order in single precision.
pub(crate) fn sum_of_ranks(parts: Vec<Tensor<2>>) -> Tensor<2> {
    let precision = parts[0].dtype();
    let sum = parts.into_iter().map(at_least_single).reduce(|sum, part| sum + part);
    let sum = sum.expect("a group has this rank");
    sum.cast(precision)
}

#[derive(Debug)]
struct SumOfGradients {
    link: Arc<dyn TensorLink>,
    ranks: u32,
}

impl Rule for SumOfGradients {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(sum(self.link.as_ref(), self.ranks, gradient, true).0), None]
    }
}

#[derive(Debug)]
struct SameGradient;

impl Rule for SameGradient {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(gradient), None]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::super::check::{counted, numbers, on_ranks};
    use super::*;

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
    fn each_of_many_ranks_sends_less_than_twice_its_tensor() {
        const ROW: usize = 6 * 4;
        let sent = |ranks: u32, rows| {
            let sum = |tensor: TensorParallel| drop(tensor.sum(numbers([rows, 6], 1.0)));
            counted(ranks, sum).1 / ranks as usize
        };
        assert_eq!([2, 4, 8].map(|ranks| sent(ranks, 8)), [8 * ROW, 2 * 6 * ROW, 2 * 7 * ROW]);
        // Ranks without a row would have no part.
        assert_eq!(sent(4, 3), 3 * 3 * ROW);
    }

    /// Parts are rows, which the ranks may share unevenly; with fewer rows than ranks, or two ranks, there is
    /// one part.
    #[test]
    fn a_sum_in_parts_has_the_bits_of_the_sum_in_one() {
        for precision in [DType::F32, DType::BF16] {
            for (ranks, rows) in [(2, 5), (3, 7), (4, 4), (4, 13), (8, 9), (4, 3), (4, 1)] {
                let x_of = |rank: u32| {
                    let x = numbers([rows, 6], 1.0) * (1.1 + f64::from(rank)).powi(5) + f64::from(rank);
                    x.cast(precision)
                };
                let found = on_ranks(ranks, |tensor| tensor.sum(x_of(tensor.rank().index)).into_data());
                let all = (0..ranks).map(|rank| x_of(rank).cast(DType::F32));
                let expected = all.reduce(|sum, x| sum + x).expect("a rank").cast(precision).into_data();
                assert!(found.iter().all(|found| *found == expected), "{ranks} ranks, {rows} rows");
            }
        }
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
        let tensor = TensorParallel::unconnected(TensorRank { index: 1, of: 2 });
        assert_eq!(tensor.experts(8), 0..8);
        assert!(!TensorParallel::default().with_whole_experts(true).holds_whole_experts());
    }
}
