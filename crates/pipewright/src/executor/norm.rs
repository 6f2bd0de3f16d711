//! The global gradient norm, and the update that follows it.
//!
//! Each parameter's rows are cut into as many parts as there are replicas. The rank that holds a part adds the squares of
//! its gradient. These sums go up a tree of the replicas, whose root adds the parts in their order. The results go up the
//! tree of the first replica. Its root adds them in the order of the parameters' paths, so that every cut of the model gives the same bits,
//! and sends the norm down both trees.
//!
//! With a loss scale above the smallest, gradients that are not finite may be too large for f16 only because of the scale.
//! Then the norm is infinite, and every rank that gets it skips the update.
//!
//! If groups of parameters have largest norms of their own, the root also computes the norm of each group, and that of the
//! other parameters. Every rank then clips each group by its own norm.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::machine::Executor;
use super::step::{Outcome, Phase};
use crate::collective::Exchange;
use crate::failure::{Cause, UpdateFailure};
use crate::loss_scale::LossScaling;
use crate::message::{MessageError, Payload, Tag, encoded};
use crate::optimizer::Factors;

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// The gradient norms of a step, which the root computes for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Norms {
    /// The norm of the mean gradient over all parameters of all ranks; infinity if the update is to be skipped.
    whole: f64,
    /// If there are groups to clip: the norm of the parameters that no group contains, and that of each group.
    parts: Vec<f64>,
}

impl Executor {
    /// Calls the gradient hook for the gradients of this rank, if there is one.
    pub(super) fn change_gradients(&mut self) -> Result<(), Cause> {
        let Some(hook) = self.gradient_hook.clone() else { return Ok(()) };
        let factor = 1.0 / self.divisor() / self.step.input.loss_scale;
        for stage in &mut self.stages {
            stage.runner.change_gradients(stage.index, factor, &*hook)?;
        }
        Ok(())
    }

    /// Sums the squares of this rank's gradients and waits for the other replicas in its subtree. All shard groups have the
    /// same gradients: only the squares of the first group count, and the other replicas send none.
    pub(super) fn gather_replica_squares(&mut self) -> Phase {
        let own = if self.endpoint.is_in_first_group() { self.squares() } else { Vec::new() };
        let tree = self.endpoint.replica_tree();
        Phase::ReplicaSquares(Exchange::gather(own, self.replica_tag(), tree.children()))
    }

    /// Passes on the squares of the replicas in this rank's subtree. The first replica adds them and waits for the
    /// squares of the other ranks of its pipeline.
    pub(super) fn gather_squares(&mut self, gathered: Vec<f64>) -> Result<Phase, MessageError> {
        if let Some(parent) = self.endpoint.replica_tree().parent() {
            self.endpoint.send_world(parent, self.replica_tag(), Payload::of(&gathered));
            return Ok(Phase::Norm(Exchange::one(parent, Tag::GlobalNorm)));
        }
        let parts = self.endpoint.replica_count() as usize;
        let squares = add_parts(&gathered, parts, self.counted_parameters(), self.replica_tag())?;
        let tree = self.endpoint.replica_ranks_tree();
        Ok(Phase::Squares(Exchange::gather(squares, Tag::Squares, tree.children())))
    }

    /// Passes on the squares of the ranks in this rank's subtree. The root computes the norm.
    pub(super) fn compute_norm(&mut self, gathered: Vec<f64>) -> Result<Phase, Cause> {
        if let Some(parent) = self.endpoint.replica_ranks_tree().parent() {
            self.endpoint.send_world(parent, Tag::Squares, Payload::of(&gathered));
            return Ok(Phase::Norm(Exchange::one(parent, Tag::GlobalNorm)));
        }
        Ok(Phase::Norm(Exchange::complete(self.gradient_norms(&gathered)?)))
    }

    /// Passes on the norms. From this point no rank of the subtree waits for this one.
    pub(super) fn send_norms(&mut self, norms: Norms) -> Phase {
        let bytes = encoded(&norms);
        if self.endpoint.coord().replica == 0 {
            let tree = self.endpoint.replica_ranks_tree().clone();
            self.send_bytes(tree.children(), Tag::GlobalNorm, &bytes);
        }
        let tree = self.endpoint.replica_tree().clone();
        self.send_bytes(tree.children(), Tag::GlobalNorm, &bytes);
        Phase::Update { norms }
    }

    /// Scales the gradient sums to the mean over the microbatches, clips them, and takes the optimizer step. If the norm
    /// is not finite, drops the sums instead.
    pub(super) fn update(&mut self, norms: &Norms) -> Result<Phase, Cause> {
        let (start, norm) = (Instant::now(), norms.whole);
        let factors = self.factors(norms);
        (self.accumulated, self.accumulated_divisor) = (0, 0.0);
        let learning_rate = self.step.input.learning_rate;
        for stage in &mut self.stages {
            // A skipped update sets this too: a rank that fails from here on may not learn that the loss scale changes.
            self.step.updates = Some(stage.index);
            match norm.is_finite() {
                true => stage.runner.update(&factors, learning_rate),
                false => stage.runner.drop_gradients(),
            }
        }
        self.await_update()?;
        // The step is complete: a later failure must not undo its changes to running statistics.
        self.stages.iter_mut().for_each(|stage| stage.runner.keep_buffers(false));
        let report = self.report(Some(norm), start.elapsed());
        Ok(self.finish(Outcome { reports: vec![report], ..Outcome::default() }))
    }

