//! The timed simulation: actions and messages take the times of their costs.
//!
//! Rules: (1) a rank computes one action after another, in the order of its row, each as soon as its tensors
//! have arrived; (2) a send takes no time of the rank: the message waits until its link is free, occupies the
//! link for its bytes divided by the bandwidth, and arrives after the latency; (3) a receive takes no time
//! either, but the computation that uses its tensor waits for the arrival; (4) a wait for a send lasts until
//! the arrival; (5) `UNSHARD` and `REDUCE_GRAD` run one after another on a channel of the rank for
//! collectives, in parallel with the computation; a stage computes once it is gathered, and
//! `WAIT_REDUCE_GRAD` waits for the reduction; (6) an overlap runs its forward and then its backward, each
//! with its own tensors, costs and event, and the forward's output leaves when the forward ends; if their
//! stages exchange tokens, the halves alternate ([`super::alternation`]), and each output leaves when its
//! half ends; (7) the messages of skip connections ([`Costs::skips`]) leave when the computation of their
//! tensor ends, before the sends that follow it, and none carries a gradient to a stage that runs forward
//! only; (8) before a backward of a stage that is recomputed ([`Costs::recompute`]), the rank computes its
//! forward again, or the part of it that the stage recomputes, unless the forward has kept all activations or
//! was the rank's last computation: while the gradients are on their way, or, if it is recomputed block by
//! block, once they have arrived; (9) a slice takes its share of the times and bytes of its microbatch
//! ([`StageCosts::of_slice`](crate::costs::StageCosts::of_slice)); (10) an action that is not in an overlap
//! takes the time of its computation and of its exchanges ([`StageExchanges`](crate::costs::StageExchanges)),
//! in which the rank waits. There is one link for each ordered pair of ranks, and messages are buffered: a
//! send does not wait for its receive.
//!
//! [`timed_on`] replaces rules 2 and 3 by the rules of another communicator ([`super::queues`]), for programs that
//! are sound on it. Messages of skip connections are not actions of a row: they stay buffered, and have links of
//! their own.
//!
//! Rule 6 assumes that a rank computes one thing at a time. An overlap then saves time because the messages
//! of each half travel while the other half computes. With this rule the bubble of DualPipeV at
//! `F = I = W = 1` is `p - 1`, the published figure. If an output left only after the whole overlap, it would
//! be `2 (p - 1)`, because the critical path passes the ranks through forwards.
//!
//! Each event depends only on earlier ones, so ranks run one at a time, each as far as it can; a message
//! wakes the rank that waits for it. Time: linear in the program, and for each computation linear in the
//! number of skip connections.

use crate::action::Action;
use crate::communicator::{Communicator, Streams, judge};
use crate::costs::{Costs, Exchanges};
use crate::ids::{Rank, StageIndex};
use crate::recompute::KeptForwards;
use crate::schedule::Program;
use crate::simulate::alternation::{Work, is_exchange};
use crate::simulate::boundary_tensors::{Arrival, Arrivals, BoundaryTensor, Route};
use crate::simulate::error::SimulateError;
use crate::simulate::links::{Links, Transit};
use crate::simulate::queues::{Ended, Operation, Queues};
use crate::simulate::rank_clock::{Computation, RankClock};
use crate::simulate::timed_run::TimedRun;
use crate::skip_event::{SkipAction, SkipEvent, SkipMessage};
use crate::timeline::{Event, Scope, ScopeKind, Timeline};
use crate::transfer::Transfer;
use crate::validate::BlockedRank;

/// Simulates `program` at `costs` with buffered messages. The program must communicate wherever a tensor
/// crosses ranks.
///
/// # Errors
/// When the costs do not fit the program, or ranks wait for each other or for an action that is missing.
pub fn timed(program: &Program, costs: &Costs) -> Result<TimedRun, SimulateError> {
    costs.check(program.placement().stages())?;
    Run::of(program, costs, None).simulate()
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
    let streams = communicator.streams;
    costs.check(program.placement().stages())?;
    let verdict = judge(program, program.level(), communicator)?;
    if !verdict.is_sound() {
        return Err(SimulateError::Unsound { streams, verdict: Box::new(verdict) });
    }
    let queues = (streams != Streams::Buffered).then(|| Queues::new(communicator, program.rows().len()));
    Run::of(program, costs, queues).simulate()
}

