//! The logical simulation: each action takes one tick, as in the dry run of PyTorch's reference.
//!
//! In each tick the ranks are visited twice in ascending order. Rules: (1) in the first visit, a rank runs
//! its next action if it can; (2) a rank that could not run it tries again in the second visit, because a
//! higher rank may have made the tensor that it needs; (3) otherwise it idles in this tick. Every later visit
//! sees the effect of an action, even in the same tick.
//!
//! Conditions: a forward starts after the receive of its input, or after the forward of the previous stage on
//! the same rank; a backward after the receive of its gradient, or after the backward of the next stage on
//! the same rank; `W` after its `I`, if the program has one; a send after the computation of its tensor,
//! without waiting for the receive; a receive after its send; a wait for a send after the receive. Sharding
//! and reduction start at once. An overlap starts when both its halves can. A computation also waits for the update that
//! its batch needs (`batch_gate.rs`).
//!
//! Idle ranks cost almost no time: a set holds the ranks to visit, and an action adds the rank that waits for
//! it. Time: `n + t p / 64` for `n` actions on `p` ranks in `t` ticks. Each tick has at least one action, and
//! idle cells are not stored.

use std::cell::OnceCell;

use crate::action::{Action, ActionKind};
use crate::action_set::{ActionSet, bit};
use crate::batch_gate::BatchGate;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::neighbours::{Neighbour, Neighbours};
use crate::rank_set::RankSet;
use crate::schedule::Program;
use crate::simulate::error::SimulateError;
use crate::timeline::{Event, Timeline};
use crate::transfer::Transfer;
use crate::validate::{BlockedRank, list_blocked};

/// The tick of each action of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogicalRun<'a> {
    program: &'a Program,
    /// The ticks of the actions of each rank.
    ticks: Vec<Vec<u32>>,
}

/// Runs `program`, which must communicate wherever a tensor crosses ranks.
///
/// # Errors
/// When the ranks wait for each other, or for an action that is missing.
pub fn logical(program: &Program) -> Result<LogicalRun<'_>, SimulateError> {
    let mut run = Run::of(program);
    while !run.first.is_empty() {
        for second in [false, true] {
            let mut from = 0;
            while let Some(rank) = run.visits(second).take_next(&mut from) {
                run.visit(rank, second);
            }
        }
        std::mem::swap(&mut run.first, &mut run.next);
        run.tick += 1;
    }
    run.finish()
}

impl<'a> LogicalRun<'a> {
    /// Returns the number of ticks until every rank has reached its end.
    pub fn steps(&self) -> u32 {
        self.ticks.iter().filter_map(|row| row.last()).max().map_or(0, |last| last + 1)
    }

    /// Returns the tick of each action of `rank`; empty if there is no such rank.
    pub fn ticks(&self, rank: Rank) -> &[u32] {
        self.ticks.get(rank.index()).map_or(&[], Vec::as_slice)
    }

    /// Returns the action of `rank` in each tick, up to its last action; `None` for idle ticks.
    pub fn row(&self, rank: Rank) -> impl Iterator<Item = Option<Action>> + use<'a, '_> {
        let mut actions = self.program.row(rank).iter().zip(self.ticks(rank)).peekable();
        let length = self.ticks(rank).last().map_or(0, |last| last + 1);
        (0..length).map(move |tick| actions.next_if(|&(_, at)| *at == tick).map(|(&action, _)| action))
    }

    /// Returns the program.
    pub fn program(&self) -> &'a Program {
        self.program
    }

    /// Returns a timeline in which each action takes `tick` seconds.
    pub fn timeline(&self, tick: f64) -> Timeline {
        let event = |rank, (&action, &at): (&Action, &u32)| Event {
            rank,
            action,
            start: f64::from(at) * tick,
            end: f64::from(at) * tick + tick,
        };
        let ranks = self.program.placement().all_ranks();
        let events = ranks.flat_map(|rank| {
            self.program.row(rank).iter().zip(self.ticks(rank)).map(move |cell| event(rank, cell))
        });
        Timeline::new(self.program.ranks(), events.collect()).with_slices(self.program.slices())
    }
}

