//! The two versions of delayed parameters ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)).
//!
//! `module` is the version with which the stage computes, and `other` is the other one. Between two batches, `module`
//! is the newer version, so everything that reads a stage reads that one. A batch begins with
//! [`switch_version`](crate::stage::runner::StageParameters::switch_version): it computes with the older version. Its
//! update starts from the newer one and replaces the older one with the result, because no batch needs it any
//! longer. The result is then the newer version. AdamW writes it over the gradient if nothing else uses that. Other optimizers write
//! to other storage, so there are two versions and, during the update, one parameter more.
//!
//! A batch may begin at the newer version while the one before it still runs at the older one: each version has the
//! gradient sums and the microbatches in flight of its batch. If parameters are sharded, it also has the whole parameters that
//! its batch has gathered, and the update starts from the rows of the newer version.

use std::collections::HashMap;
use std::convert::Infallible;
use std::mem::swap;

use burn::module::ParamId;
use burn::tensor::TensorData;

use super::{BeforeUpdate, TrainingStage};
use crate::stage::body::StageBody;
use crate::stage::gradients::GradientSums;
use crate::stage::held_module::HeldModule;
use crate::stage::in_flight::InFlightTable;
use crate::stage::module_parameters::{NamedTensor, filled, parameters_of};
use crate::stage::statistics::StatisticsBefore;
use crate::tensor::{OptionalTensors, Value};

/// A version of delayed parameters, with the batch that is computed with it.
pub(super) struct Version<M: StageBody> {
    pub(super) module: HeldModule<M>,
    pub(super) sums: GradientSums,
    in_flight: InFlightTable,
    statistics: StatisticsBefore,
    before_update: Option<BeforeUpdate<M>>,
}

impl<M: StageBody> TrainingStage<M> {
    /// Exchanges the versions. Before the first batch, both are the first parameters.
    pub(super) fn switch(&mut self) {
        let copy = || Version {
            module: self.module.copy(),
            sums: GradientSums::new(self.table.clone()),
            in_flight: InFlightTable::new(self.settings.slices),
            statistics: StatisticsBefore::default(),
            before_update: None,
        };
        let mut other = self.other.take().unwrap_or_else(copy);
        swap(&mut self.module, &mut other.module);
        swap(&mut self.sums, &mut other.sums);
        swap(&mut self.in_flight, &mut other.in_flight);
        swap(&mut self.statistics, &mut other.statistics);
        swap(&mut self.before_update, &mut other.before_update);
        self.other = Some(other);
    }

    /// Replaces the version with which a batch was computed by the newer one. The update follows.
    pub(super) fn take_newer(&mut self) {
        if let Some(newer) = &self.other {
            self.module.put(newer.module.released());
        }
    }

    /// Returns the values of the older version by index; an empty list if both versions are equal.
    pub(super) fn older_values(&self) -> Vec<Value> {
        let Some(other) = &self.other else { return Vec::new() };
        parameters_of(&other.module.released()).into_iter().map(|found| found.value).collect()
    }

    /// Makes the older version of a stage that was restored: the parameters with these values, and the newer version of
    /// the others.
    pub(super) fn restore_older(&mut self, mut values: HashMap<ParamId, TensorData>) {
        self.other = None;
        if !self.settings.delayed || values.is_empty() {
            return;
        }
        let found = parameters_of(self.module.get());
        let mut value_of = |NamedTensor { id, value, .. }: &NamedTensor| {
            let data = values.remove(id)?;
            Some(Value::from_data(data, &value.device()))
        };
        let values: OptionalTensors = found.iter().map(&mut value_of).collect();
        drop(found);
        let mut values = values.into_iter();
        self.switch();
        let outcome = self.module.replace_with(|module| filled(module, |_, _| Ok(values.next().flatten())));
        outcome.unwrap_or_else(|never: Infallible| match never {});
        self.switch();
    }
}
