//! Refuses schedules that do not fit into the free memory, before anything is allocated for them.

use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_schedule::footprint::{Use, most_bytes};
use pipewright_schedule::generate::most_cells;
use pipewright_schedule::message_as_debug;
use pipewright_schedule::plan::PlanRequest;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Program, Schedule, ScheduleSpec};
use thiserror::Error;

use crate::machine_memory::{FreeMemory, free_memory};

/// The estimate below which the free memory is not looked up.
const SMALL: u64 = 32 << 20;

/// The number of cells of a program for each cell of its schedule, at least, if it has messages.
const WITH_MESSAGES: u64 = 2;

/// A schedule with as few actions as any that trains.
const SMALLEST: &str = "1f1b";

/// A schedule that does not fit into the free memory.
#[derive(Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the schedule has up to {} and needs up to {} of memory, and {} of {} are free; use fewer microbatches, stages or ranks, \
     or give the process more memory",
    counted(*.cells, "cell"), mebibytes(*.needed), mebibytes(.free.bytes), .free.limit
)]
pub struct OutOfMemory {
    /// The most cells of the schedule.
    pub cells: u64,
    /// The most bytes that it needs.
    pub needed: u64,
    /// The bytes that are free.
    pub free: FreeMemory,
}

message_as_debug!(OutOfMemory);

/// Refuses a schedule by name that does not fit. A size that the schedule does not have is refused when it is
/// generated.
///
/// # Errors
/// When its estimate is larger than the free memory.
pub fn check_named(name: &str, spec: &ScheduleSpec, work: Use) -> Result<(), OutOfMemory> {
    match most_cells(name, spec) {
        Ok(cells) => check_cells(cells, work, free_memory),
        Err(_refused) => Ok(()),
    }
}

/// Refuses a schedule of a file that does not fit, by the file's text.
///
/// # Errors
/// When its estimate is larger than the free memory.
pub fn check_text(text: &str, work: Use) -> Result<(), OutOfMemory> {
    let is_end = |byte: u8| matches!(byte, b',' | b'\n' | b'\r' | b' ');
    let bytes = text.as_bytes();
    let ends = bytes.windows(2).filter(|pair| !is_end(pair[0]) && is_end(pair[1])).count();
    let cells = ends as u64 + u64::from(bytes.last().is_some_and(|last| !is_end(*last)));
    let cells = if text.contains("SEND_") { cells / WITH_MESSAGES } else { cells };
    check_cells(cells, work, free_memory)
}

/// Refuses work on a schedule that does not fit.
///
/// # Errors
/// When the estimate of the work is larger than the free memory.
pub fn check_schedule(schedule: &Schedule, work: Use) -> Result<(), OutOfMemory> {
    check_cells(schedule.rows().iter().map(|row| row.len() as u64).sum(), work, free_memory)
}

/// Refuses work on a program that does not fit.
///
/// # Errors
/// When the estimate of the work is larger than the free memory.
pub fn check_program(program: &Program, work: Use) -> Result<(), OutOfMemory> {
    let actions: u64 = program.rows().iter().map(|row| row.len() as u64).sum();
    let cells = if program.communicates() { actions / WITH_MESSAGES } else { actions };
    check_cells(cells, work, free_memory)
}

/// Refuses a plan whose programs do not fit into memory, judged by the program with the most replicas and,
/// unless their number is given, without tensor ranks.
///
/// # Errors
/// When the estimate of the search is larger than the free memory.
pub fn check_plan(request: &PlanRequest) -> Result<(), OutOfMemory> {
    let PlanRequest { ranks, microbatches, data_parallel, tensor_parallel, .. } = *request;
    // All replicas have equal numbers of ranks and microbatches.
    // A divisor is not larger than the number.
    let most = || greatest_common_divisor(ranks.into(), microbatches.into()) as u32;
    let replicas = data_parallel.unwrap_or_else(most).max(1);
    let spec = ScheduleSpec {
        ranks: ranks / replicas / tensor_parallel.unwrap_or(1).max(1),
        microbatches: microbatches / replicas,
        ..ScheduleSpec::default()
    };
    check_named(SMALLEST, &spec, Use::Plan)
}

fn check_cells(cells: u64, work: Use, free: impl Fn() -> Option<FreeMemory>) -> Result<(), OutOfMemory> {
    let needed = most_bytes(cells, work);
    if needed < SMALL {
        return Ok(());
    }
    match free() {
        Some(free) if needed > free.bytes => Err(OutOfMemory { cells, needed, free }),
        _ => Ok(()),
    }
}

/// Returns a number of bytes in MiB, or in GiB from 10 GiB on.
fn mebibytes(bytes: u64) -> String {
    match bytes >> 20 {
        mebibytes if mebibytes < 10 << 10 => format!("{mebibytes} MiB"),
        mebibytes => format!("{} GiB", mebibytes >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cells: u64, bytes: u64) -> Option<String> {
        let free = || Some(FreeMemory { bytes, limit: "the machine's memory" });
        check_cells(cells, Use::Simulate, free).err().map(|error| error.to_string())
    }

    #[test]
    fn the_estimate_is_compared_with_the_free_memory() {
        let advice = "use fewer microbatches, stages or ranks, or give the process more memory";
        assert_eq!(of(1 << 20, 512 << 20), None);
        let message = format!(
            "the schedule has up to 1048576 cells and needs up to 512 MiB of memory, and 511 MiB of the machine's memory are \
             free; {advice}"
        );
        assert_eq!(of(1 << 20, (512 << 20) - 1), Some(message));
        // Small schedules always fit.
        assert_eq!(of(1000, 0), None);
    }

    #[test]
    fn cells_of_a_text_are_counted() {
        // Neither of the two is large enough to be refused.
        assert_eq!(check_text("0F0,,0B0\n1F0,1B0", Use::Simulate), Ok(()));
        assert_eq!(check_text("", Use::Simulate), Ok(()));
    }
}
