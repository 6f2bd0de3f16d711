//! [`UsualNorm`]: the gradient norms of the last steps, whose median is the usual one.

use std::collections::VecDeque;

/// The number of norms whose median is the usual one.
pub const NORMS: usize = 32;

/// The number of norms that must be known before a norm is a jump.
pub const FIRST_NORMS: usize = 8;

/// A norm that is more than this multiple of the usual one is a jump.
pub const JUMP: f64 = 10.0;

/// The gradient norms of the last updates.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsualNorm(VecDeque<f64>);

impl UsualNorm {
    /// Adds the norm of an update. A norm that is not finite, of an update that was skipped, does not count.
    pub(crate) fn observe(&mut self, norm: f64) {
        if !norm.is_finite() {
            return;
        }
        if self.0.len() == NORMS {
            self.0.pop_front();
        }
        self.0.push_back(norm);
    }

    /// Forgets all norms, for the parameters of another step.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }

    /// Returns the median of the norms; `None` as long as too few are known, and if it is 0:
    /// every norm would be a jump.
    pub(crate) fn median(&self) -> Option<f64> {
        if self.0.len() < FIRST_NORMS {
            return None;
        }
        let mut norms: Vec<f64> = self.0.iter().copied().collect();
        norms.sort_unstable_by(f64::total_cmp);
        Some(norms[norms.len() / 2]).filter(|&median| median > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_follows_the_last_norms() {
        let mut usual = UsualNorm::default();
        for norm in 1..FIRST_NORMS {
            usual.observe(norm as f64);
            usual.observe(f64::INFINITY);
        }
        assert_eq!(usual.median(), None);
        usual.observe(1e9);
        assert_eq!(usual.median(), Some(5.0));
        (0..NORMS).for_each(|_| usual.observe(7.0));
        (0..NORMS / 2).for_each(|_| usual.observe(70.0));
        assert_eq!(usual.median(), Some(70.0), "a new level becomes the usual one");
        usual.forget();
        assert_eq!(usual.median(), None);
    }
}
