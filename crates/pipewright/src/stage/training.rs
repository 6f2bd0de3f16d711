//! A stage in training: its module, the microbatches in flight, the gradient sums and the optimizer.
//!
//! A stage is complete when it is made. The files of the folder have its methods:
//!
//! | file | content |
//! |---|---|
//! | `compute.rs` | the actions that the executor runs |
//! | `forward.rs`, `recompute.rs`, `backward.rs` | how a segment of the module runs forward, once or a second time, and backward |
//! | `probe.rs` | finds layers that draw from the generator of their device, on ranks that compute together |
//! | `versions.rs` | the two versions of delayed parameters |
//! | `parameters.rs` | access to parameters, their gradients and the module |
//!
//! # What a forward keeps
//!
//! The inputs come onto the tape. The outputs are taken off the tape and returned *by value*. The
//! stage keeps one gradient root per float output (or the loss), and the tensors that the
//! operations recorded for their own backward. It keeps no output storage unless an operation needs it. A
//! forward that is recomputed keeps its inputs only (`recompute.rs`).

mod backward;
mod compute;
mod forward;
mod parameters;
mod probe;
mod recompute;
mod versions;

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use pipewright_schedule::StageBackward;

use self::probe::Probes;
use self::recompute::GradientPattern;
use self::versions::Version;
use super::body::StageBody;
use super::error::StageError;
use super::gradients::GradientSums;
use super::held_module::{HeldModule, Moved};
use super::in_flight::InFlightTable;
use super::module_parameters::{parameters_of, running_statistics_of};
use super::optimizer::StageOptimizer;
use super::parameter_table::ParameterTable;
use super::settings::{Loss, StageOptions, StageSettings};
use super::statistics::StatisticsBefore;
use super::visit::{ChangeModule, ModulePlace};
use crate::random::LayerDraws;

/// A stage in training. Its parts have state of their own, which only their methods change.
pub(super) struct TrainingStage<M: StageBody> {
    settings: StageSettings,
    options: StageOptions,
    module: HeldModule<M>,
    /// The other version of the parameters if they are delayed; `None` before the first batch, when both are equal
    /// (`training/versions.rs`).
    other: Option<Version<M>>,
    table: Arc<ParameterTable>,
    sums: GradientSums,
    optimizer: StageOptimizer,
    /// The indices of the parameters that use the storage of another one.
    borrowed: HashSet<usize>,
    /// Present after an early update, until the update is kept or undone.
    before_update: Option<BeforeUpdate<M>>,
    loss: Option<Loss<M::Output>>,
    in_flight: InFlightTable,
    /// Runs the layers. Some of them may draw from the generator of their device.
    draws: Arc<LayerDraws>,
    probes: Probes,
    /// Which outputs of the recomputed forwards need a gradient.
    pattern: GradientPattern,
    statistics: StatisticsBefore,
}

/// The parameters and the optimizer's state from before an update that may be undone. The update has written to
/// other storage, because these used the old one.
struct BeforeUpdate<M> {
    module: M,
    optimizer: ModuleOptimizer,
}

/// The parts of a stage that follow from its module and its settings.
struct Trained<M: StageBody> {
    module: HeldModule<M>,
    table: Arc<ParameterTable>,
    sums: GradientSums,
    optimizer: StageOptimizer,
}

impl<M: StageBody> TrainingStage<M> {
    /// Makes the stage on its device. If the settings share the parameters over replicas, the stage holds its
    /// rows only, and needs [`StageParameters::gather`](super::runner::StageParameters::gather) before it
    /// computes.
    ///
    /// # Errors
    /// When the module does not fit the settings.
    pub(super) fn new(
        body: M,
        loss: Option<Loss<M::Output>>,
        options: StageOptions,
        settings: StageSettings,
    ) -> Result<Self, StageError> {
        if settings.must_have_loss && loss.is_none() {
            let mistake = "it is the last one and has no loss: make it with `Stage::with_loss`";
            return Err(StageError::Mistake(mistake.to_owned()));
        }
        let trained = Trained::new(body, &options.prefixes, &settings, HashSet::new())?;
        let Trained { module, table, sums, optimizer } = trained;
        let mut stage = Self {
            draws: Arc::new(LayerDraws::new(
                &module.device,
                settings.tensor_ranks > 1 || settings.expert_ranks > 1,
            )),
            in_flight: InFlightTable::new(settings.slices),
            settings: StageSettings { device: Some(module.device.clone()), ..settings },
            options,
            module,
            other: None,
            table,
            sums,
            optimizer,
            borrowed: HashSet::new(),
            before_update: None,
            loss,
            probes: Probes::default(),
            pattern: GradientPattern::default(),
            statistics: StatisticsBefore::default(),
        };
        stage.freeze_base();
        stage.require_backward(&stage.module, &stage.table)?;
        Ok(stage)
    }

    /// Freezes the base of the adapter, if the stage has one. In half precision it is rounded once: no update
    /// needs its other digits.
    fn freeze_base(&mut self) {
        if let Some(is_base) = &self.options.is_base {
            self.module.freeze(is_base, true);
            self.module.round(is_base);
        }
    }

