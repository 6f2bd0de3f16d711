//! Costs as integers, for schedules that are optimised for costs.
//!
//! Such a schedule compares sums of times, and many of them are equal by design. With floating point,
//! rounding errors would decide between them; with integers they stay equal. A tick is a power of ten in
//! seconds, chosen so that the largest cost has nine digits. So costs that are written as decimals stay
//! exact, and sums over the largest schedule fit 64 bits.

use crate::costs::{Costs, TransferCost};
use crate::ids::StageIndex;
use crate::placement::Placement;

/// The bound below which all costs are, in ticks.
const LARGEST: f64 = 1e9;

/// The times of a stage for one microbatch, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StageTicks {
    pub(crate) forward: u64,
    pub(crate) input_backward: u64,
    pub(crate) weight_backward: u64,
    /// The time from the end of a forward until its output is at the next stage; 0 for the last stage.
    pub(crate) output_hop: u64,
    /// The time from the end of a backward until its gradient is at the previous stage; 0 for the first
    /// stage.
    pub(crate) gradient_hop: u64,
}

impl StageTicks {
    /// Returns the time of a backward that is not split.
    pub(crate) fn backward(self) -> u64 {
        self.input_backward + self.weight_backward
    }
}

/// Returns the costs of every stage in ticks. Each message takes as long as if it were alone on its link. The
/// costs were checked.
pub(crate) fn ticks(costs: &Costs, placement: &Placement) -> Vec<StageTicks> {
    let all: Vec<[f64; 5]> = placement.all_stages().map(|stage| seconds(costs, placement, stage)).collect();
    let largest = all.iter().flatten().copied().fold(0.0, f64::max);
    let per_second = ticks_per_second(largest);
    let rounded = |[forward, input_backward, weight_backward, output_hop, gradient_hop]: [u64; 5]| {
        StageTicks { forward, input_backward, weight_backward, output_hop, gradient_hop }
    };
    all.iter().map(|stage| rounded(stage.map(|cost| (cost * per_second).round() as u64))).collect()
}

/// Returns the fields of [`StageTicks`] in seconds.
fn seconds(costs: &Costs, placement: &Placement, stage: StageIndex) -> [f64; 5] {
    let at = costs.stage(stage);
    let hop = |to: Option<StageIndex>| {
        to.map_or(0.0, |to| {
            // A gradient has the size of its output, which the lower of the two stages makes.
            let bytes = costs.output_bytes(stage.min(to));
            let TransferCost { occupied, latency, .. } =
                costs.transfer(placement.rank_of(stage), placement.rank_of(to), bytes);
            occupied + latency
        })
    };
    let (next, previous) = (placement.next(stage), placement.previous(stage));
    [at.forward, at.input_backward, at.weight_backward, hop(next), hop(previous)]
}

/// Returns the largest power of ten that keeps `largest`, in seconds, below [`LARGEST`] ticks. Powers are
/// parsed from decimals, so that they are the same on every machine.
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
        let found = ticks(&costs.parse().expect(costs), &placement)[1];
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
        let found = ticks(&costs, &Placement::looped(3, 1).expect("three stages"))[1];
        assert_eq!((found.output_hop, found.gradient_hop), (300_000_000, 200_000_000));
    }
}
