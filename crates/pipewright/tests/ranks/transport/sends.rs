//! The sends of a program in two processes. The second one is stopped for a while: only programs that wait
//! for their sends have few of them in flight.

use std::fs;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::message::Direction;
use pipewright::pipeline::PipelineConfig;
use pipewright::transport::World;
use pipewright_schedule::lower::Messages;
use pipewright_schedule::{
    Action, Level, LowerConfig, ScheduleSpec, ValidatedProgram, generate, lower, validate,
};

use crate::checks::{receive, scalar, tag};
use crate::linear::{FEATURES, launch, rows};
use crate::mpirun;

const MICROBATCHES: u32 = 8;
/// A message of 512 KiB, which MPI does not copy into a buffer of its own.
const ROWS: usize = (512 << 10) / (4 * FEATURES);
/// The seconds for which a receiver is stopped that no sender continues.
const STOPPED: u32 = 5;
/// The limit for a sender that runs all its forwards while the receiver is stopped, on a slow machine.
const LIMIT: u32 = 20;

/// Continues the stopped receiver when the sender begins its last forward.
struct Continue(PathBuf);

impl ActionHook for Continue {
    fn before(&self, _rank: WorldRank, action: Action) {
        if matches!(action, Action::Forward { microbatch, .. } if microbatch.get() == MICROBATCHES - 1) {
            fs::write(&self.0, []).expect("the folder can be written");
        }
    }
}

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

/// Returns the file that asks for the end of a stop. Both processes have the same parent, `mpirun`.
fn mark() -> PathBuf {
    std::env::temp_dir().join(format!("pipewright-sends-{}", std::os::unix::process::parent_id()))
}

/// Stops this process, and has another one continue it when the mark appears, or after `seconds`.
fn stop(seconds: u32) {
    let process = std::process::id();
    let mark = mark();
    let script = format!(
        "kill -STOP {process}; n=0; while [ $n -lt {} ] && ! [ -e \"$0\" ]; do sleep 0.1; n=$((n + 1)); done; \
         kill -CONT {process}",
        10 * seconds
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).arg(&mark);
    let mut helper = shell.spawn().expect("a shell is everywhere");
    helper.wait().expect("it ends");
    // Only a sender without a limit writes it.
    let _ = fs::remove_file(mark);
}

/// Trains one step whose ranks may have `budget` sends in flight, or any number.
pub(crate) fn count_sends(budget: Option<u32>) {
    let deadline = Duration::from_secs(60);
    let world = World::mpi(deadline).expect("mpirun started this process");
    let is_sender = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    // A sender with a budget waits for the receiver, which nobody needs to continue early.
    let hook: Option<Arc<dyn ActionHook>> =
        (is_sender && budget.is_none()).then(|| Arc::new(Continue(mark())) as _);
    let config = PipelineConfig { deadline, hook, ..PipelineConfig::default() };
    let mut pipeline = launch(program(budget), world, config);
    let data = || rows(ROWS * MICROBATCHES as usize);
    let (inputs, targets) = (data(), data());
    if is_sender {
        thread::sleep(Duration::from_millis(300));
    } else {
        stop(if budget.is_some() { STOPPED } else { LIMIT });
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
        stop(STOPPED);
        receive(&mut end, sender, tag);
        return;
    }
    thread::sleep(Duration::from_millis(500));
    end.send(receiver, tag, scalar(1.0));
    thread::sleep(Duration::from_millis(500));
    assert!(!end.is_sent(receiver, tag), "the send does not wait for its receive");
    mpirun::report("a small send that is synchronous waits for its receive");
}
