//! The tensors that cross a boundary between two ranks: one rank sends them, the other takes them when the
//! action that uses them runs. `connection.rs` moves their storage; `gather.rs` and `skip.rs` fetch what else
//! a computation waits for.
//!
//! In a tensor group each rank sends its part, and the receivers convert the parts to what their stage takes
//! (`conversion.rs`). Then a message has the layout of each tensor: the sender's position in its group, the dimension
//! of the cut, and the shape of the whole. The receiver compares it with its own position and with the tensor that
//! arrived. Activations and gradients have layouts of their own.

use pipewright_schedule::{Action, MessageEnd, Microbatch, StageIndex};

use super::connection::on_device;
use super::context::RankContext;
use super::machine::Executor;
use super::recorder::Recorder;
use super::stages::At;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::tensor::layout::Layout;
use crate::tensor::{
    MetadataError, Mismatch, OptionalTensor, OptionalTensors, Side, TensorMismatch, TensorRank, Value,
};

/// A message over a boundary: the stages on both sides, and the microbatch of its tensors.
#[derive(Clone, Copy)]
pub(super) struct BoundaryMessage {
    pub(super) from: StageIndex,
    pub(super) to: StageIndex,
    pub(super) microbatch: Microbatch,
}

/// The result of an attempt to take a message.
enum Received {
    All(OptionalTensors),
    /// The message has not arrived.
    NotYet(AwaitedMessage),
}

impl Executor {
    /// Sends the outputs of a stage to the next stage.
    pub(super) fn send_forward(&mut self, at @ At { stage, microbatch }: At) -> Result<(), Cause> {
        let outputs = self.stages.get_mut(stage).batch.outputs.take(microbatch);
        let next = self.context.placement.next(stage).expect("a validated program sends from no last stage");
        let mut outputs = outputs.into_iter().map(Some).collect();
        let action = Action::SendForward { stage, microbatch };
        show_message(&self.context, action, &mut outputs)?;
        self.send(action, Direction::Forward, At { stage: next, ..at }, outputs);
        Ok(())
    }

    /// Sends the gradients of a stage's inputs to the previous stage.
    pub(super) fn send_backward(&mut self, at @ At { stage, microbatch }: At) -> Result<(), Cause> {
        let mut gradients = self.stages.get_mut(stage).batch.input_gradients.take(microbatch);
        let action = Action::SendBackward { stage, microbatch };
        show_message(&self.context, action, &mut gradients)?;
        let previous = self.context.placement.previous(stage);
        let previous = previous.expect("a validated program sends no gradient from the first stage");
        self.send(action, Direction::Backward, At { stage: previous, ..at }, gradients);
        Ok(())
    }

    /// Sends a boundary's tensors to a stage: in a tensor group, this rank's parts of them, also of
    /// whole tensors.
    fn send(
        &mut self,
        action: Action,
        direction: Direction,
        At { stage, microbatch }: At,
        tensors: OptionalTensors,
    ) {
        let rank = self.context.tensor_rank();
        let part = |tensor: Value| {
            if rank.of == 1 || tensor.layout().is_some() { tensor } else { tensor.part_for(rank) }
        };
        let parts: OptionalTensors = tensors.into_iter().map(|tensor| tensor.map(part)).collect();
        note_message(&self.context, &mut self.recorder, MessageEnd::Action(action), stage, &parts);
        let tag = Tag::Boundary { direction, stage, microbatch };
        self.connection.send_boundary(self.context.world_rank_of_stage(stage), tag, parts);
    }

    /// Takes the messages that a forward needs, or returns the first missing one.
    pub(super) fn fetch_inputs(
        &mut self,
        at @ At { stage, microbatch }: At,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_parameters(stage)? {
            return Ok(Some(awaited));
        }
        let Some(source) = self.context.placement.previous(stage) else { return Ok(None) };
        if !self.context.is_local(source) && !self.stages.get(stage).batch.inputs.has(microbatch) {
            let message = BoundaryMessage { from: source, to: stage, microbatch };
            match self.receive_boundary(Direction::Forward, message)? {
                Received::All(tensors) => {
                    let inputs = tensors.into_iter().flatten().collect();
                    self.stages.get_mut(stage).batch.inputs.put(microbatch, inputs);
                }
                Received::NotYet(awaited) => return Ok(Some(awaited)),
            }
        }
        self.fetch_skips(Direction::Forward, at)
    }

    /// Takes the messages with the gradients that a backward starts from, or returns the first missing one.
    pub(super) fn fetch_gradients(
        &mut self,
        at @ At { stage, microbatch }: At,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let Some(source) = self.context.placement.next(stage) else { return Ok(None) };
        if !self.context.is_local(source) && !self.stages.get(stage).batch.output_gradients.has(microbatch) {
            let message = BoundaryMessage { from: source, to: stage, microbatch };
            match self.receive_boundary(Direction::Backward, message)? {
                Received::All(gradients) => {
                    self.stages.get_mut(stage).batch.output_gradients.put(microbatch, gradients);
                }
                Received::NotYet(awaited) => return Ok(Some(awaited)),
            }
        }
        self.fetch_skips(Direction::Backward, at)
    }

    /// Returns the message with the tensors that cross a boundary from a stage to one of this rank.
    pub(super) fn boundary_message(&self, direction: Direction, from: StageIndex, to: At) -> AwaitedMessage {
        let tag = Tag::Boundary { direction, stage: to.stage, microbatch: to.microbatch };
        self.context.awaited(self.context.placement.rank_of(from), tag)
    }

