//! How a configuration names a device.
//!
//! ```text
//! flex              the processor
//! cuda, cuda:1      the first GPU, or the one with this number; also rocm
//! wgpu              the adapter that the graphics interface prefers; also metal and vulkan
//! wgpu:1            the discrete GPU with this number
//! wgpu:integrated   the first integrated GPU; wgpu:integrated:1 the next; also wgpu:virtual
//! wgpu:cpu          an adapter that computes on the processor
//! ```

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::back_end::BackEnd;
use super::found::open;
use crate::ids::WorldRank;

/// A device by its name in a configuration. It need not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct DeviceChoice {
    /// The back end that computes on it.
    pub back_end: BackEnd,
    /// Which of the back end's devices it is.
    pub adapter: Adapter,
}

/// One of a back end's devices. Numbers start at 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Adapter {
    /// The first device or, with a graphics interface, the preferred one.
    #[default]
    Default,
    /// The GPU with this number; with a graphics interface, the discrete GPU.
    Gpu(usize),
    /// The integrated GPU with this number.
    Integrated(usize),
    /// The virtual GPU with this number.
    Virtual(usize),
    /// An adapter that computes on the processor.
    Cpu,
}

impl DeviceChoice {
    /// The processor.
    pub const FLEX: Self = Self { back_end: BackEnd::Flex, adapter: Adapter::Default };

    /// Returns the choice with the number of the first GPU, if that is what it means without a number.
    pub fn resolved(self) -> Self {
        let is_numbered = self.back_end != BackEnd::Flex && !self.back_end.has_adapters();
        match self.adapter {
            Adapter::Default if is_numbered => Self { adapter: Adapter::Gpu(0), ..self },
            _ => self,
        }
    }

    /// Returns the choice of the first device of the same kind: the numbers of devices do not tell how fast
    /// they are.
    pub fn kind(self) -> Self {
        let resolved = self.resolved();
        let adapter = match resolved.adapter {
            Adapter::Gpu(_) => Adapter::Gpu(0),
            Adapter::Integrated(_) => Adapter::Integrated(0),
            Adapter::Virtual(_) => Adapter::Virtual(0),
            adapter @ (Adapter::Default | Adapter::Cpu) => adapter,
        };
        Self { adapter, ..resolved }
    }
}

impl Default for DeviceChoice {
    fn default() -> Self {
        Self::FLEX
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { back_end, adapter } = self;
        match adapter {
            Adapter::Default => write!(f, "{back_end}"),
            Adapter::Gpu(number) => write!(f, "{back_end}:{number}"),
            Adapter::Integrated(0) => write!(f, "{back_end}:integrated"),
            Adapter::Integrated(number) => write!(f, "{back_end}:integrated:{number}"),
            Adapter::Virtual(0) => write!(f, "{back_end}:virtual"),
            Adapter::Virtual(number) => write!(f, "{back_end}:virtual:{number}"),
            Adapter::Cpu => write!(f, "{back_end}:cpu"),
        }
    }
}

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

impl TryFrom<String> for DeviceChoice {
    type Error = DeviceError;

    fn try_from(text: String) -> Result<Self, DeviceError> {
        text.parse()
    }
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let back_end = BackEnd::named(name).ok_or_else(|| DeviceError::Unknown { name: name.to_owned() })?;
        let adapter = match rest {
            None => Some(Adapter::Default),
            Some(rest) => adapter(back_end, rest),
        };
        let adapter = adapter.ok_or_else(|| DeviceError::Adapter { text: text.to_owned(), back_end })?;
        Ok(Self { back_end, adapter })
    }
}

/// Returns the adapter that the text after the back end's name means; `None` if there is no such adapter.
fn adapter(back_end: BackEnd, text: &str) -> Option<Adapter> {
    let number = |text: &str| {
        let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        is_plain.then(|| text.parse::<u16>().ok()).flatten().map(usize::from)
    };
    if back_end == BackEnd::Flex {
        return None;
    }
    if let Some(number) = number(text) {
        return Some(Adapter::Gpu(number));
    }
    let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
    let index = rest.map_or(Some(0), number)?;
    match kind {
        _ if !back_end.has_adapters() => None,
        "integrated" => Some(Adapter::Integrated(index)),
        "virtual" => Some(Adapter::Virtual(index)),
        "cpu" if rest.is_none() => Some(Adapter::Cpu),
        _ => None,
    }
}

