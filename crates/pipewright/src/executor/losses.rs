//! Losses, which are read from the device at the end of the program, or earlier if gradients are about to be
//! sent.
//!
//! A rank sends gradient sums and squares only after it has checked that its losses are finite. So if a loss
//! is not finite, no rank updates, and all parameters keep their values from before the step.

use burn::tensor::Tensor;
use pipewright_schedule::Microbatch;

use super::recorder::{AuxiliaryPart, Recorder};
use super::stages::LocalStages;
use super::step_input::StepInput;
use crate::failure::Cause;
use crate::stage::Auxiliary;

/// Reads the losses of the forwards that have run, in microbatch order, and the auxiliary losses, each with
/// its share in the loss of the step. Training fails if one is not finite.
pub(super) fn read_losses(
    stages: &mut LocalStages,
    recorder: &mut Recorder,
    input: &StepInput,
) -> Result<(), Cause> {
    let evaluates = input.program.is_forward_only();
    let (first, slices) = (input.first_microbatch(), input.program.slices());
    let (indices, losses): (Vec<_>, Vec<_>) = stages.last_mut().batch.losses.take_all().unzip();
    for (index, loss) in indices.into_iter().zip(read(losses)) {
        let (microbatch, slice) = slices.place(Microbatch::new(first + index as u32));
        if !loss.is_finite() && !evaluates {
            return Err(Cause::LossNotFinite { microbatch, loss });
        }
        recorder.add_loss(loss * input.slice_shares[index], slice.get() == 0);
    }
    read_auxiliary(stages, recorder, input)
}

fn read_auxiliary(stages: &mut LocalStages, recorder: &mut Recorder, input: &StepInput) -> Result<(), Cause> {
    let evaluates = input.program.is_forward_only();
    let (first, slices) = (input.first_microbatch(), input.program.slices());
    for stage in stages.iter_mut() {
        let lists = stage.batch.auxiliary.take_all();
        let (names, losses): (Vec<_>, Vec<_>) = lists
            .flat_map(|(index, list)| {
                list.into_iter()
                    .map(move |Auxiliary { name, layer, weight, loss }| ((index, name, layer, weight), loss))
            })
            .unzip();
        let stage = stage.index;
        for ((index, name, layer, weight), loss) in names.into_iter().zip(read(losses)) {
            let microbatch = Microbatch::new(first + index as u32);
            if !loss.is_finite() && !evaluates {
                let (microbatch, _) = slices.place(microbatch);
                return Err(Cause::AuxiliaryNotFinite { stage, microbatch, name, loss });
            }
            let share = input.loss_weights[index] / f64::from(slices.get());
            let loss = share / input.divisor * loss;
            recorder.add_auxiliary(AuxiliaryPart { name, layer, stage, microbatch, weight, loss });
        }
    }
    Ok(())
}

/// Returns the values of scalars (shape `[1]`). They are read together, because each read waits for the
/// device.
fn read(scalars: Vec<Tensor<1>>) -> Vec<f64> {
    if scalars.is_empty() {
        return Vec::new();
    }
    Tensor::cat(scalars, 0).into_data().iter::<f64>().collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;

    #[test]
    fn losses_keep_their_precision() {
        let third = Tensor::<1>::full([1], 1.0 / 3.0, (&Device::flex(), DType::F64));
        assert_eq!(read(vec![third]), [1.0 / 3.0]);
        let third = Tensor::<1>::full([1], 1.0 / 3.0, &Device::flex());
        assert_eq!(read(vec![third]), [f64::from(1.0f32 / 3.0)]);
        assert!(read(Vec::new()).is_empty());
    }
}
