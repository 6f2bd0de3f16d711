//! The commands, one file each: the arguments of a command and its calls into the other modules.

mod template_kwargs;
pub(crate) mod check;
pub(crate) mod clusters;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod data;
pub(crate) mod devices;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod launch;
pub(crate) mod lower;
pub(crate) mod man;
pub(crate) mod partition;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod report;
pub(crate) mod resume;
pub(crate) mod run_arguments;
pub(crate) mod schedule;
pub(crate) mod simulate;
pub(crate) mod tokenize;
pub(crate) mod train;
pub(crate) mod validate;
pub(crate) mod view;
pub(crate) mod vpp;
