//! Requests for memory that a later computation reads, in steps between the instructions of another one.
//!
//! A core waits for few lines at a time. If a computation begins with requests for many lines, its own loads wait for them.

use super::vector::prefetch_second;

const LINE: usize = 64;

/// Runs of neighbouring bytes that [`LineRequests::step`] asks for, in the second-level cache.
#[derive(Clone, Copy)]
pub(crate) struct LineRequests {
    at: *const u8,
    /// The bytes from one step to the next, at most a line.
    advance: usize,
    /// Further bytes after the last step of a run.
    jump: usize,
    /// Steps of a run.
    steps: usize,
    /// Steps that remain of this run.
    left: usize,
}

impl LineRequests {
    /// Returns a request for one line, again and again. If the computation reads it anyway, that has no effect.
    pub(crate) fn of_one_line<T>(at: *const T) -> Self {
        Self { at: at.cast(), advance: 0, jump: 0, steps: usize::MAX, left: usize::MAX }
    }

    /// Returns a request for a part of some runs of neighbouring elements: the part `part` of `parts`, in `steps` steps. `runs`
    /// has their number, their length and the distance between two. The addresses may be any.
    ///
    /// If there are more lines than steps, it asks for all of them here.
    pub(crate) fn new<T>(
        from: *const T,
        [count, length, distance]: [usize; 3],
        [part, parts]: [usize; 2],
        steps: usize,
    ) -> Self {
        // The same number in each part but the last ones: the processor predicts where the loops end.
        let each = count.div_ceil(parts);
        let first = part * each;
        let runs = each.min(count.saturating_sub(first));
        let at = from.wrapping_add(first.wrapping_mul(distance));
        let (steps, bytes) = (steps / runs.max(1), length * size_of::<T>());
        if runs == 0 || bytes == 0 || steps * LINE < bytes {
            prefetch_runs(at, [runs, length, distance]);
            return Self::of_one_line(from);
        }
        let advance = bytes.div_ceil(steps);
        let jump = distance.wrapping_mul(size_of::<T>()).wrapping_sub(advance * steps);
        Self { at: at.cast(), advance, jump, steps, left: steps }
    }

    /// Takes a step of each request.
    #[inline(always)]
    pub(crate) fn step_all(requests: &mut [Self; 2]) {
        for request in requests {
            request.step();
        }
    }

    /// Asks for the next line.
    #[inline(always)]
    fn step(&mut self) {
        prefetch_second(self.at);
        self.left -= 1;
        // Without branches: the processor would not predict the ends of runs.
        let is_last = usize::from(self.left == 0).wrapping_neg();
        self.at = self.at.wrapping_add(self.advance.wrapping_add(self.jump & is_last));
        self.left |= self.steps & is_last;
    }
}

/// Asks for some runs of neighbouring elements in the second-level cache. `runs` has their number, their length and the
/// distance between two. The addresses may be any.
pub(crate) fn prefetch_runs<T>(from: *const T, [count, length, distance]: [usize; 3]) {
    for run in 0..count {
        for element in (0..length).step_by(LINE / size_of::<T>()) {
            prefetch_second(from.wrapping_add(run.wrapping_mul(distance)).wrapping_add(element));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Checks that the steps of all parts ask for each line of each run.
    fn check([count, length, distance]: [usize; 3], parts: usize, steps: usize) {
        let start = std::ptr::without_provenance::<f32>(1 << 20);
        let mut lines = HashSet::new();
        for part in 0..parts {
            let mut request = LineRequests::new(start, [count, length, distance], [part, parts], steps);
            for _ in 0..steps {
                lines.insert(request.at.addr() / LINE);
                request.step();
            }
        }
        for element in (0..count).flat_map(|run| (0..length).map(move |i| run * distance + i)) {
            let line = start.wrapping_add(element).addr() / LINE;
            assert!(lines.contains(&line), "element {element} of {count} runs of {length} in {parts} parts");
        }
    }

    #[test]
    fn steps_ask_for_each_line() {
        check([512, 128, 1376], 76, 512);
        check([128, 512, 1376], 76, 512);
        check([14, 32, 512], 1, 64);
        check([1, 32, 32], 1, 2);
        check([7, 16, 48], 3, 100);
    }

    #[test]
    fn more_lines_than_steps_need_no_steps() {
        let start = std::ptr::without_provenance::<f32>(1 << 20);
        let requests = [[14, 32, 512], [0, 32, 512], [14, 0, 512]]
            .map(|runs| LineRequests::new(start, runs, [0, 1], 27));
        for mut request in requests {
            for _ in 0..27 {
                assert_eq!(request.at, start.cast());
                request.step();
            }
        }
    }
}
