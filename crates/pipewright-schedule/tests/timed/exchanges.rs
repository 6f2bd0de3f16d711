//! Exchanges of tokens within an action, and the overlaps that hide them.

use std::collections::HashMap;

use pipewright_schedule::costs::{Exchanges, SkipTransfer, StageCosts, StageExchanges};
use pipewright_schedule::lower::{ProgramSource, TrainingLowering};
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{
    Action, ActionKind, Costs, Level, LowerConfig, Program, Rank, Recompute, ScheduleSpec, StageIndex,
    generate, lower,
};

use crate::{check, program};

/// Checks the exchanges of each rank: all, and those for which it waits.
fn check_exchanges(rows: &str, costs: &str, expected: &[(f64, f64)]) -> f64 {
    let run = timed(&program(rows), &costs.parse().expect("costs")).expect("it runs");
    let found: Vec<_> = run.exchanges().iter().map(|rank| (rank.seconds, rank.exposed)).collect();
    assert_eq!(found, expected, "{costs}");
    let spans = run.timeline().scopes().iter().filter(|scope| scope.is_exchange());
    let all: f64 = spans.map(|scope| scope.end - scope.start).sum();
    assert!((all - expected.iter().map(|rank| rank.0).sum::<f64>()).abs() < 1e-9, "{costs}");
    run.timeline().makespan()
}

#[test]
fn exchanges_of_an_action_alone_are_exposed() {
    // `F` takes 2 and an exchange of 3, `I` the same, and `W` has no exchange.
    let costs = "F=2,I=2,W=1,exchange=3";
    assert_eq!(check_exchanges("0F0,0I0,0W0\n", costs, &[(6.0, 6.0)]), 11.0);
    assert_eq!(check_exchanges("0F0,0B0\n", costs, &[(6.0, 6.0)]), 11.0);
    check(&costs.parse().expect("costs"), "0F0,0I0,0W0\n", "0F0@0-5 0I0@5-10 0W0@10-11");
}

/// A rank with two stages, whose overlap is of both.
const OVERLAP: &str = "0F0,1F0,1B0,0F1,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n";

#[test]
fn an_overlap_hides_the_exchanges_of_its_halves() {
    // Two parts of 2 around an exchange of 1, in each half.
    let costs = "F=4,B=4,exchange=1,exchanges=1";
    let alone = "0F0@0-5 1F0@5-10 1B0@10-15 0F1@15-20";
    check(&costs_of(costs), OVERLAP, &format!("{alone} 1F1@20-26 0B0@22-28 1B1@28-33 0B1@33-38"));
    // The two exchanges of the overlap are hidden, and the other six are exposed.
    assert_eq!(check_exchanges(OVERLAP, costs, &[(8.0, 6.0)]), 38.0);
    // Exchanges that are longer than the computation are hidden in part: 4 of 10.
    let long = "F=4,B=4,exchange=5,exchanges=1";
    let alone = "0F0@0-9 1F0@9-18 1B0@18-27 0F1@27-36";
    check(&costs_of(long), OVERLAP, &format!("{alone} 1F1@36-45 0B0@38-50 1B1@50-59 0B1@59-68"));
    assert_eq!(check_exchanges(OVERLAP, long, &[(40.0, 36.0)]), 68.0);
}

#[test]
fn an_overlap_of_one_stage_hides_no_exchange() {
    let rows = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n";
    let costs = "F=4,B=4,exchange=1,exchanges=1";
    check(&costs_of(costs), rows, "0F0@0-5 0F1@5-10 0B0@10-15 0B1@15-20");
    assert_eq!(check_exchanges(rows, costs, &[(4.0, 4.0)]), 20.0);
    // It waits for the gradient, and sends its output when the backward has ended.
    check(
        &costs_of("F=1,B=2,hop=0.5,exchange=1,exchanges=1"),
        "0F0,0SEND_F0,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0SEND_F1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1\n",
        "0F0@0-2 0SEND_F0@2-2 0RECV_B0@7.5-8 0F1@8-10 0B0@10-13 0SEND_F1@13-13 \
         1RECV_F0@2-2.5 1F0@2.5-4.5 1B0@4.5-7.5 1SEND_B0@7.5-7.5 1RECV_F1@13-13.5 1F1@13.5-15.5",
    );
}

