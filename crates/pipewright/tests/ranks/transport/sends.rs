//! The sends of a program in two processes. The second one is stopped for a while: only programs that wait
//! for their sends have few of them in flight.

use std::num::NonZeroU32;
use std::process::Command;
use std::thread;
use std::time::Duration;

use pipewright::ids::WorldRank;
use pipewright::message::Direction;
use pipewright::pipeline::PipelineConfig;
use pipewright::transport::World;
use pipewright_schedule::lower::Messages;
use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, ValidatedProgram, generate, lower, validate};

use crate::checks::{receive, scalar, tag};
use crate::linear::{FEATURES, launch, rows};
use crate::mpirun;

const MICROBATCHES: u32 = 8;
/// A message of 2 MiB, which MPI does not copy into a buffer of its own.
const ROWS: usize = (2 << 20) / (4 * FEATURES);
/// The seconds for which the receiver is stopped: enough for all forwards of the sender, also on a slow machine.
const STOPPED: &str = "5";

/// Returns GPipe on two ranks; with `budget`, every rank waits for its sends.
fn program(budget: Option<u32>) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks: 2, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let communicate = match budget {
        None => Messages::Blocking,
        Some(budget) => Messages::Waited { defer_recv: false, budget: NonZeroU32::new(budget) },
    };
    let config = LowerConfig { communicate: Some(communicate), ..LowerConfig::from(Level::Comms) };
    let program = lower(&generate("gpipe", &spec).expect("a schedule"), &config).expect("it lowers");
    validate(program, Level::Comms).expect("it is sound")
}

/// Stops this process, and has another one continue it.
fn stop() {
    let process = std::process::id();
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("kill -STOP {process}; sleep {STOPPED}; kill -CONT {process}")]);
    let mut helper = shell.spawn().expect("a shell is everywhere");
    helper.wait().expect("it ends");
}

/// Trains one step whose ranks may have `budget` sends in flight, or any number.
pub(crate) fn count_sends(budget: Option<u32>) {
    let deadline = Duration::from_secs(20);
    let world = World::mpi(deadline).expect("mpirun started this process");
    let is_sender = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    let config = PipelineConfig { deadline, ..PipelineConfig::default() };
    let mut pipeline = launch(program(budget), world, config);
    let data = || rows(ROWS * MICROBATCHES as usize);
    let (inputs, targets) = (data(), data());
    if is_sender {
        thread::sleep(Duration::from_millis(300));
    } else {
        stop();
    }
    let summary = pipeline.step(inputs, targets, 1e-3).expect("a step");
    let found = summary.sends_in_flight[0];
    match budget {
        Some(budget) => assert!((1..=budget).contains(&found), "{found} in flight, allowed are {budget}"),
        None => assert!(found > 4, "{found} in flight to a rank that is stopped"),
    }
    if is_sender {
        mpirun::report(&format!("{found} sends in flight, allowed are {budget:?}"));
    }
}

/// Sends a message of a few bytes to a process that is stopped. MPI copies a standard send of this size; a
/// synchronous one is in flight until the process continues.
pub(crate) fn wait_for_synchronous_send() {
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let mut end = world.into_endpoints().pop().expect("a process has a rank");
    end.begin_step(1);
    let (sender, receiver) = (WorldRank::new(0), WorldRank::new(1));
    let tag = tag(Direction::Forward, 1, 0);
    if end.rank() == receiver {
        stop();
        receive(&mut end, sender, tag);
        return;
    }
    thread::sleep(Duration::from_millis(500));
    end.send(receiver, tag, scalar(1.0));
    thread::sleep(Duration::from_millis(500));
    assert!(!end.is_sent(receiver, tag), "the send does not wait for its receive");
    mpirun::report("a small send that is synchronous waits for its receive");
}
