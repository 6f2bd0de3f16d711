//! The positions in the drawing: converts times and ranks to lengths in the picture's own units.

use crate::ids::Rank;
use crate::picture::chunks::Chunks;
use crate::picture::palette::Theme;
use crate::picture::settings::{PictureSettings, TimeUnit};
use crate::timeline::Timeline;

/// The width of the rank names.
pub(super) const LABEL: f64 = 64.0;
/// The width of the whole timeline.
pub(super) const PLOT: f64 = 1100.0;
const RIGHT: f64 = 24.0;
const HEAD: f64 = 12.0;
const TITLE: f64 = 22.0;
const FOOT: f64 = 64.0;

/// Returns the approximate width of a text.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    let width = |letter| if letter == 'W' { 1.0 } else { 0.63 };
    size * text.chars().map(width).sum::<f64>()
}

/// A timeline with the data that all parts of the drawing use.
pub(super) struct Drawing<'a> {
    pub(super) timeline: &'a Timeline,
    pub(super) chunks: Chunks,
    pub(super) layout: Layout,
    pub(super) is_detailed: bool,
}

/// The lengths of one drawing.
pub(super) struct Layout {
    start: f64,
    /// The time that the whole width shows.
    pub(super) makespan: f64,
    /// The time from the first event to the end of the last.
    own: f64,
    unit: TimeUnit,
    ranks: u32,
    head: f64,
    /// The height of a lane with the space below it.
    lane: f64,
    /// The height of a memory lane with the space below it; 0 without memory lanes.
    memory: f64,
    /// The colours of everything but the actions.
    pub(super) theme: &'static Theme,
}

impl Layout {
    pub(super) fn of(timeline: &Timeline, settings: &PictureSettings<'_>, theme: &'static Theme) -> Self {
        // Few ranks get room for labels. Many ranks still fit the width of a screen on a long page.
        let lane = (720.0 / f64::from(timeline.ranks().max(1))).clamp(12.0, 34.0);
        Self {
            start: timeline.start(),
            makespan: settings.span.unwrap_or(0.0).max(timeline.makespan()),
            own: timeline.makespan(),
            unit: settings.unit,
            ranks: timeline.ranks(),
            head: HEAD + if settings.title.is_empty() { 0.0 } else { TITLE },
            lane,
            memory: if settings.memory_lane { lane * 0.8 } else { 0.0 },
            theme,
        }
    }

    /// Returns the width of a lane, with two decimals at most.
    pub(super) fn lane_width(&self) -> f64 {
        if self.own > 0.0 { (self.length(self.own) * 100.0).round() / 100.0 } else { PLOT }
    }

    /// Formats a time since the start.
    pub(super) fn time(&self, time: f64) -> String {
        self.unit.format(time, self.makespan)
    }

    pub(super) fn width(&self) -> f64 {
        LABEL + PLOT + RIGHT
    }

    pub(super) fn height(&self) -> f64 {
        self.bottom() + FOOT
    }

    /// Returns the upper edge of the lanes.
    pub(super) fn head(&self) -> f64 {
        self.head
    }

    /// Returns the lower edge of the lanes.
    pub(super) fn bottom(&self) -> f64 {
        self.head + f64::from(self.ranks) * (self.lane + self.memory)
    }

    /// Converts a duration to a length from 0 to [`PLOT`].
    pub(super) fn length(&self, seconds: f64) -> f64 {
        if self.makespan > 0.0 { seconds / self.makespan * PLOT } else { 0.0 }
    }

    /// Converts a time to a distance from the start of the timeline.
    pub(super) fn offset(&self, time: f64) -> f64 {
        self.length(self.since_start(time))
    }

    pub(super) fn x(&self, time: f64) -> f64 {
        LABEL + self.offset(time)
    }

    /// Returns the seconds since the start of the timeline.
    pub(super) fn since_start(&self, time: f64) -> f64 {
        time - self.start
    }

    pub(super) fn top(&self, rank: Rank) -> f64 {
        self.head + f64::from(rank.get()) * (self.lane + self.memory) + 1.0
    }

    /// Returns the height of the content of a lane.
    pub(super) fn lane_height(&self) -> f64 {
        self.lane - 2.0
    }

    /// Returns the height of the bar of a message.
    pub(super) fn bar_height(&self) -> f64 {
        (self.lane / 5.0).min(6.0)
    }

    pub(super) fn memory_top(&self, rank: Rank) -> f64 {
        self.top(rank) + self.lane - 1.0
    }

    /// Returns the height of the content of a memory lane.
    pub(super) fn memory_height(&self) -> f64 {
        self.memory - 3.0
    }
}
