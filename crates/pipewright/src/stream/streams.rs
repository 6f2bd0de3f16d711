//! The stages whose matrices are in memory or asked for, as the executor sees them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{Action, StageIndex};

use super::error::{StreamError, StreamErrorKind};
use crate::ids::WorldRank;
use crate::memory::{LoadedMatrices, RankMemory, StreamedMatrix};
use crate::offload::Transfer;
use crate::rank_thread::{LOOK, Panicked, RankThread};

type Job = (StageIndex, Vec<Arc<StreamedMatrix>>);

/// The stages of a rank whose matrices are in memory or asked for.
pub(crate) struct Streams {
    rank: WorldRank,
    memory: RankMemory,
    /// Started with the first stage that is read.
    reader: Option<RankThread<Job, Result<Read, StreamError>>>,
    /// `None` until the matrices are in memory.
    stages: HashMap<StageIndex, Option<LoadedMatrices>>,
    /// The reads that have ended and are not reported.
    reads: Vec<Transfer>,
}

/// A stage that was read.
struct Read {
    stage: StageIndex,
    matrices: LoadedMatrices,
    start: Instant,
    end: Instant,
}

impl Streams {
    /// Returns the state of a rank that has read nothing.
    pub(crate) fn new(rank: WorldRank, memory: RankMemory) -> Self {
        Self { rank, memory, reader: None, stages: HashMap::new(), reads: Vec::new() }
    }

    /// Lets the matrices of a stage be read, in the order of the calls.
    pub(crate) fn ask(
        &mut self,
        stage: StageIndex,
        matrices: Vec<Arc<StreamedMatrix>>,
    ) -> Result<(), StreamError> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                let name = format!("rank-{}-stream", self.rank);
                let run = |job, continues: &dyn Fn() -> bool| Some(read(job, continues));
                let thread = RankThread::start(name, self.memory.clone(), run);
                let failed = |source| StreamError { stage, kind: StreamErrorKind::Thread { source } };
                none.insert(thread.map_err(failed)?)
            }
        };
        let asked = reader.ask((stage, matrices));
        self.stages.insert(stage, None);
        asked.map_err(|panicked| lost(stage, panicked))
    }

    /// Returns whether a stage was asked for and not dropped.
    pub(crate) fn has(&self, stage: StageIndex) -> bool {
        self.stages.contains_key(&stage)
    }

    /// Waits until the matrices of a stage are in memory if they were asked for, or until `is_stopped` returns true. Returns
    /// the time since when it has waited; `None` if it has not waited.
    ///
    /// # Errors
    /// When a read has failed, or takes longer than `deadline`.
    pub(crate) fn wait(
        &mut self,
        stage: StageIndex,
        deadline: Duration,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Option<Instant>, StreamError> {
        let mut since = None;
        while self.stages.get(&stage).is_some_and(Option::is_none) && !is_stopped() {
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            if waited >= deadline {
                return Err(StreamError { stage, kind: StreamErrorKind::Deadline { waited } });
            }
            let Some(reader) = &mut self.reader else { break };
            let next = reader.next(LOOK.min(deadline - waited));
            if let Some(read) = next.map_err(|panicked| lost(stage, panicked))? {
                let Read { stage, matrices, start, end } = read?;
                self.stages.insert(stage, Some(matrices));
                self.reads.push(Transfer { action: Action::Unshard { stage }, start, end });
            }
        }
        Ok(since)
    }

    /// Drops the matrices of a stage, which are in memory.
    pub(crate) fn release(&mut self, stage: StageIndex) {
        self.stages.remove(&stage);
    }

    /// Takes out the reads that have ended since the last call.
    pub(crate) fn take_reads(&mut self) -> impl Iterator<Item = Transfer> {
        self.reads.drain(..)
    }

    /// Drops all matrices, and ends the thread.
    pub(crate) fn clear(&mut self) {
        self.reader = None;
        self.stages.clear();
        self.reads.clear();
    }
}

fn lost(stage: StageIndex, Panicked(message): Panicked) -> StreamError {
    StreamError { stage, kind: StreamErrorKind::Panicked { message } }
}

fn read((stage, matrices): Job, continues: &dyn Fn() -> bool) -> Result<Read, StreamError> {
    let start = Instant::now();
    let read = LoadedMatrices::read(matrices, continues);
    let failed = |(matrix, source)| StreamError { stage, kind: StreamErrorKind::Read { matrix, source } };
    read.map(|matrices| Read { stage, matrices, start, end: Instant::now() }).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use pipewright_kernel::quantised::{FloatType, Form, Plain, QuantisedMatrix};

    use super::*;
    use crate::memory::ReadError;

    const LONG: Duration = Duration::from_secs(20);

    fn streams() -> Streams {
        Streams::new(WorldRank::new(3), RankMemory::new())
    }

    fn matrix(read: impl Fn() -> Result<(), ReadError> + Send + Sync + 'static) -> Vec<Arc<StreamedMatrix>> {
        let read = move || {
            read()?;
            let plain = Plain::new([1, 1], vec![0; 2], FloatType::Bf16).expect("a zero");
            Ok(QuantisedMatrix::new(1, Form::Plain(plain)))
        };
        vec![Arc::new(StreamedMatrix::new("a.weight".to_owned(), [1, 1], read))]
    }

    fn stage(index: u32) -> StageIndex {
        StageIndex::new(index)
    }

    #[test]
    fn stages_are_read_in_the_order_of_the_requests() {
        let mut streams = streams();
        for round in 0..2 {
            (0..3).for_each(|index| streams.ask(stage(index), matrix(|| Ok(()))).expect("it is asked for"));
            streams.wait(stage(2), LONG, || false).expect("it is read");
            let reads: Vec<Transfer> = streams.take_reads().collect();
            let actions: Vec<String> = reads.iter().map(|read| read.action.to_string()).collect();
            assert_eq!(actions, ["0UNSHARD", "1UNSHARD", "2UNSHARD"], "round {round}");
            assert!(reads.windows(2).all(|pair| pair[0].end <= pair[1].start));
            // The others are in memory already.
            assert!(streams.wait(stage(0), Duration::ZERO, || false).expect("it is there").is_none());
            (0..3).for_each(|index| streams.release(stage(index)));
            assert!(!streams.has(stage(0)));
        }
    }

    #[test]
    fn failures_name_the_stage_and_the_matrix() {
        let check = |read: fn() -> Result<(), ReadError>, deadline, expected: &str| {
            let mut streams = streams();
            streams.ask(stage(5), matrix(read)).expect("it is asked for");
            let error = streams.wait(stage(5), deadline, || false).expect_err("it fails").to_string();
            assert!(error.starts_with(expected), "{error}");
        };
        let gone = "the base of stage 5 cannot be read at `a.weight`: no disk";
        check(|| Err("no disk".into()), LONG, gone);
        let panicked = "the base of stage 5 cannot be read: the thread that reads it panicked: no memory";
        check(|| panic!("no memory"), LONG, panicked);
        let slow = || {
            thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        check(slow, Duration::from_millis(1), "the base of stage 5 is not in memory after 0.");
    }

    #[test]
    fn a_failure_of_another_rank_ends_a_wait() {
        let mut streams = streams();
        let slow = || {
            thread::sleep(Duration::from_millis(300));
            Ok(())
        };
        streams.ask(stage(0), matrix(slow)).expect("it is asked for");
        streams.wait(stage(0), LONG, || true).expect("it is not an error");
        streams.clear();
        assert!(!streams.has(stage(0)));
        assert!(streams.wait(stage(0), LONG, || false).expect("nothing is asked for").is_none());
    }
}
