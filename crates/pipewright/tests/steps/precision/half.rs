//! Properties of both types of half precision.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::{Linear, cross_entropy};
use pipewright::pipeline::{Layers, Pipeline, PipelineConfig, SeededPipeline};
use pipewright::stage::{Stage, StageContext, StageModule, WeightWork};
use pipewright::tensor::{Precision, unpack};
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{Microbatch, Recompute, StageIndex};

use super::run::{HALF, MICROBATCHES, Outcome, STEPS, batch_of, in_precision, launch, run, saved, train};
use crate::support::{LAYERS, ROWS, WIDTH, config, linear, loss, numbers, program, stage};

/// Checks that a run has the same bits for every schedule and cut, and with recomputation.
fn check_cuts(precision: Precision) {
    let half = in_precision(precision);
    let expected = run("gpipe", 1, &half, STEPS).expect("one stage");
    // Looped BFS does not visit the microbatches in ascending order.
    let names = catalogue().iter().filter(|generator| generator.trains).map(|generator| generator.name);
    for schedule in names.filter(|name| *name != "loopedbfs") {
        for ranks in [1, 2, 4] {
            let Some(found) = run(schedule, ranks, &half, STEPS) else { continue };
            assert_eq!(found, expected, "{schedule} on {ranks} ranks");
        }
    }
    for recompute in [Recompute::Stage, Recompute::Block] {
        let config = PipelineConfig { recompute, ..half.clone() };
        assert_eq!(run("1f1b", 2, &config, STEPS).expect("two stages"), expected);
    }
}

#[test]
fn every_schedule_has_the_bits_of_one_rank_in_bf16() {
    check_cuts(Precision::Bf16);
}

#[test]
fn every_schedule_has_the_bits_of_one_rank_in_f16() {
    check_cuts(Precision::F16);
}

#[test]
fn losses_are_near_those_of_single_precision_and_parameters_have_it() {
    let single = run("1f1b", 2, &config(), STEPS).expect("two stages");
    for precision in HALF {
        let half = run("1f1b", 2, &in_precision(precision), STEPS).expect("two stages");
        assert_ne!(half.losses, single.losses, "nothing is rounded");
        assert_eq!(half.skipped, single.skipped);
        for (found, expected) in half.losses.iter().flatten().zip(single.losses.iter().flatten()) {
            assert!((found - expected).abs() <= 0.02 * expected, "{found} {expected}");
        }
        for (path, data) in &half.parameters {
            assert_eq!(data.dtype(), DType::F32, "{path}");
            let numbers: Vec<f32> = data.iter().collect();
            // The mantissa of f16 is the longer one: it leaves 13 bits of single precision's zero.
            let is_rounded = |number: &f32| number.to_bits().trailing_zeros() >= 13;
            assert!(!numbers.iter().all(is_rounded), "{path} was stored in half precision");
        }
    }
}

#[test]
fn replicas_have_the_same_bits_whole_and_sharded() {
    for (schedule, precision) in
        ["1f1b", "zbvzerobubble"].into_iter().flat_map(|name| HALF.map(|precision| (name, precision)))
    {
        let half = in_precision(precision);
        let of = |data_parallel_mode| PipelineConfig { data_parallel: 2, data_parallel_mode, ..half.clone() };
        let whole = run(schedule, 2, &of(DataParallelMode::Replicated), STEPS).expect("it has stages");
        let sharded = run(schedule, 2, &of(DataParallelMode::Sharded), STEPS).expect("it has stages");
        assert_eq!(sharded, whole, "{schedule}");
    }
}

/// Checks that the losses and norms of two runs differ in their last digits only, but do differ.
fn assert_near_but_not_equal(found: &Outcome, expected: &Outcome, what: &str) {
    assert_ne!(found, expected, "{what}: the page on precision says that they differ");
    let losses = found.losses.iter().flatten().zip(expected.losses.iter().flatten());
    for (found, expected) in losses.chain(found.norms.iter().zip(&expected.norms)) {
        assert!((found - expected).abs() <= 0.01 * expected, "{what}: {found} {expected}");
    }
}

#[test]
fn other_orders_of_the_sums_have_other_last_digits() {
    for precision in [Precision::F32, Precision::Bf16] {
        let config = in_precision(precision);
        let expected = run("1f1b", 2, &config, STEPS).expect("two stages");
        let looped = run("loopedbfs", 2, &config, STEPS).expect("four stages");
        assert_near_but_not_equal(&looped, &expected, "looped BFS");
        // Its own bits do not depend on the number of ranks.
        assert_eq!(run("loopedbfs", 1, &config, STEPS).expect("two stages"), looped);
        let replicas = PipelineConfig { data_parallel: 2, ..config.clone() };
        let replicas = run("1f1b", 2, &replicas, STEPS).expect("two stages");
        assert_near_but_not_equal(&replicas, &expected, "replicas");
    }
}

