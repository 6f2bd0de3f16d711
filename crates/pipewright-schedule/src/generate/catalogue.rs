//! The list of all generators, and the lookup by name.

use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::{
    dual_pipe_v, forward_only, gpipe, group_interleaved, hanayo, interleaved_1f1b, interleaved_zb_h1,
    interleaved_zero_bubble, looped_bfs, one_f_one_b, v_half, v_min, zb_greedy, zb_h1, zb_h2,
    zbv_zero_bubble,
};
use crate::schedule::Schedule;

/// Every generator, in the order in which a user reads them.
const CATALOGUE: &[Generator] = &[
    forward_only::GENERATOR,
    gpipe::GENERATOR,
    one_f_one_b::GENERATOR,
    looped_bfs::GENERATOR,
    interleaved_1f1b::GENERATOR,
    interleaved_zero_bubble::GENERATOR,
    zbv_zero_bubble::GENERATOR,
    dual_pipe_v::GENERATOR,
    zb_h1::GENERATOR,
    zb_h2::GENERATOR,
    interleaved_zb_h1::GENERATOR,
    v_half::GENERATOR,
    v_min::GENERATOR,
    group_interleaved::GENERATOR,
    hanayo::GENERATOR,
    zb_greedy::GENERATOR,
];

/// Returns all generators, in the order in which a user reads them.
pub fn catalogue() -> &'static [Generator] {
    CATALOGUE
}

/// Makes the schedule called `name`, without regard to case.
///
/// # Errors
/// When there is no such schedule, when it does not support this size, or when it does not have a given setting.
pub fn generate(name: &str, spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let found = CATALOGUE.iter().find(|generator| generator.name.eq_ignore_ascii_case(name));
    let generator = found.ok_or_else(|| unknown_schedule(name))?;
    let unused = Setting::ALL.into_iter().find(|it| spec.gives(*it) && !generator.settings.contains(it));
    if let Some(setting) = unused {
        return Err(GenerateError::UnusedSetting { schedule: generator.name, setting });
    }
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
    let known = CATALOGUE.iter().map(|generator| generator.name).collect();
    GenerateError::UnknownSchedule { name, suggestion, known }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_unknown(name: &str, message: &str) {
        let spec = ScheduleSpec { ranks: 1, microbatches: 1, ..ScheduleSpec::default() };
        assert_eq!(generate(name, &spec).expect_err(name).to_string(), message);
    }

    #[test]
    fn case_does_not_matter() {
        let spec = ScheduleSpec { ranks: 2, microbatches: 2, ..ScheduleSpec::default() };
        assert_eq!(generate("GPipe", &spec), generate("gpipe", &spec));
        assert!(generate("ForwardOnly", &spec).is_ok());
    }

    #[test]
    fn near_names_are_offered() {
        check_unknown("gpip", "unknown schedule `gpip`; did you mean `gpipe`?");
        check_unknown("1F2B", "unknown schedule `1F2B`; did you mean `1f1b`?");
        let spec = ScheduleSpec { ranks: 1, microbatches: 1, ..ScheduleSpec::default() };
        let far = generate("zigzag", &spec).expect_err("no such schedule").to_string();
        assert!(far.starts_with("unknown schedule `zigzag`; the schedules are forwardonly, gpipe, 1f1b, "));
    }

    #[test]
    fn a_setting_of_another_schedule_is_refused() {
        let spec = ScheduleSpec { ranks: 2, microbatches: 4, group: Some(2), ..ScheduleSpec::default() };
        let message = "`gpipe` has no setting `group`; leave it out";
        assert_eq!(generate("gpipe", &spec).map_err(|error| error.to_string()), Err(message.to_owned()));
        assert!(generate("group-interleaved", &spec).is_ok());
    }
}
