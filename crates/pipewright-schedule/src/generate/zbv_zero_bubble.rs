//! ZBV: zero bubble with two stages per rank, placed in a V, and the memory of 1F1B.
//!
//! The guide in `GENERATOR` has the paper and the formulas. Rank `r` of `p` owns `r`, called chunk 0, and
//! `2 p - 1 - r`, called chunk 1.
//!
//! The order of rank `r`. `F0` is the next forward of chunk 0. Each kind of action of a chunk visits the
//! microbatches 0, 1, 2, ... up to `n = max(m, 2 p - 1)`, where `m` is the number of microbatches of the
//! schedule:
//!
//! 1. `2 (p - r) - 1` times `F0`;
//! 2. `r` times `F1 F0`;
//! 3. `p - r` times `F1 I1 W1`;
//! 4. while forwards remain, `F0 I0 W0 F1 I1 W1`, without the `F0` once there is none;
//! 5. `r` times `I0 I1`, whose weight gradients are deferred;
//! 6. `p - r` times `I0 W0`;
//! 7. the remaining weight gradients, chunk 1 first.
//!
//! If `m < 2 p - 1`, actions of microbatches that do not exist are idle cells. There are also `r` idle cells
//! at the start. Otherwise, with `F`, `I` and `W` of one length, no rank idles between its first and its last
//! action.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::Rank;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "zbvzerobubble",
    summary: "ZBV: zero bubble on a V of two stages per rank, memory of 1F1B",
    settings: &[Setting::Overlap],
    aliases: &["zbv", "v-zb"],
    guide: Guide {
        source: "Qi et al., \"Zero Bubble Pipeline Parallelism\", 2023, section on ZB-V, in the fixed order \
                 of PyTorch",
        order: "There are two stages on each rank, placed in a V: rank `r` has stages `r` and `2 p - 1 - \
                r`. After the warm-up a rank repeats `F I W` for both stages. In the cool-down, input \
                gradients run before weight gradients.",
        choice: "Choose it if the layers defer their weight gradients and there are at least `2 p - 1` \
                 microbatches. The first and the last stage are on rank 0, which suits tied embeddings. It \
                 is at its best if `F`, `I` and `W` take equally long.",
        bubble: &[Formula::with("m >= 2 p - 1", "(p - 1) / (6 m + p - 1)")],
        peak: &[Formula::with("m >= 2 p - 1", "2 p")],
    },
    stages: StageRule::V,
    actions: 3,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    placement.all_ranks().map(|rank| row(placement, rank, spec.microbatches)).collect()
}

fn row(placement: &Placement, rank: Rank, microbatches: u32) -> Vec<Option<Action>> {
    let (ranks, above) = (placement.ranks(), rank.get());
    let below = ranks - above;
    let full = microbatches.max(2 * ranks - 1);
    let mut cursors = placement.stages_of(rank).iter().copied().map(StageCursor::new);
    let (Some(mut down), Some(mut up)) = (cursors.next(), cursors.next()) else { return Vec::new() };
    let mut row = Vec::with_capacity((above + 6 * full) as usize);
    row.extend((0..2 * below - 1).map(|_| down.forward()));
    row.extend((0..above).flat_map(|_| [up.forward(), down.forward()]));
    row.extend((0..below).flat_map(|_| [up.forward(), up.input_backward(), up.weight_backward()]));
    // Chunk 0 has run `2 p - 1 - r` forwards so far, and chunk 1 `p`.
    let (mut down_done, mut up_done) = (2 * ranks - 1 - above, ranks);
    while up_done < full {
        if down_done < full {
            row.push(down.forward());
            down_done += 1;
        }
        row.extend([down.input_backward(), down.weight_backward()]);
        row.extend([up.forward(), up.input_backward(), up.weight_backward()]);
        up_done += 1;
    }
    row.extend((0..above).flat_map(|_| [down.input_backward(), up.input_backward()]));
    row.extend((0..below).flat_map(|_| [down.input_backward(), down.weight_backward()]));
    row.extend((0..above).map(|_| up.weight_backward()));
    row.extend((0..above).map(|_| down.weight_backward()));
    let exists = |action: &Action| action.microbatch().is_some_and(|it| it.get() < microbatches);
    let cells = row.into_iter().map(|action| Some(action).filter(exists));
    repeat_n(None, rank.index()).chain(cells).collect()
}