/// Returns the bytes that each of two ranks sends in a step.
fn sent(config: &PipelineConfig) -> Vec<u64> {
    let mut pipeline =
        SeededPipeline::new(program("1f1b", 2, MICROBATCHES), config, 0, |index| stage(index, 2))
            .expect("it starts");
    let bytes = |pipeline: &SeededPipeline| [0, 1].map(|rank| pipeline.sent_by(WorldRank::new(rank)).bytes);
    let before = bytes(&pipeline);
    pipeline.step_batch(batch_of(0), 1e-2).expect("a step");
    bytes(&pipeline).into_iter().zip(before).map(|(after, before)| after - before).collect()
}

#[test]
fn stages_send_half_the_bytes() {
    let boundary = u64::from(MICROBATCHES) * (ROWS * WIDTH * 4) as u64;
    for precision in HALF {
        for (single, half) in sent(&config()).into_iter().zip(sent(&in_precision(precision))) {
            let rest = single - boundary;
            assert!(rest < 128, "the boundary's tensors and the norm: {single}");
            assert_eq!(half - rest, boundary / 2, "{precision}");
        }
    }
}

#[test]
fn weight_gradients_wait_in_half_precision_too() {
    let (half, counted) = (in_precision(Precision::Bf16), Arc::new(AtomicUsize::new(0)));
    let count = counted.clone();
    let program = program("zb-h1", 2, MICROBATCHES);
    let make = move |index: StageIndex| -> Result<Stage, Infallible> {
        let count = count.clone();
        Ok(stage(index, 2)?.with_weight_runner(move |_: Microbatch, work: &mut WeightWork| {
            count.fetch_add(work.len(), Ordering::SeqCst);
        }))
    };
    let mut pipeline = Pipeline::launch(program, World::local(2), &half, make).expect("it starts");
    let outcome = train(&mut pipeline, 0..STEPS);
    assert_eq!(outcome, run("gpipe", 1, &half, STEPS).expect("one stage"));
    let tasks = 2 * LAYERS;
    assert_eq!(counted.load(Ordering::SeqCst), STEPS as usize * MICROBATCHES as usize * tasks);
}

#[test]
fn a_checkpoint_resumes_in_the_other_precision() {
    let pairs = HALF.map(|half| [(half, Precision::F32), (Precision::F32, half)]);
    for pair in pairs.into_iter().flatten().chain([(Precision::Bf16, Precision::F16)]) {
        let (first, second) = (in_precision(pair.0), in_precision(pair.1));
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mut pipeline = launch("1f1b", 2, &first).expect("two stages");
        let before = train(&mut pipeline, 0..STEPS);
        let checkpoint = saved(&mut pipeline, STEPS, folder.path());
        let mut resumed = launch("gpipe", 1, &second).expect("one stage");
        resumed.restore(&checkpoint).expect("it fits");
        let parameters = train(&mut resumed, 0..0).parameters;
        assert_eq!(parameters, before.parameters, "parameters have single precision in both");
        let after = train(&mut resumed, STEPS..2 * STEPS);
        let mut whole = launch("1f1b", 2, &first).expect("two stages");
        let expected = train(&mut whole, 0..2 * STEPS);
        for (found, expected) in after.losses.iter().zip(&expected.losses[STEPS as usize..]) {
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= 0.02 * expected, "{found} {expected}");
            }
        }
    }
}

/// The addresses of a weight in the forwards, in their order.
type Addresses = Arc<Mutex<Vec<usize>>>;

/// A linear layer, and factors that stay in single precision.
#[derive(Module, Debug)]
struct Mixed {
    linear: Linear,
    factors: Param<Tensor<1>>,
    #[module(skip)]
    seen: Addresses,
}

impl StageModule for Mixed {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        assert_eq!(input.dtype(), DType::BF16, "float inputs are rounded");
        let weight = self.linear.weight.val();
        assert_eq!((weight.dtype(), self.factors.dtype()), (DType::BF16, DType::F32));
        let storage = weight.inner().try_into_primitive::<Flex>().expect("on the processor");
        self.seen.lock().expect("one thread").push(storage.bytes().as_ptr().addr());
        // The stage rounds what it returns.
        self.linear.forward(input).cast(DType::F32) * self.factors.val().unsqueeze()
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        local == "factors"
    }
}