/// The state of a rank.
#[derive(Clone, Default)]
struct RankState {
    next: usize,
    clock: RankClock,
    waits_for: Option<BoundaryTensor>,
    /// Its last computation.
    computed: Option<Action>,
    /// The outputs of the halves of its last overlap, and the ends of the halves, as far as they end before
    /// the overlap may.
    halves: [Option<(BoundaryTensor, f64)>; 2],
}

struct Run<'a> {
    program: &'a Program,
    costs: &'a Costs,
    ranks: Vec<RankState>,
    ready: Vec<Rank>,
    arrivals: Arrivals,
    links: Links,
    /// The queues of sends and receives; `None` if messages are buffered.
    queues: Option<Queues<'a>>,
    /// The arrivals of sent messages, if there are queues: a message may arrive before its receive ends.
    sent: Option<Arrivals>,
    /// The times at which each stage is gathered, and at which it is reduced.
    gathered: Vec<f64>,
    reduced: Vec<f64>,
    /// The microbatches of each stage that keep their activations while others are recomputed.
    kept: Vec<KeptForwards>,
    /// The events of each rank.
    events: Vec<Vec<Event>>,
    skips: Vec<SkipEvent>,
    /// The exchanges of tokens.
    exchanges: Vec<Scope>,
}

impl<'a> Run<'a> {
    fn of(program: &'a Program, costs: &'a Costs, queues: Option<Queues<'a>>) -> Self {
        let placement = program.placement();
        let stages = placement.stages() as usize;
        Self {
            program,
            costs,
            ranks: vec![RankState::default(); program.ranks() as usize],
            ready: placement.all_ranks().rev().collect(),
            arrivals: Arrivals::none(program, &costs.skips),
            links: Links::default(),
            sent: queues.as_ref().map(|_| Arrivals::none(program, &[])),
            queues,
            gathered: vec![0.0; stages],
            reduced: vec![0.0; stages],
            kept: vec![KeptForwards::default(); stages],
            events: program.rows().iter().map(|row| Vec::with_capacity(row.len())).collect(),
            skips: Vec::new(),
            exchanges: Vec::new(),
        }
    }

    /// Runs all ranks, each as far as it can.
    fn simulate(mut self) -> Result<TimedRun, SimulateError> {
        while let Some(rank) = self.ready.pop() {
            while self.step(rank) {}
            self.run_queues(rank);
        }
        self.finish()
    }

    /// Runs the next action of `rank`, and returns whether there was one that could run.
    fn step(&mut self, rank: Rank) -> bool {
        let Some(&action) = self.program.row(rank).get(self.ranks[rank.index()].next) else { return false };
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
        true
    }

    /// Gives `action` to the queues if there are queues and it is a send or a receive, and returns whether it
    /// is. The times of its event are set when it ends.
    fn give(&mut self, rank: Rank, action: Action) -> bool {
        let Some(queues) = &mut self.queues else { return false };
        // A wait for a send has a transfer too.
        let transfer = Transfer::of(self.program.placement(), action)
            .filter(|transfer| [transfer.send, transfer.receive].contains(&action));
        let Some(transfer) = transfer else {
            queues.end_group(rank);
            return false;
        };
        // Operations that start together are given when the rank has reached all of them.
        let is_single_send = transfer.send == action && !queues.are_grouped();
        let free = self.ranks[rank.index()].clock.now();
        let given = if is_single_send { self.made_at(rank, transfer).unwrap_or(free) } else { free };
        let bytes = self.program.slices().share(self.message_bytes(transfer.send));
        let cost = self.costs.transfer(transfer.sender, transfer.receiver, bytes);
        let events = &mut self.events[rank.index()];
        let operation = Operation { rank, action, transfer, given, cost, event: events.len() };
        events.push(Event { rank, action, start: given, end: given });
        if let Some(queues) = &mut self.queues {
            queues.give(operation);
        }
        true
    }

