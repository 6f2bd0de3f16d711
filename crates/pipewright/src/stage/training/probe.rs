//! Finds the layers that draw from the generator of their device, on ranks that compute a stage together.
//!
//! Each of these ranks runs a segment once by itself before the segment's first forward: without exchanges,
//! so that no rank waits for another one, and without results. A layer that draws is an error before the
//! first update.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::TrainingStage;
use crate::random::LayerDraws;
use crate::stage::body::StageBody;
use crate::stage::error::StageError;
use crate::stage::microbatch::{ForwardState, Pass};
use crate::stage::segment::Segment;
use crate::tensor::Values;

/// The runs of a probe after which a layer that seems to have drawn in each of them counts as one that draws.
/// Another thread of the process may have drawn during some of them.
const PROBES: usize = 8;

/// The segments that were probed, in training and in an evaluation, each with the number of its probe
/// ([`LayerDraws::probe_number`]).
pub(super) type Probes = HashMap<(Segment, bool), u64>;

impl<M: StageBody> TrainingStage<M> {
    /// Probes a segment before its first forward, and again when it is not known any more which of its layers
    /// draw.
    pub(super) fn probe(
        &mut self,
        segment: Segment,
        inputs: &Values,
        forward: &ForwardState,
    ) -> Result<(), StageError> {
        let Some(number) = self.draws.probe_number() else { return Ok(()) };
        let is_training = forward.task.is_some();
        if self.probes.get(&(segment, is_training)) == Some(&number) {
            return Ok(());
        }
        let runs = (0..PROBES).map(|_| self.run_for_probe(segment, inputs, &forward.pass, is_training));
        // The values differ from the values of a forward, so other errors mean nothing.
        let accused = runs.map_while(|outcome| match outcome {
            Some(Err(error @ StageError::DrawsTogether { .. })) => Some(error),
            _ => None,
        });
        let mut accused: Vec<_> = accused.collect();
        if accused.len() == PROBES
            && let Some(error) = accused.pop()
        {
            return Err(error);
        }
        self.probes.insert((segment, is_training), number);
        Ok(())
    }

    /// Runs a segment without exchanges and drops the results. Returns `None` if it panics.
    fn run_for_probe(
        &mut self,
        segment: Segment,
        inputs: &Values,
        Pass { context, target, .. }: &Pass,
        is_training: bool,
    ) -> Option<Result<(), StageError>> {
        let (context, target, inputs) = (context.for_probe(), target.clone(), inputs.clone());
        let run = || {
            if !is_training {
                return segment.forward(&self.module.computing().valid(), inputs, &context, None).map(drop);
            }
            let pass = Pass { context, target, loss_weight: 1.0, auxiliary_weight: 1.0 };
            self.record(segment, inputs, &pass, false, None).map(|(_, tape)| tape.discard())
        };
        let buffers = self.module.buffers();
        let outcome = catch_unwind(AssertUnwindSafe(|| LayerDraws::probe(run)));
        self.module.restore_buffers(buffers);
        outcome.ok()
    }
}
