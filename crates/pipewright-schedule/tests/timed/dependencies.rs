//! A simulation that keeps what its times depend on says what they are at other costs: the same as another
//! simulation.

use std::cell::RefCell;
use std::collections::BTreeSet;

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams};
use pipewright_schedule::costs::{Link, SkipTransfer, StageCosts, StageSizes};
use pipewright_schedule::generate::{Setting, catalogue};
use pipewright_schedule::lower::{OffloadConfig, ProgramSource, TrainingLowering};
use pipewright_schedule::simulate::{CostOf, dependencies, timed_on};
use pipewright_schedule::{
    ActionKind, Costs, Level, LowerConfig, Program, Recompute, ScheduleSpec, StageIndex, TrainedStages, csv,
};

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
    let kinds = [Streams::Buffered, Streams::Edge, Streams::Pair, Streams::Rank];
    let lowerings = [
        LowerConfig::from(Level::Full),
        LowerConfig::from(TrainingLowering::default()),
        LowerConfig {
            offload: Some(OffloadConfig::all(Recompute::Stage)),
            ..LowerConfig::from(Level::Comms)
        },
        LowerConfig {
            trained: TrainedStages::of(&[false, false, true, false]),
            ..LowerConfig::from(Level::Comms)
        },
    ];
    for (number, generator) in catalogue().iter().enumerate() {
        let name = generator.name;
        let overlap = generator.settings.contains(&Setting::Overlap);
        let spec = ScheduleSpec { ranks: 4, microbatches: 8, overlap, ..ScheduleSpec::default() };
        let source = ProgramSource::Named(name.to_owned(), Box::new(spec));
        for (lowering, passes) in lowerings.iter().enumerate() {
            let program = source.clone().program(passes).expect(name).into_program();
            for kind in [0, 1 + (number + lowering) % 3] {
                let groups = [Groups::Single, Groups::Consecutive][(number + lowering + kind) % 2];
                let sends = [Sends::Rendezvous, Sends::Eager][(number + kind) % 2].clone();
                let communicator = Communicator { streams: kinds[kind], groups, sends };
                all.iter().for_each(|costs| check(&program, costs, &communicator));
            }
        }
    }
}

/// The kinds of costs that the times of a small program depend on.
#[test]
fn times_depend_on_computations_and_on_messages() {
    let check = |rows: &str, costs: &str, expected: &[CostOf]| {
        let program = csv::parse_program(rows).expect("a program");
        let costs = costs.parse().expect("costs");
        let dependencies = dependencies(&program, &costs, &Communicator::default()).expect("it runs");
        let found = RefCell::new(BTreeSet::new());
        let note = |of, seconds| {
            found.borrow_mut().insert(of);
            seconds
        };
        dependencies.timeline(note);
        assert_eq!(found.into_inner().into_iter().collect::<Vec<_>>(), expected, "{rows}");
    };
    let compute = |stage: u32, kind| CostOf::Compute(StageIndex::new(stage), kind);
    let forwards = [0, 1].map(|stage| compute(stage, ActionKind::Forward));
    let latency = [forwards.as_slice(), &[CostOf::Latency]].concat();
    check("0F0,0SEND_F0\n1RECV_F0,1F0\n", "hop=0.5", &latency);
    check("0F0,1F0\n", "hop=0.5", &forwards);
    let split = [ActionKind::Forward, ActionKind::InputBackward, ActionKind::WeightBackward];
    check("0F0,0I0,0W0\n", "F=1", &split.map(|kind| compute(0, kind)));
    let moved = [compute(0, ActionKind::Forward), compute(0, ActionKind::Backward), CostOf::Other];
    check("0F0,0OFFLOAD0,0RELOAD0,0B0\n", "offload=0.5", &moved);
}