    /// Runs the queues after `rank` has given operations, and wakes the ranks that wait for their
    /// ends.
    fn run_queues(&mut self, rank: Rank) {
        let ended = self.queues.as_mut().map_or_else(Vec::new, |queues| queues.run(rank));
        for Ended { operation: Operation { rank, action, transfer, event, .. }, times, arrival } in ended {
            let event = &mut self.events[rank.index()][event];
            (event.start, event.end) = times;
            let Some(tensor) = BoundaryTensor::received_by(transfer.receive) else { continue };
            if action == transfer.receive {
                self.arrive(tensor, arrival);
                continue;
            }
            if let Some(sent) = &mut self.sent {
                sent.set(tensor, arrival);
            }
            self.wake(rank, tensor);
        }
    }

    /// Runs `action`, which does not compute. An error names the tensor of a message that has to be sent first.
    fn act(&mut self, rank: Rank, action: Action) -> Result<(), BoundaryTensor> {
        let clock = &mut self.ranks[rank.index()].clock;
        let now = clock.now();
        let (start, end) = match action {
            Action::SendForward { .. } | Action::SendBackward { .. } => self.send(rank, action, now),
            Action::WaitSendForward { .. } | Action::WaitSendBackward { .. } => {
                let arrival = self.sent_arrival(action)?.map_or(now, |arrival| arrival.at);
                self.ranks[rank.index()].clock.wait_until(arrival)
            }
            Action::Unshard { stage } => {
                let times = clock.run_collective(self.costs.stage(stage).unshard);
                note(&mut self.gathered, stage, times.1);
                times
            }
            Action::ReduceGrad { stage } => {
                let times = clock.run_collective(self.costs.stage(stage).reduce_grad);
                note(&mut self.reduced, stage, times.1);
                times
            }
            Action::WaitReduceGrad { stage } => {
                clock.wait_until(self.reduced.get(stage.index()).copied().unwrap_or(now))
            }
            _ => (now, now),
        };
        self.events[rank.index()].push(Event { rank, action, start, end });
        Ok(())
    }

    /// Computes `action`, its halves one after the other, if the arrivals of all its tensors are known.
    fn compute(&mut self, rank: Rank, action: Action) -> Result<(), BoundaryTensor> {
        for part in action.parts() {
            self.arrival_for(part)?;
        }
        if let Action::Overlap(_) = action
            && action.parts().any(|part| self.exchanges_of(part).take_time())
        {
            return self.compute_together(rank, action);
        }
        let mut first_half = None;
        for part in action.parts() {
            let end = self.compute_part(rank, part)?;
            if part != action {
                let made = BoundaryTensor::made_by(self.program.placement(), part);
                first_half = first_half.or(made.map(|tensor| (tensor, end)));
            }
        }
        self.ranks[rank.index()].halves = [first_half, None];
        Ok(())
    }

    /// Computes the halves of `overlap` together: one computes while the other exchanges tokens.
    fn compute_together(&mut self, rank: Rank, overlap: Action) -> Result<(), BoundaryTensor> {
        let mut halves = [Vec::with_capacity(2), Vec::with_capacity(2)];
        let mut actions = [Vec::with_capacity(2), Vec::with_capacity(2)];
        for (half, part) in overlap.parts().enumerate() {
            let (tensors, parameters) = (self.arrival_for(part)?, self.gathered_for(part));
            if let Some(forward) = self.recomputed_by(rank, part) {
                let tensors = tensors.filter(|_| self.costs.recompute.is_by_block());
                halves[half].push(Computation::after([parameters, tensors], self.again(forward)));
                actions[half].push(forward);
            }
            halves[half].push(Computation::after([parameters, tensors], self.work(part)));
            actions[half].push(part);
            self.ranks[rank.index()].computed = Some(part);
        }
        let clock = &mut self.ranks[rank.index()].clock;
        let pieces = clock.alternate([&halves[0], &halves[1]]);
        let mut ends = [0.0; 2];
        for (half, actions) in actions.iter().enumerate() {
            for (work, &action) in actions.iter().enumerate() {
                let mut own = pieces.iter().filter(|piece| (piece.half, piece.work) == (half, work));
                let Some((start, first_end)) = own.next().map(|piece| (piece.start, piece.end)) else {
                    continue;
                };
                let end = own.next_back().map_or(first_end, |piece| piece.end);
                self.events[rank.index()].push(Event { rank, action, start, end });
                ends[half] = end;
            }
        }
        let exchanges = pieces.iter().filter(|piece| is_exchange(piece.position));
        self.exchanges.extend(exchanges.map(|piece| Scope {
            rank,
            kind: ScopeKind::Exchange(actions[piece.half][piece.work]),
            start: piece.start,
            end: piece.end,
        }));
        let parts: Vec<(Action, f64)> = overlap.parts().zip(ends).collect();
        let made = |&(part, end): &(Action, f64)| {
            Some((BoundaryTensor::made_by(self.program.placement(), part)?, end))
        };
        self.ranks[rank.index()].halves = [parts.first().and_then(made), parts.last().and_then(made)];
        // Messages of skip connections take their links in the order in which they leave.
        let is_reversed = ends[1] < ends[0];
        for index in if is_reversed { [1, 0] } else { [0, 1] } {
            let (part, end) = parts[index];
            self.deliver(rank, part, end);
        }
        Ok(())
    }

