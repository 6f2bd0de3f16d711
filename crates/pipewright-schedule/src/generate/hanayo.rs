//! Hanayo: waves that run down the ranks and up again, several times for each microbatch.
//!
//! The guide in `GENERATOR` has the paper and the formulas. There are `2 w` stages a rank for `w` waves, placed down the
//! ranks and up again `w` times.
//!
//! The order is that of a simulated run in which a forward takes one tick, a backward two, and messages none. A free
//! rank runs an action that can run. Among several it prefers the kind that it did not run last, then the oldest
//! microbatch, then the last stage of the model. Stage 0 starts a microbatch while fewer than `2 p` microbatches are in
//! flight, where `p` is the number of ranks. A microbatch is in flight from its forward to its backward on stage 0.
//! There is no deadlock, because a microbatch in flight can always continue.
//!
//! A rank holds at most `2 w min(m, 2 p)` activations of a stage, while 1F1B holds `2 w p`. At 8 ranks and 32
//! microbatches it holds 23 (1F1B: 16) with one wave and 40 (1F1B: 32) with two, and the bubble is .099 and .141 (1F1B:
//! .179). At 8 microbatches, where waves help most, the bubble is .368 and .238 (1F1B: .467).

use std::cmp::Reverse;

use crate::action::Action;
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::StageIndex;
use crate::schedule::Schedule;

const NAME: &str = "hanayo";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "waves down and up the ranks; two stages a rank for each wave",
    settings: &[],
    trains: true,
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
    generate,
};

/// The ticks of a backward; a forward has one.
const BACKWARD_TICKS: u64 = 2;

/// The number of microbatches that may be in flight for each rank.
const IN_FLIGHT: u32 = 2;

/// A forward or a full backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
}

/// The progress of every stage.
struct Progress {
    microbatches: u32,
    in_flight: u32,
    /// For each stage, the number of forwards that have begun, and that have ended.
    forwards: Vec<[u32; 2]>,
    /// For each stage, the number of backwards that have begun, and that have ended.
    backwards: Vec<[u32; 2]>,
}

/// The action that a rank is running or ran last, and the tick of its end.
#[derive(Debug, Clone, Copy)]
struct RankActivity {
    kind: Kind,
    stage: StageIndex,
    end: u64,
}

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let placement = spec.several_vs(NAME)?;
    let stages = placement.stages() as usize;
    let mut progress = Progress {
        microbatches: spec.microbatches,
        in_flight: IN_FLIGHT * placement.ranks(),
        forwards: vec![[0; 2]; stages],
        backwards: vec![[0; 2]; stages],
    };
    let mut cursors: Vec<StageCursor> = placement.all_stages().map(StageCursor::new).collect();
    let cells = 2 * stages / placement.ranks() as usize * spec.microbatches as usize;
    let mut rows: Vec<Vec<Option<Action>>> =
        placement.all_ranks().map(|_| Vec::with_capacity(cells)).collect();
    let mut activities: Vec<Option<RankActivity>> = vec![None; rows.len()];
    let mut tick = 0;
    while progress.is_unfinished() {
        for activity in activities.iter().flatten().filter(|activity| activity.end == tick) {
            progress.counts(activity.kind, activity.stage)[1] += 1;
        }
        for ((rank, row), activity) in placement.all_ranks().zip(&mut rows).zip(&mut activities) {
            if activity.is_some_and(|activity| activity.end > tick) {
                continue;
            }
            let chosen = progress.choose(placement.stages_of(rank), activity.map(|activity| activity.kind));
            let Some((kind, stage)) = chosen else { continue };
            progress.counts(kind, stage)[0] += 1;
            let cursor = &mut cursors[stage.index()];
            let (action, ticks) = match kind {
                Kind::Forward => (cursor.forward(), 1),
                Kind::Backward => (cursor.backward(), BACKWARD_TICKS),
            };
            row.push(Some(action));
            *activity = Some(RankActivity { kind, stage, end: tick + ticks });
        }
        tick += 1;
    }
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}

impl Progress {
    /// Returns whether a backward of stage 0, which is the last action of a microbatch, has not begun yet.
    fn is_unfinished(&self) -> bool {
        self.backwards[0][0] < self.microbatches
    }

    /// Returns the next action of a free rank that owns `stages` and ran an action of the kind `last` before.
    fn choose(&self, stages: &[StageIndex], last: Option<Kind>) -> Option<(Kind, StageIndex)> {
        let candidate = |kind: Kind, stage: StageIndex| {
            let microbatch = match kind {
                Kind::Forward => self.ready_forward(stage.index()),
                Kind::Backward => self.ready_backward(stage.index()),
            };
            Some((last == Some(kind), microbatch?, Reverse(stage), kind))
        };
        let candidates = stages
            .iter()
            .flat_map(|&stage| [candidate(Kind::Forward, stage), candidate(Kind::Backward, stage)]);
        let first =
            candidates.flatten().min_by_key(|&(same, microbatch, stage, _)| (same, microbatch, stage));
        first.map(|(_, _, Reverse(stage), kind)| (kind, stage))
    }

    /// Returns the microbatch of the next forward of `stage`, if its input exists.
    fn ready_forward(&self, stage: usize) -> Option<u32> {
        let next = self.forwards[stage][0];
        let bound = match stage.checked_sub(1) {
            Some(previous) => self.forwards[previous][1],
            None => self.microbatches.min(self.backwards[0][1] + self.in_flight),
        };
        (next < bound).then_some(next)
    }

    /// Returns the microbatch of the next backward of `stage`, if its gradient exists.
    fn ready_backward(&self, stage: usize) -> Option<u32> {
        let next = self.backwards[stage][0];
        let gradient = self.backwards.get(stage + 1).is_none_or(|it| next < it[1]);
        (gradient && next < self.forwards[stage][1]).then_some(next)
    }

    /// Returns the numbers of actions of a kind that a stage has begun and ended.
    fn counts(&mut self, kind: Kind, stage: StageIndex) -> &mut [u32; 2] {
        let counts = match kind {
            Kind::Forward => &mut self.forwards,
            Kind::Backward => &mut self.backwards,
        };
        &mut counts[stage.index()]
    }
}
