//! The timed simulation: actions and messages take the times of their costs.
//!
//! Rules: (1) a rank computes one action after another, in the order of its row, each as soon as its tensors
//! have arrived; (2) a send takes no time of the rank: the message waits until its link is free, occupies the
//! link for its bytes divided by the bandwidth, and arrives after the latency; (3) a receive takes no time
//! either, but the computation that uses its tensor waits for the arrival; (4) a wait for a send lasts until
//! the arrival; (5) `UNSHARD` and `REDUCE_GRAD` run one after another on a channel of the rank for
//! collectives, in parallel with the computation; a stage computes once it is gathered, and
//! `WAIT_REDUCE_GRAD` waits for the reduction; (6) an overlap runs its forward and then its backward, each
//! with its own tensors, costs and event, and the forward's output leaves when the forward ends; if there are
//! exchanges ([`Costs::has_exchanges`]), both halves run together by the rules of `alternation.rs`; (7) the
//! messages of skip connections ([`Costs::skips`]) leave when the action of their tensor ends, before the
//! sends that follow it, and none carries a gradient to a stage that runs forward only; (8) before a backward
//! of a stage that is recomputed ([`Costs::recompute`]), the rank computes its forward again, or the part of
//! it that the stage recomputes, unless the forward has kept all activations or was the rank's last
//! computation: while the gradients are on their way, or, if it is recomputed block by block, once they have
//! arrived; (9) a slice takes its share of the times and bytes of its microbatch
//! ([`StageCosts::for_slice`](crate::costs::StageCosts::for_slice)); (10) an action that is not in an overlap
//! takes the time of its computation and of its exchanges ([`StageExchanges`](crate::costs::StageExchanges)),
//! in which the rank waits; (11) `OFFLOAD` and `RELOAD` run one after another on a link of the rank
//! ([`Costs::offload`]), in parallel with the computation. They take the measured time if the costs have it.
//! A backward, with the forward that it computes again, waits until its `RELOAD` has ended; (12) with several batches
//! ([`Program::batches`]), a computation waits until all ranks have ended the batch whose update it needs
//! ([`crate::delay`]). There is one link
//! for each ordered pair of ranks, and messages are buffered: a send does not wait for its receive.
//!
//! [`timed_on`] replaces rules 2 and 3 by the rules of another communicator ([`super::queues`]), for programs
//! that are sound on it. Messages of skip connections are not actions of a row: they stay buffered, and have
//! links of their own.
//!
//! Rule 6 assumes that a rank computes one thing at a time. Without exchanges, an overlap then saves time
//! because the messages of each half travel while the other half computes. With this rule the bubble of
//! DualPipeV at `F = I = W = 1` is `p - 1`, the published figure. If an output left only after the whole
//! overlap, it would be `2 (p - 1)`, because the critical path passes the ranks through forwards.
//!
//! Each event depends only on earlier ones, so ranks run one at a time, each as far as it can; a message
//! wakes the rank that waits for it. Time: linear in the program, and for each computation linear in the
//! number of skip connections.

mod computations;
mod messages;
mod state;
mod update_waits;

pub(super) use self::state::{Need, Recorded, Run};
use crate::action::Action;
use crate::communicator::{Communicator, Streams, judge};
use crate::costs::Costs;
use crate::ids::{Rank, StageIndex};
use crate::schedule::Program;
use crate::simulate::boundary_tensors::{Arrival, BoundaryTensor};
use crate::simulate::error::SimulateError;
use crate::simulate::queues::Queues;
use crate::simulate::tape::Moment;
use crate::simulate::timed_run::TimedRun;
use crate::timeline::Timeline;
use crate::validate::{BlockedRank, list_blocked};

/// Simulates `program` at `costs` with buffered messages. The program must communicate wherever a tensor
/// crosses ranks.
///
/// # Errors
/// When the costs do not fit the program, or ranks wait for each other or for an action that is missing.
pub fn timed(program: &Program, costs: &Costs) -> Result<TimedRun, SimulateError> {
    Ok(buffered(program, costs, false)?.into_run())
}

/// Runs `program` at `costs` with buffered messages, on a tape that `records` or not.
pub(super) fn buffered<'a>(
    program: &'a Program,
    costs: &'a Costs,
    records: bool,
) -> Result<Run<'a>, SimulateError> {
    costs.check_program(program)?;
    Run::of(program, costs, None, records).simulate()
}

/// Simulates `program` at `costs` on `communicator`. With [`Streams::Buffered`], the result equals the
/// result of [`timed`].
///
/// ```
/// use pipewright_schedule::communicator::{Communicator, Streams};
/// use pipewright_schedule::simulate::timed_on;
/// use pipewright_schedule::{Costs, csv};
/// // Rank 1 receives the second activation in front of the first gradient.
/// let program = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
///                1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";
/// let program = csv::parse_program(program)?;
/// let makespan = |streams| -> Result<f64, Box<dyn std::error::Error>> {
///     let communicator = Communicator { streams, ..Communicator::default() };
///     Ok(timed_on(&program, &"hop=5".parse()?, &communicator)?.timeline().makespan())
/// };
/// assert_eq!((makespan(Streams::Buffered)?, makespan(Streams::Pair)?), (19.0, 26.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the costs do not fit the program, actions of the program are missing or misplaced, or it is not sound
/// on the communicator.
pub fn timed_on(
    program: &Program,
    costs: &Costs,
    communicator: &Communicator,
) -> Result<TimedRun, SimulateError> {
    Ok(simulated(program, costs, communicator, false)?.into_run())
}

