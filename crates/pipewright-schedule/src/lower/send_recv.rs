//! The pass `send-recv`: adds the sends and receives between ranks in an order without deadlock.
//!
//! The pass repeatedly visits the ranks in ascending order; one round is a sweep. Rules: (1) in a sweep, a
//! rank runs its next action if the action's input or gradient exists, otherwise it does nothing; (2) if a
//! stage on another rank needs the result of an action, its send directly follows the action, and at the same
//! moment the receive is appended to the row of the other rank. A stage that runs forward only needs no
//! gradient; (3) stages on the same rank pass tensors on without a message; (4) an overlap waits for the
//! tensors of both halves, and both sends follow it.
//!
//! So all sends and receives are made in one global order, in which each send is next to its receive. Every
//! pair of ranks therefore agrees on an order, and the program has no deadlock even if a send blocks until it
//! is received.
//!
//! Waiting ranks cost almost no time: a set holds the ranks to visit, and an action adds the rank that waits
//! for it to the current sweep or to the next. Time: `n + s p / 64` for `n` actions on `p` ranks in `s`
//! sweeps. Each sweep has at least one action.

use crate::action::{Action, ActionKind};
use crate::action_set::TensorSet;
use crate::batch_gate::BatchGate;
use crate::ids::Rank;
use crate::lower::drop_bubbles::Computation;
use crate::lower::error::LowerError;
use crate::neighbours::{Neighbour, Neighbours};
use crate::placement::Placement;
use crate::rank_set::RankSet;
use crate::row_cursors::{RowReaders, RowWriters};
use crate::schedule::{Numbering, Program};
use crate::trained::TrainedStages;
use crate::transfer::Transfer;
use crate::validate::BlockedRank;

/// Adds every `SEND_F`, `RECV_F`, `SEND_B` and `RECV_B`.
///
/// # Errors
/// When the program already communicates, or its ranks wait for each other.
pub fn send_recv(program: Program) -> Result<Program, LowerError> {
    if program.rows().iter().flatten().any(|action| action.is_communication()) {
        return Err(already_communicates());
    }
    sweep(
        program.placement(),
        program.numbering(),
        program.trained().clone(),
        program.rows(),
        Bubbles::Dropped,
    )
}

fn already_communicates() -> LowerError {
    let problem = "the program already communicates; add sends and receives only once";
    LowerError::Refused(problem.to_owned())
}

/// Does the same as [`send_recv`] for a schedule or a program, which must not communicate.
pub(super) fn send_recv_over(computation: Computation<'_>) -> Result<Program, LowerError> {
    match computation {
        Computation::Scheduled(schedule) => sweep(
            schedule.placement(),
            schedule.numbering(),
            schedule.trained().clone(),
            schedule.rows(),
            Bubbles::Dropped,
        ),
        Computation::Changed(program) => send_recv(program),
    }
}

/// Does the same as [`send_recv`] for rows with bubbles: a rank does nothing in a sweep if its next cell is a
/// bubble. If the bubbles are right, a sweep is a tick of the schedule. The result has no bubbles.
pub(super) fn send_recv_cells(
    placement: &Placement,
    numbering: Numbering,
    rows: &[Vec<Option<Action>>],
) -> Result<Program, LowerError> {
    if rows.iter().flatten().flatten().any(|action| action.is_communication()) {
        return Err(already_communicates());
    }
    sweep(placement, numbering, TrainedStages::ALL, rows, Bubbles::HoldBack)
}

/// The treatment of the bubbles of a schedule. A program has no bubbles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bubbles {
    /// They are skipped.
    Dropped,
    /// Each makes its rank do nothing for one sweep, and is then dropped.
    HoldBack,
}

/// Adds the messages.
fn sweep<Cell: Copy + Into<Option<Action>>>(
    placement: &Placement,
    numbering: Numbering,
    trained: TrainedStages,
    rows: &[Vec<Cell>],
    bubbles: Bubbles,
) -> Result<Program, LowerError> {
    let rows = Sweep::over(placement, numbering, &trained, rows, bubbles).run()?;
    Ok(Program::made(placement.clone(), numbering, rows).with_trained(trained))
}

