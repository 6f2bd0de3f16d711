//! The steps in which the processes of a run exchange the files of the first one, if their hosts share no folder. The parts
//! are in `training/remote_files`, whose `README.md` has the order of the steps.

mod exchange;
mod fetch;

pub(crate) use exchange::{begin_new, begin_resumed, share_rows, share_state};
pub(crate) use fetch::fetch_parameters;
