//! Heartbeats: spread the progress of each rank among the processes, and find ranks that are silent.
//!
//! Each process keeps a table with one line per rank. At its `k`-th heartbeat it increments its own line and
//! sends the table to the rank `2^(k mod log2 n)` further on (dissemination, as in the barrier of Hensgen,
//! Finkel and Manber, 1988); a receiver keeps the newer of two lines. So with one frame per process and
//! heartbeat, a line reaches all `n` ranks within `log2 n` heartbeats.

use std::time::{Duration, Instant};

use crate::ids::WorldRank;
use crate::progress::{Heartbeat, ProgressBoard};

/// Heartbeats per deadline; they are sent at least every [`SLOWEST`].
const BEATS_IN_DEADLINE: u32 = 40;
const SLOWEST: Duration = Duration::from_millis(100);

fn period(deadline: Duration) -> Duration {
    (deadline / BEATS_IN_DEADLINE).clamp(Duration::from_millis(1), SLOWEST)
}

/// Returns how long after the deadline the last process learns that a rank is silent.
pub(super) fn detection_lag(ranks: u32, deadline: Duration) -> Duration {
    period(deadline) * (2 + ranks.next_power_of_two().trailing_zeros())
}

/// A process's table of all ranks.
pub(super) struct Heartbeats {
    own: WorldRank,
    lines: Vec<Heartbeat>,
    /// When each line last changed.
    heard: Vec<Instant>,
    sent: Instant,
    looked: Instant,
    /// When this process last continued after it had been stopped.
    stopped: Option<Instant>,
    deadline: Duration,
}

impl Heartbeats {
    pub(super) fn new(own: WorldRank, ranks: u32, deadline: Duration, at: Instant) -> Self {
        let (lines, heard) = (vec![Heartbeat::default(); ranks as usize], vec![at; ranks as usize]);
        Self { own, lines, heard, sent: at, looked: at, stopped: None, deadline }
    }

    pub(super) fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Returns the time between two heartbeats.
    pub(super) fn period(&self) -> Duration {
        period(self.deadline)
    }

    /// Returns the table and its receiver if a heartbeat is due.
    pub(super) fn due(&mut self, board: &ProgressBoard, at: Instant) -> Option<(WorldRank, Vec<Heartbeat>)> {
        let ranks = self.lines.len() as u32;
        if ranks < 2 || at.saturating_duration_since(self.sent) < self.period() {
            return None;
        }
        self.sent = at;
        let count = self.lines[self.own.index()].count + 1;
        self.lines[self.own.index()] = Heartbeat { count, ..board.progress_of(self.own) };
        let hops = ranks.next_power_of_two().trailing_zeros();
        let distance = 1u32 << ((count - 1) % u64::from(hops));
        let partner = WorldRank::new((self.own.get() + distance) % ranks);
        Some((partner, self.lines.clone()))
    }

    /// Takes the newer lines of another table and records them on the board.
    pub(super) fn merge(&mut self, others: &[Heartbeat], board: &ProgressBoard, at: Instant) {
        for (rank, other) in (0..).map(WorldRank::new).zip(others) {
            let Some(line) = self.lines.get_mut(rank.index()) else { return };
            if rank != self.own && other.count > line.count {
                *line = *other;
                self.heard[rank.index()] = at;
                board.set_progress(rank, *other);
            }
        }
    }

    /// Returns the ranks whose lines have not changed for the deadline. A process that was itself stopped has
    /// received no lines, so it restarts the count.
    pub(super) fn silent(&mut self, at: Instant) -> Vec<WorldRank> {
        let away = at.saturating_duration_since(self.looked);
        self.looked = at;
        if away > self.deadline / 4 {
            self.heard.fill(at);
            self.stopped = Some(at);
        }
        let silent = |heard: &Instant| at.saturating_duration_since(*heard) > self.deadline;
        let ranks = (0..).map(WorldRank::new).zip(&self.heard);
        ranks.filter(|(rank, heard)| *rank != self.own && silent(heard)).map(|(rank, _)| rank).collect()
    }

    /// Returns whether this process was stopped within the last deadline.
    pub(super) fn was_stopped(&self, at: Instant) -> bool {
        self.stopped.is_some_and(|stopped| at.saturating_duration_since(stopped) <= self.deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{AwaitedMessage, Tag};
    use crate::progress::Activity;

    const DEADLINE: Duration = Duration::from_secs(4);

    fn tables(ranks: u32, at: Instant) -> (Vec<Heartbeats>, Vec<ProgressBoard>) {
        let heartbeats =
            (0..ranks).map(|rank| Heartbeats::new(WorldRank::new(rank), ranks, DEADLINE, at)).collect();
        (heartbeats, (0..ranks).map(|_| ProgressBoard::new(ranks)).collect())
    }

    /// Sends one heartbeat from each rank but `dead`.
    fn heartbeat(heartbeats: &mut [Heartbeats], boards: &[ProgressBoard], dead: Option<usize>, at: Instant) {
        let living = (0..heartbeats.len()).filter(|rank| Some(*rank) != dead);
        let frames: Vec<_> = living.filter_map(|rank| heartbeats[rank].due(&boards[rank], at)).collect();
        for (to, lines) in frames {
            heartbeats[to.index()].merge(&lines, &boards[to.index()], at);
        }
    }

    fn check_spread(ranks: u32) {
        let start = Instant::now();
        let (mut heartbeats, boards) = tables(ranks, start);
        boards[0].moved(WorldRank::new(0), 7);
        let activity = Activity::Waits(AwaitedMessage { from: WorldRank::new(1), tag: Tag::Squares });
        boards[0].set_activity(WorldRank::new(0), activity);
        let hops = ranks.next_power_of_two().trailing_zeros();
        for k in 1..=hops {
            let period = heartbeats[0].period();
            heartbeat(&mut heartbeats, &boards, None, start + period * k);
        }
        for board in &boards {
            let Heartbeat { position, activity: found, .. } = board.progress_of(WorldRank::new(0));
            assert_eq!((position, found), (7, activity), "{ranks} ranks");
        }
    }

    #[test]
    fn lines_reach_all_ranks_in_log_n_heartbeats() {
        for ranks in [2, 3, 4, 5, 8, 13, 64] {
            check_spread(ranks);
        }
    }

    #[test]
    fn only_silent_ranks_are_reported() {
        let start = Instant::now();
        let (mut heartbeats, boards) = tables(5, start);
        let period = heartbeats[0].period();
        let mut at = start;
        while at < start + DEADLINE + period * 8 {
            at += period;
            heartbeat(&mut heartbeats, &boards, Some(3), at);
            let found = heartbeats[0].silent(at);
            assert!(found.is_empty() || found == [WorldRank::new(3)], "{found:?}");
        }
        assert_eq!(heartbeats[0].silent(at), [WorldRank::new(3)]);
    }

    #[test]
    fn a_process_that_was_stopped_reports_no_other_as_silent() {
        let start = Instant::now();
        let (mut heartbeats, _) = tables(2, start);
        for at in [DEADLINE * 3 / 4, DEADLINE * 3 / 2, DEADLINE * 3] {
            assert_eq!(heartbeats[0].silent(start + at), []);
        }
        assert!(heartbeats[0].was_stopped(start + DEADLINE * 3));
        assert!(!heartbeats[1].was_stopped(start + DEADLINE * 3));
    }
}
