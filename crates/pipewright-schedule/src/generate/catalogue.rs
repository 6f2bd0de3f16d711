//! The list of all generators, and the look-up by name.

use crate::generate::spec::{GenerateError, ScheduleSpec};
use crate::generate::{forward_only, gpipe, one_f_one_b};
use crate::schedule::Schedule;

/// Every generator, in the order in which a user reads them.
const CATALOGUE: &[Generator] = &[forward_only::GENERATOR, gpipe::GENERATOR, one_f_one_b::GENERATOR];

/// A schedule that can be asked for by name.
#[derive(Debug, Clone, Copy)]
pub struct Generator {
    /// The name, in lower case.
    pub name: &'static str,
    /// What the schedule is good for, in one line.
    pub summary: &'static str,
    /// Makes the schedule for a size, or says why it cannot.
    pub(super) generate: fn(&ScheduleSpec) -> Result<Schedule, GenerateError>,
}

/// Every schedule that can be asked for.
pub fn catalogue() -> &'static [Generator] {
    CATALOGUE
}

/// Makes the schedule called `name`, without regard to case.
///
/// # Errors
/// When there is no such schedule, or it does not exist at this size.
pub fn generate(name: &str, spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let found = CATALOGUE.iter().find(|generator| generator.name.eq_ignore_ascii_case(name));
    let generator = found.ok_or_else(|| unknown_schedule(name))?;
    (generator.generate)(spec)
}

fn unknown_schedule(name: &str) -> GenerateError {
    let name: String = name.chars().take(64).collect();
    let suggestion = CATALOGUE
        .iter()
        .map(|generator| (strsim::damerau_levenshtein(generator.name, &name.to_lowercase()), generator.name))
        .min()
        .filter(|&(distance, known)| distance <= 1 + known.len() / 4)
        .map(|(_, known)| known);
    GenerateError::UnknownSchedule { name, suggestion }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_unknown(name: &str, message: &str) {
        let spec = ScheduleSpec { ranks: 1, stages_per_rank: None, microbatches: 1 };
        assert_eq!(generate(name, &spec).expect_err(name).to_string(), message);
    }

    #[test]
    fn case_does_not_matter() {
        let spec = ScheduleSpec { ranks: 2, stages_per_rank: None, microbatches: 2 };
        assert_eq!(generate("GPipe", &spec), generate("gpipe", &spec));
        assert!(generate("ForwardOnly", &spec).is_ok());
    }

    #[test]
    fn near_names_are_offered() {
        check_unknown("gpip", "unknown schedule `gpip`; did you mean `gpipe`?");
        check_unknown("1F2B", "unknown schedule `1F2B`; did you mean `1f1b`?");
        check_unknown("zigzag", "unknown schedule `zigzag`; the schedules are forwardonly, gpipe, 1f1b");
    }
}