/// The state of the pass. A cell is an action of a program, or an action or a bubble of a schedule.
struct Sweep<'a, Cell> {
    placement: &'a Placement,
    trained: &'a TrainedStages,
    neighbours: Neighbours,
    bubbles: Bubbles,
    /// The next cell of each rank.
    cells: RowReaders<'a, Cell>,
    /// The ranks to visit in this sweep, and in the next.
    now: RankSet,
    then: RankSet,
    /// For each waiting rank, the receive of the tensor that it waits for.
    waiting_for: Vec<Option<Action>>,
    /// All tensors that have been made, named by their receives. Tensors that stay on their rank are
    /// included.
    made: TensorSet,
    /// The rest of each batch; `None` for a single batch.
    batches: Option<BatchGate>,
    lowered: RowWriters,
}

impl<'a, Cell: Copy + Into<Option<Action>>> Sweep<'a, Cell> {
    fn over(
        placement: &'a Placement,
        numbering: Numbering,
        trained: &'a TrainedStages,
        rows: &'a [Vec<Cell>],
        bubbles: Bubbles,
    ) -> Self {
        Self {
            placement,
            trained,
            neighbours: Neighbours::of(placement),
            bubbles,
            cells: RowReaders::over(rows),
            now: RankSet::all(rows.len()),
            then: RankSet::none(rows.len()),
            waiting_for: vec![None; rows.len()],
            made: TensorSet::sized(placement.stages(), numbering.microbatches),
            batches: BatchGate::over(numbering, rows),
            // Each forward and backward adds at most a send and a receive.
            lowered: RowWriters::with_capacities(rows.iter().map(|row| actions(row) * 3)),
        }
    }

    /// Sweeps until no rank can run an action.
    fn run(mut self) -> Result<Vec<Vec<Action>>, LowerError> {
        while !self.now.is_empty() {
            let mut from = 0;
            while let Some(rank) = self.now.take_next(&mut from) {
                self.visit(rank);
            }
            std::mem::swap(&mut self.now, &mut self.then);
        }
        self.finish()
    }

    /// Returns the next cell of `rank`, after bubbles that are skipped; `None` at the end of its row.
    #[inline]
    fn next_cell(&mut self, rank: Rank) -> Option<Option<Action>> {
        let mut cell = self.cells.current(rank)?.into();
        while cell.is_none() && self.bubbles == Bubbles::Dropped {
            self.cells.step(rank);
            cell = self.cells.current(rank)?.into();
        }
        Some(cell)
    }

    /// Runs the next action of `rank` in this sweep, if it can run.
    fn visit(&mut self, rank: Rank) {
        let Some(cell) = self.next_cell(rank) else { return };
        if let Some(action) = cell {
            if self.waits_for_update(rank, action) {
                return;
            }
            if let Some(missing) = self.missing_input(action) {
                self.waiting_for[rank.index()] = Some(missing);
                return;
            }
            self.act(rank, action);
            self.note_computed(rank, action);
        }
        self.cells.step(rank);
        self.then.insert(rank);
    }

    /// Returns whether `action` waits for the update of a batch that some rank has not ended. A receive that came
    /// before that end would hold up the rank.
    fn waits_for_update(&mut self, rank: Rank, action: Action) -> bool {
        let Some(batches) = &mut self.batches else { return false };
        let Some(batch) = batches.closed_for(action) else { return false };
        batches.wait(rank, batch);
        true
    }

    /// Counts a computation, and wakes the ranks that wait for the batch that it has ended.
    fn note_computed(&mut self, rank: Rank, action: Action) {
        let Some(batches) = &mut self.batches else { return };
        let (now, then) = (&mut self.now, &mut self.then);
        batches.computed(rank, action, |_, woken| {
            for peer in woken {
                if peer > rank { now.insert(peer) } else { then.insert(peer) }
            }
        });
    }

    /// Appends `action` and the messages of its results, and wakes the receivers.
    fn act(&mut self, rank: Rank, action: Action) {
        self.lowered.push(rank, action);
        for part in action.parts() {
            let Some((send, receive)) = message_of(part) else { continue };
            if matches!(send, Action::SendBackward { .. }) && !self.trained.runs_backward(receive.stage()) {
                continue;
            }
            self.made.insert(receive);
            if let Some(receiver) = self.neighbours.peer(send) {
                self.lowered.push(rank, send);
                self.lowered.push(receiver, receive);
                self.wake(rank, receiver, receive);
            }
        }
    }

    /// Adds `peer` to the current sweep, or to the next if the sweep is past it, if it waits for `receive`.
    fn wake(&mut self, rank: Rank, peer: Rank, receive: Action) {
        if self.waiting_for[peer.index()] == Some(receive) {
            self.waiting_for[peer.index()] = None;
            if peer > rank { self.now.insert(peer) } else { self.then.insert(peer) }
        }
    }

