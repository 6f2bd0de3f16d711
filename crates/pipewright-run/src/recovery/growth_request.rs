//! The request of `launch` that a run ends after its next checkpoint, so that it can continue on more
//! processes.
//!
//! `launch` leaves a file in the folder of the run. The process that writes the metrics looks for it before
//! each step with a checkpoint, and then ends all processes after that step, as a signal does.

use std::io;
use std::path::Path;

use crate::recovery::record;

/// The file of the request.
pub(super) const FILE: &str = "growth.json";

/// Writes the request into the folder of a run. `hosts` are the hosts that answer again.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn request_growth(run: &Path, hosts: &[String]) -> io::Result<()> {
    record::leave(&run.join(FILE), &hosts)
}

/// Returns whether the folder of a run has a request.
pub(crate) fn is_growth_requested(run: &Path) -> bool {
    run.join(FILE).exists()
}

/// Removes the request.
pub fn remove_growth_request(run: &Path) {
    record::remove(&run.join(FILE));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_seen_until_it_is_removed() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        assert!(!is_growth_requested(folder.path()));
        request_growth(folder.path(), &["b".to_owned()]).expect("the folder takes files");
        assert!(is_growth_requested(folder.path()));
        remove_growth_request(folder.path());
        assert!(!is_growth_requested(folder.path()));
    }
}
