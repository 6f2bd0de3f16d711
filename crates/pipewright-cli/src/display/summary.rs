//! The summary at the end of a run: the losses, the time, the folder of the results, and the commands to run
//! next.

use std::path::Path;
use std::time::Duration;

use pipewright::train::{Metrics, SourceLoss};
use pipewright_document::text::quoted;
use pipewright_run::observer::{Ending, Overview, Reason};
use pipewright_schedule::words::counted;

use crate::display::chart::loss_chart;
use crate::display::figures::{clock, grouped, longer_by, milliseconds, token_figures};

/// The figures of the steps that this process has taken.
#[derive(Debug, Default)]
pub(super) struct Tally {
    first: Option<Metrics>,
    best: Option<(u64, f64)>,
    last: Option<Metrics>,
    losses: Vec<f64>,
    /// The milliseconds of all steps, without evaluations and checkpoints between them.
    step_ms: f64,
    /// The milliseconds of the steps for which there is a plan.
    planned_steps: Vec<f64>,
    /// The last validation loss.
    validation: Option<f64>,
    /// The perplexity and the accuracy of the last evaluation, in words.
    of_tokens: Vec<String>,
    /// The last validation loss of each source of a mixture.
    sources: Vec<SourceLoss>,
}

impl Tally {
    pub(super) fn step(&mut self, metrics: &Metrics) {
        self.first.get_or_insert_with(|| metrics.clone());
        if self.best.is_none_or(|(_, loss)| metrics.loss < loss) {
            self.best = Some((metrics.step, metrics.loss));
        }
        self.losses.push(metrics.loss);
        self.step_ms += metrics.step_ms;
        if metrics.planned_step_ms.is_some() {
            self.planned_steps.push(metrics.step_ms);
        }
        self.validation = metrics.validation_loss.or(self.validation);
        if metrics.validation_loss.is_some() {
            self.of_tokens = token_figures(metrics);
        }
        if !metrics.validation_sources.is_empty() {
            self.sources.clone_from(&metrics.validation_sources);
        }
        self.last = Some(metrics.clone());
    }
}

/// Says why a run has ended before its last step; `None` if it has not.
fn early_end(ending: &Ending<'_>) -> Option<String> {
    let Ending { done, saved, .. } = ending;
    let saved = saved.map(|saved| format!(", saved in {}", short(saved))).unwrap_or_default();
    match ending.reason {
        Reason::Complete => None,
        Reason::LossNoLongerFalls => {
            Some(format!("ended early after step {done}{saved}: the validation loss no longer falls"))
        }
        Reason::Signal => Some(format!("stopped by a signal after step {done}{saved}")),
    }
}

/// Returns the text at the end of a run, with a curve for a terminal of this width.
pub(super) fn summary(overview: &Overview, tally: &Tally, ending: &Ending<'_>, columns: usize) -> String {
    let Tally { first: Some(first), best: Some(best), last: Some(last), losses, .. } = tally else {
        let complete =
            || format!("all {} steps were taken before; ask for more with --set run.steps=N", ending.done);
        return early_end(ending).unwrap_or_else(complete);
    };
    let mut lines: Vec<String> = early_end(ending).into_iter().collect();
    lines.push(took(first, last, tally.step_ms / 1e3));
    lines.extend(last.planned_step_ms.and_then(|planned| against_plan(&tally.planned_steps, planned)));
    let (step, best) = *best;
    // A resumed run knows only the losses of its own steps.
    let since = if first.step > 1 { format!(" since step {}:", first.step) } else { String::new() };
    lines.push(format!(
        "loss{since} {:.4} at first, {best:.4} at best (step {step}), {:.4} at last",
        first.loss, last.loss
    ));
    if let Some((step, best)) = ending.best {
        let last = tally.validation.map(|last| format!(", {last:.4} at last")).unwrap_or_default();
        let whole = if first.step > 1 { " of the whole run:" } else { "" };
        lines.push(format!("validation loss{whole} {best:.4} at best (step {step}, checkpoints/best){last}"));
    }
    if !tally.of_tokens.is_empty() {
        lines.push(format!("validation {} at last", tally.of_tokens.join(", ")));
    }
    let sources = tally.sources.iter().filter_map(|source| Some((&source.name, source.loss?)));
    lines.extend(sources.map(|(name, loss)| format!("validation loss of {name}: {loss:.4} at last")));
    let by_frequency = overview.frequency_loss;
    if by_frequency > 0.0 {
        lines.push(format!("guessing each token by how often it occurs has a loss of {by_frequency:.4}"));
    }
    lines.extend(loss_chart(losses, by_frequency, columns));
    lines.push(format!("results in {}", short(ending.out)));
    // Models with a score or labels do not continue texts.
    let is_scored = last.accuracy.is_some() || last.preference.contains_key("mean_reward");
    lines.extend(next(ending, !is_scored));
    lines.join("\n")
}

