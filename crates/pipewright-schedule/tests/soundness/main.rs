//! Checks that sound programs are accepted and unsound ones refused. Two judges that share no code must
//! agree: the crate's validator, which applies rules, and the checker here, which runs the program
//! symbolically.

mod checker;
mod mutations;
mod random;

use checker::execute;
use mutations::{Mutation, mutate};
use pipewright_schedule::costs::{Link, RecomputeSizes, StageSizes};
use pipewright_schedule::csv::{print_program, print_schedule};
use pipewright_schedule::generate::{PerStage, Setting, catalogue};
use pipewright_schedule::lower::{LowerError, Messages, OffloadConfig};
use pipewright_schedule::simulate::{logical, peak_memory, timed};
use pipewright_schedule::{Action, ActionKind, Costs};
use pipewright_schedule::{
    Level, LowerConfig, Program, Recompute, Schedule, ScheduleSpec, Slices, StageBackward, TrainedStages,
    generate, lower, validate,
};
use proptest::prelude::*;
use random::any_schedule;

const LEVELS: [Level; 3] = [Level::Compute, Level::Comms, Level::Full];

fn lowered(schedule: &Schedule, level: Level) -> Program {
    lower(schedule, &LowerConfig::from(level))
        .unwrap_or_else(|error| panic!("{error}\n{}", print_schedule(schedule)))
}

/// Checks that both judges accept the program of `schedule` at every level, with and without early messages,
/// and that the logical simulation ends.
fn check_sound(schedule: &Schedule) -> Result<(), TestCaseError> {
    for (level, send_early) in LEVELS.into_iter().flat_map(|level| [(level, false), (level, true)]) {
        let program = lower(schedule, &LowerConfig { send_early, ..LowerConfig::from(level) });
        let program =
            program.unwrap_or_else(|error| panic!("{level}: {error}\n{}", print_schedule(schedule)));
        prop_assert_eq!(execute(&program, level), Ok(()), "{}\n{}", level, print_program(&program));
        if level != Level::Compute {
            let cells: usize = program.rows().iter().map(Vec::len).sum();
            let run = logical(&program).expect("a sound program ends");
            prop_assert!(run.steps() as usize <= cells);
        }
        if let Err(violations) = validate(program, level) {
            prop_assert!(false, "{}: {}", level, violations);
        }
    }
    Ok(())
}

/// Checks that both judges accept the program of `schedule` for a model with some stages that are trained, and
/// that they refuse the program of the whole training for such a model.
fn check_frozen(schedule: &Schedule, trained: &[bool]) -> Result<(), TestCaseError> {
    let stages = schedule.placement().stages() as usize;
    let flags: Vec<bool> = (0..stages).map(|stage| trained[stage % trained.len()]).collect();
    let trained = TrainedStages::of(&flags);
    for (level, send_early) in LEVELS.into_iter().flat_map(|level| [(level, false), (level, true)]) {
        let config = LowerConfig { send_early, trained: trained.clone(), ..LowerConfig::from(level) };
        let program = lower(schedule, &config);
        let program =
            program.unwrap_or_else(|error| panic!("{level}: {error}\n{}", print_schedule(schedule)));
        let text = print_program(&program);
        prop_assert_eq!(execute(&program, level), Ok(()), "{} {:?}\n{}", level, &flags, &text);
        if level != Level::Compute {
            prop_assert!(logical(&program).is_ok() && timed(&program, &Costs::default()).is_ok(), "{}", text);
        }
        check_kinds(&program, &trained)?;
        prop_assert!(judged(program, level)?);
        let has_backward =
            schedule.rows().iter().flatten().flatten().any(|action| action.kind() != ActionKind::Forward);
        // A rank that has reduced the gradients of a stage that is frozen is no harm to the others.
        if has_backward && !trained.are_all() {
            let whole =
                lower(schedule, &LowerConfig { trained: TrainedStages::ALL, ..config }).expect("it is sound");
            prop_assert!(!judged(whole.with_trained(trained.clone()), level)?);
        }
    }
    Ok(())
}

/// Checks that no stage has an action for gradients that it does not need.
fn check_kinds(program: &Program, trained: &TrainedStages) -> Result<(), TestCaseError> {
    use ActionKind::*;
    for part in program.rows().iter().flatten().flat_map(|action| action.parts()) {
        let unneeded: &[ActionKind] = match trained.backward_of(part.stage()) {
            StageBackward::Whole => &[],
            StageBackward::Inputs => &[Backward, WeightBackward, ReduceGrad, WaitReduceGrad],
            StageBackward::None => {
                &[Backward, InputBackward, WeightBackward, RecvBackward, SendBackward, ReduceGrad]
            }
        };
        prop_assert!(!unneeded.contains(&part.kind()), "{}", part);
    }
    Ok(())
}

