//! The verdict on a program for one communicator.

use std::fmt;

use crate::communicator::crossing::{Crossing, crossings};
use crate::communicator::hang::{Hold, cycle};
use crate::communicator::model::Communicator;
use crate::communicator::run::Run;
use crate::level::Level;
use crate::schedule::Program;
use crate::validate::{Violations, check_content};

/// The number of crossed messages that a verdict lists for each directed pair of ranks.
const LISTED: usize = 4;

/// The number of actions of a cycle that are printed. A thousand ranks may wait in one cycle.
const HOLDS: usize = 16;

/// Whether a program finishes on a communicator, and whether every receive gets its tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The first receives that get the tensor of another message, for each directed pair of ranks.
    pub crossings: Vec<Crossing>,
    /// The number of all receives that get the tensor of another message.
    pub crossed: u64,
    /// The actions that wait for each other, each for the next one and the last one for the first; empty if
    /// the program finishes.
    pub cycle: Vec<Hold>,
}

impl Verdict {
    /// Returns whether the program finishes and every receive gets its tensor.
    pub fn is_sound(&self) -> bool {
        self.crossed == 0 && self.cycle.is_empty()
    }

    /// Returns the verdict in a few words: `sound`, `may hang`, `crossed`, or `crossed, may hang`. A library
    /// may buffer more than the communicator promises, so a hang is not certain.
    pub fn word(&self) -> &'static str {
        match (self.crossed, self.cycle.is_empty()) {
            (0, true) => "sound",
            (0, false) => "may hang",
            (_, true) => "crossed",
            (_, false) => "crossed, may hang",
        }
    }

    /// Returns the first crossed message, or the cycle of actions, on one line; `None` if the program is sound.
    pub fn reason(&self) -> Option<String> {
        let crossing = self.crossings.first().map(ToString::to_string);
        crossing.or_else(|| {
            let cycle: Vec<String> = self.cycle.iter().take(HOLDS).map(ToString::to_string).collect();
            (!cycle.is_empty()).then(|| cycle.join("; "))
        })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        for crossing in &self.crossings {
            write!(f, "\n  {crossing}")?;
        }
        let more = self.crossed - self.crossings.len() as u64;
        if more > 0 {
            write!(f, "\n  and {more} more")?;
        }
        for hold in self.cycle.iter().take(HOLDS) {
            write!(f, "\n  {hold}")?;
        }
        match self.cycle.len().saturating_sub(HOLDS) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more, and the last one waits for the first"),
        }
    }
}

/// Judges `program`, which communicates (its level is not [`Level::Compute`]), on `communicator`. At the
/// level `compute` there are no messages, and the verdict is `sound`.
///
/// # Errors
/// The violations of the rules that do not depend on the communicator: missing, doubled or misplaced actions,
/// messages with one end, and parameters that are not gathered. They contain the program.
pub fn judge(program: &Program, level: Level, communicator: &Communicator) -> Result<Verdict, Violations> {
    let report = check_content(program, level);
    if report.total() > 0 {
        return Err(report.into_violations(program.clone()));
    }
    if level == Level::Compute {
        return Ok(Verdict::default());
    }
    let is_tagged = communicator.streams.is_tagged();
    let (crossings, crossed) = if is_tagged { (Vec::new(), 0) } else { crossings(program, LISTED) };
    let run = Run::execute(program, communicator);
    let cycle = cycle(&run, communicator.streams, program.placement().all_ranks());
    Ok(Verdict { crossings, crossed, cycle })
}
