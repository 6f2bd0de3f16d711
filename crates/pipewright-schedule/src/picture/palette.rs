//! All colours of the drawing and the page, for a light and a dark background.
//!
//! Each sort of computation has a hue, and each chunk of a rank a shade of it. Any two sorts differ in every
//! shade for readers with colour blindness; the tests simulate their vision. Bubbles are hatched.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::timeline::Timeline;

/// A sort of action that has a colour of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sort {
    Forward,
    Backward,
    InputBackward,
    WeightBackward,
    Message,
    Collective,
    Offload,
}

impl Sort {
    /// Every sort, in the order of the legend.
    pub(super) const ALL: [Self; 7] = [
        Self::Forward,
        Self::Backward,
        Self::InputBackward,
        Self::WeightBackward,
        Self::Message,
        Self::Collective,
        Self::Offload,
    ];

    /// Returns the sort of actions of one kind. The halves of an overlap have separate sorts; see
    /// [`Action::parts`].
    pub(super) fn of(kind: ActionKind) -> Self {
        match kind {
            ActionKind::Forward => Self::Forward,
            ActionKind::Backward | ActionKind::Overlap => Self::Backward,
            ActionKind::InputBackward => Self::InputBackward,
            ActionKind::WeightBackward => Self::WeightBackward,
            kind if kind.is_communication() => Self::Message,
            kind if kind.is_offload() => Self::Offload,
            _ => Self::Collective,
        }
    }

    /// Returns the text of the legend.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Self::Forward => "F forward",
            Self::Backward => "B backward",
            Self::InputBackward => "I backward, inputs",
            Self::WeightBackward => "W backward, weights",
            Self::Message => "message",
            Self::Collective => "gather, reduce",
            Self::Offload => "offload, reload",
        }
    }

    /// Returns whether the chunks of a rank have different shades.
    pub(super) fn has_shades(self) -> bool {
        self < Self::Message
    }
}

/// The colours for one background, in the form `#7db3e8`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Theme {
    /// The background.
    pub(super) page: &'static str,
    /// Text on the background, and text that matters less.
    pub(super) ink: &'static str,
    pub(super) faint: &'static str,
    /// Lines of the axis and borders.
    pub(super) rule: &'static str,
    /// A lane where its rank is idle, and the lines that hatch it.
    pub(super) bubble: &'static str,
    pub(super) hatch: &'static str,
    /// The area and the edge of the memory lane.
    pub(super) memory: &'static str,
    pub(super) memory_edge: &'static str,
    /// The shades of a rank's first and last chunk, for each [`Sort`].
    #[serde(skip)]
    fills: [[&'static str; 2]; 7],
}

pub(super) const LIGHT: Theme = Theme {
    page: "#ffffff",
    ink: "#212529",
    faint: "#5c636a",
    rule: "#adb5bd",
    bubble: "#f4f5f7",
    hatch: "#cfd4da",
    memory: "#dcd3ea",
    memory_edge: "#6a4c93",
    fills: [
        ["#90bdf2", "#3f7bc6"],
        ["#0d452b", "#2a7350"],
        ["#4aa353", "#98d08f"],
        ["#fae3a0", "#e0ad35"],
        ["#2b2d42", "#2b2d42"],
        ["#c8553d", "#c8553d"],
        ["#0f7c8a", "#0f7c8a"],
    ],
};

/// The colours of a picture in a page whose style sheet has them as variables.
pub(super) const OF_PAGE: Theme = Theme {
    page: "var(--page)",
    ink: "var(--ink)",
    faint: "var(--faint)",
    rule: "var(--rule)",
    bubble: "var(--bubble)",
    hatch: "var(--hatch)",
    memory: "var(--memory)",
    memory_edge: "var(--memory-edge)",
    fills: LIGHT.fills,
};

pub(super) const DARK: Theme = Theme {
    page: "#16191d",
    ink: "#e9ecef",
    faint: "#a5adb5",
    rule: "#495057",
    bubble: "#23272d",
    hatch: "#3b424a",
    memory: "#3d3353",
    memory_edge: "#b79ae0",
    fills: [
        ["#86b4ee", "#3c74bb"],
        ["#1a6644", "#2b8459"],
        ["#58b15c", "#a5dc9b"],
        ["#f7dc86", "#d2a131"],
        ["#d7d9ec", "#d7d9ec"],
        ["#e2745b", "#e2745b"],
        ["#45b8c6", "#45b8c6"],
    ],
};

impl Theme {
    /// Returns the fill of chunk `chunk` of a rank that has at most `chunks`.
    pub(super) fn fill(&self, sort: Sort, chunk: usize, chunks: usize) -> String {
        let [first, last] = self.fills[sort as usize];
        let share = chunk as f64 / (chunks.max(2) - 1) as f64;
        mixed(first, last, share.min(1.0))
    }

    /// Returns the fills of a sort, from the first chunk to the last; one for a sort without shades.
    pub(super) fn shades(&self, sort: Sort, chunks: usize) -> Vec<String> {
        let chunks = if sort.has_shades() { chunks.max(1) } else { 1 };
        (0..chunks).map(|chunk| self.fill(sort, chunk, chunks)).collect()
    }
}

/// Returns the sorts of a timeline that take time, in the order of the legend.
pub(super) fn occurring(timeline: &Timeline) -> BTreeSet<Sort> {
    let events = timeline.events().iter().filter(|event| event.end > event.start);
    let messages = timeline.skips().iter().filter(|skip| skip.end > skip.start).map(|_| Sort::Message);
    events.flat_map(|event| event.action.parts()).map(sort).chain(messages).collect()
}

/// Returns the sort of `part`, which is not an overlap.
pub(super) fn sort(part: Action) -> Sort {
    Sort::of(part.kind())
}

/// Returns the colour of text on a fill: black or white, whichever has more contrast.
pub(super) fn ink_on(fill: &str) -> &'static str {
    let luminance = luminance(linear(fill));
    if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) { "#000000" } else { "#ffffff" }
}

