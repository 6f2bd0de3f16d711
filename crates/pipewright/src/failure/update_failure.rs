//! [`UpdateFailure`]: why the update of a stage's parameters failed, and how a failure of a device is recognised.

/// Why the update of a stage's parameters failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateFailure {
    /// The optimizer panicked.
    #[error("the optimizer panicked: {message}")]
    Optimizer {
        /// The message.
        message: String,
    },
    /// The stage's device has no memory left.
    #[error("the device has no memory left: {bytes} bytes were asked for")]
    DeviceMemory {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// The stage's device failed.
    #[error("the device failed: {message}")]
    Device {
        /// The back end's message.
        message: String,
    },
    /// The update failed in another process.
    #[error("{message}")]
    Remote {
        /// The other process's message.
        message: String,
    },
}

pipewright_schedule::message_as_debug!(UpdateFailure);

impl UpdateFailure {
    /// Returns the failure of a device from its back end's message.
    pub(crate) fn of_device(message: String) -> Self {
        match device_memory(&message) {
            Some(bytes) => Self::DeviceMemory { bytes },
            None => Self::Device { message },
        }
    }
}

/// Returns the bytes that a device could not provide, if a back end's message says so. Burn reports a failure
/// of a device only as the text of a panic.
pub(super) fn device_memory(message: &str) -> Option<u64> {
    const WORDS: [&str; 2] = ["out of device memory allocating ", "can't allocate buffer of size: "];
    let rest = WORDS.iter().find_map(|words| Some(message.split_once(words)?.1))?;
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}
