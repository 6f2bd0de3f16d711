//! The global gradient norm; `update.rs` has the update that follows it.
//!
//! If replicas hold experts together, each replica of the first expert group has the squares of its experts.
//! The first replica also has the squares of all other parameters.
//!
//! Each parameter's rows are cut into as many parts as there are replicas. The rank that holds a part adds
//! the squares of its gradient. These sums go up a tree of the replicas, whose root adds the parts in their
//! order. The results go up the tree of the first replica, or of the first expert group. Its root adds them
//! in the order of the parameters' paths, so that every cut of the model gives the same bits, and sends the
//! norm down both trees.
//!
//! The replicas in a tree hold the same experts. If parameters are sharded too, these replicas have only some
//! parts of the other parameters. Their root then passes on the parts without adding them, and the root of
//! the other tree adds them (`square_parts.rs`).
//!
//! With a loss scale above the smallest, gradients that are not finite may be too large for f16 only because
//! of the scale. Then the norm is infinite, and every rank that gets it skips the update. If steps are verified,
//! this needs a second computation of the step with the same bits.
//!
//! If groups of parameters have largest norms of their own, the root also computes the norm of each group,
//! and the norm of the other parameters. Every rank then clips each group by its own norm.

use serde::{Deserialize, Serialize};

use super::accumulation::Accumulation;
use super::context::RankContext;
use super::next_batch::common_digests;
use super::parameters::KnownParameters;
use super::square_parts::Gathered;
use super::stages::LocalStages;
use super::step_input::StepInput;
use crate::collective::Exchange;
use crate::failure::{Cause, NotFiniteOrigin};
use crate::loss_scale::LossScaling;
use crate::message::{MessageError, Tag};
use crate::verification::{JUMP, Suspicion};

/// The gradient norms of a step, which the root computes for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Norms {
    /// The norm of the mean gradient over all parameters of all ranks; infinity if the update is to be
    /// skipped.
    pub(super) whole: f64,
    /// If there are groups to clip: the norm of the parameters that no group contains, and the norm of each
    /// group.
    pub(super) parts: Vec<f64>,
    /// In several processes, the number of further batches that all ranks have and may begin.
    pub(super) next_batches: usize,
}

/// The part of a subtree's ranks in the norm, and in the decision on the next batches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Contribution {
    pub(super) squares: Vec<f64>,
    /// The digests of the further batches that all of them have.
    pub(super) next_batches: Vec<u64>,
}

impl Contribution {
    /// Joins the contributions of a subtree, in their order.
    pub(super) fn joined(exchange: Exchange<Self>) -> Self {
        let (squares, next): (Vec<_>, Vec<_>) =
            exchange.into_contents().map(|Self { squares, next_batches }| (squares, next_batches)).unzip();
        Self { squares: squares.concat(), next_batches: common_digests(next) }
    }
}

/// Calls the gradient hook for the gradients of this rank, if there is one.
pub(super) fn change_gradients(
    context: &RankContext,
    stages: &mut LocalStages,
    input: &StepInput,
    accumulation: Accumulation,
) -> Result<(), Cause> {
    let Some(hook) = &context.config.gradient_hook else { return Ok(()) };
    let factor = 1.0 / divisor(input, accumulation) / input.loss_scale;
    for stage in stages.iter_mut() {
        let index = stage.index;
        stage.runner_mut().change_gradients(index, factor, &**hook)?;
    }
    Ok(())
}

/// Returns the tag of the messages between replicas before the norm.
pub(super) fn replica_tag(context: &RankContext) -> Tag {
    if context.is_sharded() { Tag::ReplicaSquares } else { Tag::Ready }
}

/// Returns the sums of squares of the gradient sums of this rank that count: for each parameter, in the order
/// of the rank's list of parameters, one sum for each part of its rows, in order. All shard groups have the
/// same gradients: only the squares of the first group count, and the other replicas return no squares.
pub(super) fn squares(context: &RankContext, stages: &LocalStages, known: &KnownParameters) -> Vec<f64> {
    if !context.is_in_first_group() {
        return Vec::new();
    }
    let copies = context.copy_group.members().len() as u32;
    let squares = stages.iter().flat_map(|stage| {
        let squares = stage.runner().gradient_squares(copies).into_iter().enumerate();
        let counted = squares.filter(|(parameter, _)| known.counts(context, stage, *parameter));
        counted.map(|(parameter, mut squares)| {
            // A parameter without a gradient has no squares.
            squares.resize(
                Gathered::of(context, stage.runner().table().is_on_one_replica(parameter)).parts,
                0.0,
            );
            squares
        })
    });
    squares.flatten().collect()
}

/// Adds the squares that the replicas have gathered, for each parameter of this rank that counts for the
/// norm.
pub(super) fn add_replicas(
    context: &RankContext,
    stages: &LocalStages,
    known: &KnownParameters,
    gathered: &[f64],
) -> Result<Vec<f64>, MessageError> {
    let counted = stages.iter().flat_map(|stage| {
        let parameters = 0..stage.runner().table().paths.len();
        let counted = parameters.filter(|&parameter| known.counts(context, stage, parameter));
        counted.map(|parameter| Gathered::of(context, stage.runner().table().is_on_one_replica(parameter)))
    });
    let parameters: Vec<Gathered> = counted.collect();
    add_parts(gathered, context.expert_holders(), &parameters, replica_tag(context))
}

