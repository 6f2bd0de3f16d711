//! `pipewright launch`: starts the processes of a run with the installed launcher, watches them, and
//! starts them again from the newest checkpoint after a fault.
//!
//! The launcher (`mpirun`, or `srun` inside an allocation of Slurm) starts the processes, passes their output
//! on, and ends all of them when one fails. This module decides on which hosts, in which layout and how often
//! they are started. The processes notice a lost or silent rank by themselves, and write the first cause into
//! the folder of the run ([`pipewright_run::fault`]). A launcher that is stopped, or whose processes are silent, is ended
//! ([`watch`]), and so are processes that it has left behind ([`left_over`]). A run whose folder is lost ends
//! ([`known_run`]).

mod hosts;
mod target;
mod layout;
mod whole_run;
mod short_command;
mod allocation;
mod starter;
mod start_times;
mod watch;
mod attempt;
mod left_over;
mod mark;
mod known_run;
mod answer;
mod replacement;
mod ended;
mod lost_hosts;
mod returning_hosts;
mod growth;
mod wrong_hosts;
mod selection;
mod supervise;
mod host_choice;

pub(crate) use answer::answer;
pub(crate) use hosts::Places;
pub(crate) use starter::Starter;
pub(crate) use supervise::{Launch, supervise};
pub(crate) use target::Target;
