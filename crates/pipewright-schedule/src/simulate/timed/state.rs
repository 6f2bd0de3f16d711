//! The state of a timed simulation, which `computations.rs`, `messages.rs` and `update_waits.rs` change.

use std::collections::HashMap;

use crate::action::Action;
use crate::batch_gate::BatchGate;
use crate::costs::Costs;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::recompute::KeptForwards;
use crate::schedule::Program;
use crate::simulate::boundary_tensors::{Arrival, Arrivals, BoundaryTensor};
use crate::simulate::queues::{Line, Queues};
use crate::simulate::rank_clock::RankClock;
use crate::simulate::tape::{Links, Moment, Tape};
use crate::skip_event::SkipEvent;
use crate::timeline::{Event, Scope};

/// The state of a rank.
#[derive(Clone)]
pub(super) struct RankState {
    pub(super) next: usize,
    pub(super) clock: RankClock,
    pub(super) waits_for: Option<BoundaryTensor>,
    /// Its last computation.
    pub(super) computed: Option<Action>,
    /// The output of the first half of its last overlap, and the end of that half, if the halves have run one
    /// after the other.
    pub(super) first_half: Option<(BoundaryTensor, Moment)>,
}

/// The updates between batches.
pub(super) struct Updates {
    pub(super) gate: BatchGate,
    /// For each batch, when the last rank so far has ended it.
    pub(super) ended: Vec<Moment>,
}

impl Updates {
    /// Returns the state before the first action; `None` for a single batch.
    pub(super) fn over(program: &Program) -> Option<Self> {
        let ended = vec![Moment::START; program.batches() as usize];
        Some(Self { gate: BatchGate::over(program.numbering(), program.rows())?, ended })
    }
}

/// A tensor that a computation needs.
pub(crate) struct Need {
    pub(crate) rank: Rank,
    /// The index of the computation among the events of its rank.
    pub(crate) event: usize,
    pub(crate) tensor: BoundaryTensor,
    pub(crate) arrival: Moment,
}

/// The tape of a simulation that has ended, and what it needs to be read.
pub(crate) struct Recorded {
    pub(crate) tape: Tape,
    /// The events of each rank.
    pub(crate) events: Vec<Vec<Event>>,
    pub(crate) needs: Vec<Need>,
    pub(crate) lines: Vec<Line>,
}

/// A simulation. The methods that compute are in `computations.rs`, and those of messages in `messages.rs`.
pub(crate) struct Run<'a> {
    pub(super) program: &'a Program,
    pub(super) costs: &'a Costs,
    pub(super) tape: Tape,
    pub(super) ranks: Vec<RankState>,
    pub(super) ready: Vec<Rank>,
    pub(super) arrivals: Arrivals,
    pub(super) links: Links,
    /// The queues of sends and receives; `None` if messages are buffered.
    pub(super) queues: Option<Queues<'a>>,
    /// The arrivals of sent messages, if there are queues: a message may arrive before its receive ends.
    pub(super) sent: Option<Arrivals>,
    /// The times at which each stage is gathered, and at which it is reduced.
    pub(super) gathered: Vec<Moment>,
    pub(super) reduced: Vec<Moment>,
    /// The times at which the tensors of `RELOAD` are back, until their backward.
    pub(super) reloaded: HashMap<(StageIndex, Microbatch), Arrival>,
    /// The updates between batches; `None` for a single batch.
    pub(super) updates: Option<Updates>,
    /// The microbatches of each stage that keep their activations while others are recomputed.
    pub(super) kept: Vec<KeptForwards>,
    /// The events of each rank.
    pub(super) events: Vec<Vec<Event>>,
    /// The tensors from other stages that computations need, if the tape records.
    pub(super) needs: Vec<Need>,
    pub(super) skips: Vec<SkipEvent>,
    /// Whether actions have exchanges.
    pub(super) has_exchanges: bool,
    /// The exchanges of tokens.
    pub(super) exchanges: Vec<Scope>,
}

impl<'a> Run<'a> {
    /// Returns the simulation before its first action. Its tape `records` or not.
    pub(super) fn of(
        program: &'a Program,
        costs: &'a Costs,
        queues: Option<Queues<'a>>,
        records: bool,
    ) -> Self {
        let placement = program.placement();
        let state = |rank| RankState {
            next: 0,
            clock: RankClock::new(rank),
            waits_for: None,
            computed: None,
            first_half: None,
        };
        let stages = placement.stages() as usize;
        Self {
            program,
            costs,
            tape: Tape::new(records, placement.ranks()),
            ranks: placement.all_ranks().map(state).collect(),
            ready: placement.all_ranks().rev().collect(),
            arrivals: Arrivals::none(program, &costs.skips),
            links: Links::default(),
            sent: queues.as_ref().map(|_| Arrivals::none(program, &[])),
            queues,
            gathered: vec![Moment::START; stages],
            reduced: vec![Moment::START; stages],
            reloaded: HashMap::new(),
            updates: Updates::over(program),
            kept: vec![KeptForwards::default(); stages],
            events: program.rows().iter().map(|row| Vec::with_capacity(row.len())).collect(),
            needs: Vec::new(),
            skips: Vec::new(),
            has_exchanges: costs.has_exchanges(),
            exchanges: Vec::new(),
        }
    }

    /// Adds an event after the others of its rank.
    pub(super) fn add_event(&mut self, rank: Rank, action: Action, [start, end]: [Moment; 2]) {
        if self.tape.records() {
            self.tape.events[rank.index()].push([start.node, end.node]);
        }
        self.events[rank.index()].push(Event { rank, action, start: start.at, end: end.at });
    }

    /// Changes the times of an event.
    pub(super) fn set_times(&mut self, rank: Rank, index: usize, [start, end]: [Moment; 2]) {
        if self.tape.records() {
            self.tape.events[rank.index()][index] = [start.node, end.node];
        }
        let event = &mut self.events[rank.index()][index];
        (event.start, event.end) = (start.at, end.at);
    }
}
