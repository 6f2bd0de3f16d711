//! Worlds of some of the processes, and several worlds one after another.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::transport::{Mpi, World};

use super::mpirun;

const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input).tanh()
    }
}

/// Returns the losses of two steps of a pipeline over all ranks of a world, and of an evaluation in three
/// microbatches.
fn train(world: World, rate: f64) -> Vec<f64> {
    let ranks = world.ranks();
    let block = |_layer| Block { linear: LinearConfig::new(4, 4).init(&Device::flex().autodiff()) };
    let mut pipeline = Pipeline::builder(Layers::new(4, block))
        .ranks(ranks)
        .microbatches(4)
        .eval_microbatches(8)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(SgdConfig::new().init())
        .world(world)
        .deadline(DEADLINE)
        .launch()
        .expect("it starts");
    let places = Tensor::arange(0..96, &Device::flex()).float().reshape([24, 4]);
    let rows = (places * 0.7).sin();
    let mut step = |_| pipeline.step(rows.clone(), rows.clone() * 0.5, rate).expect("a step").losses;
    let mut losses: Vec<f64> = (0..2).flat_map(&mut step).collect();
    losses.extend(pipeline.eval(rows.clone(), Some(rows * 0.5)).expect("an evaluation").losses);
    assert_eq!(losses.len(), 2 * 4 + 8);
    losses
}

/// Two halves of four processes train at the same time with different rates. Then all processes train
/// together, and the halves again, in another order.
pub(super) fn train_in_halves() {
    let mpi = Mpi::join(DEADLINE).expect("mpirun started this process");
    let is_first_half = mpi.rank() < 2;
    let (own, rate) = if is_first_half { ([0, 1], 0.1) } else { ([3, 2], 0.3) };
    let half = mpi.world_of(&own, DEADLINE).expect("both processes ask for it");
    assert_eq!(half.own_ranks().map(|rank| own[rank.index()]).collect::<Vec<_>>(), [mpi.rank()]);
    let in_use = mpi.world(DEADLINE).map(drop).expect_err("it has a world").to_string();
    assert!(in_use.contains("has a world of MPI already"), "{in_use}");
    assert_eq!(train(half, rate), train(World::local(2), rate), "a half");
    let all = mpi.world(DEADLINE).expect("all processes ask for it");
    assert_eq!(train(all, 0.2), train(World::local(4), 0.2), "all processes");
    let pairs = if mpi.rank().is_multiple_of(2) { [0, 2] } else { [1, 3] };
    for _ in 0..2 {
        let pair = mpi.world_of(&pairs, DEADLINE).expect("both processes ask for it");
        assert_eq!(train(pair, rate_of(pairs)), train(World::local(2), rate_of(pairs)), "a pair");
    }
    if mpi.rank() == 0 {
        mpirun::report("worlds of some of the processes, side by side and one after another");
    }
}

fn rate_of(pair: [u32; 2]) -> f64 {
    0.1 + 0.1 * f64::from(pair[0])
}

/// Lists that are not a world, and a process that does not come.
pub(super) fn refuse_worlds() {
    let mpi = Mpi::join(DEADLINE).expect("mpirun started this process");
    let refused = |ranks: &[u32], expected: &str| {
        let error = mpi.world_of(ranks, DEADLINE).map(drop).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&[0, 1, 2], "there is no process 2; name processes from 0 to 1");
    refused(&[0, 0, 1], "it has process 0 twice");
    refused(&[1 - mpi.rank()], "it lacks this process");
    let alone = mpi.world_of(&[mpi.rank()], DEADLINE).expect("it needs no other process");
    assert_eq!(train(alone, 0.1), train(World::local(1), 0.1), "one process");
    assert!(Mpi::join(DEADLINE).is_err(), "a process joins MPI once");
    if mpi.rank() == 0 {
        mpirun::report("lists of processes that are not a world");
    }
}
