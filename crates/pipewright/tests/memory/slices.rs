//! The memory of stages that run slices of long sequences: what the guide of `seq1f1b` says, and no more with
//! each step.

use std::convert::Infallible;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright::nn::{CausalAttention, Linear};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{ScheduleSpec, Slices, StageIndex, generate};

use crate::support::{linear, numbers};

const WIDTH: usize = 16;
const WIDE: usize = 128;
const HEAD: usize = 8;
const TOKENS: usize = 512;
const RANKS: u32 = 4;
const MICROBATCHES: u32 = 8;

/// An attention and a feed-forward layer, whose parameters are small compared with the activations of a long
/// sequence.
#[derive(Module, Debug)]
struct Block {
    queries: Linear,
    keys: Linear,
    values: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(seed: u64) -> Self {
        let of = |place, sizes| linear(10 * seed + place, sizes);
        Self {
            queries: of(0, [WIDTH, WIDTH]),
            keys: of(1, [WIDTH, WIDTH]),
            values: of(2, [WIDTH, WIDTH]),
            up: of(3, [WIDTH, WIDE]),
            down: of(4, [WIDE, WIDTH]),
        }
    }
}

impl StageModule for Block {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, context: &StageContext) -> Tensor<3> {
        let up_to_this = |name: &str, own: Tensor<3>| {
            let mut slices = context.earlier_slices(name);
            context.keep_for_later_slices(name, &own);
            slices.push(own);
            slices
        };
        let keys = up_to_this("keys", self.keys.forward(x.clone()));
        let values = up_to_this("values", self.values.forward(x.clone()));
        let attention = CausalAttention::new(TOKENS, HEAD, &x.device());
        let x = x.clone() + attention.forward_slice(self.queries.forward(x), keys, values);
        x.clone() + self.down.forward(self.up.forward(x).tanh())
    }

    fn refuses_slices(&self) -> Option<String> {
        None
    }
}

/// Returns the peak of each rank in some of the first steps.
fn peaks(schedule: &str, slices: Option<u32>, steps: &[usize]) -> Vec<Vec<u64>> {
    let slices = slices.map(|slices| Slices::new(slices).expect("not 0"));
    let spec = ScheduleSpec { ranks: RANKS, microbatches: MICROBATCHES, slices, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let make = |stage: StageIndex| -> Result<Stage, Infallible> {
        let block = Block::new(stage.get().into());
        let loss = |output: Tensor<3>, target: Tensor<3>| (output - target).square().mean();
        let made = if stage.get() + 1 == RANKS { Stage::with_loss(block, loss) } else { Stage::new(block) };
        Ok(made.with_prefix(&format!("layers.{stage}")))
    };
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
    let mut pipeline = Pipeline::launch(program, World::local(RANKS), &config, make).expect("it starts");
    let data = |seed| {
        let data = numbers(seed, [MICROBATCHES as usize, TOKENS, WIDTH]);
        Tensor::<3>::from_data(data, &Device::flex())
    };
    let all = 0..*steps.last().expect("a step");
    let all: Vec<Vec<u64>> =
        all.map(|step| pipeline.step(data(step as u64), data(7), 1e-4).expect("a step").peak_bytes).collect();
    steps.iter().map(|step| all[step - 1].clone()).collect()
}

#[test]
fn ranks_hold_slices_instead_of_whole_microbatches() {
    let [whole, sliced] = [("1f1b", None), ("seq1f1b", Some(4))]
        .map(|(schedule, slices)| peaks(schedule, slices, &[3]).concat());
    let [whole, sliced] =
        [whole, sliced].map(|peaks| peaks.into_iter().map(|bytes| bytes as f64).collect::<Vec<_>>());
    // Rank 1 holds 3 microbatches of 4, and rank 2 holds 2.
    let one = whole[1] - whole[2];
    // Products pack the rows of a whole microbatch, or of a slice.
    let packed = ((TOKENS - TOKENS / 4) * WIDE * size_of::<f32>()) as f64 / one;
    // With 4 slices they hold (3 + 4 - 1) / 4 = 1.5 and (2 + 4 - 1) / 4 = 1.25 microbatches, and rank 0 holds
    // 1.75 for 4.
    for (rank, saved) in [(0, 4.0 - 1.75), (1, 3.0 - 1.5), (2, 2.0 - 1.25)] {
        let found = (whole[rank] - sliced[rank]) / one;
        // There are also the gradients of keys and values, and the messages of more slices.
        assert!(
            (0.75 * saved..=1.05 * saved + packed).contains(&found),
            "rank {rank}: {found} for {saved}: {whole:?} {sliced:?}"
        );
    }
}

#[test]
fn what_slices_pass_on_is_dropped() {
    let peaks = peaks("seq1f1b", Some(4), &[5, 12]);
    for (rank, (early, late)) in peaks[0].iter().zip(&peaks[1]).enumerate() {
        // Less than the keys and values of one slice, and more than the lists of messages that wait.
        let slack = (2 * TOKENS / 4 * WIDTH * 4) as u64 * 2;
        assert!(early.abs_diff(*late) <= slack, "rank {rank}: {early} {late}");
    }
}
