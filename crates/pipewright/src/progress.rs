//! The progress of every rank, for deadlines and reports.
//!
//! A long wait alone is not a failure: in a deep pipeline the last rank waits while the others compute. A
//! step has failed when *no* rank has made progress for the whole deadline.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pipewright_schedule::{Action, Rank, ValidatedProgram};
use serde::{Deserialize, Serialize};

use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankPosition;
use crate::message::{AwaitedMessage, Tag};

/// How many of a rank's last actions a report shows.
const SHOWN: usize = 32;

/// The progress of all ranks: how many actions each has done, and what it waits for. Clones share the board.
#[derive(Clone, Debug)]
pub(crate) struct ProgressBoard {
    ranks: Arc<[RankProgress]>,
    /// The program that the ranks run.
    program: Arc<Mutex<Option<Arc<ValidatedProgram>>>>,
    /// The ranks that compute each stage together, and run the same row of the program.
    tensor_ranks: Arc<AtomicU32>,
}

/// The progress of one rank, on its own cache line because each rank writes to it at every poll.
#[derive(Debug, Default)]
#[repr(align(64))]
struct RankProgress {
    /// Actions that the rank has done in this step.
    position: AtomicU64,
    /// The step that the rank runs or ran last; 0 before the first.
    step: AtomicU64,
    /// The attempt that the rank of this process runs or ran last; 0 for a rank of another process.
    attempt: AtomicU64,
    /// Moves since the start; it never decreases.
    moves: AtomicU64,
    /// Only the rank itself takes the lock, apart from reports and heartbeats.
    activity: Mutex<Activity>,
    /// Whether the rank has sent no heartbeat for the deadline.
    silent: AtomicBool,
}

/// A message that a rank has sent and whose buffer is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sending {
    /// The receiver.
    pub to: WorldRank,
    /// The purpose of the message.
    pub tag: Tag,
}

impl fmt::Display for Sending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} to take {}", self.to, self.tag)
    }
}

/// The reason why a rank cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// A message has not arrived.
    Receiving(AwaitedMessage),
    /// The buffer of a sent message is not free.
    Sending(Sending),
}

impl From<AwaitedMessage> for Blocked {
    fn from(awaited: AwaitedMessage) -> Self {
        Self::Receiving(awaited)
    }
}

/// A rank's heartbeat.
#[cfg(any(feature = "mpi", test))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// Counts the rank's heartbeats; 0 before the first.
    pub count: u64,
    /// Moves since the start.
    pub moves: u64,
    /// Actions that the rank has done in its step.
    pub position: u64,
    /// The rank's activity.
    pub activity: Activity,
}

/// The activity of a rank, as a report shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Activity {
    /// The rank is between two steps.
    #[default]
    NoStep,
    /// The rank computes.
    Computes,
    /// The rank waits for a message.
    Waits(AwaitedMessage),
    /// The rank waits until a message that it has sent is received.
    Sends(Sending),
}

impl From<Blocked> for Activity {
    fn from(blocked: Blocked) -> Self {
        match blocked {
            Blocked::Receiving(awaited) => Self::Waits(awaited),
            Blocked::Sending(sending) => Self::Sends(sending),
        }
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoStep => f.write_str("is in no step"),
            Self::Computes => f.write_str("computes"),
            Self::Waits(awaited) => write!(f, "waits for {awaited}"),
            Self::Sends(sending) => write!(f, "waits for {sending}"),
        }
    }
}

