//! The lines of the live display: the header, the progress, the loss, and the speed. A terminal of the usual
//! size also shows each rank and the curve of the loss.
//!
//! A line is a list of fields. If a line is wider than the terminal, its least important fields are
//! shortened. If that is not enough, they are left out until the line fits. A frame therefore never wraps.

use std::time::Duration;

use anstyle::{AnsiColor, Style};
use pipewright::train::Metrics;
use pipewright_planning::numbers::{bytes, short_count};
use pipewright_planning::screen::Size;
use pipewright_run::observer::Overview;
use pipewright_schedule::words::counted;

use crate::display::chart::{CHART_LINES, loss_chart, sparkline};
use crate::display::figures::{
    clock, computed, expected_step, grouped, longer_by, loss_parts, loss_scale, milliseconds, per_rank,
    percent, remaining, token_figures,
};
use crate::display::ranks::rank_lines;

/// The number of spaces between two fields.
const GAP: usize = 2;
/// The largest width of the bar and of the curve.
const WIDEST_BAR: usize = 40;
const WIDEST_CURVE: usize = 32;
/// The smallest useful width of the bar and of the curve.
const NARROWEST: usize = 6;
/// The smallest terminal that shows each rank, and the number of rows with which it also shows the curve of
/// the loss.
const USUAL_COLUMNS: usize = 80;
const ROWS_FOR_RANKS: usize = 12;
const ROWS_FOR_CHART: usize = 24;

/// The state of a run during training.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// The data in the header.
    pub(super) overview: Overview,
    /// The number of steps that were finished when the display started.
    pub(super) start: u64,
    /// The number of steps of the whole run.
    pub(super) steps: u64,
    /// The metrics of the last finished step.
    pub(super) last: Option<Metrics>,
    /// The time of the steps that were finished before the display started, if it shows them.
    pub(super) before: Duration,
    /// The time until the end of the last step, with that time.
    pub(super) until_last: Duration,
    /// The losses of the steps since the start.
    pub(super) losses: Vec<f64>,
    /// The last validation loss.
    pub(super) validation: Option<f64>,
    /// The perplexity and the accuracy of the last evaluation, in words.
    pub(super) of_tokens: Vec<String>,
    /// Whether this is the last picture, which the summary with its own curve follows.
    pub(super) is_final: bool,
}

impl State {
    /// Adds a finished step.
    pub(super) fn add(&mut self, metrics: &Metrics) {
        self.losses.push(metrics.loss);
        self.validation = metrics.validation_loss.or(self.validation);
        if metrics.validation_loss.is_some() {
            self.of_tokens = token_figures(metrics);
        }
        self.last = Some(metrics.clone());
    }
}

/// A part of a line.
struct Field {
    /// The field's text, from the longest to the shortest.
    texts: Vec<String>,
    /// The importance of the field; 0 is the most important.
    rank: u32,
    style: Style,
}

/// Returns the lines for a terminal of the given size, `elapsed` after the display started.
pub(super) fn compose(state: &State, elapsed: Duration, size: Size, has_colour: bool) -> Vec<String> {
    // The last column stays empty, because a character there makes some terminals wrap.
    let width = size.columns.saturating_sub(1);
    let mut lines = vec![header(&state.overview), progress(state, elapsed, width)];
    let Some(metrics) = &state.last else {
        return lines.into_iter().map(|fields| line(fields, width, has_colour)).collect();
    };
    let is_wide = size.columns >= USUAL_COLUMNS;
    let ranks = if is_wide && size.rows >= ROWS_FOR_RANKS { rank_lines(metrics, width) } else { Vec::new() };
    let has_chart = is_wide && size.rows >= ROWS_FOR_CHART && !state.is_final;
    let by_frequency = state.overview.frequency_loss;
    let curve = if has_chart { loss_chart(&state.losses, by_frequency, size.columns) } else { Vec::new() };
    debug_assert!(curve.len() <= CHART_LINES, "the frame has room for the chart");
    let losses: &[f64] = if curve.is_empty() { &state.losses } else { &[] };
    lines.push(learning(metrics, state, losses, width));
    lines.push(speed(metrics, ranks.is_empty()));
    let texts = lines.into_iter().map(|fields| line(fields, width, has_colour));
    texts.chain(ranks).chain(curve).collect()
}

