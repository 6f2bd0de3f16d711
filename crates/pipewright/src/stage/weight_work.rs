//! The weight gradients that `W` computes, in a form that a user's function can compute one by one.

use std::any::Any;
use std::collections::VecDeque;

use pipewright_schedule::Microbatch;

use super::error::StageError;
use super::gradients::GradientSums;
use crate::nn::WeightTask;
use crate::tensor::{Boundary, pack};

/// A user's function that computes weight gradients; see
/// [`Stage::with_weight_runner`](super::Stage::with_weight_runner).
pub(crate) type WeightRunner = Box<dyn FnMut(Microbatch, &mut WeightWork) + Send>;

/// Weight gradients of one microbatch that wait to be computed and added to the stage's sums. Each task
/// computes the gradient of one product, bias or norm, or the gradients of one
/// [`SplitBackward`](crate::nn::SplitBackward) layer. A function that works on them may also compute gradients itself,
/// in its own way, and add them.
#[derive(Debug)]
pub struct WeightWork<'a> {
    tasks: VecDeque<WeightTask>,
    sums: &'a mut GradientSums,
    module: &'a dyn Any,
    /// Why a task failed. The step fails when the user's function has returned.
    failed: Option<StageError>,
}

impl<'a> WeightWork<'a> {
    pub(super) fn new(tasks: Vec<WeightTask>, sums: &'a mut GradientSums, module: &'a dyn Any) -> Self {
        Self { tasks: tasks.into(), sums, module, failed: None }
    }

    /// Returns the stage's module if it is an `M`, as [`ForwardRun::module`](crate::hook::ForwardRun::module)
    /// does. If parameters are sharded, it may have only this replica's rows of them, in single precision.
    pub fn module<M: 'static>(&self) -> Option<&'a M> {
        self.module.downcast_ref()
    }

    /// Returns the number of tasks that wait.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns whether no task waits.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Runs the next task, in the order in which the backward pass reached the layers: the last layer first.
    /// Returns `false` if no task was left.
    pub fn run_next(&mut self) -> bool {
        let Some(task) = self.tasks.pop_front() else { return false };
        if let Err(error) = self.sums.add_deferred(task) {
            self.failed.get_or_insert(error);
        }
        true
    }

    /// Runs all tasks that wait.
    pub fn run_all(&mut self) {
        while self.run_next() {}
    }

    /// Drops the next task, whose gradients the caller adds itself. Returns `false` if no task was left.
    pub fn skip_next(&mut self) -> bool {
        self.tasks.pop_front().is_some()
    }

    /// Adds a gradient of the microbatch's loss to the sum of a parameter, which is given by its path in the
    /// model.
    ///
    /// # Errors
    /// When the stage has no parameter of that path, or the gradient is not one float tensor of the
    /// parameter's shape. The step then fails too.
    pub fn add(&mut self, parameter: &str, gradient: impl Boundary) -> Result<(), StageError> {
        let added = self.sums.add_by_path(parameter, pack(gradient));
        if let Err(error) = &added {
            self.failed.get_or_insert_with(|| error.clone());
        }
        added
    }

    /// Returns the first error of a task.
    pub(super) fn outcome(self) -> Result<(), StageError> {
        self.failed.map_or(Ok(()), Err)
    }
}
