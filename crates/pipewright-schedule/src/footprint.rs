//! Estimates of the memory that schedules need, to refuse a size before memory ends.
//!
//! The figures are measured on 64-bit machines for all schedules, at their largest ratio of bytes to cells,
//! and rounded up. A test compares them with the memory of thousands of schedules.

/// The work that is done with a schedule. Each kind includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// It is generated, and its rows are printed.
    Generate,
    /// It is lowered and validated, and the program's rows are printed.
    Lower,
    /// The program is simulated.
    Simulate,
    /// The program is simulated as one of the candidates of a plan.
    Plan,
    /// The program is simulated, and its run is written as a trace.
    Trace,
}

impl Use {
    /// Returns the bytes for each cell of the generated schedule.
    pub const fn bytes_per_cell(self) -> u64 {
        match self {
            Self::Generate => 48,
            Self::Lower => 224,
            Self::Simulate => 512,
            Self::Plan => 1024,
            Self::Trace => 3072,
        }
    }
}

/// Returns the most bytes that a schedule with as many cells needs, beyond what the process has anyway.
///
/// ```
/// use pipewright_schedule::footprint::{Use, most_bytes};
/// use pipewright_schedule::ScheduleSpec;
/// use pipewright_schedule::generate::most_cells;
/// let spec = ScheduleSpec { ranks: 1024, microbatches: 4096, ..ScheduleSpec::default() };
/// let cells = most_cells("1f1b", &spec)?;
/// assert_eq!((cells, most_bytes(cells, Use::Simulate)), (8_388_608, 4 << 30));
/// # Ok::<(), pipewright_schedule::GenerateError>(())
/// ```
pub const fn most_bytes(cells: u64, work: Use) -> u64 {
    cells.saturating_mul(work.bytes_per_cell())
}
