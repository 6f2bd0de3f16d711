//! The weight gradients that `W` computes, in a form that a user's function can compute one by one.

use std::collections::VecDeque;

use pipewright_schedule::Microbatch;

use super::gradients::GradientSums;
use crate::nn::WeightTask;

/// A user's function that computes weight gradients; see
/// [`Stage::with_weight_runner`](super::Stage::with_weight_runner).
pub(crate) type WeightRunner = Box<dyn FnMut(Microbatch, &mut WeightWork) + Send>;

/// Weight gradients of one microbatch that wait to be computed and added to the stage's sums.
#[derive(Debug)]
pub struct WeightWork<'a> {
    tasks: VecDeque<WeightTask>,
    sums: &'a mut GradientSums,
}

impl<'a> WeightWork<'a> {
    pub(super) fn new(tasks: Vec<WeightTask>, sums: &'a mut GradientSums) -> Self {
        Self { tasks: tasks.into(), sums }
    }

    /// Returns the number of products that wait.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns whether no product waits.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Computes the next product, in the order in which the backward pass reached the layers: the last layer first.
    /// Returns `false` if no product was left.
    pub fn run_next(&mut self) -> bool {
        let task = self.tasks.pop_front();
        let found = task.is_some();
        self.sums.add_deferred(task);
        found
    }

    /// Computes all products that wait.
    pub fn run_all(&mut self) {
        self.sums.add_deferred(self.tasks.drain(..));
    }
}
