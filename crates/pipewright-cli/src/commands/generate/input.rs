//! Standard input, which a thread reads, so that a rank that fails ends the wait for a text.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Builder;

use pipewright_planning::failure::{Exit, Failure};

use crate::commands::generate::ranks::Ranks;

/// Returns what `read` sends on a thread of its own. The thread ends with `read`, or with the process.
pub(super) fn read_aside<T: Send + 'static>(
    read: impl FnOnce(&SyncSender<T>) + Send + 'static,
) -> Result<Receiver<T>, Failure> {
    let (sender, receiver) = sync_channel(1);
    let thread = Builder::new().name("standard input".to_owned()).spawn(move || read(&sender));
    thread.map(|_| receiver).map_err(|error| {
        let message = format!("the thread that reads standard input cannot be started: {error}");
        Failure::new(Exit::RankFailed, message)
    })
}

/// Returns the text that `read` reads, unless a rank fails first.
pub(super) fn read_once(
    ranks: &mut Ranks,
    read: impl FnOnce() -> Result<String, Failure> + Send + 'static,
) -> Result<String, Failure> {
    let texts = read_aside(move |texts| {
        // The receiver is gone if a rank has failed.
        let _ = texts.send(read());
    })?;
    ranks.next_of(&texts)?.unwrap_or_else(|| Err(Failure::input("standard input cannot be read")))
}