/// Returns the red, green and blue of a colour, from 0 to 255.
fn channels(colour: &str) -> [f64; 3] {
    [1, 3, 5].map(|at| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap_or(0)))
}

/// The colour at `share` of the way from one to another.
fn mixed(from: &str, to: &str, share: f64) -> String {
    let (from, to) = (channels(from), channels(to));
    let [red, green, blue] = [0, 1, 2].map(|at| (from[at] + (to[at] - from[at]) * share).round() as u8);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Returns the intensities of red, green and blue light (IEC 61966-2-1), from 0 to 1.
fn linear(colour: &str) -> [f64; 3] {
    let intensity = |value: f64| {
        let value = value / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    channels(colour).map(intensity)
}

fn luminance([red, green, blue]: [f64; 3]) -> f64 {
    0.2126 * red + 0.7152 * green + 0.0722 * blue
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How eyes perceive the three lights: normal vision, then without red, without green and without blue
    /// (Machado, Oliveira and Fernandes, 2009, at full severity).
    const EYES: [[[f64; 3]; 3]; 4] = [
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ];

    /// Returns the colour as `eye` sees it, in CIELAB.
    fn seen(colour: &str, eye: [[f64; 3]; 3]) -> [f64; 3] {
        let light = linear(colour);
        let [red, green, blue] =
            eye.map(|row| (0..3).map(|at| row[at] * light[at]).sum::<f64>().clamp(0.0, 1.0));
        let cube = |value: f64| if value > 0.008856 { value.cbrt() } else { 7.787 * value + 16.0 / 116.0 };
        let x = cube((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505);
        let y = cube(luminance([red, green, blue]));
        let z = cube((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }

    fn distance(one: &str, other: &str, eye: [[f64; 3]; 3]) -> f64 {
        let (one, other) = (seen(one, eye), seen(other, eye));
        (0..3).map(|at| (one[at] - other[at]).powi(2)).sum::<f64>().sqrt()
    }

    fn check(far_enough: impl Fn(&Theme, usize, [[f64; 3]; 3])) {
        for theme in [LIGHT, DARK] {
            for chunks in 1..=4 {
                for eye in EYES {
                    far_enough(&theme, chunks, eye);
                }
            }
        }
    }

    #[test]
    fn sorts_of_computation_differ_for_all_eyes() {
        check(|theme, chunks, eye| {
            let all: Vec<(Sort, String)> = Sort::ALL[..4]
                .iter()
                .flat_map(|&sort| theme.shades(sort, chunks).into_iter().map(move |fill| (sort, fill)))
                .collect();
            for (sort, fill) in &all {
                assert!(distance(fill, theme.bubble, eye) > 15.0, "{sort:?} {fill} and the bubble");
                for (other_sort, other) in all.iter().filter(|other| other.0 != *sort) {
                    let distance = distance(fill, other, eye);
                    assert!(distance > 10.0, "{sort:?} {fill} and {other_sort:?} {other}: {distance}");
                }
            }
        });
    }

    #[test]
    fn shades_of_chunks_differ_for_all_eyes() {
        check(|theme, chunks, eye| {
            for sort in &Sort::ALL[..4] {
                for pair in theme.shades(*sort, chunks).windows(2) {
                    assert!(distance(&pair[0], &pair[1], eye) > 3.0, "{sort:?} {pair:?}");
                }
            }
        });
    }

    #[test]
    fn text_is_legible() {
        let contrast = |one: &str, other: &str| {
            let (one, other) = (luminance(linear(one)), luminance(linear(other)));
            (one.max(other) + 0.05) / (one.min(other) + 0.05)
        };
        for theme in [LIGHT, DARK] {
            assert!(contrast(theme.ink, theme.page) > 7.0 && contrast(theme.faint, theme.page) > 4.5);
            for fill in Sort::ALL.iter().flat_map(|&sort| theme.shades(sort, 4)) {
                assert!(contrast(&fill, ink_on(&fill)) > 4.5, "{fill}");
            }
        }
    }
}
