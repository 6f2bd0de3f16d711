//! A visit to the module of a stage between two steps, and [`ModulePlace`]: where the module is in the
//! pipeline.

use std::any::{Any, type_name};
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use pipewright_schedule::StageIndex;

use crate::tensor::TensorRank;

/// Where a module is in a running pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModulePlace {
    /// The module of a stage, as [`Stage::new`](super::Stage::new) got it.
    Stage(StageIndex),
    /// A layer of [`Layers`](crate::pipeline::Layers), counted from 0 over the whole model.
    Layer(usize),
    /// A node of a graph.
    Node(Arc<str>),
}

impl ModulePlace {
    /// Returns whether `stage` may have the module at this place. A layer or a node may be on any stage.
    pub(super) fn may_be_on(&self, stage: StageIndex) -> bool {
        !matches!(self, Self::Stage(asked) if *asked != stage)
    }
}

impl std::fmt::Display for ModulePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stage(stage) => write!(f, "stage {stage}"),
            Self::Layer(index) => write!(f, "layer {index}"),
            Self::Node(name) => write!(f, "node `{name}`"),
        }
    }
}

impl From<StageIndex> for ModulePlace {
    fn from(stage: StageIndex) -> Self {
        Self::Stage(stage)
    }
}

impl From<usize> for ModulePlace {
    fn from(index: usize) -> Self {
        Self::Layer(index)
    }
}

impl From<&str> for ModulePlace {
    fn from(name: &str) -> Self {
        Self::Node(name.into())
    }
}

/// A visit to the module of a stage.
#[derive(Clone)]
pub(crate) enum Visit {
    /// Reads the module at a place, in the first replica. All ranks of a tensor group read theirs, so that
    /// they can run it, and the first one's result is kept.
    Read { place: ModulePlace, read: Arc<ReadModule>, keep: bool },
    /// Changes the module at a place.
    Change { place: ModulePlace, change: Arc<ChangeModule> },
    /// Freezes the parameters with certain paths, or trains them if they are frozen.
    Freeze { contains: Arc<dyn Fn(&str) -> bool + Send + Sync>, freeze: bool },
    /// Adds numbers to parameters that are not trained, by path.
    Shift { by: Arc<BTreeMap<Arc<str>, Vec<f32>>> },
}

/// Gets the module at the place, the name of its type, and whether the result is kept.
pub(crate) type ReadModule = dyn Fn(&dyn Any, &'static str, bool) + Send + Sync;

/// Gets the module, the name of its type, and the device of its stage. Returns whether it has changed it.
pub(crate) type ChangeModule = dyn Fn(&mut dyn Any, &'static str, &Device) -> bool + Send + Sync;

impl Visit {
    /// Returns the visit of a rank of a tensor group: only the first one keeps the result.
    pub(crate) fn on(mut self, rank: TensorRank) -> Self {
        if let Self::Read { keep, .. } = &mut self {
            *keep = rank.index == 0;
        }
        self
    }
}

/// Returns `module` on the device of its stage, and on a tape if it is not.
pub(crate) fn for_stage<M: Module>(module: M, device: &Device) -> M {
    let is_on_tape = module.devices().iter().all(Device::is_autodiff);
    let module = if is_on_tape { module } else { module.train() };
    if module.devices().iter().all(|found| found == device) { module } else { module.fork(device) }
}

/// Returns a module and the name of its type.
pub(crate) fn any<M: Any>(module: &M) -> (&dyn Any, &'static str) {
    (module, type_name::<M>())
}

/// Like [`any`], but for a module that is changed.
pub(crate) fn any_mut<M: Any>(module: &mut M) -> (&mut dyn Any, &'static str) {
    (module, type_name::<M>())
}
