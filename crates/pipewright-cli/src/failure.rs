//! The failure of a command: an exit code for scripts, and messages for people.

use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;

use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, SourceCode};
use pipewright::ids::WorldRank;
use pipewright_document::{Place, Problem, Problems};
pub(crate) use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_system::schedule_memory::OutOfMemory;

use crate::display::screen;
use crate::fault::Fault;
use pipewright_run::settings::ConfigError;
use pipewright_run::text::escape;

/// The most mistakes in a configuration or a profile that are shown. The input may not be such a file at all.
const MOST_PROBLEMS: usize = 50;

/// The reason why the command ends with a code other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Arguments, configuration, a schedule or data are wrong. Clap uses the same code.
    WrongInput = 2,
    /// A check failed.
    CheckFailed = 3,
    /// A rank failed or a peer was lost.
    RankFailed = 4,
    /// A signal stopped the command: a run after it had saved a checkpoint, or `tokenize`.
    Interrupted = 5,
    /// A bug of Pipewright.
    Bug = 70,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The problems that ended the command, and the exit code for them.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// Whether the failure has already been written, or another process of the run writes it.
    is_reported: bool,
    /// The lost rank, if the failure is the loss of a rank.
    lost: Option<WorldRank>,
    /// The fault after which the run may continue, if it is one.
    fault: Option<Box<Fault>>,
    /// Lines that are printed above the problems, so that the problems are the last thing on a screen.
    context: String,
    problems: Vec<Box<dyn Diagnostic + Send + Sync>>,
}

impl Failure {
    /// Returns a failure with one message: an error with all its causes, or a sentence. If a full disk or a limit on
    /// files is the cause, the message says what to do.
    pub(crate) fn new(exit: Exit, error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let error: Box<dyn Error + Send + Sync> = error.into();
        let mut message = sentence(error.as_ref());
        if let Some(advice) = advice_for(error.as_ref())
            .filter(|advice| !message.contains("free ") && !message.contains(*advice))
        {
            message = format!("{message}; {advice}");
        }
        Self {
            exit,
            is_reported: false,
            lost: None,
            fault: None,
            context: String::new(),
            problems: vec![Box::new(MietteDiagnostic::new(message))],
        }
    }

    /// Returns a failure that has been reported already.
    pub(crate) fn already_reported(exit: Exit) -> Self {
        Self {
            exit,
            is_reported: true,
            lost: None,
            fault: None,
            context: String::new(),
            problems: Vec::new(),
        }
    }

    /// Returns a failure for wrong input, with one message: an error with all its causes, or a sentence.
    pub(crate) fn input(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Exit::WrongInput, error)
    }

    /// Returns the failure of a file or a folder that cannot be written. `otherwise` is the advice if neither a full
    /// disk nor a limit is the reason.
    pub(crate) fn unwritten(path: &Path, error: &io::Error, otherwise: &str) -> Self {
        let advice = disk_advice(error).unwrap_or(otherwise);
        Self::input(format!("{}: cannot be written: {error}; {advice}", path.display()))
    }

    /// Returns the same failure as the loss of a rank.
    pub(crate) fn loss_of(self, lost: Option<WorldRank>) -> Self {
        Self { lost, ..self }
    }

    /// Returns the same failure with lines that its report begins with.
    pub(crate) fn below(self, context: String) -> Self {
        Self { context, ..self }
    }

    /// Returns the same failure as a fault, after which the run may continue; `None` if it may not.
    pub(crate) fn with_fault(self, fault: Option<Fault>) -> Self {
        Self { fault: fault.map(Box::new), ..self }
    }

    /// Returns the fault after which the run may continue, if the failure is one.
    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.fault.as_deref()
    }

    /// Returns the same failure with further lines above its report.
    pub(crate) fn under(self, lines: String) -> Self {
        Self { context: lines + &self.context, ..self }
    }

    /// Returns the lines above the problems, and all problems, as plain text.
    pub(crate) fn full_text(&self) -> String {
        format!("{}{}", self.context, self.text())
    }

    /// Returns the lost rank, if the failure is the loss of a rank.
    pub(crate) fn lost(&self) -> Option<WorldRank> {
        self.lost
    }

    /// Returns the same failure, to be reported by another process of the run.
    pub(crate) fn reported_elsewhere(self) -> Self {
        Self { is_reported: true, ..self }
    }

    /// Returns all problems as plain text.
    pub(crate) fn text(&self) -> String {
        self.problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    /// Writes all problems to standard error. The second call, or a call after another process has written
    /// them, does nothing.
    pub(crate) fn report(&mut self) {
        if std::mem::replace(&mut self.is_reported, true) {
            return;
        }
        let is_terminal = io::stderr().is_terminal();
        let handler = handler(is_terminal, std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()));
        let mut text = escape(&std::mem::take(&mut self.context)).into_owned();
        for problem in &self.problems {
            let mut rendered = String::new();
            // Writing to a string does not fail, but rendering a diagnostic may fail.
            let problem = Shown(problem.as_ref());
            if handler.render_report(&mut rendered, &problem).is_err() {
                rendered = format!("error: {problem}\n");
            }
            text.push_str(rendered.trim_start());
        }
        screen::print_error(&text);
    }
}

