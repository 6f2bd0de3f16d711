//! Random sound schedules: random placements, orders and bubbles, with full and split backwards mixed.

use pipewright_schedule::{Action, Microbatch, Overlap, Placement, Rank, Schedule, Slices, StageIndex};
use proptest::prelude::*;

/// A random sound schedule, small enough to test thousands of them.
pub(crate) fn any_schedule() -> impl Strategy<Value = Schedule> {
    let slices = prop_oneof![2 => Just(1), 1 => 2..4u32].prop_map(|count| Slices::new(count).expect("not 0"));
    let size = (1..5usize, 0..5usize, 1..5u32, any::<bool>(), slices);
    size.prop_flat_map(|(ranks, more, microbatches, trains, slices)| {
        let microbatches = microbatches.div_ceil(slices.get()) * slices.get();
        let stages = ranks + more;
        let extra = prop::collection::vec(0..ranks as u32, more);
        let order = Just((0..ranks as u32).collect::<Vec<_>>()).prop_shuffle();
        let choices = prop::collection::vec(any::<u32>(), stages * microbatches as usize * 6);
        (extra, order, choices).prop_map(move |(extra, order, choices)| {
            let rank_of = order.into_iter().chain(extra).map(Rank::new).collect();
            let placement = Placement::explicit(rank_of).expect("every rank has a stage");
            scheduled(placement, (microbatches, slices), trains, choices)
        })
    })
}

/// Runs the step in a random order: repeatedly chooses one of the actions that can run.
fn scheduled(
    placement: Placement,
    (microbatches, slices): (u32, Slices),
    trains: bool,
    choices: Vec<u32>,
) -> Schedule {
    let mut choices = choices.into_iter().cycle();
    let mut choose = move || choices.next().unwrap_or(0) as usize;
    let mut rows: Vec<Vec<Option<Action>>> = vec![Vec::new(); placement.ranks() as usize];
    let mut done: Vec<Action> = Vec::new();
    let split: Vec<bool> = (0..placement.stages() * microbatches).map(|_| choose() % 2 == 0).collect();
    let mut left = actions(&placement, microbatches, trains, &split);
    while !left.is_empty() {
        let ready: Vec<Action> =
            left.iter().copied().filter(|&action| is_ready(action, &placement, slices, &done)).collect();
        let mut action = ready[choose() % ready.len()];
        // Both halves of an overlap are ready before either is done.
        let partner = ready.iter().find_map(|&backward| overlap(action, backward, &placement));
        if let Some(overlap) = partner.filter(|_| choose().is_multiple_of(2)) {
            action = overlap;
        }
        left.retain(|other| action.parts().all(|part| part != *other));
        done.extend(action.parts());
        let row = &mut rows[placement.rank_of(action.stage()).index()];
        row.extend(choose().is_multiple_of(4).then_some(None));
        row.push(Some(action));
    }
    let schedule = Schedule::new(placement, microbatches, rows).expect("the sizes fit");
    schedule.with_slices(slices).expect("whole microbatches")
}

/// A forward and a full backward of the same rank as one action.
fn overlap(forward: Action, backward: Action, placement: &Placement) -> Option<Action> {
    let (Action::Forward { stage, microbatch }, Action::Backward { stage: other, microbatch: earlier }) =
        (forward, backward)
    else {
        return None;
    };
    let together = placement.rank_of(stage) == placement.rank_of(other);
    let overlap = Overlap::new((stage, microbatch), (other, earlier)).filter(|_| together);
    overlap.map(Action::Overlap)
}

fn actions(placement: &Placement, microbatches: u32, trains: bool, split: &[bool]) -> Vec<Action> {
    let pairs =
        placement.all_stages().flat_map(|stage| (0..microbatches).map(move |m| (stage, Microbatch::new(m))));
    let actions_of = |((stage, microbatch), &split): ((StageIndex, Microbatch), &bool)| {
        let forward = Action::Forward { stage, microbatch };
        match (trains, split) {
            (false, _) => vec![forward],
            (true, false) => vec![forward, Action::Backward { stage, microbatch }],
            (true, true) => {
                let inputs = Action::InputBackward { stage, microbatch };
                vec![forward, inputs, Action::WeightBackward { stage, microbatch }]
            }
        }
    };
    pairs.zip(split).flat_map(actions_of).collect()
}

fn is_ready(action: Action, placement: &Placement, slices: Slices, done: &[Action]) -> bool {
    let is_done = |action: Action| done.contains(&action);
    let gradient = |stage, microbatch| {
        is_done(Action::Backward { stage, microbatch })
            || is_done(Action::InputBackward { stage, microbatch })
    };
    match action {
        Action::Forward { stage, microbatch } => {
            let is_after = |stage, microbatch| is_done(Action::Forward { stage, microbatch });
            placement.previous(stage).is_none_or(|previous| is_after(previous, microbatch))
                && slices.before(microbatch).is_none_or(|before| is_after(stage, before))
        }
        Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
            is_done(Action::Forward { stage, microbatch })
                && placement.next(stage).is_none_or(|next| gradient(next, microbatch))
                && slices.after(microbatch).is_none_or(|after| gradient(stage, after))
        }
        Action::WeightBackward { stage, microbatch } => is_done(Action::InputBackward { stage, microbatch }),
        _ => false,
    }
}
