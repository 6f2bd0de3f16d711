//! A microbatch on its way through a stage: a forward or a backward that has begun, and what stays between
//! the two.

use std::any::Any;
use std::time::Duration;

use burn::tensor::Tensor;
use pipewright_schedule::Microbatch;
use pipewright_schedule::words::counted;

use super::error::StageError;
use super::forwarded::{Fingerprint, Forwarded};
use super::module::{Auxiliary, ExpertLoad, StageContext};
use super::segment::Segment;
use super::tape::Tape;
use super::tape_ends::all_off_tape;
use crate::batch::SideSums;
use crate::tensor::{OptionalTensors, ValueKind, Values};

/// The options of a forward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardTask {
    /// The weight of the microbatch times the loss scale, by which its loss is multiplied on the tape, and of
    /// a slice its share of that. It is 1 unless microbatches differ in size, are cut into slices, or losses
    /// are scaled.
    pub loss_weight: f64,
    /// The same for auxiliary losses. All slices have equal shares of them.
    pub auxiliary_weight: f64,
    /// Whether the last stage returns its outputs in addition to its loss.
    pub keep_outputs: bool,
    /// Whether the stage keeps only its inputs, and its backward computes the forward again, as far as the
    /// stage's settings say.
    pub recompute: bool,
    /// Whether a backward of the stage follows. Otherwise nothing is kept for it.
    pub has_backward: bool,
}

/// The data that all forwards of a microbatch share: the first one, and the second one if it is recomputed.
pub(super) struct Pass {
    pub(super) context: StageContext,
    pub(super) target: Option<Values>,
    pub(super) loss_weight: f64,
    pub(super) auxiliary_weight: f64,
}

/// A segment that has run forward.
pub(super) struct ForwardedSegment {
    pub(super) segment: Segment,
    pub(super) saved: Saved,
}

/// The tensors that a segment keeps for its backward.
pub(super) enum Saved {
    /// All tensors that the backward needs.
    Tape(Box<Tape>),
    /// The inputs, from which the backward computes the segment again, and what its results must be.
    Inputs(Values, Fingerprint),
}

impl ForwardedSegment {
    pub(super) fn is_recomputed(&self) -> bool {
        matches!(self.saved, Saved::Inputs(..))
    }
}

/// A microbatch whose forward has run, and its backward has not.
pub(super) struct InFlight {
    segments: Vec<ForwardedSegment>,
    /// Present if a segment is to be computed again.
    pass: Option<Pass>,
    /// The inputs that are out of memory: the index of their segment, and their index in it. Both ascend.
    away: Vec<(usize, usize)>,
}

impl InFlight {
    fn new(segments: Vec<ForwardedSegment>, pass: Pass) -> Self {
        let pass = segments.iter().any(ForwardedSegment::is_recomputed).then_some(pass);
        Self { segments, pass, away: Vec::new() }
    }

    /// Returns whether one segment has kept its inputs only: the whole forward, or its first blocks together.
    pub(super) fn is_recomputed_in_one_piece(&self) -> bool {
        self.segments.iter().filter(|run| run.is_recomputed()).count() == 1
    }

    /// Takes out the float tensors among the inputs that are kept, until [`InFlight::put_inputs`].
    pub(super) fn take_inputs(&mut self) -> Values {
        let mut taken = Values::new();
        for (segment, ForwardedSegment { saved, .. }) in self.segments.iter_mut().enumerate() {
            let Saved::Inputs(inputs, _) = saved else { continue };
            for (index, input) in std::mem::take(inputs).into_iter().enumerate() {
                if input.kind() == ValueKind::Float {
                    self.away.push((segment, index));
                    taken.push(input);
                } else {
                    inputs.push(input);
                }
            }
        }
        taken
    }

    /// Puts back what [`InFlight::take_inputs`] has returned.
    pub(super) fn put_inputs(&mut self, values: Values) {
        for ((segment, index), value) in std::mem::take(&mut self.away).into_iter().zip(values) {
            if let Saved::Inputs(inputs, _) = &mut self.segments[segment].saved {
                inputs.insert(index, value);
            }
        }
    }

