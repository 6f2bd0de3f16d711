//! Tests of the decision, on timelines that a simulation makes.

use super::*;
use crate::generate::{ScheduleSpec, generate};
use crate::lower::{TrainingLowering, for_training};
use crate::partition::{Method, partition};

/// A run whose layers take 1 ms forward and 2 ms backward, times the slowdowns of their ranks.
struct Example {
    program: Program,
    cut: Partition,
    rebalancer: Rebalancer,
    steps: u64,
}

const BYTES: u64 = 1_000_000;

impl Example {
    fn new(schedule: &str, ranks: u32, layers: usize) -> Self {
        let spec = ScheduleSpec { ranks, microbatches: 8, ..ScheduleSpec::default() };
        let schedule = generate(schedule, &spec).expect("a schedule");
        let program =
            for_training(&schedule, &TrainingLowering::default()).expect("it is sound").into_program();
        let weights = vec![1; layers];
        let cut = partition(&weights, program.placement().stages(), &Method::Even).expect("enough layers");
        Self { program, cut, rebalancer: Rebalancer::new(weights), steps: 1000 }
    }

    fn timeline(&self, slowdowns: &[f64]) -> Timeline {
        let stage = |(stage, range): (u32, Range<usize>)| {
            let rank = self.program.placement().rank_of(StageIndex::new(stage));
            let layers = range.len() as f64 * slowdowns[rank.index()];
            StageCosts::new(1e-3 * layers, 1e-3 * layers, 1e-3 * layers)
        };
        let costs = Costs { stages: (0..).zip(self.cut.ranges()).map(stage).collect(), ..Costs::default() };
        timed(&self.program, &costs).expect("no deadlock").timeline().clone()
    }

    /// Takes steps, and decides after them.
    fn after(&mut self, steps: usize, slowdowns: &[f64]) -> Decision {
        let timeline = self.timeline(slowdowns);
        (0..steps).for_each(|_| self.rebalancer.observe(&timeline, &self.cut));
        self.decide(1e-9)
    }

    fn decide(&self, seconds_per_byte: f64) -> Decision {
        let layer_bytes = vec![BYTES; self.cut.layers()];
        let costs = MoveCosts { layer_bytes: &layer_bytes, seconds_per_byte, steps_left: self.steps };
        self.rebalancer.decide(&self.cut, costs)
    }

    /// Takes the first steps, from which the usual times follow.
    fn started(schedule: &str, ranks: u32, layers: usize) -> Self {
        let mut run = Self::new(schedule, ranks, layers);
        let usual = vec![1.0; ranks as usize];
        assert_eq!(run.after(1 + WINDOW, &usual), Decision::Unknown);
        assert_eq!(run.after(WINDOW, &usual), Decision::Stay);
        run
    }

    /// Moves as a decision says. Returns the number of layers of each rank.
    fn adopt(&mut self, decision: Decision) -> Vec<usize> {
        let Decision::Move(proposal) = decision else { panic!("{decision:?}") };
        assert!(proposal.after < proposal.before, "{proposal:?}");
        self.cut = proposal.cut;
        self.rebalancer.restart();
        let mut layers = vec![0; self.program.ranks() as usize];
        for (stage, range) in (0..).zip(self.cut.ranges()) {
            layers[self.program.placement().rank_of(StageIndex::new(stage)).index()] += range.len();
        }
        layers
    }
}

/// Checks the number of layers of each rank after the ranks have become slower, and that the run returns to the
/// first cut when they are as fast as before.
fn check(schedule: &str, layers: usize, slowdowns: &[f64], expected: &[usize]) {
    let mut run = Example::started(schedule, slowdowns.len() as u32, layers);
    let first = run.cut.clone();
    let decision = run.after(WINDOW, slowdowns);
    assert_eq!(run.adopt(decision), expected, "{schedule} {slowdowns:?}");
    assert_eq!(run.after(1 + WINDOW, slowdowns), Decision::Stay, "it has moved");
    let decision = run.after(WINDOW, &vec![1.0; slowdowns.len()]);
    run.adopt(decision);
    assert_eq!(run.cut, first, "{schedule} {slowdowns:?}");
    assert_eq!(run.after(1 + WINDOW, &vec![1.0; slowdowns.len()]), Decision::Stay, "it has moved back");
}

#[test]
fn a_slow_rank_gives_layers_away_and_gets_them_back() {
    check("1f1b", 12, &[1.0, 2.0], &[8, 4]);
    check("1f1b", 12, &[2.0, 1.0], &[4, 8]);
    // With 5, 5 and 2 layers, the busiest rank would take as long, and the others longer.
    check("gpipe", 12, &[1.0, 1.0, 3.0], &[6, 5, 1]);
    check("interleaved1f1b", 12, &[1.0, 2.0], &[8, 4]);
    check("zbvzerobubble", 12, &[1.0, 2.0], &[8, 4]);
}

