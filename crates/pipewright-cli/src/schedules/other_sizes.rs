//! The programs of a schedule for other numbers of microbatches, which a page can simulate.

use pipewright_schedule::Program;

/// The most actions of all programs together: a page with more loads slowly.
const MOST_ACTIONS: usize = 300_000;
/// The most programs.
const MOST_PROGRAMS: usize = 64;

/// Returns programs for numbers of microbatches up to four times the number of `program`: every number if
/// there are few, else in equal steps. `make` returns nothing for a number that the schedule does not
/// support. If there is not enough room for all, the programs with the nearest numbers are kept.
pub(crate) fn other_sizes(program: &Program, make: impl Fn(u32) -> Option<Program>) -> Vec<Program> {
    let own = program.microbatches() / program.slices().get();
    let most = own.saturating_mul(4);
    let step = if most as usize <= MOST_PROGRAMS { 1 } else { (own / 8).max(1) };
    let mut counts: Vec<u32> = (1..=most)
        .step_by(step as usize)
        .map(|count| count - 1 + step)
        .filter(|&count| count != own)
        .collect();
    counts.sort_by_key(|count| count.abs_diff(own));
    let length = |program: &Program| program.rows().iter().map(Vec::len).sum::<usize>();
    let mut room = MOST_ACTIONS.saturating_sub(length(program));
    let mut programs = Vec::new();
    for made in counts.into_iter().filter_map(make) {
        match room.checked_sub(length(&made)) {
            Some(left) => room = left,
            None => break,
        }
        programs.push(made);
    }
    programs
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, generate, lower};

    fn made(ranks: u32, microbatches: u32) -> Option<Program> {
        let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
        lower(&generate("1f1b", &spec).ok()?, &LowerConfig::from(Level::Comms)).ok()
    }

    #[test]
    fn all_numbers_of_a_small_schedule_and_the_nearest_of_a_large_one() {
        let counts = |ranks, own| -> Vec<u32> {
            let programs = other_sizes(&made(ranks, own).expect("a program"), |count| made(ranks, count));
            let mut counts: Vec<u32> = programs.iter().map(Program::microbatches).collect();
            counts.sort_unstable();
            counts
        };
        assert_eq!(counts(4, 6), (1..=24).filter(|&count| count != 6).collect::<Vec<u32>>());
        assert_eq!(
            counts(2, 64),
            (1..=32).map(|part| part * 8).filter(|&count| count != 64).collect::<Vec<u32>>()
        );
        assert_eq!(counts(64, 256), [224, 288]);
    }
}
