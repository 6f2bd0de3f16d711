//! One file per command: its arguments, and the calls that it makes into the libraries.

pub(crate) mod check;
pub(crate) mod completions;
mod crew;
mod drawing;
mod engine;
pub(crate) mod export;
mod identity;
pub(crate) mod init;
pub(crate) mod inspect;
mod launch;
pub(crate) mod lower;
pub(crate) mod man;
mod origin;
pub(crate) mod partition;
mod prepare;
pub(crate) mod resume;
pub(crate) mod schedule;
mod schedule_file;
mod schedule_size;
pub(crate) mod simulate;
mod simulation_text;
mod steps;
mod stored;
pub(crate) mod train;
pub(crate) mod validate;
pub(crate) mod vpp;
mod weight;
