//! The actions `OFFLOAD` and `RELOAD`, and the wait of a backward for the tensors that come back.
//!
//! Both actions only start a transfer. The wait is for the rank's own thread that moves tensors, and for no other rank,
//! so it may block: each transfer ends, or fails. It has the deadline of any other wait, and a failure of another rank
//! ends it.

use std::sync::Arc;

use super::machine::Executor;
use super::stages::At;
use crate::failure::Cause;
use crate::offload::Reloaded;

impl Executor {
    /// Lets the inputs that a forward keeps leave memory.
    pub(super) fn offload(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let Some(offloads) = &mut self.offloads else { return Ok(()) };
        let inputs = self.stages.get_mut(stage).runner_mut().take_inputs(microbatch);
        offloads.offload(stage, microbatch, inputs).map_err(|error| Arc::new(error).into())
    }

    /// Lets the inputs come back.
    pub(super) fn reload(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let Some(offloads) = &mut self.offloads else { return Ok(()) };
        offloads.reload(stage, microbatch).map_err(|error| Arc::new(error).into())
    }

    /// Waits until the inputs that a backward uses are back, if they have left.
    pub(super) fn await_reload(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let Some(offloads) = &mut self.offloads else { return Ok(()) };
        let (deadline, connection) = (self.context.config().deadline, &self.connection);
        let back = offloads.wait(stage, microbatch, deadline, || connection.stopped_by().is_some());
        let back = back.map_err(Arc::new)?;
        if let Some(Reloaded { values, start }) = back {
            for transfer in offloads.take_transfers() {
                self.recorder.note_transfer(transfer);
            }
            self.recorder.note_reloaded(start);
            self.stages.get_mut(stage).runner_mut().put_inputs(microbatch, values);
        } else if let Some(first) = connection.stopped_by() {
            return Err(Cause::Aborted { first });
        }
        Ok(())
    }
}
