//! The programs of the short model: all stages on one rank.

use pipewright_schedule::csv::parse_schedule;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{LowerError, TrainedStages, ValidatedProgram};

/// The microbatches of a step.
pub(super) const MICROBATCHES: u32 = 3;

/// Returns the program that runs `F`, `I` and `W` of all stages, as far as `trained` needs them, microbatch
/// by microbatch; with `forwards_first`, all forwards run first, so that no backward follows its own forward
/// at once.
pub(super) fn program(
    stages: usize,
    trained: TrainedStages,
    replicas: u32,
    forwards_first: bool,
) -> Result<ValidatedProgram, LowerError> {
    let forwards = |microbatch: u32| (0..stages).map(move |stage| format!("{stage}F{microbatch}"));
    let backwards = |microbatch: u32| {
        (0..stages).rev().flat_map(move |stage| ["I", "W"].map(|part| format!("{stage}{part}{microbatch}")))
    };
    let all = 0..MICROBATCHES;
    let cells: Vec<String> = if forwards_first {
        all.clone().flat_map(forwards).chain(all.flat_map(backwards)).collect()
    } else {
        all.flat_map(|microbatch| forwards(microbatch).chain(backwards(microbatch))).collect()
    };
    let schedule = parse_schedule(&(cells.join(",") + "\n")).expect("these cells are actions");
    for_training(&schedule, &TrainingLowering { replicas, trained, ..TrainingLowering::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_schedule::csv::print_program;

    #[test]
    fn programs_are_sound() {
        let print = |forwards_first| {
            let program = program(2, TrainedStages::ALL, 1, forwards_first).expect("sound");
            print_program(program.as_program()).chars().take(38).collect::<String>()
        };
        assert_eq!(print(false), "0F0,1F0,1I0,1W0,0I0,0W0,0F1,1F1,1I1,1W");
        assert_eq!(print(true), "0F0,1F0,0F1,1F1,0F2,1F2,1I0,1W0,0I0,0W");
        assert!(program(3, TrainedStages::ALL, 2, false).is_ok());
        let frozen = program(3, TrainedStages::of(&[false, true, false]), 2, false).expect("sound");
        let text = print_program(frozen.as_program());
        assert!(text.starts_with("0F0,1F0,2F0,2I0,1I0,1W0,0F1,"), "{text}");
    }
}