/// Any generator, at a small size that it may not support, with any settings that it takes.
fn any_spec() -> impl Strategy<Value = (&'static str, ScheduleSpec)> {
    let size = (1..9u32, prop::option::of(1..5u32), 1..20u32);
    let settings = (
        prop::option::of(1..20u32),
        any::<bool>(),
        prop::option::of(1..9u32),
        prop::option::of(1..6u32),
        any::<bool>(),
    );
    (prop::sample::select(catalogue()), size, settings).prop_map(|(generator, size, settings)| {
        let (ranks, stages_per_rank, microbatches) = size;
        let (group, wide_warmup, limit, slices, overlap) = settings;
        let takes = |setting| generator.settings.contains(&setting);
        let spec = ScheduleSpec {
            ranks,
            stages_per_rank,
            microbatches,
            group_size: group.filter(|_| takes(Setting::GroupSize)),
            wide_warmup: wide_warmup && takes(Setting::WideWarmup),
            memory_limit: limit.filter(|_| takes(Setting::MemoryLimit)).map(PerStage::Same),
            slices: slices.filter(|_| takes(Setting::Slices)).and_then(Slices::new),
            overlap: overlap && takes(Setting::Overlap),
            ..ScheduleSpec::default()
        };
        (generator.name, spec)
    })
}

/// Any choice of what leaves memory.
fn any_offload() -> impl Strategy<Value = OffloadConfig> {
    let recompute = prop::sample::select(vec![Recompute::Stage, Recompute::Block]);
    (recompute, 0..3u32).prop_map(|(recompute, keep)| OffloadConfig { recompute, stages: None, keep })
}

#[test]
fn every_generator_has_the_plain_size() -> Result<(), TestCaseError> {
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
    catalogue().iter().try_for_each(|generator| {
        check_sound(&generate(generator.name, &spec).expect("a size that every schedule has"))
    })
}

/// Groups of small sizes, with a short last group or without, and with each setting that changes the warm-up.
#[test]
fn groups_of_every_size_are_sound() -> Result<(), TestCaseError> {
    let plain = ScheduleSpec::default();
    let (wide, overlap) = (
        ScheduleSpec { wide_warmup: true, ..plain.clone() },
        ScheduleSpec { overlap: true, ..plain.clone() },
    );
    check_groups("interleavedzerobubble", &plain)?;
    check_groups("interleaved-zb-h1", &plain)?;
    check_groups("interleaved-zb-h1", &wide)?;
    check_groups("interleaved1f1b", &plain)?;
    check_groups("interleaved1f1b", &overlap)
}

/// Checks a schedule with `settings` for all sizes with up to two whole groups.
fn check_groups(name: &str, settings: &ScheduleSpec) -> Result<(), TestCaseError> {
    for (ranks, chunks) in [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3), (5, 2), (5, 3)] {
        for group_size in ranks..ranks + 3 {
            for microbatches in group_size..3 * group_size {
                let spec = ScheduleSpec {
                    ranks,
                    stages_per_rank: Some(chunks),
                    microbatches,
                    group_size: Some(group_size),
                    ..settings.clone()
                };
                let schedule = generate(name, &spec).unwrap_or_else(|error| panic!("{error}"));
                let program = lowered(&schedule, Level::Comms);
                prop_assert_eq!(execute(&program, Level::Comms), Ok(()), "{} {:?}", name, spec);
                prop_assert!(validate(program, Level::Comms).is_ok(), "{} {:?}", name, spec);
            }
        }
    }
    Ok(())
}

/// Checks that both judges agree on `program`, and returns their verdict.
fn judged(program: Program, level: Level) -> Result<bool, TestCaseError> {
    let executed = execute(&program, level);
    let text = print_program(&program);
    let validated = validate(program, level);
    prop_assert_eq!(
        executed.is_ok(),
        validated.is_ok(),
        "{}: {:?} but {:?}\n{}",
        level,
        executed,
        validated.err(),
        text
    );
    Ok(executed.is_ok())
}

#[test]
fn every_swap_of_slices_is_caught() -> Result<(), TestCaseError> {
    let slices = Slices::new(3);
    let spec = ScheduleSpec { ranks: 3, microbatches: 3, slices, ..ScheduleSpec::default() };
    let schedule = generate("seq1f1b", &spec).expect("a schedule");
    for level in LEVELS {
        let mutants = mutations::swapped_slices(&lowered(&schedule, level));
        // Two pairs of neighbours in each direction, for each microbatch and rank.
        prop_assert_eq!(mutants.len(), 2 * 2 * 3 * 3);
        for mutant in mutants {
            prop_assert!(!judged(mutant.clone(), level)?);
            let violations = validate(mutant, level).expect_err("a swap");
            let mut problems = violations.listed().iter().map(|violation| &violation.problem);
            prop_assert!(problems.any(|problem| problem.contains("keys and values")), "{}", violations);
        }
    }
    Ok(())
}

