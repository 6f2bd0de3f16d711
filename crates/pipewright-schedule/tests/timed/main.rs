//! The timed simulation: timelines computed by hand, the closed forms of the papers, and properties of any
//! program.

mod causes;
mod closed_forms;
mod dependencies;
mod exchanges;
mod skips;
mod slices;

use pipewright_schedule::costs::{Link, StageCosts, StageSizes};
use pipewright_schedule::csv::parse_program;
use pipewright_schedule::lower::{ProgramSource, ReduceWait, TrainingLowering};
use pipewright_schedule::simulate::{logical, timed};
use pipewright_schedule::{
    ActionKind, Costs, Level, LowerConfig, Program, Rank, ScheduleSpec, generate, lower, validate,
};

fn program(rows: &str) -> Program {
    parse_program(rows).unwrap_or_else(|error| panic!("{error}"))
}

fn generated(name: &str, ranks: u32, microbatches: u32) -> Program {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    lower(&generate(name, &spec).expect("a schedule"), &LowerConfig::from(Level::Comms)).expect("a program")
}

/// Checks the events, written `ACTION@START-END` and listed by rank and start.
fn check(costs: &Costs, rows: &str, expected: &str) {
    let program = program(rows);
    let run = timed(&program, costs).expect("it runs");
    let events = run.timeline().events().iter();
    let found: Vec<String> =
        events.map(|event| format!("{}@{}-{}", event.action, event.start, event.end)).collect();
    assert_eq!(found.join(" "), expected);
}

fn with_hop(hop: f64) -> Costs {
    format!("hop={hop}").parse().expect("costs")
}

#[test]
fn a_message_takes_its_hop() {
    check(
        &with_hop(0.5),
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "0F0@0-1 0SEND_F0@1-1 0RECV_B0@4.5-5 0B0@5-7 1RECV_F0@1-1.5 1F0@1.5-2.5 1B0@2.5-4.5 1SEND_B0@4.5-4.5",
    );
}

#[test]
fn a_second_forward_fills_the_bubble_before_its_backward() {
    let rows = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    let other = "1RECV_F0@1-1 1F0@1-2 1B0@2-4 1SEND_B0@4-4 1RECV_F1@4-4 1F1@4-5 1B1@5-7 1SEND_B1@7-7";
    let costs = |recompute: &str| Costs { recompute: recompute.parse().expect("a choice"), ..with_hop(0.0) };
    let early =
        "0F0@0-1 0SEND_F0@1-1 0F1@1-2 0SEND_F1@2-2 0F0@2-3 0RECV_B0@4-4 0B0@4-6 0F1@6-7 0RECV_B1@7-7 0B1@7-9";
    check(&costs("0"), rows, &format!("{early} {other}"));
    // Blocks are computed again with their backwards.
    let late = "0F0@0-1 0SEND_F0@1-1 0F1@1-2 0SEND_F1@2-2 0RECV_B0@4-4 0F0@4-5 0B0@5-7 0RECV_B1@7-7 0F1@7-8 0B1@8-10";
    check(&costs("block"), rows, &format!("{late} {other}"));
}

