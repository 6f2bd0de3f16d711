//! The name of this machine.

use std::path::Path;

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};

/// Returns the name of this machine; empty if the system does not say it.
pub fn host_name() -> String {
    let name = read_regular_text(Path::new("/proc/sys/kernel/hostname"), SMALL_TEXT).unwrap_or_default();
    name.trim().to_owned()
}