/// Returns a sentence with the time and the tokens of the steps from `first` to `last`. The steps alone, without the
/// evaluations between them, took `of_steps` seconds.
fn took(first: &Metrics, last: &Metrics, of_steps: f64) -> String {
    // The figures are totals of the whole run, so the part before this process's first step is subtracted.
    let steps = last.step + 1 - first.step;
    let seconds = last.elapsed_s - first.elapsed_s + first.step_ms / 1e3;
    let (unit, per_step) = (last.counted(), first.tokens_per_second * first.step_ms / 1e3);
    let tokens = (last.tokens - first.tokens) as f64 + per_step;
    format!(
        "trained {} in {}: {} {unit} at {} {unit}/s",
        counted(steps, "step"),
        clock(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
        grouped(tokens.round() as u64),
        grouped((tokens / of_steps).round() as u64),
    )
}

/// Returns a sentence with the median time of the steps and the time that was planned. The first step is left
/// out, because caches and memory are cold then.
fn against_plan(steps: &[f64], planned: f64) -> Option<String> {
    let mut steps = steps.get(1..)?.to_vec();
    steps.sort_by(f64::total_cmp);
    let median = *steps.get(steps.len() / 2)?;
    let (text, more) = (milliseconds(median), longer_by(median, planned));
    Some(format!("median step {text}, planned {} ({more})", milliseconds(planned)))
}

/// Returns the commands that the user may run next. `generates` says whether the model continues texts.
fn next(ending: &Ending<'_>, generates: bool) -> Vec<String> {
    let out = quoted(&short(ending.out));
    let (more, effect) = match ending.reason {
        Reason::Complete => (
            format!("pipewright resume {out} --set run.steps={}", ending.done.saturating_mul(2)),
            "trains further",
        ),
        Reason::LossNoLongerFalls => {
            (format!("pipewright resume {out} --set run.patience=0"), "trains further")
        }
        Reason::Signal => (format!("pipewright resume {out}"), "resumes the run"),
    };
    let (mut lines, mut commands) = (Vec::new(), Vec::new());
    if ending.saved.is_some() {
        let generate = (format!("pipewright generate {out} --prompt TEXT"), "samples text from it");
        commands
            .extend([(more, effect), (format!("pipewright inspect {out}"), "shows the newest checkpoint")]);
        commands.extend(generates.then_some(generate));
        commands.push((format!("pipewright export {out} DIR"), "writes a Hugging Face directory"));
    } else {
        lines.push("no checkpoint was kept; --set run.checkpoint_every=N keeps some".to_owned());
    }
    commands.extend(pages(ending));
    let width = commands.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
    lines.extend(commands.iter().map(|(command, effect)| format!("  {command:width$}  {effect}")));
    lines
}

/// Returns the commands that make pages about the run.
fn pages(ending: &Ending<'_>) -> Vec<(String, &'static str)> {
    let folder = short(ending.out);
    let command = |name: &str| {
        let page = Path::new(&folder).join(name).with_extension("html");
        format!("pipewright {name} {} -o {}", quoted(&folder), quoted(&page.to_string_lossy()))
    };
    let mut commands = vec![(command("report"), "makes a page about the run")];
    if ending.has_timeline {
        commands.push((command("view"), "explains its steps"));
    }
    commands
}

/// Returns the path relative to the working folder if it is inside that folder.
fn short(path: &Path) -> String {
    let here = std::env::current_dir().ok();
    let below = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    below
        .filter(|below| below.iter().next().is_some())
        .unwrap_or_else(|| path.to_owned())
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a tenth of a second and 1,000 tokens each, with these losses.
    fn tally(first: u64, losses: &[f64]) -> Tally {
        let mut tally = Tally::default();
        for (step, &loss) in (first..).zip(losses) {
            tally.step(&Metrics {
                step,
                loss,
                tokens_per_second: 10_000.0,
                step_ms: 100.0,
                elapsed_s: step as f64 / 10.0,
                tokens: step * 1000,
                ..Metrics::default()
            });
        }
        tally
    }

    fn check(tally: &Tally, reason: Reason, saved: Option<&str>, expected: &str) {
        let overview = Overview { frequency_loss: 3.125, ..Overview::default() };
        let done = tally.last.as_ref().map_or(7, |last| last.step);
        let saved = saved.map(Path::new);
        let ending =
            Ending { done, reason, saved, best: None, out: Path::new("/runs/a b"), has_timeline: true };
        assert_eq!(summary(&overview, tally, &ending, 80), expected);
    }

    #[test]
    fn a_run_that_is_complete() {
        let expected = "\
trained 3 steps in 0:00: 3,000 tokens at 10,000 tokens/s
loss 5.5000 at first, 2.0000 at best (step 2), 2.2500 at last
guessing each token by how often it occurs has a loss of 3.1250
results in /runs/a b
  pipewright resume '/runs/a b' --set run.steps=6           trains further
  pipewright inspect '/runs/a b'                            shows the newest checkpoint
  pipewright generate '/runs/a b' --prompt TEXT             samples text from it
  pipewright export '/runs/a b' DIR                         writes a Hugging Face directory
  pipewright report '/runs/a b' -o '/runs/a b/report.html'  makes a page about the run
  pipewright view '/runs/a b' -o '/runs/a b/view.html'      explains its steps";
        check(
            &tally(1, &[5.5, 2.0, 2.25]),
            Reason::Complete,
            Some("/runs/a b/checkpoints/step-00000003"),
            expected,
        );
    }

    #[test]
    fn a_run_of_other_data_than_text() {
        let mut tally = tally(1, &[5.5, 2.0]);
        for metrics in [&mut tally.first, &mut tally.last].into_iter().flatten() {
            metrics.unit = Some("frames".to_owned());
        }
        let ending = Ending {
            done: 2,
            reason: Reason::Complete,
            saved: None,
            best: None,
            out: Path::new("/r"),
            has_timeline: false,
        };
        let text = summary(&Overview::default(), &tally, &ending, 80);
        assert!(text.starts_with("trained 2 steps in 0:00: 2,000 frames at 10,000 frames/s\n"), "{text}");
        assert!(!text.contains("token"), "{text}");
    }

    #[test]
    fn a_run_with_a_plan() {
        let line = |steps: &[f64]| {
            let mut tally = Tally::default();
            for (step, &step_ms) in (1..).zip(steps) {
                tally.step(&Metrics { step, step_ms, planned_step_ms: Some(120.0), ..Metrics::default() });
            }
            let ending = Ending {
                done: 4,
                reason: Reason::Complete,
                saved: None,
                best: None,
                out: Path::new("/r"),
                has_timeline: false,
            };
            let text = summary(&Overview::default(), &tally, &ending, 80);
            text.lines().find(|line| line.contains("planned")).map(str::to_owned)
        };
        let expected = "median step 126 ms, planned 120 ms (+5%)";
        assert_eq!(line(&[900.0, 126.0, 100.0, 127.0]).as_deref(), Some(expected));
        assert_eq!(line(&[900.0]), None);
    }

    #[test]
    fn a_run_that_was_resumed_and_stopped() {
        let expected = "\
stopped by a signal after step 22, saved in /c
trained 2 steps in 0:00: 2,000 tokens at 10,000 tokens/s
loss since step 21: 2.5000 at first, 2.2500 at best (step 22), 2.2500 at last
guessing each token by how often it occurs has a loss of 3.1250
results in /runs/a b
  pipewright resume '/runs/a b'                             resumes the run
  pipewright inspect '/runs/a b'                            shows the newest checkpoint
  pipewright generate '/runs/a b' --prompt TEXT             samples text from it
  pipewright export '/runs/a b' DIR                         writes a Hugging Face directory
  pipewright report '/runs/a b' -o '/runs/a b/report.html'  makes a page about the run
  pipewright view '/runs/a b' -o '/runs/a b/view.html'      explains its steps";
        check(&tally(21, &[2.5, 2.25]), Reason::Signal, Some("/c"), expected);
    }

    #[test]
    fn a_run_whose_validation_loss_no_longer_falls() {
        let mut tally = tally(1, &[2.5, 2.25]);
        tally.validation = Some(2.625);
        let (reason, saved) = (Reason::LossNoLongerFalls, Some(Path::new("/c")));
        let ending = Ending {
            done: 2,
            reason,
            saved,
            best: Some((1, 2.5)),
            out: Path::new("/r"),
            has_timeline: false,
        };
        let expected = "\
ended early after step 2, saved in /c: the validation loss no longer falls
trained 2 steps in 0:00: 2,000 tokens at 10,000 tokens/s
loss 2.5000 at first, 2.2500 at best (step 2), 2.2500 at last
validation loss 2.5000 at best (step 1, checkpoints/best), 2.6250 at last
results in /r
  pipewright resume /r --set run.patience=0  trains further
  pipewright inspect /r                      shows the newest checkpoint
  pipewright generate /r --prompt TEXT       samples text from it
  pipewright export /r DIR                   writes a Hugging Face directory
  pipewright report /r -o /r/report.html     makes a page about the run";
        assert_eq!(summary(&Overview::default(), &tally, &ending, 80), expected);
        for metrics in [&mut tally.first, &mut tally.last].into_iter().flatten() {
            metrics.step += 20;
        }
        let resumed = summary(&Overview::default(), &tally, &ending, 80);
        let lines = "\nloss since step 21: 2.5000 at first, 2.2500 at best (step 2), 2.2500 at last\n\
                     validation loss of the whole run: 2.5000 at best (step 1, checkpoints/best), 2.6250 at last\n";
        assert!(resumed.contains(lines), "{resumed}");
    }

    #[test]
    fn a_run_without_steps_or_checkpoints() {
        check(
            &Tally::default(),
            Reason::Complete,
            None,
            "all 7 steps were taken before; ask for more with --set run.steps=N",
        );
        check(&Tally::default(), Reason::Signal, None, "stopped by a signal after step 7");
        let tally = tally(1, &[3.0; 1]);
        let overview = Overview::default();
        let ending = Ending {
            done: 1,
            reason: Reason::Complete,
            saved: None,
            best: None,
            out: Path::new("/out"),
            has_timeline: false,
        };
        let text = summary(&overview, &tally, &ending, 80);
        let end = "no checkpoint was kept; --set run.checkpoint_every=N keeps some
  pipewright report /out -o /out/report.html  makes a page about the run";
        assert!(text.ends_with(end), "{text}");
        assert!(!text.contains("guessing"), "{text}");
    }

    #[test]
    fn a_long_run_has_a_curve() {
        let falling: Vec<f64> = (0..100).map(|step| 6.0 - f64::from(step) / 25.0).collect();
        let overview = Overview { frequency_loss: 3.0, ..Overview::default() };
        let ending = Ending {
            done: 100,
            reason: Reason::Complete,
            saved: None,
            best: None,
            out: Path::new("/out"),
            has_timeline: false,
        };
        let at = |columns| summary(&overview, &tally(1, &falling), &ending, columns);
        for columns in [50, 80, 120] {
            let text = at(columns);
            assert!(text.contains("┤") && text.contains("· by frequency\n"), "{text}");
            let mut chart = text.lines().filter(|line| line.contains('┤'));
            assert!(chart.all(|line| line.chars().count() < columns), "{text}");
        }
        assert!(at(80).contains("  6.00 ┤"), "{}", at(80));
        assert!(!at(30).contains('┤'), "{}", at(30));
    }
}