    /// Returns the receive of the first tensor that `action` uses and that has not been made.
    fn missing_input(&self, action: Action) -> Option<Action> {
        let uses = action.parts().filter_map(|part| match part {
            Action::Forward { stage, microbatch } if self.neighbours.before(stage) != Neighbour::None => {
                Some(Action::RecvForward { stage, microbatch })
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch }
                if self.neighbours.after(stage) != Neighbour::None =>
            {
                Some(Action::RecvBackward { stage, microbatch })
            }
            _ => None,
        });
        uses.into_iter().find(|&receive| !self.made.contains(receive))
    }

    /// Returns the rows, if every rank has reached the end of its row.
    fn finish(self) -> Result<Vec<Vec<Action>>, LowerError> {
        let blocked: Vec<BlockedRank> = (0..)
            .map(Rank::new)
            .zip(&self.waiting_for)
            .filter_map(|(rank, missing)| {
                let of_update = |action| {
                    let batches = self.batches.as_ref()?;
                    Some(batches.behind(batches.closed_for(action)?).unwrap_or(rank))
                };
                let position = match self.bubbles {
                    Bubbles::Dropped => actions(self.cells.passed(rank)),
                    Bubbles::HoldBack => self.cells.passed(rank).len(),
                };
                let action = self.cells.current(rank)?.into()?;
                let of_tensor = || self.placement.owner(Transfer::other_end((*missing)?)?.stage());
                let waits_for = of_update(action).or_else(of_tensor)?;
                Some(BlockedRank { rank, position, action, waits_for })
            })
            .collect();
        if blocked.is_empty() { Ok(self.lowered.into_rows()) } else { Err(LowerError::Stuck { blocked }) }
    }
}

/// Returns the number of `cells` that are not bubbles.
fn actions<Cell: Copy + Into<Option<Action>>>(cells: &[Cell]) -> usize {
    cells.iter().filter(|&&cell| cell.into().is_some()).count()
}

/// Returns the send and the receive of the result of a compute action, if a neighbouring stage may use it.
#[inline]
fn message_of(part: Action) -> Option<(Action, Action)> {
    let is_gradient = part.kind().carries_gradient()?;
    let send = part.with_kind(ActionKind::send_of(is_gradient))?;
    Some((send, Transfer::other_end(send)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, parse_schedule, print_program};
    use crate::lower::drop_bubbles;

    fn check(rows: &str, expected: Result<&str, &str>) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        let found =
            send_recv(program).map(|program| print_program(&program)).map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }

    #[test]
    fn a_message_joins_two_ranks() {
        check("0F0,0B0\n1F0,1B0\n", Ok("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"));
    }

    #[test]
    fn a_turn_needs_no_message() {
        check("0F0,1F0,1B0,0B0\n", Ok("0F0,1F0,1B0,0B0\n"));
    }

    #[test]
    fn a_receive_comes_when_it_is_sent() {
        // Rank 1 receives its second input before it has finished the first.
        check(
            "0F0,0F1\n1F0,1B0,1F1\n",
            Ok("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1\n"),
        );
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        check(
            "0F0,0B0,0F1\n1F0,1F1,1B0\n",
            Err("no rank can continue: rank 0 at position 1 (0B0) waits for rank 1, \
                 rank 1 at position 1 (1F1) waits for rank 0; correct the order of the schedule"),
        );
    }

    /// Checks that a schedule with bubbles is lowered to the same program as without.
    fn check_bubbles(rows: &str) {
        let schedule = parse_schedule(rows).unwrap_or_else(|error| panic!("{error}"));
        let found = send_recv_over(Computation::Scheduled(&schedule));
        assert_eq!(found, send_recv(drop_bubbles(&schedule)), "{rows}");
    }

    #[test]
    fn bubbles_are_passed_over() {
        check_bubbles("0F0,,,0B0,\n,1F0,1B0\n");
        check_bubbles(",,0F0,0F1,,,0B0,,,\n1F0,1B0,,1F1\n");
        // Rank 0 waits after a bubble, rank 1 before one.
        check_bubbles("0F0,,0B0,0F1\n1F0,1F1,,1B0\n");
    }

    #[test]
    fn messages_are_not_added_twice() {
        let twice = "the program already communicates; add sends and receives only once";
        check("0F0,0SEND_F0\n1RECV_F0,1F0\n", Err(twice));
    }
}
