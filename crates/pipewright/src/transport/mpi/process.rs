//! How a process joins MPI, makes communicators for its worlds, and leaves.
//!
//! The thread that calls [`Process::init`] makes all further calls. A process has one world at a time, and
//! may have others after it. The processes of a world make a communicator together; the other processes take
//! no part in that.

use std::ffi::c_int;
use std::ptr;

use mpi::ffi;

use super::calls::{Calls, MpiError, checked};

/// The tag with which communicators are made. Nothing else uses it on the communicator of all processes.
const NEW_WORLD: c_int = 3;

/// This process as one of the processes that a launcher has started.
pub(super) struct Process {
    /// All processes.
    everyone: ffi::MPI_Comm,
    pub(super) rank: u32,
    pub(super) ranks: u32,
}

impl Process {
    /// Joins MPI. Call once a process.
    pub(super) fn init() -> Result<Self, MpiError> {
        let mut joined = 0;
        // SAFETY: MPI allows this call at any time, and the pointer is to living memory.
        checked("MPI_Initialized", || unsafe { ffi::MPI_Initialized(&mut joined) })?;
        if joined != 0 {
            let reason = "this process has joined MPI before: MPI allows that once a process; keep the `Mpi` that joined, which \
                          has further worlds";
            return Err(MpiError(reason.to_owned()));
        }
        let (needed, mut given) = (ffi::MPI_THREAD_FUNNELED as c_int, 0);
        // SAFETY: MPI was not initialised before; null means no arguments.
        checked("MPI_Init_thread", || unsafe {
            ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), needed, &mut given)
        })?;
        if given < needed {
            return Err(MpiError(format!(
                "this MPI library gives thread level {given}, the transport needs MPI_THREAD_FUNNELED ({needed})"
            )));
        }
        // SAFETY: the world communicator exists from MPI_Init_thread on.
        let everyone = unsafe { ffi::RSMPI_COMM_WORLD };
        return_errors(everyone)?;
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: the communicator lives, and the pointers are to living memory.
        checked("MPI_Comm_rank", || unsafe { ffi::MPI_Comm_rank(everyone, &mut rank) })?;
        // SAFETY: as above.
        checked("MPI_Comm_size", || unsafe { ffi::MPI_Comm_size(everyone, &mut ranks) })?;
        Ok(Self { everyone, rank: rank as u32, ranks: ranks as u32 })
    }

    /// Makes the calls of a world of these processes, which are numbered in this order. Waits until all of
    /// them have called it with the same list.
    pub(super) fn world(&self, members: &[u32]) -> Result<Calls, MpiError> {
        let members: Vec<c_int> = members.iter().map(|&member| member as c_int).collect();
        // SAFETY: the null handles are MPI's constants.
        let (mut all, mut group, mut communicator) =
            unsafe { (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL, ffi::RSMPI_COMM_NULL) };
        // SAFETY: the members are distinct ranks of all processes, which the caller has checked, and this
        // process is one of them; all pointers are to living memory, and the groups are freed once.
        unsafe {
            checked("MPI_Comm_group", || ffi::MPI_Comm_group(self.everyone, &mut all))?;
            checked("MPI_Group_incl", || {
                ffi::MPI_Group_incl(all, members.len() as c_int, members.as_ptr(), &mut group)
            })?;
            checked("MPI_Comm_create_group", || {
                ffi::MPI_Comm_create_group(self.everyone, group, NEW_WORLD, &mut communicator)
            })?;
            checked("MPI_Group_free", || ffi::MPI_Group_free(&mut group))?;
            checked("MPI_Group_free", || ffi::MPI_Group_free(&mut all))?;
        }
        return_errors(communicator)?;
        Calls::of(communicator)
    }

    /// Leaves MPI, which waits for all processes.
    pub(super) fn finalize(self) -> Result<(), MpiError> {
        // SAFETY: this thread initialised MPI, and no request is under way.
        checked("MPI_Finalize", || unsafe { ffi::MPI_Finalize() })
    }
}

/// Makes the calls on a communicator return errors instead of ending the process.
fn return_errors(communicator: ffi::MPI_Comm) -> Result<(), MpiError> {
    // SAFETY: the communicator lives; the error handler is one of MPI's constants.
    checked("MPI_Comm_set_errhandler", || unsafe {
        ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN)
    })
}
