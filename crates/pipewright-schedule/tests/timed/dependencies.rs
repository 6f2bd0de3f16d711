//! A simulation that keeps what its times depend on says what they are at other costs: the same as another
//! simulation.

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams};
use pipewright_schedule::costs::{Link, SkipTransfer, StageCosts, StageSizes};
use pipewright_schedule::lower::{ProgramSource, TrainingLowering};
use pipewright_schedule::simulate::{CostOf, dependencies, timed_on};
use pipewright_schedule::{ActionKind, Costs, Level, LowerConfig, Program, ScheduleSpec, StageIndex};

/// Changes each kind of cost by a power of two, so that no time is rounded.
fn changed(of: CostOf, seconds: f64) -> f64 {
    match of {
        CostOf::Compute(_, ActionKind::Forward) => seconds * 0.5,
        CostOf::Compute(stage, ActionKind::Backward) if stage.get() == 1 => seconds * 4.0,
        CostOf::Compute(_, ActionKind::WeightBackward) => seconds * 2.0,
        CostOf::Latency => 3.0,
        _ => seconds,
    }
}

fn changed_costs(costs: &Costs, stages: u32) -> Costs {
    let stage = |stage: u32| {
        let own = costs.stages[0];
        StageCosts {
            forward: own.forward * 0.5,
            recompute: own.recompute.map(|seconds| seconds * 0.5),
            backward: if stage == 1 { own.backward * 4.0 } else { own.backward },
            weight_backward: own.weight_backward * 2.0,
            ..own
        }
    };
    let stages = (0..stages).map(stage).collect();
    Costs { stages, link: Link { latency: 3.0, ..costs.link }, ..costs.clone() }
}

fn check(program: &Program, costs: &Costs, communicator: &Communicator) {
    let name = format!("{costs:?} {communicator:?}");
    let run = match timed_on(program, costs, communicator) {
        Ok(run) => run,
        Err(error) => return assert!(communicator.streams != Streams::Buffered, "{name}: {error}"),
    };
    let dependencies = dependencies(program, costs, communicator).expect(&name);
    assert_eq!(dependencies.timeline(|_, seconds| seconds).events(), run.timeline().events(), "{name}");
    let other = changed_costs(costs, program.placement().stages());
    let run = timed_on(program, &other, communicator).expect(&name);
    assert_eq!(dependencies.timeline(changed).events(), run.timeline().events(), "{name}");
}

#[test]
fn times_at_other_costs_are_those_of_another_simulation() {
    let stage = StageCosts {
        recompute: Some(0.5),
        unshard: 1.5,
        reduce_grad: 2.5,
        offload: Some(0.75),
        reload: Some(1.25),
        ..StageCosts::new(1.0, 1.0, 1.0)
    };
    let sizes = vec![StageSizes { output: 8, offload: 4, ..StageSizes::default() }];
    let plain = Costs { stages: vec![stage], sizes, ..Costs::default() };
    let slow = Link { latency: 0.25, bandwidth: 16.0 };
    let linked = Costs {
        link: slow,
        links: [((1.into(), 2.into()), Link { latency: 1.0, bandwidth: 4.0 })].into(),
        ..plain.clone()
    };
    let skips = vec![SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(3), bytes: 32 }];
    let all = [
        plain.clone(),
        linked.clone(),
        Costs { skips, ..linked.clone() },
        Costs { recompute: "stage".parse().expect("a choice"), ..linked.clone() },
        Costs { recompute: "block".parse().expect("a choice"), ..linked },
    ];
    let names = ["1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev", "gpipe"];
    let kinds = [Streams::Buffered, Streams::Edge, Streams::Pair, Streams::Rank];
    let lowerings = [LowerConfig::from(Level::Comms), LowerConfig::from(TrainingLowering::default())];
    for (number, name) in names.into_iter().enumerate() {
        let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
        let source = ProgramSource::Named(name.to_owned(), Box::new(spec));
        for (lowering, passes) in lowerings.iter().enumerate() {
            let program = source.clone().program(passes).expect(name).into_program();
            for (kind, streams) in kinds.into_iter().enumerate() {
                let groups = [Groups::Single, Groups::Consecutive][(number + lowering + kind) % 2];
                let sends = [Sends::Rendezvous, Sends::Eager][(number + kind) % 2].clone();
                let communicator = Communicator { streams, groups, sends };
                all.iter().for_each(|costs| check(&program, costs, &communicator));
            }
        }
    }
}
