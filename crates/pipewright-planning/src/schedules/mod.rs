//! Schedules and programs for the commands: where they come from, their sizes and memory, and how they are
//! shown.

pub mod drawing;
pub(crate) mod simulation_text;
pub mod size;
pub mod timed_program;
pub mod delayed;
pub mod transport;
pub(crate) mod transport_price;
pub(crate) mod verdicts;
