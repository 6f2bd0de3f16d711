//! Every formula in the descriptions of the schedules agrees with the simulation.

use std::collections::BTreeMap;

use pipewright_book::formula::{Sizes, holds, value};
use pipewright_book::schedules::with_messages;
use pipewright_schedule::generate::{Formula, Generator, Setting, catalogue};
use pipewright_schedule::simulate::{Summary, summarize};
use pipewright_schedule::{Costs, ScheduleSpec, Slices, generate};

/// The number of sizes at which a formula is compared at least.
const FEWEST: usize = 8;

/// Returns all sizes from two to nine ranks that the generator accepts, with the figures of the simulation.
fn runs(generator: &Generator) -> Vec<(Sizes, Summary)> {
    let [has_group, has_slices] =
        [Setting::GroupSize, Setting::Slices].map(|setting| generator.settings.contains(&setting));
    let mut runs = Vec::new();
    for ranks in 2..=9 {
        for stages_per_rank in 1..=4 {
            for microbatches in (1..=4 * ranks).chain([6 * ranks, 6 * ranks + 1]) {
                let groups = if has_group { ranks / 2..=ranks } else { ranks..=ranks };
                let slices = if has_slices { 1..=4 } else { 1..=1 };
                for (group, slices) in
                    groups.flat_map(|group| slices.clone().map(move |slices| (group, slices)))
                {
                    let spec = ScheduleSpec {
                        ranks,
                        stages_per_rank: Some(stages_per_rank),
                        microbatches,
                        group_size: has_group.then_some(group),
                        slices: Slices::new(slices).filter(|_| has_slices),
                        ..ScheduleSpec::default()
                    };
                    let Ok(schedule) = generate(generator.name, &spec) else { continue };
                    let program = with_messages(&schedule).expect("a program");
                    let figures = summarize(&program, &Costs::default()).expect("it runs");
                    runs.push((Sizes { ranks, microbatches, stages_per_rank, group, slices }, figures));
                }
            }
        }
    }
    runs
}

/// Compares a formula with a figure of the simulation, and returns at how many sizes.
fn check(
    generator: &Generator,
    formula: &Formula,
    runs: &[(Sizes, Summary)],
    figure: impl Fn(&Summary) -> f64,
) -> usize {
    let of_these = runs.iter().filter(|(sizes, _)| holds(formula.sizes, sizes).expect("conditions"));
    let compared = of_these.map(|(sizes, summary)| {
        let (found, expected) = (figure(summary), value(formula.value, sizes).expect("a formula"));
        let agrees =
            if formula.is_bound { found <= expected + 1e-9 } else { (found - expected).abs() < 1e-9 };
        assert!(
            agrees,
            "{}: {formula:?} is {expected} at {sizes:?}, and the simulation has {found}",
            generator.name
        );
    });
    compared.count()
}

#[test]
fn formulas_agree_with_the_simulation() {
    let mut compared = BTreeMap::new();
    for generator in catalogue() {
        let runs = runs(generator);
        for formula in generator.guide.bubble {
            let sizes = check(generator, formula, &runs, |summary| summary.bubble_fraction);
            compared.insert((generator.name, "bubble", formula.value), sizes);
        }
        for formula in generator.guide.peak {
            let peak = |summary: &Summary| {
                let most = summary.peak_activations.iter().max().copied().unwrap_or(0);
                most as f64 / f64::from(summary.slices.unwrap_or(1))
            };
            let sizes = check(generator, formula, &runs, peak);
            compared.insert((generator.name, "peak", formula.value), sizes);
        }
    }
    let seldom: Vec<_> = compared.iter().filter(|(_, sizes)| **sizes < FEWEST).collect();
    assert!(seldom.is_empty(), "formulas with too few sizes: {seldom:?}");
    assert!(
        catalogue()
            .iter()
            .all(|generator| !generator.guide.bubble.is_empty() && !generator.guide.peak.is_empty())
    );
}