#[test]
fn tensors_leave_and_come_back_beside_the_computation() {
    let rows = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0F2,0RELOAD1,0B0,0B1,0B2\n";
    let check_at = |text: &str, recompute: &str, expected: &str| {
        let recompute = recompute.parse().expect("a choice");
        check(&Costs { recompute, ..text.parse().expect("costs") }, rows, expected);
    };
    // `0OFFLOAD1` leaves the link at 4, and `0RELOAD0` at 5.5, for which the second forward of `0B0` waits.
    check_at(
        "offload=1.5",
        "stage",
        "0F0@0-1 0OFFLOAD0@1-2.5 0F1@1-2 0F2@2-3 0OFFLOAD1@2.5-4 0RELOAD0@4-5.5 0RELOAD1@5.5-7 0F0@5.5-6.5 0B0@6.5-8.5 \
         0F1@8.5-9.5 0B1@9.5-11.5 0F2@11.5-12.5 0B2@12.5-14.5",
    );
    check_at(
        "offload=1.5",
        "none",
        "0F0@0-1 0OFFLOAD0@1-2.5 0F1@1-2 0F2@2-3 0OFFLOAD1@2.5-4 0RELOAD0@4-5.5 0RELOAD1@5.5-7 0B0@5.5-7.5 0B1@7.5-9.5 \
         0B2@9.5-11.5",
    );
    check_at(
        "F=1",
        "none",
        "0F0@0-1 0OFFLOAD0@1-1 0F1@1-2 0OFFLOAD1@2-2 0RELOAD0@2-2 0F2@2-3 0RELOAD1@3-3 0B0@3-5 0B1@5-7 0B2@7-9",
    );
    // Bytes take their time too: 4 s for 6 bytes.
    let sizes = vec![StageSizes { offload: 6, ..StageSizes::default() }];
    let link = Link { latency: 1.0, bandwidth: 2.0 };
    let costs = Costs { sizes, offload: link, ..Costs::default() };
    check(
        &costs,
        "0F0,0OFFLOAD0,0F1,0RELOAD0,0B1,0B0\n",
        "0F0@0-1 0OFFLOAD0@1-5 0F1@1-2 0B1@2-4 0RELOAD0@5-9 0B0@9-11",
    );
    let message = "the cost `offload` is -1; use a number of seconds from 0 to 1e12";
    assert_eq!("offload=-1".parse::<Costs>().expect_err("a negative time").to_string(), message);
}

#[test]
fn a_link_carries_one_message_at_a_time() {
    let costs = Costs {
        sizes: vec![StageSizes { output: 30, ..StageSizes::default() }],
        link: Link { latency: 0.0, bandwidth: 10.0 },
        ..Costs::default()
    };
    check(
        &costs,
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n",
        "0F0@0-1 0SEND_F0@1-4 0F1@1-2 0SEND_F1@4-7 1RECV_F0@1-4 1F0@4-5 1RECV_F1@5-7 1F1@7-8",
    );
}

#[test]
fn the_other_direction_is_another_link() {
    let mut costs = with_hop(0.0);
    costs.links.insert((Rank::new(1), Rank::new(0)), Link { latency: 2.0, bandwidth: f64::INFINITY });
    let run =
        timed(&program("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"), &costs).expect("it runs");
    assert_eq!(run.timeline().makespan(), 8.0);
    assert_eq!(run.exposed(), [2.0, 0.0]);
    assert_eq!(run.exposed_fraction(), 2.0 / 16.0);
}

#[test]
fn waiting_for_a_computation_is_not_exposed_communication() {
    let run = timed(&generated("1f1b", 4, 8), &Costs::default()).expect("it runs");
    assert_eq!(run.exposed(), [0.0; 4]);
}

#[test]
fn collectives_run_beside_the_computation() {
    let stage = StageCosts { unshard: 2.0, reduce_grad: 3.0, ..StageCosts::new(1.0, 1.0, 1.0) };
    let costs = Costs { stages: vec![stage], ..Costs::default() };
    check(
        &costs,
        "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1REDUCE_GRAD,0B0,1WAIT_REDUCE_GRAD,1RESHARD\n",
        "0UNSHARD@0-2 1UNSHARD@2-4 0F0@2-3 1F0@4-5 1B0@5-7 1REDUCE_GRAD@7-10 0B0@7-9 1WAIT_REDUCE_GRAD@9-10 \
         1RESHARD@10-10",
    );
}

#[test]
fn a_wait_for_a_send_lasts_until_the_arrival() {
    check(
        &with_hop(4.0),
        "0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n",
        "0F0@0-1 0SEND_F0@1-1 0F1@1-2 0WAIT_SEND_F0@2-5 0SEND_F1@5-5 1RECV_F0@1-5 1F0@5-6 1RECV_F1@6-9 1F1@9-10",
    );
}

