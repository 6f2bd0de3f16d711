//! Programs whose messages all wait for their receives: every schedule trains over MPI as it does on threads.

use std::num::NonZeroU32;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use pipewright::pipeline::PipelineConfig;
use pipewright::transport::{Mpi, World};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::Messages;
use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, ValidatedProgram, generate, lower, validate};

use crate::linear::{FEATURES, launch};
use crate::mpirun;

const DEADLINE: Duration = Duration::from_secs(60);
/// Schedules whose stages are not layers in a row, or that cut microbatches.
const OTHERS: [&str; 3] = ["forwardonly", "vocab1f1b", "seq1f1b"];

/// Ways to communicate; each schedule has one of them for each number of ranks.
fn lowerings() -> [LowerConfig; 4] {
    let waited = |defer_recv, budget| Messages::Waited { defer_recv, budget };
    let lowering = |send_early, communicate| LowerConfig {
        send_early,
        communicate: Some(communicate),
        ..LowerConfig::from(Level::Comms)
    };
    [
        lowering(false, Messages::Blocking),
        lowering(true, Messages::Blocking),
        lowering(false, waited(false, NonZeroU32::new(2))),
        lowering(false, waited(true, None)),
    ]
}

/// Returns the program of a schedule; `None` if the schedule refuses the size.
fn program(name: &str, ranks: u32, lowering: usize) -> Option<ValidatedProgram> {
    let spec = ScheduleSpec { ranks, microbatches: 2 * ranks, ..ScheduleSpec::default() };
    let schedule = generate(name, &spec).ok()?;
    let lowered = lower(&schedule, &lowerings()[lowering]).expect("it lowers");
    Some(validate(lowered, Level::Comms).expect("it is sound"))
}

/// Returns the losses and the norms of the gradients of two steps.
fn steps(program: ValidatedProgram, world: World) -> Vec<f64> {
    let rows = 2 * 2 * program.ranks() as usize;
    let config = PipelineConfig { deadline: DEADLINE, ..PipelineConfig::default() };
    let mut pipeline = launch(program, world, config);
    let numbers = Tensor::arange(0..(rows * FEATURES) as i64, &Device::flex()).float();
    let inputs: Tensor<2> = numbers.reshape([rows, FEATURES]).sin();
    let mut figures = Vec::new();
    for _ in 0..2 {
        let summary = pipeline.step(inputs.clone(), inputs.clone() * 0.5, 1e-2).expect("a step");
        figures.extend(summary.losses);
        figures.push(summary.gradient_norm);
    }
    figures
}

/// Trains every schedule, with one process for each rank.
pub(super) fn train() {
    let mpi = Mpi::join(DEADLINE).expect("mpirun started this process");
    let mut programs = 0;
    let names = catalogue().iter().map(|generator| generator.name).filter(|name| !OTHERS.contains(name));
    for (index, name) in names.enumerate() {
        let lowering = (index + mpi.ranks() as usize) % lowerings().len();
        let Some(program) = program(name, mpi.ranks(), lowering) else { continue };
        let world = mpi.world(DEADLINE).expect("all processes ask for it");
        let figures = steps(program.clone(), world);
        if mpi.rank() == 0 {
            let expected = steps(program, World::local(mpi.ranks()));
            assert_eq!(figures, expected, "{name}, {} ranks, lowering {lowering}", mpi.ranks());
        }
        programs += 1;
    }
    assert!(programs > 0, "no schedule has the size of {} ranks", mpi.ranks());
    if mpi.rank() == 0 {
        mpirun::report(&format!("{programs} programs with synchronous sends, {} processes", mpi.ranks()));
    }
}
