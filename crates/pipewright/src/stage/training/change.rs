//! Access to the module of a stage between two steps: reading it, changing it, and freezing its parameters.

use pipewright_schedule::StageIndex;

use super::TrainingStage;
use super::recompute::GradientPattern;
use crate::stage::body::StageBody;
use crate::stage::error::StageError;
use crate::stage::visit::{ChangeModule, ModulePlace, Visit};

impl<M: StageBody> TrainingStage<M> {
    /// Visits the module, which has its whole parameters. Returns the number of modules or parameters that it
    /// found.
    pub(super) fn visit_module(&mut self, stage: StageIndex, visit: &Visit) -> Result<usize, StageError> {
        if !matches!(visit, Visit::Read { .. }) {
            self.draws.forget();
        }
        match visit {
            Visit::Read { place, read, keep } if place.may_be_on(stage) => {
                let found = self.module.settled().part(place);
                found.inspect(|(module, name)| read(*module, name, *keep));
                Ok(usize::from(found.is_some()))
            }
            Visit::Change { place, change } if place.may_be_on(stage) => self.change(place, &**change),
            Visit::Freeze { contains, freeze } => Ok(self.freeze(&**contains, *freeze)),
            Visit::Read { .. } | Visit::Change { .. } => Ok(0),
        }
    }

    fn change(&mut self, place: &ModulePlace, change: &ChangeModule) -> Result<usize, StageError> {
        // A copy is changed, so that an error or a panic leaves the module as it is. It shares the storage.
        let mut module = self.module.settled().clone();
        let Some((part, name)) = module.part_mut(place) else { return Ok(0) };
        if change(part, name, self.module.device()) {
            module.parts_changed();
            self.adopt(module)?;
        }
        Ok(1)
    }

    /// Freezes or trains parameters. Returns their number.
    pub(super) fn freeze(&mut self, contains: &dyn Fn(&str) -> bool, freeze: bool) -> usize {
        let chosen = self.module.freeze(contains, freeze);
        // Which outputs need a gradient may change.
        self.pattern = GradientPattern::default();
        chosen.iter().for_each(|id| self.sums.drop_sum(*id));
        chosen.len()
    }
}
