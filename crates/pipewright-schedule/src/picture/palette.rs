//! The colours of actions, shared by the drawing and the page, so that one legend serves both.
//!
//! Lightness tells the fills apart as well as hue does, for readers who do not see hues and for print without
//! colour: from light to dark the gradients of weights, forwards, gradients of inputs, full backwards, and
//! messages. Bubbles are hatched.

use crate::action::{Action, ActionKind};

/// How one sort of action looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Style {
    /// The place in the legend.
    order: u8,
    /// What the fill means.
    pub(super) meaning: &'static str,
    pub(super) fill: &'static str,
    /// The colour of text on the fill.
    pub(super) ink: &'static str,
}

const FORWARD: Style = Style { order: 0, meaning: "F forward", fill: "#7db3e8", ink: "#10304d" };
const FULL: Style = Style { order: 1, meaning: "B backward", fill: "#17583a", ink: "#ffffff" };
const INPUTS: Style = Style { order: 2, meaning: "I backward, inputs", fill: "#3c9a6b", ink: "#ffffff" };
const WEIGHTS: Style = Style { order: 3, meaning: "W backward, weights", fill: "#f7dc86", ink: "#4a3a05" };
const MESSAGE: Style = Style { order: 4, meaning: "message", fill: "#2b2d42", ink: "#ffffff" };
const COLLECTIVE: Style = Style { order: 5, meaning: "gather, reduce", fill: "#c8553d", ink: "#ffffff" };

/// All styles, in the order of the legend.
pub(super) const STYLES: [Style; 6] = [FORWARD, FULL, INPUTS, WEIGHTS, MESSAGE, COLLECTIVE];

/// The background of a lane, and the lines that hatch it where a rank idles.
pub(super) const BUBBLE: [&str; 2] = ["#f4f5f7", "#cfd4da"];

/// How `part`, which is no overlap, looks.
pub(super) fn style(part: Action) -> Style {
    match part.kind() {
        ActionKind::Forward => FORWARD,
        ActionKind::Backward | ActionKind::Overlap => FULL,
        ActionKind::InputBackward => INPUTS,
        ActionKind::WeightBackward => WEIGHTS,
        kind if kind.is_communication() => MESSAGE,
        _ => COLLECTIVE,
    }
}

/// A time in the unit that suits the longest on the page.
pub(super) fn duration(seconds: f64, longest: f64) -> String {
    match longest {
        _ if longest >= 1.0 => format!("{} s", rounded(seconds)),
        _ if longest >= 1e-3 => format!("{} ms", rounded(seconds * 1e3)),
        _ => format!("{} us", rounded(seconds * 1e6)),
    }
}

/// With three decimals at most, and without needless zeros.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lightness of a colour such as `#7db3e8`, from 0 to 255.
    fn lightness(colour: &str) -> f64 {
        let channel = |at| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).expect("two digits"));
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    #[test]
    fn computation_is_told_apart_without_hue() {
        let mut values: Vec<f64> =
            [FORWARD, FULL, INPUTS, WEIGHTS].map(|style| lightness(style.fill)).to_vec();
        values.push(lightness(BUBBLE[0]));
        values.sort_by(f64::total_cmp);
        assert!(values.windows(2).all(|pair| pair[1] - pair[0] > 18.0), "{values:?}");
    }

    #[test]
    fn text_is_legible_on_its_fill() {
        for style in STYLES {
            assert!((lightness(style.fill) - lightness(style.ink)).abs() > 100.0, "{style:?}");
        }
    }

    #[test]
    fn durations_suit_the_longest() {
        assert_eq!(duration(0.5, 30.0), "0.5 s");
        assert_eq!(duration(0.0125, 0.03), "12.5 ms");
        assert_eq!(duration(2e-6, 5e-5), "2 us");
    }
}
