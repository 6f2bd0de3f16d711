//! The memory that ranks report on a device.

use crate::run::Run;
use crate::{DEVICE, devices};

#[test]
fn a_rank_reports_what_it_holds_on_its_device_and_the_report_does_not_grow() {
    let Some(devices) = devices(&[DEVICE]) else { return };
    let steps = Run { ranks: 2, steps: 8, ..Run::default() }.train(&devices);
    let peaks: Vec<&[u64]> = steps.iter().map(|step| step.peak_bytes.as_slice()).collect();
    // Each rank holds half of 404,000 parameters four times: values, gradients and two moments.
    assert!(peaks[7].iter().all(|&bytes| (3 << 20..256 << 20).contains(&bytes)), "{peaks:?}");
    // The back end keeps some bytes for each kernel that it has launched, fewer with every step.
    let grew = |from: usize, to: usize| peaks[to].iter().sum::<u64>() - peaks[from].iter().sum::<u64>();
    assert!(grew(3, 7) < peaks[3].iter().sum::<u64>() / 50 && grew(6, 7) <= grew(1, 2), "{peaks:?}");
}
