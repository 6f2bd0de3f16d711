//! A process of another version of the program: it sends a message that is longer than the receive that was
//! posted for it.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use mpi::traits::{Communicator, Destination, Source};
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Payload};
use pipewright::tensor::pack;
use pipewright::transport::{Endpoint, World};

use crate::checks::tag;
use crate::clocks::own_rank;
use crate::mpirun;

/// The elements of the message that the first process sends.
const ELEMENTS: usize = 1024;
/// The size of a frame that has them. Frames of other kinds are smaller.
const FRAME: usize = 4 * ELEMENTS;
const DEADLINE: Duration = Duration::from_secs(20);

/// MPI's tags of frames that are announced, and of frames for which a receive is posted.
const ANNOUNCED: i32 = 1;
const POSTED: i32 = 2;
/// The tag with which the processes of a world make their communicator.
const NEW_WORLD: i32 = 3;

/// The first process is one of this version. The second calls MPI itself.
pub(crate) fn refuse_longer_frame() {
    match own_rank() {
        0 => be_refused(),
        _ => send_longer(),
    }
}

/// Sends back the first message, and then a message of twice its size to the receive that the other process
/// posts.
fn send_longer() {
    let universe = mpi::initialize().expect("mpirun started this process");
    // A world has a communicator of its own, which its processes make together.
    let everyone = universe.world();
    let communicator = everyone.split_by_subgroup_with_tag(&everyone.group(), NEW_WORLD);
    let communicator = communicator.expect("this process is in the group");
    let mut frame: Vec<u8> = Vec::new();
    while frame.len() < FRAME {
        frame = communicator.any_process().receive_vec().0;
    }
    let first = communicator.process_at_rank(0);
    first.send_with_tag(&frame[..], ANNOUNCED);
    first.send_with_tag(&frame.repeat(2)[..], POSTED);
}

fn be_refused() {
    let world = World::mpi(DEADLINE).expect("mpirun started this process");
    let mut end = world.into_endpoints().pop().expect("a process has a rank");
    end.begin_step(1);
    let tensor = Tensor::<1>::zeros([ELEMENTS], &Device::flex());
    let payload = Payload::Tensors(pack(tensor).into_iter().map(Some).collect());
    end.send(WorldRank::new(1), tag(Direction::Forward, 1, 0), payload);
    let error = failure(&mut end);
    let words =
        ["rank 1 sent a message that is longer than the ", " bytes that rank 0 has announced to it: "];
    assert!(words.iter().all(|part| error.contains(part)), "{error}");
    assert!(error.ends_with("the ranks run different versions of the program"), "{error}");
    drop(end);
    // The transport leaves MPI as it is after its failure, and `mpirun` expects an end of each process.
    // SAFETY: the thread that called MPI has ended, and this process calls nothing of MPI after it.
    unsafe { mpi::ffi::MPI_Finalize() };
    mpirun::report("a frame that is longer than its receive is refused");
}

/// Waits for the failure of this process.
fn failure(end: &mut Endpoint) -> String {
    let until = Instant::now() + DEADLINE;
    while end.abort().first().is_none() {
        assert!(Instant::now() < until, "the longer message is refused");
        end.wait(until);
    }
    end.abort().first().expect("it has failed").cause.to_string()
}
