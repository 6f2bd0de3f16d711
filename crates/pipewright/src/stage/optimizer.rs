//! The optimizer of a stage: made from the settings of its pipeline, with the groups of the stage's parameters.

use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;

use super::body::StageBody;
use super::module_parameters::parameters_of;
use super::training::TrainingStage;
use crate::optimizer::{ClipGroup, OptimizerGroup, group_of};

/// The optimizer of a stage as its pipeline configures it, without state.
#[derive(Clone, Default)]
pub(super) struct ConfiguredOptimizer {
    optimizer: Option<ModuleOptimizer>,
    groups: Arc<[OptimizerGroup]>,
    clip_groups: Arc<[ClipGroup]>,
    /// The group by whose norm each parameter is clipped.
    pub(super) clipped_with: Vec<Option<usize>>,
}

impl<M: StageBody> TrainingStage<M> {
    /// Sets the optimizer and the groups of parameters. Must be called after the paths are set.
    pub(super) fn set_optimizer(
        &mut self,
        optimizer: Option<ModuleOptimizer>,
        groups: Arc<[OptimizerGroup]>,
        clip_groups: Arc<[ClipGroup]>,
    ) {
        self.configured = ConfiguredOptimizer { optimizer, groups, clip_groups, clipped_with: Vec::new() };
        self.optimizer = self.fresh_optimizer();
    }

    /// Finds the groups of the stage's parameters. Returns the optimizer without state.
    pub(super) fn fresh_optimizer(&mut self) -> Option<ModuleOptimizer> {
        let ids: Vec<ParamId> = parameters_of(self.module()).iter().map(|found| found.id).collect();
        let (paths, configured) = (self.sums.paths(), &mut self.configured);
        let clipped_with = paths.iter().map(|path| group_of(&configured.clip_groups, path));
        configured.clipped_with = clipped_with.collect();
        let groups = &configured.groups;
        let group_of: Vec<Option<usize>> = paths.iter().map(|path| group_of(groups, path)).collect();
        let members = |group| {
            let members = ids.iter().zip(&group_of).filter(|(_, found)| **found == Some(group));
            members.map(|(id, _)| *id).collect()
        };
        let add = |whole, (place, group): (usize, &OptimizerGroup)| group.add_to(whole, members(place));
        configured.optimizer.clone().map(|whole| groups.iter().enumerate().fold(whole, add))
    }
}
