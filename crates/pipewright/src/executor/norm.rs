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
//! With a loss scale above the smallest, gradients that are not finite may be too large for f16 only because
//! of the scale. Then the norm is infinite, and every rank that gets it skips the update.
//!
//! If groups of parameters have largest norms of their own, the root also computes the norm of each group,
//! and the norm of the other parameters. Every rank then clips each group by its own norm.

use serde::{Deserialize, Serialize};

use super::accumulation::Accumulation;
use super::context::RankContext;
use super::parameters::KnownParameters;
use super::stages::LocalStages;
use super::step_input::StepInput;
use crate::failure::Cause;
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
}

/// Calls the gradient hook for the gradients of this rank, if there is one.
pub(super) fn change_gradients(
    context: &RankContext,
    stages: &mut LocalStages,
    input: &StepInput,
    accumulation: Accumulation,
) -> Result<(), Cause> {
    let Some(hook) = &context.config().gradient_hook else { return Ok(()) };
    let factor = 1.0 / divisor(input, accumulation) / input.loss_scale;
    for stage in stages.iter_mut() {
        let index = stage.index();
        stage.runner_mut().change_gradients(index, factor, &**hook)?;
    }
    Ok(())
}

/// Returns the tag of the messages between replicas before the norm.
pub(super) fn replica_tag(context: &RankContext) -> Tag {
    if context.row_shard().is_some() { Tag::ReplicaSquares } else { Tag::Ready }
}

/// Returns the sums of squares of the gradient sums of this rank that count: for each part of their rows, in
/// order, one sum for each parameter, in the order of the rank's list of parameters. All shard groups have
/// the same gradients: only the squares of the first group count, and the other replicas return no squares.
pub(super) fn squares(context: &RankContext, stages: &LocalStages, known: &KnownParameters) -> Vec<f64> {
    if !context.is_in_first_group() {
        return Vec::new();
    }
    // A replica that has all rows adds within the same parts as replicas that have one part each. The experts
    // of a replica are cut into the same parts, whichever replicas hold them.
    let parts = context.copy_group().members().len();
    let squares = stages.iter().flat_map(|stage| {
        let squares = stage.runner().gradient_squares(parts as u32).into_iter().enumerate();
        let counted = squares.filter(|(parameter, _)| known.counts(context, stage, *parameter));
        counted.map(|(_, squares)| squares)
    });
    let squares: Vec<Vec<f64>> = squares.collect();
    let in_part = |part| squares.iter().map(move |squares| squares.get(part).copied().unwrap_or(0.0));
    (0..parts).flat_map(in_part).collect()
}

/// Adds the squares that the replicas have gathered, for each parameter of this rank that counts for the
/// norm.
pub(super) fn add_replicas(
    context: &RankContext,
    stages: &LocalStages,
    known: &KnownParameters,
    gathered: &[f64],
) -> Result<Vec<f64>, MessageError> {
    let counted = stages.iter().map(|stage| {
        let parameters = 0..stage.runner().paths().len();
        parameters.filter(|&parameter| known.counts(context, stage, parameter)).count()
    });
    add_parts(gathered, context.replica_count() as usize, counted.sum(), replica_tag(context))
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
    if order.len() != gathered.len() {
        let (found, expected) = (gathered.len(), order.len());
        return Err(MessageError::Count { tag: Tag::Squares, found, expected }.into());
    }
    if let Some((path, ..)) = order.clone().find(|(_, index, _)| !gathered[*index].is_finite()) {
        return if input.loss_scale > LossScaling::SMALLEST {
            Ok(Norms { whole: f64::INFINITY, parts: Vec::new() })
        } else {
            Err(Cause::GradientNotFinite { parameter: path.clone() })
        };
    }
    let norm = |sum: f64| sum.sqrt() / divisor(input, accumulation) / input.loss_scale;
    let whole = norm(order.clone().map(|(_, index, _)| gathered[index]).sum());
    if let Some(usual) = input.verification.and_then(|verification| verification.usual_norm)
        && whole > JUMP * usual
    {
        return Err(Cause::Suspicious { suspicion: Suspicion::Jump { norm: whole, usual } });
    }
    // The squares of the parameters that no group contains, and the squares of each group. Without groups,
    // the list is empty.
    let groups = context.config().clip_groups.len();
    let mut parts = vec![0.0; if groups == 0 { 0 } else { groups + 1 }];
    for (_, index, group) in order.filter(|_| groups > 0) {
        parts[group.map_or(0, |group| group + 1)] += gathered[index];
    }
    Ok(Norms { whole, parts: parts.into_iter().map(norm).collect() })
}

/// Returns the divisor of the gradient sums. It is usually the number of microbatches whose gradients are in
/// the sums: of this step and of the preceding steps without an update, on all replicas.
pub(super) fn divisor(input: &StepInput, accumulation: Accumulation) -> f64 {
    if input.is_sum { 1.0 } else { accumulation.divisor_with(input.divisor) }
}

/// Adds the squares of each parameter over the `parts` of its rows, in their order. `gathered` has the
/// squares of all parameters for each part.
fn add_parts(gathered: &[f64], parts: usize, parameters: usize, tag: Tag) -> Result<Vec<f64>, MessageError> {
    if gathered.len() != parameters * parts {
        return Err(MessageError::Count { tag, found: gathered.len(), expected: parameters * parts });
    }
    let sum = |parameter| gathered.iter().skip(parameter).step_by(parameters).sum();
    Ok((0..parameters).map(sum).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_parts_are_added_in_their_order() {
        let (a, b) = ([1e16, 1.0, 1.0], [0.1, 0.2, 0.3]);
        let gathered = [a[0], b[0], a[1], b[1], a[2], b[2]];
        let sums = add_parts(&gathered, 3, 2, Tag::ReplicaSquares).expect("as many as there should be");
        assert_eq!(sums, [(1e16 + 1.0) + 1.0, (0.1 + 0.2) + 0.3]);
        assert_eq!(add_parts(&[], 3, 0, Tag::ReplicaSquares), Ok(Vec::new()));
        let error =
            add_parts(&gathered[1..], 3, 2, Tag::ReplicaSquares).expect_err("one is missing").to_string();
        assert!(error.contains("has 5 numbers for 6 parameters"), "{error}");
    }
}