#[test]
fn an_overlap_is_its_forward_and_then_its_backward() {
    check(&Costs::default(), "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "0F0@0-1 0F1@1-2 0B0@2-4 0B1@4-6");
}

#[test]
fn the_forward_of_an_overlap_sends_before_its_backward() {
    check(
        &with_hop(0.5),
        "0F0,0SEND_F0,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0SEND_F1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1\n",
        "0F0@0-1 0SEND_F0@1-1 0F1@1-2 0SEND_F1@2-2 0RECV_B0@4.5-5 0B0@5-7 \
         1RECV_F0@1-1.5 1F0@1.5-2.5 1B0@2.5-4.5 1SEND_B0@4.5-4.5 1RECV_F1@4.5-4.5 1F1@4.5-5.5",
    );
}

#[test]
fn circles_and_missing_messages_are_named() {
    let error = |rows| timed(&program(rows), &Costs::default()).expect_err(rows).to_string();
    assert_eq!(
        error("0F0,0RECV_B0,0B0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n"),
        "deadlock: rank 0 at position 2 (0B0) waits for rank 1, rank 1 at position 1 (1F0) waits for rank 0; \
         validate the program"
    );
    assert_eq!(
        error("0F0\n1F0\n"),
        "deadlock: rank 1 at position 0 (1F0) waits for rank 0; validate the program"
    );
}

#[test]
fn costs_must_fit() {
    let costs = Costs { stages: vec![StageCosts::new(1.0, 1.0, 1.0); 2], ..Costs::default() };
    let error = timed(&program("0F0\n"), &costs).expect_err("two entries for one stage").to_string();
    assert_eq!(error, "2 entries for the costs of 1 stage; give one for all, or one each");
}

/// Returns `program` with the actions of these kinds removed.
fn without(program: &Program, kinds: &[ActionKind]) -> Program {
    let rows = program
        .rows()
        .iter()
        .map(|row| row.iter().copied().filter(|action| !kinds.contains(&action.kind())).collect());
    Program::new(program.placement().clone(), program.microbatches(), rows.collect()).expect("rows")
}

#[test]
fn rows_of_any_level_run_if_and_only_if_they_are_sound() {
    const KINDS: [&[ActionKind]; 6] = [
        &[ActionKind::Unshard],
        &[ActionKind::Reshard],
        &[ActionKind::ReduceGrad],
        &[ActionKind::WaitReduceGrad],
        &[ActionKind::SendForward, ActionKind::RecvForward],
        &[ActionKind::SendBackward, ActionKind::RecvBackward],
    ];
    let (mut sound, mut unsound) = (0, 0);
    for (name, ranks) in
        [("1f1b", 1), ("1f1b", 3), ("interleaved1f1b", 2), ("zbvzerobubble", 2), ("dualpipev", 2)]
    {
        let spec = ScheduleSpec { ranks, microbatches: 2 * ranks, ..ScheduleSpec::default() };
        let schedule = generate(name, &spec).expect("a schedule");
        for wait in [ReduceWait::AtOnce, ReduceWait::AtEnd] {
            let passes = LowerConfig { reduce_grad: Some(wait), ..LowerConfig::from(Level::Full) };
            let full = lower(&schedule, &passes).expect("a program");
            for subset in 0..1 << KINDS.len() {
                let removed = KINDS.iter().enumerate().filter(|(index, _)| subset >> index & 1 == 1);
                let removed: Vec<ActionKind> = removed.flat_map(|(_, kinds)| kinds.iter().copied()).collect();
                let rows = without(&full, &removed);
                let is_sound = validate(rows.clone(), rows.level()).is_ok();
                let made = ProgramSource::Rows(rows).program(&TrainingLowering::default().into());
                assert_eq!(made.is_ok(), is_sound, "{name} without {removed:?}: {made:?}");
                let Ok(program) = made else {
                    unsound += 1;
                    continue;
                };
                sound += 1;
                let whole = program.as_program();
                let runs = timed(whole, &Costs::default()).is_ok() && logical(whole).is_ok();
                assert!(runs, "{name} without {removed:?}");
            }
        }
    }
    assert!(sound > 100 && unsound > 100, "{sound} and {unsound}");
}

#[test]
fn training_sends_before_it_computes_weight_gradients() {
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
    let makespan = |passes: LowerConfig| {
        let source = ProgramSource::Named("1f1b".to_owned(), Box::new(spec.clone()));
        let program = source.program(&passes).expect("a program");
        timed(program.as_program(), &with_hop(0.1)).expect("it runs").timeline().makespan()
    };
    assert!((makespan(TrainingLowering::default().into()) - 30.6).abs() < 1e-9);
    assert!((makespan(Level::Comms.into()) - 34.6).abs() < 1e-9);
}