    /// Starts `part` when its tensors have arrived, delivers its output, and returns its end.
    fn compute_part(&mut self, rank: Rank, part: Action) -> Result<f64, BoundaryTensor> {
        let (tensors, parameters) = (self.arrival_for(part)?, self.gathered_for(part));
        let again = self.recomputed_by(rank, part);
        let is_early = !self.costs.recompute.is_by_block();
        if let Some(forward) = again {
            let again = self.again(forward);
            self.compute_alone(rank, forward, [parameters, tensors.filter(|_| !is_early)], again);
        }
        let end = self.compute_alone(rank, part, [parameters, tensors], self.work(part));
        self.ranks[rank.index()].computed = Some(part);
        self.deliver(rank, part, end);
        Ok(end)
    }

    /// Computes `part` after the last of `arrivals`, and waits for each of its exchanges. Returns its end.
    fn compute_alone(&mut self, rank: Rank, part: Action, arrivals: [Option<Arrival>; 2], work: Work) -> f64 {
        let clock = &mut self.ranks[rank.index()].clock;
        let (start, end) = clock.compute(arrivals, work.total());
        clock.note_exposed_exchange(work.exchanges.total());
        if work.exchanges.take_time() {
            let pieces = 2 * work.exchanges.count + 1;
            let mut from = start;
            for position in 0..pieces {
                let until = from + work.seconds(position);
                if is_exchange(position) {
                    let kind = ScopeKind::Exchange(part);
                    self.exchanges.push(Scope { rank, kind, start: from, end: until });
                }
                from = until;
            }
        }
        self.events[rank.index()].push(Event { rank, action: part, start, end });
        end
    }

    /// Returns the forward that a backward computes again. Must be called once for each computation, in the
    /// order of the row.
    fn recomputed_by(&mut self, rank: Rank, part: Action) -> Option<Action> {
        let choice = self.costs.recompute.of(part.stage())?;
        let kept = self.kept.get_mut(part.stage().index())?;
        match part {
            Action::Forward { microbatch, .. } => {
                kept.forward(choice.keep, microbatch);
                None
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                let forward = Action::Forward { stage, microbatch };
                let is_last = self.ranks[rank.index()].computed == Some(forward);
                (!kept.backward(microbatch) && !is_last).then_some(forward)
            }
            _ => None,
        }
    }

    /// Returns the computation and the exchanges of `part`.
    fn work(&self, part: Action) -> Work {
        let costs = self.costs.of_part(part, self.program.slices());
        let compute = match part {
            Action::Forward { .. } => costs.forward,
            Action::InputBackward { .. } => costs.input_backward,
            Action::WeightBackward { .. } => costs.weight_backward,
            _ => costs.backward,
        };
        Work { arrival: 0.0, compute, exchanges: self.exchanges_of(part) }
    }

    /// Returns the same for `forward` if it is computed again.
    fn again(&self, forward: Action) -> Work {
        let costs = self.costs.of_part(forward, self.program.slices());
        Work { arrival: 0.0, compute: costs.again(), exchanges: costs.exchanges.again() }
    }

    fn exchanges_of(&self, part: Action) -> Exchanges {
        let exchanges = self.costs.of_part(part, self.program.slices()).exchanges;
        match part {
            Action::Forward { .. } => exchanges.forward,
            Action::WeightBackward { .. } => Exchanges::default(),
            _ => exchanges.backward,
        }
    }

