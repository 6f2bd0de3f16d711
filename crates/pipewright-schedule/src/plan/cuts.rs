//! All cuts of layers into stages, for models that are small enough to try them all.

/// Returns the number of cuts of `layers` layers into `stages` stages; the largest number if it is larger.
pub(super) fn count_cuts(layers: usize, stages: usize) -> u64 {
    if stages > layers {
        return 0;
    }
    let chosen = (stages - 1).min(layers - stages) as u64;
    let mut count = 1u64;
    for taken in 0..chosen {
        // The product of so many consecutive factors is divisible, so the division is exact.
        let Some(product) = count.checked_mul(layers as u64 - 1 - taken) else { return u64::MAX };
        count = product / (taken + 1);
    }
    count
}

/// Calls `visit` with every cut, in lexical order: the first layer of each stage, and the number of layers.
pub(super) fn for_each_cut(layers: usize, stages: usize, visit: &mut dyn FnMut(&[usize])) {
    let mut starts = vec![0; stages + 1];
    starts[stages] = layers;
    extend(&mut starts, 1, stages, layers, visit);
}

/// Returns the cut with a boundary one layer later or earlier, unless a stage would be empty.
pub(super) fn with_moved(starts: &[usize], boundary: usize, is_up: bool) -> Option<Vec<usize>> {
    let moved = if is_up { starts[boundary] + 1 } else { starts[boundary] - 1 };
    let fits = starts[boundary - 1] < moved && moved < starts[boundary + 1];
    fits.then(|| {
        let mut cut = starts.to_vec();
        cut[boundary] = moved;
        cut
    })
}

fn extend(starts: &mut [usize], stage: usize, stages: usize, layers: usize, visit: &mut dyn FnMut(&[usize])) {
    if stage == stages {
        visit(starts);
        return;
    }
    for start in starts[stage - 1] + 1..=layers - (stages - stage) {
        starts[stage] = start;
        extend(starts, stage + 1, stages, layers, visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_is_visited_once() {
        for (layers, stages, expected) in [(5, 1, 1), (5, 2, 4), (10, 6, 126), (4, 4, 1)] {
            let mut seen = Vec::new();
            for_each_cut(layers, stages, &mut |starts| seen.push(starts.to_vec()));
            assert_eq!((seen.len(), count_cuts(layers, stages)), (expected, expected as u64));
            assert!(seen.is_sorted_by(|one, other| one < other), "different cuts, in order");
        }
        assert_eq!((count_cuts(3, 4), count_cuts(1000, 500)), (0, u64::MAX));
    }
}