/// The state of a simulation.
struct Run<'a> {
    program: &'a Program,
    neighbours: Neighbours,
    tick: u32,
    /// The ranks to visit in the first and the second round of this tick, and in the first round of the next
    /// tick.
    first: RankSet,
    second: RankSet,
    next: RankSet,
    ticks: Vec<Vec<u32>>,
    /// For each waiting rank, the action that it waits for.
    waits_for: Vec<Option<Action>>,
    done: ActionSet,
    /// What is left of each batch, if there are several.
    batches: Option<BatchGate>,
    /// The `I` actions of the program; computed when a `W` comes before its `I`.
    input_backwards: OnceCell<ActionSet>,
}

impl<'a> Run<'a> {
    fn of(program: &'a Program) -> Self {
        let ranks = program.rows().len();
        Self {
            program,
            neighbours: Neighbours::of(program.placement()),
            tick: 0,
            first: RankSet::all(ranks),
            second: RankSet::none(ranks),
            next: RankSet::none(ranks),
            ticks: program.rows().iter().map(|row| Vec::with_capacity(row.len())).collect(),
            waits_for: vec![None; ranks],
            done: ActionSet::for_program(program),
            batches: BatchGate::over(program.numbering(), program.rows()),
            input_backwards: OnceCell::new(),
        }
    }

    /// Returns the ranks to visit in the first or the second round of this tick.
    fn visits(&mut self, second: bool) -> &mut RankSet {
        if second { &mut self.second } else { &mut self.first }
    }

    /// Runs the next action of `rank`, if it can run.
    fn visit(&mut self, rank: Rank, second: bool) {
        let Some(action) = self.next_action(rank) else { return };
        if let Some(missing) = action.parts().find_map(|part| self.missing_for(part)) {
            self.waits_for[rank.index()] = Some(missing);
            return;
        }
        let mut woken = Vec::new();
        if let Some(gate) = &mut self.batches {
            if let Some(batch) = gate.closed_for(action) {
                gate.wait(rank, batch);
                return;
            }
            gate.computed(rank, action, |_, ranks| woken.extend(ranks));
        }
        self.ticks[rank.index()].push(self.tick);
        self.next.insert(rank);
        for part in action.parts() {
            self.done.insert(part);
            if let Some(peer) = self.neighbours.peer(part)
                && self.waits_for[peer.index()] == Some(part)
            {
                self.waits_for[peer.index()] = None;
                self.wake(rank, second, peer);
            }
        }
        woken.into_iter().for_each(|peer| self.wake(rank, second, peer));
    }

    /// Adds `peer`, which waits for `rank`, to the next visits.
    fn wake(&mut self, rank: Rank, second: bool, peer: Rank) {
        match (peer > rank, second) {
            (true, _) => self.visits(second).insert(peer),
            (false, false) => self.second.insert(peer),
            (false, true) => self.next.insert(peer),
        }
    }

    fn next_action(&self, rank: Rank) -> Option<Action> {
        self.program.row(rank).get(self.ticks[rank.index()].len()).copied()
    }

