//! Where every rank of a process stands, for whoever wonders whether anything still moves.
//!
//! A wait is not stuck because it is long: in a deep pipeline the last rank waits while the others work. It is stuck
//! when *no* rank has moved for the whole deadline.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pipewright_schedule::{Action, Rank, ValidatedProgram};
use serde::{Deserialize, Serialize};

use crate::memory::RankPlace;
use crate::message::Tag;

/// Actions before a rank's place that a report shows.
const SHOWN: usize = 32;

/// Counts each rank's actions, and holds what each waits for. Sharing is by clone.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    places: Arc<[Place]>,
    /// What the ranks run, and in which step.
    program: Arc<Mutex<(Option<Arc<ValidatedProgram>>, u64)>>,
}

/// A rank's place, on a cache line of its own: each rank writes to its own at every poll.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Place {
    /// Actions that are done in this step.
    position: AtomicU64,
    /// Moves since the start; never goes back.
    moves: AtomicU64,
    /// Nobody but the rank itself wants the lock, save reports and signs of life.
    doing: Mutex<Doing>,
    /// Whether nothing has been heard of the rank for the deadline.
    silent: AtomicBool,
}

/// What a rank waits for, and from which rank of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub from: Rank,
    pub tag: Tag,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from rank {}", self.tag, self.from)
    }
}

/// A rank's sign of life.
#[cfg(any(feature = "mpi", test))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// Counts the rank's signs of life; 0 before the first.
    pub count: u64,
    /// How often it has moved since the start.
    pub moves: u64,
    /// Actions that are done in its step.
    pub position: u64,
    /// What it does, and what it waits for.
    pub doing: Doing,
}

/// What a rank does, as far as a report tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Doing {
    /// It has not begun a step, or has ended it.
    #[default]
    NoStep,
    /// It can go on, and does.
    Computes,
    /// It goes on when something has arrived.
    Waits(Waiting),
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoStep => f.write_str("is in no step"),
            Self::Computes => f.write_str("computes"),
            Self::Waits(blocked) => write!(f, "waits for {blocked}"),
        }
    }
}

