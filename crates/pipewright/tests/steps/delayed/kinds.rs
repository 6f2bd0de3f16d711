//! Runs of several kinds whose batches overlap: with stages that are frozen as a whole, in f16, and with sharded parameters.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::{TrainingLowering, UnshardConfig, for_training};
use pipewright_schedule::{ScheduleSpec, StageIndex, TrainedStages, ValidatedProgram, generate};

use super::{BATCHES, Outcome, PER_BATCH, check_failure, delayed, saved};
use crate::ahead::batches::{MICROBATCHES, RATE, begin, numbered, parameters, result_of};
use crate::support::count::Count;
use crate::support::{LAYERS, Mlp, batch, ending_in_loss};

/// A configuration, and the layers that are frozen.
#[derive(Clone)]
pub(super) struct Kind {
    pub(super) config: PipelineConfig,
    frozen: Range<usize>,
}

impl Kind {
    pub(super) fn of(config: PipelineConfig) -> Self {
        Self { config, frozen: 0..0 }
    }

    fn with_frozen(self, frozen: Range<usize>) -> Self {
        Self { frozen, ..self }
    }

    pub(super) fn program(&self, schedule: &str, ranks: u32) -> ValidatedProgram {
        let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
        let schedule = generate(schedule, &spec).expect("a schedule");
        let of_stage = LAYERS / schedule.placement().stages() as usize;
        let is_trained = |first: usize| (first..first + of_stage).any(|layer| !self.frozen.contains(&layer));
        let trained: Vec<bool> = (0..LAYERS).step_by(of_stage).map(is_trained).collect();
        let is_sharded = self.config.data_parallel_mode != DataParallelMode::Replicated;
        let lowering = TrainingLowering {
            replicas: self.config.data_parallel,
            unshard_window: is_sharded.then(|| UnshardConfig::default().window),
            trained: TrainedStages::of(&trained),
            delayed: true,
            ..TrainingLowering::default()
        };
        for_training(&schedule, &lowering).expect("it is sound")
    }

    /// Returns a stage whose frozen layers are a base.
    pub(super) fn stage<M: StageModule<Output = Tensor<2>>>(
        &self,
        is_last: bool,
        module: M,
    ) -> Result<Stage, Infallible> {
        let stage = ending_in_loss(is_last, module)?;
        let frozen = self.frozen.clone();
        let is_frozen = move |path: &str| {
            let layer = path.split('.').nth(1).and_then(|layer| layer.parse().ok());
            layer.is_some_and(|layer: usize| frozen.contains(&layer))
        };
        Ok(if self.frozen.is_empty() { stage } else { stage.with_base(is_frozen) })
    }

    /// Launches a pipeline whose first stage computes a batch only when the test has begun the next one of `batches`.
    fn launch_paced(&self, schedule: &str, ranks: u32, (begun, batches): (Arc<Count>, u64)) -> Pipeline {
        let program = self.program(schedule, ranks);
        let (stages, kind) = (program.placement().stages(), self.clone());
        let make = move |index: StageIndex| {
            let (layers, begun) = (Mlp::of_stage(index, stages), begun.clone());
            let is_first = index.get() == 0;
            let paced = Paced { layers, is_first, forwards: Arc::default(), begun, batches };
            kind.stage(index.get() + 1 == stages, paced)
        };
        let world = World::local(ranks * self.config.data_parallel);
        let config = PipelineConfig { deadline: Duration::from_secs(120), ..self.config.clone() };
        Pipeline::launch(program, world, &config, make).expect("it starts")
    }

    pub(super) fn launch(&self, schedule: &str, ranks: u32) -> Pipeline {
        self.launch_paced(schedule, ranks, (Arc::default(), 0))
    }
}

/// A stage that computes a batch only when the test has begun the next one.
#[derive(Module, Debug)]
struct Paced {
    layers: Mlp,
    #[module(skip)]
    is_first: bool,
    /// The forwards of this rank.
    #[module(skip)]
    forwards: Arc<AtomicU64>,
    /// The number of batches that the test has begun.
    #[module(skip)]
    begun: Arc<Count>,
    #[module(skip)]
    batches: u64,
}

