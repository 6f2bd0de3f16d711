//! The MPI functions that this transport uses: non-blocking calls whose return codes are checked.
//!
//! The safe layer of the `mpi` crate drops return codes, so this file calls the functions below it. One
//! thread makes all calls, the one that joined MPI (`process.rs`): `MPI_THREAD_FUNNELED` suffices.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use mpi::ffi;

use super::sends::SentMessage;
use crate::ids::WorldRank;
use crate::transport::wire::BLOCK;

/// How the receiver gets a frame; each way has an MPI tag. Frames describe themselves, so they need no other
/// tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// MPI announces the frame, and the receiver then makes room for it.
    Announced = 1,
    /// The receiver has posted a receive that is large enough.
    Posted = 2,
}

/// Why an MPI call failed.
#[derive(Clone, thiserror::Error)]
#[error("{0}")]
pub struct MpiError(pub(super) String);

pipewright_schedule::message_as_debug!(MpiError);

/// A completed transfer; MPI no longer uses its buffer.
pub(super) struct Done {
    pub(super) buffer: Vec<u8>,
    /// The message that was sent; `None` for other frames.
    pub(super) message: Option<SentMessage>,
    pub(super) peer: WorldRank,
}

/// The end of a receive that was posted.
pub(super) struct Received {
    pub(super) buffer: Vec<u8>,
    /// The number of bytes that arrived; `None` if the receive was cancelled.
    pub(super) bytes: Option<usize>,
    pub(super) peer: WorldRank,
}

/// A transfer in progress; [`Calls::next_done`] returns its buffer when it is complete.
pub(super) struct Transfer {
    request: ffi::MPI_Request,
    /// The heap memory does not move while MPI reads or writes it.
    buffer: Vec<u8>,
    /// The other rank.
    peer: WorldRank,
    message: Option<SentMessage>,
    is_cancelled: bool,
}

impl Transfer {
    /// Returns the transfer with the message that it sends.
    pub(super) fn of(mut self, message: Option<SentMessage>) -> Self {
        self.message = message;
        self
    }
}

impl Drop for Transfer {
    /// MPI may still use the buffer of an incomplete transfer, so the memory is leaked.
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.buffer));
    }
}

/// A process's connection to the others of its world.
pub(super) struct Calls {
    /// A communicator of this world's own, so that its frames do not mix with other messages. It is not
    /// freed: a late heartbeat of another process may arrive after this process has left, and MPI libraries
    /// crash where the communicator of a message is gone.
    communicator: ffi::MPI_Comm,
    /// [`BLOCK`] bytes as one element.
    block: ffi::MPI_Datatype,
    pub(super) rank: WorldRank,
    pub(super) ranks: u32,
    /// Whether the messages of ranks wait for their receives, as a test asks for.
    is_synchronous: bool,
}

/// A function that starts a send, with its name. Its arguments are the buffer, the number of elements, their
/// type, the receiver, the tag, the communicator and the request.
type SendFunction = (
    &'static str,
    unsafe extern "C" fn(
        *const c_void,
        c_int,
        ffi::MPI_Datatype,
        c_int,
        c_int,
        ffi::MPI_Comm,
        *mut ffi::MPI_Request,
    ) -> c_int,
);

const STANDARD: SendFunction = ("MPI_Isend", ffi::MPI_Isend);
const SYNCHRONOUS: SendFunction = ("MPI_Issend", ffi::MPI_Issend);

/// The environment variable with which tests make the messages of ranks wait for their receives, so that no
/// buffer of an MPI library helps a program to finish. Other frames are standard sends: a late heartbeat has no
/// receive.
const SYNCHRONOUS_SENDS: &str = "PIPEWRIGHT_TEST_SYNCHRONOUS_SENDS";

/// Runs `call` and turns its return code into an error unless it is success.
pub(super) fn checked(function: &'static str, call: impl FnOnce() -> c_int) -> Result<(), MpiError> {
    match call() {
        code if code == ffi::MPI_SUCCESS as c_int => Ok(()),
        code => Err(MpiError(format!("{function} failed: {}", words(code)))),
    }
}

/// Returns MPI's message for an error code.
fn words(code: c_int) -> String {
    // Longer than MPI_MAX_ERROR_STRING of known libraries (256 to 1,024).
    let mut text = vec![0u8; 4096];
    let mut length: c_int = 0;
    // SAFETY: the buffer is longer than any text MPI writes, and both pointers are to living memory.
    let code_of_call = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    if code_of_call == ffi::MPI_SUCCESS as c_int {
        String::from_utf8_lossy(&text[..length.clamp(0, 4096) as usize]).into_owned()
    } else {
        format!("error code {code}")
    }
}

