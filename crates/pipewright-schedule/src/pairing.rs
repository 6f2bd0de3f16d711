//! Pairs forwards with backwards: makes overlaps in a schedule that has none.
//!
//! Rules: (1) a forward and the `B` after it become one overlap ([`crate::overlap`]). An `I` and the `W`
//! after it count as a `B`, and also become an overlap with a forward after them. A `B` and a forward after
//! it do not: a run without exchanges takes overlaps apart and runs the forward first, so the gradient would
//! leave later; (2) both are of different stages, because a stage computes one thing at a time, and of
//! different microbatches, because the backward of a microbatch needs its forwards; (3) neither needs the
//! other through other ranks. Everything else keeps its order. Idle cells are removed.
//!
//! Rule 3 depends on the other pairs: an overlap begins when the tensors of both halves exist, so two pairs
//! may wait for each other although each of them could run alone. So the pass runs the schedule. A rank runs
//! its next pair when both halves can begin. If no rank can continue, the first rank that could run the first
//! part of its pair alone does so, and pairs what follows. The order of this run proves that the result has
//! no deadlock.
//!
//! A backward in two halves becomes one, so `W` runs in the overlap and its gradient leaves later. In return
//! there is more to compute while the tokens of the forward travel, and an overlap keeps the form that files
//! and runs of DualPipeV have. A `W` that does not follow its `I` stays where it is.
//!
//! Time: linear in the schedule, times the ranks that wait.

use crate::action::Action;
use crate::ids::{Microbatch, StageIndex};
use crate::overlap::Overlap;
use crate::placement::Placement;
use crate::schedule::Schedule;

/// Returns the schedule with overlaps of forwards and backwards that follow each other on a rank.
///
/// A schedule whose microbatches are cut into slices does not change, and neither does the end of an unsound
/// one.
///
/// ```
/// use pipewright_schedule::csv::{parse_schedule, print_schedule};
/// use pipewright_schedule::pairing::pair_overlaps;
/// let schedule = parse_schedule("0F0,1F0,1I0,1W0,0F1,1F1,0B0,1B1,0B1\n")?;
/// let paired = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n";
/// assert_eq!(print_schedule(&pair_overlaps(schedule)), paired);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn pair_overlaps(schedule: Schedule) -> Schedule {
    if !schedule.slices().is_one() {
        return schedule;
    }
    let rows = Run::of(&schedule).paired();
    let rows = rows.into_iter().map(|row| row.into_iter().map(Some).collect()).collect();
    Schedule::made(schedule.placement().clone(), schedule.numbering(), rows)
}

/// A run of the schedule, which decides what is paired.
struct Run<'a> {
    placement: &'a Placement,
    microbatches: u32,
    rows: Vec<Vec<Action>>,
    /// The number of actions of each row that have run.
    done: Vec<usize>,
    /// Whether the next action of a rank runs alone.
    alone: Vec<bool>,
    /// Whether the forward and the input gradient of each stage and microbatch exist.
    has_run: [Vec<bool>; 2],
    paired: Vec<Vec<Action>>,
}

/// The next actions of a rank, which run together.
#[derive(Clone, Copy)]
struct Next {
    /// The action, or the overlap of the actions.
    action: Action,
    /// The number of actions in the row.
    count: usize,
}

impl<'a> Run<'a> {
    fn of(schedule: &'a Schedule) -> Self {
        let placement = schedule.placement();
        let rows: Vec<Vec<Action>> =
            schedule.rows().iter().map(|row| row.iter().copied().flatten().collect()).collect();
        let cells = placement.stages() as usize * schedule.microbatches() as usize;
        Self {
            placement,
            microbatches: schedule.microbatches(),
            done: vec![0; rows.len()],
            alone: vec![false; rows.len()],
            has_run: [vec![false; cells], vec![false; cells]],
            paired: rows.iter().map(|row| Vec::with_capacity(row.len())).collect(),
            rows,
        }
    }

