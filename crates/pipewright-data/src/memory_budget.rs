//! The memory that training data may take, so that too much data causes an error and does not end the
//! process.

use std::path::Path;

use pipewright_system::bounded_file::Size;
use pipewright_system::machine_memory::unswapped_memory;

use crate::error::DataError;

/// The limit if the system does not report the available memory.
const FALLBACK: u64 = 16 << 30;

/// The memory that is left for data.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    left: u64,
}

impl MemoryBudget {
    /// Returns half of the available memory without swap space: the model, its gradients and its optimizer need the
    /// rest. Training may swap, and data that is read must not make it do so.
    pub(crate) fn of_machine() -> Self {
        Self { left: unswapped_memory().map_or(FALLBACK, |free| free.bytes / 2) }
    }

    /// Returns a budget of `bytes`.
    #[cfg(test)]
    pub(crate) fn of(bytes: u64) -> Self {
        Self { left: bytes }
    }

    /// Returns the number of bytes that are left.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Returns an error if fewer than `bytes` are left for the file `path`.
    pub(crate) fn require(&self, path: &Path, bytes: u64) -> Result<(), DataError> {
        if bytes <= self.left { Ok(()) } else { Err(self.exceeded(path, bytes)) }
    }

    /// Returns the error of the first file that does not fit.
    pub(crate) fn exceeded(&self, path: &Path, bytes: u64) -> DataError {
        let problem = format!(
            "reading this file takes {}, and {} of the memory for data are left (half of what this machine has available); \
             give less data, or use a machine with more memory",
            Size(bytes),
            Size(self.left)
        );
        DataError::of(path, problem)
    }

    /// Subtracts `bytes` for the file `path`.
    pub(crate) fn take(&mut self, path: &Path, bytes: u64) -> Result<(), DataError> {
        self.require(path, bytes)?;
        self.left -= bytes;
        Ok(())
    }

    /// Adds `bytes` that were taken and are free again.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        self.left = self.left.saturating_add(bytes);
    }
}
