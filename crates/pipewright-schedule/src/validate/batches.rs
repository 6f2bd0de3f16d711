//! The rule of batches whose parameters are delayed by one update ([`crate::delay`]).
//!
//! Rule: on each rank, every computation of batch `t` comes before every computation of batch `t + 2`. A rank
//! updates its parameters between the two, so each batch reads one version on all ranks (batch `t + 2` the one that
//! the update with batch `t` has made), and the version of a batch is not dropped before its last computation.

use crate::batch_gate::{computed_batches, needed_by};
use crate::ids::Rank;
use crate::validate::context::Context;
use crate::validate::violation::Report;

/// Checks the order of the batches on each rank.
pub(super) fn check(context: &Context<'_>, report: &mut Report) {
    let program = context.program;
    if program.batches() == 1 {
        return;
    }
    for (rank, row) in (0..).map(Rank::new).zip(program.rows()) {
        let mut left = vec![0_u32; program.batches() as usize];
        for batch in row.iter().flat_map(|action| computed_batches(program.numbering(), *action)) {
            if let Some(left) = left.get_mut(batch as usize) {
                *left += 1;
            }
        }
        for (position, &action) in row.iter().enumerate() {
            for batch in computed_batches(program.numbering(), action) {
                if let Some(left) = left.get_mut(batch as usize) {
                    *left -= 1;
                }
                let needed = needed_by(batch).and_then(|needed| Some((needed, *left.get(needed as usize)?)));
                if let Some((needed, 1..)) = needed {
                    let problem = || {
                        format!(
                            "{action} of batch {batch} reads the parameters after the update with batch {needed}, but \
                             the rank computes for batch {needed} after it; move it behind the last of them"
                        )
                    };
                    report.push(rank, || (position, problem()));
                }
            }
        }
    }
}
