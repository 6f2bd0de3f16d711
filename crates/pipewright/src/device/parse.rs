//! Reads the name of a device.

use std::str::FromStr;

use super::back_end::BackEnd;
use super::choice::{Adapter, DeviceChoice};
use super::error::DeviceError;

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
}
