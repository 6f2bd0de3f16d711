//! Hanayo: waves that run down the ranks and up again, several times for each microbatch.
//!
//! Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency",
//! 2023. An even number of stages a rank, `2 w` for `w` waves, on a line that turns at both ends.
//!
//! The order is that of a run in which a forward takes one tick, a backward two, and the way between ranks
//! none. A free rank runs what can run; of several actions, first one of the other kind than it ran last, then
//! that of the oldest microbatch, then that of the stage furthest down the line. Stage 0 takes a microbatch in
//! while fewer than `2 p` of `p` ranks are in flight, that is, have begun on stage 0 and not ended there. Nothing
//! can block: whatever is in flight runs through.
//!
//! A rank holds at most `2 w min(m, 2 p)` activations of a stage, where 1F1B holds `2 w p`; at 8 ranks and 32
//! microbatches it is 23 of 16 with one wave and 40 of 32 with two. There the bubble is .099 and .141, against
//! .179 for 1F1B; at 8 microbatches, where pipelines are short of work and waves help most, it is .368 and
//! .238 against .467.

use std::cmp::Reverse;

use crate::action::Action;
use crate::generate::catalogue::Generator;
use crate::generate::error::GenerateError;
use crate::generate::lane::Lane;
use crate::generate::spec::ScheduleSpec;
use crate::ids::StageIndex;
use crate::schedule::Schedule;

const NAME: &str = "hanayo";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "waves down and up the ranks; two stages a rank for each wave",
    settings: &[],
    aliases: &["wave"],
    generate,
};

/// The ticks of a backward; a forward has one.
const BACKWARD_TICKS: u64 = 2;

/// How many microbatches may be in flight for each rank.
const IN_FLIGHT: u32 = 2;

/// A forward or a full backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
}

/// How far every stage is.
struct Progress {
    microbatches: u32,
    in_flight: u32,
    /// For each stage, how many forwards have begun, and how many have ended.
    forwards: Vec<[u32; 2]>,
    /// For each stage, how many backwards have begun, and how many have ended.
    backwards: Vec<[u32; 2]>,
}

/// What a rank is doing, or did last, and until which tick.
#[derive(Debug, Clone, Copy)]
struct Turn {
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
    let mut lanes: Vec<Lane> = placement.all_stages().map(Lane::new).collect();
    let cells = 2 * stages / placement.ranks() as usize * spec.microbatches as usize;
    let mut rows: Vec<Vec<Option<Action>>> =
        placement.all_ranks().map(|_| Vec::with_capacity(cells)).collect();
    let mut turns: Vec<Option<Turn>> = vec![None; rows.len()];
    let mut tick = 0;
    while progress.is_unfinished() {
        for turn in turns.iter().flatten().filter(|turn| turn.end == tick) {
            progress.counts(turn.kind, turn.stage)[1] += 1;
        }
        for ((rank, row), turn) in placement.all_ranks().zip(&mut rows).zip(&mut turns) {
            if turn.is_some_and(|turn| turn.end > tick) {
                continue;
            }
            let chosen = progress.choose(placement.stages_of(rank), turn.map(|turn| turn.kind));
            let Some((kind, stage)) = chosen else { continue };
            progress.counts(kind, stage)[0] += 1;
            let lane = &mut lanes[stage.index()];
            let (action, ticks) = match kind {
                Kind::Forward => (lane.forward(), 1),
                Kind::Backward => (lane.backward(), BACKWARD_TICKS),
            };
            row.push(Some(action));
            *turn = Some(Turn { kind, stage, end: tick + ticks });
        }
        tick += 1;
    }
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}

impl Progress {
    /// Whether a backward of stage 0, the last action of a microbatch, has yet to begin.
    fn is_unfinished(&self) -> bool {
        self.backwards[0][0] < self.microbatches
    }

    /// What a free rank with these stages, which ran an action of the kind `last`, runs next.
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

    /// The microbatch of the next forward of `stage`, where its input is there.
    fn ready_forward(&self, stage: usize) -> Option<u32> {
        let next = self.forwards[stage][0];
        let bound = match stage.checked_sub(1) {
            Some(previous) => self.forwards[previous][1],
            None => self.microbatches.min(self.backwards[0][1] + self.in_flight),
        };
        (next < bound).then_some(next)
    }

    /// The microbatch of the next backward of `stage`, where its gradient is there.
    fn ready_backward(&self, stage: usize) -> Option<u32> {
        let next = self.backwards[stage][0];
        let gradient = self.backwards.get(stage + 1).is_none_or(|it| next < it[1]);
        (gradient && next < self.forwards[stage][1]).then_some(next)
    }

    /// How many actions of a kind a stage has begun and ended.
    fn counts(&mut self, kind: Kind, stage: StageIndex) -> &mut [u32; 2] {
        let counts = match kind {
            Kind::Forward => &mut self.forwards,
            Kind::Backward => &mut self.backwards,
        };
        &mut counts[stage.index()]
    }
}
