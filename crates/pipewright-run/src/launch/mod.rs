//! Runs whose ranks are processes: [`Launch`] starts them with the installed launcher (`mpirun`, or `srun` inside an
//! allocation of Slurm), watches them, and starts them again from the newest state after a fault.
//!
//! `README.md` next to this file has the states of a launch, and says which file does what.

mod hosts;
mod short_command;
mod remote_shell;
mod slurm;
mod binary_copies;
mod starter;
mod watch;
mod processes;
mod answer;
mod meeting;
mod layouts;
mod ended;
mod events;
mod host_table;
mod state;
mod signs;
mod actor;

pub use actor::{Accepts, Launch, Target};
pub use answer::answer;
pub use hosts::{Host, HostSource};
pub use layouts::{Distribution, Layout, Replanner, WholeRun};
pub use meeting::meet;
pub use starter::Starter;