    /// When the last tensor that `part` needs from other stages arrives; `None` if it needs none. An error
    /// names a tensor whose arrival is not known yet.
    fn arrival_for(&self, part: Action) -> Result<Option<Arrival>, BoundaryTensor> {
        let from_neighbour = BoundaryTensor::needed_by(self.program.placement(), part);
        let from_skips = BoundaryTensor::skips_needed_by(&self.costs.skips, part);
        let mut last: Option<Arrival> = None;
        for tensor in from_neighbour.into_iter().chain(from_skips) {
            let arrival = self.arrivals.get(tensor).ok_or(tensor)?;
            if last.is_none_or(|last| arrival.at > last.at) {
                last = Some(arrival);
            }
        }
        Ok(last)
    }

    fn gathered_for(&self, part: Action) -> Option<Arrival> {
        let &at = self.gathered.get(part.stage().index())?;
        // Its messages are in flight all the time.
        Some(Arrival { issued: 0.0, at })
    }

    /// Gives the output of `part` to the neighbouring stage if that is on the same rank, and sends it over
    /// the skip connections. Other outputs leave with the program's sends.
    fn deliver(&mut self, rank: Rank, part: Action, end: f64) {
        let costs = self.costs;
        let on_rank = Arrival { issued: end, at: end };
        if let Some(tensor) = BoundaryTensor::made_by(self.program.placement(), part)
            && self.program.placement().owner(tensor.stage) == Some(rank)
        {
            self.arrive(tensor, on_rank);
        }
        let trained = self.program.trained();
        let is_used = |tensor: &BoundaryTensor| !tensor.gradient || trained.runs_backward(tensor.stage);
        for tensor in BoundaryTensor::skips_made_by(&costs.skips, part).filter(is_used) {
            let receiver = self.program.placement().owner(tensor.stage);
            match (receiver, tensor.route) {
                (Some(receiver), Route::Skip(index)) if receiver != rank => {
                    let sent = self.transmit(rank, receiver, tensor, costs.skips[index].bytes, end);
                    self.note_skip((rank, receiver), part, tensor, sent);
                }
                _ => self.arrive(tensor, on_rank),
            }
        }
    }

    /// Adds the events of a skip connection's message from `part`. It occupied its link from the first to the
    /// second time of `sent`.
    fn note_skip(
        &mut self,
        (rank, receiver): (Rank, Rank),
        part: Action,
        tensor: BoundaryTensor,
        sent: (f64, f64),
    ) {
        let message = SkipMessage { from: part.stage(), to: tensor.stage, microbatch: tensor.microbatch };
        let event = |rank, action, (start, end)| SkipEvent { rank, action, start, end };
        self.skips.push(event(rank, SkipAction::Send(message), sent));
        if let Some(Arrival { issued, at }) = self.arrivals.get(tensor) {
            self.skips.push(event(receiver, SkipAction::Receive(message), (issued, at)));
        }
    }

    /// Sends the message of `send`, and returns when it begins and ceases to occupy its link.
    fn send(&mut self, rank: Rank, send: Action, now: f64) -> (f64, f64) {
        let Some(transfer) = Transfer::of(self.program.placement(), send) else { return (now, now) };
        let Some(tensor) = BoundaryTensor::received_by(transfer.receive) else { return (now, now) };
        let now = self.made_at(rank, transfer).unwrap_or(now);
        self.transmit(transfer.sender, transfer.receiver, tensor, self.message_bytes(send), now)
    }

    /// Returns when a half of the overlap that `rank` has just computed has made the tensor of a message;
    /// `None` if another action has made it.
    fn made_at(&self, rank: Rank, transfer: Transfer) -> Option<f64> {
        let tensor = BoundaryTensor::received_by(transfer.receive)?;
        let mut halves = self.ranks[rank.index()].halves.iter().flatten();
        halves.find(|(made, _)| *made == tensor).map(|&(_, end)| end)
    }

    /// Returns the bytes of the message of `send`. A gradient has the size of its output.
    fn message_bytes(&self, send: Action) -> u64 {
        let stage = send.stage();
        let is_gradient = matches!(send, Action::SendBackward { .. });
        self.costs.output_bytes(stage.before().filter(|_| is_gradient).unwrap_or(stage))
    }