#[test]
fn both_halves_begin_together_and_both_outputs_leave_at_the_end() {
    // The first overlap waits for the input of `1F1`, though `2B0` could begin before. The gradient of `1B0`
    // waits for the end of `2F1`, whose exchanges are longer.
    let rows = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                1RECV_F0,1F0,2F0,1RECV_F1,(1F1;2B0)OVERLAP_F_B,(2F1;1B0)OVERLAP_F_B,1SEND_B0,2B1,1B1,1SEND_B1\n";
    let stage = StageCosts {
        exchanges: StageExchanges { forward: Exchanges::new(2, 8.0), ..StageExchanges::default() },
        ..StageCosts::new(3.0, 1.0, 1.0)
    };
    let skips = vec![SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: 1 }];
    let costs =
        Costs { stages: vec![StageCosts::new(40.0, 1.0, 1.0), stage, stage], skips, ..Costs::default() };
    let run = timed(&program(rows), &costs).expect("it runs");
    let times = |text: &str| {
        let events = run.timeline().events();
        let event = events.iter().find(|event| event.action.to_string() == text).expect(text);
        (event.start, event.end)
    };
    assert_eq!((times("1F0"), times("2F0")), ((40.0, 51.0), (51.0, 62.0)));
    assert_eq!((times("1F1"), times("2B0")), ((80.0, 91.0), (81.0, 83.0)));
    assert_eq!((times("2F1"), times("1B0")), ((91.0, 102.0), (92.0, 94.0)));
    assert_eq!((times("1SEND_B0"), times("0B0")), ((102.0, 102.0), (102.0, 104.0)));
    let skip =
        run.timeline().skips().iter().find(|skip| skip.action.to_string() == "2SEND_SKIP_B0 to stage 0");
    assert_eq!(skip.expect("a gradient").start, 91.0);
    assert_eq!(run.exchanges()[1].seconds, 32.0);
}

/// Checks that each computation of a run begins as soon as the computation before it in the row has ended and
/// its tensors have arrived, where those of an overlap are the tensors of both halves, and what an overlap
/// makes leaves at its end. Messages take `hop` seconds. Returns the number of overlaps that begin later than
/// one of their halves could.
fn check_starts(program: &Program, costs: &Costs, hop: f64) -> u32 {
    let run = timed(program, costs).expect("it runs");
    let placement = program.placement();
    let span = |rank: Rank, action: Action| {
        let events = run.timeline().events_of(rank);
        let own = || action.parts().flat_map(|part| events.iter().filter(move |event| event.action == part));
        assert_eq!(own().count(), action.parts().count(), "{action}");
        let start = own().map(|event| event.start).fold(f64::INFINITY, f64::min);
        (start, own().map(|event| event.end).fold(0.0, f64::max))
    };
    let computations = |rank: Rank| program.row(rank).iter().copied().filter(|action| action.is_compute());
    // Where and when the output of a stage, or the gradient of its input, is made.
    let mut made = HashMap::new();
    for rank in placement.all_ranks() {
        for action in computations(rank) {
            for part in action.parts().filter(|part| part.kind() != ActionKind::WeightBackward) {
                let is_gradient = part.kind() != ActionKind::Forward;
                made.insert((is_gradient, part.stage(), part.microbatch()), (rank, span(rank, action).1));
            }
        }
    }
    let mut late = 0;
    for rank in placement.all_ranks() {
        let mut before = 0.0f64;
        for action in computations(rank) {
            let arrival = |part: Action| {
                let source = match part.kind() {
                    ActionKind::Forward => placement.previous(part.stage()),
                    ActionKind::WeightBackward => None,
                    _ => placement.next(part.stage()),
                };
                let Some(source) = source else { return 0.0 };
                let is_gradient = part.kind() != ActionKind::Forward;
                let (from, end) = made[&(is_gradient, source, part.microbatch())];
                if from == rank { end } else { end + hop }
            };
            let ready: Vec<f64> = action.parts().map(|part| before.max(arrival(part))).collect();
            let latest = ready.iter().copied().fold(before, f64::max);
            let (start, end) = span(rank, action);
            assert!((start - latest).abs() < 1e-9, "{action} begins at {start}, and could at {latest}");
            late += u32::from(ready.iter().any(|&ready| ready < latest));
            before = end;
        }
    }
    late
}

