//! Measured timelines: reads them, puts their ranks on one clock, and finds the program and the costs that
//! they show.
//!
//! A measured step is compared with a prediction of the same program at the same costs: [`program_of`]
//! returns the program, and [`costs_of`] the median costs over several steps, for
//! [`crate::simulate::timed()`].

mod read;
mod ranks;
mod clock;
mod replicas;
mod steps;
mod costs;

pub use clock::on_one_clock;
pub use costs::costs_of;
pub use read::{TraceError, read_trace};
pub use replicas::{MeasuredError, join_replicas, program_of, replicas};
pub use steps::join_steps;