    /// Refuses parameters that are trained, if the program does not compute their gradients.
    fn require_backward(&self, module: &HeldModule<M>, table: &ParameterTable) -> Result<(), StageError> {
        if self.settings.backward == StageBackward::Whole {
            return Ok(());
        }
        let parameters = parameters_of(module.get()).into_iter().zip(&table.paths).enumerate();
        let mut trained = parameters.filter(|(index, (parameter, path))| {
            // The rows of a sharded parameter have no gradient of their own.
            let has_gradient = parameter.is_trained || module.is_sharded(*index);
            has_gradient && !module.frozen.contains(&parameter.id) && !self.is_base(path)
        });
        match trained.next() {
            Some((_, (_, path))) => Err(StageError::Mistake(format!(
                "the parameter `{path}` is trained, and the program computes no weight gradients of its stage: freeze it, or \
                 make a program in which the stage is trained (`TrainedStages`)"
            ))),
            None => Ok(()),
        }
    }

    fn is_base(&self, path: &str) -> bool {
        self.options.is_base.as_ref().is_some_and(|is_base| is_base(path))
    }

    /// Puts `module`, with whole parameters, in place of the stage's. Parameters with the same id and shape
    /// keep the optimizer's state. After an error the stage is as before.
    fn adopt(&mut self, module: M) -> Result<(), StageError> {
        let frozen = self.module.frozen.clone();
        let mut new = Trained::new(module, &self.options.prefixes, &self.settings, frozen)?;
        let is_kept = |id: &ParamId| {
            self.table.shape_of(*id).is_some_and(|shape| new.table.shape_of(*id) == Some(shape))
        };
        let kept = new.table.ids.iter().copied().filter(is_kept).collect();
        new.optimizer.take_state_of(&self.optimizer, &kept)?;
        self.require_backward(&new.module, &new.table)?;
        let Trained { module, table, sums, optimizer } = new;
        (self.module, self.table, self.sums, self.optimizer) = (module, table, sums, optimizer);
        self.borrowed.clear();
        self.freeze_base();
        self.pattern = GradientPattern::default();
        Ok(())
    }

    /// Changes the module at a place. Returns the number of modules that it found.
    fn change(&mut self, place: &ModulePlace, change: &ChangeModule) -> Result<usize, StageError> {
        if self.other.is_some() {
            return Err(StageError::Mistake(
                "a module cannot be changed while its parameters have two versions: change it before the first step, or \
                 launch the pipeline without `PipelineConfig::delayed`"
                    .to_owned(),
            ));
        }
        // A copy is changed, so that an error or a panic leaves the module as it is. It shares the storage.
        let mut module = self.module.settled().clone();
        let Some((part, name)) = module.part_mut(place) else { return Ok(0) };
        if change(part, name, &self.module.device) {
            module.parts_changed();
            self.adopt(module)?;
        }
        Ok(1)
    }

    /// Freezes or trains parameters. Returns them. The base of an adapter stays frozen.
    fn freeze(&mut self, contains: &dyn Fn(&str) -> bool, freeze: bool) -> HashSet<ParamId> {
        let is_base = &self.options.is_base;
        let can_change = |path: &str| !is_base.as_ref().is_some_and(|is_base| is_base(path));
        let chosen = self.module.freeze(&|path| can_change(path) && contains(path), freeze);
        if let Some(other) = &mut self.other {
            other.module.freeze(&|path| can_change(path) && contains(path), freeze);
            chosen.iter().for_each(|id| other.sums.drop_sum(*id));
        }
        // Which outputs need a gradient may change.
        self.pattern = GradientPattern::default();
        chosen.iter().for_each(|id| self.sums.drop_sum(*id));
        chosen
    }

    fn has_loss(&self) -> bool {
        self.loss.is_some()
    }
}

impl<M: StageBody> Trained<M> {
    /// Prepares a module. The parameters in `frozen` were frozen after the launch.
    fn new(
        module: M,
        prefixes: &[String],
        settings: &StageSettings,
        frozen: HashSet<ParamId>,
    ) -> Result<Self, StageError> {
        let StageSettings { device, precision, slices, tensor_ranks, expert_ranks, row_shards, .. } =
            settings;
        let moved = Moved::new(module, device.as_ref(), *precision)?;
        let table = Arc::new(ParameterTable::new(&moved.module, prefixes, *tensor_ranks, *expert_ranks)?);
        if let Some(layer) = settings.delayed.then(|| running_statistics_of(&moved.module)).flatten() {
            return Err(StageError::Mistake(format!(
                "the layer `{layer}` keeps running statistics, which have one version, and parameters that are delayed by an \
                 update have two: set optimizer.delay to 0 (`PipelineConfig::delayed`), or use a normalisation without running \
                 statistics"
            )));
        }
        if !slices.is_one()
            && let Some(reason) = moved.module.refuses_slices()
        {
            return Err(StageError::Mistake(format!(
                "its module cannot run microbatches in {slices} slices: {reason}; use a schedule of whole microbatches, such \
                 as `1f1b`"
            )));
        }
        let optimizer = StageOptimizer::new(settings, &moved.module, &table)?;
        let module = HeldModule::new(moved, table.clone(), frozen, *row_shards);
        Ok(Self { module, sums: GradientSums::new(table.clone()), table, optimizer })
    }
}
