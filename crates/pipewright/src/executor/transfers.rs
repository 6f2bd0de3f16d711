//! The actions `OFFLOAD` and `RELOAD`, and the wait of a backward for the tensors that come back.
//!
//! Both actions only start a transfer. The wait is for the rank's own thread that moves tensors, and for no other rank,
//! so it may block: each transfer ends, or fails. It has the deadline of any other wait, and a failure of another rank
//! ends it.

use std::sync::Arc;

use super::machine::Executor;
use super::stages::At;
use crate::failure::Cause;
use crate::offload::{OffloadError, OffloadErrorKind, Reloaded};

impl Executor {
    /// Lets the inputs that a forward keeps leave memory.
    pub(super) fn offload(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let Some(offloads) = &mut self.offloads else { return Ok(()) };
        let inputs = self.stages.get_mut(stage).runner_mut().take_inputs(microbatch);
        offloads.offload(stage, microbatch, inputs).map_err(cause)
    }

    /// Lets the inputs come back.
    pub(super) fn reload(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let Some(offloads) = &mut self.offloads else { return Ok(()) };
        offloads.reload(stage, microbatch).map_err(cause)
    }

    /// Waits until the inputs that a backward uses are back, if they have left.
    pub(super) fn await_reload(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let Some(offloads) = &mut self.offloads else { return Ok(()) };
        let (deadline, connection) = (self.context.config.deadline, &self.connection);
        let back = offloads.wait(stage, microbatch, deadline, || connection.stopped_by().is_some());
        let back = back.map_err(cause)?;
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

/// Returns the cause for a failed transfer. The memory of a device may be short when tensors come back, which a back end
/// reports as a panic.
fn cause(error: OffloadError) -> Cause {
    if let OffloadErrorKind::Panicked { message } = &error.kind
        && let short @ Cause::DeviceMemory { .. } = Cause::from_panic(message)
    {
        return short;
    }
    Arc::new(error).into()
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::{Microbatch, StageIndex};

    use super::*;

    #[test]
    fn a_device_without_memory_is_distinguished_from_other_panics() {
        let of = |message: &str| {
            let kind = OffloadErrorKind::Panicked { message: message.to_owned() };
            cause(OffloadError { stage: StageIndex::new(0), microbatch: Microbatch::new(0), kind })
        };
        let short = of("out of device memory allocating 64 bytes");
        assert!(matches!(short, Cause::DeviceMemory { bytes: 64 }), "{short}");
        assert!(matches!(of("another"), Cause::Offload(_)));
    }
}
