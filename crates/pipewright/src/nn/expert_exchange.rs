//! The rows of tokens on their way between the replicas that hold the experts of a mixture together.
//!
//! Each replica sends the rows of its tokens to the replicas of their experts. The rows that arrive are put in
//! the order of the experts, and for each expert in the order of the replicas that sent them. Each such group
//! is a product of its own, as it would be where its tokens are. The results go back the same way. There is no
//! capacity: every replica takes all rows that are sent to it.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright_kernel::grouped::Groups;

use super::expert_parallel::ExpertParallel;
use super::operation::{CpuTensor, ReadElement, cpu, elements, from_cpu, tensor_of, with_dtype};
use super::tensor_link::TensorLink;
use crate::tensor::{Value, Values};

/// The rows that a replica computes for all replicas of its group.
#[derive(Clone, Debug)]
pub(super) struct Arrived {
    link: Arc<dyn TensorLink>,
    /// The own sorted rows that each replica has got.
    sent: Vec<Range<usize>>,
    /// The number of rows for each of the own experts from each replica.
    sizes: Vec<Vec<usize>>,
    /// The arrived rows: for each own expert a group for each replica.
    pub(super) groups: Groups,
    /// The inputs of the arrived rows, in the order of the groups.
    pub(super) rows: CpuTensor,
    /// The weight of each arrived row.
    pub(super) weights: Vec<f32>,
    /// Whether any replica needs gradients. Then all of them run the backward.
    pub(super) is_tracked: bool,
}

/// The rows that a replica sends, in the order of the experts.
pub(super) struct Sorted<'a> {
    /// The own rows of each of all experts.
    pub(super) groups: &'a Groups,
    /// The inputs, shape `[rows, width]`.
    pub(super) rows: CpuTensor,
    /// The weight of each row.
    pub(super) weights: &'a [f32],
    /// Whether this replica needs gradients.
    pub(super) is_tracked: bool,
}

impl Arrived {
    /// Sends the rows of the own tokens to the replicas of their experts, and returns the rows that arrive.
    pub(super) fn exchange(link: &Arc<dyn TensorLink>, place: &ExpertParallel, own: Sorted<'_>) -> Self {
        let ranges: Vec<Range<usize>> = own.groups.ranges().collect();
        let experts = |replica| place.experts_of(replica, ranges.len());
        let replicas = place.ranks() as usize;
        let rows_of = |replica| {
            let of_replica = &ranges[experts(replica)];
            let start = of_replica.first().map_or(0, |range| range.start);
            start..of_replica.last().map_or(start, |range| range.end)
        };
        let sent: Vec<Range<usize>> = (0..replicas).map(rows_of).collect();
        let to_replica = |replica: usize| -> Values {
            let sizes: Vec<i64> = ranges[experts(replica)].iter().map(|range| range.len() as i64).collect();
            let (count, rows) = (sizes.len(), sent[replica].clone());
            let sizes = Tensor::<1, Int>::from_data(TensorData::new(sizes, [count]), &Device::flex());
            let weights = own.weights[rows.clone()].to_vec();
            let weights = tensor_of(weights, [rows.len()]);
            let rows = Value::of(from_cpu::<2>(own.rows.narrow(0, rows.start, rows.len())));
            let rows = if own.is_tracked { rows } else { rows.constant() };
            vec![Value::of(sizes), rows, Value::of(from_cpu::<1>(weights))]
        };
        let lists = link.exchange((0..replicas).map(to_replica).collect());
        let mut arrived = Vec::with_capacity(replicas);
        let (mut sizes, mut is_tracked) = (Vec::with_capacity(replicas), false);
        for list in lists {
            let [counts, rows, weights] = <[Value; 3]>::try_from(list).expect("replicas run one program");
            sizes.push(counts.into_data().iter::<i64>().map(|size| size as usize).collect());
            is_tracked |= rows.requires_grad();
            arrived.push((on_host(rows), on_host(weights)));
        }
        let own_experts = experts(place.rank().index as usize).len();
        let groups = Groups::of_sizes(
            (0..own_experts)
                .flat_map(|expert| sizes.iter().map(move |of_replica: &Vec<usize>| of_replica[expert])),
        );
        let weights: Vec<_> = arrived.iter().map(|(_, weights)| elements(weights)).collect();
        let weights = by_expert(&weights, &sizes, 1);
        let (width, dtype) = (own.rows.layout().shape()[1], own.rows.dtype());
        let rows: Vec<_> = arrived.iter().map(|(rows, _)| elements(rows)).collect();
        let rows = with_dtype(tensor_of(by_expert(&rows, &sizes, width), [groups.rows(), width]), dtype);
        Self { link: link.clone(), sent, sizes, groups, rows, weights, is_tracked }
    }

