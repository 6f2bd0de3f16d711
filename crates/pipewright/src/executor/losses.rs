//! Losses, which are read from the device at the end of the program, or earlier if gradients are about to be sent.
//!
//! A rank sends gradient sums and squares only after it has checked that its losses are finite. So if a loss is not
//! finite, no rank updates, and all parameters keep their values from before the step.

use burn::tensor::Tensor;
use pipewright_schedule::Microbatch;

use super::machine::Executor;
use super::report::AuxiliaryPart;
use crate::failure::Cause;
use crate::stage::Auxiliary;

impl Executor {
    /// Reads the losses in microbatch order. Training fails if one is not finite.
    pub(super) fn read_losses(&mut self) -> Result<(), Cause> {
        let evaluates = self.program().is_forward_only();
        let (first, slices) = (self.first_microbatch(), self.program().slices());
        let last = self.stages.last_mut().expect("every rank owns a stage");
        let found = last.losses.iter_mut().enumerate();
        let (places, losses): (Vec<_>, Vec<_>) =
            found.filter_map(|(place, loss)| Some((place, loss.take()?))).unzip();
        for (place, loss) in places.into_iter().zip(read(losses)) {
            let (microbatch, slice) = slices.place(Microbatch::new(first + place as u32));
            if !loss.is_finite() && !evaluates {
                return Err(Cause::LossNotFinite { microbatch, loss });
            }
            let loss = loss * self.step.input.slice_shares[place];
            match self.step.losses.last_mut() {
                Some(sum) if slice.get() > 0 => *sum += loss,
                _ => self.step.losses.push(loss),
            }
        }
        Ok(())
    }

    /// Reads the auxiliary losses, each with its share in the loss of the step.
    pub(super) fn read_auxiliary(&mut self) -> Result<(), Cause> {
        let evaluates = self.program().is_forward_only();
        let (first, slices) = (self.first_microbatch(), self.program().slices());
        let divisor = self.step.input.divisor;
        for stage in &mut self.stages {
            let lists = stage.auxiliary.iter_mut().map(std::mem::take).enumerate();
            let (names, losses): (Vec<_>, Vec<_>) = lists
                .flat_map(|(place, list)| {
                    list.into_iter().map(move |Auxiliary { name, layer, weight, loss }| {
                        ((place, name, layer, weight), loss)
                    })
                })
                .unzip();
            for ((place, name, layer, weight), loss) in names.into_iter().zip(read(losses)) {
                let microbatch = Microbatch::new(first + place as u32);
                if !loss.is_finite() && !evaluates {
                    let (microbatch, _) = slices.place(microbatch);
                    return Err(Cause::AuxiliaryNotFinite { stage: stage.index, microbatch, name, loss });
                }
                let share = self.step.input.loss_weights[place] / f64::from(slices.get());
                let loss_weight = share / divisor;
                let (stage, loss) = (stage.index, loss_weight * loss);
                self.step.auxiliary.push(AuxiliaryPart { name, layer, stage, microbatch, weight, loss });
            }
        }
        Ok(())
    }

    /// Returns the first microbatch of this replica, or the number of its first slice. Errors and reports number microbatches over all replicas.
    fn first_microbatch(&self) -> u32 {
        self.endpoint.coord().replica * self.program().microbatches()
    }
}

/// Returns the values of scalars (shape `[1]`). They are read together, because each read waits for the device.
fn read(scalars: Vec<Tensor<1>>) -> Vec<f64> {
    match scalars.is_empty() {
        true => Vec::new(),
        false => Tensor::cat(scalars, 0).into_data().iter::<f64>().collect(),
    }
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
