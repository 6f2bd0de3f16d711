//! The optimizer of a stage: made from the settings of its pipeline, with the groups of the stage's
//! parameters.

use std::collections::HashSet;

use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;

use super::body::StageBody;
use super::error::StageError;
use super::gradients::GradientSums;
use super::held_module::HeldModule;
use super::module_parameters::parameters_of;
use super::parameter_table::ParameterTable;
use super::settings::StageSettings;
use crate::optimizer::{
    Factors, OptimizerGroup, ParameterCut, group_of, mixes_parts, with_state_of, without_last_updates,
};

/// The optimizer of a stage with its state, and the groups of the stage's parameters.
pub(super) struct StageOptimizer {
    /// `None` if the stage is not trained, and during an update.
    optimizer: Option<ModuleOptimizer>,
    /// The group by whose norm each parameter is clipped.
    clipped_with: Vec<Option<usize>>,
}

impl StageOptimizer {
    /// Makes the optimizer of `module`, which has the parameters of `table`, without state.
    ///
    /// # Errors
    /// When a parameter is cut, and the optimizer cannot update its parts one by one.
    pub(super) fn new<M: Module>(
        settings: &StageSettings,
        module: &M,
        table: &ParameterTable,
    ) -> Result<Self, StageError> {
        let paths = &table.paths;
        let groups = &settings.optimizer_groups;
        let group_of_each: Vec<Option<usize>> = paths.iter().map(|path| group_of(groups, path)).collect();
        let ids: Vec<ParamId> = parameters_of(module).iter().map(|parameter| parameter.id).collect();
        let members_of = |group| {
            let members = ids.iter().zip(&group_of_each).filter(|(_, found)| **found == Some(group));
            members.map(|(id, _)| *id).collect()
        };
        let add = |whole, (index, group): (usize, &OptimizerGroup)| group.add_to(whole, members_of(index));
        let optimizer = settings.optimizer.clone().map(|whole| groups.iter().enumerate().fold(whole, add));
        let cut_of = |index| match (table.is_cut(index), settings.row_shards) {
            (true, _) if table.is_cut_by_rows(index) => ParameterCut::ByRows,
            (true, _) => ParameterCut::ByRowsOrColumns,
            (false, Some(_)) => ParameterCut::ByRows,
            (false, None) => ParameterCut::Whole,
        };
        let is_cut = |index| cut_of(index) != ParameterCut::Whole;
        if let Some(optimizer) = optimizer.as_ref().filter(|_| (0..paths.len()).any(is_cut))
            && let Some(index) = mixes_parts(optimizer, module, cut_of)
        {
            return Err(StageError::MixesRows { parameter: paths[index].clone() });
        }
        let clipped_with = paths.iter().map(|path| group_of(&settings.clip_groups, path)).collect();
        Ok(Self { optimizer, clipped_with })
    }

    pub(super) fn get(&self) -> Option<&ModuleOptimizer> {
        self.optimizer.as_ref()
    }

    /// Takes over the state that `old` has of the parameters `kept`.
    pub(super) fn take_state_of(&mut self, old: &Self, kept: &HashSet<ParamId>) -> Result<(), StageError> {
        if let Some(old) = &old.optimizer
            && let Some(optimizer) = self.optimizer.take()
        {
            let carried = with_state_of(optimizer, old, kept).map_err(|reason| {
                StageError::Mistake(format!(
                    "the optimizer's state cannot be carried over to the changed module: {reason}"
                ))
            });
            self.optimizer = Some(carried?);
        }
        Ok(())
    }

    /// Forgets the last updates of these parameters, which do not correct their next updates.
    pub(super) fn forget_last_updates(&mut self, of: &HashSet<ParamId>) -> Result<(), StageError> {
        if let Some(optimizer) = self.optimizer.as_ref().filter(|_| !of.is_empty()) {
            let forgotten = without_last_updates(optimizer, of).map_err(|reason| {
                StageError::Mistake(format!(
                    "the optimizer's state cannot be changed for parameters that are trained again: {reason}"
                ))
            });
            if let Some(forgotten) = forgotten? {
                self.optimizer = Some(forgotten);
            }
        }
        Ok(())
    }

    /// Replaces the optimizer and its state.
    pub(super) fn set(&mut self, restored: ModuleOptimizer) {
        self.optimizer = Some(restored);
    }

    /// Multiplies the gradient sums by their factors, takes one step with them and clears them.
    pub(super) fn update<M: StageBody>(
        &mut self,
        module: &mut HeldModule<M>,
        sums: &mut GradientSums,
        factors: &Factors,
        learning_rate: f64,
    ) {
        let Some(mut optimizer) = self.optimizer.take() else { return sums.clear() };
        // The module is moved through the optimizer, so that it owns the storage and may write in place.
        module.replace(|module| {
            let gradients = sums.take(&module, |index| factors.of(self.clipped_with[index]));
            // Burn calls the optimizer of its group for each parameter, or the whole stage's
            // (`optimizer/adamw.rs`).
            optimizer.step(learning_rate, module, gradients)
        });
        self.optimizer = Some(optimizer);
    }
}
