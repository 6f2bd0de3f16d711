//! The messages of a timed simulation: sends, skip connections, queues, and the arrivals that they cause.

use super::state::Run;
use crate::action::Action;
use crate::ids::Rank;
use crate::simulate::boundary_tensors::{Arrival, BoundaryTensor, Route};
use crate::simulate::queues::{Ended, Operation};
use crate::simulate::tape::{Moment, Transit};
use crate::skip_event::{SkipAction, SkipEvent, SkipMessage};
use crate::transfer::Transfer;

impl Run<'_> {
    /// Gives `action` to the queues if there are queues and it is a send or a receive, and returns whether it
    /// is. The times of its event are set when it ends.
    pub(super) fn give(&mut self, rank: Rank, action: Action) -> bool {
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
        let event = self.events[rank.index()].len();
        let operation = Operation { rank, action, transfer, given, cost, event };
        self.add_event(rank, action, [given, given]);
        if let Some(queues) = &mut self.queues {
            queues.give(operation);
        }
        true
    }

    /// Runs the queues after `rank` has given operations, and wakes the ranks that wait for their
    /// ends.
    pub(super) fn run_queues(&mut self, rank: Rank) {
        let ended = self.queues.as_mut().map_or_else(Vec::new, |queues| queues.run(&mut self.tape, rank));
        for Ended { operation: Operation { rank, action, transfer, event, .. }, times, arrival } in ended {
            self.set_times(rank, event, times);
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

    /// Gives the output of `part` to the neighbouring stage if that is on the same rank, and sends it over
    /// the skip connections. Other outputs leave with the program's sends.
    pub(super) fn deliver(&mut self, rank: Rank, part: Action, end: Moment) {
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
        sent: (Moment, Moment),
    ) {
        let message = SkipMessage { from: part.stage(), to: tensor.stage, microbatch: tensor.microbatch };
        let event = |rank, action, (start, end): (Moment, Moment)| SkipEvent {
            rank,
            action,
            start: start.at,
            end: end.at,
        };
        self.skips.push(event(rank, SkipAction::Send(message), sent));
        if let Some(Arrival { issued, at }) = self.arrivals.get(tensor) {
            self.skips.push(event(receiver, SkipAction::Receive(message), (issued, at)));
        }
    }

    /// Sends the message of `send`, and returns when it begins and ceases to occupy its link.
    pub(super) fn send(&mut self, rank: Rank, send: Action, now: Moment) -> (Moment, Moment) {
        let Some(transfer) = Transfer::of(self.program.placement(), send) else { return (now, now) };
        let Some(tensor) = BoundaryTensor::received_by(transfer.receive) else { return (now, now) };
        let now = self.made_at(rank, transfer).unwrap_or(now);
        self.transmit(transfer.sender, transfer.receiver, tensor, self.message_bytes(send), now)
    }

    /// Returns when the first half of the overlap that `rank` has just computed has made the tensor of a
    /// message; `None` if another action has made it, or if both halves have run together.
    fn made_at(&self, rank: Rank, transfer: Transfer) -> Option<Moment> {
        let tensor = BoundaryTensor::received_by(transfer.receive)?;
        let first_half = self.ranks[rank.index()].first_half;
        first_half.filter(|(made, _)| *made == tensor).map(|(_, end)| end)
    }

    /// Returns the bytes of the message of `send`. A gradient has the size of its output.
    fn message_bytes(&self, send: Action) -> u64 {
        let stage = send.stage();
        let is_gradient = matches!(send, Action::SendBackward { .. });
        self.costs.output_bytes(stage.before().filter(|_| is_gradient).unwrap_or(stage))
    }

    /// Puts a message on the link from one rank to another as soon as the link is free, and returns when it
    /// begins and ceases to occupy the link.
    fn transmit(
        &mut self,
        from: Rank,
        to: Rank,
        tensor: BoundaryTensor,
        bytes: u64,
        now: Moment,
    ) -> (Moment, Moment) {
        let cost = self.costs.transfer(from, to, self.program.slices().share(bytes));
        let Transit { start, left, arrival } = self.links.occupy(&mut self.tape, (from, to), cost, &[now]);
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
    pub(super) fn sent_arrival(&self, wait: Action) -> Result<Option<Arrival>, BoundaryTensor> {
        let Some(tensor) = self.message(wait) else { return Ok(None) };
        match &self.sent {
            Some(sent) => sent.get(tensor).map(Some).ok_or(tensor),
            None => Ok(self.arrivals.get(tensor)),
        }
    }

    /// Sets the start and the end of a receive. Its message may be sent later than the receive is simulated,
    /// so the times are known only at the end.
    pub(super) fn set_times_of_receive(&mut self, rank: Rank, index: usize) {
        let event = self.events[rank.index()][index];
        let is_receive = event.action.kind().is_receive();
        if let Some(arrival) = is_receive.then(|| self.arrivals.get(self.message(event.action)?)).flatten() {
            let posted = self.tape.start_of(rank, index, event.start);
            let start = self.tape.latest(rank, [posted, arrival.issued]);
            let end = self.tape.latest(rank, [posted, arrival.at]);
            self.set_times(rank, index, [start, end]);
        }
    }
}
