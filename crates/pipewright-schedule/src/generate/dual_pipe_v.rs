//! DualPipeV: two stages per rank, placed in a V. A forward of one stage and a backward of the other run as
//! one action, so that the communication of each overlaps with the computation of the other.
//!
//! The guide in `GENERATOR` has the source and the formulas. DualPipe is cut in half to a V, so that no
//! parameter is held twice. Rank `r` of `p` owns `r`, called chunk 0, and `2 p - 1 - r`, called chunk 1. It
//! needs at least as many microbatches as stages.
//!
//! The order of rank `r` for `m` microbatches, where `(F0 B1)` is one overlap:
//!
//! 1. `2 (p - 1 - r)` times `F0`;
//! 2. `r + 1` times `F0 F1`;
//! 3. `p - 1 - r` times `I1 W1 F1`;
//! 4. `m - 2 p + r + 1` times `(F0 B1) (F1 B0)`; the last rank begins with `F0` and `B1` on their own;
//! 5. `p - 1 - r` times `B1 (F1 B0)`;
//! 6. `r + 1` times `B1 B0`, whose second half computes only input gradients (it begins with `B1` on odd
//!    ranks and with `B0` on even ones);
//! 7. `p - 1 - r` times `W I0`, where `W` is the weight gradient that has waited longest;
//! 8. the remaining weight gradients, in the order of their input gradients.
//!
//! The peak is as much as `p + 1/2` activations under 1F1B, whose stages are twice as large.

use std::collections::VecDeque;

use crate::action::Action;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::Rank;
use crate::overlap::{MAX_OVERLAPPED_MICROBATCH, MAX_OVERLAPPED_STAGE};
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "dualpipev",
    summary: "DualPipeV: forward and backward of two stages overlap on a V",
    guide: Guide {
        source: "DeepSeek-AI, \"DeepSeek-V3 Technical Report\", 2024 (DualPipe), cut in half to a V as in \
                 its open-source description",
        order: "There are two stages on each rank, placed in a V: rank `r` has stages `r` and `2 p - 1 - \
                r`. In the steady state a rank runs the forward of one stage and the backward of the other \
                as one action.",
        choice: "Choose it for experts that several replicas hold together (`mesh.expert_parallel`): while \
                 one microbatch waits for its tokens, the rank computes the other one. For other layers that \
                 communicate inside a stage, a function of your own (`ActionHook::overlap`) runs the \
                 exchanges of one microbatch while the other one computes. Without exchanges, \
                 `zbvzerobubble` has the same bubble. It needs at least `2 p` microbatches.",
        bubble: &[Formula::always("(p - 1) / (6 m + p - 1)")],
        peak: &[Formula::with("p >= 2", "2 p + 1")],
    },
    stages: StageRule::V,
    actions: 3,
    check,
    generate,
    ..Generator::USUAL
};

/// Refuses fewer microbatches than stages, for which there is no order, and more than an overlap can name.
fn check(schedule: &'static str, spec: &ScheduleSpec, stages_per_rank: u32) -> Result<(), GenerateErrorKind> {
    let (stages, microbatches) = (spec.ranks * stages_per_rank, spec.microbatches);
    if microbatches < stages {
        return Err(GenerateErrorKind::TooFewMicrobatches { schedule, microbatches, stages });
    }
    if stages - 1 > MAX_OVERLAPPED_STAGE || microbatches - 1 > MAX_OVERLAPPED_MICROBATCH {
        return Err(GenerateErrorKind::TooManyToOverlap { schedule, stages, microbatches });
    }
    Ok(())
}

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    placement.all_ranks().map(|rank| row(placement, rank, spec.microbatches)).collect()
}

fn row(placement: &Placement, rank: Rank, microbatches: u32) -> Vec<Option<Action>> {
    let (ranks, above) = (placement.ranks(), rank.get());
    let below = ranks - 1 - above;
    let mut cursors = placement.stages_of(rank).iter().copied().map(StageCursor::new);
    let (Some(mut down), Some(mut up)) = (cursors.next(), cursors.next()) else { return Vec::new() };
    let mut row = Vec::with_capacity(6 * microbatches as usize);
    row.extend((0..2 * below).map(|_| down.forward()));
    row.extend((0..=above).flat_map(|_| [down.forward(), up.forward()]));
    row.extend((0..below).flat_map(|_| [up.input_backward(), up.weight_backward(), up.forward()]));
    for turn in 0..microbatches - 2 * ranks + above + 1 {
        if turn == 0 && below == 0 {
            row.extend([down.forward(), up.backward()]);
        } else {
            row.push(down.overlap(&mut up));
        }
        row.push(up.overlap(&mut down));
    }
    row.extend((0..below).flat_map(|_| [up.backward(), up.overlap(&mut down)]));
    cool_down(&mut row, [&mut down, &mut up], above, below);
    row.into_iter().map(Some).collect()
}

/// Steps 6 to 8.
fn cool_down(row: &mut Vec<Action>, cursors: [&mut StageCursor; 2], above: u32, below: u32) {
    let [down, up] = cursors;
    // The iteration from which each chunk defers its weight gradients: `above + 1` times.
    let (up_splits, down_splits) = (above / 2 + 1, above.div_ceil(2));
    // The chunks of the pending weight gradients, `true` for the chunk on the way up.
    let mut waiting: VecDeque<bool> = VecDeque::new();
    for turn in 0..=above {
        if turn < up_splits {
            row.push(up.backward());
        } else {
            row.push(up.input_backward());
            waiting.push_back(true);
        }
        if turn < down_splits {
            row.push(down.backward());
        } else {
            row.push(down.input_backward());
            waiting.push_back(false);
        }
    }
    for _ in 0..below {
        row.extend(
            waiting
                .pop_front()
                .map(|is_up| if is_up { up.weight_backward() } else { down.weight_backward() }),
        );
        row.push(down.input_backward());
        waiting.push_back(false);
    }
    let left = waiting.into_iter();
    row.extend(left.map(|is_up| if is_up { up.weight_backward() } else { down.weight_backward() }));
}