#[test]
fn computations_begin_when_all_their_tensors_have_arrived() {
    let mut late = 0;
    for (ranks, microbatches) in [(1, 2), (2, 4), (2, 9), (3, 8), (4, 12)] {
        let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
        let schedule = ProgramSource::Schedule(generate("dualpipev", &spec).expect("a schedule"));
        for hop in [0.0, 0.25, 3.0] {
            // Times of each stage, so that halves wait for their neighbours at different times.
            let forwards: Vec<String> = (0..2 * ranks).map(|stage| (1 + 5 * stage % 7).to_string()).collect();
            let uneven = format!("F={},I=2,W=1,", forwards.join(":"));
            for times in ["", "F=2,I=1,W=3,", &uneven] {
                for exchanges in ["exchange=0.5", "exchange=4,exchanges=1", "exchange=2,exchanges=8"] {
                    let costs = costs_of(&format!("{times}hop={hop},{exchanges}"));
                    let passes = LowerConfig::training_at(&costs);
                    let program = schedule.clone().program(&passes).expect("sound").into_program();
                    late += check_starts(&program, &costs, hop);
                }
            }
        }
    }
    assert!(late > 0, "no overlap waits for the tensor of one half");
}

#[test]
fn an_overlap_computes_a_forward_again() {
    let costs = Costs { recompute: Recompute::Stage, ..costs_of("F=2,B=2,exchange=1,exchanges=1") };
    // The overlap runs 1 1 1 of `1F1` against 1 1 1 of `0F0` again, and 1 1 1 of `0B0`. The backward `1B0`
    // follows its forward, which is not computed again.
    let alone = "0F0@0-3 1F0@3-6 1B0@6-9 0F1@9-12";
    let rest = "1F1@19-22 1B1@22-25 0F1@25-28 0B1@28-31";
    check(&costs, OVERLAP, &format!("{alone} 1F1@12-15 0F0@13-16 0B0@16-19 {rest}"));
}

#[test]
fn programs_with_too_many_exchanges_are_refused() {
    let spec = ScheduleSpec { ranks: 8, microbatches: 1024, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("a program");
    let error = |recompute| {
        let costs = Costs { recompute, ..costs_of("exchange=1,exchanges=250") };
        timed(&program, &costs).err().map(|error| error.to_string())
    };
    // A forward and a backward of each microbatch on 8 ranks, and with recomputation a second forward.
    let message = |exchanges: u32| {
        format!(
            "the actions of the program have {exchanges} exchanges, and at most 4000000 are simulated; use fewer \
             microbatches, or fewer exchanges in each action"
        )
    };
    assert_eq!(error(Recompute::None), Some(message(2 * 250 * 8 * 1024)));
    assert_eq!(error(Recompute::Stage), Some(message(3 * 250 * 8 * 1024)));
    assert!(timed(&program, &costs_of("exchange=1,exchanges=2")).is_ok());
}

fn costs_of(text: &str) -> Costs {
    text.parse().expect(text)
}

#[test]
fn exchanges_of_no_time_change_nothing() {
    for schedule in ["dualpipev", "1f1b", "zbvzerobubble"] {
        let spec = ScheduleSpec { ranks: 4, microbatches: 12, ..ScheduleSpec::default() };
        let schedule = generate(schedule, &spec).expect("a schedule");
        let lowering = TrainingLowering { keep_overlaps: true, ..TrainingLowering::default() };
        let program =
            ProgramSource::Schedule(schedule).program(&lowering.into()).expect("sound").into_program();
        let plain = timed(&program, &costs_of("hop=0.1")).expect("it runs");
        let empty = Exchanges::new(4, 0.0);
        let mut costs = costs_of("hop=0.1");
        costs.stages[0].exchanges = StageExchanges::both(empty);
        assert_eq!(timed(&program, &costs), Ok(plain));
    }
}

#[test]
fn overlaps_make_dual_pipe_v_faster_than_schedules_without() {
    let makespan = |schedule: &str, costs: &str| {
        let spec = ScheduleSpec { ranks: 4, microbatches: 16, ..ScheduleSpec::default() };
        let lowering = TrainingLowering { keep_overlaps: true, ..TrainingLowering::default() };
        let schedule = ProgramSource::Schedule(generate(schedule, &spec).expect("a schedule"));
        let program = schedule.program(&lowering.into()).expect("sound").into_program();
        timed(&program, &costs_of(costs)).expect("it runs").timeline().makespan()
    };
    let costs = "F=1,I=1,W=1,exchange=0.8,exchanges=8";
    assert!(makespan("dualpipev", costs) < 0.85 * makespan("zbvzerobubble", costs));
    assert!(makespan("dualpipev", "") >= makespan("zbvzerobubble", ""));
}
