//! The memory of stages whose kept inputs leave: as much less as the timeline says.

use std::convert::Infallible;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright::nn::Linear;
use pipewright::offload::OffloadTo;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::costs::{RecomputeSizes, StageSizes};
use pipewright_schedule::simulate::peak_memory;
use pipewright_schedule::{Recompute, StageIndex};

use crate::support::{linear, numbers, offloaded, program};

const WIDTH: usize = 32;
const HIDDEN: usize = 256;
const ROWS: usize = 4096;
const BLOCKS: usize = 4;
const RANKS: u32 = 2;
const MICROBATCHES: u32 = 8;

/// A block that computes much longer than its input takes to be written, and whose gradients are small.
#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(seed: u64) -> Self {
        Self { up: linear(2 * seed, [WIDTH, HIDDEN]), down: linear(2 * seed + 1, [HIDDEN, WIDTH]) }
    }

    fn run(&self, input: Tensor<2>) -> Tensor<2> {
        self.down.forward(self.up.forward(input).tanh())
    }
}

#[derive(Module, Debug)]
struct Blocks {
    blocks: Vec<Block>,
}

impl Blocks {
    fn new(stage: StageIndex) -> Self {
        let seed = |block: usize| u64::from(stage.get()) * 100 + block as u64;
        Self { blocks: (0..BLOCKS).map(|block| Block::new(seed(block))).collect() }
    }
}

impl StageModule for Blocks {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _: &StageContext) -> Tensor<2> {
        self.blocks.iter().fold(input, |x, block| block.run(x))
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn forward_block(&self, block: usize, input: Values, _: &StageContext) -> Result<Values, BoundaryError> {
        Ok(pack(self.blocks[block].run(unpack(input)?)))
    }
}

/// Returns the measured peak of rank 1, whose inputs come from rank 0, and the peak that follows from the
/// measured timeline.
fn peaks(offload: bool, sizes: StageSizes) -> [f64; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let config = PipelineConfig {
        optimizer: Some(AdamW::default().init()),
        recompute: Recompute::Block,
        offload: offload.then(|| OffloadTo::Folder(folder.path().to_owned())),
        ..PipelineConfig::default()
    };
    let program = offloaded(program("gpipe", RANKS, MICROBATCHES), &config);
    let make = |stage: StageIndex| -> Result<Stage, Infallible> {
        let blocks = Blocks::new(stage);
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        let made = if stage.get() + 1 == RANKS { Stage::with_loss(blocks, loss) } else { Stage::new(blocks) };
        Ok(made.with_prefix(&format!("stages.{stage}")))
    };
    let mut pipeline = Pipeline::launch(program, World::local(RANKS), &config, make).expect("it starts");
    let data = |seed| {
        let data = numbers(seed, [ROWS * MICROBATCHES as usize, WIDTH]);
        Tensor::<2>::from_data(data, &Device::flex())
    };
    let steps = (0..2).map(|step| pipeline.step(data(step), data(7), 1e-4).expect("a step"));
    let last = steps.last().expect("a step");
    [last.peak_bytes[1], peak_memory(&last.timeline, &[sizes])[1]].map(|bytes| bytes as f64)
}

#[test]
fn ranks_hold_as_much_less_as_the_timeline_says() {
    let tensor = (ROWS * WIDTH * 4) as u64;
    let kept = BLOCKS as u64 * tensor;
    let sizes = StageSizes {
        recompute: Some(RecomputeSizes { kept, recomputed: (ROWS * HIDDEN * 4) as u64 }),
        offload: kept,
        ..StageSizes::default()
    };
    let [[whole, whole_predicted], [less, less_predicted]] =
        [false, true].map(|offload| peaks(offload, sizes));
    let (predicted, found) = (whole_predicted - less_predicted, whole - less);
    assert!(predicted > 4.0 * kept as f64, "{whole_predicted} {less_predicted}");
    assert!(
        (0.95 * predicted..=1.05 * predicted).contains(&found),
        "{found} instead of {predicted}: {whole} {less}"
    );
}
