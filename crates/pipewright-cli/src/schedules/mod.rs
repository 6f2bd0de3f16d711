//! Schedules and programs for the commands: where they come from, their sizes and memory, and how they are
//! shown.

pub(crate) mod drawing;
pub(crate) mod layer_weights;
pub(crate) mod other_sizes;
pub(crate) mod simulation_text;
pub(crate) mod size;
pub(crate) mod timed_program;
pub(crate) mod transport;
pub(crate) mod transport_price;
pub(crate) mod verdicts;
