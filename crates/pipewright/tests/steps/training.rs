//! A pipelined run has the bits of the unpipelined one for every cut and schedule.

use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::transport::World;
use pipewright_schedule::ValidatedProgram;

use crate::support::{
    self, Step, batch, config, launch, program, program_of, stage, take_steps, unpipelined,
};

const STEPS: u64 = 4;

fn run_with(program: ValidatedProgram, config: &PipelineConfig) -> Vec<Step> {
    let microbatches = program.microbatches();
    take_steps(&mut launch(program, config), 0..STEPS, microbatches)
}

fn run(program: ValidatedProgram) -> Vec<Step> {
    run_with(program, &config())
}

/// Returns the run of one rank, which every other cut must reproduce.
fn reference(microbatches: u32) -> Vec<Step> {
    run(program("gpipe", 1, microbatches))
}

fn check(schedule: &str, ranks: u32, microbatches: u32) {
    assert_eq!(
        run(program(schedule, ranks, microbatches)),
        reference(microbatches),
        "{schedule} on {ranks} ranks"
    );
}

#[test]
fn one_rank_agrees_with_plain_burn() {
    // Without clipping, like Burn's own optimizer step. The order of additions differs, so the bits may
    // differ.
    let unclipped = PipelineConfig { clip_norm: None, ..config() };
    let found = run_with(program("gpipe", 1, 4), &unclipped);
    for ((found, _), expected) in found.iter().zip(unpipelined(STEPS, 4)) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6 * expected, "{found} {expected}");
        }
    }
}

#[test]
fn gpipe_gives_the_bits_of_one_rank() {
    check("gpipe", 2, 4);
    check("gpipe", 4, 8);
    check("gpipe", 8, 8);
}

#[test]
fn one_f_one_b_gives_the_bits_of_one_rank() {
    check("1f1b", 1, 4);
    check("1f1b", 2, 4);
    check("1f1b", 4, 8);
    check("1f1b", 8, 8);
}

#[test]
fn a_v_placement_passes_tensors_within_a_rank() {
    let v = "0F0,,,3F0,3B0,0F1,,,3F1,3B1,,,0B0,,0B1\n,1F0,2F0,,,2B0,1F1,2F1,1B0,,2B1,1B1,,,\n";
    assert_eq!(run(program_of(v)), reference(2));
}

#[test]
fn input_and_weight_backward_may_be_split() {
    let split = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n";
    assert_eq!(run(program_of(split)), reference(2));
}

#[test]
fn forward_and_backward_may_overlap() {
    let overlapped = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n";
    assert_eq!(run(program_of(overlapped)), reference(2));
}

#[test]
fn two_runs_are_equal() {
    assert_eq!(run(program("1f1b", 2, 4)), run(program("1f1b", 2, 4)));
}

#[test]
fn clipping_changes_the_step_after() {
    let unclipped = PipelineConfig { clip_norm: None, ..config() };
    let (clipped, unclipped) = (reference(4), run_with(program("gpipe", 1, 4), &unclipped));
    assert_eq!(clipped[0], unclipped[0]);
    assert_ne!(clipped[2], unclipped[2]);
}

#[test]
fn parameters_come_back_by_path() {
    let program = program("1f1b", 4, 4);
    let mut pipeline = Pipeline::launch(program, World::local(4), &config(), |index| stage(index, 4))
        .expect("the pipeline starts");
    let parameters = pipeline.parameters().expect("they are there");
    let paths: Vec<&str> = parameters.iter().map(|parameter| &*parameter.path).collect();
    assert_eq!(paths.len(), 2 * support::LAYERS);
    assert_eq!(&paths[..3], ["layers.0.weight", "layers.0.bias", "layers.1.weight"]);
    assert_eq!(parameters[0].data, support::numbers(0, [support::WIDTH, support::WIDTH]));
}

#[test]
fn the_timeline_holds_every_action() {
    let program = program("1f1b", 2, 4);
    let expected: usize = program.placement().all_ranks().map(|rank| program.row(rank).len()).sum();
    let mut pipeline = Pipeline::launch(program, World::local(2), &config(), |index| stage(index, 2))
        .expect("the pipeline starts");
    let report = pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect("a step");
    assert_eq!(report.timeline.events().len(), expected);
    assert!(report.timeline.makespan() <= report.wall.as_secs_f64());
    assert!((0.0..1.0).contains(&report.timeline.bubble_fraction()));
}
