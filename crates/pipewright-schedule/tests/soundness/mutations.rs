//! Mutations that break a sound program. Both judges must notice each of them.

use pipewright_schedule::{Action, ActionKind, Overlap, Program, Slices, StageIndex};

/// A class of mistakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutation {
    Drop,
    Duplicate,
    SwapDependent,
    Restage,
    Renumber,
    RemoveSend,
    CrossReceives,
    SwapSlices,
}

impl Mutation {
    pub(crate) const ALL: &[Self] = &[
        Self::Drop,
        Self::Duplicate,
        Self::SwapDependent,
        Self::Restage,
        Self::Renumber,
        Self::RemoveSend,
        Self::CrossReceives,
        Self::SwapSlices,
    ];
}

/// `program` with one mistake, at a place that `seed` chooses; `None` if it has no place for that mistake.
pub(crate) fn mutate(program: &Program, mutation: Mutation, seed: u64) -> Option<Program> {
    let mut rows = program.rows().to_vec();
    let places = rows.iter().enumerate().flat_map(|(rank, row)| (0..row.len()).map(move |at| (rank, at)));
    let fits = |&(rank, at): &(usize, usize)| has_place(&rows[rank], at, mutation, program.slices());
    let places: Vec<(usize, usize)> = places.filter(fits).collect();
    let &(rank, at) = places.get(usize::try_from(seed % places.len().max(1) as u64).ok()?)?;
    let row = &mut rows[rank];
    match mutation {
        Mutation::Drop | Mutation::RemoveSend => drop(row.remove(at)),
        Mutation::Duplicate => {
            let later = at + (seed >> 32) as usize % (row.len() - at) + 1;
            row.insert(later, row[at]);
        }
        Mutation::SwapDependent => row.swap(at, at + 1),
        Mutation::Restage => row[at] = renumbered(row[at], 1, 0)?,
        Mutation::Renumber => row[at] = renumbered(row[at], 0, 1)?,
        Mutation::CrossReceives => {
            let other = later_receive(row, at)?;
            row.swap(at, other);
        }
        Mutation::SwapSlices => {
            let other = later_slice(row, at, program.slices())?;
            row.swap(at, other);
        }
    }
    let mutant = Program::new(program.placement().clone(), program.microbatches(), rows).ok()?;
    let mutant = mutant.with_slices(program.slices()).ok()?.with_trained(program.trained().clone());
    // Without its only backward, a program is a sound forward-only program.
    (trains(&mutant) == trains(program)).then_some(mutant)
}

fn trains(program: &Program) -> bool {
    program.rows().iter().flatten().any(|action| action.is_compute() && action.kind() != ActionKind::Forward)
}

/// `program` with two neighbouring actions of a row swapped, which may or may not matter.
pub(crate) fn swap_any(program: &Program, seed: u64) -> Program {
    let mut rows = program.rows().to_vec();
    let rank = seed as usize % rows.len();
    let pairs = rows[rank].len().saturating_sub(1);
    if pairs > 0 {
        let at = (seed >> 16) as usize % pairs;
        rows[rank].swap(at, at + 1);
    }
    let swapped = Program::new(program.placement().clone(), program.microbatches(), rows);
    swapped.expect("the same sizes").with_slices(program.slices()).expect("the same slices")
}

/// Returns every program that differs from `program` in one swap of neighbouring slices: two forwards or two
/// backwards of a microbatch on one stage.
pub(crate) fn swapped_slices(program: &Program) -> Vec<Program> {
    let mut mutants = Vec::new();
    for (rank, row) in program.rows().iter().enumerate() {
        for at in 0..row.len() {
            let Some(other) = later_slice(row, at, program.slices()) else { continue };
            let mut rows = program.rows().to_vec();
            rows[rank].swap(at, other);
            let mutant = Program::new(program.placement().clone(), program.microbatches(), rows);
            let mutant = mutant.expect("the same sizes").with_slices(program.slices());
            mutants.push(mutant.expect("the same slices"));
        }
    }
    mutants
}

