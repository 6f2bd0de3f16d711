//! Seq1F1B: 1F1B over slices of microbatches, which divides both the bubble and the memory of the warm-up.
//!
//! The guide in `GENERATOR` has the paper and the formulas. The forwards take all slices in their order. The
//! backwards take the microbatches in order, and the slices of each in descending order ([`crate::slices`]).
//! The first backward runs on the last slice of microbatch 0, so the last stage needs `k` forwards before it.
//! Stage `s` of `p` therefore warms up with `min(m k, p - s + k - 1)` forwards, then alternates a backward
//! and a forward while forwards remain, and cools down with the remaining backwards. It holds at most as many
//! slices as it warms up with.
//!
//! The formulas are valid for slices that take equally long. The paper cuts microbatches so that they do:
//! later slices are shorter, because they attend to more keys. If slices have equal length, their times grow
//! ([`Costs::attention`]).
//!
//! [`Costs::attention`]: crate::Costs::attention

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::one_f_one_b::row;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::slices::Slices;

const NAME: &str = "seq1f1b";

const DEFAULT_SLICES: Slices = Slices::new(2).expect("2 is not 0");

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "1F1B over slices of the sequence; smaller bubble, less memory",
    settings: &[Setting::Slices],
    trains: false,
    aliases: &["seq"],
    guide: Guide {
        source: "Sun et al., \"Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model \
                 Training\", 2024",
        order: "There is one stage on each rank, and each microbatch is cut along its sequence into `k` slices. \
                Rank `r` warms up with the forwards of `p - r + k - 1` slices, then alternates a backward and a \
                forward of a slice while forwards remain, and ends with the remaining backwards. Forwards take the \
                slices of a microbatch in ascending order and backwards in descending order, because a slice \
                attends to the keys and values of the slices before it. Actions number slices: slice `s` of \
                microbatch `m` has the number `m k + s`, and pictures name it `m.s`.",
        choice: "It is for long sequences and few microbatches. It trains models whose layers can run slices: every \
                 decoder family, without the balance loss of routers, and your own layers that say so. Losses and \
                 gradients are the same as with whole microbatches up to rounding. It does not work with \
                 recomputation, tensor ranks, packed documents or side inputs. With `k` slices it has the bubble of 1F1B with `k` times as many \
                 microbatches, and the first rank holds `(p + k - 1) / k` activations instead of `p`. It sends `k` \
                 times as many messages.",
        bubble: &[Formula::always("(p - 1) / (k m + p - 1)")],
        peak: &[Formula::always("min(k m, p + k - 1) / k")],
    },
    slices: DEFAULT_SLICES,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let slices = spec.slices.unwrap_or(DEFAULT_SLICES);
    let (ranks, all) = (placement.ranks(), spec.microbatches * slices.get());
    let warm_up = |stage: StageIndex| ranks - stage.get() + slices.get() - 1;
    placement.all_stages().map(|stage| reversed(row(stage, warm_up(stage), all), slices)).collect()
}

/// Reverses the order in which the backwards of a row take the slices of each microbatch.
fn reversed(mut row: Vec<Option<Action>>, slices: Slices) -> Vec<Option<Action>> {
    for cell in &mut row {
        if let Some(Action::Backward { microbatch, .. }) = cell {
            let (_, slice) = slices.place(*microbatch);
            *microbatch = Microbatch::new(microbatch.get() + slices.get() - 1 - 2 * slice.get());
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::print_schedule;
    use crate::generate::generate;

    fn check(slices: u32, microbatches: u32, expected: &str) {
        let spec =
            ScheduleSpec { ranks: 2, microbatches, slices: Slices::new(slices), ..ScheduleSpec::default() };
        let schedule = generate(NAME, &spec).expect("a schedule");
        assert_eq!(schedule.slices().get(), slices);
        assert_eq!(print_schedule(&schedule), expected);
    }

    #[test]
    fn backwards_take_the_last_slice_first() {
        check(
            2,
            2,
            "0F0,0F1,0F2,0B1,0F3,0B0,0B3,0B2\n\
             1F0,1F1,1B1,1F2,1B0,1F3,1B3,1B2\n",
        );
        check(3, 1, "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n");
    }

    #[test]
    fn one_slice_is_1f1b() {
        let spec = ScheduleSpec { ranks: 3, microbatches: 7, ..ScheduleSpec::default() };
        let whole = generate(NAME, &ScheduleSpec { slices: Slices::new(1), ..spec.clone() });
        assert_eq!(whole, generate("1f1b", &spec));
    }

    #[test]
    fn too_many_slices_are_refused() {
        let slices = Slices::new(u32::MAX);
        let spec = ScheduleSpec { ranks: 4, microbatches: 2, slices, ..ScheduleSpec::default() };
        let message = "4 stages and 2 microbatches of 4294967295 slices are too many: a schedule has at most 16777216 stages and \
                       268435456 actions";
        assert_eq!(generate(NAME, &spec).map_err(|error| error.to_string()), Err(message.to_owned()));
    }
}
