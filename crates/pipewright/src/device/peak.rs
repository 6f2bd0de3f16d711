//! The highest rate of computation of a thread of this processor, for the share of it that a run reaches.

use std::time::{Duration, Instant};

use pipewright_kernel::peak::{run_bf16, run_single};

/// The rounds of a measurement: about 0.1 ms, or 0.5 ms with AMX.
const ROUNDS: usize = 20_000;
/// The time of all measurements. The fastest counts, because others were only interrupted.
const TIME: Duration = Duration::from_millis(5);

/// Measures how many floating-point operations per second a thread of this processor computes at most, a
/// multiplication and an addition counting as two. Takes 5 ms. Returns `None` if this is not known: on
/// processors without FMA, and on others than x86.
///
/// With `is_bf16`, the operations take pairs of bfloat16, if the processor has them. Otherwise it
/// widens bfloat16 and computes in single precision.
pub fn thread_peak(is_bf16: bool) -> Option<f64> {
    let run = || if is_bf16 { run_bf16(ROUNDS).or_else(|| run_single(ROUNDS)) } else { run_single(ROUNDS) };
    // A processor lowers its clock for wide instructions only after the first of them.
    run()?;
    let (start, mut fastest) = (Instant::now(), 0.0_f64);
    while start.elapsed() < TIME {
        let before = Instant::now();
        let operations = run()?;
        fastest = fastest.max(operations / before.elapsed().as_secs_f64());
    }
    Some(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_precisions_have_a_peak_or_neither() {
        let peaks = [false, true].map(thread_peak);
        assert_eq!(peaks[0].is_some(), peaks[1].is_some());
        assert!(peaks.iter().flatten().all(|peak| peak.is_finite() && *peak > 0.0), "{peaks:?}");
    }
}
