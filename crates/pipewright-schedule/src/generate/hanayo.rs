//! Hanayo: waves that run down the ranks and up again, several times for each microbatch.
//!
//! The guide in `GENERATOR` has the paper and the formulas. There are `2 w` stages per rank for `w` waves,
//! placed down the ranks and up again `w` times.
//!
//! The order follows a simulated run in which a forward takes one tick, a backward two, and messages none. A
//! free rank runs an action that can run. Among several it prefers the kind that it did not run last, then
//! the oldest microbatch, then the last stage of the model. Stage 0 starts a microbatch while fewer than
//! `2 p` microbatches are in flight, where `p` is the number of ranks. A microbatch is in flight from its
//! forward to its backward on stage 0. There is no deadlock, because a microbatch in flight can always
//! continue.
//!
//! Time: linear in the actions, with a factor logarithmic in the actions that can run on a rank.
//!
//! A rank holds at most `2 w min(m, 2 p)` activations of a stage, while 1F1B holds `2 w p`. At 8 ranks and 32
//! microbatches it holds 23 (1F1B: 16) with one wave and 40 (1F1B: 32) with two, and the bubble is .099 and
//! .141 (1F1B: .179). At 8 microbatches, where waves help most, the bubble is .368 and .238 (1F1B: .467).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;

const NAME: &str = "hanayo";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "waves down and up the ranks; two stages per rank for each wave",
    aliases: &["wave"],
    guide: Guide {
        source: "Liu et al., \"Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model \
                 Training Efficiency\", 2023",
        order: "There are `2 w` stages on each rank for `w` waves, placed down the ranks and up again `w` \
                times. A free rank prefers the kind of action that it did not run last, then the oldest \
                microbatch, then the last stage.",
        choice: "Choose it if the layers cannot defer their weight gradients and the first and the last \
                 stage share parameters: both are on rank 0. If there are about as many microbatches as \
                 ranks, more waves shorten the bubble. The bubble of interleaved 1F1B with the same \
                 number of stages is not larger.",
        bubble: &[
            Formula::with("v = 2 and m >= 2 p", "(p - 1) / (v m + p - 1)"),
            Formula::with("v = 2 and m = p", "2 (p - 1) / (3 m + 2 (p - 1))"),
        ],
        peak: &[
            Formula::with("v = 2 and m >= 2 p", "3 p - 1"),
            Formula::with("v = 2 and m = p", "2 p"),
            Formula::at_most("", "v min(m, 2 p)"),
        ],
    },
    stages: StageRule::Vs,
    generate,
    ..Generator::USUAL
};

/// The ticks of a backward; a forward has one.
const BACKWARD_TICKS: usize = 2;

/// The number of microbatches that may be in flight for each rank.
const IN_FLIGHT: u32 = 2;

/// A forward or a full backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
}

/// An action that can run, or that runs.
#[derive(Debug, Clone, Copy)]
struct Work {
    kind: Kind,
    microbatch: u32,
    stage: StageIndex,
}

/// A rank in the simulated run.
#[derive(Default)]
struct RankState {
    /// The actions that can run, by kind, the oldest microbatch first and of equal ones the last stage.
    ready: [BinaryHeap<(Reverse<u32>, StageIndex)>; 2],
    is_busy: bool,
    last: Option<Kind>,
    row: Vec<Option<Action>>,
}

/// The simulated run of all ranks. Only ranks at which something happens are visited, so that its time
/// follows the number of actions, not the number of idle cells.
struct Run<'a> {
    placement: &'a Placement,
    microbatches: u32,
    ranks: Vec<RankState>,
    cursors: Vec<StageCursor>,
    /// The actions that end at the current tick and at the ticks after it.
    ends: [Vec<Work>; BACKWARD_TICKS + 1],
    /// The ranks that may be able to start an action at the current tick.
    woken: Vec<Rank>,
}

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let mut run = Run::new(placement, spec.microbatches);
    while !run.woken.is_empty() || run.ends.iter().any(|ends| !ends.is_empty()) {
        for rank in std::mem::take(&mut run.woken) {
            run.start_next(rank);
        }
        run.ends.rotate_left(1);
        for work in std::mem::take(&mut run.ends[0]) {
            run.end(work);
        }
    }
    run.ranks.into_iter().map(|rank| rank.row).collect()
}

