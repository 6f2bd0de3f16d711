//! The thread that moves the tensors of a rank, one microbatch after another, in the order of the rank's actions.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use pipewright_schedule::{Microbatch, StageIndex};

use super::error::{OffloadError, OffloadErrorKind};
use super::kept::Kept;
use super::place::OffloadTo;
use crate::ids::WorldRank;
use crate::memory::RankMemory;
use crate::rank_thread::{Panicked, RankThread};
use crate::tensor::Values;

/// A stage and a microbatch.
pub(super) type Key = (StageIndex, Microbatch);

/// A request to the thread.
enum Job {
    Write(Key, Values),
    Read(Key),
}

/// A request that is done.
pub(super) struct Done {
    pub(super) key: Key,
    /// The tensors that are back; `None` if they have left.
    pub(super) values: Option<Values>,
    pub(super) start: Instant,
    pub(super) end: Instant,
}

type Answer = Result<Done, OffloadError>;

/// A running thread.
pub(super) struct Mover(RankThread<Job, Answer>);

impl Mover {
    /// Starts the thread. Its allocations count as the rank's.
    pub(super) fn start(place: OffloadTo, rank: WorldRank, memory: RankMemory) -> io::Result<Self> {
        let mut away: HashMap<Key, Kept> = HashMap::new();
        let name = format!("rank-{rank}-offload");
        RankThread::start(name, memory, move |job, _| run(&place, rank, &mut away, job)).map(Self)
    }

    /// Asks for tensors to leave.
    pub(super) fn write(&mut self, key: Key, values: Values) -> Result<(), OffloadError> {
        self.0.ask(Job::Write(key, values)).map_err(|panicked| lost(key, panicked))
    }

    /// Asks for tensors to come back, which were asked to leave before.
    pub(super) fn read(&mut self, key: Key) -> Result<(), OffloadError> {
        self.0.ask(Job::Read(key)).map_err(|panicked| lost(key, panicked))
    }

    /// Returns the next request that is done; `None` if none is after `patience`. `key` is what the rank waits for, for
    /// an error.
    pub(super) fn next(&mut self, key: Key, patience: Duration) -> Result<Option<Done>, OffloadError> {
        self.0.next(patience).map_err(|panicked| lost(key, panicked))?.transpose()
    }
}

/// Does a request. There is no answer if the tensors that are to come back could not leave: the rank has the error already.
fn run(place: &OffloadTo, rank: WorldRank, away: &mut HashMap<Key, Kept>, job: Job) -> Option<Answer> {
    let start = Instant::now();
    let (key, moved) = match job {
        Job::Write(key, values) => {
            let name = format!("rank-{rank}-stage-{}-microbatch-{}", key.0, key.1);
            let written = Kept::write(place, &name, values).map(|kept| drop(away.insert(key, kept)));
            (key, written.map(|()| None))
        }
        Job::Read(key) => (key, away.remove(&key)?.read().map(Some)),
    };
    let done = moved.map(|values| Done { key, values, start, end: Instant::now() });
    Some(done.map_err(|kind| error(key, kind)))
}

fn lost(key: Key, Panicked(message): Panicked) -> OffloadError {
    error(key, OffloadErrorKind::Panicked { message })
}

pub(super) fn error((stage, microbatch): Key, kind: OffloadErrorKind) -> OffloadError {
    OffloadError { stage, microbatch, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_thread_names_its_place() {
        let key = (StageIndex::new(1), Microbatch::new(2));
        let expected = "the inputs that stage 1 keeps of microbatch 2 are lost: the thread that moves them panicked: no space on \
                        the device";
        assert_eq!(lost(key, Panicked("no space on the device".to_owned())).to_string(), expected);
    }
}
