//! The whole parameters of a rank's stages, or a visit to their modules, between two steps.

use std::sync::Arc;

use burn::tensor::TensorData;
use pipewright_schedule::StageIndex;

use super::context::RankContext;
use super::stages::{LocalStage, LocalStages};
use crate::stage::{StageError, Visit};
use crate::tensor::TensorShard;

/// The results of a visit to the modules of a rank.
#[derive(Debug, Default)]
pub(crate) struct Visited {
    /// The number of modules or parameters that were found.
    pub found: usize,
    /// Why a module was not changed.
    pub error: Option<StageError>,
}

impl Visited {
    fn add(&mut self, outcome: Result<usize, StageError>) {
        match outcome {
            Ok(found) => self.found += found,
            Err(error) => self.error = Some(error),
        }
    }
}

/// A parameter of the model, read between two steps.
#[derive(Clone, Debug)]
pub struct NamedParameter {
    /// The stage that holds it.
    pub stage: StageIndex,
    /// Its global path.
    pub path: Arc<str>,
    /// The shard of the parameter that the values are, if several ranks compute the stage together.
    pub shard: TensorShard,
    /// Its values.
    pub data: TensorData,
}

/// The state of collecting the whole parameters of a rank's stages, or of visiting their modules.
#[derive(Default)]
pub(super) struct Collection {
    /// The number of stages that are done.
    done: usize,
    /// The visit to the modules; without it their parameters are collected.
    visit: Option<Visit>,
    parameters: Vec<NamedParameter>,
    visited: Visited,
}

impl Collection {
    pub(super) fn new(visit: Option<Visit>) -> Self {
        Self { visit, ..Self::default() }
    }

    /// Returns the stage that is next; `None` if all are done.
    pub(super) fn next(&self, stages: &LocalStages) -> Option<StageIndex> {
        stages.iter().nth(self.done).map(|stage| stage.index)
    }

    /// Returns whether the visit adds numbers to parameters that are not trained.
    pub(super) fn shifts(&self) -> bool {
        matches!(self.visit, Some(Visit::Shift { .. }))
    }

    /// Returns whether the trained parameters of the stages are needed. Others are never sharded.
    pub(super) fn needs_trained(&self) -> bool {
        !self.shifts()
    }

    /// Keeps the whole parameters of a stage, or visits its module.
    pub(super) fn collect(&mut self, context: &RankContext, stage: &mut LocalStage) {
        let tensor_rank = context.tensor_rank();
        let index = stage.index;
        match &self.visit {
            Some(Visit::Read { .. }) if context.replica() > 0 => {}
            Some(visit) => {
                let outcome = stage.runner_mut().visit(index, &visit.clone().on(tensor_rank));
                self.visited.add(outcome);
            }
            None => {
                let runner = stage.runner();
                let named = runner.table().paths.iter().cloned().zip(runner.parameters()).enumerate();
                self.parameters.extend(named.map(|(parameter, (path, data))| {
                    let shard = runner.table().placement(parameter).shard_of(tensor_rank);
                    NamedParameter { stage: index, path, shard, data }
                }));
            }
        }
        stage.release();
        self.done += 1;
    }

    pub(super) fn into_results(self) -> (Vec<NamedParameter>, Visited) {
        (self.parameters, self.visited)
    }
}
