//! Where every rank of a process stands, for whoever wonders whether anything still moves.
//!
//! A wait is not stuck because it is long: in a deep pipeline the last rank waits while the others work. It is stuck
//! when *no* rank has moved for the whole deadline.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pipewright_schedule::{Action, Rank, ValidatedProgram};

#[cfg(feature = "mpi")]
use crate::transport::Beat;
use crate::transport::{Direction, Tag};

/// Actions before a rank's place that a report shows.
const SHOWN: usize = 32;

/// Counts each rank's actions. Sharing is by clone.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    places: Arc<[Place]>,
    /// What the ranks run, and in which step.
    program: Arc<Mutex<(Option<Arc<ValidatedProgram>>, u64)>>,
}

#[derive(Debug, Default)]
struct Place {
    /// Actions that are done in this step.
    position: AtomicU64,
    /// Moves since the start; never goes back.
    moves: AtomicU64,
    /// Whether the rank found its next action blocked.
    waits: AtomicBool,
}

impl Board {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { places: (0..ranks).map(|_| Place::default()).collect(), program: Arc::default() }
    }

    /// Notes what the ranks run, and in which step, for reports.
    pub(crate) fn run(&self, program: &Arc<ValidatedProgram>, step: u64) {
        *self.program.lock().unwrap_or_else(PoisonError::into_inner) = (Some(program.clone()), step);
    }

    /// The step under way; 0 before the first.
    #[cfg(feature = "mpi")]
    pub(crate) fn step(&self) -> u64 {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Where a rank stands.
    #[cfg(feature = "mpi")]
    pub(crate) fn place(&self, rank: Rank) -> Beat {
        let place = &self.places[rank.index()];
        Beat {
            count: 0,
            moves: place.moves.load(Ordering::Relaxed),
            position: place.position.load(Ordering::Relaxed),
            waits: place.waits.load(Ordering::Relaxed),
        }
    }

    /// Notes where a rank of another process stands.
    #[cfg(feature = "mpi")]
    pub(crate) fn set_place(&self, rank: Rank, beat: Beat) {
        let place = &self.places[rank.index()];
        place.moves.store(beat.moves, Ordering::Relaxed);
        place.position.store(beat.position, Ordering::Relaxed);
        place.waits.store(beat.waits, Ordering::Relaxed);
    }

    /// Notes that `rank` stands before action `position`.
    pub(crate) fn moved(&self, rank: Rank, position: usize) {
        let place = &self.places[rank.index()];
        place.position.store(position as u64, Ordering::Relaxed);
        place.waits.store(false, Ordering::Relaxed);
        // Only the rank itself writes here, so a load and a store do what a slower `fetch_add` would.
        place.moves.store(place.moves.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Notes that `rank` is alive, in the same place.
    pub(crate) fn keep_alive(&self, rank: Rank) {
        let place = &self.places[rank.index()];
        place.moves.store(place.moves.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Notes that `rank` cannot go on.
    pub(crate) fn waits(&self, rank: Rank) {
        self.places[rank.index()].waits.store(true, Ordering::Relaxed);
    }

    /// Moves of all ranks together. It changes whenever anybody moves.
    pub(crate) fn moves(&self) -> u64 {
        self.places.iter().map(|place| place.moves.load(Ordering::Relaxed)).sum()
    }

    /// A line a rank: its place, what it did last, what it is at.
    pub(crate) fn report(&self) -> String {
        let (program, _) = self.program.lock().unwrap_or_else(PoisonError::into_inner).clone();
        program.map(|program| self.report_on(&program)).unwrap_or_default()
    }

    fn report_on(&self, program: &ValidatedProgram) -> String {
        // Replicas run the same program.
        let pipeline = program.ranks();
        let lines = (0..self.places.len() as u32).map(Rank::new).map(|rank| {
            let row = program.row(Rank::new(rank.get() % pipeline));
            let place = &self.places[rank.index()];
            let at = (place.position.load(Ordering::Relaxed) as usize).min(row.len());
            let done =
                row[at.saturating_sub(SHOWN)..at].iter().map(Action::to_string).collect::<Vec<_>>().join(" ");
            match row.get(at) {
                Some(action) => {
                    let waits = awaited(*action, program, rank.get() / pipeline * pipeline)
                        .map(|wait| format!(", waits for {wait}"))
                        .unwrap_or_default();
                    format!("  rank {rank}: {at} of {} done ({done}), is at {action}{waits}", row.len())
                }
                None => format!("  rank {rank}: all {} actions done ({done})", row.len()),
            }
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// What a blocked action waits for, in words; `first` is the first rank of its replica.
fn awaited(action: Action, program: &ValidatedProgram, first: u32) -> Option<String> {
    let placement = program.placement();
    // An overlap waits for its forward's input first.
    let action = action.parts().next()?;
    let microbatch = action.microbatch()?;
    let stage = action.stage();
    let (direction, source) = match action {
        Action::Forward { .. } => (Direction::Forward, placement.previous(stage)?),
        _ => (Direction::Backward, placement.next(stage)?),
    };
    let tag = Tag::Boundary { direction, stage, microbatch };
    Some(format!("{tag} from rank {}", first + placement.rank_of(source).get()))
}