/// Returns the header as one line of any length.
pub(super) fn header_text(overview: &Overview) -> String {
    line(header(overview), usize::MAX, false)
}

fn header(overview: &Overview) -> Vec<Field> {
    let Overview {
        model, layers, parameters, ranks, replicas, stages, schedule, microbatches, device, ..
    } = overview;
    let parameters =
        [format!("{} parameters", grouped(*parameters)), format!("{} parameters", short_count(*parameters))];
    let mut fields = vec![
        Field::new(0, [model.clone()]).styled(Style::new().bold()),
        Field::new(7, [counted(*layers, "layer")]),
        Field::new(2, parameters),
        Field::new(1, [counted(*ranks, "rank")]),
        Field::new(4, [counted(*stages, "stage")]),
        Field::new(3, [schedule.clone()]),
        Field::new(6, [counted(*microbatches, "microbatch")]),
        Field::new(5, [format!("device {device}"), device.clone()]),
    ];
    if *replicas > 1 {
        fields.push(Field::new(8, [counted(*replicas, "replica")]));
    }
    fields
}

fn progress(state: &State, elapsed: Duration, width: usize) -> Vec<Field> {
    let done = state.last.as_ref().map_or(state.start, |metrics| metrics.step);
    let (taken, left) = (done.saturating_sub(state.start), state.steps.saturating_sub(done));
    let share = done as f64 / state.steps.max(1) as f64;
    let mut fields = vec![
        Field::new(0, [format!("step {done}/{}", state.steps)]),
        Field::new(4, [format!("{:3.0}%", (share * 100.0).floor())]),
        Field::new(2, [format!("elapsed {}", clock(elapsed)), clock(elapsed)]),
    ];
    let since_last = elapsed.saturating_sub(state.until_last);
    match remaining(state.until_last, taken, left).map(|time| time.saturating_sub(since_last)) {
        Some(time) => fields.push(Field::new(1, [format!("remaining {}", clock(time)), clock(time)])),
        None => fields.push(Field::new(1, ["the first step is under way"])),
    }
    let room = width.saturating_sub(width_of(&fields) + GAP).min(WIDEST_BAR);
    if room >= NARROWEST {
        let full = (share * room as f64).floor() as usize;
        let bar = format!("{}{}", "━".repeat(full), "─".repeat(room - full));
        fields.insert(1, Field::new(3, [bar]).styled(AnsiColor::Green.on_default()));
    }
    fields
}

fn learning(metrics: &Metrics, state: &State, losses: &[f64], width: usize) -> Vec<Field> {
    let rate = metrics.learning_rate;
    let mut fields = vec![
        Field::new(0, [format!("loss {:.4}", metrics.loss)]).styled(Style::new().bold()),
        Field::new(
            1,
            [format!("grad norm {:.3}", metrics.grad_norm), format!("norm {:.3}", metrics.grad_norm)],
        ),
        Field::new(2, [format!("learning rate {rate:.2e}"), format!("lr {rate:.2e}")]),
    ];
    fields.extend(
        state
            .validation
            .map(|loss| Field::new(1, [format!("validation {loss:.4}"), format!("val {loss:.4}")])),
    );
    fields.extend(state.of_tokens.iter().map(|figure| Field::new(5, [figure.clone()])));
    fields.extend(loss_parts(metrics).into_iter().map(|part| Field::new(4, [part])));
    fields.extend(loss_scale(metrics).map(|scale| Field::new(if metrics.skipped { 1 } else { 4 }, [scale])));
    // If there is no room for the curve otherwise, the learning rate takes its short form.
    let least = width_of(&fields) + GAP + NARROWEST;
    if least > width {
        fields[2].texts.remove(0);
    }
    let room = width.saturating_sub(width_of(&fields) + GAP).min(WIDEST_CURVE);
    if room >= NARROWEST && !losses.is_empty() {
        fields.insert(1, Field::new(3, [sparkline(losses, room)]).styled(AnsiColor::Green.on_default()));
    }
    fields
}