#[test]
fn a_step_is_predicted_as_it_is_simulated() {
    let mut run = Example::started("1f1b", 2, 8);
    let slow = [1.0, 2.0];
    let before = run.timeline(&slow).makespan();
    let Decision::Move(proposal) = run.after(WINDOW, &slow) else { panic!("it moves") };
    assert!((proposal.before / before - 1.0).abs() < 1e-9, "{proposal:?}");
    run.cut = proposal.cut.clone();
    assert!((proposal.after / run.timeline(&slow).makespan() - 1.0).abs() < 1e-9, "{proposal:?}");
    assert!(
        proposal.slowdowns.iter().zip(slow).all(|(found, slow)| (found - slow).abs() < 1e-9),
        "{proposal:?}"
    );
    // Three layers leave the rank.
    assert_eq!(proposal.bytes % BYTES, 0);
    assert!((proposal.moving - proposal.bytes as f64 * 1e-9).abs() < 1e-12);
}

#[test]
fn equally_slow_ranks_keep_their_layers() {
    let mut run = Example::started("1f1b", 2, 12);
    assert_eq!(run.after(WINDOW, &[3.0, 3.0]), Decision::Stay);
    assert_eq!(run.after(WINDOW, &[1.0, 1.09]), Decision::Stay, "noise");
    assert_eq!(run.after(WINDOW, &[3.0, 3.2]), Decision::Stay, "noise");
}

#[test]
fn ranks_that_differ_from_step_to_step_keep_their_layers() {
    let mut run = Example::started("1f1b", 2, 12);
    let [fast, slow] = [[1.0, 1.0], [1.0, 1.6]].map(|slowdowns| run.timeline(&slowdowns));
    for step in 0..WINDOW {
        run.rebalancer.observe(if step.is_multiple_of(2) { &fast } else { &slow }, &run.cut);
    }
    assert_eq!(run.decide(1e-9), Decision::Stay);
}

#[test]
fn a_short_disturbance_does_not_count() {
    let mut run = Example::started("1f1b", 2, 12);
    assert_eq!(run.after(WINDOW / 2, &[1.0, 3.0]), Decision::Stay);
    // Most of the steps are slow, and a quarter of them is not.
    assert_eq!(run.after(2, &[1.0, 3.0]), Decision::Stay);
    assert!(matches!(run.after(1, &[1.0, 3.0]), Decision::Move(_)));
}

#[test]
fn a_move_that_does_not_pay_off_is_left_out() {
    let mut run = Example::started("1f1b", 2, 12);
    let slow = [1.0, 2.0];
    let Decision::Move(proposal) = run.after(WINDOW, &slow) else { panic!("it moves") };
    let saved = (proposal.before - proposal.after) / proposal.bytes as f64;
    for (steps, steps_that_count) in [(7, 7.0), (100_000, HORIZON as f64)] {
        run.steps = steps;
        assert!(matches!(run.decide(saved * steps_that_count * 0.99), Decision::Move(_)), "{steps}");
        assert_eq!(run.decide(saved * steps_that_count * 1.01), Decision::Stay, "{steps}");
    }
    run.steps = 0;
    assert_eq!(run.decide(0.0), Decision::Stay);
}

#[test]
fn heavy_layers_take_their_share_of_the_time() {
    let forwards = |weights: &[u64]| -> Vec<f64> {
        let cut = Partition::from_starts(vec![0], 3);
        shared(&[Times([6.0, 0.0, 0.0, 12.0])], &cut, weights).iter().map(|times| times.0[0]).collect()
    };
    assert_eq!(forwards(&[1, 0, 2]), [2.0, 0.0, 4.0]);
    assert_eq!(forwards(&[]), [2.0, 2.0, 2.0]);
}

#[test]
fn layers_move_in_runs() {
    let cut = |starts: &[usize]| Partition::from_starts(starts.to_vec(), 10);
    let moves = |before: &[usize], after: &[usize]| -> Vec<String> {
        let moves = layer_moves(&cut(before), &cut(after)).into_iter();
        moves.map(|MovedRange { layers, from, to }| format!("{layers:?} {from}>{to}")).collect()
    };
    assert_eq!(moves(&[0, 4, 8], &[0, 6, 8]), ["4..6 1>0"]);
    assert_eq!(moves(&[0, 4, 8], &[0, 2, 9]), ["2..4 0>1", "8..9 2>1"]);
    assert_eq!(moves(&[0, 1, 8], &[0, 8, 9]), ["1..8 1>0", "8..9 2>1"]);
    assert!(moves(&[0, 4], &[0, 4]).is_empty());
}

#[test]
fn steps_without_a_stage_decide_nothing() {
    let mut run = Example::new("1f1b", 2, 4);
    for _ in 0..2 * WINDOW {
        run.rebalancer.observe(&Timeline::new(2, Vec::new()), &run.cut);
    }
    assert_eq!(run.decide(1e-9), Decision::Unknown);
}