    /// Computes the segments that have kept their inputs only again, with `record`.
    pub(super) fn record_all(
        &mut self,
        mut record: impl FnMut(Segment, Values, &Pass, &Fingerprint) -> Result<Tape, StageError>,
    ) -> Result<(), StageError> {
        let Some(pass) = &self.pass else { return Ok(()) };
        for ForwardedSegment { segment, saved } in &mut self.segments {
            if let Saved::Inputs(inputs, first) = saved {
                let tape = record(*segment, std::mem::take(inputs), pass, first)?;
                *saved = Saved::Tape(Box::new(tape));
            }
        }
        Ok(())
    }
}

/// A forward that has begun.
pub(crate) struct ForwardState {
    pub(super) pass: Pass,
    /// `None` in an evaluation.
    pub(super) task: Option<ForwardTask>,
    /// The inputs of the next block, off the tape; after the last block, the outputs of the stage.
    pub(crate) values: Values,
    /// The next block; `None` after the last one.
    next: Option<usize>,
    /// The number of outputs that the last block returned.
    returned: usize,
    loss: Option<Tensor<1>>,
    auxiliary: Vec<Auxiliary>,
    loads: Vec<ExpertLoad>,
    /// The segments that have run, with the tensors that their backward needs.
    segments: Vec<ForwardedSegment>,
    /// The copy of the module that runs instead of it: without gradients, or for an evaluation.
    copy: Option<Box<dyn Any>>,
}

impl ForwardState {
    /// Begins a forward; `task` is `None` in an evaluation.
    pub(crate) fn new(
        context: StageContext,
        inputs: Values,
        target: Option<Values>,
        task: Option<ForwardTask>,
    ) -> Self {
        let (loss_weight, auxiliary_weight) =
            task.map_or((1.0, 1.0), |task| (task.loss_weight, task.auxiliary_weight));
        Self {
            pass: Pass { context, target, loss_weight, auxiliary_weight },
            task,
            values: inputs,
            next: Some(0),
            returned: 0,
            loss: None,
            auxiliary: Vec::new(),
            loads: Vec::new(),
            segments: Vec::new(),
            copy: None,
        }
    }

    pub(crate) fn context(&self) -> &StageContext {
        &self.pass.context
    }

    pub(super) fn context_mut(&mut self) -> &mut StageContext {
        &mut self.pass.context
    }

    pub(crate) fn target(&self) -> Option<&Values> {
        self.pass.target.as_ref()
    }

    /// Replaces the values. The backward does not know how the new values follow from the old ones.
    pub(crate) fn set_values(&mut self, values: &Values) {
        self.values = all_off_tape(values);
    }

    /// Takes the inputs of the next segment out.
    pub(super) fn take_values(&mut self) -> Values {
        std::mem::take(&mut self.values)
    }

    pub(crate) fn next_block(&self) -> Option<usize> {
        self.next
    }

    pub(crate) fn loss(&self) -> Option<&Tensor<1>> {
        self.loss.as_ref()
    }

    /// Returns the copy of the module that runs instead of it, which `make` makes at its first use, and the
    /// data of the forward.
    pub(super) fn copy_of<M: 'static>(&mut self, make: impl FnOnce() -> M) -> (&M, &Pass) {
        let copy = self.copy.get_or_insert_with(|| Box::new(make()));
        (copy.downcast_ref().expect("a forward runs copies of one module"), &self.pass)
    }

    /// Keeps what the backward of a segment needs.
    pub(super) fn save(&mut self, segment: Segment, saved: Saved) {
        self.segments.push(ForwardedSegment { segment, saved });
    }

    /// Adds the results of a segment.
    pub(super) fn add(&mut self, segment: Segment, forwarded: Forwarded) {
        self.next = segment.next();
        self.returned = forwarded.outputs.len();
        self.auxiliary.extend(forwarded.auxiliary);
        self.loads.extend(forwarded.loads);
        (self.values, self.loss) = (forwarded.outputs, forwarded.loss);
    }

    /// Returns the results of a forward that has run to its end, and what its backward needs.
    pub(super) fn finish(self) -> Result<(Forwarded, InFlight), StageError> {
        let (found, expected) = (self.values.len(), self.returned);
        if found != expected {
            return Err(StageError::Mistake(format!(
                "the function left {}, and the stage returned {expected}: replace outputs one by one",
                counted(found, "output")
            )));
        }
        let forwarded =
            Forwarded { outputs: self.values, loss: self.loss, auxiliary: self.auxiliary, loads: self.loads };
        Ok((forwarded, InFlight::new(self.segments, self.pass)))
    }
}

