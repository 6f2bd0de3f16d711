//! The tensors that cross a boundary between two ranks: one rank sends them, the other takes them when the action that
//! uses them runs. `messages.rs` moves their storage; `gather.rs` and `skip.rs` fetch what else a computation waits for.
//!
//! In a tensor group each rank sends its part, and the receivers put the parts together. Then a message has the layout of
//! each tensor: the sender's place in its group, the dimension of the cut, and the shape of the whole. The receiver
//! compares it with its own place and with the tensor that arrived. Activations and gradients have layouts of their own.

use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::actions::MADE_BEFORE;
use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::tensor::{
    Layout, MetadataError, Mismatch, OptionalTensors, Side, TensorMismatch, TensorRank, Value, Values,
};

/// Tensors of a microbatch that cross a boundary.
#[derive(Clone, Copy)]
pub(super) struct Crossing {
    pub(super) from: StageIndex,
    pub(super) to: StageIndex,
    pub(super) microbatch: Microbatch,
}

/// What has arrived over a boundary.
enum Received {
    All(OptionalTensors),
    /// The message is not here yet.
    NotYet(AwaitedMessage),
}

impl Executor {
    pub(super) fn send_forward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let outputs = self.local_stage(stage).outputs[microbatch.index()].take().expect(MADE_BEFORE);
        let next = self.placement().next(stage).expect("a validated program sends from no last stage");
        let mut outputs = outputs.into_iter().map(Some).collect();
        self.show_message(Action::SendForward { stage, microbatch }, &mut outputs)?;
        self.send(Direction::Forward, next, microbatch, outputs);
        Ok(None)
    }

    pub(super) fn send_backward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let gradients = self.local_stage(stage).input_gradients[microbatch.index()].take();
        let mut gradients = gradients.expect(MADE_BEFORE);
        self.show_message(Action::SendBackward { stage, microbatch }, &mut gradients)?;
        let previous = self.placement().previous(stage);
        let previous = previous.expect("a validated program sends no gradient from the first stage");
        self.send(Direction::Backward, previous, microbatch, gradients);
        Ok(None)
    }

    /// Takes a forward's inputs if another rank sends them and they are not here yet, or returns the first missing
    /// message.
    pub(super) fn fetch_inputs(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_parameters(stage)? {
            return Ok(Some(awaited));
        }
        let Some(source) = self.placement().previous(stage) else { return Ok(None) };
        let is_missing = self.local_stage(stage).inputs[microbatch.index()].is_none();
        if self.elsewhere(source).is_some() && is_missing {
            let crossing = Crossing { from: source, to: stage, microbatch };
            let tensors = match self.receive_boundary(Direction::Forward, crossing)? {
                Received::All(tensors) => tensors,
                Received::NotYet(awaited) => return Ok(Some(awaited)),
            };
            let inputs: Values = tensors.into_iter().flatten().collect();
            self.local_stage(stage).inputs[microbatch.index()] = Some(inputs);
        }
        self.fetch_skips(Direction::Forward, stage, microbatch)
    }

    /// As [`Executor::fetch_inputs`], for the gradients that a backward starts from.
    pub(super) fn fetch_gradients(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_parameters(stage)? {
            return Ok(Some(awaited));
        }
        let Some(source) = self.placement().next(stage) else { return Ok(None) };
        let is_missing = self.local_stage(stage).output_gradients[microbatch.index()].is_none();
        if self.elsewhere(source).is_some() && is_missing {
            let crossing = Crossing { from: source, to: stage, microbatch };
            let gradients = match self.receive_boundary(Direction::Backward, crossing)? {
                Received::All(gradients) => gradients,
                Received::NotYet(awaited) => return Ok(Some(awaited)),
            };
            self.local_stage(stage).output_gradients[microbatch.index()] = Some(gradients);
        }
        self.fetch_skips(Direction::Backward, stage, microbatch)
    }

    /// Takes the tensors that cross a boundary to this rank.
    fn receive_boundary(&mut self, direction: Direction, crossing: Crossing) -> Result<Received, Cause> {
        let Crossing { from, to: stage, microbatch } = crossing;
        let awaited = self.awaited_boundary(direction, from, stage, microbatch);
        let Some(parts) = self.take_tensors(awaited, stage)? else { return Ok(Received::NotYet(awaited)) };
        let mut tensors = self.whole(crossing, parts)?;
        let receive = match direction {
            Direction::Forward => Action::RecvForward { stage, microbatch },
            Direction::Backward => Action::RecvBackward { stage, microbatch },
        };
        self.show_message(receive, &mut tensors)?;
        self.note_received(receive);
        Ok(Received::All(tensors))
    }

    /// Lets the hook see the tensors of a message, and replace them.
    fn show_message(&self, action: Action, tensors: &mut OptionalTensors) -> Result<(), Cause> {
        match &self.hook {
            Some(hook) => Ok(hook.message(self.world_rank, action, tensors)?),
            None => Ok(()),
        }
    }

    /// Sends a boundary's tensors to the rank of `stage`.
    fn send(
        &mut self,
        direction: Direction,
        stage: StageIndex,
        microbatch: Microbatch,
        tensors: OptionalTensors,
    ) {
        let to = self.endpoint.world_rank_of(self.placement().rank_of(stage));
        let parts = self.cut_for_sending(tensors);
        self.send_tensors(to, Tag::Boundary { direction, stage, microbatch }, parts);
    }

    /// Returns the message of a boundary from the rank of `source` to `stage`.
    fn awaited_boundary(
        &self,
        direction: Direction,
        source: StageIndex,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> AwaitedMessage {
        let from = self.placement().rank_of(source);
        self.awaited(from, Tag::Boundary { direction, stage, microbatch })
    }

    /// Returns this rank's parts of the tensors that it sends, and counts their bytes.
    pub(super) fn cut_for_sending(&mut self, tensors: OptionalTensors) -> OptionalTensors {
        let rank = self.endpoint.tensor_rank();
        let part = |whole: Value| match rank.of {
            1 => whole,
            _ => Layout::of(&whole, rank).cut(whole),
        };
        let parts: OptionalTensors = tensors.into_iter().map(|tensor| tensor.map(part)).collect();
        let bytes = parts.iter().flatten().map(|part| part.bytes() as u64);
        self.step.boundary_bytes += bytes.sum::<u64>();
        parts
    }

    /// Puts together the tensors of a boundary, of which this rank has received its parts.
    pub(super) fn whole(&self, crossing: Crossing, parts: OptionalTensors) -> Result<OptionalTensors, Cause> {
        let rank = self.endpoint.tensor_rank();
        for (place, part) in parts.iter().enumerate() {
            let Some(part) = part else { continue };
            if let Some(expected) = unexpected(part, rank) {
                return Err(self.other_layout(crossing, place, part, expected));
            }
        }
        if rank.of == 1 {
            return Ok(parts);
        }
        let is_cut = |part: &&Value| part.layout().is_some_and(|layout| layout.dimension.is_some());
        let cut: OptionalTensors = parts.iter().flatten().filter(is_cut).cloned().map(Some).collect();
        let of_ranks = match cut.is_empty() {
            true => Vec::new(),
            false => self.endpoint.tensor_group().all_gather(cut)?,
        };
        let mut of_ranks: Vec<_> = of_ranks.into_iter().map(Vec::into_iter).collect();
        let mut whole = OptionalTensors::with_capacity(parts.len());
        for (place, part) in parts.into_iter().enumerate() {
            let Some(part) = part.as_ref().filter(is_cut) else {
                whole.push(part.map(Value::without_layout));
                continue;
            };
            let all: OptionalTensors = of_ranks.iter_mut().map(|parts| parts.next().flatten()).collect();
            whole.push(Some(self.joined_parts(crossing, place, part, all)?));
        }
        Ok(whole)
    }

    /// Joins the parts of a tensor, of which this rank received `own`.
    fn joined_parts(
        &self,
        crossing: Crossing,
        place: usize,
        own: &Value,
        all: OptionalTensors,
    ) -> Result<Value, Cause> {
        let layout = own.layout().cloned().unwrap_or_else(|| Layout::of(own, self.endpoint.tensor_rank()));
        for (index, part) in (0..).zip(&all) {
            let expected = layout.for_rank(index).part();
            let fits = |part: &Value| part.shape().to_vec() == expected && part.dtype() == own.dtype();
            if !part.as_ref().is_some_and(fits) {
                let expected = format!("{:?} {expected:?} on tensor rank {index}", own.dtype());
                return Err(self.other_layout(crossing, place, part.as_ref().unwrap_or(own), expected));
            }
        }
        let whole = Value::joined(all.into_iter().flatten().collect(), layout.dimension.unwrap_or(0));
        Ok(whole.with_settings_of(own))
    }

    fn other_layout(&self, crossing: Crossing, place: usize, part: &Value, expected: String) -> Cause {
        let (mismatch, sent) = (Mismatch::Tensor(place), described(part));
        Box::new(self.metadata_error(crossing, TensorMismatch { mismatch, sent, expected })).into()
    }

    /// Returns the error for tensors that differ from those that the receiver expects.
    pub(super) fn metadata_error(&self, crossing: Crossing, found: TensorMismatch) -> MetadataError {
        let TensorMismatch { mismatch, sent, expected } = found;
        let Crossing { from, to, microbatch } = crossing;
        let rank = |stage| self.endpoint.world_rank_of(self.placement().rank_of(stage));
        let side = |stage| Side { stage, rank: rank(stage) };
        MetadataError { microbatch, mismatch, from: side(from), sent, to: side(to), expected }
    }
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
        let part = |rank| Layout::of(&whole(), rank).cut(whole());
        assert_eq!(unexpected(&part(rank), rank), None);
        let check = |part: Value, rank, expected: &str| {
            assert_eq!(unexpected(&part, rank).as_deref(), Some(expected), "{}", described(&part));
        };
        let along = "part 1 of 2 along a dimension of the tensor";
        check(part(TensorRank { index: 0, of: 2 }), rank, along);
        check(part(TensorRank { index: 1, of: 3 }), rank, along);
        check(whole(), rank, "part 1 of 2 of a tensor, with its layout");
        check(part(rank), TensorRank { index: 0, of: 1 }, "a whole tensor");
        let layout = Layout { shape: vec![1, 8, 4], ..Layout::of(&whole(), rank) };
        let longer = part(rank).with_layout(layout);
        check(longer, rank, "[1, 4, 4], part 1 of 2 along dimension 1 of [1, 8, 4]");
    }
}
