//! [`Gate`]: whether a step begins that the ranks of a process have, if the process may be asked to end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether the ranks of a process begin a step that they received during an earlier one. The gate is closed if the gate of the
/// step before was closed, or if the interrupt flag is raised when the first of them asks; from then on it stays as it is.
/// Clones are one gate.
#[derive(Clone)]
pub(crate) struct Gate {
    /// Whether the gate of the step before is open, if that step has one. The ranks ask it first.
    before: Option<Arc<OnceLock<bool>>>,
    interrupt: Arc<AtomicBool>,
    is_open: Arc<OnceLock<bool>>,
}

impl Gate {
    pub(crate) fn new(interrupt: Arc<AtomicBool>, before: Option<Self>) -> Self {
        Self { before: before.map(|gate| gate.is_open), interrupt, is_open: Arc::default() }
    }

    pub(crate) fn is_open(&self) -> bool {
        let is_closed_before = self.before.as_ref().is_some_and(|before| before.get() == Some(&false));
        *self.is_open.get_or_init(|| !is_closed_before && !self.interrupt.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_gate_opens_behind_a_closed_one() {
        let flag = Arc::new(AtomicBool::new(false));
        let first = Gate::new(flag.clone(), None);
        let [second, third] = [&first; 2].map(|before| Gate::new(flag.clone(), Some(before.clone())));
        assert!(first.is_open() && second.is_open());
        flag.store(true, Ordering::Relaxed);
        assert!(second.is_open() && !third.is_open());
        flag.store(false, Ordering::Relaxed);
        assert!(!Gate::new(flag, Some(third)).is_open());
    }
}
