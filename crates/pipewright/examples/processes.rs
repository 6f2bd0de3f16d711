//! The same pipeline on threads of one process, or in several processes over MPI with one rank each.
//!
//! ```text
//! cargo run -p pipewright --example processes
//! cargo build -p pipewright --features mpi --example processes
//! mpirun -n 2 target/debug/examples/processes
//! ```
//!
//! The losses have the same bits. MPI needs `libopenmpi-dev openmpi-bin libclang-dev` on Debian.

use std::error::Error;
use std::io::{Write, stdout};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use pipewright::ids::WorldRank;
use pipewright::mesh::RankGroups;
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::transport::World;

const RANKS: u32 = 2;
const DEADLINE: Duration = Duration::from_secs(60);

/// A layer of the model.
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

/// Returns all ranks as threads of this process, or only this process's rank if a launcher started it with others.
fn world(out: &mut impl Write) -> Result<World, Box<dyn Error>> {
    // Environment variables that Open MPI, PRRTE, MPICH and Intel MPI set for their processes.
    let launchers = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"];
    if launchers.iter().any(|name| std::env::var_os(name).is_some()) {
        return Ok(World::mpi(DEADLINE)?);
    }
    writeln!(out, "{RANKS} threads of one process; for processes, build with `--features mpi` and start")?;
    writeln!(out, "    mpirun -n {RANKS} target/debug/examples/processes")?;
    Ok(World::local(RANKS))
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let world = world(out)?;
    let own: Vec<WorldRank> = world.own_ranks().collect();
    let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    let mut pipeline = Pipeline::builder(Layers::new(4, block))
        .ranks(RANKS)
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .world(world)
        .deadline(DEADLINE)
        .launch()?;

    // Every process calls the same methods with the same data. Each uses the data that its rank needs.
    let places = Tensor::arange(0..128, &Device::flex()).float().reshape([16, 8]);
    let rows = (places * 0.7).sin();
    for _ in 0..5 {
        let summary = pipeline.step(rows.clone(), rows.clone() * 0.5, 1e-2)?;
        // Every process knows the losses; only one prints them.
        if own.contains(&WorldRank::new(0)) {
            writeln!(out, "step {}  loss {:.6}", summary.step, summary.loss())?;
        }
    }
    for rank in own {
        for stage in pipeline.program().placement().stages_of(pipeline.mesh().coord(rank).rank) {
            writeln!(out, "process {} has rank {rank} with stage {stage}", std::process::id())?;
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
