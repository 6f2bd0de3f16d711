//! The actions of a stage in training, as the executor runs them.

use std::any::Any;

use burn::tensor::Device;
use pipewright_schedule::Microbatch;

use super::backward::{BackwardState, InFlight, Kept};
use super::body::{Skips, StageBody};
use super::error::{ElementTypeError, StageError};
use super::forward::{ForwardState, Replacement};
use super::runner::{BatchPart, Forwarded, StageCompute, StageParameters};
use super::training::TrainingStage;
use super::weight_work::WeightWork;
use crate::nn::Deferred;
use crate::tensor::shard::RowShard;
use crate::tensor::{Lossy, OptionalTensors, Value, ValueKind, Values, int_type_of};

impl<M: StageBody> StageCompute for TrainingStage<M> {
    fn admitted(&self, part: BatchPart, values: Values) -> Result<Values, StageError> {
        let ints = int_type_of(&self.device);
        let admit = |(place, value): (usize, Value)| {
            let found = value.dtype();
            let (admitted, expected) = match (value.kind(), self.float_type) {
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
            let value = match lossy {
                Lossy::Digits => None,
                Lossy::Value(value) => Some(value),
            };
            let what = format!("input {place}");
            Err(StageError::ElementType(Box::new(ElementTypeError { what, found, expected, value })))
        };
        values.into_iter().enumerate().map(admit).collect()
    }

    fn run_forward(&mut self, forward: &mut ForwardState) -> Result<(), StageError> {
        self.run_rest(forward)
    }

    fn run_block(
        &mut self,
        forward: &mut ForwardState,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(), StageError> {
        self.run_next(forward, replacement)
    }

    fn finish_forward(&mut self, forward: ForwardState) -> Result<Forwarded, StageError> {
        let is_trained = forward.task.is_some();
        let (forwarded, parts, pass) = forward.into_forwarded()?;
        let microbatch = pass.context.number();
        if self.slices.after(microbatch).is_none() {
            self.end_forwards_of(pass.context.microbatch(), is_trained);
        }
        if is_trained {
            let is_saved = parts.iter().any(|part| matches!(part.kept, Kept::Inputs(..)));
            self.in_flight.insert(microbatch, InFlight { parts, pass: is_saved.then_some(pass) });
        }
        Ok(forwarded)
    }

    fn recompute(&mut self, microbatch: Microbatch) -> Result<bool, StageError> {
        self.record_early(microbatch)
    }

    fn begin_backward(&mut self, microbatch: Microbatch, gradients: OptionalTensors) -> BackwardState {
        let in_flight = self.in_flight.remove(&microbatch);
        let in_flight = in_flight.expect("a validated program runs a forward before its backward");
        BackwardState::new(microbatch, in_flight, gradients)
    }

    fn backward_block(&mut self, backward: &mut BackwardState) -> Result<(), StageError> {
        self.run_back(backward, 1)
    }

    fn backward_all(&mut self, backward: &mut BackwardState) -> Result<(), StageError> {
        self.run_back(backward, usize::MAX)
    }

    fn backward_weights(
        &mut self,
        microbatch: Microbatch,
        first: &mut dyn FnMut(&mut WeightWork<'_>),
    ) -> Result<usize, StageError> {
        let deferred = self.deferred.remove(&microbatch).unwrap_or_default();
        let tasks: Vec<_> = deferred.iter().flat_map(Deferred::take).collect();
        let count = tasks.len();
        let module = self.rounded.get().or(self.module.as_ref());
        let module = module.expect("the module is away only while it is changed").exposed();
        let mut work = WeightWork::new(tasks, &mut self.sums, module);
        first(&mut work);
        if let Some(runner) = &mut self.weight_runner {
            runner(microbatch, &mut work);
        }
        // Weight gradients that a user's function has not computed would be missing in the sums.
        work.run_all();
        work.outcome().map(|()| count)
    }

    fn module(&self) -> &dyn Any {
        self.computing().exposed()
    }

    fn blocks(&self) -> usize {
        self.module.as_ref().map_or(1, M::blocks).max(1)
    }

    fn skips(&self) -> &Skips {
        self.module().skips()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn keep_buffers(&mut self, trains: bool) {
        self.kept_buffers = if trains { self.buffers() } else { OptionalTensors::new() };
        if let Some(shards) = &self.shards {
            // Between two steps, the rows of sharded parameters count as not trained.
            let sharded = (0..).zip(&mut self.kept_buffers);
            let sharded = sharded.filter(|(place, _)| shards.row_shard(*place) != RowShard::WHOLE);
            sharded.for_each(|(_, kept)| *kept = None);
        }
    }

    fn reset(&mut self) {
        self.in_flight.clear();
        self.deferred.clear();
        self.carries.clear();
        self.sums.clear();
        let kept = std::mem::take(&mut self.kept_buffers);
        // An update that fails may lose the module; the stage is not used again then.
        if self.module.is_some() {
            self.restore_buffers(kept);
        }
        self.release();
    }
}