    /// Puts a message on the link from one rank to another as soon as the link is free, and returns when it
    /// begins and ceases to occupy the link.
    fn transmit(&mut self, from: Rank, to: Rank, tensor: BoundaryTensor, bytes: u64, now: f64) -> (f64, f64) {
        let cost = self.costs.transfer(from, to, self.program.slices().share(bytes));
        let Transit { start, left, arrival } = self.links.occupy((from, to), cost, now);
        self.arrive(tensor, Arrival { issued: now, at: arrival });
        (start, left)
    }

    /// Sets when `tensor` arrives, and wakes the rank that waits for it.
    fn arrive(&mut self, tensor: BoundaryTensor, arrival: Arrival) {
        self.arrivals.set(tensor, arrival);
        if let Some(owner) = self.program.placement().owner(tensor.stage) {
            self.wake(owner, tensor);
        }
    }

    /// Wakes `rank` if it waits for `tensor`.
    fn wake(&mut self, rank: Rank, tensor: BoundaryTensor) {
        let waits_for = &mut self.ranks[rank.index()].waits_for;
        if *waits_for == Some(tensor) {
            *waits_for = None;
            self.ready.push(rank);
        }
    }

    /// Returns the tensor of the message that `action` sends, receives or waits for.
    fn message(&self, action: Action) -> Option<BoundaryTensor> {
        BoundaryTensor::received_by(Transfer::of(self.program.placement(), action)?.receive)
    }

    /// Returns when the message arrives for which `wait` waits; `None` if there is none. An error names a
    /// tensor that is not sent yet.
    fn sent_arrival(&self, wait: Action) -> Result<Option<Arrival>, BoundaryTensor> {
        let Some(tensor) = self.message(wait) else { return Ok(None) };
        match &self.sent {
            Some(sent) => sent.get(tensor).map(Some).ok_or(tensor),
            None => Ok(self.arrivals.get(tensor)),
        }
    }

    fn finish(mut self) -> Result<TimedRun, SimulateError> {
        let blocked = self.blocked();
        if !blocked.is_empty() {
            return Err(SimulateError::Stuck { blocked });
        }
        let mut events = std::mem::take(&mut self.events).into_iter().flatten().collect::<Vec<_>>();
        if self.queues.is_none() {
            events.iter_mut().for_each(|event| self.set_times_of_receive(event));
        }
        let exposed = self.ranks.iter().map(|state| state.clock.exposed()).collect();
        let exchanges = self.ranks.iter().map(|state| state.clock.exchange()).collect();
        let timeline = Timeline::new(self.program.ranks(), events).with_skips(self.skips);
        let timeline = timeline.with_scopes(self.exchanges);
        let timeline = timeline.with_slices(self.program.slices());
        let timeline = match self.queues {
            Some(queues) => timeline.with_communicator(queues.communicator().clone(), queues.into_waits()),
            None => timeline,
        };
        Ok(TimedRun { timeline, exposed, exchanges })
    }

    /// Sets the start and the end of a receive. Its message may be sent later than the receive is simulated,
    /// so the times are known only at the end.
    fn set_times_of_receive(&self, event: &mut Event) {
        let is_receive = matches!(event.action, Action::RecvForward { .. } | Action::RecvBackward { .. });
        if let Some(arrival) = is_receive.then(|| self.arrivals.get(self.message(event.action)?)).flatten() {
            let posted = event.start;
            event.start = posted.max(arrival.issued);
            event.end = posted.max(arrival.at);
        }
    }

    fn blocked(&self) -> Vec<BlockedRank> {
        let of = |rank: Rank| {
            let state = &self.ranks[rank.index()];
            let &action = self.program.row(rank).get(state.next)?;
            let source = state.waits_for?.source(&self.costs.skips);
            let owner = source.and_then(|stage| self.program.placement().owner(stage));
            Some(BlockedRank { rank, position: state.next, action, waits_for: owner.unwrap_or(rank) })
        };
        self.program.placement().all_ranks().filter_map(of).collect()
    }
}

/// Sets the time of a stage.
fn note(times: &mut [f64], stage: StageIndex, time: f64) {
    if let Some(noted) = times.get_mut(stage.index()) {
        *noted = time;
    }
}
