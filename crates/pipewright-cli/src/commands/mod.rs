//! One file a command: its arguments, and the calls into the libraries that it makes.

pub(crate) mod check;
pub(crate) mod init;
mod launch;
pub(crate) mod partition;
mod prepare;
pub(crate) mod schedule;
pub(crate) mod train;
pub(crate) mod validate;
