//! Interleaved 1F1B: several stages per rank, which divides the bubble by their number.
//!
//! The guide in `GENERATOR` has the paper and the formulas.
//!
//! Notation: `p` ranks, `v` stages on each rank, `m` microbatches in groups of `g`. The setting `group_size`
//! gives `g`, from `p` to `m`; the last group is short if `g` does not divide `m`. Without it there are
//! `max(1, m / p)` groups of equal size, called rounds, so `m` must be a multiple of their number. The stages
//! of a rank alternate, each for the `g` microbatches of a group (`interleaving.rs`).
//!
//! Rank `r` warms up with `w = min(v m, (v - 1) g + 2 (p - 1 - r))` forwards, then alternates a forward and a
//! backward while forwards remain, and cools down with the remaining backwards. It holds at most `w + 1`
//! activations of a stage.
//!
//! If the last group has `s < p` microbatches, that warm-up may be too long: a rank would wait for a forward
//! whose input needs, through later ranks, a backward that the rank has put after it. `2 (p - 1 - r)` then
//! becomes `(p - 1 - r) + min(p - 1 - r, s + 1 + g - p)`. This is the longest warm-up of that form without a
//! deadlock for any number of groups. With `s = 1` and `v = 2` it may have `g` more forwards, which only the
//! setting `overlap` asks for. The tests check all small sizes.
//!
//! With the setting `overlap`, a rank warms up with `g` more forwards, as far as a short last group allows.
//! Then the forward and the backward that follow each other are of different stages more often, and only
//! those overlap ([`crate::pairing`]). With `v = 2` and the usual warm-up, those of the last rank are always
//! of one stage. Megatron-LM adds one forward for the same purpose, because both halves of its overlaps may
//! be of one stage: it only needs different microbatches.
//!
//! Each action has one cell. The idle cells are: `r` before the first forward; after the warm-up, until the
//! first gradient can arrive from the last rank; one before each backward of the cool-down, in which other
//! ranks run a forward.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::interleaving::Interleaving;
use crate::generate::settings::Setting;
use crate::generate::spec::{ScheduleSpec, check_interleaving};
use crate::generate::stage_cursor::StageCursor;
use crate::ids::Rank;
use crate::placement::Placement;

const NAME: &str = "interleaved1f1b";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "1F1B with several stages per rank; smaller bubble, a little more memory",
    settings: &[Setting::GroupSize, Setting::Overlap],
    aliases: &["interleaved", "1f1b-interleaved", "vpp"],
    guide: Guide {
        source: "Narayanan et al., \"Efficient Large-Scale Language Model Training on GPU Clusters Using \
                 Megatron-LM\", 2021",
        order: "There is any number of stages on each rank, placed in a loop. Microbatches run in rounds of \
                equal size. The number of rounds is `m / p`, rounded down, and at least 1. The stages of a rank alternate, each \
                for the microbatches of a round. With `group_size`, rounds have that many microbatches, and \
                the last one may have fewer. A rank warms up with forwards, then alternates a forward \
                and a backward, and ends with the remaining backwards. With `overlap`, it warms up with \
                the forwards of one more round, unless a short last round allows fewer, and holds as many \
                more activations.",
        choice: "Choose it if the layers cannot defer their weight gradients and the model has at least `v` \
                 layers for each rank. It divides the bubble of 1F1B by `v`, sends `v` times as many \
                 messages, and needs a little more memory. `m` is a multiple of the number of rounds; every \
                 multiple of `p` is. With `group_size`, from `p` to `m`, there may be any number of \
                 microbatches. Larger groups hide slow messages and need more memory.",
        bubble: &[Formula::with("m is a multiple of p", "(p - 1) / (v m + p - 1)")],
        peak: &[Formula::with("m is a multiple of p", "min(v m, v p + p - 1)")],
    },
    stages: StageRule::Loops,
    check: check_interleaving,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let order = spec.checked_interleaving(placement);
    let further = if spec.overlap { order.group } else { 0 };
    placement.all_ranks().map(|rank| row(placement, rank, order, further)).collect()
}

