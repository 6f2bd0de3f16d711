//! Processes of another version of the program: one sends frames of another format, and one sends a message that
//! is longer than the receive that was posted for it.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Payload};
use pipewright::tensor::pack;
use pipewright::transport::{Endpoint, World};

use crate::checks::tag;
use crate::clocks::own_rank;
use crate::mpirun;

/// The elements of the message that the first process sends. Twice the frame must be a message that MPI
/// libraries send at once, as Open MPI does up to 4 KiB: it writes a longer one beyond the end of its receive.
const ELEMENTS: usize = 256;
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
    let words = [
        "rank 1 sent a message that is longer than the ",
        " bytes that rank 0 has announced to it: the ranks run different versions of the program",
    ];
    match own_rank() {
        0 => be_refused(words, "a frame that is longer than its receive is refused"),
        _ => {
            let (_universe, communicator) = world_of_two();
            let frame = first_message(&communicator);
            communicator.process_at_rank(0).send_with_tag(&frame[..], ANNOUNCED);
            communicator.process_at_rank(0).send_with_tag(&frame.repeat(2)[..], POSTED);
            await_notice(&communicator, b" sent a message that is longer than the ");
        }
    }
}

/// As above, but the second process sends the frames of another version.
pub(crate) fn refuse_other_format() {
    let words = [
        "rank 1 sends frames that begin with `pw 0`, and frames of this process begin with `pw 7`: ",
        "the ranks run different versions of the program; install the same version on every host",
    ];
    match own_rank() {
        0 => be_refused(words, "a frame of another format is refused"),
        _ => {
            let (_universe, communicator) = world_of_two();
            let mut frame = first_message(&communicator);
            frame[..4].copy_from_slice(b"pw 0");
            communicator.process_at_rank(0).send_with_tag(&frame[..], ANNOUNCED);
        }
    }
}

/// Joins MPI, and returns a communicator like the one that the processes of a world make together.
fn world_of_two() -> (Universe, SimpleCommunicator) {
    let universe = mpi::initialize().expect("mpirun started this process");
    let everyone = universe.world();
    let communicator = everyone.split_by_subgroup_with_tag(&everyone.group(), NEW_WORLD);
    (universe, communicator.expect("this process is in the group"))
}

/// Returns the first message of the other process, which is to be sent back.
fn first_message(communicator: &SimpleCommunicator) -> Vec<u8> {
    let mut frame: Vec<u8> = Vec::new();
    while frame.len() < FRAME {
        frame = communicator.any_process().receive_vec().0;
    }
    frame
}

/// Waits for the notice of the other process's failure, which has these words. The other process sends the
/// notice although its call of MPI has failed, so this process need not wait until the deadline.
fn await_notice(communicator: &SimpleCommunicator, words: &[u8]) {
    let until = Instant::now() + DEADLINE / 4;
    loop {
        assert!(Instant::now() < until, "no notice within {:?}", DEADLINE / 4);
        if communicator.any_process().immediate_probe().is_some() {
            let (frame, _) = communicator.any_process().receive_vec::<u8>();
            if frame.windows(words.len()).any(|part| part == words) {
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a message to the other process and fails with an error that has the first of these words and ends with
/// the second ones.
fn be_refused([words, end]: [&str; 2], done: &str) {
    let world = World::mpi(DEADLINE).expect("mpirun started this process");
    let mut endpoint = world.into_endpoints().pop().expect("a process has a rank");
    endpoint.begin_step(1);
    let tensor = Tensor::<1>::zeros([ELEMENTS], &Device::flex());
    let payload = Payload::Tensors(pack(tensor).into_iter().map(Some).collect());
    endpoint.send(WorldRank::new(1), tag(Direction::Forward, 1, 0), payload);
    let error = failure(&mut endpoint);
    assert!(error.contains(words) && error.ends_with(end), "{error}");
    drop(endpoint);
    // The transport leaves MPI as it is after its failure, and `mpirun` expects an end of each process.
    // SAFETY: the thread that called MPI has ended, and this process calls nothing of MPI after it.
    unsafe { mpi::ffi::MPI_Finalize() };
    mpirun::report(done);
}

/// Waits for the failure of this process.
fn failure(end: &mut Endpoint) -> String {
    let until = Instant::now() + DEADLINE;
    while end.abort().first().is_none() {
        assert!(Instant::now() < until, "no failure within {DEADLINE:?}");
        end.wait(until);
    }
    end.abort().first().expect("it has failed").cause.to_string()
}