/// Returns what to do if a file cannot be written because the disk is full or a limit is reached; `None` for another
/// reason.
pub(crate) fn disk_advice(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::StorageFull => Some("free some space"),
        io::ErrorKind::QuotaExceeded => Some("free some of your space there"),
        // The error of a file that this program refuses as too large to be read has no number.
        io::ErrorKind::FileTooLarge if error.raw_os_error().is_some() => {
            Some("raise the limit on the size of files (`ulimit -f unlimited`)")
        }
        _ => None,
    }
}

/// Returns the advice for an error of the system among an error and its causes.
pub(crate) fn advice_for(error: &(dyn Error + 'static)) -> Option<&'static str> {
    std::iter::successors(Some(error), |&error| error.source())
        .find_map(|error| disk_advice(error.downcast_ref::<io::Error>()?))
}

impl From<OutOfMemory> for Failure {
    fn from(error: OutOfMemory) -> Self {
        Self::new(Exit::CheckFailed, error)
    }
}

/// A problem as it is shown: control characters are escapes.
#[derive(Debug)]
struct Shown<'a>(&'a dyn Diagnostic);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape(&self.0.to_string()))
    }
}

impl Error for Shown<'_> {}

impl Diagnostic for Shown<'_> {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let help = self.0.help()?.to_string();
        Some(Box::new(escape(&help).into_owned()))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.0.source_code()
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.0.labels()
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Read { .. } => Self::input(error),
            ConfigError::Problems(problems) => problems.into(),
        }
    }
}

impl From<Problems> for Failure {
    fn from(Problems(problems): Problems) -> Self {
        // A schedule that does not fit into memory is not a mistake in what is written.
        let is_memory =
            |problem: &Problem| problem.cause.as_ref().is_some_and(|cause| cause.is::<OutOfMemory>());
        let fits_not = problems.iter().all(is_memory);
        let more = problems.len().saturating_sub(MOST_PROBLEMS);
        let shown = problems.into_iter().take(MOST_PROBLEMS);
        let mut shown: Vec<Box<dyn Diagnostic + Send + Sync>> =
            shown.map(|problem| Box::new(Mistake(problem)) as _).collect();
        if more > 0 {
            let message = format!("{more} more mistakes in the same input are not shown");
            shown.push(Box::new(MietteDiagnostic::new(message)));
        }
        Self {
            exit: if fits_not { Exit::CheckFailed } else { Exit::WrongInput },
            is_reported: false,
            lost: None,
            fault: None,
            context: String::new(),
            problems: shown,
        }
    }
}

/// A mistake in a document, shown with its line.
#[derive(Debug)]
struct Mistake(Problem);

/// The longest line of a file that is shown, in bytes. The message has the place of a mistake in any case.
const LONGEST_LINE: usize = 4096;

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Mistake {}

impl Diagnostic for Mistake {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.0.help.as_ref().map(|help| Box::new(help) as _)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        match &self.0.place {
            // The line is shown as it is, so it must not have control characters.
            Place::File { source, .. }
                if self.0.place.line_length() <= LONGEST_LINE && escape(&source.text) == source.text =>
            {
                Some(&source.text)
            }
            _ => None,
        }
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let Place::File { span, .. } = &self.0.place else { return None };
        let label = LabeledSpan::new_primary_with_span(None, (span.start, span.len()));
        Some(Box::new(std::iter::once(label)))
    }
}

/// Returns the renderer of problems. It does not wrap messages, so that scripts and editors find the places
/// in them.
fn handler(is_terminal: bool, has_colour: bool) -> GraphicalReportHandler {
    let mut theme = match (is_terminal, has_colour) {
        (true, true) => GraphicalTheme::unicode(),
        (true, false) => GraphicalTheme::unicode_nocolor(),
        (false, _) => GraphicalTheme::none(),
    };
    theme.characters.error = "error:".into();
    GraphicalReportHandler::new_themed(theme).with_wrap_lines(false).with_links(false).without_cause_chain()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{message}")]
    struct Link {
        message: &'static str,
        source: Option<Box<Link>>,
    }

    fn check(messages: &[&'static str], expected: &str) {
        let chain =
            messages.iter().rev().fold(None, |source, message| Some(Box::new(Link { message, source })));
        assert_eq!(sentence(chain.expect("a message").as_ref()), expected);
    }

    #[test]
    fn every_cause_is_named_once() {
        check(&["a.json: cannot be read"], "a.json: cannot be read");
        check(&["a.json: cannot be read", "no such file"], "a.json: cannot be read: no such file");
        check(&["a: b: c", "b: c", "c", "d"], "a: b: c: d");
    }
}
