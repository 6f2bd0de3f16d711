//! The tensors that cross a boundary between two ranks: one rank sends them, the other takes them when the
//! action that uses them runs. `connection.rs` moves their storage; `gather.rs` and `skip.rs` fetch what else
//! a computation waits for.
//!
//! In a tensor group each rank sends its part, and the receivers put the parts together. Then a message has
//! the layout of each tensor: the sender's position in its group, the dimension of the cut, and the shape of
//! the whole. The receiver compares it with its own position and with the tensor that arrived. Activations
//! and gradients have layouts of their own.

use pipewright_schedule::{Action, MessageEnd, Microbatch, StageIndex};

use super::connection::on_device;
use super::context::RankContext;
use super::machine::Executor;
use super::recorder::Recorder;
use super::stages::At;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
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
        let outputs = self.stages.get_mut(stage).outputs.take(microbatch);
        let next = self.context.placement.next(stage).expect("a validated program sends from no last stage");
        let mut outputs = outputs.into_iter().map(Some).collect();
        let action = Action::SendForward { stage, microbatch };
        show_message(&self.context, action, &mut outputs)?;
        self.send(action, Direction::Forward, At { stage: next, ..at }, outputs);
        Ok(())
    }

    /// Sends the gradients of a stage's inputs to the previous stage.
    pub(super) fn send_backward(&mut self, at @ At { stage, microbatch }: At) -> Result<(), Cause> {
        let mut gradients = self.stages.get_mut(stage).input_gradients.take(microbatch);
        let action = Action::SendBackward { stage, microbatch };
        show_message(&self.context, action, &mut gradients)?;
        let previous = self.context.placement.previous(stage);
        let previous = previous.expect("a validated program sends no gradient from the first stage");
        self.send(action, Direction::Backward, At { stage: previous, ..at }, gradients);
        Ok(())
    }

    /// Sends a boundary's tensors to a stage: in a tensor group, this rank's parts of them.
    fn send(
        &mut self,
        action: Action,
        direction: Direction,
        At { stage, microbatch }: At,
        tensors: OptionalTensors,
    ) {
        let rank = self.context.tensor_rank();
        let part = |whole: Value| {
            if rank.of == 1 { whole } else { whole.part_for(rank) }
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
        if !self.context.is_local(source) && !self.stages.get(stage).inputs.has(microbatch) {
            let message = BoundaryMessage { from: source, to: stage, microbatch };
            match self.receive_boundary(Direction::Forward, message)? {
                Received::All(tensors) => {
                    let inputs = tensors.into_iter().flatten().collect();
                    self.stages.get_mut(stage).inputs.put(microbatch, inputs);
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
        if !self.context.is_local(source) && !self.stages.get(stage).output_gradients.has(microbatch) {
            let message = BoundaryMessage { from: source, to: stage, microbatch };
            match self.receive_boundary(Direction::Backward, message)? {
                Received::All(gradients) => {
                    self.stages.get_mut(stage).output_gradients.put(microbatch, gradients);
                }
                Received::NotYet(awaited) => return Ok(Some(awaited)),
            }
        }
        self.fetch_skips(Direction::Backward, at)
    }

    /// Takes the tensors that cross a boundary to a stage of this rank.
    fn receive_boundary(
        &mut self,
        direction: Direction,
        message: BoundaryMessage,
    ) -> Result<Received, Cause> {
        let BoundaryMessage { from, to: stage, microbatch } = message;
        let tag = Tag::Boundary { direction, stage, microbatch };
        let awaited = self.context.awaited(self.context.placement.rank_of(from), tag);
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
        let mut tensors = self.join(message, parts)?;
        show_message(&self.context, receive, &mut tensors)?;
        self.recorder.note_received(receive);
        Ok(Received::All(tensors))
    }

    /// Joins this rank's parts of the tensors of a message with the parts of its tensor group.
    fn join(&self, message: BoundaryMessage, parts: OptionalTensors) -> Result<OptionalTensors, Cause> {
        let rank = self.context.tensor_rank();
        let refused = |index, part: &Value, expected| -> Cause {
            let (mismatch, sent) = (Mismatch::Tensor(index), described(part));
            let mismatch = TensorMismatch { mismatch, sent, expected };
            Box::new(metadata_error(&self.context, message, mismatch)).into()
        };
        for (index, part) in parts.iter().enumerate() {
            let Some(part) = part else { continue };
            if let Some(expected) = unexpected(part, rank) {
                return Err(refused(index, part, expected));
            }
        }
        if rank.of == 1 {
            return Ok(parts);
        }
        let is_cut = |part: &&Value| part.layout().is_some_and(|layout| layout.dimension.is_some());
        let cut: OptionalTensors = parts.iter().flatten().filter(is_cut).cloned().map(Some).collect();
        let tensor_group = &self.connection.tensor_group;
        let gathered = if cut.is_empty() { Vec::new() } else { tensor_group.all_gather(cut)? };
        let mut gathered: Vec<_> = gathered.into_iter().map(Vec::into_iter).collect();
        let mut whole = OptionalTensors::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            let Some(part) = part.as_ref().filter(is_cut) else {
                whole.push(part.map(Value::without_layout));
                continue;
            };
            let all: OptionalTensors = gathered.iter_mut().map(|parts| parts.next().flatten()).collect();
            let joined = join_parts(rank, part, all, |part, expected| refused(index, part, expected))?;
            whole.push(Some(joined));
        }
        Ok(whole)
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

/// Lets the hook see the tensors of a message, and replace them.
fn show_message(context: &RankContext, action: Action, tensors: &mut OptionalTensors) -> Result<(), Cause> {
    match context.hook() {
        Some(hook) => Ok(hook.message(context.world_rank, action, tensors)?),
        None => Ok(()),
    }
}

/// Joins the parts of a tensor; `own` is the part that this rank has received. `refused` makes the error for
/// a part of another shape or type than expected.
fn join_parts(
    rank: TensorRank,
    own: &Value,
    all: OptionalTensors,
    refused: impl Fn(&Value, String) -> Cause,
) -> Result<Value, Cause> {
    let layout = own.layout().cloned().unwrap_or_else(|| own.layout_for(rank));
    for (index, part) in (0..).zip(&all) {
        let expected = layout.for_rank(index).part();
        let fits = |part: &Value| part.shape().to_vec() == expected && part.dtype() == own.dtype();
        if !part.as_ref().is_some_and(fits) {
            let expected = format!("{:?} {expected:?} on tensor rank {index}", own.dtype());
            return Err(refused(part.as_ref().unwrap_or(own), expected));
        }
    }
    let whole = Value::joined(all.into_iter().flatten().collect(), layout.dimension.unwrap_or(0));
    Ok(whole.with_settings_of(own))
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
    use crate::tensor::layout::Layout;

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
