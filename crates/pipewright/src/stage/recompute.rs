//! Recomputation: a forward keeps its inputs only, and its backward computes the forward again.
//!
//! The first forward runs a copy of the module whose parameters require no gradient, so nothing is recorded. The copy
//! shares its storage and its running statistics with the module. The backward runs the module itself on the same
//! inputs, in the same context, so random streams draw the same numbers, and then runs the backward of that tape. It
//! reports no loss a second time, and running statistics return to the values before it.
//!
//! A stage is recomputed as a whole, or block by block ([`StageBody::blocks`]). By block, it keeps the inputs of each
//! block, and a backward records one block at a time, from the last to the first.
//!
//! # Which outputs need a gradient
//!
//! The next stage needs to know which outputs need a gradient, and a forward that records nothing does not show it. So
//! the first forward for each combination of inputs with and without a gradient does record, and its tape is discarded.
//! Later forwards mark the same outputs. If a recomputed forward gives a gradient to another output, that is an error
//! ([`StageError::RecomputedOutput`]).
//!
//! # Burn's gradient checkpointing
//!
//! Burn's own strategy (`Device::gradient_checkpointing`) recomputes single operations that are cheap, and keeps the
//! results of the others. It still keeps a tape for each microbatch. The two can be combined: then the tape that a
//! backward records is one with gradient checkpointing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;
use pipewright_schedule::Microbatch;

use super::body::StageBody;
use super::error::StageError;
use super::module_parameters::{parameters_of, with_values};
use super::runner::{Forwarded, InputGradients};
use super::training::{Pass, TrainingStage};
use crate::autodiff::{inner_of, on_tape_of};
use crate::tensor::{OptionalTensors, Value, Values};

/// Which outputs of each segment need a gradient, for each combination of inputs that do.
pub(super) type Promises = HashMap<Vec<bool>, Vec<Vec<bool>>>;

/// The data with which a microbatch computes its forward again.
pub(super) struct Saved {
    pass: Pass,
    /// The inputs of each segment.
    inputs: Vec<Values>,
}

impl<M: StageBody> TrainingStage<M> {
    /// Runs the stage and keeps the inputs of its segments.
    pub(super) fn save(
        &mut self,
        inputs: Values,
        pass: Pass,
        keep_outputs: bool,
    ) -> Result<(Forwarded, Saved), StageError> {
        let key = requires_grad(&inputs);
        let promised = self.promises.get(&key);
        let unrecorded = promised.map(|_| self.computing().clone().map(&mut WithoutGradients));
        let mut saved = Saved { pass, inputs: Vec::with_capacity(self.segments.len()) };
        let mut all = Forwarded { outputs: inputs, loss: None, auxiliary: Vec::new() };
        let mut found = Vec::new();
        for (place, &segment) in self.segments.iter().enumerate() {
            saved.inputs.push(all.outputs.clone());
            let part = match promised.zip(unrecorded.as_ref()) {
                Some((promised, module)) => {
                    let inputs = all.outputs.into_iter().map(Value::constant).collect();
                    let (part, _) = self.run_segment(module, segment, inputs, &saved.pass, keep_outputs)?;
                    Forwarded { outputs: as_promised(part.outputs, &promised[place]), ..part }
                }
                None => {
                    let (part, tape) = self.record(segment, all.outputs, &saved.pass, keep_outputs)?;
                    tape.discard();
                    found.push(requires_grad(&part.outputs));
                    part
                }
            };
            all.auxiliary.extend(part.auxiliary);
            (all.outputs, all.loss) = (part.outputs, part.loss);
        }
        if promised.is_none() {
            self.promises.insert(key, found);
        }
        Ok((all, saved))
    }

    /// Computes a forward again and runs its backward, segment by segment.
    pub(super) fn recompute(
        &mut self,
        microbatch: Microbatch,
        saved: Saved,
        mut gradients: OptionalTensors,
    ) -> Result<InputGradients, StageError> {
        let Saved { pass, inputs } = saved;
        let mut recomputed = Duration::ZERO;
        let buffers = self.buffers();
        let promised = self.promises.get(&requires_grad(&inputs[0])).cloned().unwrap_or_default();
        for (place, inputs) in inputs.into_iter().enumerate().rev() {
            let (segment, start) = (self.segments[place], Instant::now());
            let (found, tape) = self.record(segment, inputs, &pass, false)?;
            recomputed += start.elapsed();
            let broken = found.outputs.iter().zip(&promised[place]);
            if let Some(index) =
                broken.into_iter().position(|(value, promised)| value.requires_grad() && !promised)
            {
                return Err(StageError::RecomputedOutput { index });
            }
            drop(found);
            gradients = self.run_backward(microbatch, tape, gradients)?;
        }
        self.restore_buffers(buffers);
        Ok(InputGradients { gradients, recomputed })
    }

    /// Returns the values of the parameters that are not trained, such as running statistics; `None` at the places of
    /// others, and an empty list if all are trained.
    fn buffers(&self) -> OptionalTensors {
        // A module of half precision has no running statistics.
        if self.precision.half().is_some() || !self.has_buffers {
            return OptionalTensors::new();
        }
        let found = parameters_of(self.settled());
        found.into_iter().map(|found| (!found.is_trained).then_some(found.value)).collect()
    }

    /// Undoes the changes of a second forward to the running statistics.
    fn restore_buffers(&mut self, buffers: OptionalTensors) {
        if !buffers.is_empty() {
            self.settled();
            let module = self.take_module();
            self.module = Some(with_values(module, buffers));
        }
    }
}

fn requires_grad(values: &[Value]) -> Vec<bool> {
    values.iter().map(Value::requires_grad).collect()
}

/// Marks the outputs that need a gradient.
fn as_promised(outputs: Values, promised: &[bool]) -> Values {
    let marked = |(output, &requires_grad): (Value, &bool)| match requires_grad {
        true => output.requiring_grad(),
        false => output.constant(),
    };
    outputs.into_iter().zip(promised).map(marked).collect()
}

/// Takes the parameters of a module off the tape, and leaves them on the device of training.
struct WithoutGradients;

impl ModuleMapper for WithoutGradients {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, untracked(tensor), mapper)
    }
}

fn untracked<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    on_tape_of(inner_of(tensor.clone()), &tensor)
}
