//! The two versions of delayed parameters ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)).
//!
//! `module` is the version with which the stage computes, and `other` is the other one. Between two batches, `module`
//! is the newer version, so everything that reads a stage reads that one. A batch begins with
//! [`switch_version`](crate::stage::runner::StageParameters::switch_version): it computes with the older version. Its
//! update starts from the newer one and puts the result in the place of the older one, which no batch needs any more.
//! The result is then the newer version. An optimizer writes to other storage while a version uses the old one, so there
//! are two versions and, during the update, one parameter more.

use std::collections::HashMap;
use std::convert::Infallible;
use std::mem::swap;

use burn::module::ParamId;
use burn::tensor::TensorData;

use super::TrainingStage;
use crate::stage::body::StageBody;
use crate::stage::module_parameters::{NamedTensor, filled, parameters_of};
use crate::tensor::{OptionalTensors, Value};

impl<M: StageBody> TrainingStage<M> {
    /// Exchanges the versions. Before the first batch, both are the first parameters.
    pub(super) fn switch(&mut self) {
        match &mut self.other {
            Some(other) => swap(&mut self.module, other),
            None => self.other = Some(self.module.copy()),
        }
    }

    /// Puts the newer version in the place of the older one, with which a batch was computed. The update follows.
    pub(super) fn take_newer(&mut self) {
        if let Some(newer) = &self.other {
            self.module.put(newer.get().clone());
        }
    }

    /// Returns the values of the older version by index; an empty list if both versions are equal.
    pub(super) fn older_values(&self) -> Vec<Value> {
        let older = self.other.as_ref().map(|other| parameters_of(other.settled()));
        older.into_iter().flatten().map(|found| found.value).collect()
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
        let mut older = self.module.copy();
        let mut values = values.into_iter();
        let outcome = older.replace_with(|module| filled(module, |_, _| Ok(values.next().flatten())));
        outcome.unwrap_or_else(|never: Infallible| match never {});
        self.other = Some(older);
    }
}