/// Computes the norms of the mean gradient from the squares of all ranks.
pub(super) fn norms(
    context: &RankContext,
    known: &KnownParameters,
    input: &StepInput,
    accumulation: Accumulation,
    gathered: &[f64],
) -> Result<Norms, Cause> {
    let order = known.order();
    let (found, expected) = (gathered.len(), order.clone().map(|(_, indices, _)| indices.len()).sum());
    if found != expected {
        return Err(MessageError::Count { tag: Tag::Squares, found, expected }.into());
    }
    let squares: Vec<f64> =
        order.clone().map(|(_, indices, _)| indices.iter().map(|&index| gathered[index]).sum()).collect();
    let order = order.zip(squares).map(|((path, _, group), square)| (path, square, group));
    if let Some((path, ..)) = order.clone().find(|(_, square, _)| !square.is_finite()) {
        // A verified step is computed again before its update is skipped: a wrong bit may be the reason.
        let is_first = input.verification.is_some_and(|verification| verification.is_first);
        return if input.loss_scale > LossScaling::SMALLEST && !is_first && !input.searches {
            Ok(Norms { whole: f64::INFINITY, ..Norms::default() })
        } else {
            Err(Cause::GradientNotFinite { parameter: path.clone() })
        };
    }
    if input.searches {
        // The step must not update: it has failed before.
        return Err(Cause::Search { origin: Box::new(NotFiniteOrigin::NotRepeated) });
    }
    let norm = |sum: f64| sum.sqrt() / divisor(input, accumulation) / input.loss_scale;
    let whole = norm(order.clone().map(|(_, square, _)| square).sum());
    if let Some(usual) = input.verification.and_then(|verification| verification.usual_norm)
        && whole > JUMP * usual
    {
        return Err(Cause::Suspicious { suspicion: Suspicion::Jump { norm: whole, usual } });
    }
    // The squares of the parameters that no group contains, and the squares of each group. Without groups,
    // the list is empty.
    let groups = context.config.clip_groups.len();
    let mut parts = vec![0.0; if groups == 0 { 0 } else { groups + 1 }];
    for (_, square, group) in order.filter(|_| groups > 0) {
        parts[group.map_or(0, |group| group + 1)] += square;
    }
    Ok(Norms { whole, parts: parts.into_iter().map(norm).collect(), next_batches: 0 })
}

/// Returns the divisor of the gradient sums. It is usually the number of microbatches whose gradients are in
/// the sums: of this step and of the preceding steps without an update, on all replicas.
pub(super) fn divisor(input: &StepInput, accumulation: Accumulation) -> f64 {
    if input.is_sum { 1.0 } else { accumulation.divisor_with(input.divisor) }
}

/// Adds the squares of each parameter over the parts of its rows, in their order. `gathered` has the squares
/// of all parameters for each replica. Parts that are not all parts of a parameter are not added.
fn add_parts(
    gathered: &[f64],
    replicas: usize,
    parameters: &[Gathered],
    tag: Tag,
) -> Result<Vec<f64>, MessageError> {
    let of_replica: usize = parameters.iter().map(|parameter| parameter.parts).sum();
    let (found, expected) = (gathered.len(), of_replica * replicas);
    if found != expected {
        return Err(MessageError::Count { tag, found, expected });
    }
    let (mut first, mut squares) = (0, Vec::new());
    for &Gathered { parts, are_all } in parameters {
        let of_replicas = (0..replicas).map(|replica| &gathered[replica * of_replica + first..][..parts]);
        let of_parts = of_replicas.flatten().copied();
        if are_all {
            squares.push(of_parts.sum());
        } else {
            squares.extend(of_parts);
        }
        first += parts;
    }
    Ok(squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_parts_are_added_in_their_order() {
        let (a, b) = ([1e16, 1.0, 1.0], [0.1, 0.2, 0.3]);
        let gathered = [a[0], b[0], a[1], b[1], a[2], b[2]];
        let one = Gathered { parts: 1, are_all: true };
        let add = |gathered: &[f64], replicas, parameters: &[Gathered]| {
            add_parts(gathered, replicas, parameters, Tag::ReplicaSquares)
        };
        let sums = [(1e16 + 1.0) + 1.0, (0.1 + 0.2) + 0.3];
        assert_eq!(add(&gathered, 3, &[one, one]), Ok(sums.to_vec()));
        // One replica has all parts of both.
        let all = Gathered { parts: 3, are_all: true };
        assert_eq!(add(&[a, b].concat(), 1, &[all, all]), Ok(sums.to_vec()));
        // Two replicas have two parts of the first parameter each, and one of the second.
        let [first, second] = [[a[0], a[1], b[0]], [a[2], 4.0, b[1]]];
        let some = Gathered { parts: 1, are_all: false };
        let expected = vec![((1e16 + 1.0) + 1.0) + 4.0, 0.1, 0.2];
        assert_eq!(add(&[first, second].concat(), 2, &[Gathered { parts: 2, ..one }, some]), Ok(expected));
        assert_eq!(add(&[], 3, &[]), Ok(Vec::new()));
        let error = add(&gathered[1..], 3, &[one, one]).expect_err("one is missing").to_string();
        assert!(error.contains("has 5 numbers for 6 parameters"), "{error}");
    }
}