#[test]
fn weights_are_rounded_once_a_step_and_what_the_module_names_is_not() {
    let seen = Addresses::default();
    let addresses = seen.clone();
    let layer = move |layer: usize| {
        let device = Device::flex().autodiff();
        Mixed {
            linear: Linear {
                weight: Param::from_data(numbers(layer as u64, [WIDTH, WIDTH]), &device),
                bias: None,
            },
            factors: Param::from_data(numbers(7, [WIDTH]), &device),
            seen: if layer == 0 { addresses.clone() } else { Addresses::default() },
        }
    };
    let mut pipeline = Pipeline::builder(Layers::new(2, layer))
        .ranks(2)
        .microbatches(MICROBATCHES)
        .loss(|output: Tensor<2>, target: Tensor<2>| {
            assert_eq!((output.dtype(), target.dtype()), (DType::F32, DType::F32));
            loss(output, target)
        })
        .config(in_precision(Precision::Bf16))
        .launch()
        .expect("it starts");
    let mut steps = Vec::new();
    for step in 0..2 {
        pipeline.step_batch(batch_of(step), 1e-2).expect("a step");
        steps.push(std::mem::take(&mut *seen.lock().expect("one thread")));
    }
    for addresses in steps {
        assert_eq!(addresses.len(), MICROBATCHES as usize);
        assert!(addresses.iter().all(|address| *address == addresses[0]), "{addresses:?}");
    }
}

#[derive(Module, Debug)]
struct Head {
    linear: Linear,
}

impl StageModule for Head {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }
}

/// Trains a head for two steps, with its outputs in half precision or in single precision in front of the loss.
/// Returns the losses, and the outputs of an evaluation.
fn trained_head(precision: Precision, takes_half: bool) -> (Vec<f64>, Vec<TensorData>) {
    let ids = |rows: usize| -> Tensor<1, Int> {
        let ids: Vec<i64> = (0..rows).map(|row| (row * 7 % WIDTH) as i64).collect();
        Tensor::from_data(TensorData::new(ids, [rows]), &Device::flex())
    };
    let make = move |_: StageIndex| -> Result<Stage, Infallible> {
        let module = Head { linear: linear(3, [WIDTH, WIDTH]) };
        let stage = Stage::with_loss(module, move |logits: Tensor<2>, targets: Tensor<1, Int>| {
            let expected = if takes_half { precision.half() } else { None };
            assert_eq!(logits.dtype(), expected.unwrap_or(DType::F32));
            cross_entropy(logits, targets)
        });
        Ok(if takes_half { stage.with_half_precision_loss() } else { stage })
    };
    let program = program("gpipe", 1, MICROBATCHES);
    let mut pipeline =
        Pipeline::launch(program, World::local(1), &in_precision(precision), make).expect("it starts");
    let rows = ROWS * MICROBATCHES as usize;
    let inputs = || Tensor::<2>::from_data(numbers(5, [rows, WIDTH]), &Device::flex());
    let mut step = || pipeline.step(inputs(), ids(rows), 1e-2).expect("a step").loss();
    let losses = vec![step(), step()];
    let outputs = pipeline.eval(inputs(), Some(ids(rows))).expect("an evaluation").outputs;
    let data = |output| unpack::<Tensor<2>>(output).expect("one tensor").into_data();
    (losses, outputs.into_iter().map(data).collect())
}

#[test]
fn a_loss_that_takes_half_precision_gets_it_and_evaluations_return_single_precision() {
    for precision in HALF {
        let (losses, outputs) = trained_head(precision, true);
        assert!(outputs.iter().all(|output| output.dtype() == DType::F32));
        assert_eq!((losses, outputs), trained_head(precision, false));
    }
}

#[derive(Module, Debug)]
struct Normalised {
    norm: Option<BatchNorm>,
}

impl Normalised {
    fn new() -> Self {
        Self { norm: Some(BatchNormConfig::new(WIDTH).init(&Device::flex().autodiff())) }
    }
}

impl StageModule for Normalised {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        match &self.norm {
            Some(norm) => norm.forward(input.unsqueeze_dim::<3>(2)).squeeze_dim::<2>(2),
            None => input,
        }
    }
}

#[test]
fn running_statistics_are_refused() {
    let launch = |layer: fn(usize) -> Normalised| {
        let builder = Pipeline::builder(Layers::new(1, layer)).microbatches(1).loss(loss);
        builder.config(in_precision(Precision::Bf16)).launch()
    };
    let error = launch(|_| Normalised::new()).err().expect("they would not be updated").to_string();
    assert!(error.contains("the layer `layers.0.norm` keeps running statistics"), "{error}");
    // A module of a running pipeline does not get them either.
    let mut pipeline = launch(|_| Normalised { norm: None }).expect("it starts");
    let changed = pipeline.change_module(0, |_: Normalised| Normalised::new());
    let error = changed.expect_err("they would not be updated").to_string();
    let expected = "the module of layer 0 is not changed: the layer `layers.0.norm` keeps running statistics";
    assert!(error.starts_with(expected), "{error}");
    assert!(
        pipeline.module(0, |module: &Normalised| module.norm.is_none()).expect("it is there") == Some(true)
    );
}
