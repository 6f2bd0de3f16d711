//! Checks that every size which an error advises is accepted, by the function that refused the first one.

use pipewright_schedule::generate::{
    Advice, GenerateError, GenerateErrorKind, Limits, PerStage, catalogue, check, generate_within,
};
use pipewright_schedule::{ScheduleSpec, Slices};
use proptest::prelude::*;

/// Returns the size with the changes of a piece of advice.
fn changed(name: &'static str, spec: &ScheduleSpec, advice: &Advice) -> (&'static str, ScheduleSpec) {
    let mut spec = spec.clone();
    for setting in &advice.left_out {
        match setting.to_string().as_str() {
            "group_size" => spec.group_size = None,
            "wide_warmup" => spec.wide_warmup = false,
            "costs" => spec.costs = None,
            "memory_limit" => spec.memory_limit = None,
            "overlap" => spec.overlap = false,
            _ => spec.slices = None,
        }
    }
    if advice.memory_for_one {
        spec.memory_limit = Some(PerStage::Same(1));
    }
    let ScheduleSpec { ranks, stages_per_rank, microbatches, group_size, .. } = spec;
    let (ranks, microbatches) = (advice.ranks.unwrap_or(ranks), advice.microbatches.unwrap_or(microbatches));
    let stages_per_rank = advice.stages_per_rank.or(stages_per_rank);
    let group_size = advice.group_size.or(group_size);
    match advice.schedule {
        // Without its settings.
        Some(other) => {
            (other, ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() })
        }
        None => (name, ScheduleSpec { ranks, stages_per_rank, microbatches, group_size, ..spec }),
    }
}

/// Checks each piece of advice of an error, and returns whether there is one.
fn check_advice(name: &'static str, spec: &ScheduleSpec, limits: Limits) -> Result<bool, TestCaseError> {
    let Err(error) = check(name, spec, limits) else { return Ok(true) };
    for advice in &error.advice {
        let (name, changed) = changed(name, spec, advice);
        let accepted = check(name, &changed, limits);
        prop_assert!(
            accepted.is_ok(),
            "{error}: {changed:?}: {:?}",
            accepted.map_err(|error| error.to_string())
        );
        let total = u64::from(changed.microbatches) * u64::from(limits.replicas);
        prop_assert!(u32::try_from(total).is_ok());
        let words = error.to_string();
        if advice.microbatches.is_some() {
            let noun = if total == 1 { "microbatch" } else { "microbatches" };
            prop_assert!(words.contains(&format!("{total} {noun}")), "{words}");
        }
    }
    check_words(&error)?;
    Ok(!error.advice.is_empty())
}

/// Checks that no noun in the plural follows the number 1.
fn check_words(error: &GenerateError) -> Result<(), TestCaseError> {
    let words = error.to_string();
    for noun in ["microbatches", "ranks", "stages", "rounds", "entries", "layers"] {
        prop_assert!(!format!(" {words}").contains(&format!(" 1 {noun}")), "{words}");
    }
    Ok(())
}

fn any_size() -> impl Strategy<Value = (u32, Option<u32>, u32)> {
    let number = |most: u32| prop_oneof![8 => 0..=most, 1 => Just(u32::MAX), 1 => any::<u32>()];
    (number(12), prop::option::of(number(6)), number(40))
}

fn any_settings() -> impl Strategy<Value = (Option<u32>, bool, Option<u32>, Option<u32>)> {
    (
        prop::option::weighted(0.3, 0..20u32),
        prop::bool::weighted(0.1),
        prop::option::weighted(0.2, 0..5u32),
        prop::option::weighted(0.2, 1..5u32),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn advice_is_accepted(
        at in 0..catalogue().len(),
        (ranks, stages_per_rank, microbatches) in any_size(),
        (group_size, wide_warmup, memory_limit, slices) in any_settings(),
        layers in prop::option::weighted(0.3, 1..30u32),
        replicas in prop_oneof![4 => Just(1), 2 => 2..5u32, 1 => Just(1_000_000)],
    ) {
        let spec = ScheduleSpec {
            ranks,
            stages_per_rank,
            microbatches,
            group_size,
            wide_warmup,
            memory_limit: memory_limit.map(PerStage::Same),
            slices: slices.and_then(Slices::new),
            ..ScheduleSpec::default()
        };
        check_advice(catalogue()[at].name, &spec, Limits { layers, replicas })?;
    }
}

/// All replicas together may have more microbatches than can be counted.
#[test]
fn another_schedule_is_advised_only_for_microbatches_that_can_be_counted() -> Result<(), TestCaseError> {
    let spec = ScheduleSpec { ranks: 1, microbatches: 5_592_406, ..ScheduleSpec::default() };
    for generator in catalogue() {
        check_advice(generator.name, &spec, Limits { replicas: 1_000_000, ..Limits::default() })?;
    }
    Ok(())
}

/// All small sizes, so that no combination is left to chance: whatever is refused has advice, and the
/// schedules of accepted sizes can be made.
#[test]
fn small_sizes_have_advice() -> Result<(), TestCaseError> {
    let mut refused = 0;
    for generator in catalogue() {
        for ranks in 0..7 {
            for stages_per_rank in [None, Some(0), Some(1), Some(2), Some(3)] {
                for microbatches in 0..15 {
                    for group_size in [None, Some(0), Some(2), Some(5)] {
                        let spec = ScheduleSpec {
                            ranks,
                            stages_per_rank,
                            microbatches,
                            group_size,
                            ..ScheduleSpec::default()
                        };
                        for replicas in [1, 2] {
                            let limits = Limits { replicas, ..Limits::default() };
                            let has_advice = check_advice(generator.name, &spec, limits)?;
                            prop_assert!(has_advice, "{} {spec:?}", generator.name);
                        }
                        let checked = check(generator.name, &spec, Limits::default());
                        let made = generate_within(generator.name, &spec, Limits::default());
                        prop_assert_eq!(checked.clone().err(), made.err());
                        refused += u32::from(checked.is_err());
                    }
                }
            }
        }
    }
    prop_assert!(refused > 10_000, "{refused}");
    Ok(())
}

#[test]
fn a_schedule_for_fewer_layers_than_one_for_each_stage_has_advice() {
    let spec =
        ScheduleSpec { ranks: 4, stages_per_rank: Some(3), microbatches: 8, ..ScheduleSpec::default() };
    let error =
        check("loopedbfs", &spec, Limits { layers: Some(9), ..Limits::default() }).expect_err("12 stages");
    assert!(matches!(error.kind, GenerateErrorKind::TooManyStages { .. }));
    assert_eq!(
        error.to_string(),
        "9 layers cannot fill 12 stages; use at most 9 stages, not 4 ranks with 3 stages each, so use 3 ranks, or use 2 \
         stages on each rank, or use 1 stage on each rank"
    );
}