fn row(placement: &Placement, rank: Rank, order: Interleaving, further: u32) -> Vec<Option<Action>> {
    let mut cursors = StageCursor::of_rank(placement, rank);
    let forwards = order.all();
    let followers = placement.ranks() - 1 - rank.get();
    let warm_up = order.wide_warm_up(followers, further, placement.ranks());
    let first_backward = placement.stages() + 2 * followers;
    let mut row = Vec::with_capacity((rank.get() + first_backward + 3 * forwards) as usize);
    row.extend(repeat_n(None, rank.index()));
    row.extend((0..warm_up).map(|op| Some(cursors[order.forward(op)].forward())));
    if warm_up > 0 {
        row.extend(repeat_n(None, first_backward.saturating_sub(warm_up + rank.get()) as usize));
    }
    for op in 0..forwards {
        row.push((warm_up + op < forwards).then(|| cursors[order.forward(warm_up + op)].forward()));
        row.push(Some(cursors[order.backward(op)].backward()));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::print_schedule;
    use crate::generate::generate;
    use crate::schedule::Schedule;
    use crate::vpp::{VirtualPipeline, tables};

    fn grouped(ranks: u32, chunks: u32, microbatches: u32, group_size: u32) -> Schedule {
        let spec = ScheduleSpec {
            ranks,
            stages_per_rank: Some(chunks),
            microbatches,
            group_size: Some(group_size),
            ..ScheduleSpec::default()
        };
        generate(NAME, &spec).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn seven_microbatches_run_on_two_ranks() {
        assert_eq!(
            print_schedule(&grouped(2, 2, 7, 3)),
            "0F0,0F1,0F2,2F0,2F1,,2F2,2B0,0F3,2B1,0F4,2B2,0F5,0B0,2F3,0B1,2F4,0B2,2F5,2B3,0F6,2B4,2F6,2B5,,0B3,,0B4,,0B5,\
             ,2B6,,0B6\n\
             ,1F0,1F1,1F2,3F0,3B0,3F1,3B1,3F2,3B2,1F3,1B0,1F4,1B1,1F5,1B2,3F3,3B3,3F4,3B4,3F5,3B5,1F6,1B3,3F6,1B4,,1B5,,\
             3B6,,1B6\n"
        );
    }

    #[test]
    fn groups_are_those_of_the_tables() {
        for (ranks, chunks) in [(1, 3), (2, 2), (3, 2), (3, 4)] {
            for microbatches in ranks..3 * ranks + 3 {
                for group_size in ranks..=microbatches {
                    check_tables(ranks, chunks, microbatches, group_size);
                }
            }
        }
    }

    /// Compares the order of the forwards and the warm-up of each rank with the tables of Megatron-Core.
    fn check_tables(ranks: u32, chunks: u32, microbatches: u32, group_size: u32) {
        let pipeline = VirtualPipeline { ranks, chunks, microbatches, group_size: Some(group_size) };
        let tables = tables(&pipeline).expect("tables");
        let schedule = grouped(ranks, chunks, microbatches, group_size);
        for rank in schedule.placement().all_ranks() {
            let actions: Vec<Action> = schedule.row(rank).iter().copied().flatten().collect();
            let is_forward = |action: &Action| matches!(action, Action::Forward { .. });
            let number = |action: &Action| action.microbatch().expect("a computation").get();
            let forwards = actions.iter().filter(|action| is_forward(action));
            let found: Vec<(u32, u32)> =
                forwards.map(|action| (number(action), action.stage().get() / ranks)).collect();
            assert_eq!(found, tables.table, "{pipeline:?}");
            let warm_up = actions.iter().position(|action| !is_forward(action)).expect("a backward") as u64;
            let (before, after, _) = tables.warmup[rank.index()];
            // The schedule runs one forward before the first backward even after the warm-up.
            assert_eq!(warm_up, before + u64::from(after > 0), "{pipeline:?} {rank}");
        }
    }
}