    fn paired(mut self) -> Vec<Vec<Action>> {
        loop {
            let before: usize = self.done.iter().sum();
            (0..self.rows.len()).for_each(|rank| self.advance(rank));
            let has_advanced = self.done.iter().sum::<usize>() > before;
            if !has_advanced && !self.separate_first() {
                break;
            }
        }
        // What is left waits for ever, which the validator reports.
        for ((paired, row), &done) in self.paired.iter_mut().zip(&self.rows).zip(&self.done) {
            paired.extend_from_slice(&row[done..]);
        }
        self.paired
    }

    /// Runs a rank as far as it can.
    fn advance(&mut self, rank: usize) {
        while let Some(next) = self.next(rank) {
            if !next.action.parts().all(|part| self.can_run(part)) {
                return;
            }
            for part in next.action.parts() {
                self.note(part);
            }
            self.paired[rank].push(next.action);
            self.done[rank] += next.count;
            self.alone[rank] = false;
        }
    }

    /// Lets the first action of a pair run alone on the first rank on which it can. Returns false if there is
    /// none.
    fn separate_first(&mut self) -> bool {
        let can_separate = |&rank: &usize| {
            let is_pair = self.next(rank).is_some_and(|next| next.count > 1);
            is_pair && self.rows[rank].get(self.done[rank]).is_some_and(|&action| self.can_run(action))
        };
        let Some(rank) = (0..self.rows.len()).find(can_separate) else { return false };
        self.alone[rank] = true;
        true
    }

    /// Returns what a rank runs next.
    fn next(&self, rank: usize) -> Option<Next> {
        let left = &self.rows[rank][self.done[rank]..];
        let &action = left.first()?;
        let pair = if self.alone[rank] { None } else { pair(left) };
        Some(pair.unwrap_or(Next { action, count: 1 }))
    }

    /// Returns whether what an action needs of other actions exists. `action` is not an overlap.
    fn can_run(&self, action: Action) -> bool {
        let [forwards, gradients] = &self.has_run;
        let has = |cells: &[bool], stage: StageIndex, microbatch| {
            cells.get(self.cell(stage, microbatch)).copied().unwrap_or(false)
        };
        match action {
            Action::Forward { stage, microbatch } => {
                self.placement.previous(stage).is_none_or(|stage| has(forwards, stage, microbatch))
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                has(forwards, stage, microbatch)
                    && self.placement.next(stage).is_none_or(|stage| has(gradients, stage, microbatch))
            }
            _ => true,
        }
    }

    /// Notes that an action has run.
    fn note(&mut self, action: Action) {
        let (kind, stage, microbatch) = match action {
            Action::Forward { stage, microbatch } => (0, stage, microbatch),
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                (1, stage, microbatch)
            }
            _ => return,
        };
        let cell = self.cell(stage, microbatch);
        if let Some(has_run) = self.has_run[kind].get_mut(cell) {
            *has_run = true;
        }
    }

    fn cell(&self, stage: StageIndex, microbatch: Microbatch) -> usize {
        stage.index() * self.microbatches as usize + microbatch.index()
    }
}

/// Returns the overlap of the first actions of a row; `None` if they are not a forward and a backward that
/// may run together.
fn pair(row: &[Action]) -> Option<Next> {
    let (first, first_count) = computation(row)?;
    let (second, second_count) = computation(&row[first_count..])?;
    let (forward, backward) = match (first, second) {
        (Half::Forward(forward), Half::Backward(backward)) => (forward, backward),
        (Half::Backward(backward), Half::Forward(forward)) if first_count == 2 => (forward, backward),
        _ => return None,
    };
    let may_overlap = forward.0 != backward.0 && forward.1 != backward.1;
    let overlap = may_overlap.then(|| Overlap::new(forward, backward)).flatten()?;
    Some(Next { action: Action::Overlap(overlap), count: first_count + second_count })
}

/// A half of an overlap: its stage and its microbatch.
enum Half {
    Forward((StageIndex, Microbatch)),
    Backward((StageIndex, Microbatch)),
}

