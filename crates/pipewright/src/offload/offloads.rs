//! The tensors of a rank that have left memory, as the executor sees them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::error::{OffloadError, OffloadErrorKind};
use super::mover::{Done, Key, Mover, error};
use super::place::OffloadTo;
use crate::ids::WorldRank;
use crate::memory::RankMemory;
use crate::rank_thread::LOOK;
use crate::tensor::Values;

/// The tensors of a rank that have left memory.
pub(crate) struct Offloads {
    place: OffloadTo,
    rank: WorldRank,
    memory: RankMemory,
    /// Started with the first tensors that leave.
    mover: Option<Mover>,
    /// The tensors that have not been taken back; `Some` if they have arrived.
    away: HashMap<Key, Option<Reloaded>>,
    /// The transfers that have ended and are not reported.
    transfers: Vec<Transfer>,
}

/// The time of an `OFFLOAD` or a `RELOAD`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) action: Action,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

/// Tensors that are back in memory.
pub(crate) struct Reloaded {
    pub(crate) values: Values,
    /// The start of the transfer.
    pub(crate) start: Instant,
}

impl Offloads {
    /// Returns the state of a rank whose tensors are all in memory.
    pub(crate) fn new(place: OffloadTo, rank: WorldRank, memory: RankMemory) -> Self {
        Self { place, rank, memory, mover: None, away: HashMap::new(), transfers: Vec::new() }
    }

    /// Lets tensors leave, in the order of the calls.
    pub(crate) fn offload(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
        values: Values,
    ) -> Result<(), OffloadError> {
        let key = (stage, microbatch);
        let mover = match &mut self.mover {
            Some(mover) => mover,
            none => none.insert(
                Mover::start(self.place.clone(), self.rank, self.memory.clone())
                    .map_err(|source| error(key, OffloadErrorKind::Thread { source }))?,
            ),
        };
        self.away.insert(key, None);
        mover.write(key, values)
    }

    /// Lets tensors come back.
    pub(crate) fn reload(&mut self, stage: StageIndex, microbatch: Microbatch) -> Result<(), OffloadError> {
        match &mut self.mover {
            Some(mover) => mover.read((stage, microbatch)),
            None => Ok(()),
        }
    }

    /// Waits until tensors are back, and returns them; `None` if they have not left, or if `is_stopped` returns true
    /// meanwhile.
    ///
    /// # Errors
    /// When a transfer has failed, or takes longer than `deadline`.
    pub(crate) fn wait(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
        deadline: Duration,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Option<Reloaded>, OffloadError> {
        let key = (stage, microbatch);
        let (Some(mover), true) = (&mut self.mover, self.away.contains_key(&key)) else { return Ok(None) };
        let begin = Instant::now();
        while self.away.get(&key).is_some_and(Option::is_none) {
            if is_stopped() {
                return Ok(None);
            }
            let waited = begin.elapsed();
            if waited >= deadline {
                return Err(error(key, OffloadErrorKind::Deadline { waited }));
            }
            if let Some(done) = mover.next(key, LOOK.min(deadline - waited))? {
                let Done { key: (stage, microbatch), values, start, end } = done;
                let action = match values {
                    None => Action::Offload { stage, microbatch },
                    Some(values) => {
                        self.away.insert((stage, microbatch), Some(Reloaded { values, start }));
                        Action::Reload { stage, microbatch }
                    }
                };
                self.transfers.push(Transfer { action, start, end });
            }
        }
        Ok(self.away.remove(&key).flatten())
    }

    /// Takes out the transfers that have ended since the last call.
    pub(crate) fn take_transfers(&mut self) -> impl Iterator<Item = Transfer> {
        self.transfers.drain(..)
    }

    /// Drops all tensors that have left, with their files.
    pub(crate) fn clear(&mut self) {
        self.mover = None;
        self.away.clear();
        self.transfers.clear();
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::tensor::{pack, unpack};

    fn offloads(place: OffloadTo) -> Offloads {
        Offloads::new(place, WorldRank::new(0), RankMemory::new())
    }

    fn tensor(number: f32) -> Values {
        pack(Tensor::<1>::from_data([number, -number], &Device::flex()))
    }

    fn taken(offloads: &mut Offloads, microbatch: u32) -> Result<Option<Vec<f32>>, OffloadError> {
        let microbatch = Microbatch::new(microbatch);
        let found = offloads.wait(StageIndex::new(0), microbatch, Duration::from_secs(20), || false)?;
        let numbers = |values| {
            unpack::<Tensor<1>>(values).expect("a vector").into_data().try_to_vec::<f32>().expect("f32")
        };
        Ok(found.map(|found| numbers(found.values)))
    }

    #[test]
    fn tensors_come_back_to_their_microbatch() {
        let folder = tempfile::tempdir().expect("a folder");
        for place in [OffloadTo::Host, OffloadTo::Folder(folder.path().to_owned())] {
            let (mut offloads, stage) = (offloads(place), StageIndex::new(0));
            for round in [1.0, 10.0] {
                for number in 0..3u32 {
                    let values = tensor(round + number as f32);
                    offloads.offload(stage, Microbatch::new(number), values).expect("it leaves");
                }
                for number in [2, 0, 1] {
                    offloads.reload(stage, Microbatch::new(number)).expect("it comes back");
                }
                for number in [1, 0, 2u32] {
                    let expected = round + number as f32;
                    let found = taken(&mut offloads, number).expect("it is back");
                    assert_eq!(found, Some(vec![expected, -expected]));
                    assert_eq!(taken(&mut offloads, number).expect("it is taken"), None);
                }
                let transfers: Vec<Transfer> = offloads.take_transfers().collect();
                assert_eq!(transfers.len(), 6);
                assert!(transfers.windows(2).all(|pair| pair[0].end <= pair[1].start), "one after another");
            }
        }
    }

    #[test]
    fn a_wait_ends() {
        let (mut offloads, stage) = (offloads(OffloadTo::Host), StageIndex::new(0));
        let microbatch = Microbatch::new(4);
        offloads.offload(stage, microbatch, tensor(1.0)).expect("it leaves");
        let error = offloads.wait(stage, microbatch, Duration::from_millis(20), || false);
        let Err(error) = error else { panic!("it never comes back") };
        let message = error.to_string();
        assert!(
            message.starts_with("the inputs that stage 0 keeps of microbatch 4 have not come back after"),
            "{message}"
        );
        let stopped = offloads.wait(stage, microbatch, Duration::from_secs(60), || true);
        assert!(matches!(stopped, Ok(None)));
        offloads.clear();
        assert_eq!(taken(&mut offloads, 4).expect("nothing is away"), None);
    }

    #[test]
    fn a_failed_transfer_names_its_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut offloads, stage) =
            (offloads(OffloadTo::Folder(folder.path().join("missing"))), StageIndex::new(0));
        offloads.offload(stage, Microbatch::new(0), tensor(1.0)).expect("it is asked for");
        offloads.reload(stage, Microbatch::new(0)).expect("it is asked for");
        let message = taken(&mut offloads, 0).expect_err("no such folder").to_string();
        assert!(
            message.starts_with("the inputs that stage 0 keeps of microbatch 0 cannot be written to `"),
            "{message}"
        );
        assert!(message.contains("missing"), "{message}");
    }
}
