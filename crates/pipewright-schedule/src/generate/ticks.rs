//! Costs as whole numbers, for schedules that are made to measure.
//!
//! Such a schedule compares sums of times, of which many are equal by design. Floating point would let the
//! last bit decide between them; whole numbers keep equal what is equal. A tick is a power of ten of seconds,
//! chosen so that the largest cost has nine digits: costs that are written as decimals stay exact, and the sum
//! over the largest schedule fits 64 bits.

use crate::costs::{Costs, CostsError};
use crate::ids::StageIndex;
use crate::placement::Placement;

/// Below this all costs lie, in ticks.
const LARGEST: f64 = 1e9;

/// What the actions of one stage take for one microbatch, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StageTicks {
    pub(super) forward: u64,
    pub(super) input_backward: u64,
    pub(super) weight_backward: u64,
    /// From the end of a forward until its output is with the next stage; 0 for the last stage.
    pub(super) output_hop: u64,
    /// From the end of a backward until its gradient is with the stage before; 0 for the first stage.
    pub(super) gradient_hop: u64,
}

/// The costs of every stage in ticks. A message takes its link's time as if it were the only one.
///
/// # Errors
/// When the costs do not fit the number of stages, or are out of range.
pub(super) fn ticks(costs: &Costs, placement: &Placement) -> Result<Vec<StageTicks>, CostsError> {
    costs.check(placement.stages())?;
    let all: Vec<[f64; 5]> = placement.all_stages().map(|stage| seconds(costs, placement, stage)).collect();
    let largest = all.iter().flatten().copied().fold(0.0, f64::max);
    let per_second = ticks_per_second(largest);
    let rounded = |[forward, input_backward, weight_backward, output_hop, gradient_hop]: [u64; 5]| {
        StageTicks { forward, input_backward, weight_backward, output_hop, gradient_hop }
    };
    Ok(all.iter().map(|stage| rounded(stage.map(|cost| (cost * per_second).round() as u64))).collect())
}

/// The fields of [`StageTicks`], in seconds.
fn seconds(costs: &Costs, placement: &Placement, stage: StageIndex) -> [f64; 5] {
    let at = costs.stage(stage);
    let hop = |to: Option<StageIndex>| {
        to.map_or(0.0, |to| {
            // A gradient is as large as the output that it belongs to, which the lower stage makes.
            let bytes = costs.output_bytes(stage.min(to));
            let (occupied, latency) = costs.transfer(placement.rank_of(stage), placement.rank_of(to), bytes);
            occupied + latency
        })
    };
    let (next, previous) = (placement.next(stage), placement.previous(stage));
    [at.forward, at.input_backward, at.weight_backward, hop(next), hop(previous)]
}

/// The largest power of ten that keeps `largest`, in seconds, below [`LARGEST`] ticks. Powers are read from
/// decimals, which is exact to the last bit on every machine.
fn ticks_per_second(largest: f64) -> f64 {
    let power = |exponent: i32| format!("1e{exponent}").parse::<f64>().unwrap_or(1.0);
    if largest == 0.0 {
        return 1.0;
    }
    (-30..=300).rev().map(power).find(|power| largest * power < LARGEST).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::{Link, StageSizes};

    fn check(costs: &str, expected: [u64; 5]) {
        let placement = Placement::looped(3, 1).expect("three stages");
        let found = ticks(&costs.parse().expect(costs), &placement).expect("ticks")[1];
        let StageTicks { forward, input_backward, weight_backward, output_hop, gradient_hop } = found;
        assert_eq!([forward, input_backward, weight_backward, output_hop, gradient_hop], expected, "{costs}");
    }

    #[test]
    fn decimals_are_exact() {
        check("F=0.1,I=0.2,W=0.3", [100_000_000, 200_000_000, 300_000_000, 0, 0]);
        check("F=1,I=1,W=1,hop=0.1", [100_000_000, 100_000_000, 100_000_000, 10_000_000, 10_000_000]);
        check("F=1e-9,I=2e-9,W=0", [100_000_000, 200_000_000, 0, 0, 0]);
        check("F=0,I=0,W=0", [0; 5]);
        check("F=1e12,I=0,W=1", [100_000_000, 0, 0, 0, 0]);
    }

    #[test]
    fn a_hop_takes_its_bytes() {
        let sizes = [10, 20, 30].map(|output| StageSizes { output, ..StageSizes::default() });
        let link = Link { latency: 1.0, bandwidth: 10.0 };
        let costs = Costs { sizes: sizes.to_vec(), link, ..Costs::default() };
        let found = ticks(&costs, &Placement::looped(3, 1).expect("three stages")).expect("ticks")[1];
        assert_eq!((found.output_hop, found.gradient_hop), (300_000_000, 200_000_000));
    }
}