impl StageModule for Paced {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        if self.is_first {
            let batch = self.forwards.fetch_add(1, Ordering::SeqCst) / PER_BATCH;
            self.begun.wait_for(self.batches.min(batch + 2));
        }
        self.layers.forward(input, context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").expect("a layer"))
    }
}

/// Takes batches one after the other, or begins them two ahead. Returns their results, and which of them overlap with the one
/// before.
fn run(kind: &Kind, (schedule, ranks): (&str, u32), batches: u64, ahead: u64) -> (Outcome, Vec<bool>) {
    let count = Arc::new(Count::default());
    let paced = if ahead == 0 { 0 } else { batches };
    let mut pipeline = kind.launch_paced(schedule, ranks, (count.clone(), paced));
    let (mut begun, mut results, mut overlaps) = (0, Vec::new(), Vec::new());
    for number in 0..batches {
        while begun < batches.min(number + 1 + ahead) {
            begin(&mut pipeline, begun, 1, &kind.config);
            begun += 1;
            count.set(begun);
        }
        let summary = pipeline.finish().expect("a batch");
        overlaps.push(summary.overlaps);
        results.push(result_of(&summary));
    }
    let mut parameters = parameters(&mut pipeline);
    // Each replica returns its copy.
    parameters.dedup();
    ((results, parameters), overlaps)
}

fn all_but_first(batches: u64) -> Vec<bool> {
    (0..batches).map(|number| number > 0).collect()
}

/// Schedules whose row begins with the next batch, such as GPipe's, do so too.
#[test]
fn every_batch_overlaps_under_every_schedule() {
    // The slices of a batch are computed one after the other.
    let spec = ScheduleSpec::default();
    let schedules = catalogue().iter().filter(|it| it.has_backward() && it.slices_of(&spec).is_one());
    let mut count = 0;
    for schedule in schedules {
        let (_, overlaps) = run(&Kind::of(delayed()), (schedule.name, 2), BATCHES, 2);
        assert_eq!(overlaps, all_but_first(BATCHES), "{}", schedule.name);
        count += 1;
    }
    assert!(count > 12, "{count} schedules");
}

/// A rank that waits for no other one updates before it begins the next batch.
#[test]
fn the_batches_of_one_rank_follow_each_other() {
    let (_, overlaps) = run(&Kind::of(delayed()), ("1f1b", 1), BATCHES, 2);
    assert_eq!(overlaps, vec![false; BATCHES as usize]);
}

/// Checks that all batches but the first one overlap with the one before, and that this changes no bit. Returns the results.
fn check(kind: &Kind, cuts: &[(&str, u32)], batches: u64) -> Outcome {
    let whole = PipelineConfig { data_parallel_mode: DataParallelMode::Replicated, ..kind.config.clone() };
    let (expected, _) = run(&Kind { config: whole, ..kind.clone() }, ("gpipe", 1), batches, 0);
    for &cut in cuts {
        let (drained, _) = run(kind, cut, batches, 0);
        let Kind { config, frozen } = kind;
        let what =
            format!("{cut:?}, {:?}, {}, {frozen:?} frozen", config.data_parallel_mode, config.precision);
        assert!(
            drained.0 == expected.0 && drained.1 == expected.1,
            "{what}, drained: {:?} {:?}",
            drained.0,
            expected.0
        );
        let (found, overlaps) = run(kind, cut, batches, 2);
        assert!(found == expected, "{what}");
        assert_eq!(overlaps, all_but_first(batches), "{what}");
    }
    expected
}

/// Two and more stages on each kind of place: in order, in a V, and in a loop.
const CUTS: [(&str, u32); 6] =
    [("1f1b", 2), ("1f1b", 4), ("gpipe", 2), ("zb-h1", 4), ("zbvzerobubble", 2), ("interleaved1f1b", 2)];

