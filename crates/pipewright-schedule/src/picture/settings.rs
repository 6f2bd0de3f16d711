//! The content of a picture besides the timeline, the unit of its times, and texts in markup.

use crate::costs::StageSizes;
use crate::simulate::UNIT;

/// The largest number of actions in a picture. A browser cannot show more, and the text of a larger program
/// would fill the memory.
pub const MAX_CELLS: u64 = 1 << 20;

/// The content of a picture in addition to the timeline.
#[derive(Debug, Clone, Copy, Default)]
pub struct PictureSettings<'a> {
    /// The heading.
    pub title: &'a str,
    /// The bytes of each stage, one entry per stage or one for all. If empty, memory is counted in
    /// activations of one stage and microbatch, or slice.
    pub sizes: &'a [StageSizes],
    /// Whether each rank has a memory lane below its actions. The page can show and hide it. Without this
    /// setting the page shows it at first if there is room.
    pub memory_lane: bool,
    /// The unit of the times of the timeline.
    pub unit: TimeUnit,
    /// The time that the whole width of a drawing shows, to compare several; `None` for the timeline's own
    /// span. A page ignores it.
    pub span: Option<f64>,
}

/// The unit of times in a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimeUnit {
    /// Seconds, as in a measured run. Short times are shown in milliseconds or microseconds.
    #[default]
    Seconds,
    /// The unit of costs that were given, such as the time of a forward. Times are shown as numbers without a
    /// unit.
    Costs,
}

impl TimeUnit {
    /// Formats a time in a unit that suits the `longest` time next to it.
    pub fn format(self, time: f64, longest: f64) -> String {
        // Three decimals, without trailing zeros.
        let rounded = |value: f64| (value * 1e3).round() / 1e3;
        match self {
            Self::Costs if longest >= 1.0 || longest <= 0.0 => rounded(time).to_string(),
            Self::Costs => {
                // Six digits of the longest time.
                let scale = 10f64.powf(5.0 - longest.log10().floor());
                ((time * scale).round() / scale).to_string()
            }
            Self::Seconds if longest >= 1.0 => format!("{} s", rounded(time)),
            Self::Seconds if longest >= 1e-3 => format!("{} ms", rounded(time * 1e3)),
            Self::Seconds => format!("{} us", rounded(time * 1e6)),
        }
    }
}

impl PictureSettings<'_> {
    /// Returns the sizes by which memory is counted.
    pub(super) fn counted_sizes(&self) -> &[StageSizes] {
        if self.sizes.is_empty() { &[UNIT] } else { self.sizes }
    }
}

/// Escapes `text` for XML and HTML.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_suit_the_longest() {
        assert_eq!(TimeUnit::Seconds.format(0.5, 30.0), "0.5 s");
        assert_eq!(TimeUnit::Seconds.format(0.0125, 0.03), "12.5 ms");
        assert_eq!(TimeUnit::Seconds.format(2e-6, 5e-5), "2 us");
        assert_eq!(TimeUnit::Costs.format(2.5, 30.0), "2.5");
        assert_eq!(TimeUnit::Costs.format(0.00025, 0.01), "0.00025");
        assert_eq!(TimeUnit::Costs.format(0.0, 0.01), "0");
    }
}
