//! The lowest validation loss of a run, and when a run should end because the loss no longer falls.

/// The lowest validation loss of a run so far.
///
/// ```
/// use pipewright::train::BestLoss;
///
/// let mut best = BestLoss::default();
/// let improves: Vec<bool> = [(10, 2.5), (20, 2.25), (30, 2.25), (40, f64::NAN)]
///     .map(|(step, loss)| best.observe(step, loss))
///     .into();
/// assert_eq!(improves, [true, true, false, false]);
/// assert_eq!((best.lowest, best.evaluations_since), (Some((20, 2.25)), 2));
/// assert!(best.is_exhausted(2) && !best.is_exhausted(3) && !best.is_exhausted(0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BestLoss {
    /// The step with the lowest loss, and that loss; `None` before the first one.
    pub lowest: Option<(u64, f64)>,
    /// The number of evaluations since then.
    pub evaluations_since: u64,
}

impl BestLoss {
    /// Records the loss after a step, and returns whether it is lower than all before. A loss that is not a
    /// number never is.
    pub fn observe(&mut self, step: u64, loss: f64) -> bool {
        let improves = match self.lowest {
            Some((_, lowest)) => loss < lowest,
            None => !loss.is_nan(),
        };
        if improves {
            *self = Self { lowest: Some((step, loss)), evaluations_since: 0 };
        } else {
            self.evaluations_since += 1;
        }
        improves
    }

    /// Returns whether the loss has not fallen for `patience` evaluations. It never has if `patience` is 0.
    pub fn is_exhausted(&self, patience: u64) -> bool {
        patience > 0 && self.evaluations_since >= patience
    }
}