/// Returns the speed. `names_ranks` tells whether it contains the figures of each rank.
fn speed(metrics: &Metrics, names_ranks: bool) -> Vec<Field> {
    let most = metrics.peak_bytes.iter().copied().max().unwrap_or(0);
    let (bubble, step) = (percent(metrics.bubble_fraction), milliseconds(metrics.step_ms));
    let shares = per_rank(&metrics.bubble_per_rank, percent);
    let mut memory = vec![format!("memory {}", bytes(most)), bytes(most)];
    let mut bubbles = vec![format!("bubble {bubble}")];
    if metrics.peak_bytes.len() > 1 && names_ranks {
        memory.insert(0, format!("memory {}", per_rank(&metrics.peak_bytes, bytes)));
        bubbles.insert(0, format!("bubble {bubble}, by rank {shares}"));
    }
    let mut fields = vec![
        Field::new(
            0,
            [format!("{} {}/s", grouped(metrics.tokens_per_second.round() as u64), metrics.counted())],
        ),
        Field { texts: step_times(metrics, step), rank: 2, style: Style::new() },
        Field { texts: bubbles, rank: 3, style: Style::new() },
        Field { texts: memory, rank: 1, style: Style::new() },
    ];
    let computation = computation(metrics);
    if !computation.is_empty() {
        fields.push(Field { texts: computation, rank: 4, style: Style::new() });
    }
    fields
}

/// Returns the rate of the model's products and their share of the peak, from the longest to the shortest text;
/// nothing if they are not known.
fn computation(metrics: &Metrics) -> Vec<String> {
    let share = metrics.mfu.map(|mfu| format!("MFU {}", percent(mfu)));
    computed(metrics).into_iter().chain(share).collect()
}

/// Returns the time of the step with the planned time, or with its prediction if there is no plan, from the
/// longest to the shortest text.
fn step_times(metrics: &Metrics, step: String) -> Vec<String> {
    let mut texts = vec![format!("step time {step}"), step.clone()];
    if let Some((word, expected)) = expected_step(metrics) {
        let text = milliseconds(expected);
        let more = longer_by(metrics.step_ms, expected);
        texts.insert(0, format!("step time {step}, {word} {text} ({more})"));
        texts.insert(1, format!("step {step}, {word} {text}"));
    }
    texts
}

impl Field {
    fn new<T: Into<String>, const N: usize>(rank: u32, texts: [T; N]) -> Self {
        Self { texts: texts.into_iter().map(Into::into).collect(), rank, style: Style::new() }
    }

    fn styled(self, style: Style) -> Self {
        Self { style, ..self }
    }

    fn text(&self) -> &str {
        self.texts.first().map_or("", String::as_str)
    }
}

/// Returns the width of the fields in their present form, with the gaps between them.
fn width_of(fields: &[Field]) -> usize {
    let texts: usize = fields.iter().map(|field| field.text().chars().count()).sum();
    texts + GAP * fields.len().saturating_sub(1)
}