/// Returns the forward or the whole backward at the beginning of a row, and the number of its actions.
fn computation(row: &[Action]) -> Option<(Half, usize)> {
    match *row.first()? {
        Action::Forward { stage, microbatch } => Some((Half::Forward((stage, microbatch)), 1)),
        Action::Backward { stage, microbatch } => Some((Half::Backward((stage, microbatch)), 1)),
        Action::InputBackward { stage, microbatch } => {
            let follows = row.get(1) == Some(&Action::WeightBackward { stage, microbatch });
            follows.then_some((Half::Backward((stage, microbatch)), 2))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::costs::Costs;
    use crate::csv::{parse_schedule, print_schedule};
    use crate::generate::{ScheduleSpec, Setting, catalogue, generate};
    use crate::level::Level;
    use crate::lower::{TrainingLowering, drop_bubbles, for_training};
    use crate::simulate::timed;
    use crate::validate::validate;

    fn check(rows: &str, expected: &str) {
        let schedule = parse_schedule(rows).expect("a schedule");
        assert_eq!(print_schedule(&pair_overlaps(schedule)), expected);
    }

    #[test]
    fn neighbours_become_overlaps_in_either_order() {
        let paired = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n";
        check("0F0,1F0,1I0,1W0,0F1,0I0,0W0,1F1,1B1,0B1\n", paired);
        check("0F0,1F0,,0F1,1B0,1F1,0B0,,1B1,0B1\n", paired);
        let backward_first = "0F0,1F0,1B0,0F1,1F1,0B0,1B1,0B1\n";
        check(backward_first, "0F0,1F0,1B0,0F1,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n");
    }

    #[test]
    fn halves_of_a_backward_join_only_if_they_are_neighbours() {
        let whole = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0I0,1B1,0W0,0B1\n";
        check("0F0,1F0,1I0,1W0,0F1,1F1,0I0,1B1,0W0,0B1\n", whole);
    }

    #[test]
    fn one_stage_or_one_microbatch_makes_no_overlap() {
        for alone in ["0F0,0F1,0B0,0F2,0B1,0B2\n", "0F0,1F0,1B0,0B0\n"] {
            check(alone, alone);
        }
    }

    #[test]
    fn overlaps_of_the_schedule_stay() {
        let rows = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n";
        check(rows, rows);
    }

    /// `0F1` and `2B0` could overlap, and so could `1F1` and `3B0`. But `2B0` needs `3B0`, and `1F1` needs
    /// `0F1`.
    #[test]
    fn pairs_that_would_wait_for_each_other_stay_apart() {
        check(
            "0F0,2F0,0F1,2B0,2F1,0B0,2B1,0B1\n1F0,3F0,1F1,3B0,1B0,3F1,3B1,1B1\n",
            "0F0,2F0,0F1,2B0,(2F1;0B0)OVERLAP_F_B,2B1,0B1\n1F0,3F0,(1F1;3B0)OVERLAP_F_B,1B0,3F1,3B1,1B1\n",
        );
    }

    fn paired(name: &str, spec: &ScheduleSpec) -> Option<[Schedule; 2]> {
        let plain = generate(name, spec).ok()?;
        let paired = pair_overlaps(plain.clone());
        Some([plain, paired])
    }

    /// Returns the time of a step of which these are the costs.
    fn makespan(schedule: &Schedule, costs: &Costs) -> f64 {
        let lowering = TrainingLowering::default().with_exchanges(costs.has_exchanges());
        let program = for_training(schedule, &lowering).expect("it is sound");
        timed(program.as_program(), costs).expect("it runs").timeline().makespan()
    }

    /// Checks that a schedule has no deadlock, with whole overlaps and with overlaps that are taken apart.
    fn check_sound(name: &str, schedule: &Schedule) -> Result<(), TestCaseError> {
        let sound = validate(drop_bubbles(schedule), Level::Compute);
        prop_assert!(sound.is_ok(), "{}: {:?}", name, sound);
        let lowering = TrainingLowering { keep_overlaps: true, ..TrainingLowering::default() };
        prop_assert!(for_training(schedule, &lowering).is_ok(), "{}", name);
        prop_assert!(for_training(schedule, &TrainingLowering::default()).is_ok(), "{}", name);
        Ok(())
    }

    /// Checks a paired schedule: it is sound, and each of its overlaps consists of actions that follow each
    /// other.
    fn check_paired(name: &str, [plain, paired]: &[Schedule; 2]) -> Result<(), TestCaseError> {
        check_sound(name, paired)?;
        for rank in plain.placement().all_ranks() {
            let actions: Vec<Action> = plain.row(rank).iter().copied().flatten().collect();
            let mut rest = &actions[..];
            for action in paired.row(rank).iter().copied().flatten() {
                let count = match action {
                    Action::Overlap(overlap) if rest.first() != Some(&action) => pair_length(overlap, rest),
                    _ => Some(1).filter(|_| rest.first() == Some(&action)),
                };
                prop_assert!(count.is_some(), "{}: {} instead of {:?}", name, action, rest);
                rest = &rest[count.unwrap_or(0)..];
            }
            prop_assert!(rest.is_empty(), "{}: {:?} are missing", name, rest);
        }
        Ok(())
    }

    /// Returns the number of actions at the beginning of a row that may be the halves of an overlap; `None`
    /// if these are others.
    fn pair_length(overlap: Overlap, row: &[Action]) -> Option<usize> {
        let ((stage, microbatch), of_forward) = (overlap.backward(), overlap.forward());
        let forward = Action::Forward { stage: of_forward.0, microbatch: of_forward.1 };
        let whole = Action::Backward { stage, microbatch };
        let [input, weight] =
            [Action::InputBackward { stage, microbatch }, Action::WeightBackward { stage, microbatch }];
        let pairs = [&[forward, whole][..], &[forward, input, weight], &[input, weight, forward]];
        let is_apart = stage != of_forward.0 && microbatch != of_forward.1;
        pairs.into_iter().find(|pair| is_apart && row.starts_with(pair)).map(<[Action]>::len)
    }

    proptest! {
        #[test]
        fn every_schedule_stays_sound_with_overlaps(
            ranks in 1..7u32,
            stages_per_rank in 1..5u32,
            microbatches in 1..20u32,
            group in prop::option::of(1..12u32),
        ) {
            for generator in catalogue() {
                let takes_group = generator.settings.contains(&Setting::GroupSize);
                let spec = ScheduleSpec {
                    ranks,
                    stages_per_rank: Some(stages_per_rank),
                    microbatches,
                    group_size: group.filter(|_| takes_group),
                    ..ScheduleSpec::default()
                };
                let Some(schedules) = paired(generator.name, &spec) else { continue };
                check_paired(generator.name, &schedules)?;
                if generator.settings.contains(&Setting::Overlap) {
                    // The setting may also change the order.
                    let schedule = generate(generator.name, &ScheduleSpec { overlap: true, ..spec });
                    check_sound(generator.name, &schedule.expect("the size is possible without the setting"))?;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn overlaps_without_exchanges_take_no_longer(
            ranks in 1..7u32,
            microbatches in 1..20u32,
            times in prop::array::uniform3(1..10u32),
            hop in 0..5u32,
        ) {
            let [forward, input, weight] = times;
            let costs = format!("F={forward},I={input},W={weight},hop={hop}").parse().expect("costs");
            for name in ["interleaved1f1b", "zbvzerobubble"] {
                let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
                let Some([plain, paired]) = paired(name, &spec) else { continue };
                let [before, after] = [plain, paired].map(|schedule| makespan(&schedule, &costs));
                prop_assert!(after <= before * (1.0 + 1e-9), "{}: {} after {}", name, after, before);
            }
        }
    }

    /// Checks the share of a step's time that a schedule takes with the setting, compared with the schedule
    /// without it.
    fn check_share(name: &str, ranks: u32, exchange: f64, share: f64) {
        let costs = format!("exchange={exchange},exchanges=4").parse().expect("costs");
        let time = |overlap| {
            let spec = ScheduleSpec { ranks, microbatches: 4 * ranks, overlap, ..ScheduleSpec::default() };
            makespan(&generate(name, &spec).expect("a schedule"), &costs)
        };
        let found = time(true) / time(false);
        assert!((found - share).abs() < 5e-4, "{name} on {ranks} ranks: {found}");
    }

    #[test]
    fn overlaps_hide_exchanges() {
        check_share("zbvzerobubble", 2, 0.8, 0.748);
        check_share("zbvzerobubble", 4, 0.8, 0.765);
        check_share("zbvzerobubble", 4, 0.2, 0.954);
        check_share("interleaved1f1b", 2, 0.8, 0.969);
        check_share("interleaved1f1b", 4, 0.8, 0.962);
    }
}
