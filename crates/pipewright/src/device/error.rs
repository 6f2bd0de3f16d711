//! Why a device cannot be used.

use super::back_end::BackEnd;
use super::choice::DeviceChoice;

/// Why a device cannot be used.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No back end has this name.
    #[error("`{name}` is not a back end: there are {}", BackEnd::ALL.map(BackEnd::name).join(", "))]
    Unknown {
        /// The text before the colon.
        name: String,
    },
    /// The text after the back end's name does not name one of its devices.
    #[error("`{text}` is not a device: {}", forms(*.back_end))]
    Adapter {
        /// The whole text.
        text: String,
        /// The back end.
        back_end: BackEnd,
    },
    /// The back end is not compiled in.
    #[error(
        "this build cannot compute on `{choice}`: build it with `cargo build --release --features {}`",
        .choice.back_end
    )]
    NotCompiledIn {
        /// The device.
        choice: DeviceChoice,
    },
    /// There is no such device on this machine.
    #[error("the device `{choice}` is not available; available: {}", .found.join(", "))]
    NotThere {
        /// The device.
        choice: DeviceChoice,
        /// The devices that exist, with their names.
        found: Vec<String>,
    },
    /// Ranks would have to share a device, and each is to have its own.
    #[error(
        "{ranks} ranks need different devices, but have only {devices}: name more devices, use fewer ranks, or let \
         ranks share a device"
    )]
    Shared {
        /// The number of ranks.
        ranks: usize,
        /// The number of different devices that these ranks would have.
        devices: usize,
    },
}

pipewright_schedule::message_as_debug!(DeviceError);

/// Describes the texts that name a back end's devices.
fn forms(back_end: BackEnd) -> String {
    match back_end {
        BackEnd::Flex => "the processor is `flex`, without a number".to_owned(),
        _ if back_end.has_adapters() => format!(
            "`{back_end}` is followed by nothing, by the number of a discrete GPU (`{back_end}:1`), or by a kind \
             (`{back_end}:integrated`, `{back_end}:virtual`, `{back_end}:cpu`)"
        ),
        _ => format!("`{back_end}` is followed by nothing or by a number (`{back_end}:1`)"),
    }
}
