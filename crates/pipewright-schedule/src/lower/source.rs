//! The way from a schedule's name, a schedule or the rows of a file to the program that runs.
//!
//! Every caller that runs, predicts or draws a program makes it here, so that all of them have the same one.
//!
//! Rules: (1) a name is generated; (2) rows that send or receive are not changed; (3) other rows are proved
//! sound before they are lowered, so that violations name the places in these rows; (4) lowering adds what
//! the rows do not have ([`lower_rows`]); (5) the program is proved sound at its level ([`Program::level`]).

use thiserror::Error;

use crate::generate::{GenerateError, ScheduleSpec, generate};
use crate::level::Level;
use crate::lower::error::LowerError;
use crate::lower::passes::{LowerConfig, lower, lower_rows};
use crate::schedule::{Program, Schedule};
use crate::validate::{ValidatedProgram, Violations, check, validate};

/// The source of a program.
///
/// ```
/// use pipewright_schedule::lower::{ProgramSource, TrainingLowering};
/// use pipewright_schedule::{Level, LowerConfig, csv};
/// let rows = csv::parse_program("0F0,0B0\n1UNSHARD,1F0,1B0\n")?;
/// let passes = LowerConfig::from(TrainingLowering::default());
/// let program = ProgramSource::Rows(rows).program(&passes)?;
/// assert_eq!(program.level(), Level::Comms);
/// let rank_1 = "1RECV_F0,1UNSHARD,1F0,1I0,1SEND_B0,1W0";
/// assert_eq!(csv::print_program(program.as_program()).lines().nth(1), Some(rank_1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum ProgramSource {
    /// A schedule of the [`catalogue`](crate::generate::catalogue), by its name, with its size and settings.
    Named(String, Box<ScheduleSpec>),
    /// A schedule that a generator or a plan has made. It is proved sound only after it is lowered.
    Schedule(Schedule),
    /// The user's own rows, such as the rows of a file, without bubbles and at any level.
    Rows(Program),
}

/// A program that is not proved sound yet, and the level at which it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    program: Program,
    level: Level,
}

/// The errors of making a program.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum SourceError {
    /// The name has no schedule, or none of this size.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The rows are unsound, or become so.
    #[error(transparent)]
    Lower(#[from] LowerError),
}

crate::error_text::message_as_debug!(SourceError);

impl ProgramSource {
    /// Generates the schedule of a name. Other sources do not change.
    ///
    /// # Errors
    /// When there is no such schedule, or none of this size.
    pub fn generated(self) -> Result<Self, GenerateError> {
        match self {
            Self::Named(name, spec) => Ok(Self::Schedule(generate(&name, &spec)?)),
            made => Ok(made),
        }
    }

    /// Returns the computation of the ranks, without communication.
    ///
    /// # Errors
    /// When a name has no schedule of its size.
    pub fn computation(&self) -> Result<Schedule, GenerateError> {
        match self {
            Self::Named(name, spec) => generate(name, spec),
            Self::Schedule(schedule) => Ok(schedule.clone()),
            Self::Rows(rows) => Ok(rows.computation()),
        }
    }

    /// Lowers the source with `passes`. Rows that communicate are not changed.
    ///
    /// # Errors
    /// When a name has no schedule of its size, when rows are unsound, or when their ranks wait for each
    /// other.
    pub fn lowered(self, passes: &LowerConfig) -> Result<Lowered, SourceError> {
        let program = match self {
            Self::Named(name, spec) => lower(&generate(&name, &spec)?, passes)?,
            Self::Schedule(schedule) => lower(&schedule, passes)?,
            Self::Rows(rows) if rows.communicates() => rows,
            Self::Rows(rows) => lower_rows(sound(rows)?, passes)?,
        };
        Ok(Lowered::by(passes, program))
    }

    /// Makes the program: generates, lowers and proves it.
    ///
    /// # Errors
    /// When [`lowered`](Self::lowered) fails, or the program is unsound.
    pub fn program(self, passes: &LowerConfig) -> Result<ValidatedProgram, SourceError> {
        Ok(self.lowered(passes)?.validated().map_err(LowerError::Invalid)?)
    }
}

