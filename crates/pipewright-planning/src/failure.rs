//! The failure of a command: an exit code for scripts, and messages for people.

use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal};

use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, SourceCode};
use pipewright_document::text::escape;
use pipewright_document::{Place, Problem, Problems};
pub use pipewright_schedule::error_text::with_causes as sentence;
pub use pipewright_system::failure::{ErrorKind as Exit, Failure};
use pipewright_system::failure::{MOST_PROBLEMS, more_problems};

use crate::screen;

/// Writes the report of a failure to standard error, unless it has been written, or another process of the run
/// writes it.
pub fn report(failure: &Failure) {
    if failure.is_reported() {
        return;
    }
    let is_terminal = io::stderr().is_terminal();
    let handler = handler(is_terminal, std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()));
    let mut text = escape(failure.context()).into_owned();
    let mut write = |problem: &dyn Diagnostic| {
        let (mut rendered, problem) = (String::new(), Shown(problem));
        // Writing to a string does not fail, but rendering a diagnostic may fail.
        if handler.render_report(&mut rendered, &problem).is_err() {
            rendered = format!("error: {problem}\n");
        }
        text.push_str(rendered.trim_start());
    };
    match failure.cause().and_then(|cause| cause.downcast_ref::<Problems>()) {
        Some(Problems(problems)) => {
            problems.iter().take(MOST_PROBLEMS).for_each(|problem| write(&Mistake(problem)));
            more_problems(problems.len()).into_iter().for_each(|more| write(&MietteDiagnostic::new(more)));
        }
        _ => write(&MietteDiagnostic::new(failure.text())),
    }
    screen::print_error(&text);
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

/// A mistake in a document, shown with its line.
#[derive(Debug)]
struct Mistake<'a>(&'a Problem);

/// The longest line of a file that is shown, in bytes. The message has the place of a mistake in any case.
const LONGEST_LINE: usize = 4096;

impl fmt::Display for Mistake<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Mistake<'_> {}

impl Diagnostic for Mistake<'_> {
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