impl RankProgress {
    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressBoard {
    pub(crate) fn new(ranks: u32) -> Self {
        Self {
            ranks: (0..ranks).map(|_| RankProgress::default()).collect(),
            program: Arc::default(),
            tensor_ranks: Arc::new(AtomicU32::new(1)),
        }
    }

    /// Sets the number of ranks that compute each stage together.
    pub(crate) fn set_tensor_ranks(&self, ranks: u32) {
        self.tensor_ranks.store(ranks.max(1), Ordering::Relaxed);
    }

    /// Returns the row of `program` that a rank runs. Replicas and tensor groups run the same program.
    pub(crate) fn row_of(&self, rank: WorldRank, program: &ValidatedProgram) -> Rank {
        Rank::new(rank.get() / self.tensor_ranks.load(Ordering::Relaxed) % program.ranks())
    }

    /// Records the program, for reports.
    pub(crate) fn set_program(&self, program: &Arc<ValidatedProgram>) {
        *self.lock_program() = Some(program.clone());
    }

    fn lock_program(&self) -> MutexGuard<'_, Option<Arc<ValidatedProgram>>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the attempt that `rank` begins.
    pub(crate) fn set_attempt(&self, rank: WorldRank, attempt: Attempt) {
        self.ranks[rank.index()].attempt.store(attempt.get(), Ordering::Relaxed);
    }

    /// Records the step that `rank` begins.
    pub(crate) fn set_step(&self, rank: WorldRank, step: StepNumber) {
        self.ranks[rank.index()].step.store(step.get(), Ordering::Relaxed);
    }

    fn step_of(&self, rank: WorldRank) -> StepNumber {
        StepNumber::new(self.ranks[rank.index()].step.load(Ordering::Relaxed))
    }

    /// Returns the position of a rank without allocating, for a rank that is out of memory. The step is 0
    /// while another thread changes the program.
    pub(crate) fn locate(&self, rank: WorldRank) -> RankPosition {
        let nowhere = RankPosition { rank, step: StepNumber::default(), action: None };
        let Ok(running) = self.program.try_lock() else { return nowhere };
        let Some(program) = &*running else { return nowhere };
        let step = self.step_of(rank);
        if step == StepNumber::default() {
            // The rank makes its stages, and runs no action.
            return nowhere;
        }
        let row = program.row(self.row_of(rank, program));
        let position = self.ranks[rank.index()].position.load(Ordering::Relaxed) as usize;
        RankPosition { rank, step, action: row.get(position).copied() }
    }

    /// Returns the program that the ranks run, and the number of its actions that `rank` has done.
    pub(crate) fn position_of(&self, rank: WorldRank) -> Option<(Arc<ValidatedProgram>, usize)> {
        let program = self.lock_program().clone();
        let position = self.ranks.get(rank.index())?.position.load(Ordering::Relaxed);
        Some((program?, position as usize))
    }

    /// Returns whether every rank but this one waits for a message or is in no step.
    pub(crate) fn others_wait(&self, rank: WorldRank) -> bool {
        let others = self.ranks.iter().enumerate().filter(|(index, _)| *index != rank.index());
        others.into_iter().all(|(_, other)| *other.activity() != Activity::Computes)
    }

    /// Returns the last step that a rank of this process has begun; 0 before the first.
    #[cfg(feature = "mpi")]
    pub(crate) fn step(&self) -> StepNumber {
        let steps = (0..self.ranks.len() as u32).map(|rank| self.step_of(WorldRank::new(rank)));
        steps.max().unwrap_or_default()
    }

    /// Returns the progress of a rank.
    #[cfg(feature = "mpi")]
    pub(crate) fn progress_of(&self, rank: WorldRank) -> Heartbeat {
        let progress = &self.ranks[rank.index()];
        Heartbeat {
            count: 0,
            moves: progress.moves.load(Ordering::Relaxed),
            position: progress.position.load(Ordering::Relaxed),
            activity: *progress.activity(),
        }
    }

    /// Records the progress of a rank of another process.
    #[cfg(feature = "mpi")]
    pub(crate) fn set_progress(&self, rank: WorldRank, heartbeat: Heartbeat) {
        let progress = &self.ranks[rank.index()];
        progress.moves.store(heartbeat.moves, Ordering::Relaxed);
        progress.position.store(heartbeat.position, Ordering::Relaxed);
        *progress.activity() = heartbeat.activity;
        progress.silent.store(false, Ordering::Relaxed);
    }

    /// Marks a rank of another process as silent until its next heartbeat.
    #[cfg(feature = "mpi")]
    pub(crate) fn mark_silent(&self, rank: WorldRank) {
        self.ranks[rank.index()].silent.store(true, Ordering::Relaxed);
    }

    /// Records that `rank` has done its actions before `position`.
    pub(crate) fn moved(&self, rank: WorldRank, position: usize) {
        let progress = &self.ranks[rank.index()];
        progress.position.store(position as u64, Ordering::Relaxed);
        // Only the rank itself writes here, so a load and a store suffice; `fetch_add` is slower.
        progress.moves.store(progress.moves.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Records that `rank` is alive without having done an action.
    pub(crate) fn keep_alive(&self, rank: WorldRank) {
        let progress = &self.ranks[rank.index()];
        progress.moves.store(progress.moves.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Records what `rank` is doing.
    pub(crate) fn set_activity(&self, rank: WorldRank, activity: Activity) {
        *self.ranks[rank.index()].activity() = activity;
    }

    /// Returns the message that `rank` waits for, if it waits for one.
    pub(crate) fn awaited_by(&self, rank: WorldRank) -> Option<AwaitedMessage> {
        match *self.ranks.get(rank.index())?.activity() {
            Activity::Waits(awaited) => Some(awaited),
            Activity::NoStep | Activity::Computes | Activity::Sends(_) => None,
        }
    }

    /// Returns whether `rank` computes. A rank that waits for others does not.
    pub(crate) fn is_busy(&self, rank: WorldRank) -> bool {
        self.ranks.get(rank.index()).is_some_and(|progress| *progress.activity() == Activity::Computes)
    }

    /// Returns the moves of all ranks together, which changes whenever a rank makes progress.
    pub(crate) fn moves(&self) -> u64 {
        self.ranks.iter().map(|progress| progress.moves.load(Ordering::Relaxed)).sum()
    }

    /// Returns one line per rank: its last actions, its current action, and what it waits for. A rank that is
    /// in the batch after the one that others are in has a note.
    pub(crate) fn report(&self) -> String {
        let program = self.lock_program().clone();
        program.map(|program| self.report_on(&program)).unwrap_or_default()
    }

    /// Returns the first attempt that a rank of this process is in.
    fn first_attempt(&self) -> Option<u64> {
        let runs = self.ranks.iter().filter(|progress| *progress.activity() != Activity::NoStep);
        runs.map(|progress| progress.attempt.load(Ordering::Relaxed)).filter(|attempt| *attempt > 0).min()
    }

    fn report_on(&self, program: &ValidatedProgram) -> String {
        let first = self.first_attempt();
        let lines = (0..self.ranks.len() as u32).map(WorldRank::new).map(|rank| {
            let row = program.row(self.row_of(rank, program));
            let progress = &self.ranks[rank.index()];
            let at = (progress.position.load(Ordering::Relaxed) as usize).min(row.len());
            let done =
                row[at.saturating_sub(SHOWN)..at].iter().map(Action::to_string).collect::<Vec<_>>().join(" ");
            let activity = *progress.activity();
            let silent = if progress.silent.load(Ordering::Relaxed) {
                " is silent; at its last heartbeat"
            } else {
                ""
            };
            let done = match row.get(at) {
                Some(_) if activity == Activity::NoStep => format!("{at} of {} done ({done})", row.len()),
                Some(action) => format!("{at} of {} done ({done}), is at {action}", row.len()),
                None => format!("all {} actions done ({done})", row.len()),
            };
            let is_ahead = first.is_some_and(|first| progress.attempt.load(Ordering::Relaxed) > first);
            let ahead = if is_ahead { ", in the batch that follows" } else { "" };
            format!("  rank {rank}{silent}: {done}, {activity}{ahead}")
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

    const FROM: WorldRank = WorldRank::new(1);

    /// Returns the board of two replicas of two ranks.
    fn board(microbatches: u32) -> ProgressBoard {
        let spec = ScheduleSpec { ranks: 2, microbatches, ..ScheduleSpec::default() };
        let schedule = generate("gpipe", &spec).expect("a schedule");
        let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("it lowers");
        let board = ProgressBoard::new(4);
        board.set_program(&Arc::new(validate(program, Level::Comms).expect("it is sound")));
        board
    }

    /// Checks the report's line of a rank after `position` actions of a program with 2 microbatches.
    fn check(rank: u32, position: usize, activity: Activity, expected: &str) {
        let board = board(2);
        board.moved(WorldRank::new(rank), position);
        board.set_activity(WorldRank::new(rank), activity);
        let report = board.report();
        assert_eq!(report.lines().count(), 4, "{report}");
        assert_eq!(report.lines().nth(rank as usize), Some(expected));
    }

    #[test]
    fn a_report_names_last_actions_and_awaited_messages() {
        let (stage, microbatch) = (StageIndex::new(0), Microbatch::new(1));
        let boundary = Tag::Boundary { direction: Direction::Backward, stage, microbatch };
        let waits = |tag| Activity::Waits(AwaitedMessage { from: FROM, tag });
        check(
            0,
            7,
            waits(boundary),
            "  rank 0: 7 of 8 done (0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1), is at 0B1, waits for the \
             gradients of microbatch 1 for stage 0 from rank 1",
        );
        check(2, 1, Activity::Computes, "  rank 2: 1 of 8 done (0F0), is at 0SEND_F0, computes");
        let (stage, microbatch) = (StageIndex::new(1), Microbatch::new(0));
        let tag = Tag::Boundary { direction: Direction::Forward, stage, microbatch };
        let sending = Activity::from(Blocked::Sending(Sending { to: FROM, tag }));
        let expected = "  rank 0: 2 of 8 done (0F0 0SEND_F0), is at 0F1, waits for rank 1 to take the activations of \
                        microbatch 0 for stage 1";
        check(0, 2, sending, expected);
        let stage = StageIndex::new(0);
        let all = "  rank 3: all 8 actions done (1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1)";
        check(3, 8, Activity::Computes, &format!("{all}, computes"));
        check(3, 8, Activity::NoStep, &format!("{all}, is in no step"));
        check(1, 0, Activity::NoStep, "  rank 1: 0 of 8 done (), is in no step");
        for (tag, what) in [
            (Tag::GradientShard { stage, of_experts: false }, "its part of the gradients of stage 0"),
            (Tag::GradientSum { stage, of_experts: false }, "its sum of gradients of stage 0"),
            (Tag::Parameters, "the list of its parameters"),
            (Tag::Squares, "its squares of gradients"),
            (Tag::Ready, "whether its replica is ready to update"),
            (Tag::Report, "its report of the step"),
            (Tag::Summary, "the summary of the step"),
        ] {
            check(3, 8, waits(tag), &format!("{all}, waits for {what} from rank 1"));
        }
    }

    #[test]
    fn a_report_says_which_ranks_are_in_the_batch_that_follows() {
        let board = board(2);
        let begins = |rank, attempt, activity| {
            board.set_attempt(WorldRank::new(rank), Attempt::new(attempt));
            board.set_activity(WorldRank::new(rank), activity);
        };
        begins(0, 4, Activity::Computes);
        begins(1, 5, Activity::Computes);
        begins(2, 3, Activity::NoStep);
        // Rank 3 is in another process.
        let ahead: Vec<bool> =
            board.report().lines().map(|line| line.ends_with(", in the batch that follows")).collect();
        assert_eq!(ahead, [false, true, false, false]);
    }

    #[test]
    fn a_report_is_limited_to_the_last_actions() {
        let board = board(100);
        board.moved(WorldRank::new(0), 300);
        let report = board.report();
        let line = report.lines().next().expect("a line a rank");
        let (_, actions) = line.split_once('(').expect("actions");
        let (actions, _) = actions.split_once(')').expect("actions");
        assert_eq!(actions.split(' ').count(), SHOWN, "{line}");
        assert!(actions.ends_with("0RECV_B49 0B49"), "{line}");
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn a_rank_is_silent_until_its_next_heartbeat() {
        let board = board(2);
        board.mark_silent(FROM);
        let line =
            |board: &ProgressBoard| board.report().lines().nth(1).map(str::to_owned).expect("a line a rank");
        assert!(
            line(&board).starts_with("  rank 1 is silent; at its last heartbeat: 0 of 8"),
            "{}",
            line(&board)
        );
        board.set_progress(FROM, Heartbeat { activity: Activity::Computes, ..Heartbeat::default() });
        assert_eq!(line(&board), "  rank 1: 0 of 8 done (), is at 1RECV_F0, computes");
    }
}
