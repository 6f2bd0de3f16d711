//! Losses, which are read from the device at the end of the program, or earlier if gradients are about to be sent.
//!
//! A rank sends gradient sums and squares only after it has checked that its losses are finite. So if a loss is not
//! finite, no rank updates, and all parameters keep their values from before the step.

use pipewright_schedule::Microbatch;

use super::machine::Executor;
use super::report::AuxiliaryPart;
use crate::failure::Cause;
use crate::stage::Auxiliary;

impl Executor {
    /// Reads the losses in microbatch order. Training fails if one is not finite.
    pub(super) fn read_losses(&mut self) -> Result<(), Cause> {
        let evaluates = self.program().is_forward_only();
        let first = self.first_microbatch();
        let last = self.stages.last_mut().expect("every rank owns a stage");
        for (microbatch, loss) in (first..).map(Microbatch::new).zip(&mut last.losses) {
            let Some(loss) = loss.take() else { continue };
            let loss = f64::from(loss.into_scalar::<f32>());
            if !loss.is_finite() && !evaluates {
                return Err(Cause::LossNotFinite { microbatch, loss });
            }
            self.step.losses.push(loss);
        }
        Ok(())
    }

    /// Reads the auxiliary losses, each with its share in the mean over the microbatches.
    pub(super) fn read_auxiliary(&mut self) -> Result<(), Cause> {
        let evaluates = self.program().is_forward_only();
        let first = self.first_microbatch();
        let microbatches = f64::from(self.program().microbatches() * self.endpoint.replica_count());
        for stage in &mut self.stages {
            for (place, losses) in stage.auxiliary.iter_mut().enumerate() {
                let loss_weight = self.step.input.loss_weights[place] / microbatches;
                let microbatch = Microbatch::new(first + place as u32);
                for Auxiliary { name, weight, loss } in std::mem::take(losses) {
                    let loss = f64::from(loss.into_scalar::<f32>());
                    if !loss.is_finite() && !evaluates {
                        return Err(Cause::AuxiliaryNotFinite { stage: stage.index, microbatch, name, loss });
                    }
                    let (stage, loss) = (stage.index, loss_weight * loss);
                    self.step.auxiliary.push(AuxiliaryPart { name, stage, microbatch, weight, loss });
                }
            }
        }
        Ok(())
    }

    /// Returns the first microbatch of this replica. Errors and reports number microbatches over all replicas.
    fn first_microbatch(&self) -> u32 {
        self.endpoint.coord().replica * self.program().microbatches()
    }
}
