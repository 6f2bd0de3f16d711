//! Turns rows of tokens into the batch of a pipeline.

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::batch::{Batch, SplitError, SplitRule};
use crate::nn::IGNORED_TARGET;
use crate::pipeline::{PipelineError, split_whole, unsplit};
use pipewright_data::{SideTensor, TokenBatch, VALID_TOKENS};
use pipewright_schedule::Slices;

const _: () = assert!(pipewright_data::IGNORED_TARGET as i64 == IGNORED_TARGET);

/// Splits rows with their side inputs into microbatches. With `ignores`, some targets do not count, and each
/// microbatch counts by the others; schedules of slices then run without the numbers of valid tokens.
pub(super) fn split(
    mut batch: TokenBatch,
    (rule, slices): (&SplitRule, Slices),
    ignores: bool,
) -> Result<Batch, PipelineError> {
    if ignores && !slices.is_one() {
        // Side inputs are not cut into slices.
        batch.side.retain(|side| side.name != VALID_TOKENS);
    }
    let shape = [batch.rows, batch.seq_len];
    // Every rank moves its microbatches to its own device.
    let device = Device::flex();
    let tensor = |ids| Tensor::<2, Int>::from_data(TensorData::new::<i32, _>(ids, shape), &device);
    let mut step = split_whole(tensor(batch.inputs), tensor(batch.targets), rule)?;
    if ignores {
        step = step.ignoring(IGNORED_TARGET).map_err(|error| unsplit("targets", error))?;
    }
    with_side(step, batch.side, &device).map_err(|error| unsplit("side inputs", error))
}

/// Adds the side inputs of a batch, each split as its rows are.
fn with_side(mut batch: Batch, side: Vec<SideTensor>, device: &Device) -> Result<Batch, SplitError> {
    for SideTensor { name, shape, values } in side {
        // The number of dimensions is part of a tensor's type.
        batch = match shape.len() {
            1 => batch.with_split(&name, ints::<1>(values, shape, device))?,
            2 => batch.with_split(&name, ints::<2>(values, shape, device))?,
            3 => batch.with_split(&name, ints::<3>(values, shape, device))?,
            4 => batch.with_split(&name, ints::<4>(values, shape, device))?,
            _ => batch.with_split(&name, ints::<5>(values, shape, device))?,
        };
    }
    Ok(batch)
}

fn ints<const D: usize>(values: Vec<i32>, shape: Vec<usize>, device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), device)
}
