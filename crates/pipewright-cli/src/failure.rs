//! How a command fails: an exit code that scripts rely on, and problems that people read.

use std::fmt::Display;
use std::io::IsTerminal;
use std::process::ExitCode;

use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, MietteDiagnostic};
use pipewright_schedule::Rank;

use crate::config::ConfigError;
use crate::display::screen;

/// Why the command ends with another code than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Arguments, configuration, a schedule or data are wrong. Clap uses the same code.
    WrongInput = 2,
    /// A check said no.
    CheckFailed = 3,
    /// A rank failed or a peer was lost.
    RankFailed = 4,
    /// Stopped by a signal, after saving a checkpoint.
    Interrupted = 5,
    /// A bug of ours.
    Bug = 70,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// What went wrong, and the exit code for it.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// Whether it has been shown, or another process of the run shows it.
    is_told: bool,
    /// The rank whose loss it is.
    lost: Option<Rank>,
    problems: Vec<Box<dyn Diagnostic + Send + Sync>>,
}

impl Failure {
    /// A failure that one sentence tells.
    pub(crate) fn new(exit: Exit, message: impl Display) -> Self {
        Self {
            exit,
            is_told: false,
            lost: None,
            problems: vec![Box::new(MietteDiagnostic::new(message.to_string()))],
        }
    }

    /// An end that was told already.
    pub(crate) fn told(exit: Exit) -> Self {
        Self { exit, is_told: true, lost: None, problems: Vec::new() }
    }

    /// Wrong input, told in one sentence.
    pub(crate) fn input(message: impl Display) -> Self {
        Self::new(Exit::WrongInput, message)
    }

    /// The same failure, as the loss of a rank.
    pub(crate) fn loss_of(self, lost: Option<Rank>) -> Self {
        Self { lost, ..self }
    }

    /// The rank whose loss it is.
    pub(crate) fn lost(&self) -> Option<Rank> {
        self.lost
    }

    /// The same failure, told by another process of the run.
    pub(crate) fn told_elsewhere(self) -> Self {
        Self { is_told: true, ..self }
    }

    /// All problems in plain words.
    pub(crate) fn text(&self) -> String {
        self.problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    /// Shows all problems on standard error, once, unless another process does.
    pub(crate) fn report(&mut self) {
        if std::mem::replace(&mut self.is_told, true) {
            return;
        }
        let is_terminal = std::io::stderr().is_terminal();
        let handler = handler(is_terminal, std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()));
        let mut text = String::new();
        for problem in &self.problems {
            let mut rendered = String::new();
            // Rendering writes to a string; what is lost if it fails still has its plain message.
            if handler.render_report(&mut rendered, problem.as_ref()).is_err() {
                rendered = format!("error: {problem}\n");
            }
            text.push_str(rendered.trim_start());
        }
        screen::print_error(&text);
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Read { .. } => Self::input(error),
            ConfigError::Problems(problems) => Self {
                exit: Exit::WrongInput,
                is_told: false,
                lost: None,
                problems: problems.into_iter().map(|problem| Box::new(problem) as _).collect(),
            },
        }
    }
}

/// Messages stay on one line each, so that scripts and editors find places in them.
fn handler(is_terminal: bool, has_colour: bool) -> GraphicalReportHandler {
    let mut theme = match (is_terminal, has_colour) {
        (true, true) => GraphicalTheme::unicode(),
        (true, false) => GraphicalTheme::unicode_nocolor(),
        (false, _) => GraphicalTheme::none(),
    };
    theme.characters.error = "error:".into();
    GraphicalReportHandler::new_themed(theme).with_wrap_lines(false).with_links(false).without_cause_chain()
}