    /// Returns an action that must complete before `part` can start and has not.
    #[inline]
    fn missing_for(&self, part: Action) -> Option<Action> {
        let placement = self.program.placement();
        let needs = match part {
            Action::Forward { stage, microbatch } => match self.neighbours.before(stage) {
                Neighbour::None => return None,
                Neighbour::SameRank => Action::Forward { stage: placement.previous(stage)?, microbatch },
                Neighbour::OtherRank(_) => Action::RecvForward { stage, microbatch },
            },
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                match self.neighbours.after(stage) {
                    Neighbour::None => return None,
                    Neighbour::SameRank => return self.missing_gradient(placement.next(stage)?, microbatch),
                    Neighbour::OtherRank(_) => Action::RecvBackward { stage, microbatch },
                }
            }
            Action::WeightBackward { stage, microbatch } => {
                let inputs = Action::InputBackward { stage, microbatch };
                return (!self.done.contains(inputs) && self.has_split_backward(inputs)).then_some(inputs);
            }
            Action::SendForward { stage, microbatch } => Action::Forward { stage, microbatch },
            Action::SendBackward { stage, microbatch } => return self.missing_gradient(stage, microbatch),
            Action::RecvForward { .. }
            | Action::RecvBackward { .. }
            | Action::WaitSendForward { .. }
            | Action::WaitSendBackward { .. } => {
                self.neighbours.peer(part)?;
                Transfer::other_end(part)?
            }
            _ => return None,
        };
        (!self.done.contains(needs)).then_some(needs)
    }

    /// Returns a backward of `stage` if none has made the gradient of its inputs.
    #[inline]
    fn missing_gradient(&self, stage: StageIndex, microbatch: Microbatch) -> Option<Action> {
        const EITHER: u16 = bit(ActionKind::Backward) | bit(ActionKind::InputBackward);
        let is_made = self.done.kinds(stage, Some(microbatch)) & EITHER != 0;
        (!is_made).then_some(Action::Backward { stage, microbatch })
    }

    /// Returns whether the program has `inputs`, the `I` of a `W`.
    fn has_split_backward(&self, inputs: Action) -> bool {
        let found = || {
            let mut found = ActionSet::for_program(self.program);
            let all = self.program.rows().iter().flatten();
            for &action in all.filter(|action| action.kind() == ActionKind::InputBackward) {
                found.insert(action);
            }
            found
        };
        self.input_backwards.get_or_init(found).contains(inputs)
    }

    fn finish(self) -> Result<LogicalRun<'a>, SimulateError> {
        let blocked: Vec<BlockedRank> = self
            .program
            .placement()
            .all_ranks()
            .filter_map(|rank| {
                let action = self.next_action(rank)?;
                let behind = || self.batches.as_ref().and_then(|gate| gate.behind(gate.closed_for(action)?));
                let waits_for = match self.waits_for[rank.index()] {
                    Some(missing) => self.program.placement().owner(missing.stage()).unwrap_or(rank),
                    None => behind()?,
                };
                Some(BlockedRank { rank, position: self.ticks[rank.index()].len(), action, waits_for })
            })
            .collect();
        let run = LogicalRun { program: self.program, ticks: self.ticks };
        if blocked.is_empty() {
            return Ok(run);
        }
        let (tick, blocked) = (run.steps(), list_blocked(&blocked));
        Err(SimulateError::Deadlock(format!("deadlock at tick {tick}: {blocked}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_rows};

    fn check(rows: &str, expected: Result<&str, &str>) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        let found = logical(&program)
            .map(|run| {
                print_rows(program.placement().all_ranks().map(|rank| run.row(rank).collect::<Vec<_>>()))
            })
            .map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }

    #[test]
    fn a_receive_may_share_the_tick_of_its_send() {
        check("0F0,0SEND_F0\n1RECV_F0,1F0\n", Ok("0F0,0SEND_F0\n,1RECV_F0,1F0\n"));
    }

    #[test]
    fn a_second_visit_sees_the_ranks_behind() {
        check(
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            Ok("0F0,0SEND_F0,,,0RECV_B0,0B0\n,1RECV_F0,1F0,1B0,1SEND_B0\n"),
        );
    }

    #[test]
    fn sharding_takes_its_ticks() {
        check(
            "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n",
            Ok("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"),
        );
    }

    #[test]
    fn a_wait_for_a_send_ends_with_its_receive() {
        check(
            "0F0,0SEND_F0,0WAIT_SEND_F0\n1UNSHARD,1UNSHARD,1UNSHARD,1RECV_F0,1F0\n",
            Ok("0F0,0SEND_F0,,0WAIT_SEND_F0\n1UNSHARD,1UNSHARD,1UNSHARD,1RECV_F0,1F0\n"),
        );
    }

    #[test]
    fn a_deadlock_names_the_blocked_ranks() {
        check(
            "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            Err("deadlock at tick 1: rank 0 at position 1 (0RECV_B0) waits for rank 1, \
                 rank 1 at position 0 (1RECV_F0) waits for rank 0; validate the program"),
        );
    }

    #[test]
    fn a_timeline_has_one_event_an_action() {
        let program = parse_program("0F0,0SEND_F0\n1RECV_F0,1F0\n").expect("a program");
        let timeline = logical(&program).expect("no deadlock").timeline(0.5);
        assert_eq!((timeline.events().len(), timeline.makespan()), (4, 1.5));
        assert!((timeline.bubble_fraction() - 2.0 / 3.0).abs() < 1e-12);
    }
}
