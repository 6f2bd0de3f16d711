//! The mark that the processes of a restart have joined each other.
//!
//! The first process leaves a file in the folder of the run, and `launch` looks for it. Without the mark, a launcher
//! that waits for processes that do not come would be waited for without a deadline.

use std::io;
use std::path::Path;

use crate::fault::launched_start;
use crate::recovery::record;

/// The file of the mark.
pub(super) const FILE: &str = "joined.json";

/// Writes the mark into the folder of a run, if `launch` started this process.
///
/// # Errors
/// Fails if the file cannot be written.
pub(crate) fn leave_joined(run: &Path) -> io::Result<()> {
    launched_start().map_or(Ok(()), |start| record::leave(&run.join(FILE), &start))
}

/// Returns whether the processes of the start with this number have left their mark.
pub(crate) fn have_joined(run: &Path, start: u64) -> bool {
    record::find::<u64>(&run.join(FILE)) == Some(start)
}

/// Removes the mark.
pub(crate) fn remove_joined(run: &Path) {
    record::remove(&run.join(FILE));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_mark_of_the_same_start_counts() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        assert!(!have_joined(folder.path(), 2));
        record::leave(&folder.path().join(FILE), &2).expect("the folder takes files");
        assert!(have_joined(folder.path(), 2) && !have_joined(folder.path(), 3));
        remove_joined(folder.path());
        assert!(!have_joined(folder.path(), 2));
    }
}
