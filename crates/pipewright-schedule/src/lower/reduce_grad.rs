//! The pass `reduce-grad`: reduces a stage's gradients over its data-parallel replicas once they are
//! complete.
//!
//! Rules: (1) the `REDUCE_GRAD` of a stage directly follows its last weight gradient (`W`, `B`, or the
//! backward of an overlap); (2) its `WAIT_REDUCE_GRAD` comes where [`ReduceWait`] says. A later wait lets a
//! reduction overlap with later computation. A stage without a backward is not reduced. Gradients are summed
//! locally over the microbatches and reduced once.

use std::fmt;

use crate::action::Action;
use crate::ids::Rank;
use crate::schedule::Program;

/// The place at which a rank waits for its reductions. The documentation of each variant begins with its text
/// form.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ReduceWait {
    /// `at-once`: directly after each reduction.
    #[default]
    AtOnce,
    /// `deferred`: directly before the next reduction of the rank; for its last one, at the end of the row.
    /// At most one reduction of a rank is pending, as with `defer_reduce_grad_wait` of PyTorch 2.15.
    Deferred,
    /// `at-end`: at the end of the row, in the order of the reductions.
    AtEnd,
}

impl ReduceWait {
    /// All places, from the earliest to the latest.
    pub const ALL: [Self; 3] = [Self::AtOnce, Self::Deferred, Self::AtEnd];

    /// Returns the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::AtOnce => "at-once",
            Self::Deferred => "deferred",
            Self::AtEnd => "at-end",
        }
    }
}

impl fmt::Display for ReduceWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Adds `REDUCE_GRAD` and `WAIT_REDUCE_GRAD` to every stage that runs backward.
pub fn reduce_grad(program: Program, wait: ReduceWait) -> Program {
    let mut last = vec![None; program.placement().stages() as usize];
    for (rank, row) in (0..).map(Rank::new).zip(program.rows()) {
        for (position, action) in row.iter().enumerate() {
            for part in action.parts().filter(|&part| part.kind().adds_weight_gradients()) {
                if let Some(last) = last.get_mut(part.stage().index()) {
                    *last = Some((rank, position));
                }
            }
        }
    }
    program.map_rows(|rank, row| {
        let mut lowered = Vec::with_capacity(row.len() + 2);
        let mut pending = Vec::new();
        for (position, action) in row.into_iter().enumerate() {
            lowered.push(action);
            for stage in action.parts().filter(|&part| part.kind().adds_weight_gradients()).map(Action::stage)
            {
                if last.get(stage.index()) == Some(&Some((rank, position))) {
                    if wait == ReduceWait::Deferred {
                        lowered.append(&mut pending);
                    }
                    lowered.push(Action::ReduceGrad { stage });
                    pending.push(Action::WaitReduceGrad { stage });
                    if wait == ReduceWait::AtOnce {
                        lowered.append(&mut pending);
                    }
                }
            }
        }
        lowered.append(&mut pending);
        lowered
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(wait: ReduceWait, rows: &str, expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(print_program(&reduce_grad(program, wait)), expected);
    }

    #[test]
    fn after_the_last_weight_gradient() {
        let at_once = ReduceWait::AtOnce;
        check(at_once, "0F0,0F1,0B1,0B0\n", "0F0,0F1,0B1,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n");
        check(at_once, "0F0,0I0,0W0,1F0\n", "0F0,0I0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,1F0\n");
        check(at_once, "(0F0;1B0)OVERLAP_F_B\n", "(0F0;1B0)OVERLAP_F_B,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n");
    }

    #[test]
    fn waits_can_come_last() {
        check(
            ReduceWait::AtEnd,
            "0F0,1F0,1B0,0B0\n",
            "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD\n",
        );
    }

    #[test]
    fn one_reduction_may_be_pending() {
        check(
            ReduceWait::Deferred,
            "0F0,1F0,2F0,2B0,1B0,0B0\n",
            "0F0,1F0,2F0,2B0,2REDUCE_GRAD,1B0,2WAIT_REDUCE_GRAD,1REDUCE_GRAD,0B0,1WAIT_REDUCE_GRAD,0REDUCE_GRAD,\
             0WAIT_REDUCE_GRAD\n",
        );
        check(
            ReduceWait::Deferred,
            "0F0,0I0,0W0\n1F0,1I0,1W0\n",
            "0F0,0I0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1F0,1I0,1W0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n",
        );
    }

    #[test]
    fn nothing_without_a_backward() {
        for wait in ReduceWait::ALL {
            check(wait, "0F0\n1F0\n", "0F0\n1F0\n");
        }
    }
}