/// The devices of the ranks: rank `r` of the world has entry `r` modulo their number. Without entries, each
/// stage stays on the device on which its module was made.
#[derive(Clone, Debug, Default)]
pub struct Devices(Arc<[Device]>);

impl Devices {
    /// Returns the devices that `choices` name.
    ///
    /// # Errors
    /// When this build cannot use one of them, or it does not exist.
    pub fn open(choices: &[DeviceChoice]) -> Result<Self, DeviceError> {
        choices.iter().map(open).collect::<Result<Vec<_>, _>>().map(Self::from)
    }

    /// Returns the device of a rank of the world; `None` without entries.
    pub fn of(&self, rank: WorldRank) -> Option<&Device> {
        self.0.get(rank.index().checked_rem(self.0.len())?)
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that no two of `ranks` ranks have the same device.
    ///
    /// # Errors
    /// When two ranks have the same device.
    pub fn require_exclusive(&self, ranks: usize) -> Result<(), DeviceError> {
        let own = self.0.iter().take(ranks).enumerate();
        let devices = own.filter(|&(index, device)| !self.0[..index].contains(device)).count();
        if devices == ranks { Ok(()) } else { Err(DeviceError::Shared { ranks, devices }) }
    }
}

impl From<Vec<Device>> for Devices {
    fn from(devices: Vec<Device>) -> Self {
        Self(devices.into_iter().map(Device::without_autodiff).collect())
    }
}

/// The device of all ranks.
impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        vec![device].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        text.parse::<DeviceChoice>().expect_err(text).to_string()
    }

    #[test]
    fn names_come_back() {
        let names = "flex cuda cuda:1 rocm:0 metal vulkan:2 wgpu wgpu:cpu wgpu:integrated wgpu:integrated:1 \
                     wgpu:virtual vulkan:virtual:3";
        for name in names.split_whitespace() {
            let choice: DeviceChoice = name.parse().expect(name);
            assert_eq!(choice.to_string(), name);
        }
        assert_eq!("wgpu:integrated:0".parse(), "wgpu:integrated".parse::<DeviceChoice>());
    }

    #[test]
    fn the_first_gpu_has_a_number() {
        let resolved = |name: &str| name.parse::<DeviceChoice>().expect(name).resolved().to_string();
        assert_eq!(["flex", "cuda", "rocm:1", "wgpu"].map(resolved), ["flex", "cuda:0", "rocm:1", "wgpu"]);
    }

    #[test]
    fn other_texts_are_refused() {
        assert_eq!(
            refused("cudda:1"),
            "`cudda` is not a back end: there are flex, cuda, rocm, metal, vulkan, wgpu"
        );
        assert_eq!(refused("flex:0"), "`flex:0` is not a device: the processor is `flex`, without a number");
        for text in ["cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:cpu", "cuda:99999999", "cuda:1:2"] {
            let error = refused(text);
            assert!(error.contains("`cuda` is followed by nothing or by a number (`cuda:1`)"), "{error}");
        }
        for text in ["wgpu:gpu", "wgpu:cpu:1", "wgpu:integrated:", "wgpu:virtual:x", "wgpu:1:cpu"] {
            assert!(refused(text).contains("`wgpu:integrated`"), "{text}");
        }
    }

    #[test]
    fn ranks_share_devices_in_turn_unless_each_needs_its_own() {
        let devices = Devices::open(&[DeviceChoice::FLEX]).expect("a processor exists");
        assert_eq!(devices.of(WorldRank::new(5)), Some(&Device::flex()));
        assert_eq!(Devices::default().of(WorldRank::new(0)), None);
        assert_eq!(devices.require_exclusive(1), Ok(()));
        let error = devices.require_exclusive(2).expect_err("one for two");
        assert!(error.to_string().starts_with("2 ranks need different devices, but have only 1:"), "{error}");
        let same = Devices::from(vec![Device::flex(), Device::flex()]);
        assert_eq!(same.require_exclusive(2), Err(DeviceError::Shared { ranks: 2, devices: 1 }));
        assert_eq!(same.require_exclusive(1), Ok(()));
    }
}
