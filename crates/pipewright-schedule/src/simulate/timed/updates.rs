//! The updates between batches in a timed simulation.

use crate::batch_gate::BatchGate;
use crate::schedule::Program;
use crate::simulate::tape::Moment;

/// The updates between batches.
pub(super) struct Updates {
    pub(super) gate: BatchGate,
    /// For each batch, when the last rank so far has ended it.
    pub(super) ended: Vec<Moment>,
}

impl Updates {
    /// Returns the state before the first action; `None` for a single batch.
    pub(super) fn over(program: &Program) -> Option<Self> {
        let ended = vec![Moment::START; program.batches() as usize];
        Some(Self { gate: BatchGate::over(program.numbering(), program.rows())?, ended })
    }
}