/// Runs `program` at `costs` on `communicator`, on a tape that `records` or not.
pub(super) fn simulated<'a>(
    program: &'a Program,
    costs: &'a Costs,
    communicator: &'a Communicator,
    records: bool,
) -> Result<Run<'a>, SimulateError> {
    let streams = communicator.streams;
    costs.check_program(program)?;
    let verdict = judge(program, program.level(), communicator)?;
    if !verdict.is_sound() {
        return Err(SimulateError::Unsound { streams, verdict: Box::new(verdict) });
    }
    let queues = (streams != Streams::Buffered).then(|| Queues::new(communicator, program.rows().len()));
    Run::of(program, costs, queues, records).simulate()
}

impl<'a> Run<'a> {
    /// Runs all ranks, each as far as it can.
    fn simulate(mut self) -> Result<Self, SimulateError> {
        while let Some(rank) = self.ready.pop() {
            while self.step(rank) {}
            self.run_queues(rank);
        }
        let blocked = self.blocked();
        if !blocked.is_empty() {
            return Err(SimulateError::Deadlock(format!("deadlock: {}", list_blocked(&blocked))));
        }
        if self.queues.is_none() {
            for rank in self.program.placement().all_ranks() {
                (0..self.events[rank.index()].len()).for_each(|event| self.set_times_of_receive(rank, event));
            }
        }
        Ok(self)
    }

    /// Runs the next action of `rank`, and returns whether there was one that could run.
    fn step(&mut self, rank: Rank) -> bool {
        let Some(&action) = self.program.row(rank).get(self.ranks[rank.index()].next) else { return false };
        if !self.passes_update(rank, action) {
            return false;
        }
        if self.give(rank, action) {
            self.ranks[rank.index()].next += 1;
            return true;
        }
        let done = if action.is_compute() { self.compute(rank, action) } else { self.act(rank, action) };
        if let Err(tensor) = done {
            self.ranks[rank.index()].waits_for = Some(tensor);
            return false;
        }
        self.ranks[rank.index()].next += 1;
        self.note_computed(rank, action);
        true
    }

    /// Runs `action`, which does not compute. An error names the tensor of a message that has to be sent
    /// first.
    fn act(&mut self, rank: Rank, action: Action) -> Result<(), BoundaryTensor> {
        let (clock, tape) = (&mut self.ranks[rank.index()].clock, &mut self.tape);
        let now = clock.now();
        let (start, end) = match action {
            Action::SendForward { .. } | Action::SendBackward { .. } => self.send(rank, action, now),
            Action::WaitSendForward { .. } | Action::WaitSendBackward { .. } => {
                let arrival = self.sent_arrival(action)?.map_or(now, |arrival| arrival.at);
                self.ranks[rank.index()].clock.wait_until(&mut self.tape, arrival)
            }
            Action::Unshard { stage } => {
                let times = clock.run_collective(tape, self.costs.stage(stage).unshard);
                note(&mut self.gathered, stage, times.1);
                times
            }
            Action::ReduceGrad { stage } => {
                let times = clock.run_collective(tape, self.costs.stage(stage).reduce_grad);
                note(&mut self.reduced, stage, times.1);
                times
            }
            Action::Offload { stage, .. } => {
                let [away, _] = self.costs.transfer_seconds(stage, self.program.slices());
                clock.run_transfer(tape, away)
            }
            Action::Reload { stage, microbatch } => {
                let [_, back] = self.costs.transfer_seconds(stage, self.program.slices());
                let times = clock.run_transfer(tape, back);
                self.reloaded.insert((stage, microbatch), Arrival { issued: times.0, at: times.1 });
                times
            }
            Action::WaitReduceGrad { stage } => {
                clock.wait_until(tape, self.reduced.get(stage.index()).copied().unwrap_or(now))
            }
            _ => (now, now),
        };
        self.add_event(rank, action, [start, end]);
        Ok(())
    }

    /// Returns the result.
    fn into_run(self) -> TimedRun {
        let exposed = self.ranks.iter().map(|state| state.clock.exposed()).collect();
        let exchanges = self.ranks.iter().map(|state| state.clock.exchange()).collect();
        let mut events = Vec::with_capacity(self.events.iter().map(Vec::len).sum());
        // The events of a rank are freed before those of the next one are copied.
        self.events.into_iter().for_each(|own| events.extend(own));
        let timeline = Timeline::new(self.program.ranks(), events).with_skips(self.skips);
        let timeline = timeline.with_scopes(self.exchanges).with_slices(self.program.slices());
        let timeline = match self.queues {
            Some(queues) => {
                let communicator = queues.communicator().clone();
                timeline.with_communicator(communicator, queues.into_waits().0)
            }
            None => timeline,
        };
        TimedRun { timeline, exposed, exchanges }
    }

    /// Returns the contents of the tape, and what its readers need.
    pub(super) fn into_recorded(self) -> Recorded {
        let lines = self.queues.map_or_else(Vec::new, |queues| queues.into_waits().1);
        Recorded { tape: self.tape, events: self.events, needs: self.needs, lines }
    }

    fn blocked(&self) -> Vec<BlockedRank> {
        let blocked_rank = |rank: Rank| {
            let state = &self.ranks[rank.index()];
            let &action = self.program.row(rank).get(state.next)?;
            let owner = match self.update_waiter(rank, action) {
                Some(behind) => Some(behind),
                None => {
                    let source = state.waits_for?.source(&self.costs.skips);
                    source.and_then(|stage| self.program.placement().owner(stage))
                }
            };
            Some(BlockedRank { rank, position: state.next, action, waits_for: owner.unwrap_or(rank) })
        };
        self.program.placement().all_ranks().filter_map(blocked_rank).collect()
    }
}

/// Sets the time of a stage.
fn note(times: &mut [Moment], stage: StageIndex, time: Moment) {
    if let Some(noted) = times.get_mut(stage.index()) {
        *noted = time;
    }
}
