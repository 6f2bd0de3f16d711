//! The order of the passes, and their settings.

use std::num::NonZeroU32;

use crate::action::Action;
use crate::delay::for_overlaps;
use crate::level::Level;
use crate::lower::drop_bubbles::Computation;
use crate::lower::error::LowerError;
use crate::lower::offload::{OffloadConfig, offload};
use crate::lower::reduce_grad::{ReduceWait, reduce_grad};
use crate::lower::send_early::{Overlaps, send_early};
use crate::lower::send_recv::send_recv_over;
use crate::lower::unshard::{UnshardConfig, unshard};
use crate::lower::{defer_recv, drop_bubbles, drop_frozen, limit_sends, merge_bw, wait_send};
use crate::schedule::{Program, Schedule};
use crate::trained::TrainedStages;
use crate::validate::check;

/// The passes to run, and their settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowerConfig {
    /// The stages that are trained. The backwards of the others are removed as far as nothing needs them.
    pub trained: TrainedStages,
    /// Order the computations of each rank so that batches overlap best, because weights are delayed by one update
    /// ([`crate::delay`]), for stages of equal cost. If tensors leave memory or overlaps stay whole, batches do not
    /// overlap, and the order stays.
    pub delayed: bool,
    /// Merge the halves of a split backward if they are adjacent.
    pub merge_bw: bool,
    /// Gather parameters before their stage computes; `None` if parameters are not sharded.
    pub unshard: Option<UnshardConfig>,
    /// Reduce each stage's gradients after its last weight gradient, and wait for the reduction at this
    /// place.
    pub reduce_grad: Option<ReduceWait>,
    /// Split computations if another rank waits for the result of a part, so that the result leaves early.
    pub send_early: bool,
    /// With `send_early`, leave overlaps whole: for ranks that run both halves together.
    pub keep_overlaps: bool,
    /// Send and receive between ranks; `None` for computation only.
    pub communicate: Option<Messages>,
    /// Move the tensors that forwards keep out of memory; `None` if all stay.
    pub offload: Option<OffloadConfig>,
}

/// How ranks send and receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Messages {
    /// No action waits for a send. The program is sound even if each send blocks until it is received; the
    /// runtime's sends do not block.
    Blocking,
    /// A send only starts, and a later action waits for it.
    Waited {
        /// Defer each receive until its tensor is used.
        defer_recv: bool,
        /// The number of sends of a rank that may be in flight; `None` for any number. With `defer_recv`, a
        /// small budget may be impossible.
        budget: Option<NonZeroU32>,
    },
}

impl From<Level> for LowerConfig {
    /// The passes of a level, as in PyTorch's reference.
    fn from(level: Level) -> Self {
        Self {
            trained: TrainedStages::ALL,
            delayed: false,
            merge_bw: false,
            unshard: (level == Level::Full).then(UnshardConfig::default),
            reduce_grad: (level == Level::Full).then_some(ReduceWait::AtOnce),
            send_early: false,
            keep_overlaps: false,
            communicate: (level != Level::Compute).then_some(Messages::Blocking),
            offload: None,
        }
    }
}

/// Lowers `schedule` to a program.
///
/// # Errors
/// When the schedule is unsound. Release builds find only mistakes that make a pass fail; validate the
/// result.
pub fn lower(schedule: &Schedule, config: &LowerConfig) -> Result<Program, LowerError> {
    if cfg!(debug_assertions) {
        // So that mistakes of the schedule are not blamed on a pass. This program is dropped.
        sound("drop bubbles", drop_bubbles(schedule), Level::Compute)?;
    }
    run_passes(Computation::Scheduled(schedule), config)
}

/// Lowers rows that may gather parameters or reduce gradients already. The passes for what the rows have are
/// left out.
///
/// # Errors
/// When the rows are unsound, as [`lower`], or communicate already.
pub(super) fn lower_rows(rows: Program, config: &LowerConfig) -> Result<Program, LowerError> {
    let config = LowerConfig {
        unshard: config.unshard.clone().filter(|_| !rows.gathers()),
        reduce_grad: config.reduce_grad.filter(|_| !rows.reduces()),
        ..config.clone()
    };
    run_passes(Computation::Changed(rows), &config)
}