/// Returns the largest number of sends of a rank that are not waited for yet.
fn most_in_flight(program: &Program) -> usize {
    let most = |row: &Vec<Action>| {
        let (mut pending, mut most) = (0, 0);
        for action in row {
            match action {
                Action::SendForward { .. } | Action::SendBackward { .. } => pending += 1,
                Action::WaitSendForward { .. } | Action::WaitSendBackward { .. } => pending -= 1,
                _ => {}
            }
            most = most.max(pending);
        }
        most
    };
    program.rows().iter().map(most).max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_generator_is_sound((name, spec) in any_spec()) {
        // A size that a schedule does not support is an error, not a panic.
        if let Ok(schedule) = generate(name, &spec) {
            check_sound(&schedule)?;
        }
    }

    #[test]
    fn every_generator_is_sound_for_frozen_stages(
        (name, spec) in any_spec(),
        trained in prop::collection::vec(any::<bool>(), 1..9),
    ) {
        if let Ok(schedule) = generate(name, &spec) {
            check_frozen(&schedule, &trained)?;
        }
    }

    #[test]
    fn every_random_schedule_is_sound(schedule in any_schedule()) {
        check_sound(&schedule)?;
    }

    #[test]
    fn waits_and_deferred_receives_are_sound(
        schedule in any_schedule(),
        defer_recv: bool,
        budget in prop::option::of(1..4u32),
    ) {
        let budget = budget.and_then(std::num::NonZeroU32::new);
        let messages = Messages::Waited { defer_recv, budget };
        let config = LowerConfig { communicate: Some(messages), ..LowerConfig::from(Level::Comms) };
        let program = match lower(&schedule, &config) {
            Ok(program) => program,
            // With deferred receives, a small budget may be impossible.
            Err(LowerError::Refused(_)) if defer_recv && budget.is_some() => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert!(most_in_flight(&program) <= budget.map_or(usize::MAX, |budget| budget.get() as usize));
        prop_assert!(logical(&program).is_ok() && timed(&program, &Costs::default()).is_ok());
        if let Err(violations) = validate(program, Level::Comms) {
            prop_assert!(false, "{}\n{}", violations, print_program(violations.program()));
        }
    }

    #[test]
    fn every_mutation_is_caught(
        schedule in any_schedule(),
        level in prop::sample::select(&LEVELS[..]),
        mutation in prop::sample::select(Mutation::ALL),
        trained in prop::collection::vec(any::<bool>(), 0..4),
        offload in prop::option::of(any_offload()),
        seed: u64,
    ) {
        let config = LowerConfig { trained: TrainedStages::of(&trained), offload, ..LowerConfig::from(level) };
        let program = lower(&schedule, &config).expect("a sound schedule");
        if let Some(mutant) = mutate(&program, mutation, seed) {
            let text = print_program(&mutant);
            prop_assert!(!judged(mutant, level)?, "{:?} at {} goes unnoticed\n{}", mutation, level, text);
        }
    }

    /// Tensors that leave memory come back, and a rank never holds more than without that.
    #[test]
    fn offloading_is_sound_and_never_takes_more_memory(
        schedule in any_schedule(),
        level in prop::sample::select(&LEVELS[..]),
        offload in any_offload(),
        seconds in 0.0..3.0,
    ) {
        let recompute = offload.recompute.clone();
        let config = LowerConfig { offload: Some(offload), ..LowerConfig::from(level) };
        let program = lower(&schedule, &config).expect("a sound schedule");
        prop_assert!(judged(program.clone(), level)?, "{}", print_program(&program));
        if level == Level::Compute {
            return Ok(());
        }
        let sizes = StageSizes {
            activation: 10,
            stash: 4,
            gradient: 3,
            recompute: Some(RecomputeSizes { kept: 3, recomputed: 7 }),
            offload: 3,
            ..StageSizes::default()
        };
        let costs = Costs {
            recompute,
            sizes: vec![sizes],
            offload: Link { latency: seconds, bandwidth: f64::INFINITY },
            ..Costs::default()
        };
        let peaks = |program: &Program| {
            let run = timed(program, &costs).expect("it ends");
            peak_memory(run.timeline(), &costs.sizes)
        };
        let without = lowered(&schedule, level);
        let pairs = peaks(&program).into_iter().zip(peaks(&without));
        prop_assert!(pairs.clone().all(|(less, more)| less <= more), "{}", print_program(&program));
        prop_assert!(logical(&program).is_ok());
    }

    #[test]
    fn both_judges_agree_on_any_swap(
        schedule in any_schedule(),
        level in prop::sample::select(&LEVELS[..]),
        offload in prop::option::of(any_offload()),
        seeds in prop::collection::vec(any::<u64>(), 1..4),
    ) {
        let config = LowerConfig { offload, ..LowerConfig::from(level) };
        let mut program = lower(&schedule, &config).expect("a sound schedule");
        for seed in seeds {
            program = mutations::swap_any(&program, seed);
        }
        judged(program, level)?;
    }
}