/// The results of a backward.
pub(crate) struct InputGradients {
    /// The gradient of each input.
    pub gradients: OptionalTensors,
    /// The gradients of side inputs.
    pub sides: SideSums,
    /// The time in which the forward was computed again.
    pub recomputed: Duration,
}

/// A backward that has begun.
pub(crate) struct BackwardState {
    pub(crate) microbatch: Microbatch,
    /// Whether the weight gradients follow at once.
    pub(super) is_whole: bool,
    in_flight: InFlight,
    /// The gradients of the outputs of the next segment; after the last one, the gradients of the stage's
    /// inputs.
    pub(crate) gradients: OptionalTensors,
    /// The number of gradients that the last segment returned.
    returned: usize,
    /// The time in which segments were computed again.
    recomputed: Duration,
    /// The gradients of side inputs.
    pub(super) sides: SideSums,
}

impl BackwardState {
    /// Begins a backward with the gradients of the outputs.
    pub(super) fn new(
        microbatch: Microbatch,
        in_flight: InFlight,
        gradients: OptionalTensors,
        is_whole: bool,
    ) -> Self {
        let (returned, recomputed, sides) = (0, Duration::ZERO, SideSums::new());
        Self { microbatch, is_whole, in_flight, gradients, returned, recomputed, sides }
    }

    /// Replaces the gradients.
    pub(crate) fn set_gradients(&mut self, gradients: OptionalTensors) {
        let off_tape = |gradient| all_off_tape(&[gradient]).pop();
        self.gradients = gradients.into_iter().map(|gradient| gradient.and_then(off_tape)).collect();
    }

    /// Takes the gradients of the outputs of the next segment out.
    pub(super) fn take_gradients(&mut self) -> OptionalTensors {
        std::mem::take(&mut self.gradients)
    }

    /// Adds the gradients of the inputs of a segment, which took `recomputed` to compute again.
    pub(super) fn add(&mut self, gradients: OptionalTensors, recomputed: Duration) {
        self.returned = gradients.len();
        self.gradients = gradients;
        self.recomputed += recomputed;
    }

    /// Returns the block whose backward is next; `None` after the first block. A forward that ran as a whole
    /// has block 0 alone.
    pub(crate) fn next_block(&self) -> Option<usize> {
        self.in_flight.segments.last().map(|run| run.segment.index())
    }

    /// Returns whether one of the next `count` segments is computed again.
    pub(super) fn recomputes(&self, count: usize) -> bool {
        self.in_flight.segments.iter().rev().take(count).any(ForwardedSegment::is_recomputed)
    }

    /// Takes out the segment whose backward is next, and the data of its forward if it is computed again.
    pub(super) fn take_segment(&mut self) -> Option<(ForwardedSegment, Option<&Pass>)> {
        let run = self.in_flight.segments.pop()?;
        Some((run, self.in_flight.pass.as_ref()))
    }

    /// Returns the results of a backward that has run to its end.
    ///
    /// # Errors
    /// When a function of the caller's has left another number of gradients than the backward returned.
    pub(crate) fn into_input_gradients(self) -> Result<InputGradients, StageError> {
        let (found, expected) = (self.gradients.len(), self.returned);
        if found != expected {
            return Err(StageError::Mistake(format!(
                "the function left {}, and the backward returned {expected}: replace gradients one by one",
                counted(found, "gradient")
            )));
        }
        Ok(InputGradients { gradients: self.gradients, sides: self.sides, recomputed: self.recomputed })
    }
}