fn has_place(row: &[Action], at: usize, mutation: Mutation, slices: Slices) -> bool {
    let kind = row[at].kind();
    match mutation {
        // A program is sound without its last `RESHARD`.
        Mutation::Drop => kind != ActionKind::Reshard,
        Mutation::Duplicate => !matches!(kind, ActionKind::Unshard | ActionKind::Reshard),
        Mutation::SwapDependent => row.get(at + 1).is_some_and(|&next| depends(next, row[at])),
        Mutation::Restage => !matches!(kind, ActionKind::Reshard),
        Mutation::Renumber => row[at].microbatch().is_some(),
        Mutation::RemoveSend => matches!(kind, ActionKind::SendForward | ActionKind::SendBackward),
        Mutation::CrossReceives => later_receive(row, at).is_some(),
        Mutation::SwapSlices => later_slice(row, at, slices).is_some(),
    }
}

/// Returns whether `next` needs `action`, for the same stage and microbatch.
fn depends(next: Action, action: Action) -> bool {
    use ActionKind::*;
    let chains = [
        (Forward, RecvForward),
        (SendForward, Forward),
        (Backward, Forward),
        (InputBackward, Forward),
        (Backward, RecvBackward),
        (InputBackward, RecvBackward),
        (SendBackward, Backward),
        (SendBackward, InputBackward),
        (WeightBackward, InputBackward),
        (Offload, Forward),
        (Reload, Offload),
        (Backward, Reload),
        (InputBackward, Reload),
    ];
    let same = next.stage() == action.stage() && next.microbatch() == action.microbatch();
    let reduces = [(WaitReduceGrad, ReduceGrad), (ReduceGrad, Backward), (ReduceGrad, WeightBackward)];
    let pair = (next.kind(), action.kind());
    (same && chains.contains(&pair)) || (next.stage() == action.stage() && reduces.contains(&pair))
}

/// The next receive of the same stage and direction, which comes from the same rank.
fn later_receive(row: &[Action], at: usize) -> Option<usize> {
    let kind = row[at].kind();
    let is_receive = matches!(kind, ActionKind::RecvForward | ActionKind::RecvBackward);
    let same = |action: &Action| action.kind() == kind && action.stage() == row[at].stage();
    is_receive.then(|| row[at + 1..].iter().position(same).map(|distance| at + 1 + distance)).flatten()
}

/// The same computation of another slice of the same microbatch, which comes later in the row.
fn later_slice(row: &[Action], at: usize, slices: Slices) -> Option<usize> {
    let place = |action: Action| action.microbatch().map(|number| slices.place(number).0);
    let is_ordered =
        matches!(row[at].kind(), ActionKind::Forward | ActionKind::Backward | ActionKind::InputBackward);
    let same = |action: &Action| {
        let is_same = action.kind() == row[at].kind() && action.stage() == row[at].stage();
        is_same && place(*action) == place(row[at])
    };
    is_ordered.then(|| row[at + 1..].iter().position(same).map(|distance| at + 1 + distance)).flatten()
}

/// Returns `action` with a higher stage and microbatch; for an overlap, the stage and microbatch of the
/// forward.
fn renumbered(action: Action, stages: u32, microbatches: u32) -> Option<Action> {
    let text = action.to_string();
    if let Action::Overlap(overlap) = action {
        let (stage, microbatch) = overlap.forward();
        let forward = (StageIndex::new(stage.get() + stages), (microbatch.get() + microbatches).into());
        return Overlap::new(forward, overlap.backward()).map(Action::Overlap);
    }
    let name = action.kind().name();
    let microbatch = action.microbatch().map(|microbatch| (microbatch.get() + microbatches).to_string());
    let moved = format!("{}{name}{}", action.stage().get() + stages, microbatch.unwrap_or_default());
    assert_ne!(moved, text);
    moved.parse().ok()
}
