//! `UNSHARD` and `RESHARD` of stages whose frozen matrices are read from a file, and the wait of a computation for them.
//!
//! `UNSHARD` only asks for the matrices. The wait is for the rank's own thread that reads, and for no other rank, so it
//! may block: each read ends, or fails. It has the deadline of any other wait, and a failure of another rank ends it.

use std::sync::Arc;

use pipewright_schedule::StageIndex;

use super::machine::Executor;
use crate::failure::Cause;
use crate::stream::StreamError;

impl Executor {
    /// Lets the matrices of a stage be read.
    pub(super) fn ask_for_base(&mut self, stage: StageIndex) -> Result<(), Cause> {
        let matrices = self.stages.get(stage).runner().streamed();
        if matrices.is_empty() {
            return Ok(());
        }
        self.streams.ask(stage, matrices).map_err(cause)
    }

    /// Waits until the matrices of a stage are in memory, if they were asked for.
    pub(super) fn await_base(&mut self, stage: StageIndex) -> Result<(), Cause> {
        if !self.streams.has(stage) {
            return Ok(());
        }
        let (deadline, connection) = (self.context.config.deadline, &self.connection);
        let since =
            self.streams.wait(stage, deadline, || connection.stopped_by().is_some()).map_err(cause)?;
        if let Some(first) = connection.stopped_by() {
            return Err(Cause::Aborted { first });
        }
        self.streams.take_reads().for_each(|read| self.recorder.note_transfer(read));
        if let Some(since) = since {
            self.recorder.note_reloaded(since);
        }
        Ok(())
    }

    /// Drops the matrices of a stage.
    pub(super) fn drop_base(&mut self, stage: StageIndex) -> Result<(), Cause> {
        // No computation has waited for them if only weight gradients needed the stage.
        self.await_base(stage)?;
        self.streams.release(stage);
        Ok(())
    }
}

fn cause(error: StreamError) -> Cause {
    Arc::new(error).into()
}
