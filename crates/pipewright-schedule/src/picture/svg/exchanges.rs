//! The exchanges of tokens, as hatched bars along the upper edge of a lane, on top of the cells of their
//! actions.

use crate::ids::Rank;
use crate::picture::palette::Theme;
use crate::timeline::{Scope, Timeline};

use super::layout::Drawing;

/// The meaning of the bars.
pub(super) const MEANING: &str = "exchange of tokens";
/// The pattern of the bars.
pub(super) const PATTERN: &str = "url(#exchange)";
/// Bars that are closer to each other than this, in units of the picture, are drawn as one.
const GAP: f64 = 0.5;

/// Returns whether a timeline has exchanges.
pub(super) fn has_exchanges(timeline: &Timeline) -> bool {
    timeline.scopes().iter().any(Scope::is_exchange)
}

/// Draws the pattern of the bars.
pub(super) fn push_pattern(picture: &mut String, theme: &Theme) {
    picture.push_str(&format!("<defs><pattern id=\"exchange\" width=\"4\" height=\"4\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"4\" height=\"4\" fill=\"{}\"/><rect width=\"1.6\" height=\"4\" fill=\"{}\"/></pattern></defs>\n",
        theme.page, theme.ink));
}

/// Draws the exchanges of one rank.
pub(super) fn push_exchanges(picture: &mut String, drawing: &Drawing<'_>, rank: Rank) {
    let layout = &drawing.layout;
    let own = drawing.timeline.scopes_of(rank).iter().filter(|scope| scope.is_exchange());
    let mut bars: Vec<[f64; 2]> = Vec::new();
    for [start, end] in own.map(|scope| [layout.x(scope.start), layout.x(scope.end)]) {
        match bars.last_mut() {
            Some(last) if start - last[1] < GAP => last[1] = last[1].max(end),
            _ => bars.push([start, end]),
        }
    }
    if bars.is_empty() {
        return;
    }
    // Low enough for the labels of overlaps.
    let height = layout.bar_height() * 0.6;
    picture.push_str(&format!(
        "<path stroke=\"{PATTERN}\" stroke-width=\"{height:.2}\" fill=\"none\" pointer-events=\"none\" d=\""
    ));
    let y = layout.top(rank) + height / 2.0;
    for [start, end] in bars {
        picture.push_str(&format!("M{start:.1} {y:.2}H{end:.1}"));
    }
    picture.push_str("\"/>\n");
}
