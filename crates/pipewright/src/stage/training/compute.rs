//! The actions of a stage in training, as the executor runs them.

use std::any::Any;
use std::sync::Arc;

use burn::tensor::Device;
use pipewright_schedule::Microbatch;

use super::TrainingStage;
use crate::memory::StreamedMatrix;
use crate::nn::Deferred;
use crate::stage::body::{Skips, StageBody};
use crate::stage::error::StageError;
use crate::stage::forwarded::Forwarded;
use crate::stage::microbatch::{BackwardState, ForwardState, InFlight};
use crate::stage::runner::{BatchPart, StageCompute, StageParameters};
use crate::stage::segment::{Replacement, Segment};
use crate::stage::weight_work::WeightWork;
use crate::tensor::{EdgePlacement, Lossy, OptionalTensors, Value, ValueKind, Values, int_type_of};

impl<M: StageBody> StageCompute for TrainingStage<M> {
    fn admitted(&self, part: BatchPart, values: Values) -> Result<Values, StageError> {
        let ints = int_type_of(&self.module.device);
        let admit = |(index, value): (usize, Value)| {
            let found = value.dtype();
            let (admitted, expected) = match (value.kind(), self.table.float_type) {
                (ValueKind::Float, Some(expected)) => (value.clone().into_float(expected), expected),
                (ValueKind::Int, _) => (value.clone().into_int(ints), ints),
                _ => return Ok(value),
            };
            let lossy = match (admitted, part) {
                (Ok(admitted), _) => return Ok(admitted),
                // The loss may compute with more digits than the module.
                (Err(_), BatchPart::Target) => return Ok(value),
                (Err(lossy), BatchPart::Input) => lossy,
            };
            let advice = match lossy {
                Lossy::Digits => format!(
                    "a conversion would lose digits, so make it yourself with `cast(DType::{expected:?})`"
                ),
                Lossy::Value(value) => format!("the value {value} does not fit into it"),
            };
            Err(StageError::Mistake(format!(
                "input {index} has elements of type {found:?}, and the stage computes with {expected:?}: {advice}"
            )))
        };
        values.into_iter().enumerate().map(admit).collect()
    }

    fn forward(&mut self, forward: &mut ForwardState) -> Result<(), StageError> {
        let is_recomputed = forward.task.is_some_and(|task| task.recompute);
        if forward.next_block() == Some(0) && !(is_recomputed && self.settings.by_block) {
            let layers = self.settings.recomputed_layers.filter(|_| is_recomputed);
            let parts = layers.and_then(|layers| Segment::divided(layers, self.module.get().blocks()));
            let Some(parts) = parts else { return self.forward_segment(forward, Segment::Whole, None) };
            return parts.into_iter().try_for_each(|part| self.forward_segment(forward, part, None));
        }
        while forward.next_block().is_some() {
            self.forward_block(forward, None)?;
        }
        Ok(())
    }

    fn forward_block(
        &mut self,
        forward: &mut ForwardState,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(), StageError> {
        let Some(index) = forward.next_block() else { return Ok(()) };
        self.forward_segment(forward, Segment::block(index, self.module.get().blocks()), replacement)
    }

    fn finish_forward(&mut self, forward: ForwardState) -> Result<Forwarded, StageError> {
        let is_kept = forward.task.is_some_and(|task| task.has_backward);
        let number = forward.context().number();
        let (forwarded, in_flight) = forward.finish()?;
        self.in_flight.end_forward(number, is_kept.then_some(in_flight));
        Ok(forwarded)
    }

    fn recompute(&mut self, microbatch: Microbatch) -> Result<bool, StageError> {
        let Some(mut in_flight) = self.in_flight.take_if(microbatch, InFlight::is_recomputed_in_one_piece)
        else {
            return Ok(false);
        };
        let buffers = self.module.buffers();
        in_flight
            .record_all(|segment, inputs, pass, first| self.record_again(segment, inputs, pass, first))?;
        self.in_flight.put(microbatch, in_flight);
        self.module.restore_buffers(buffers);
        Ok(true)
    }

    fn take_inputs(&mut self, microbatch: Microbatch) -> Values {
        self.in_flight.get_mut(microbatch).map(InFlight::take_inputs).unwrap_or_default()
    }

    fn put_inputs(&mut self, microbatch: Microbatch, inputs: Values) {
        if let Some(in_flight) = self.in_flight.get_mut(microbatch) {
            in_flight.put_inputs(inputs);
        }
    }

    fn begin_backward(
        &mut self,
        microbatch: Microbatch,
        gradients: OptionalTensors,
        is_whole: bool,
    ) -> BackwardState {
        let in_flight = self.in_flight.take(microbatch);
        let in_flight = in_flight.expect("a validated program runs a forward before its backward");
        BackwardState::new(microbatch, in_flight, gradients, is_whole)
    }

    fn backward_block(&mut self, backward: &mut BackwardState) -> Result<(), StageError> {
        self.backward_segments(backward, 1)
    }

    fn backward(&mut self, backward: &mut BackwardState) -> Result<(), StageError> {
        self.backward_segments(backward, usize::MAX)
    }

    fn backward_weights(
        &mut self,
        microbatch: Microbatch,
        first: &mut dyn FnMut(&mut WeightWork<'_>),
    ) -> Result<usize, StageError> {
        let deferred = self.in_flight.take_deferred(microbatch);
        let tasks: Vec<_> = deferred.iter().flat_map(Deferred::take).collect();
        let count = tasks.len();
        let mut work = WeightWork::new(tasks, &mut self.sums, self.module.last_computing().exposed());
        first(&mut work);
        if let Some(runner) = &mut self.options.weight_runner {
            runner(microbatch, &mut work);
        }
        // Weight gradients that a user's function has not computed would be missing in the sums.
        work.run_all();
        work.outcome()?;
        self.sums.outcome()?;
        Ok(count)
    }

    fn module(&self) -> &dyn Any {
        self.module.computing().exposed()
    }

    fn blocks(&self) -> usize {
        self.module.get().blocks().max(1)
    }

    fn streamed(&self) -> Vec<Arc<StreamedMatrix>> {
        self.module.get().streamed()
    }

    fn skips(&self) -> &Skips {
        self.module.get().skips()
    }

    fn input_placement(&self, input: usize) -> EdgePlacement {
        self.module.get().input_placement(input)
    }

    fn output_placement(&self, output: usize) -> EdgePlacement {
        self.module.get().output_placement(output)
    }

    fn device(&self) -> &Device {
        &self.module.device
    }

    fn keep_buffers(&mut self, trains: bool) {
        let mut kept = if trains { self.module.buffers() } else { OptionalTensors::new() };
        // Between two steps, the rows of sharded parameters count as not trained.
        let sharded = kept.iter_mut().enumerate().filter(|(index, _)| self.module.is_sharded(*index));
        sharded.for_each(|(_, kept)| *kept = None);
        self.statistics.keep(kept);
    }

    fn reset(&mut self) {
        self.undo_update();
        self.in_flight.clear();
        self.sums.clear();
        let kept = self.statistics.take_kept();
        // An update that fails may lose the module; the stage is not used again then.
        if !self.module.is_lost() {
            self.module.restore_buffers(kept);
        }
        self.module.release();
    }
}
