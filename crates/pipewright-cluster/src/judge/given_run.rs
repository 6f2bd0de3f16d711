//! The run that a file describes, and its place.

use pipewright_schedule::emit::{ReadError, ReadPlan};
use pipewright_schedule::plan::System;
use pipewright_shapes::model::Model;

use crate::layout::{Cut, Layout, Precision};
use crate::machine::Machine;
use crate::search::Request;

/// The model and the GPUs of a run, and what the file may leave out.
#[derive(Debug, Clone, Copy)]
pub struct RunContext<'a> {
    /// The model.
    pub model: &'a Model,
    /// All GPUs.
    pub gpus: u32,
    /// The tokens of a row, if they are given elsewhere.
    pub sequence: Option<u32>,
    /// The rows of a step, if they are given elsewhere.
    pub batch: Option<u32>,
    /// The precision of the products, if it is given elsewhere. Without it, a file that does not say the precision has its
    /// system's default.
    pub precision: Option<Precision>,
}

/// A run that a file describes.
#[derive(Debug, Clone, PartialEq)]
pub struct GivenRun {
    /// The system.
    pub system: System,
    /// The model, with the predictors that the run trains.
    pub model: Model,
    /// The layout.
    pub layout: Layout,
    /// The options that the prediction does not use, as they are written.
    pub unused: Vec<String>,
    /// Sentences about what the prediction does not count, or assumes.
    pub notes: Vec<String>,
}

impl GivenRun {
    pub(super) fn new(system: System, model: Model, layout: Layout) -> Self {
        Self { system, model, layout, unused: Vec::new(), notes: Vec::new() }
    }

    /// Returns the request for plans of the same model and batch on `gpus` of a machine, to judge the run by.
    ///
    /// # Errors
    /// When the machine has no rate for the run's precision.
    pub fn request(&self, machine: Machine, gpus: u32) -> Result<Request, ReadError> {
        let Layout { batch, sequence, precision, scores, implementation, .. } = self.layout;
        if !machine.has_rate(precision) {
            let (precision, name) = (precision.name(), &machine.name);
            let reason = format!("the products are in {precision}, and {name} has no rate for it");
            return Err(ReadError { line: None, reason });
        }
        let request = Request::new(self.model.clone(), machine, gpus, batch, sequence, precision);
        Ok(Request { scores, implementation, ..request })
    }
}

/// Returns the blocks of each stage of a plan, whose first layer is the embedding and whose last one is the head.
pub(super) fn cut_of(plan: &ReadPlan, model: &Model) -> Cut {
    let layers = model.blocks.len() + 2;
    let block = |layer: usize| layer.saturating_sub(1).min(model.blocks.len());
    let starts = [0].into_iter().chain(plan.choice.boundaries.iter().copied());
    let ends = plan.choice.boundaries.iter().copied().chain([layers]);
    let blocks: Vec<u32> = starts.zip(ends).map(|(start, end)| (block(end) - block(start)) as u32).collect();
    Cut::Given { predictors: blocks.len().saturating_sub(1) as u32, blocks }
}
