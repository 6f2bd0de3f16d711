//! Why each action of a timeline did not start earlier, and the critical path.
//!
//! An action starts when its rank is free and its tensors have arrived. The later of the two is its [`Cause`]:
//! the action before it, something that the rank waited for after that, or a message. The chain of causes from
//! the end of the step back to its start is the critical path: the step would be shorter only if something on
//! it took less time.
//!
//! A simulated timeline has one replica, and its collectives run one after another next to the computation. A
//! recorded one has all replicas. It records a gathering from the time when an action needs it, so when the
//! gathering began is not known.
//!
//! ```
//! use pipewright_schedule::causes::{Cause, Cell, causes};
//! use pipewright_schedule::simulate::{Tensor, timed};
//! use pipewright_schedule::{Costs, csv};
//! let program = csv::parse_program("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n")?;
//! let costs: Costs = "hop=0.5".parse()?;
//! let run = timed(&program, &costs)?;
//! let causes = causes(run.timeline(), program.ranks(), &costs, false);
//! let from = Cell { rank: 0.into(), index: 0 };
//! let first = Cell { rank: 1.into(), index: 0 };
//! assert_eq!(*causes.of(first), Cause::Message { from, tensor: Tensor::Input, in_line: None });
//! let path: Vec<_> = causes.critical_path().iter().map(|cell| (cell.rank.get(), cell.index)).collect();
//! assert_eq!(path, [(1, 1), (1, 0), (0, 0)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cause;
mod evidence;

pub use self::cause::{Cause, Cell, Wait};
use self::evidence::Evidence;
use crate::costs::Costs;
use crate::ids::Rank;
use crate::timeline::Timeline;

/// The causes of all actions of a timeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Causes {
    slack: f64,
    /// The causes of each rank's computations.
    causes: Vec<Vec<Cause>>,
    /// The wait of each rank after its last computation.
    at_end: Vec<Option<Wait>>,
    last: Option<Cell>,
    last_wait: Option<Wait>,
}

/// Finds the causes of a timeline. Replicas of a pipeline of `ranks` ranks are consecutive. `costs` has the
/// skip connections and the latency. `is_recorded` says that the timeline was measured.
pub fn causes(timeline: &Timeline, ranks: u32, costs: &Costs, is_recorded: bool) -> Causes {
    let evidence = Evidence::of(timeline, ranks, costs, is_recorded);
    let all = || (0..timeline.ranks()).map(Rank::new);
    let of_rank = |rank: Rank| {
        let cells = 0..evidence.lane(rank).cells.len();
        cells.map(|index| evidence.cause_of(Cell { rank, index })).collect()
    };
    let (last, last_wait) = evidence.end_of_step();
    Causes {
        slack: evidence.slack,
        causes: all().map(of_rank).collect(),
        at_end: all().map(|rank| evidence.wait_at_end(rank)).collect(),
        last,
        last_wait,
    }
}

impl Causes {
    /// Returns the largest gap, in seconds, that counts as none. In a recorded timeline, such a gap is the time
    /// of the runtime.
    pub fn slack(&self) -> f64 {
        self.slack
    }

    /// Returns the cause of the start of a computation; [`Cause::Start`] if there is no such computation.
    pub fn of(&self, cell: Cell) -> &Cause {
        let causes = self.causes.get(cell.rank.index()).map_or(&[][..], Vec::as_slice);
        causes.get(cell.index).unwrap_or(&Cause::Start)
    }

    /// Returns the causes of a rank's computations, in their order; none if there is no such rank.
    pub fn of_rank(&self, rank: Rank) -> &[Cause] {
        self.causes.get(rank.index()).map_or(&[], Vec::as_slice)
    }

    /// Returns what a rank waits for after its last computation.
    pub fn wait_at_end(&self, rank: Rank) -> Option<Wait> {
        self.at_end.get(rank.index()).copied().flatten()
    }

    /// Returns the last computation of the step; `None` without computations.
    pub fn last(&self) -> Option<Cell> {
        self.last
    }

    /// Returns the wait with which the step ends, if it ends after its last computation.
    pub fn last_wait(&self) -> Option<Wait> {
        self.last_wait
    }

    /// Returns the action that led to a computation; `None` if the chain of causes ends with it.
    pub fn before(&self, cell: Cell) -> Option<Cell> {
        let previous = || Some(Cell { index: cell.index.checked_sub(1)?, ..cell });
        match self.of(cell) {
            Cause::Start => None,
            Cause::Order | Cause::Delay => previous(),
            Cause::Message { from, .. } => Some(*from),
            Cause::Wait(wait) => wait.after,
        }
    }

    /// Returns the chain of causes that ends with the step, the last computation first.
    pub fn critical_path(&self) -> Vec<Cell> {
        let last = self.last_wait.and_then(|wait| wait.after).or(self.last);
        // Clocks that disagree may close a cycle.
        let most = self.causes.iter().map(Vec::len).sum();
        std::iter::successors(last, |&cell| self.before(cell)).take(most).collect()
    }
}