/// The first stages run forward only, or stages behind a trained one pass on gradients only.
#[test]
fn batches_with_frozen_stages_overlap() {
    for frozen in [0..4, 0..7, 4..8, 2..6] {
        check(&Kind::of(delayed()).with_frozen(frozen), &CUTS, BATCHES);
    }
    let bf16 = PipelineConfig { precision: Precision::Bf16, ..delayed() };
    check(&Kind::of(bf16).with_frozen(0..4), &CUTS[..2], BATCHES);
}

/// The first scale is too large, and so is a later one.
fn f16() -> PipelineConfig {
    let loss_scaling = LossScaling { initial: f64::from(1 << 18), interval: 2 };
    PipelineConfig { precision: Precision::F16, loss_scaling, ..delayed() }
}

/// Enough for the first scale, updates until it is doubled, and a second time that it is too large.
const SCALED: u64 = 24;

/// Returns whether each step was skipped.
fn skipped((results, _): &Outcome) -> Vec<bool> {
    results.iter().map(|(.., skipped)| *skipped).collect()
}

#[test]
fn batches_in_f16_overlap() {
    let outcome = check(&Kind::of(f16()), &CUTS, SCALED);
    let skipped = skipped(&outcome);
    let first_update = skipped.iter().position(|skipped| !skipped).expect("the scale becomes small enough");
    assert!(first_update > 1 && skipped[first_update..].contains(&true), "{skipped:?}");
    // Each scale is used at least twice, and a step that overflows halves what it has used.
    let scales: Vec<f64> =
        outcome.0.iter().map(|(_, _, _, scale, _)| scale.expect("f16 has a scale")).collect();
    for (step, pair) in scales.windows(3).enumerate() {
        let expected = if skipped[step] { pair[0] / 2.0 } else { pair[1] };
        assert!(
            pair[2] <= expected || !skipped[step] && pair[2] == 2.0 * expected,
            "step {step}: {scales:?} {skipped:?}"
        );
    }
    check(&Kind::of(PipelineConfig { clip_norm: None, post_validation: true, ..f16() }), &CUTS[..1], SCALED);
    check(&Kind::of(f16()).with_frozen(0..4), &CUTS[..1], SCALED);
    let outcome = check(&Kind::of(PipelineConfig { data_parallel: 2, ..f16() }), &CUTS[..1], SCALED);
    assert!(skipped_varies(&outcome));
}

fn skipped_varies(outcome: &Outcome) -> bool {
    let skipped = skipped(outcome);
    skipped.contains(&true) && skipped.contains(&false)
}

/// An evaluation reads the newer weights. So a batch has the losses of an evaluation before the batch before it, and an update
/// that is skipped changes nothing.
#[test]
fn a_skipped_update_keeps_the_weights_of_the_batches_behind_it() {
    let kind = Kind::of(f16());
    let mut pipeline = kind.launch("1f1b", 2);
    let targets = |number| batch(100 + number, MICROBATCHES);
    let evaluate = |pipeline: &mut Pipeline, number| {
        pipeline.eval(batch(number, MICROBATCHES), Some(targets(number))).expect("an evaluation").losses
    };
    let (mut expected, mut outcomes) = (evaluate(&mut pipeline, 0), Vec::new());
    for number in 0..SCALED {
        // The newer weights now, for the batch behind this one.
        let next = evaluate(&mut pipeline, number + 1);
        let before = parameters(&mut pipeline);
        let summary = pipeline.step_batch(numbered(number, &kind.config), RATE).expect("a step");
        assert_eq!(summary.losses, expected, "step {number}");
        assert_eq!(parameters(&mut pipeline) == before, summary.skipped, "step {number}");
        expected = next;
        outcomes.push(summary.skipped);
    }
    let last_update = outcomes.iter().rposition(|skipped| !skipped).expect("an update");
    assert!(outcomes[..last_update].windows(2).any(|pair| pair == [false, true]), "{outcomes:?}");
}

