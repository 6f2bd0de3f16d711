//! Measures what the layers of a model cost on the device at hand, for plans and predictions.
//!
//! [`measure`] runs a short model: the first layer, the last layer, and a few layers of each kind between them, each
//! range of equal layers as a stage of its own. All stages are on one rank, and as many such ranks run at the
//! same time as a training run has, because ranks share caches, memory bandwidth and the clock rate of a
//! machine. The result is the median of each action, the memory that each kind of layer keeps, the times in which
//! backwards compute parts of layers again, and the time after the program.
//!
//! A model of a hundred equal layers takes no longer to measure than one of two.
//!
//! [`Measured::profile`] makes a [`Profile`](pipewright_schedule::profile::Profile) of it. Figures that cannot be
//! measured, such as the memory on a device that does not report it, are estimated, and the profile says
//! which.

mod quartiles;
mod pace;
mod sample;
mod probe;
mod program;
mod measured;
mod measure;
mod unlike;
mod assemble;

pub use measure::{MeasureConfig, measure};
pub use measured::{KindFigures, Measured};
pub use quartiles::Quartiles;
pub use unlike::{MeasuredRank, unlike_links, unlike_ranks};
