//! The rows that the loader of PyTorch 2.15 (`_load_csv`) refuses in a schedule that is sound.
//!
//! It reads rows that only compute as `compute_only`, and others as `compute_comms`. Rules of both: (1) every
//! action is one of PyTorch's; (2) every stage has as many backwards as microbatches, and as many `I` as `W`.
//! Rules of `compute_comms`: (3) no row has an empty cell; (4) a rank has at most one pending reduction of
//! gradients, and waits for it; (5) every send has a wait.

use std::collections::BTreeSet;

use crate::action::{Action, ActionKind};
use crate::ids::{Rank, StageIndex};
use crate::schedule::Program;
use crate::validate::violation::{Report, Violations};
use crate::words::counted;

/// The format in which PyTorch reads rows, by its name there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoaderFormat {
    /// Computations alone; PyTorch adds the rest.
    ComputeOnly,
    /// The whole program.
    ComputeComms,
}

impl LoaderFormat {
    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::ComputeOnly => "compute_only",
            Self::ComputeComms => "compute_comms",
        }
    }
}

/// Checks that the loader of PyTorch 2.15 takes a sound `program`, which has been read from `rows`. Returns the
/// format to load it with.
///
/// # Errors
/// The reasons for which it is refused, at most one of each kind for a rank or a stage.
pub fn check_pytorch_loader(
    program: &Program,
    rows: &[Vec<Option<Action>>],
) -> Result<LoaderFormat, Violations> {
    let mut actions = rows.iter().flatten().flatten();
    let format = if actions.all(|action| action.kind().is_compute()) {
        LoaderFormat::ComputeOnly
    } else {
        LoaderFormat::ComputeComms
    };
    let mut report = Report::new();
    for (rank, row) in (0..).map(Rank::new).zip(rows) {
        check_first(
            &mut report,
            rank,
            row,
            |cell| cell.is_some_and(|action| action.kind().is_offload()),
            |more| {
                format!(
                    "PyTorch does not know this action{more}; lower the schedule without the pass offload"
                )
            },
        );
        if format == LoaderFormat::ComputeComms {
            check_first(
                &mut report,
                rank,
                row,
                |cell| cell.is_none(),
                |more| {
                    format!("PyTorch takes no empty cell in rows that do more than compute{more}; remove it")
                },
            );
            check_reductions(&mut report, rank, row);
            check_sends(&mut report, rank, row);
        }
    }
    for stage in program.placement().all_stages() {
        check_backwards(&mut report, program, stage);
    }
    if report.total() == 0 { Ok(format) } else { Err(report.into_violations(program.clone())) }
}

/// Reports the first cell that is refused, with the number of further ones.
fn check_first(
    report: &mut Report,
    rank: Rank,
    row: &[Option<Action>],
    is_refused: impl Fn(Option<Action>) -> bool,
    problem: impl FnOnce(&str) -> String,
) {
    let mut refused = row.iter().enumerate().filter(|&(_, &cell)| is_refused(cell));
    let Some((position, _)) = refused.next() else { return };
    let more = match refused.count() {
        0 => String::new(),
        more => format!(", nor {more} more in this row"),
    };
    report.push(rank, || (position, problem(&more)));
}

/// Reports the first reduction that starts while another one is pending, or that nothing waits for.
fn check_reductions(report: &mut Report, rank: Rank, row: &[Option<Action>]) {
    let mut pending: Option<(usize, StageIndex)> = None;
    for (position, action) in row.iter().enumerate().filter_map(|(position, cell)| Some((position, (*cell)?)))
    {
        match (action, pending) {
            (Action::ReduceGrad { .. }, Some((_, other))) => {
                let problem = format!(
                    "{action} starts while the reduction of stage {other} is pending, and PyTorch allows one for a rank; use \
                     reduce-grad=deferred"
                );
                return report.push(rank, || (position, problem));
            }
            (Action::ReduceGrad { stage }, None) => pending = Some((position, stage)),
            (Action::WaitReduceGrad { .. }, _) => pending = None,
            _ => {}
        }
    }
    if let Some((position, stage)) = pending {
        let problem =
            || format!("{stage}REDUCE_GRAD has no wait, which PyTorch needs; add {stage}WAIT_REDUCE_GRAD");
        report.push(rank, || (position, problem()));
    }
}

/// Reports the first send without a wait.
fn check_sends(report: &mut Report, rank: Rank, row: &[Option<Action>]) {
    let waits: BTreeSet<Action> =
        row.iter().flatten().copied().filter(|action| action.kind().is_wait_for_send()).collect();
    let is_refused =
        |cell: Option<Action>| cell.and_then(Action::wait_of_send).is_some_and(|wait| !waits.contains(&wait));
    check_first(report, rank, row, is_refused, |more| {
        format!("PyTorch does not load a send without a wait{more}; run the pass wait-send")
    });
}

/// Reports a stage without a backward for each microbatch, or with an `I` without its `W`.
fn check_backwards(report: &mut Report, program: &Program, stage: StageIndex) {
    let rank = program.placement().rank_of(stage);
    let parts = || program.row(rank).iter().flat_map(|action| action.parts());
    let count = |kind| parts().filter(|part| part.stage() == stage && part.kind() == kind).count();
    let kinds = [ActionKind::Backward, ActionKind::InputBackward, ActionKind::WeightBackward];
    let [whole, inputs, weights] = kinds.map(count);
    let microbatches = program.microbatches() as usize;
    let end = program.row(rank).len();
    if inputs != weights {
        let problem =
            || format!("stage {stage} has {inputs} I and {weights} W, and PyTorch needs as many of both");
        report.push(rank, || (end, problem()));
    } else if whole + inputs != microbatches {
        let problem = || {
            let found = counted(whole + inputs, "backward");
            format!(
                "stage {stage} has {found}, and PyTorch needs one for each of {microbatches} microbatches"
            )
        };
        report.push(rank, || (end, problem()));
    }
}
