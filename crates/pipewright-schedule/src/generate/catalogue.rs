//! The list of all generators, and the lookup by name.

use crate::costs::Costs;
use crate::generate::advice::Advice;
use crate::generate::error::{GenerateError, GenerateErrorKind};
use crate::generate::generator::{Generator, Limits};
use crate::generate::repair::advice;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::{
    dual_pipe_v, forward_only, gpipe, group_interleaved, hanayo, interleaved_1f1b, interleaved_zb_h1,
    interleaved_zero_bubble, looped_bfs, one_f_one_b, seq1f1b, v_half, v_min, vocab_1f1b, zb_greedy, zb_h1,
    zb_h2, zbv_zero_bubble,
};
use crate::pairing::pair_overlaps;
use crate::schedule::{Numbering, Schedule};
use crate::words::nearest;

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
    vocab_1f1b::GENERATOR,
    seq1f1b::GENERATOR,
];

/// Returns all generators, in the order in which a user reads them.
pub fn catalogue() -> &'static [Generator] {
    CATALOGUE
}

/// Returns the generator of the schedule `name`, which may be an alias. Case, hyphens, underscores, spaces
/// and the word `Schedule` before the name, as in PyTorch's classes, do not matter.
///
/// # Errors
/// When there is no such schedule; the error suggests the nearest name.
pub fn find(name: &str) -> Result<&'static Generator, GenerateError> {
    // A search for plans asks for thousands of names, and has them as the catalogue writes them.
    if let Some(generator) = CATALOGUE.iter().find(|generator| generator.name == name) {
        return Ok(generator);
    }
    let sought = normal(name);
    let is_called = |generator: &&Generator| generator.names().any(|known| normal(known) == sought);
    CATALOGUE.iter().find(is_called).ok_or_else(|| unknown_schedule(name))
}

/// Whether the order of the schedule `name` depends on costs.
pub fn depends_on_costs(name: &str) -> bool {
    find(name).is_ok_and(|generator| generator.settings.contains(&Setting::Costs))
}

/// Generates the schedule `name`. If its order depends on costs, `costs` returns them from the schedule at usual costs, because
/// the number of stages may follow from the name.
///
/// ```
/// use pipewright_schedule::generate::generate_at;
/// use pipewright_schedule::{Costs, Schedule, ScheduleSpec, generate};
/// let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
/// let of_model: Costs = "F=2,I=8,W=1".parse()?;
/// let shared = |schedule: &Schedule| of_model.shared(schedule.placement().stages());
/// let expected = generate("zb-greedy", &ScheduleSpec { costs: Some("F=1,I=4,W=0.5".parse()?), ..spec.clone() })?;
/// assert_eq!(generate_at("zb-greedy", spec, shared)?, expected);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As for [`generate`].
pub fn generate_at(
    name: &str,
    spec: ScheduleSpec,
    costs: impl FnOnce(&Schedule) -> Costs,
) -> Result<Schedule, GenerateError> {
    let usual = generate(name, &spec)?;
    if depends_on_costs(name) {
        generate(name, &ScheduleSpec { costs: Some(costs(&usual)), ..spec })
    } else {
        Ok(usual)
    }
}

/// Generates the schedule `name`, which is looked up as in [`find`].
///
/// # Errors
/// When there is no such schedule, when it does not support this size, or when it does not have a given
/// setting. The error has sizes and settings that the schedule accepts.
pub fn generate(name: &str, spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    generate_within(name, spec, Limits::default())
}

/// Generates the schedule `name` for one of several replicas, or for a model with a number of layers.
///
/// # Errors
/// As for [`generate`], and when the schedule has more stages than the model has layers.
pub fn generate_within(name: &str, spec: &ScheduleSpec, limits: Limits) -> Result<Schedule, GenerateError> {
    let generator = find(name)?;
    let stages_per_rank = checked(generator, spec, limits)?;
    let placement = generator.stages.placement(spec.ranks, stages_per_rank);
    // Placements hold more stages than schedules.
    let placement = placement.expect("a number of stages that was checked");
    let (slices, rows) = (generator.slices_of(spec), (generator.generate)(spec, &placement));
    let numbering = Numbering { slices, ..Numbering::of(spec.microbatches * slices.get()) };
    let schedule = Schedule::made(placement, numbering, rows);
    Ok(if spec.overlap { pair_overlaps(schedule) } else { schedule })
}

/// Checks whether [`generate_within`] accepts a size and settings, without making the schedule. It takes no
/// time and allocates only for its errors. Returns the number of stages on each rank.
///
/// # Errors
/// Like [`generate_within`].
pub fn check(name: &str, spec: &ScheduleSpec, limits: Limits) -> Result<u32, GenerateError> {
    checked(find(name)?, spec, limits)
}

/// Returns the most cells that [`generate`] makes for a size, idle ones included. It makes no schedule.
///
/// # Errors
/// Like [`generate`].
pub fn most_cells(name: &str, spec: &ScheduleSpec) -> Result<u64, GenerateError> {
    let generator = find(name)?;
    let stages_per_rank = checked(generator, spec, Limits::default())?;
    // Sizes with more cells than 64 bits hold were refused.
    Ok(generator.most_cells(spec, stages_per_rank, generator.actions) as u64)
}