fn run_passes(mut computation: Computation<'_>, config: &LowerConfig) -> Result<Program, LowerError> {
    if computation.batches() > 1 && (config.unshard.is_some() || config.reduce_grad.is_some()) {
        let problem = "parameters are gathered and gradients are reduced once per batch, and the batches of this schedule overlap; \
                       lower it without sharded parameters and replicas";
        return Err(LowerError::Refused(problem.to_owned()));
    }
    if !config.trained.are_all() {
        let needed = drop_frozen(computation.into_program(), &config.trained);
        computation = Computation::Changed(sound("drop-frozen", needed, Level::Compute)?);
    }
    if config.delayed && computation.batches() == 1 && config.offload.is_none() {
        let mut program = computation.into_program();
        let is_taken_apart =
            |action: &Action| !(config.keep_overlaps && matches!(action, Action::Overlap(_)));
        if program.rows().iter().flatten().all(|action| action.is_compute() && is_taken_apart(action)) {
            // The halves of a backward are two computations of the order.
            program = sound("delay", for_overlaps(send_early(program, Overlaps::TakeApart)), Level::Compute)?;
        }
        computation = Computation::Changed(program);
    }
    if config.merge_bw {
        let merged = merge_bw(computation.into_program());
        computation = Computation::Changed(sound("merge-bw", merged, Level::Compute)?);
    }
    if let Some(config) = &config.unshard {
        let gathered = unshard(computation.into_program(), config)?;
        computation = Computation::Changed(sound("unshard", gathered, Level::Compute)?);
    }
    if let Some(wait) = config.reduce_grad {
        let reduced = reduce_grad(computation.into_program(), wait);
        computation = Computation::Changed(sound("reduce-grad", reduced, Level::Compute)?);
    }
    if config.send_early {
        let overlaps = if config.keep_overlaps { Overlaps::Keep } else { Overlaps::TakeApart };
        let apart = send_early(computation.into_program(), overlaps);
        computation = Computation::Changed(sound("send-early", apart, Level::Compute)?);
    }
    let (program, level) = match config.communicate {
        Some(messages) => {
            let is_full = config.reduce_grad.is_some() && config.unshard.is_some();
            let level = if is_full { Level::Full } else { Level::Comms };
            (communicating(computation, messages, level)?, level)
        }
        None => (computation.into_program(), Level::Compute),
    };
    match &config.offload {
        Some(config) => sound("offload", offload(program, config), level),
        None => Ok(program),
    }
}

/// Adds messages.
fn communicating(
    computation: Computation<'_>,
    messages: Messages,
    level: Level,
) -> Result<Program, LowerError> {
    let mut program = sound("send-recv", send_recv_over(computation)?, level)?;
    let Messages::Waited { defer_recv: defer, budget } = messages else { return Ok(program) };
    program = sound("wait-send", wait_send(program), level)?;
    if defer {
        program = sound("defer-recv", defer_recv(program), level)?;
    }
    match budget {
        Some(budget) => sound("wait-send", limit_sends(program, budget)?, level),
        None => Ok(program),
    }
}

/// Returns the program. Debug builds prove that it is sound at `level` after `pass`.
fn sound(pass: &'static str, program: Program, level: Level) -> Result<Program, LowerError> {
    if cfg!(debug_assertions) {
        let report = check(&program, level);
        if report.total() > 0 {
            return Err(LowerError::Unsound { pass, violations: report.into_violations(program) });
        }
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv;

    #[test]
    #[cfg(debug_assertions)]
    fn an_unsound_schedule_is_named_as_such() {
        let schedule = csv::parse_schedule("0F0,0B0\n1B0,1F0\n").expect("a schedule");
        let error =
            lower(&schedule, &LowerConfig::from(Level::Comms)).expect_err("a backward before its forward");
        assert!(error.to_string().starts_with("after the pass `drop bubbles`: unsound program, "), "{error}");
    }

    #[test]
    fn passes_are_independent() {
        let schedule = csv::parse_schedule("0F0,0B0\n1F0,1B0\n").expect("a schedule");
        let config = LowerConfig { reduce_grad: Some(ReduceWait::AtOnce), ..LowerConfig::from(Level::Comms) };
        let program = lower(&schedule, &config).expect("a program");
        let expected = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n\
                        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n";
        assert_eq!(csv::print_program(&program), expected);
    }
}