    /// Takes the tensors that cross a boundary to a stage of this rank.
    fn receive_boundary(
        &mut self,
        direction: Direction,
        message: BoundaryMessage,
    ) -> Result<Received, Cause> {
        let BoundaryMessage { from, to: stage, microbatch } = message;
        let awaited = self.boundary_message(direction, from, At { stage, microbatch });
        let Some((sent, parts)) = self.connection.take_tensors(awaited)? else {
            return Ok(Received::NotYet(awaited));
        };
        self.recorder.note_exposed(sent);
        let receive = match direction {
            Direction::Forward => Action::RecvForward { stage, microbatch },
            Direction::Backward => Action::RecvBackward { stage, microbatch },
        };
        note_message(&self.context, &mut self.recorder, MessageEnd::Action(receive), from, &parts);
        let parts = on_device(parts, self.stages.get(stage).runner().device());
        let mut tensors = self.placed(direction, message, parts)?;
        show_message(&self.context, receive, &mut tensors)?;
        self.recorder.note_received(receive);
        Ok(Received::All(tensors))
    }

    /// Returns the tensors of a message as the receiving stage takes them.
    fn placed(
        &self,
        direction: Direction,
        message: BoundaryMessage,
        parts: OptionalTensors,
    ) -> Result<OptionalTensors, Cause> {
        let rank = self.context.tensor_rank();
        for (index, part) in parts.iter().enumerate() {
            let Some(part) = part else { continue };
            if let Some(expected) = unexpected(part, rank) {
                let (mismatch, sent) = (Mismatch::Tensor(index), described(part));
                let mismatch = TensorMismatch { mismatch, sent, expected };
                return Err(Box::new(metadata_error(&self.context, message, mismatch)).into());
            }
        }
        self.taken(direction, message.to, parts)
    }
}

/// Notes the content of a message for the timeline and the log. `peer` is the stage at its other end.
pub(super) fn note_message(
    context: &RankContext,
    recorder: &mut Recorder,
    end: MessageEnd,
    peer: StageIndex,
    tensors: &[OptionalTensor],
) {
    let message = recorder.note_message(end, context.timeline_row_of_stage(peer), tensors);
    tracing::debug!(target: "pipewright::messages", "rank {}: {message}", message.rank);
}

/// Lets the hook see the tensors of a message, and replace them. A part is replaced by the same part.
fn show_message(context: &RankContext, action: Action, tensors: &mut OptionalTensors) -> Result<(), Cause> {
    let Some(hook) = context.hook() else { return Ok(()) };
    let layouts: Vec<Option<Layout>> =
        tensors.iter().map(|tensor| tensor.as_ref()?.layout().cloned()).collect();
    hook.message(context.world_rank, action, tensors)?;
    for (tensor, layout) in tensors.iter_mut().zip(layouts) {
        if let Some(layout) = layout {
            *tensor = tensor.take().map(|tensor| tensor.with_layout(layout));
        }
    }
    Ok(())
}

/// Returns the error for tensors that differ from what the receiver expects.
pub(super) fn metadata_error(
    context: &RankContext,
    message: BoundaryMessage,
    mismatch: TensorMismatch,
) -> MetadataError {
    let TensorMismatch { mismatch, sent, expected } = mismatch;
    let BoundaryMessage { from, to, microbatch } = message;
    let side = |stage| Side { stage, rank: context.world_rank_of_stage(stage) };
    MetadataError { microbatch, mismatch, from: side(from), sent, to: side(to), expected }
}

/// Returns what `rank` expects instead of the part that it received; `None` if it is right.
fn unexpected(part: &Value, rank: TensorRank) -> Option<String> {
    let TensorRank { index, of } = rank;
    match part.layout() {
        None if of == 1 => None,
        None => Some(format!("part {index} of {of} of a tensor, with its layout")),
        Some(_) if of == 1 => Some("a whole tensor".to_owned()),
        Some(layout) => {
            let has_dimension = layout.dimension.is_none_or(|dimension| dimension < layout.shape.len());
            if layout.rank != rank || !has_dimension {
                return Some(format!("part {index} of {of} along a dimension of the tensor"));
            }
            let expected = layout.part();
            (part.shape().to_vec() != expected).then(|| format!("{expected:?}, {layout}"))
        }
    }
}

fn described(part: &Value) -> String {
    let layout = part.layout().map(|layout| format!(", {layout}")).unwrap_or_default();
    format!("{:?} {:?}{layout}", part.dtype(), part.shape().to_vec())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn a_part_of_another_rank_group_or_shape_is_refused() {
        let whole = || Value::of(Tensor::<3>::ones([1, 6, 4], &Device::flex()));
        let rank = TensorRank { index: 1, of: 2 };
        let part = |rank| whole().part_for(rank);
        assert_eq!(unexpected(&part(rank), rank), None);
        let check = |part: Value, rank, expected: &str| {
            assert_eq!(unexpected(&part, rank).as_deref(), Some(expected), "{}", described(&part));
        };
        let along = "part 1 of 2 along a dimension of the tensor";
        check(part(TensorRank { index: 0, of: 2 }), rank, along);
        check(part(TensorRank { index: 1, of: 3 }), rank, along);
        check(whole(), rank, "part 1 of 2 of a tensor, with its layout");
        check(part(rank), TensorRank { index: 0, of: 1 }, "a whole tensor");
        let layout = Layout { shape: vec![1, 8, 4], ..whole().layout_for(rank) };
        let longer = part(rank).with_layout(layout);
        check(longer, rank, "[1, 4, 4], part 1 of 2 along dimension 1 of [1, 8, 4]");
    }
}
