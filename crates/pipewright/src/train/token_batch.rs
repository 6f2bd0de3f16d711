//! Turns rows of tokens into the batch of a pipeline.

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::batch::{Batch, SplitError, SplitRule};
use crate::nn::IGNORED_TARGET;
use crate::pipeline::{PipelineError, split_whole, unsplit};
use pipewright_data::{ROLES, SEQUENCES, SideTensor, TokenBatch, VALID_TOKENS};
use pipewright_schedule::Slices;

const _: () = assert!(pipewright_data::IGNORED_TARGET as i64 == IGNORED_TARGET);

/// Splits rows with their side inputs into microbatches. With `ignores`, some targets do not count, and each
/// microbatch counts by the others; schedules of slices then run without the numbers of valid tokens. In preference
/// training, each microbatch counts by its records, and `reference` has the log-probabilities of the sequences.
pub(super) fn split(
    mut batch: TokenBatch,
    (rule, slices): (&SplitRule, Slices),
    ignores: bool,
    reference: Option<&[f32]>,
) -> Result<Batch, PipelineError> {
    if ignores && !slices.is_one() {
        // Side inputs are not cut into slices.
        batch.side.retain(|side| side.name != VALID_TOKENS);
    }
    let shape = [batch.rows, batch.seq_len];
    let records = records_of(&batch);
    if let Some(log_probs) = reference {
        add_reference(&mut batch, log_probs);
    }
    // Every rank moves its microbatches to its own device.
    let device = Device::flex();
    let tensor = |ids| Tensor::<2, Int>::from_data(TensorData::new::<i32, _>(ids, shape), &device);
    let mut step = split_whole(tensor(batch.inputs), tensor(batch.targets), rule)?;
    if let Some(records) = records {
        let records = Tensor::<1>::from_data(TensorData::new(records, [shape[0]]), &device);
        let weighted = step.with_token_weights("preference_records", records);
        step = weighted.map_err(|error| unsplit("records", error))?;
    } else if ignores {
        step = step.ignoring(IGNORED_TARGET).map_err(|error| unsplit("targets", error))?;
    }
    with_side(step, batch.side, &device).map_err(|error| unsplit("side inputs", error))
}

/// Replaces the numbers of the sequences of a batch by the bits of their log-probabilities.
fn add_reference(batch: &mut TokenBatch, log_probs: &[f32]) {
    let sides = batch.side.iter_mut().filter(|side| side.name == SEQUENCES);
    for number in sides.flat_map(|side| &mut side.values) {
        let place = usize::try_from(*number).ok().and_then(|number| number.checked_sub(1));
        *number =
            place.and_then(|place| log_probs.get(place)).map_or(0, |value| value.to_bits().cast_signed());
    }
}

/// Returns the number of records of each row of preference training; `None` for other training.
pub(super) fn records_of(batch: &TokenBatch) -> Option<Vec<f32>> {
    let roles = batch.side.iter().find(|side| side.name == ROLES)?;
    // The two sequences of a record have different roles.
    let of_row = |roles: &[i32]| {
        let mut roles: Vec<i32> = roles.iter().map(|role| role.abs()).filter(|role| *role != 0).collect();
        roles.dedup();
        roles.len() as f32 / 2.0
    };
    Some(roles.values.chunks(batch.seq_len).map(of_row).collect())
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
