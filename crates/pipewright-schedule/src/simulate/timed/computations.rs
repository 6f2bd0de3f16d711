//! The computations of a timed simulation: what they wait for, how long they take, and their events.

use super::state::{Need, Run};
use crate::action::Action;
use crate::ids::Rank;
use crate::simulate::alternation::{Halves, Work, is_exchange};
use crate::simulate::boundary_tensors::{Arrival, BoundaryTensor};
use crate::simulate::tape::{CostOf, Moment};
use crate::timeline::{Scope, ScopeKind};

impl Run<'_> {
    /// Computes `action`, its halves one after the other, if the arrivals of all its tensors are known.
    pub(super) fn compute(&mut self, rank: Rank, action: Action) -> Result<(), BoundaryTensor> {
        for part in action.parts() {
            self.arrivals_for(part).try_for_each(|arrival| arrival.map(drop))?;
        }
        if matches!(action, Action::Overlap(_)) && self.has_exchanges {
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
        self.ranks[rank.index()].first_half = first_half;
        Ok(())
    }

    /// Computes the halves of `overlap` together: one computes while the other exchanges tokens.
    fn compute_together(&mut self, rank: Rank, overlap: Action) -> Result<(), BoundaryTensor> {
        let mut arrivals = Vec::with_capacity(4);
        let mut works = [Vec::with_capacity(2), Vec::with_capacity(2)];
        let mut actions = [Vec::with_capacity(2), Vec::with_capacity(2)];
        for (half, part) in overlap.parts().enumerate() {
            let in_memory = self.gathered_for(part).into_iter().chain(self.reloaded_for(part));
            arrivals.extend(in_memory.chain(self.arrival_for(rank, part)?));
            if let Some(forward) = self.recomputed_by(rank, part) {
                works[half].push(self.again(forward));
                actions[half].push(forward);
            }
            works[half].push(self.work(part));
            actions[half].push(part);
            self.ranks[rank.index()].computed = Some(part);
        }
        let mut stages = overlap.parts().map(Action::stage);
        let are_of_one_stage = stages.next() == stages.next();
        let state = &mut self.ranks[rank.index()];
        let halves = Halves { works: [&works[0], &works[1]], are_of_one_stage };
        let (began, pieces) = state.clock.alternate(&mut self.tape, arrivals, halves);
        let end = state.clock.now();
        state.first_half = None;
        for (half, actions) in actions.iter().enumerate() {
            for (work, &action) in actions.iter().enumerate() {
                let mut own = pieces.iter().filter(|piece| (piece.half, piece.work) == (half, work));
                let Some((start, first_end)) = own.next().map(|piece| (piece.start, piece.end)) else {
                    continue;
                };
                let end = own.next_back().map_or(first_end, |piece| piece.end);
                let mut moment =
                    |at: f64| Moment { at, ..self.tape.after(rank, began, CostOf::Other, at - began.at) };
                let times = [moment(start), moment(end)];
                self.add_event(rank, action, times);
            }
        }
        for piece in pieces.iter().filter(|piece| is_exchange(piece.position)) {
            self.add_exchange(rank, actions[piece.half][piece.work], piece.start, piece.end);
        }
        overlap.parts().for_each(|part| self.deliver(rank, part, end));
        Ok(())
    }

    /// Starts `part` when its tensors have arrived, delivers its output, and returns its end.
    fn compute_part(&mut self, rank: Rank, part: Action) -> Result<Moment, BoundaryTensor> {
        let tensors = self.arrival_for(rank, part)?;
        let (parameters, reloaded) = (self.gathered_for(part), self.reloaded_for(part));
        let again = self.recomputed_by(rank, part);
        let is_early = !self.costs.recompute.is_by_block();
        if let Some(forward) = again {
            let again = self.again(forward);
            let tensors = tensors.filter(|_| !is_early);
            self.compute_alone(rank, forward, [parameters, reloaded, tensors], again);
        }
        let end = self.compute_alone(rank, part, [parameters, reloaded, tensors], self.work(part));
        self.ranks[rank.index()].computed = Some(part);
        self.deliver(rank, part, end);
        Ok(end)
    }

    /// Computes `part` after the last of `arrivals`, and waits for each of its exchanges. Returns its end.
    fn compute_alone(
        &mut self,
        rank: Rank,
        part: Action,
        arrivals: [Option<Arrival>; 3],
        work: Work,
    ) -> Moment {
        let clock = &mut self.ranks[rank.index()].clock;
        let cost = (CostOf::Compute(part.stage(), part.kind()), work.total());
        let (start, end) = clock.compute(&mut self.tape, arrivals.into_iter().flatten(), cost);
        clock.note_exposed_exchange(work.exchanges.seconds());
        let mut from = start.at;
        for position in 0..work.pieces() {
            let until = from + work.seconds(position);
            if is_exchange(position) {
                self.add_exchange(rank, part, from, until);
            }
            from = until;
        }
        self.add_event(rank, part, [start, end]);
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
        Work { compute, exchanges: costs.exchanges.of(part) }
    }

    /// Returns the same for `forward` if it is computed again.
    fn again(&self, forward: Action) -> Work {
        let costs = self.costs.of_part(forward, self.program.slices());
        Work { compute: costs.again(), exchanges: costs.exchanges.again() }
    }

    /// Returns when the tensors that `part` needs from other stages arrive. An error names a tensor whose
    /// arrival is not known yet.
    fn arrivals_for(
        &self,
        part: Action,
    ) -> impl Iterator<Item = Result<(BoundaryTensor, Arrival), BoundaryTensor>> {
        let from_neighbour = BoundaryTensor::needed_by(self.program.placement(), part);
        let from_skips = BoundaryTensor::skips_needed_by(&self.costs.skips, part);
        let tensors = from_neighbour.into_iter().chain(from_skips);
        tensors.map(|tensor| Ok((tensor, self.arrivals.get(tensor).ok_or(tensor)?)))
    }

    /// Returns when the last of these tensors arrives; `None` if there are none. The next event of `rank` is
    /// the first one that needs them.
    fn arrival_for(&mut self, rank: Rank, part: Action) -> Result<Option<Arrival>, BoundaryTensor> {
        let mut last: Option<Arrival> = None;
        for arrival in self.arrivals_for(part) {
            let (_, arrival) = arrival?;
            if last.is_none_or(|last| arrival.at.at > last.at.at) {
                last = Some(arrival);
            }
        }
        if self.tape.records() {
            let needs: Vec<_> = self.arrivals_for(part).collect::<Result<_, _>>()?;
            let event = self.events[rank.index()].len();
            let moments = needs.iter().map(|(_, arrival)| arrival.at);
            let at = self.tape.latest(rank, moments);
            let need = |&(tensor, Arrival { at: arrival, .. })| Need { rank, event, tensor, arrival };
            self.needs.extend(needs.iter().map(need));
            last = last.map(|last| Arrival { at, ..last });
        }
        Ok(last)
    }

    fn gathered_for(&self, part: Action) -> Option<Arrival> {
        let &at = self.gathered.get(part.stage().index())?;
        // Its messages are in flight all the time.
        Some(Arrival { issued: Moment::START, at })
    }

    /// Returns when the tensors of a backward are back in memory, or those of the second forward before it,
    /// which is in the row of a recorded program. Must be called once for each computation.
    fn reloaded_for(&mut self, part: Action) -> Option<Arrival> {
        match part {
            Action::Forward { stage, microbatch } => self.reloaded.get(&(stage, microbatch)).copied(),
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                self.reloaded.remove(&(stage, microbatch))
            }
            _ => None,
        }
    }

    /// Adds the span of an exchange of `action`.
    fn add_exchange(&mut self, rank: Rank, action: Action, start: f64, end: f64) {
        self.exchanges.push(Scope { rank, kind: ScopeKind::Exchange(action), start, end });
    }
}