impl<'a> Run<'a> {
    /// Makes a run in which stage 0 has its first microbatches.
    fn new(placement: &'a Placement, microbatches: u32) -> Self {
        let cells = 2 * placement.stages() as usize / placement.ranks() as usize * microbatches as usize;
        let rank = |_| RankState { row: Vec::with_capacity(cells), ..RankState::default() };
        let mut run = Self {
            placement,
            microbatches,
            ranks: placement.all_ranks().map(rank).collect(),
            cursors: placement.all_stages().map(StageCursor::new).collect(),
            ends: Default::default(),
            woken: Vec::new(),
        };
        for microbatch in 0..microbatches.min(IN_FLIGHT * placement.ranks()) {
            run.make_ready(Work { kind: Kind::Forward, microbatch, stage: StageIndex::new(0) });
        }
        run
    }

    fn make_ready(&mut self, work: Work) {
        let rank = self.placement.rank_of(work.stage);
        self.ranks[rank.index()].ready[work.kind as usize].push((Reverse(work.microbatch), work.stage));
        self.woken.push(rank);
    }

    /// Starts the next action of a rank, if it is free and one can run.
    fn start_next(&mut self, rank: Rank) {
        let state = &mut self.ranks[rank.index()];
        if state.is_busy {
            return;
        }
        let Some(work) = state.take_next() else { return };
        (state.is_busy, state.last) = (true, Some(work.kind));
        let cursor = &mut self.cursors[work.stage.index()];
        let (action, ticks) = match work.kind {
            Kind::Forward => (cursor.forward(), 1),
            Kind::Backward => (cursor.backward(), BACKWARD_TICKS),
        };
        state.row.push(Some(action));
        self.ends[ticks].push(work);
    }

    /// Ends an action: its rank is free, and what needs its result can run.
    fn end(&mut self, Work { kind, microbatch, stage }: Work) {
        let rank = self.placement.rank_of(stage);
        self.ranks[rank.index()].is_busy = false;
        self.woken.push(rank);
        let next = match kind {
            Kind::Forward => self
                .placement
                .next(stage)
                .map(|stage| Work { kind: Kind::Forward, microbatch, stage })
                .or(Some(Work { kind: Kind::Backward, microbatch, stage })),
            Kind::Backward => match self.placement.previous(stage) {
                Some(stage) => Some(Work { kind: Kind::Backward, microbatch, stage }),
                None => {
                    let started = microbatch + IN_FLIGHT * self.placement.ranks();
                    let first = Work { kind: Kind::Forward, microbatch: started, stage };
                    (started < self.microbatches).then_some(first)
                }
            },
        };
        next.into_iter().for_each(|work| self.make_ready(work));
    }
}

impl RankState {
    /// Removes the action to run next: of the kind that did not run last, if one can run.
    fn take_next(&mut self) -> Option<Work> {
        let tops = [Kind::Forward, Kind::Backward].map(|kind| {
            let &(Reverse(microbatch), stage) = self.ready[kind as usize].peek()?;
            Some((self.last == Some(kind), microbatch, Reverse(stage), kind))
        });
        let first =
            tops.into_iter().flatten().min_by_key(|&(same, microbatch, stage, _)| (same, microbatch, stage));
        let (_, microbatch, Reverse(stage), kind) = first?;
        self.ready[kind as usize].pop();
        Some(Work { kind, microbatch, stage })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::csv::print_schedule;
    use crate::generate::generate;

    #[test]
    fn two_waves_alternate() {
        let spec =
            ScheduleSpec { ranks: 2, stages_per_rank: Some(4), microbatches: 2, ..ScheduleSpec::default() };
        assert_eq!(
            print_schedule(&generate(NAME, &spec).expect("a schedule")),
            "0F0,0F1,3F0,4F0,3F1,4F1,7F0,7B0,7F1,7B1,4B0,3B0,4B1,3B1,0B0,0B1\n\
             1F0,2F0,1F1,2F1,5F0,6F0,5F1,6F1,6B0,5B0,6B1,5B1,2B0,1B0,2B1,1B1\n"
        );
    }

    /// The time must not grow with the square of the number of stages on a rank.
    #[test]
    fn many_stages_take_little_time() {
        let spec = ScheduleSpec {
            ranks: 2,
            stages_per_rank: Some(20_000),
            microbatches: 4,
            ..ScheduleSpec::default()
        };
        let start = Instant::now();
        let schedule = generate(NAME, &spec).expect("a schedule");
        assert_eq!(schedule.rows().iter().map(Vec::len).sum::<usize>(), 2 * 40_000 * 4);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}