impl Lowered {
    /// Returns what `passes` have made. The level is its own, and at least the level of the passes. If the
    /// passes gather parameters, rows that gather some of theirs must gather all.
    pub(super) fn by(passes: &LowerConfig, program: Program) -> Self {
        let own = program.level();
        // Without sums of gradients, stages read frozen matrices, which only some of them may have.
        let shards = passes.unshard.is_some() && passes.reduce_grad.is_some();
        let level = match passes.communicate {
            Some(_) if shards && program.gathers() => Level::Full,
            Some(_) => own.max(Level::Comms),
            None => own,
        };
        Self { program, level }
    }

    /// Returns the program without a proof.
    pub fn into_program(self) -> Program {
        self.program
    }

    /// Proves the program sound at its level.
    ///
    /// # Errors
    /// All violations with their places.
    pub fn validated(self) -> Result<ValidatedProgram, Violations> {
        validate(self.program, self.level)
    }
}

/// Returns the rows if they are sound as they are.
fn sound(rows: Program) -> Result<Program, LowerError> {
    let report = check(&rows, Level::Compute);
    if report.total() > 0 {
        return Err(LowerError::Invalid(report.into_violations(rows)));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};
    use crate::lower::{TrainingLowering, UnshardConfig};

    fn check(rows: &str, lowering: TrainingLowering, expected: Result<(Level, &str), &str>) {
        let rows = parse_program(rows).expect("rows");
        let found = ProgramSource::Rows(rows).program(&LowerConfig::from(lowering));
        let found = found.map(|program| (program.level(), print_program(program.as_program())));
        match (found, expected) {
            (Ok((level, text)), Ok(expected)) => assert_eq!((level, text.as_str()), expected),
            (Err(error), Err(message)) => assert!(error.to_string().contains(message), "{error}"),
            (found, expected) => panic!("{found:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn a_name_a_schedule_and_its_rows_make_one_program() {
        let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
        let named = ProgramSource::Named("1F1B".to_owned(), Box::new(spec.clone()));
        let passes = LowerConfig::from(TrainingLowering::default());
        let schedule = generate("1f1b", &spec).expect("a schedule");
        let rows = ProgramSource::Rows(crate::lower::drop_bubbles(&schedule));
        let program = named.clone().program(&passes).expect("a program");
        assert_eq!(named.generated(), Ok(ProgramSource::Schedule(schedule.clone())));
        assert_eq!(ProgramSource::Schedule(schedule).program(&passes), Ok(program.clone()));
        assert_eq!(rows.program(&passes), Ok(program.clone()));
        let lowered = ProgramSource::Rows(program.as_program().clone());
        assert_eq!(lowered.program(&passes), Ok(program), "rows with messages do not change");
    }

    #[test]
    fn passes_for_what_the_rows_have_are_left_out() {
        let plain = TrainingLowering::default();
        let replicas = TrainingLowering { replicas: 2, ..plain.clone() };
        check("0UNSHARD,0F0,0B0\n", plain, Ok((Level::Comms, "0UNSHARD,0F0,0B0\n")));
        check("0F0,0B0,0REDUCE_GRAD\n", replicas.clone(), Ok((Level::Comms, "0F0,0B0,0REDUCE_GRAD\n")));
        let sharded = TrainingLowering { unshard_window: Some(UnshardConfig::default().window), ..replicas };
        check(
            "0UNSHARD,0F0,0B0\n",
            sharded.clone(),
            Ok((Level::Full, "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n")),
        );
        check("0UNSHARD,0F0,1F0,1B0,0B0\n", sharded, Err("1F0"));
    }

    #[test]
    fn violations_name_the_places_of_the_rows() {
        let message = "the first: rank 1, position 1: 1B0 needs 1F0, which comes only at position 2";
        check("0F0,0B0\n1UNSHARD,1B0,1F0\n", TrainingLowering::default(), Err(message));
        let unsound = "0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
        check(unsound, TrainingLowering::default(), Err("rank 0, position 2: 0B0 needs 0RECV_B0"));
    }
}