/// A stop before a batch whose scale the last step has not set yet.
#[test]
fn a_run_in_f16_resumes_with_both_scales() {
    let kind = Kind::of(f16());
    let (expected, _) = run(&kind, ("gpipe", 1), SCALED, 0);
    let skipped = skipped(&expected);
    let first_update = skipped.iter().position(|skipped| !skipped).expect("an update") as u64;
    for stop in [1, first_update, first_update + 2] {
        let mut before = kind.launch("1f1b", 2);
        for number in 0..stop {
            before.step_batch(numbered(number, &kind.config), RATE).expect("a step");
        }
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let checkpoint = saved(&mut before, stop, scratch.path());
        let mut resumed = kind.launch("zbvzerobubble", 2);
        resumed.restore(&checkpoint).expect("it fits");
        for number in stop..SCALED {
            let summary = resumed.step_batch(numbered(number, &kind.config), RATE).expect("a step");
            assert_eq!(result_of(&summary), expected.0[number as usize], "step {number} after {stop}");
        }
        assert_eq!(parameters(&mut resumed), expected.1, "after {stop}");
    }
}

pub(super) fn sharded() -> PipelineConfig {
    PipelineConfig { data_parallel: 2, data_parallel_mode: DataParallelMode::Sharded, ..delayed() }
}

#[test]
fn batches_with_sharded_parameters_overlap() {
    check(&Kind::of(sharded()), &CUTS, BATCHES);
    let groups = DataParallelMode::Hybrid { shards: 2 };
    for config in [
        PipelineConfig { precision: Precision::Bf16, ..sharded() },
        PipelineConfig { clip_norm: None, post_validation: true, ..sharded() },
        PipelineConfig { data_parallel: 6, data_parallel_mode: groups, ..sharded() },
    ] {
        check(&Kind::of(config), &CUTS[..1], BATCHES);
    }
    check(&Kind::of(sharded()).with_frozen(0..4), &CUTS[..2], BATCHES);
    let scaled = PipelineConfig { data_parallel_mode: DataParallelMode::Sharded, data_parallel: 2, ..f16() };
    assert!(skipped_varies(&check(&Kind::of(scaled), &CUTS[..1], SCALED)));
}

/// Both batches have gathered their version of the parameters.
#[test]
fn fingerprints_of_sharded_versions_are_those_of_whole_ones() {
    let fingerprints = |config: &PipelineConfig, ahead: u64| {
        let kind = Kind::of(PipelineConfig { fingerprint_every: 1, ..config.clone() });
        let count = Arc::new(Count::default());
        let mut pipeline =
            kind.launch_paced("1f1b", 2, (count.clone(), if ahead == 0 { 0 } else { BATCHES }));
        let mut begun = 0;
        let found = (0..BATCHES).map(|number| {
            while begun < BATCHES.min(number + 1 + ahead) {
                begin(&mut pipeline, begun, 1, &kind.config);
                begun += 1;
                count.set(begun);
            }
            pipeline.finish().expect("a batch").fingerprint.expect("it is due")
        });
        found.collect::<Vec<_>>()
    };
    let whole = PipelineConfig { data_parallel_mode: DataParallelMode::Replicated, ..sharded() };
    let expected = fingerprints(&whole, 0);
    assert_eq!(fingerprints(&sharded(), 0), expected);
    assert_eq!(fingerprints(&sharded(), 2), expected);
}

#[test]
fn a_failure_leaves_the_batch_before_as_it_is() {
    let patient = |config| Kind::of(PipelineConfig { deadline: Duration::from_secs(120), ..config });
    check_failure(&patient(delayed()).with_frozen(0..4));
    check_failure(&patient(delayed()).with_frozen(4..8));
    check_failure(&patient(f16()));
    let loss_scaling = LossScaling { initial: 1024.0, interval: 2 };
    check_failure(&patient(PipelineConfig { loss_scaling, ..f16() }));
}
