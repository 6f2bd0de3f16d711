//! [`Failure`]: why a command or a run ends without success, with the exit code of its process.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;

use pipewright_document::{Problem, Problems};
use pipewright_schedule::error_text::with_causes;

use crate::config_file::ConfigError;
use crate::schedule_memory::OutOfMemory;

/// The most mistakes in one input that a report shows. The input may not be a configuration at all.
pub const MOST_PROBLEMS: usize = 50;

/// The kinds of errors that callers treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Settings, a schedule, a model or data are wrong.
    WrongInput,
    /// A check failed.
    CheckFailed,
    /// A rank failed or a peer was lost.
    RankFailed,
    /// The run was stopped on request, after it had saved a checkpoint.
    Interrupted,
    /// A bug of Pipewright.
    Bug,
}

/// The exit codes of the command for the kinds, in words too. Clap uses the same code for wrong arguments.
const EXIT_CODES: [(ErrorKind, u8, &str); 5] = [
    (ErrorKind::WrongInput, 2, "wrong input"),
    (ErrorKind::CheckFailed, 3, "a check failed"),
    (ErrorKind::RankFailed, 4, "a rank failed"),
    (ErrorKind::Interrupted, 5, "stopped by a signal after saving a checkpoint"),
    (ErrorKind::Bug, 70, "a bug of Pipewright"),
];

/// Returns the sentence about all exit codes.
pub fn exit_codes() -> String {
    let codes: Vec<String> =
        EXIT_CODES.iter().map(|(_, code, meaning)| format!("{code} {meaning}")).collect();
    format!("Exit codes: 0 done; {}.", codes.join("; "))
}

impl ErrorKind {
    /// Returns the exit code of a process of a run that ends with such an error.
    pub fn exit_code(self) -> u8 {
        EXIT_CODES.iter().find(|(kind, ..)| *kind == self).map_or(70, |(_, code, _)| *code)
    }

    /// Returns the kind of the error with which a process has ended.
    pub fn of_exit_code(code: i32) -> Option<Self> {
        EXIT_CODES.iter().find(|(_, known, _)| i32::from(*known) == code).map(|(kind, ..)| *kind)
    }
}

/// The reason why a command or a run ends without success. [`Failure::text`] says where and why, with all causes.
pub struct Failure {
    /// The kind.
    pub kind: ErrorKind,
    /// Whether the error has already been reported, or another process of the run reports it.
    is_reported: bool,
    /// What the library that failed adds for its callers.
    detail: Option<Box<dyn Any + Send + Sync>>,
    /// Lines that a report begins with, so that the sentence is the last thing on a screen.
    context: String,
    sentence: String,
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// Returns an error from its cause or from a sentence. If a full disk or a limit on files is the cause, the text
    /// says what to do.
    pub fn new(kind: ErrorKind, error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let cause: Box<dyn Error + Send + Sync> = error.into();
        let mut sentence = with_causes(cause.as_ref());
        if let Some(advice) = advice_for(cause.as_ref())
            .filter(|advice| !sentence.contains("free ") && !sentence.contains(*advice))
        {
            sentence = format!("{sentence}; {advice}");
        }
        Self { is_reported: false, sentence, cause: Some(cause), ..Self::already_reported(kind) }
    }

    /// Returns an error that has been reported already.
    pub fn already_reported(kind: ErrorKind) -> Self {
        Self {
            kind,
            is_reported: true,
            detail: None,
            context: String::new(),
            sentence: String::new(),
            cause: None,
        }
    }

    /// Returns an error of the kind [`ErrorKind::WrongInput`].
    pub fn input(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(ErrorKind::WrongInput, error)
    }

    /// Returns the error of a file or a folder that cannot be written. `otherwise` is the advice if neither a full
    /// disk nor a limit is the reason.
    pub fn unwritten(path: &Path, error: &io::Error, otherwise: &str) -> Self {
        let advice = disk_advice(error).unwrap_or(otherwise);
        Self::input(format!("{}: cannot be written: {error}; {advice}", path.display()))
    }

    /// Returns the same error with lines that its report begins with.
    pub fn below(self, context: String) -> Self {
        Self { context, ..self }
    }

    /// Returns the same error with further lines at the beginning of its report.
    pub fn under(self, lines: String) -> Self {
        Self { context: lines + &self.context, ..self }
    }

    /// Returns the same error with what callers may want to know besides its text, in place of what it had.
    pub fn with_detail<T: Any + Send + Sync>(self, detail: T) -> Self {
        Self { detail: Some(Box::new(detail)), ..self }
    }

    /// Returns what [`Self::with_detail`] has added, if that is a `T`.
    pub fn detail<T: Any>(&self) -> Option<&T> {
        self.detail.as_ref()?.downcast_ref()
    }

    /// Returns the same error as one that another process or the caller reports.
    pub fn reported_elsewhere(self) -> Self {
        Self { is_reported: true, ..self }
    }

    /// Returns whether the error has already been reported, or another process reports it.
    pub fn is_reported(&self) -> bool {
        self.is_reported
    }

    /// Returns the lines that a report begins with.
    pub fn context(&self) -> &str {
        &self.context
    }

    /// Returns where and why the run failed, with all causes, without the lines above it.
    pub fn text(&self) -> String {
        self.sentence.clone()
    }

    /// Returns the lines that a report begins with, and the text.
    pub fn full_text(&self) -> String {
        format!("{}{}", self.context, self.sentence)
    }

    /// Returns the error that this one was made from. Its message and its causes are in the text.
    pub fn cause(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.cause.as_deref()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

// The message has all causes. [`Failure::cause`] returns the error itself.
impl Error for Failure {}

pipewright_schedule::message_as_debug!(Failure);

impl From<OutOfMemory> for Failure {
    fn from(error: OutOfMemory) -> Self {
        Self::new(ErrorKind::CheckFailed, error)
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
    fn from(problems: Problems) -> Self {
        // A schedule that does not fit into memory is not a mistake in what is written.
        let is_memory =
            |problem: &Problem| problem.cause.as_ref().is_some_and(|cause| cause.is::<OutOfMemory>());
        let fits_not = problems.0.iter().all(is_memory);
        let kind = if fits_not { ErrorKind::CheckFailed } else { ErrorKind::WrongInput };
        let mut lines: Vec<String> = problems.0.iter().take(MOST_PROBLEMS).map(Problem::text).collect();
        lines.extend(more_problems(problems.0.len()));
        Self { sentence: lines.join("\n"), ..Self::new(kind, problems) }
    }
}

/// Returns the sentence about the mistakes of `count` that a report does not show, if there are any.
pub fn more_problems(count: usize) -> Option<String> {
    let more = count.saturating_sub(MOST_PROBLEMS);
    (more > 0).then(|| format!("{more} more mistakes in the same input are not shown"))
}

/// Returns what a user can do about a disk, a quota or a limit on files that an error names.
pub fn disk_advice(error: &io::Error) -> Option<&'static str> {
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

/// Returns the advice for an error or for the first of its causes that has some.
pub fn advice_for(error: &(dyn Error + 'static)) -> Option<&'static str> {
    std::iter::successors(Some(error), |&error| error.source())
        .find_map(|error| disk_advice(error.downcast_ref::<io::Error>()?))
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
        assert_eq!(Failure::input(chain.expect("a message")).text(), expected);
    }

    #[test]
    fn every_cause_is_named_once() {
        check(&["a.json: cannot be read"], "a.json: cannot be read");
        check(&["a.json: cannot be read", "no such file"], "a.json: cannot be read: no such file");
        check(&["a: b: c", "b: c", "c", "d"], "a: b: c: d");
    }
}