    /// Returns the number of replicas whose rows have arrived.
    pub(super) fn sources(&self) -> usize {
        self.sizes.len()
    }

    /// Sends rows of the own tokens, in the order of the experts, to the replicas that got these tokens, and
    /// returns the rows that arrive, in the order of the groups.
    pub(super) fn to_experts<T: ReadElement>(&self, rows: Vec<T>, width: usize) -> Vec<T> {
        let count = rows.len() / width;
        let rows = tensor_of(rows, [count, width]);
        let part =
            |range: &Range<usize>| vec![Value::of(from_cpu::<2>(rows.narrow(0, range.start, range.len())))];
        let lists = self.link.exchange(self.sent.iter().map(part).collect());
        let arrived: Vec<CpuTensor> = lists.into_iter().flatten().map(on_host).collect();
        let read: Vec<_> = arrived.iter().map(T::read).collect();
        by_expert(&read, &self.sizes, width)
    }

    /// Sends results of the arrived rows back, and returns the results of the own tokens, in the order of the
    /// experts. Each list has `width` numbers for each row.
    pub(super) fn to_tokens<const N: usize>(&self, results: [(Vec<f32>, usize); N]) -> [Vec<f32>; N] {
        let mut to_replicas = vec![Values::new(); self.sizes.len()];
        for (rows, width) in &results {
            let parts = by_replica(rows, &self.sizes, *width);
            for (list, part) in to_replicas.iter_mut().zip(parts) {
                let count = part.len() / width;
                list.push(Value::of(from_cpu::<2>(tensor_of(part, [count, *width]))));
            }
        }
        let lists = self.link.exchange(to_replicas);
        let mut own = [const { Vec::new() }; N];
        for list in lists {
            for (own, part) in own.iter_mut().zip(list) {
                own.extend_from_slice(&elements(&on_host(part)));
            }
        }
        own
    }
}

fn on_host(value: Value) -> CpuTensor {
    let tensor = Tensor::<2>::from_dispatch(value.into_dispatch());
    cpu(tensor).expect("replicas that hold the experts together compute on the processor")
}

/// Returns the rows of all replicas in the order of the experts, and for each expert in the order of the
/// replicas. `sizes` has each replica's number of rows for each expert, whose rows are in this order too.
fn by_expert<T: Copy>(of_replicas: &[impl AsRef<[T]>], sizes: &[Vec<usize>], width: usize) -> Vec<T> {
    let mut rest: Vec<&[T]> = of_replicas.iter().map(AsRef::as_ref).collect();
    let mut rows = Vec::with_capacity(rest.iter().map(|rest| rest.len()).sum());
    for expert in 0..sizes.first().map_or(0, Vec::len) {
        for (rest, sizes) in rest.iter_mut().zip(sizes) {
            let (own, after) = rest.split_at(sizes[expert] * width);
            rows.extend_from_slice(own);
            *rest = after;
        }
    }
    rows
}

/// Returns the rows of each replica, in the order of the experts: the reverse of [`by_expert`].
fn by_replica<T: Copy>(rows: &[T], sizes: &[Vec<usize>], width: usize) -> Vec<Vec<T>> {
    let mut of_replicas = vec![Vec::new(); sizes.len()];
    let mut rest = rows;
    for expert in 0..sizes.first().map_or(0, Vec::len) {
        for (of_replica, sizes) in of_replicas.iter_mut().zip(sizes) {
            let (own, after) = rest.split_at(sizes[expert] * width);
            of_replica.extend_from_slice(own);
            rest = after;
        }
    }
    of_replicas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_back() {
        let sizes = [vec![1, 2], vec![0, 1], vec![2, 0]];
        let of_replicas = [vec![1, 2, 3], vec![4], vec![5, 6]];
        let rows = by_expert(&of_replicas, &sizes, 1);
        assert_eq!(rows, [1, 5, 6, 2, 3, 4]);
        assert_eq!(by_replica(&rows, &sizes, 1), of_replicas);
        let wide = [vec![1, 1, 2, 2, 3, 3], vec![4, 4], vec![5, 5, 6, 6]];
        assert_eq!(by_replica(&by_expert(&wide, &sizes, 2), &sizes, 2), wide);
    }
}
