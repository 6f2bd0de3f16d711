//! Turns rows of tokens into the batch of a pipeline.

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::batch::{Batch as StepBatch, SplitError};
use crate::pipeline::{Pipeline, PipelineError};
use crate::train::data::{Batch, SideTensor};

/// Splits rows with their side inputs into so many microbatches of a pipeline.
pub(super) fn split(
    pipeline: &Pipeline,
    batch: Batch,
    microbatches: u32,
) -> Result<StepBatch, PipelineError> {
    let shape = [batch.rows, batch.seq_len];
    // Every rank moves its microbatches to its own device.
    let device = Device::flex();
    let tensor = |ids| Tensor::<2, Int>::from_data(TensorData::new::<i32, _>(ids, shape), &device);
    let step = pipeline
        .split_batch(tensor(batch.inputs), tensor(batch.targets), microbatches)?
        .with_targets_for_all();
    with_side(step, batch.side, &device)
        .map_err(|source| PipelineError::Split { what: "side inputs", source })
}

/// Adds the side inputs of a batch, each split as its rows are.
fn with_side(batch: StepBatch, side: Vec<SideTensor>, device: &Device) -> Result<StepBatch, SplitError> {
    let mut batch = batch;
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
