//! Files of the first process on hosts that share no folder with it: the configuration, the weights, the rows of data
//! and the checkpoints travel over MPI.
//!
//! A [`FileService`] in the first process answers questions. A process that does not see the folder of the run has a
//! [`Mirror`]: a folder of its own host with the files that its ranks need, in which the large files have holes. So the
//! code that reads a configuration, weights or a checkpoint is the same on all hosts. `README.md` next to this file has the
//! steps, which `file_exchange` takes.

mod message;
mod client;
mod pieces;
mod service;
mod mirror;
mod remote_rows;
mod files;
#[cfg(test)]
mod tests;

pub(crate) use client::Client;
pub(crate) use files::{Files, RemoteFiles};
pub(crate) use message::Folder;
pub(crate) use mirror::{CACHE, Mirror};
pub(crate) use pieces::{Entry, Wanted, bring, bring_pieces, time_to_send, unwritten};
pub(crate) use remote_rows::{Outlines, RemoteData};
pub(crate) use service::{FileService, Offer, OfferedFolder};
