//! Latency and bandwidth of messages between two processes over MPI, with and without receives that are
//! posted for them.
//!
//! Two processes send tensors back and forth. The tensors of a boundary arrive in receives that are posted
//! before them; the tensors of a skip connection are announced, and the receiver then makes room for them.
//! Turns of both kinds alternate.

use std::time::Instant;

use burn::tensor::{Device, Tensor};
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Payload, Tag};
use pipewright::tensor::pack;
use pipewright::transport::{Endpoint, Waited, World};
use pipewright_schedule::{Microbatch, StageIndex};

use crate::harness::{Outcome, PATIENCE, Spread, mpirun};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The sizes of the messages in kibibytes.
    #[arg(long, value_delimiter = ',', default_value = "4,64,512,8192")]
    kib: Vec<usize>,
    /// Turns of each kind.
    #[arg(long, default_value_t = 15)]
    turns: u32,
    /// The bytes that each process sends in a turn, in mebibytes; at least 20 messages.
    #[arg(long, default_value_t = 32)]
    mib: usize,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

/// The rounds before the measured ones. After them, receives are posted and buffers have their size.
const WARM_UP: u32 = 8;

pub(crate) fn run(options: &Options) -> Outcome {
    if options.child {
        return run_child(options);
    }
    let kib: Vec<String> = options.kib.iter().map(ToString::to_string).collect();
    let (kib, turns, mib) = (kib.join(","), options.turns.to_string(), options.mib.to_string());
    let arguments = ["ping-pong", "--child", "--kib", &kib, "--turns", &turns, "--mib", &mib];
    print!("{}", mpirun(&arguments)?);
    Ok(())
}

fn run_child(options: &Options) -> Outcome {
    let mut end = World::mpi(PATIENCE)?.into_endpoints().pop().ok_or("a process has a rank")?;
    let mut attempt = 0;
    for &kib in &options.kib {
        let rounds = u32::try_from((options.mib << 10) / kib.max(1)).unwrap_or(u32::MAX).clamp(20, 2000);
        // Half a round in microseconds: announced, then posted.
        let mut times = [Vec::new(), Vec::new()];
        for turn in 0..options.turns {
            for kind in [turn % 2, 1 - turn % 2] {
                let is_posted = kind == 1;
                attempt += 1;
                let before = end.posted_receives();
                let seconds = half_round(&mut end, attempt, (kib, is_posted), rounds)?;
                let posted = end.posted_receives() - before;
                let expected = if is_posted { u64::from(rounds) } else { 0 };
                if posted < expected || posted > 0 && !is_posted {
                    return Err(format!("{posted} of {rounds} receives were posted").into());
                }
                times[kind as usize].push(1e6 * seconds);
            }
        }
        if end.rank().get() == 0 {
            report(kib, times);
        }
    }
    Ok(())
}

fn report(kib: usize, [announced, posted]: [Vec<f64>; 2]) {
    let ratios = posted.iter().zip(&announced).map(|(posted, announced)| posted / announced).collect();
    let [announced, posted] = [announced, posted].map(Spread::new);
    let rate = |microseconds: f64| kib as f64 * 1024.0 / microseconds / 1e3;
    println!(
        "{kib} KiB: announced {:.1} us, {:.2} GB/s; posted {:.1} us, {:.2} GB/s; posted over announced {}",
        announced.median(),
        rate(announced.median()),
        posted.median(),
        rate(posted.median()),
        Spread::new(ratios)
    );
}

/// Sends messages of this size back and forth; returns the seconds that one message takes, of a mean over the
/// rounds.
fn half_round(
    end: &mut Endpoint,
    attempt: u64,
    (kib, is_posted): (usize, bool),
    rounds: u32,
) -> Result<f64, String> {
    end.begin_step(attempt);
    let own = end.rank().get();
    let other = WorldRank::new(1 - own);
    let tensor = Tensor::<1>::ones([kib << 8], &Device::flex());
    let mut start = Instant::now();
    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            start = Instant::now();
        }
        if own == 1 {
            receive(end, other, tag(is_posted, other, round))?;
        }
        let payload = Payload::Tensors(pack(tensor.clone()).into_iter().map(Some).collect());
        end.send(other, tag(is_posted, end.rank(), round), payload);
        if own == 0 {
            receive(end, other, tag(is_posted, other, round))?;
        }
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(2 * rounds))
}

/// Returns the tag of a message in one round.
fn tag(is_posted: bool, from: WorldRank, round: u32) -> Tag {
    let direction = Direction::Forward;
    let (source, stage) = (StageIndex::new(from.get()), StageIndex::new(1 - from.get()));
    let microbatch = Microbatch::new(round);
    if is_posted {
        Tag::Boundary { direction, stage, microbatch }
    } else {
        Tag::Skip { direction, source, stage, microbatch }
    }
}

fn receive(end: &mut Endpoint, from: WorldRank, tag: Tag) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    while end.try_take(from, tag).is_none() {
        if end.wait(until) != Waited::Arrived {
            return Err(format!("{tag} did not arrive"));
        }
    }
    Ok(())
}