impl Place {
    fn doing(&self) -> MutexGuard<'_, Doing> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Board {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { places: (0..ranks).map(|_| Place::default()).collect(), program: Arc::default() }
    }

    /// Notes what the ranks run, and in which step, for reports.
    pub(crate) fn run(&self, program: &Arc<ValidatedProgram>, step: u64) {
        *self.program.lock().unwrap_or_else(PoisonError::into_inner) = (Some(program.clone()), step);
    }

    /// Where a rank stands, without allocating: for one whose memory is at its end. The step is unknown, and 0, while
    /// somebody changes the program.
    pub(crate) fn locate(&self, rank: Rank) -> RankPlace {
        let nowhere = RankPlace { rank, step: 0, action: None };
        let Ok(running) = self.program.try_lock() else { return nowhere };
        let (Some(program), step) = &*running else { return nowhere };
        let row = program.row(Rank::new(rank.get() % program.ranks()));
        let position = self.places[rank.index()].position.load(Ordering::Relaxed) as usize;
        RankPlace { rank, step: *step, action: row.get(position).copied() }
    }

    /// The step under way; 0 before the first.
    #[cfg(feature = "mpi")]
    pub(crate) fn step(&self) -> u64 {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Where a rank stands.
    #[cfg(feature = "mpi")]
    pub(crate) fn place(&self, rank: Rank) -> Heartbeat {
        let place = &self.places[rank.index()];
        Heartbeat {
            count: 0,
            moves: place.moves.load(Ordering::Relaxed),
            position: place.position.load(Ordering::Relaxed),
            doing: *place.doing(),
        }
    }

    /// Notes where a rank of another process stands.
    #[cfg(feature = "mpi")]
    pub(crate) fn set_place(&self, rank: Rank, heartbeat: Heartbeat) {
        let place = &self.places[rank.index()];
        place.moves.store(heartbeat.moves, Ordering::Relaxed);
        place.position.store(heartbeat.position, Ordering::Relaxed);
        *place.doing() = heartbeat.doing;
        place.silent.store(false, Ordering::Relaxed);
    }

    /// Notes that nothing is heard of a rank of another process; until it is heard of again.
    #[cfg(feature = "mpi")]
    pub(crate) fn falls_silent(&self, rank: Rank) {
        self.places[rank.index()].silent.store(true, Ordering::Relaxed);
    }

    /// Notes that `rank` stands before action `position`.
    pub(crate) fn moved(&self, rank: Rank, position: usize) {
        let place = &self.places[rank.index()];
        place.position.store(position as u64, Ordering::Relaxed);
        // Only the rank itself writes here, so a load and a store do what a slower `fetch_add` would.
        place.moves.store(place.moves.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Notes that `rank` is alive, in the same place.
    pub(crate) fn keep_alive(&self, rank: Rank) {
        let place = &self.places[rank.index()];
        place.moves.store(place.moves.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Notes what `rank` does.
    pub(crate) fn does(&self, rank: Rank, doing: Doing) {
        *self.places[rank.index()].doing() = doing;
    }

    /// Moves of all ranks together. It changes whenever anybody moves.
    pub(crate) fn moves(&self) -> u64 {
        self.places.iter().map(|place| place.moves.load(Ordering::Relaxed)).sum()
    }

    /// A line a rank: its last actions, what it is at, what it waits for.
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
            let doing = *place.doing();
            let silent = match place.silent.load(Ordering::Relaxed) {
                true => " is silent; when last heard of",
                false => "",
            };
            let done = match row.get(at) {
                Some(_) if doing == Doing::NoStep => format!("{at} of {} done ({done})", row.len()),
                Some(action) => format!("{at} of {} done ({done}), is at {action}", row.len()),
                None => format!("all {} actions done ({done})", row.len()),
            };
            format!("  rank {rank}{silent}: {done}, {doing}")
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::{
        Level, LowerConfig, Microbatch, ScheduleSpec, StageIndex, generate, lower, validate,
    };

    use super::*;
    use crate::message::Direction;

    const FROM: Rank = Rank::new(1);

    /// Two replicas of two ranks with so many microbatches.
    fn board(microbatches: u32) -> Board {
        let spec = ScheduleSpec { ranks: 2, microbatches, ..ScheduleSpec::default() };
        let schedule = generate("gpipe", &spec).expect("a schedule");
        let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("it lowers");
        let board = Board::new(4);
        board.run(&Arc::new(validate(program, Level::Comms).expect("it is sound")), 1);
        board
    }

    /// What the report says of a rank that has done so many actions of 2 microbatches' and does this.
    fn check(rank: u32, position: usize, doing: Doing, expected: &str) {
        let board = board(2);
        board.moved(Rank::new(rank), position);
        board.does(Rank::new(rank), doing);
        let report = board.report();
        assert_eq!(report.lines().count(), 4, "{report}");
        assert_eq!(report.lines().nth(rank as usize), Some(expected));
    }

    #[test]
    fn a_rank_is_told_with_what_it_did_and_what_it_waits_for() {
        let (stage, microbatch) = (StageIndex::new(0), Microbatch::new(1));
        let boundary = Tag::Boundary { direction: Direction::Backward, stage, microbatch };
        let waits = |tag| Doing::Waits(Waiting { from: FROM, tag });
        check(
            0,
            7,
            waits(boundary),
            "  rank 0: 7 of 8 done (0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1), is at 0B1, waits for the \
             gradients of microbatch 1 for stage 0 from rank 1",
        );
        check(2, 1, Doing::Computes, "  rank 2: 1 of 8 done (0F0), is at 0SEND_F0, computes");
        let all = "  rank 3: all 8 actions done (1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1)";
        check(3, 8, Doing::Computes, &format!("{all}, computes"));
        check(3, 8, Doing::NoStep, &format!("{all}, is in no step"));
        check(1, 0, Doing::NoStep, "  rank 1: 0 of 8 done (), is in no step");
        for (tag, what) in [
            (Tag::GradientShard { stage }, "its part of the gradients of stage 0"),
            (Tag::GradientSum { stage }, "its sum of gradients of stage 0"),
            (Tag::Parameters, "the list of its parameters"),
            (Tag::GradientNorm, "its part of the gradient norm"),
            (Tag::Ready, "whether its replica is ready to update"),
            (Tag::Report, "its report of the step"),
            (Tag::Summary, "the summary of the step"),
        ] {
            check(3, 8, waits(tag), &format!("{all}, waits for {what} from rank 1"));
        }
    }

    #[test]
    fn the_last_actions_are_told_and_no_more() {
        let board = board(100);
        board.moved(Rank::new(0), 300);
        let report = board.report();
        let line = report.lines().next().expect("a line a rank");
        let (_, actions) = line.split_once('(').expect("actions");
        let (actions, _) = actions.split_once(')').expect("actions");
        assert_eq!(actions.split(' ').count(), SHOWN, "{line}");
        assert!(actions.ends_with("0RECV_B49 0B49"), "{line}");
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn a_silent_rank_is_told_as_such_until_it_is_heard_of() {
        let board = board(2);
        board.falls_silent(FROM);
        let line = |board: &Board| board.report().lines().nth(1).map(str::to_owned).expect("a line a rank");
        assert!(
            line(&board).starts_with("  rank 1 is silent; when last heard of: 0 of 8"),
            "{}",
            line(&board)
        );
        board.set_place(FROM, Heartbeat { doing: Doing::Computes, ..Heartbeat::default() });
        assert_eq!(line(&board), "  rank 1: 0 of 8 done (), is at 1RECV_F0, computes");
    }
}
