//! The live display of a terminal: a bar with the step's figures, and a line each for bubbles and memory.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use pipewright::train::Metrics;

use crate::display::figures::{bytes, per_rank, percent};

/// The display of one run.
pub(crate) struct Live {
    /// Keeps the bars together; dropping it would end the drawing.
    bars: MultiProgress,
    steps: ProgressBar,
    bubble: ProgressBar,
    memory: ProgressBar,
}

impl Live {
    /// A display for a run of `steps` steps, of which the first `done` are behind it.
    pub(super) fn new(done: u64, steps: u64) -> Self {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let line = |length, template: &str| {
            let style = ProgressStyle::with_template(template).expect("the templates below are sound");
            bars.add(ProgressBar::new(length).with_style(style))
        };
        let steps = line(steps, "step {pos}/{len} {bar:24} {msg}  eta {eta}");
        let bubble = line(0, "bubble  {msg}");
        let memory = line(0, "memory  {msg}");
        steps.set_position(done);
        steps.reset_eta();
        // Before the first step there is nothing to say, but the bar shows that the run has begun.
        steps.tick();
        Self { steps, bubble, memory, bars }
    }

    /// Shows a step that is done.
    pub(super) fn step(&self, metrics: &Metrics) {
        self.steps
            .set_message(format!("loss {:.4}  {:.0} tokens/s", metrics.loss, metrics.tokens_per_second));
        self.steps.set_position(metrics.step);
        let shares = per_rank(&metrics.bubble_per_rank, percent);
        self.bubble.set_message(format!(
            "{} of all ranks' time; by rank {shares}",
            percent(metrics.bubble_fraction)
        ));
        self.memory.set_message(format!("at most {}", per_rank(&metrics.peak_bytes, bytes)));
    }

    /// Leaves the last state where it is.
    pub(super) fn finish(self) {
        for line in [&self.steps, &self.bubble, &self.memory] {
            line.abandon();
        }
        drop(self.bars);
    }
}
