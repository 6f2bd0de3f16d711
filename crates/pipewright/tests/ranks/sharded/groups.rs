//! Groups of replicas that share the parameters, each replica of a group a shard: hybrid sharding.

use std::convert::Infallible;

use pipewright::mesh::DataParallelMode::{self, Hybrid, Replicated, Sharded};
use pipewright::pipeline::{Pipeline, SeededPipeline};
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;

use super::modules::{ends, mixed};
use super::run::{
    Make, Parameters, batch_of, check_interleavings, check_modes, check_resume, config_of, launch_with,
    program, saved, train,
};
use crate::support::{Step, lose_each, stage};

const PAIRS: DataParallelMode = Hybrid { shards: 2 };

#[test]
fn groups_train_to_the_bits_of_as_many_replicas() {
    // Of one, of two, and of all replicas.
    let modes = [Hybrid { shards: 1 }, PAIRS, Hybrid { shards: 6 }, Sharded];
    check_modes(stage, || program("1f1b", 2, None, 2, 3), (6, &modes), "two ranks");
    check_modes(stage, || program("gpipe", 1, None, 1, 3), (2, &[Hybrid { shards: 1 }, PAIRS]), "one rank");
    // Layers whose gradients come from the tape, running statistics, a frozen weight, and more replicas than
    // rows.
    check_modes(mixed, || program("interleaved1f1b", 2, Some(2), 2, 1), (6, &[PAIRS]), "mixed layers");
    check_modes(ends, || program("1f1b", 2, None, 2, 3), (6, &[PAIRS]), "tied parameters");
}

#[test]
fn every_schedule_has_groups() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        let program = || program(generator.name, 2, None, 4, 1);
        check_modes(stage, program, (6, &[PAIRS]), generator.name);
    }
}

fn run_of(mode: DataParallelMode, replicas: u32, make: Make) -> (Vec<Step>, Parameters) {
    train(&mut launch_with(program("1f1b", 2, None, 2, 3), replicas, mode, make), 0..4, 2 * replicas)
}

#[test]
fn other_groups_train_within_rounding_and_every_run_has_the_same_bits() {
    // Three gradients are added in another order if they form a group.
    let mode = Hybrid { shards: 3 };
    let (steps, parameters) = run_of(mode, 6, stage);
    let (expected, _) = run_of(Replicated, 6, stage);
    for ((losses, norm), (expected_losses, expected_norm)) in steps.iter().zip(&expected) {
        let pairs = losses.iter().chain([norm]).zip(expected_losses.iter().chain([expected_norm]));
        for (found, expected) in pairs {
            assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{found} for {expected}");
        }
    }
    assert!(run_of(mode, 6, stage) == (steps, parameters));
}

#[test]
fn rows_that_groups_cut_elsewhere_change_the_last_bits_of_the_norm_only() {
    // Six rows are 2 + 2 + 2 in four parts, and 2 + 1 + 2 + 1 in two parts of two.
    let (expected, _) = run_of(Replicated, 4, stage);
    let (steps, _) = run_of(PAIRS, 4, stage);
    assert_eq!(steps[0].0, expected[0].0, "the losses of the first step");
    for ((_, norm), (_, expected)) in steps.iter().zip(&expected) {
        assert!((norm - expected).abs() <= 1e-14 * expected, "{norm} for {expected}");
    }
}

fn seeded(seed: u64, mode: DataParallelMode, replicas: u32) -> SeededPipeline {
    let program = program("1f1b", 2, None, 2, 1);
    SeededPipeline::new(program, &config_of(replicas, mode), seed, |index| stage(index, 2))
        .expect("it starts")
}

#[test]
fn every_interleaving_of_groups_gives_the_same_bits() {
    check_interleavings(|seed| seeded(seed, PAIRS, 6), 12, 50);
}

#[test]
fn every_lost_message_is_reported_with_the_rank_that_waits_for_it() {
    let lost = lose_each(|| seeded(0, PAIRS, 4), || batch_of(0, 8));
    let count = |tag: &str| lost.lines().filter(|line| line.starts_with(tag)).count();
    // Each of four replicas sends a part to the other of its group, and then one to the other with the same
    // rows.
    assert_eq!(count("its part of the gradients of stage 0"), 8, "{lost}");
    assert_eq!(count("its sum of gradients of stage 1"), 4, "{lost}");
    assert_eq!(count("its part of the parameters of stage 0") % 4, 0, "{lost}");
    assert!(count("its part of the parameters of stage 0") > 0, "{lost}");
}

#[test]
fn a_checkpoint_of_groups_resumes_under_any_mesh_and_the_other_way_round() {
    for other in [(Replicated, 1), (Replicated, 6), (Sharded, 3), (Sharded, 6), (PAIRS, 6)] {
        check_resume((PAIRS, 6), other);
        check_resume(other, (PAIRS, 6));
    }
    check_resume((Hybrid { shards: 3 }, 6), (PAIRS, 6));
}

#[test]
fn one_group_is_stored() {
    let mut pipeline = launch_with(program("1f1b", 2, None, 2, 3), 6, PAIRS, mixed);
    train(&mut pipeline, 0..2, 12);
    let (_folder, checkpoint) = saved(&mut pipeline, 2);
    assert_eq!(checkpoint.manifest().files.len(), 4, "two ranks, two shards");
}

#[test]
fn replicas_that_do_not_form_groups_are_refused() {
    for (replicas, shards) in [(4, 3), (4, 0), (2, 4)] {
        let make = |_| -> Result<pipewright::stage::Stage, Infallible> { unreachable!("no stage is made") };
        let config = config_of(replicas, Hybrid { shards });
        let launched =
            Pipeline::launch(program("1f1b", 2, None, 2, 3), World::local(2 * replicas), &config, make);
        let error = launched.err().expect("it is refused");
        let expected = format!("{replicas} replicas cannot form groups of {shards}: ");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}