/// Returns the fields on one line of at most `width` characters.
fn line(mut fields: Vec<Field>, width: usize, has_colour: bool) -> String {
    while width_of(&fields) > width {
        // All fields are shortened before any is left out.
        let shortens = fields.iter().any(|field| field.texts.len() > 1);
        let candidates = fields.iter().enumerate().filter(|(_, field)| !shortens || field.texts.len() > 1);
        let Some(least) = candidates.max_by_key(|(_, field)| field.rank).map(|(index, _)| index) else {
            break;
        };
        if shortens {
            fields[least].texts.remove(0);
        } else if fields.len() == 1 {
            fields[0].texts[0] = fields[0].text().chars().take(width).collect();
        } else {
            fields.remove(least);
        }
    }
    let text = |field: &Field| {
        if has_colour {
            format!("{}{}{:#}", field.style, field.text(), field.style)
        } else {
            field.text().to_owned()
        }
    };
    fields.iter().map(text).collect::<Vec<_>>().join(&" ".repeat(GAP))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(last: Option<Metrics>) -> State {
        let overview = Overview {
            model: "llama".to_owned(),
            layers: 6,
            parameters: 1_049_600,
            ranks: 2,
            replicas: 1,
            stages: 2,
            schedule: "1f1b".to_owned(),
            defers_weights: false,
            microbatches: 8,
            device: "flex".to_owned(),
            frequency_loss: 3.0,
        };
        State {
            overview,
            start: 0,
            steps: 300,
            last,
            before: Duration::ZERO,
            until_last: Duration::from_secs(12),
            losses: (0..30).map(|step| 5.0 - f64::from(step) / 10.0).collect(),
            validation: None,
            of_tokens: Vec::new(),
            is_final: false,
        }
    }

    fn metrics() -> Metrics {
        Metrics {
            step: 30,
            loss: 2.43121,
            grad_norm: 0.62,
            learning_rate: 2.9e-3,
            tokens_per_second: 31_305.2,
            step_ms: 131.2,
            bubble_fraction: 0.106,
            bubble_per_rank: vec![0.12, 0.092],
            peak_bytes: vec![28_600_000, 20_400_000],
            ..Metrics::default()
        }
    }

    fn check(columns: usize, last: Option<Metrics>, expected: &[&str]) {
        let lines = compose(&state(last), Duration::from_secs(12), Size { columns, rows: 10 }, false);
        assert_eq!(lines, expected, "at {columns} columns");
        assert!(lines.iter().all(|line| line.chars().count() < columns), "{lines:?}");
    }

    #[test]
    fn wide_terminals_show_everything() {
        check(
            120,
            Some(metrics()),
            &[
                "llama  6 layers  1,049,600 parameters  2 ranks  2 stages  1f1b  8 microbatches  device flex",
                "step 30/300  ━━━━────────────────────────────────────   10%  elapsed 0:12  remaining 1:48",
                "loss 2.4312  ███▇▇▇▇▆▆▆▆▅▅▅▅▄▄▄▄▃▃▃▃▂▂▂▂▁▁▁  grad norm 0.620  learning rate 2.90e-3",
                "31,305 tokens/s  step time 131 ms  bubble 10.6%, by rank 12.0%  9.2%  memory 27.3 MiB  19.5 MiB",
            ],
        );
    }

    #[test]
    fn the_usual_width_keeps_every_kind_of_figure() {
        check(
            80,
            Some(metrics()),
            &[
                "llama  1.05M parameters  2 ranks  2 stages  1f1b  8 microbatches  flex",
                "step 30/300  ━━━───────────────────────────   10%  elapsed 0:12  remaining 1:48",
                "loss 2.4312  ███▇▇▇▆▆▆▆▅▅▅▄▄▄▄▃▃▃▂▂▂▂▁▁  grad norm 0.620  learning rate 2.90e-3",
                "31,305 tokens/s  step time 131 ms  bubble 10.6%  memory 27.3 MiB  19.5 MiB",
            ],
        );
    }

    #[test]
    fn narrow_terminals_drop_what_matters_least() {
        check(
            50,
            Some(metrics()),
            &[
                "llama  1.05M parameters  2 ranks  2 stages  1f1b",
                "step 30/300   10%  elapsed 0:12  remaining 1:48",
                "loss 2.4312  █▇▆▅▃▂▁  grad norm 0.620  lr 2.90e-3",
                "31,305 tokens/s  131 ms  bubble 10.6%  27.3 MiB",
            ],
        );
        check(
            20,
            Some(metrics()),
            &["llama  2 ranks", "step 30/300  1:48", "loss 2.4312", "31,305 tokens/s"],
        );
        check(8, None, &["llama", "step 0/"]);
    }

    #[test]
    fn the_last_validation_loss_stays() {
        let state = State { validation: Some(2.5), ..state(Some(metrics())) };
        let learning = |columns| {
            compose(&state, Duration::from_secs(12), Size { columns, rows: 10 }, false).swap_remove(2)
        };
        assert!(learning(120).ends_with("learning rate 2.90e-3  validation 2.5000"), "{}", learning(120));
        assert_eq!(learning(40), "loss 2.4312  norm 0.620  val 2.5000");
        let mut state = state;
        state.add(&Metrics { validation_loss: Some(2.25), validation_accuracy: Some(0.5), ..metrics() });
        let lines = compose(&state, Duration::from_secs(12), Size { columns: 120, rows: 10 }, false);
        assert!(lines[2].ends_with("validation 2.2500  accuracy 50.0%"), "{}", lines[2]);
    }

    #[test]
    fn the_usual_terminal_shows_ranks_and_the_curve() {
        let metrics = Metrics { predicted_step_ms: Some(128.0), ..metrics() };
        let mut state = state(Some(metrics.clone()));
        let size = Size { columns: 80, rows: 24 };
        let lines = compose(&state, Duration::from_secs(12), size, false);
        assert_eq!(lines[2], "loss 2.4312  grad norm 0.620  learning rate 2.90e-3");
        assert_eq!(lines[3], "31,305 tokens/s  step 131 ms, predicted 128 ms  bubble 10.6%  memory 27.3 MiB");
        assert_eq!(
            lines[4],
            "rank 0 ━━━━━━━━━─  88% busy  27.3 MiB    rank 1 ━━━━━━━━━─  91% busy  19.5 MiB"
        );
        assert!(lines[5].starts_with("  5.00 ┤") && lines[12].starts_with("  2.10 ┤"), "{lines:?}");
        assert_eq!(lines.len(), 5 + CHART_LINES);
        assert!(lines.iter().all(|line| line.chars().count() < 80), "{lines:?}");
        state.is_final = true;
        assert_eq!(
            compose(&state, Duration::from_secs(12), size, false).len(),
            5,
            "the summary has the curve"
        );
        let wide = compose(&state, Duration::from_secs(12), Size { columns: 120, rows: 12 }, false);
        let time = "31,305 tokens/s  step time 131 ms, predicted 128 ms (+2%)  bubble 10.6%  memory 27.3 MiB";
        assert_eq!(wide[3], time);
        let planned = Metrics { planned_step_ms: Some(125.0), ..metrics };
        let lines = compose(&State { last: Some(planned), ..state }, Duration::ZERO, size, false);
        assert_eq!(lines[3], "31,305 tokens/s  step 131 ms, planned 125 ms  bubble 10.6%  memory 27.3 MiB");
    }

    #[test]
    fn nothing_is_foretold_before_the_first_step() {
        let lines = compose(&state(None), Duration::ZERO, Size { columns: 80, rows: 24 }, false);
        let expected = "step 0/300  ──────────────────    0%  elapsed 0:00  the first step is under way";
        assert_eq!(lines[1..], [expected]);
    }

    #[test]
    fn colour_adds_no_width() {
        let size = Size { columns: 80, rows: 24 };
        let [plain, coloured] = [false, true]
            .map(|has_colour| compose(&state(Some(metrics())), Duration::ZERO, size, has_colour));
        let stripped: Vec<String> = coloured
            .iter()
            .map(|line| line.replace("\x1b[1m", "").replace("\x1b[32m", "").replace("\x1b[0m", ""))
            .collect();
        assert_eq!(stripped, plain);
        assert_ne!(coloured, plain);
    }
}