/// Returns the nearest numbers of microbatches that all replicas share and that the schedule `name` accepts,
/// for a number that they cannot share. `spec` has the number for each replica, rounded down.
pub fn shared_microbatches(name: &str, spec: &ScheduleSpec, limits: Limits) -> Vec<u32> {
    let mut shared = Vec::new();
    for microbatches in [Some(spec.microbatches), spec.microbatches.checked_add(1)].into_iter().flatten() {
        match check(name, &ScheduleSpec { microbatches, ..spec.clone() }, limits) {
            Ok(_) => shared.push(microbatches),
            Err(error) => shared.extend(error.advice.iter().filter_map(microbatches_alone)),
        }
    }
    shared.sort_unstable();
    shared.dedup();
    shared.into_iter().filter_map(|number| number.checked_mul(limits.replicas)).collect()
}

/// Returns the number of microbatches of a piece of advice that changes nothing else.
fn microbatches_alone(advice: &Advice) -> Option<u32> {
    let alone = Advice { microbatches: advice.microbatches, ..Advice::default() };
    advice.microbatches.filter(|_| *advice == alone)
}

fn checked(generator: &Generator, spec: &ScheduleSpec, limits: Limits) -> Result<u32, GenerateError> {
    generator.check(spec, limits.layers).map_err(|kind| {
        let advice = advice(generator, spec, limits, &kind, |name| find(name).ok());
        GenerateError { kind, advice, replicas: limits.replicas }
    })
}

/// Returns a name in lower case, without hyphens, underscores, spaces, and the word `schedule` before it.
fn normal(name: &str) -> String {
    let letters = name.chars().filter(|letter| !matches!(letter, '-' | '_' | ' '));
    let name: String = letters.flat_map(char::to_lowercase).collect();
    name.strip_prefix("schedule").map(str::to_owned).unwrap_or(name)
}

fn unknown_schedule(name: &str) -> GenerateError {
    let name: String = name.chars().take(64).collect();
    let names = CATALOGUE.iter().flat_map(Generator::names);
    let nearest = nearest(&normal(&name), names, |letters| 1 + letters / 4);
    let suggestion = nearest.and_then(|name| find(name).ok()).map(|generator| generator.name);
    let known = CATALOGUE.iter().map(|generator| generator.name).collect();
    GenerateErrorKind::UnknownSchedule { name, suggestion, known }.into()
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
    fn habitual_names_are_understood() {
        let check = |names: &[&str], expected: &str| {
            for name in names {
                assert_eq!(find(name).map(|generator| generator.name), Ok(expected), "{name}");
            }
        };
        check(&["zbv", "ZB-V", "zb_v", "ZBV Zero Bubble"], "zbvzerobubble");
        check(&["dualpipe-v", "DualPipe_V"], "dualpipev");
        check(&["interleaved", "interleaved-1f1b", "vpp"], "interleaved1f1b");
        check(&["zb1p", "ZB-1P", "interleaved-zero-bubble"], "interleavedzerobubble");
        check(&["h1", "zbh1"], "zb-h1");
        check(&["h2", "zb_h2"], "zb-h2");
        check(&["bfs", "looped-bfs"], "loopedbfs");
        check(&["vhalf"], "v-half");
        check(&["vmin"], "v-min");
        check(&["greedy"], "zb-greedy");
        check(&["wave"], "hanayo");
        check(&["vocab", "Vocab-1F1B"], "vocab1f1b");
        check(&["Seq-1F1B", "seq"], "seq1f1b");
        check(&["afab", "AFAB", "ScheduleGPipe"], "gpipe");
        check(&["pipedream", "PipeDream-Flush", "Schedule1F1B"], "1f1b");
        check(&["ScheduleLoopedBFS"], "loopedbfs");
        check(&["ScheduleInterleaved1F1B"], "interleaved1f1b");
        check(&["ScheduleInterleavedZeroBubble"], "interleavedzerobubble");
        check(&["ScheduleZBVZeroBubble"], "zbvzerobubble");
        check(&["ScheduleDualPipeV"], "dualpipev");
    }

    #[test]
    fn no_two_schedules_share_a_name() {
        let mut names: Vec<String> =
            CATALOGUE.iter().flat_map(|generator| generator.names().map(normal)).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn near_names_are_offered() {
        check_unknown("gpip", "unknown schedule `gpip`; did you mean `gpipe`?");
        check_unknown("dualpipe", "unknown schedule `dualpipe`; did you mean `dualpipev`?");
        check_unknown("zbw", "unknown schedule `zbw`; did you mean `zbvzerobubble`?");
        check_unknown("1F2B", "unknown schedule `1F2B`; did you mean `1f1b`?");
        check_unknown("ScheduleGPip", "unknown schedule `ScheduleGPip`; did you mean `gpipe`?");
        let spec = ScheduleSpec { ranks: 1, microbatches: 1, ..ScheduleSpec::default() };
        let far = generate("zigzag", &spec).expect_err("no such schedule").to_string();
        assert!(far.starts_with("unknown schedule `zigzag`; the schedules are forwardonly, gpipe, 1f1b, "));
    }

    #[test]
    fn a_setting_of_another_schedule_is_refused() {
        let spec = ScheduleSpec { ranks: 2, microbatches: 4, group_size: Some(2), ..ScheduleSpec::default() };
        let message = "`gpipe` has no setting `group_size`; leave it out";
        assert_eq!(generate("gpipe", &spec).map_err(|error| error.to_string()), Err(message.to_owned()));
        assert!(generate("group-interleaved", &spec).is_ok());
    }
}
