//! Skip connections between processes: this program starts itself under `mpirun`, and every process compares
//! its results with the results of threads, to the bit.

#[path = "../../mpirun/mod.rs"]
mod mpirun;
#[path = "../../support/mod.rs"]
mod support;
mod unet;

use std::process::ExitCode;
use std::time::Duration;

use pipewright::ids::WorldRank;
use pipewright::mesh::{Mesh, RankGroups};
use pipewright::transport::World;
use pipewright_schedule::Recompute;
use support::program;
use unet::{MICROBATCHES, in_stages, launch_with, train, train_on};

/// Schedules and their ranks, which skip connections cross in messages of their own; in more processes there
/// are replicas.
const TASKS: [(u32, &str); 5] = [
    (3, "1f1b 3"),
    (4, "1f1b 4"),
    (4, "zbvzerobubble 4"),
    (2, "interleaved1f1b 2"),
    (4, "interleaved1f1b 2"),
];

fn main() -> ExitCode {
    mpirun::run(&TASKS, compare)
}

fn compare(task: &str) {
    let (schedule, ranks) = task.split_once(' ').expect("a schedule and its ranks");
    let ranks: u32 = ranks.parse().expect("a number");
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let own = world.own_ranks().next().expect("a process has a rank");
    let processes = world.ranks();
    let mesh = Mesh { pipeline: ranks, data: processes / ranks, ..Mesh::default() };
    let program = program(schedule, ranks, MICROBATCHES / mesh.data);
    let placement = program.placement().clone();
    let graph = in_stages(placement.stages());
    let direct = graph.place(&placement).expect("it fits").direct();
    let crosses = direct.iter().any(|&(from, to, _)| placement.rank_of(from) != placement.rank_of(to));
    assert!(crosses, "{task}: some go straight to another process");

    let (steps, mut parameters) = train(program.clone(), World::local(processes));
    let own_stages = placement.stages_of(mesh.coord(own).rank);
    let own_nodes: Vec<&str> = own_stages.iter().flat_map(|&stage| graph.nodes_of(stage)).collect();
    parameters.retain(|(path, _)| path.split('.').next().is_some_and(|node| own_nodes.contains(&node)));
    // Threads have the parameters of every replica.
    parameters.dedup();
    // The processes compute their forwards again, the threads do not.
    let found = train_on(launch_with(program, world, Recompute::Stage));
    assert!(found == (steps, parameters), "{task}: rank {own} differs from threads");
    if own == WorldRank::new(0) {
        mpirun::report(&format!("{schedule} on {ranks} ranks, replicas {}", mesh.data));
    }
}
