//! [`ModulePlace`]: where a module is in a running pipeline.

use std::any::{Any, type_name};
use std::sync::Arc;

use pipewright_schedule::StageIndex;

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

impl std::fmt::Display for ModulePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stage(stage) => write!(f, "stage {stage}"),
            Self::Layer(place) => write!(f, "layer {place}"),
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
    fn from(place: usize) -> Self {
        Self::Layer(place)
    }
}

impl From<&str> for ModulePlace {
    fn from(name: &str) -> Self {
        Self::Node(name.into())
    }
}

/// Returns a module and the name of its type.
pub(crate) fn any<M: Any>(module: &M) -> (&dyn Any, &'static str) {
    (module, type_name::<M>())
}

/// As [`any`], for a module that is changed.
pub(crate) fn any_mut<M: Any>(module: &mut M) -> (&mut dyn Any, &'static str) {
    (module, type_name::<M>())
}