    /// Waits until the devices have updated the parameters. In the next step a failure would be reported as one of its
    /// actions.
    fn await_update(&mut self) -> Result<(), Cause> {
        for stage in &self.stages {
            self.step.updates = Some(stage.index);
            stage.runner.await_parameters().map_err(|message| {
                let failure = UpdateFailure::of_device(message);
                Cause::Update { stage: stage.index, failure }
            })?;
        }
        Ok(())
    }

    /// Returns the factors that make the clipped mean of the gradient sums.
    fn factors(&self, norms: &Norms) -> Factors {
        let divisor = self.divisor();
        let factor = |limit: Option<f64>, norm: f64| {
            let clip = limit.map_or(1.0, |limit| (limit / (norm + CLIP_EPSILON)).min(1.0));
            clip / divisor / self.step.input.loss_scale
        };
        let rest = factor(self.clip_norm, norms.parts.first().copied().unwrap_or(norms.whole));
        let groups = self.clip_groups.iter().zip(norms.parts.iter().skip(1));
        Factors { rest, groups: groups.map(|(group, &norm)| factor(Some(group.norm), norm)).collect() }
    }

    /// Returns the sums of squares of the gradient sums of this rank that count: for each part of their rows, in order, one
    /// sum for each parameter, in the order of the rank's list of parameters.
    fn squares(&self) -> Vec<f64> {
        // A replica that has all rows adds within the same parts as replicas that have one part each.
        let parts = self.endpoint.copy_group().members().len();
        let of_stages = self.stages.iter().flat_map(|stage| {
            let squares = stage.runner.gradient_squares(parts as u32).into_iter().enumerate();
            squares.filter(|(place, _)| self.counts(stage.index, *place)).map(|(_, squares)| squares)
        });
        let of_parameters: Vec<Vec<f64>> = of_stages.collect();
        let of_part =
            |part| of_parameters.iter().map(move |squares| squares.get(part).copied().unwrap_or(0.0));
        (0..parts).flat_map(of_part).collect()
    }

    /// Returns the number of parameters of this rank that count for the norm.
    fn counted_parameters(&self) -> usize {
        let of_stage = self.stages.iter().map(|stage| {
            let places = 0..stage.runner.paths().len();
            places.filter(|&place| self.counts(stage.index, place)).count()
        });
        of_stage.sum()
    }

    /// Returns the norms of the mean gradient.
    fn gradient_norms(&self, gathered: &[f64]) -> Result<Norms, Cause> {
        let loss_scale = self.step.input.loss_scale;
        let order = self.parameters.as_ref().map_or(&[][..], |known| &known.order);
        if order.len() != gathered.len() {
            let (found, expected) = (gathered.len(), order.len());
            return Err(MessageError::Count { tag: Tag::Squares, found, expected }.into());
        }
        if let Some((path, _)) = order.iter().find(|(_, place)| !gathered[*place].is_finite()) {
            return match loss_scale > LossScaling::SMALLEST {
                true => Ok(Norms { whole: f64::INFINITY, parts: Vec::new() }),
                false => Err(Cause::GradientNotFinite { parameter: path.clone() }),
            };
        }
        let norm = |sum: f64| sum.sqrt() / self.divisor() / loss_scale;
        let whole = norm(order.iter().map(|(_, place)| gathered[*place]).sum());
        let parts = self.sums_of_parts(order.iter().map(|(_, place)| gathered[*place]));
        Ok(Norms { whole, parts: parts.into_iter().map(norm).collect() })
    }

    /// Adds the squares of the parameters that no group contains, and those of each group. `squares` has the order of the
    /// norm. Without groups, the list is empty.
    fn sums_of_parts(&self, squares: impl Iterator<Item = f64>) -> Vec<f64> {
        if self.clip_groups.is_empty() {
            return Vec::new();
        }
        let groups = self.parameters.as_ref().map_or(&[][..], |known| &known.clipped_with);
        let mut sums = vec![0.0; self.clip_groups.len() + 1];
        for (square, group) in squares.zip(groups) {
            sums[group.map_or(0, |group| group + 1)] += square;
        }
        sums
    }

    /// Returns the divisor of the gradient sums: usually the number of microbatches whose gradients are in them, those of
    /// this step and of the preceding steps without an update, on all replicas.
    fn divisor(&self) -> f64 {
        match self.step.input.is_sum {
            true => 1.0,
            false => self.accumulated_divisor + self.step.input.divisor,
        }
    }

    /// Returns the tag of the messages between replicas before the norm.
    fn replica_tag(&self) -> Tag {
        if self.endpoint.row_shard().is_some() { Tag::ReplicaSquares } else { Tag::Ready }
    }
}

/// Adds the squares of each parameter over the `parts` of its rows, in their order. `gathered` has the squares of all
/// parameters for each part.
fn add_parts(gathered: &[f64], parts: usize, parameters: usize, tag: Tag) -> Result<Vec<f64>, MessageError> {
    if gathered.len() != parameters * parts {
        return Err(MessageError::Count { tag, found: gathered.len(), expected: parameters * parts });
    }
    let sum = |place| gathered.iter().skip(place).step_by(parameters).sum();
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
