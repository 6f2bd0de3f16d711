//! The checks of the tensors at a stage's boundaries against their [`Metadata`].

use std::collections::{HashMap, HashSet};
use std::fmt;

use pipewright_schedule::words::counted;
use pipewright_schedule::{Microbatch, StageIndex};

use super::metadata::{CheckMetadata, Metadata, TensorSpec};
use super::value::{OptionalTensor, Value};
use crate::ids::WorldRank;

/// One side of a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// The stage.
    pub stage: StageIndex,
    /// Its rank.
    pub rank: WorldRank,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} on rank {}", self.stage, self.rank)
    }
}

/// The two sides of a boundary disagree.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "microbatch {microbatch}: {mismatch}: {from} sent {sent}, {to} expects {expected}; {}", .mismatch.hint()
)]
pub struct MetadataError {
    /// The microbatch that crosses it.
    pub microbatch: Microbatch,
    /// The difference.
    pub mismatch: Mismatch,
    /// The side that sent.
    pub from: Side,
    /// A description of the tensors that it sent.
    pub sent: String,
    /// The side that receives.
    pub to: Side,
    /// A description of the tensors that it expects.
    pub expected: String,
}

pipewright_schedule::message_as_debug!(MetadataError);

/// A difference between the sides of a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The number of tensors.
    Count,
    /// The tensor at this index.
    Tensor(usize),
    /// The gradient of the tensor at this index.
    Gradient(usize),
}

impl Mismatch {
    /// Returns what to do about it.
    fn hint(self) -> &'static str {
        match self {
            Self::Count | Self::Tensor(_) => {
                "if a dimension may differ between microbatches, name it in `PipelineConfig::metadata`"
            }
            Self::Gradient(_) => "return a gradient of the shape and type of each input, or `None`",
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count => f.write_str("the numbers of tensors differ"),
            Self::Tensor(index) => write!(f, "tensor {index} differs"),
            Self::Gradient(index) => write!(f, "the gradient of tensor {index} differs"),
        }
    }
}

/// The metadata of a stage's two boundaries, as the stage sees it.
#[derive(Clone, Debug)]
pub(crate) struct Boundaries {
    metadata: Metadata,
    check: CheckMetadata,
    stage: StageIndex,
    /// Microbatches of a step.
    microbatches: usize,
    takes: Known,
    gives: Known,
    /// The inputs of the microbatches of this step whose gradients are to be checked.
    inputs: HashMap<Microbatch, Vec<TensorSpec>>,
    /// The inputs of another batch that runs at the same time.
    parked: HashMap<Microbatch, Vec<TensorSpec>>,
    /// Microbatches whose gradients were checked. An evaluation checks no gradients.
    gradients_seen: usize,
    /// The mismatches that were logged.
    warned: HashSet<Flow>,
}

/// The tensors that cross a boundary, from the side of one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Flow {
    Inputs,
    Outputs,
    InputGradients,
}

/// One boundary, seen from one side.
#[derive(Clone, Debug, Default)]
struct Known {
    specs: Option<Vec<TensorSpec>>,
    /// Microbatches that were checked.
    seen: usize,
}

impl Boundaries {
    pub(crate) fn new(
        metadata: &Metadata,
        check: CheckMetadata,
        stage: StageIndex,
        microbatches: u32,
    ) -> Self {
        let of_next = metadata.of_stage(StageIndex::new(stage.get() + 1));
        let takes = Known { specs: metadata.of_stage(stage), seen: 0 };
        let gives = Known { specs: of_next, seen: 0 };
        let (metadata, microbatches) = (metadata.clone(), microbatches as usize);
        let (inputs, parked, warned) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { metadata, check, stage, microbatches, takes, gives, inputs, parked, gradients_seen: 0, warned }
    }

    /// Begins a step or an evaluation.
    pub(crate) fn begin_step(&mut self) {
        self.inputs.clear();
    }

    /// Continues with the other of two batches that run at the same time.
    pub(crate) fn switch(&mut self) {
        std::mem::swap(&mut self.inputs, &mut self.parked);
    }

