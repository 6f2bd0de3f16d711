#![doc = include_str!("README.md")]

mod hosts;
mod short_command;
mod slurm;
mod starter;
mod watch;
mod processes;
mod answer;
mod layouts;
mod ended;
mod host_table;
mod state;
mod signs;
mod actor;

pub use actor::{Launch, Target};
pub use answer::answer;
pub use hosts::Host;
pub use layouts::{Distribution, Layout, Replanner, WholeRun};
pub use starter::Starter;
