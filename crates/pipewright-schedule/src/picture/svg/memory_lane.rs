//! The memory of a rank over time, as an area below its lane.

use crate::ids::Rank;
use crate::picture::settings::PictureSettings;
use crate::simulate::{memory_curve, peak_memory};
use crate::timeline::Timeline;

use super::layout::{Drawing, LABEL};

/// The width, in units of the picture, of the shortest step of a lane without details. Shorter steps are
/// merged.
const COARSE: f64 = 4.0;
/// The same width for a lane with details.
const FINE: f64 = 0.5;

/// Steps of one unit of the picture.
const STEPS: f64 = 10.0;

/// The most that any rank holds, which is the height of every lane, so that lanes can be compared.
#[derive(Clone, Copy)]
pub(super) struct HighestPeak(u64);

impl HighestPeak {
    pub(super) fn of(timeline: &Timeline, settings: &PictureSettings<'_>) -> Self {
        Self(peak_memory(timeline, settings.counted_sizes()).into_iter().max().unwrap_or(0).max(1))
    }
}

/// Draws the memory lane of one rank.
pub(super) fn push_memory(
    picture: &mut String,
    drawing: &Drawing<'_>,
    rank: Rank,
    settings: &PictureSettings<'_>,
    HighestPeak(highest): HighestPeak,
) {
    let layout = &drawing.layout;
    let curve = memory_curve(drawing.timeline, rank, settings.counted_sizes());
    let (height, bottom) = (layout.memory_height(), layout.memory_top(rank) + layout.memory_height());
    let peak = curve.iter().map(|step| step.held).max().unwrap_or(0);
    let points: Vec<(f64, u64)> = curve.iter().map(|step| (layout.offset(step.time), step.held)).collect();
    let steps = visible_steps(&points, if drawing.is_detailed { FINE } else { COARSE });
    let path = path(&steps, height / highest as f64);
    picture.push_str(&format!("<g transform=\"translate({LABEL} {bottom:.2})\"><title>rank {rank} holds at most {}</title>\
         <path transform=\"scale(.1)\" fill=\"{}\" stroke=\"{}\" stroke-width=\"7\" d=\"M0 0{path}H{:.0}V0z\"/>\
         <text x=\"-8\" y=\"{:.2}\" text-anchor=\"end\" font-size=\"9\" fill=\"{}\">{}</text></g>\n",
        amount(peak, settings),
        layout.theme.memory,
        layout.theme.memory_edge,
        layout.length(layout.makespan) * STEPS,
        4.0 - height / 2.0,
        layout.theme.memory_edge,
        amount(peak, settings).replace("activations", "act.").replace("activation", "act.")));
}

/// Returns the edge of the area, in tenths of the picture's unit, each point relative to the previous one.
/// One activation or byte has the height `scale`.
fn path(steps: &[(f64, u64)], scale: f64) -> String {
    let mut path = String::new();
    let (mut across, mut up) = (0, 0);
    for &(x, held) in steps {
        let next = ((x * STEPS).round() as i64, (held as f64 * scale * STEPS).round() as i64);
        path.push_str(&format!("h{}v{}", next.0 - across, up - next.1));
        (across, up) = next;
    }
    path
}

/// Returns the steps, in which changes within `width` of a step are merged with it. A merged step is as high
/// as its highest.
fn visible_steps(points: &[(f64, u64)], width: f64) -> Vec<(f64, u64)> {
    let mut steps: Vec<(f64, u64)> = Vec::new();
    let mut current = 0;
    for &(x, held) in points {
        match steps.last_mut() {
            Some(step) if x < step.0 + width => step.1 = step.1.max(held),
            _ => {
                end_step(&mut steps, current, width);
                steps.push((x, held));
            }
        }
        current = held;
    }
    end_step(&mut steps, current, width);
    steps
}

/// Ends a step that was merged from several: the drawing continues with the amount of the last of them.
fn end_step(steps: &mut Vec<(f64, u64)>, held: u64, width: f64) {
    if let Some(&(x, highest)) = steps.last()
        && highest != held
    {
        steps.push((x + width, held));
    }
}

/// Formats an amount of memory with its unit.
fn amount(held: u64, settings: &PictureSettings<'_>) -> String {
    if settings.sizes.is_empty() {
        return format!("{held} activation{}", if held == 1 { "" } else { "s" });
    }
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|&(size, _)| held >= size) {
        Some((size, unit)) => format!("{:.2} {unit}", held as f64 / size as f64),
        None => format!("{held} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_fine_to_see_keeps_its_peak() {
        let points = [(0.0, 1), (4.0, 2), (4.5, 5), (4.8, 1), (20.0, 0)];
        assert_eq!(visible_steps(&points, 1.0), [(0.0, 1), (4.0, 5), (5.0, 1), (20.0, 0)]);
        assert_eq!(visible_steps(&points[..1], 1.0), [(0.0, 1)]);
        assert_eq!(visible_steps(&[], 1.0), []);
    }
}