    /// Forgets metadata that a failed step has provided.
    pub(crate) fn reset(&mut self) {
        let (warned, parked) = (std::mem::take(&mut self.warned), std::mem::take(&mut self.parked));
        let fresh = Self::new(&self.metadata, self.check, self.stage, self.microbatches as u32);
        // The other batch continues.
        *self = Self { warned, parked, ..fresh };
    }

    /// Returns whether a mismatch is the first one of its kind, and records it.
    pub(crate) fn warns(&mut self, flow: Flow) -> bool {
        self.warned.insert(flow)
    }

    /// Checks the inputs of the stage: all tensors of the boundary.
    pub(crate) fn check_inputs(
        &mut self,
        microbatch: Microbatch,
        values: &[Value],
    ) -> Result<(), TensorMismatch> {
        if self.check == CheckMetadata::Always || self.gradients_seen < self.microbatches {
            let specs = values.iter().map(|value| TensorSpec::of(value, &[]));
            self.inputs.insert(microbatch, specs.collect());
        }
        let Some(specs) = self.takes.specs_to_check(values, &self.metadata, self.check, self.microbatches)
        else {
            return Ok(());
        };
        if values.len() != specs.len() {
            let [sent, expected] = [values.len(), specs.len()].map(|count| counted(count, "tensor"));
            return Err(TensorMismatch { mismatch: Mismatch::Count, sent, expected });
        }
        compare(values.iter().map(Some), specs, Mismatch::Tensor)
    }

    /// Checks the gradients of the inputs of a microbatch, unless as many were checked as a step has. They
    /// have the shapes and types of the inputs. An input may have no gradient.
    pub(crate) fn check_input_gradients(
        &mut self,
        microbatch: Microbatch,
        gradients: &[OptionalTensor],
    ) -> Result<(), TensorMismatch> {
        let Some(specs) = self.inputs.remove(&microbatch) else { return Ok(()) };
        self.gradients_seen = (self.gradients_seen + 1).min(self.microbatches);
        compare(gradients.iter().map(Option::as_ref), &specs, Mismatch::Gradient)
    }

    /// Checks the outputs for the next stage, without direct skip connections from other stages.
    pub(crate) fn check_outputs(&mut self, values: &[Value]) -> Result<(), TensorMismatch> {
        let specs = self.gives.specs_to_check(values, &self.metadata, self.check, self.microbatches);
        specs.map_or(Ok(()), |specs| compare(values.iter().map(Some), specs, Mismatch::Tensor))
    }
}

impl Known {
    /// Returns the specification to compare a microbatch with, or `None` if the boundary needs no further
    /// checks. Without given metadata, the first microbatch provides it.
    fn specs_to_check(
        &mut self,
        values: &[Value],
        metadata: &Metadata,
        check: CheckMetadata,
        microbatches: usize,
    ) -> Option<&[TensorSpec]> {
        if check == CheckMetadata::FirstStep && self.seen == microbatches {
            return None;
        }
        self.seen = (self.seen + 1).min(microbatches);
        let free = metadata.free();
        let shown = || values.iter().map(|value| TensorSpec::of(value, free)).collect();
        Some(self.specs.get_or_insert_with(shown))
    }
}

/// A [`MetadataError`] without the microbatch and the two sides.
pub(crate) struct TensorMismatch {
    pub(crate) mismatch: Mismatch,
    pub(crate) sent: String,
    pub(crate) expected: String,
}

fn compare<'a>(
    values: impl Iterator<Item = Option<&'a Value>>,
    specs: &[TensorSpec],
    mismatch: fn(usize) -> Mismatch,
) -> Result<(), TensorMismatch> {
    let there =
        values.zip(specs).enumerate().filter_map(|(index, (value, spec))| Some((index, value?, spec)));
    match there.into_iter().find(|(_, value, spec)| !spec.fits(value)) {
        Some((index, value, spec)) => {
            let (sent, expected) = (TensorSpec::of(value, &[]).to_string(), spec.to_string());
            Err(TensorMismatch { mismatch: mismatch(index), sent, expected })
        }
        None => Ok(()),
    }
}
