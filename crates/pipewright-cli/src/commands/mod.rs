//! The commands, one file each: the arguments of a command and its calls into the other modules.

mod template_kwargs;
pub(crate) mod add_tokens;
pub(crate) mod audit;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod data;
pub(crate) mod devices;
pub(crate) mod export;
pub(crate) mod fingerprint;
pub(crate) mod generate;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod launch;
pub(crate) mod man;
pub(crate) mod partition;
pub(crate) mod profile;
pub(crate) mod quantize;
pub(crate) mod report;
pub(crate) mod resume;
pub(crate) mod run_arguments;
pub(crate) mod tokenize;
pub(crate) mod train;
pub(crate) mod view;
pub(crate) mod watch;