/// Returns the class of an error code.
fn class_of(code: c_int) -> c_int {
    let mut class = 0;
    // SAFETY: the pointer is to living memory.
    let status = unsafe { ffi::MPI_Error_class(code, &mut class) };
    if status == ffi::MPI_SUCCESS as c_int { class } else { code }
}

impl Calls {
    /// Returns the calls on a communicator that only this world uses.
    pub(super) fn of(communicator: ffi::MPI_Comm) -> Result<Self, MpiError> {
        // SAFETY: the null handle is one of MPI's constants.
        let mut block = unsafe { ffi::RSMPI_DATATYPE_NULL };
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: the communicator lives, and all pointers are to living memory.
        unsafe {
            checked("MPI_Comm_rank", || ffi::MPI_Comm_rank(communicator, &mut rank))?;
            checked("MPI_Comm_size", || ffi::MPI_Comm_size(communicator, &mut ranks))?;
            checked("MPI_Type_contiguous", || {
                ffi::MPI_Type_contiguous(BLOCK as c_int, ffi::RSMPI_UINT8_T, &mut block)
            })?;
            checked("MPI_Type_commit", || ffi::MPI_Type_commit(&mut block))?;
        }
        let is_synchronous = cfg!(feature = "testing") && std::env::var_os(SYNCHRONOUS_SENDS).is_some();
        let rank = WorldRank::new(rank as u32);
        Ok(Self { communicator, block, rank, ranks: ranks as u32, is_synchronous })
    }

    /// Starts to send a buffer of whole blocks.
    pub(super) fn send(&self, to: WorldRank, buffer: Vec<u8>, way: Way) -> Result<Transfer, MpiError> {
        self.start_send(STANDARD, to, buffer, way)
    }

    /// Starts to send a message of a rank, as [`Calls::send`] does; a test may ask for a synchronous send.
    pub(super) fn send_message(
        &self,
        to: WorldRank,
        buffer: Vec<u8>,
        way: Way,
    ) -> Result<Transfer, MpiError> {
        let send = if self.is_synchronous { SYNCHRONOUS } else { STANDARD };
        self.start_send(send, to, buffer, way)
    }

    fn start_send(
        &self,
        (name, send): SendFunction,
        to: WorldRank,
        buffer: Vec<u8>,
        way: Way,
    ) -> Result<Transfer, MpiError> {
        let blocks = blocks(&buffer);
        let (address, peer) = (buffer.as_ptr(), to.get() as c_int);
        self.start(name, to, buffer, |request| {
            // SAFETY: the buffer has so many blocks and is kept in the transfer, whose heap memory does not
            // move, until the request is done.
            unsafe {
                send(address.cast(), blocks, self.block, peer, way as c_int, self.communicator, request)
            }
        })
    }

    /// Starts to receive the next frame, if one has been announced; `buffer` allocates its bytes.
    pub(super) fn receive(
        &self,
        buffer: impl FnOnce(usize) -> Vec<u8>,
    ) -> Result<Option<Transfer>, MpiError> {
        let mut there = 0;
        // SAFETY: an all-zero status is a valid value of that C struct.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: the null handle and the wildcard are MPI's constants; all pointers are to living memory.
        let (mut message, any) = unsafe { (ffi::RSMPI_MESSAGE_NULL, ffi::RSMPI_ANY_SOURCE) };
        let announced = Way::Announced as c_int;
        // SAFETY: as above.
        checked("MPI_Improbe", || unsafe {
            ffi::MPI_Improbe(any, announced, self.communicator, &mut there, &mut message, &mut status)
        })?;
        if there == 0 {
            return Ok(None);
        }
        let bytes = self.bytes_of(&status)?;
        let mut buffer = buffer(bytes);
        let blocks = blocks(&buffer);
        let address: *mut c_void = buffer.as_mut_ptr().cast();
        let from = WorldRank::new(status.MPI_SOURCE as u32);
        let transfer = self.start("MPI_Imrecv", from, buffer, |request| {
            // SAFETY: the buffer has room for so many blocks and is kept in the transfer until the request is
            // done.
            unsafe { ffi::MPI_Imrecv(address, blocks, self.block, &mut message, request) }
        })?;
        Ok(Some(transfer))
    }

    /// Posts a receive for a frame from a rank that fits into a buffer of whole blocks.
    pub(super) fn post(&self, from: WorldRank, mut buffer: Vec<u8>) -> Result<Transfer, MpiError> {
        let (address, blocks): (*mut c_void, _) = (buffer.as_mut_ptr().cast(), blocks(&buffer));
        let (peer, way) = (from.get() as c_int, Way::Posted as c_int);
        self.start("MPI_Irecv", from, buffer, |request| {
            // SAFETY: the buffer has room for so many blocks and is kept in the transfer until the request is
            // done.
            unsafe { ffi::MPI_Irecv(address, blocks, self.block, peer, way, self.communicator, request) }
        })
    }

