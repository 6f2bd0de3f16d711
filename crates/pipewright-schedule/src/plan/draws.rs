//! Random changes of a plan ([`Change`]), for the last phase of the search.

use std::ops::Range;

use crate::plan::change::{Change, Recomputed, may_move};
use crate::plan::critical::Block;
use crate::plan::layers::Layers;
use crate::plan::numbers::Numbers;
use crate::plan::order::Order;
use crate::plan::recompute::{chosen, drawn_parts};
use crate::plan::tuning;
use crate::recompute::StageRecompute;

/// Returns a random number from 0 to 20, with a mean of 2.2. Most are small.
pub(super) fn drawn_tolerance(numbers: &mut Numbers) -> f64 {
    let drawn = numbers.below(1 << 20) as f64 / f64::from(1 << 20);
    (1.0 - drawn) / (drawn + 0.05)
}

/// The plan that is changed, and the changes that may be drawn.
pub(super) struct Draws<'a> {
    pub(super) order: &'a Order,
    pub(super) starts: &'a [usize],
    pub(super) recompute: &'a [Option<StageRecompute>],
    /// The blocks of the critical path.
    pub(super) blocks: &'a [Block],
    pub(super) layers: &'a Layers,
    /// Whether stages may recompute some layers, parts of layers or microbatches.
    pub(super) recomputes_in_part: bool,
}

impl Draws<'_> {
    /// Returns a change at random; `None` if the drawn one cannot be.
    pub(super) fn draw(&self, numbers: &mut Numbers) -> Option<Change> {
        let stages = self.recompute.len();
        if stages > 1 || self.recomputes_in_part {
            match numbers.below(tuning::polish::BOUNDARIES) {
                0 if stages > 1 => return self.draw_shift(numbers),
                1 if self.recomputes_in_part => {
                    return self.draw_recomputed(0..stages, numbers).map(Change::Recompute);
                }
                _ => {}
            }
        }
        let &Block { rank, first, last } = self.blocks.get(numbers.below(self.blocks.len().max(1)))?;
        if first == last {
            return None;
        }
        let far = numbers.below((last - first).min(tuning::polish::REACH));
        let (from, to) = match numbers.below(4) {
            0 => (first, first + 1),
            1 => (last - 1, last),
            2 => (first + 1 + far, first),
            _ => (last - 1 - far, last),
        };
        may_move(&self.order.rows[rank], from, to).then_some(Change::Move { rank, from, to })
    }

    /// Returns a random change of boundaries. Often one of their stages recomputes more or less.
    fn draw_shift(&self, numbers: &mut Numbers) -> Option<Change> {
        let stages = self.recompute.len();
        let first = 1 + numbers.below(stages - 1);
        let more = numbers.below((stages - first).min(tuning::polish::MOST_BOUNDARIES));
        let last = if numbers.below(3) == 0 { first + more } else { first };
        let is_up = numbers.below(2) == 0;
        let fits = if is_up {
            self.starts[last] + 1 < self.starts[last + 1]
        } else {
            self.starts[first] - 1 > self.starts[first - 1]
        };
        let recomputed = if self.recomputes_in_part && numbers.below(2) == 0 {
            self.draw_recomputed(first - 1..last + 1, numbers)
        } else {
            None
        };
        fits.then_some(Change::Shift { first, last, is_up, recomputed })
    }

    /// Returns a random change of what one of these stages recomputes; `None` if the drawn one cannot be.
    fn draw_recomputed(&self, stages: Range<usize>, numbers: &mut Numbers) -> Option<Recomputed> {
        let stage = stages.start + numbers.below(stages.len());
        let (before, range) = (self.recompute[stage], self.starts[stage]..self.starts[stage + 1]);
        let nothing = StageRecompute { layers: Some(0), ..StageRecompute::WHOLE };
        let StageRecompute { mut keep, mut parts, .. } = before.unwrap_or(nothing);
        let mut again = before.map_or(0, |choice| choice.layers_of(range.len()));
        if let Some(drawn) = drawn_parts(self.layers.parts_of(range.clone()), parts, numbers) {
            parts = drawn;
        } else if again > 0 && numbers.below(3) == 0 {
            keep = if numbers.below(2) == 0 { keep.checked_sub(1)? } else { keep + 1 };
        } else {
            again = if numbers.below(2) == 0 { again.checked_sub(1)? } else { again + 1 };
        }
        let keep = if again > 0 { keep.min(self.order.microbatches) } else { 0 };
        let after = chosen(again, range.len(), parts).map(|choice| StageRecompute { keep, ..choice });
        (after != before).then_some(Recomputed { stage, before, after })
    }
}