    /// Cancels a posted receive, unless a frame has begun to arrive. [`Calls::received`] tells which.
    pub(super) fn cancel(&self, receive: &mut Transfer) -> Result<(), MpiError> {
        if std::mem::replace(&mut receive.is_cancelled, true) {
            return Ok(());
        }
        // SAFETY: the request came from MPI, and no test has found it done.
        checked("MPI_Cancel", || unsafe { ffi::MPI_Cancel(&mut receive.request) })
    }

    /// Removes and returns the oldest posted receive, if it is done.
    pub(super) fn received(&self, receives: &mut VecDeque<Transfer>) -> Result<Option<Received>, MpiError> {
        let Some(oldest) = receives.front_mut() else { return Ok(None) };
        // SAFETY: an all-zero status is a valid value of that C struct.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        let (mut done, mut cancelled) = (0, 0);
        // SAFETY: the request came from MPI and is not done; the pointers are to living memory.
        let code = unsafe { ffi::MPI_Test(&mut oldest.request, &mut done, &mut status) };
        if class_of(code) == ffi::MPI_ERR_TRUNCATE as c_int {
            let (from, to, posted) = (oldest.peer, self.rank, oldest.buffer.len());
            return Err(MpiError(format!(
                "rank {from} sent a message that is longer than the {posted} bytes that rank {to} has announced to it: the \
                 ranks run different versions of the program"
            )));
        }
        checked("MPI_Test", || code)?;
        if done == 0 {
            return Ok(None);
        }
        // SAFETY: the status was filled by MPI_Test, and the pointers are to living memory.
        checked("MPI_Test_cancelled", || unsafe { ffi::MPI_Test_cancelled(&status, &mut cancelled) })?;
        let bytes = if cancelled == 0 { Some(self.bytes_of(&status)?) } else { None };
        let done = receives.pop_front();
        Ok(done.map(|mut done| Received { buffer: std::mem::take(&mut done.buffer), bytes, peer: done.peer }))
    }

    /// Returns the size of the frame that a status describes.
    fn bytes_of(&self, status: &ffi::MPI_Status) -> Result<usize, MpiError> {
        let mut blocks = 0;
        // SAFETY: the status was filled by MPI, and the pointers are to living memory.
        checked("MPI_Get_count", || unsafe { ffi::MPI_Get_count(status, self.block, &mut blocks) })?;
        Ok(blocks.max(0) as usize * BLOCK)
    }

    fn start(
        &self,
        function: &'static str,
        peer: WorldRank,
        buffer: Vec<u8>,
        call: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<Transfer, MpiError> {
        // SAFETY: the null request is one of MPI's constants.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        checked(function, || call(&mut request))?;
        Ok(Transfer { request, buffer, peer, message: None, is_cancelled: false })
    }

    /// Removes and returns a completed transfer, if there is one.
    pub(super) fn next_done(&self, under_way: &mut Vec<Transfer>) -> Result<Option<Done>, MpiError> {
        for index in 0..under_way.len() {
            if self.is_done(&mut under_way[index].request)? {
                let mut transfer = under_way.swap_remove(index);
                let (buffer, message) = (std::mem::take(&mut transfer.buffer), transfer.message);
                return Ok(Some(Done { buffer, message, peer: transfer.peer }));
            }
        }
        Ok(None)
    }

    fn is_done(&self, request: &mut ffi::MPI_Request) -> Result<bool, MpiError> {
        let mut done = 0;
        // SAFETY: the request came from MPI and is not done; the constant asks for no status.
        checked("MPI_Test", || unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }

    /// Announces to all processes that this one is leaving.
    pub(super) fn leave(&self) -> Result<Leaving, MpiError> {
        // SAFETY: the null request is one of MPI's constants.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the communicator lives; the request is tested until it is done, or the process ends.
        checked("MPI_Ibarrier", || unsafe { ffi::MPI_Ibarrier(self.communicator, &mut request) })?;
        Ok(Leaving(request))
    }

    /// Returns whether all processes are leaving.
    pub(super) fn all_leave(&self, leaving: &mut Leaving) -> Result<bool, MpiError> {
        self.is_done(&mut leaving.0)
    }
}

/// A process that waits until the others leave too.
pub(super) struct Leaving(ffi::MPI_Request);

fn blocks(buffer: &[u8]) -> c_int {
    c_int::try_from(buffer.len() / BLOCK).expect("no message has 2^31 blocks")
}
