//! The timed simulation: timelines computed by hand, the closed forms of the papers, and properties of any
//! program.

use std::collections::HashMap;

use pipewright_schedule::costs::{Exchanges, Link, SkipTransfer, StageCosts, StageExchanges, StageSizes};
use pipewright_schedule::csv::parse_program;
use pipewright_schedule::lower::{ProgramSource, ReduceWait, TrainingLowering};
use pipewright_schedule::simulate::{logical, summarize, timed};
use pipewright_schedule::{
    Action, ActionKind, Costs, Level, LowerConfig, Program, Rank, Recompute, ScheduleSpec, Slices,
    StageIndex, generate, lower, validate,
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

/// Costs with a skip connection from the first of three stages to the last, which occupies its link for
/// `seconds`.
fn with_skip(seconds: u64) -> Costs {
    let skip = SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: seconds };
    Costs { skips: vec![skip], link: Link { latency: 0.0, bandwidth: 1.0 }, ..Costs::default() }
}

fn makespan(rows: &str, costs: &Costs) -> f64 {
    timed(&program(rows), costs).expect("it runs").timeline().makespan()
}

#[test]
fn a_skip_connection_delays_its_user_and_its_source() {
    let rows = "0F0,0SEND_F0,0RECV_B0,0B0\n\
                1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n\
                2RECV_F0,2F0,2B0,2SEND_B0\n";
    for t in 0..5 {
        // The last stage's forward begins when two forwards have ended and the message has arrived. The first
        // stage's backward begins when the middle stage's has ended and the gradient has arrived.
        let last_forward = f64::from(2.max(1 + t));
        let expected = last_forward + 3.0 + f64::from(2.max(t)) + 2.0;
        assert_eq!(makespan(rows, &with_skip(t as u64)), expected, "{t} seconds");
    }
}

#[test]
fn messages_of_a_skip_connection_share_their_link() {
    let forwards = |stage: u32| (0..4).map(move |m| format!("{stage}F{m}"));
    let row = |cells: Vec<String>| cells.join(",") + "\n";
    let sends = |stage: u32| forwards(stage).enumerate().map(move |(m, f)| format!("{f},{stage}SEND_F{m}"));
    let receive = |stage: u32, cells: Vec<String>| -> Vec<String> {
        cells.into_iter().enumerate().map(|(m, cell)| format!("{stage}RECV_F{m},{cell}")).collect()
    };
    let rows = row(sends(0).collect())
        + &row(receive(1, sends(1).collect()))
        + &row(receive(2, forwards(2).collect()));
    // Four messages of three seconds, one after the other, between the first forward and the last.
    assert_eq!(makespan(&rows, &with_skip(3)), 1.0 + 4.0 * 3.0 + 1.0);
}

#[test]
fn messages_of_a_skip_connection_are_in_the_timeline() {
    let rows =
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n2RECV_F0,2F0,2B0,2SEND_B0\n";
    let run = timed(&parse_program(rows).expect("a program"), &with_skip(5)).expect("no deadlock");
    let found: Vec<String> = run
        .timeline()
        .skips()
        .iter()
        .map(|skip| format!("rank {}: {}, {} to {}", skip.rank, skip.action, skip.start, skip.end))
        .collect();
    // The connection is busy for five seconds from the end of 0F0, and again from the end of 2B0.
    let expected = [
        "rank 0: 0SEND_SKIP_F0 to stage 2, 1 to 6",
        "rank 0: 0RECV_SKIP_B0 from stage 2, 9 to 14",
        "rank 2: 2RECV_SKIP_F0 from stage 0, 1 to 6",
        "rank 2: 2SEND_SKIP_B0 to stage 0, 9 to 14",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_skip_connection_within_a_rank_takes_no_time() {
    let rows = "0F0,1F0,2F0,2B0,1B0,0B0\n";
    assert_eq!(makespan(rows, &with_skip(9)), 9.0);
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

/// Does the same as [`check_idle`] for the level `comms`, in which messages follow whole actions.
fn check_closed_form(name: &str, stages_per_rank: u32, bubble: f64, peak: u64) {
    check_idle(&LowerConfig::from(Level::Comms), name, stages_per_rank, bubble, peak);
}

/// Checks the bubble from barrier to barrier and the largest peak in activations, for 8 ranks and 32
/// microbatches.
fn check_idle(config: &LowerConfig, name: &str, stages_per_rank: u32, bubble: f64, peak: u64) {
    let stages_per_rank = Some(stages_per_rank);
    let spec = ScheduleSpec { ranks: 8, stages_per_rank, microbatches: 32, ..ScheduleSpec::default() };
    let schedule = generate(name, &spec).expect("a schedule");
    let program = lower(&schedule, config).expect("a program");
    let summary = summarize(&program, &Costs::default()).expect("it runs");
    assert!((summary.bubble_fraction - bubble).abs() < 1e-9, "{name}: {}", summary.bubble_fraction);
    assert_eq!(summary.peak_activations.iter().max(), Some(&peak), "{name}");
}

#[test]
fn closed_forms() {
    // A rank computes for 3 v m units; `idle` is the numerator.
    let bubble = |idle: f64, stages_per_rank: f64| idle / (3.0 * 32.0 * stages_per_rank + idle);
    // (p - 1) (F + B), as for all schedules that neither interleave nor split.
    check_closed_form("gpipe", 1, bubble(21.0, 1.0), 32);
    check_closed_form("1f1b", 1, bubble(21.0, 1.0), 8);
    // The same divided by v, through interleaving; the peak is 1.22 p stages of a quarter each.
    check_closed_form("interleaved1f1b", 4, bubble(21.0, 4.0), 39);
    // (p - 1) (F + I - W).
    check_closed_form("zb-h1", 1, bubble(7.0, 1.0), 8);
    check_closed_form("interleaved-zb-h1", 4, bubble(7.0, 4.0), 32);
    check_closed_form("zbvzerobubble", 2, bubble(7.0, 2.0), 16);
    // (p - 1) (FB + B - 3 W), as DualPipe's authors give it, where FB is the time that an overlap adds to the
    // critical path. They assume that F and B together take the time of B; here the next rank continues when
    // F ends. Both give p
    // - 1. The peak is one activation more than 2 p, because the forward of an overlap starts before its
    //   backward ends.
    check_closed_form("dualpipev", 2, bubble(7.0, 2.0), 17);
    check_closed_form("v-half", 2, bubble(17.0, 2.0), 10);
}

#[test]
fn gradients_that_leave_early_save_the_weights_of_the_bubble() {
    let early = LowerConfig { send_early: true, ..LowerConfig::from(Level::Comms) };
    let check = |name, stages_per_rank: u32, idle: f64, peak| {
        let bubble = idle / (3.0 * 32.0 * f64::from(stages_per_rank) + idle);
        check_idle(&early, name, stages_per_rank, bubble, peak);
    };
    // (p - 1) (F + I), with the same peaks.
    check("gpipe", 1, 14.0, 32);
    check("1f1b", 1, 14.0, 8);
    check("interleaved1f1b", 4, 14.0, 39);
    // If the schedule already splits the backwards on its critical path, nothing changes.
    check("zb-h1", 1, 7.0, 8);
    check("zbvzerobubble", 2, 7.0, 16);
    check("dualpipev", 2, 7.0, 17);
}

#[test]
fn a_summary_is_json() {
    let summary = summarize(&generated("1f1b", 2, 2), &Costs::default()).expect("it runs");
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(
        json,
        serde_json::json!({
            "makespan": 9.0,
            "steps": 10,
            "bubble_fraction": 1.0 - 6.0 / 9.0,
            "bubble_per_rank": [1.0 - 6.0 / 9.0, 1.0 - 6.0 / 9.0],
            // Rank 0 spans the whole step, and rank 1 computes without a gap.
            "span_bubble_fraction": (1.0 - 6.0 / 9.0) / 2.0,
            "exposed_comm_fraction": 0.0,
            "peak_activations": [2, 1],
        })
    );
}

/// Checks that a makespan is not below the critical path of one microbatch and the work of the others.
#[test]
fn makespans_are_bounded_below() {
    for hop in [0.0, 0.3] {
        for (ranks, microbatches) in [(1, 1), (2, 5), (4, 4), (5, 9)] {
            let program = generated("1f1b", ranks, microbatches);
            let run = timed(&program, &with_hop(hop)).expect("it runs");
            let (p, m) = (f64::from(ranks), f64::from(microbatches));
            let path = 3.0 * p + 2.0 * (p - 1.0) * hop + 3.0 * (m - 1.0);
            assert!(run.timeline().makespan() >= path - 1e-9, "{ranks} {microbatches} {hop}");
            assert!(logical(&program).is_ok());
        }
    }
}

/// Returns the program of Seq1F1B, whose microbatches are cut into `slices` slices.
fn sliced(ranks: u32, microbatches: u32, slices: u32) -> Program {
    let spec = ScheduleSpec { ranks, microbatches, slices: Slices::new(slices), ..ScheduleSpec::default() };
    let schedule = generate("seq1f1b", &spec).expect("a schedule");
    lower(&schedule, &LowerConfig::from(Level::Comms)).expect("a program")
}

#[test]
fn a_slice_takes_its_share() {
    let costs = Costs {
        sizes: vec![StageSizes { output: 3, ..StageSizes::default() }],
        link: Link { latency: 0.0, bandwidth: 10.0 },
        ..Costs::default()
    };
    let run = timed(&sliced(2, 1, 2), &costs).expect("it runs");
    let events = run.timeline().events().iter().filter(|event| event.rank == Rank::new(0));
    let found: Vec<String> =
        events.map(|event| format!("{}@{:.2}-{:.2}", event.action, event.start, event.end)).collect();
    // A forward of a slice takes half a second, a backward a second, and a message of 2 of the 3 bytes 0.2 s.
    let expected = "0F0@0.00-0.50 0SEND_F0@0.50-0.70 0F1@0.50-1.00 0SEND_F1@1.00-1.20 0RECV_B1@2.70-2.90 \
                    0B1@2.90-3.90 0RECV_B0@3.90-3.90 0B0@3.90-4.90";
    assert_eq!(found.join(" "), expected);
}

#[test]
fn slices_have_the_bubble_of_more_microbatches() {
    for (ranks, microbatches, slices) in [(4, 8, 4), (3, 1, 5), (8, 32, 2)] {
        let run = timed(&sliced(ranks, microbatches, slices), &Costs::default()).expect("it runs");
        let (p, m, k) = (f64::from(ranks), f64::from(microbatches), f64::from(slices));
        let makespan = 3.0 * m + 3.0 * (p - 1.0) / k;
        assert!((run.timeline().makespan() - makespan).abs() < 1e-9, "{ranks} {microbatches} {slices}");
        let summary = summarize(&sliced(ranks, microbatches, slices), &Costs::default()).expect("it runs");
        assert!((summary.bubble_fraction - (p - 1.0) / (k * m + p - 1.0)).abs() < 1e-9);
        assert_eq!(summary.slices, Some(slices));
        assert_eq!(summary.peak_activations[0], u64::from((ranks + slices - 1).min(microbatches * slices)));
    }
}

#[test]
fn attention_makes_later_slices_longer() {
    let costs: Costs = "F=8,I=8,W=8,attention=0.5".parse().expect("costs");
    let run = timed(&sliced(1, 1, 2), &costs).expect("it runs");
    let lengths: Vec<(String, f64)> = run
        .timeline()
        .events()
        .iter()
        .map(|event| (event.action.to_string(), event.end - event.start))
        .collect();
    let expected = [("0F0", 3.0), ("0F1", 5.0), ("0B1", 9.0), ("0B0", 7.0)];
    assert_eq!(lengths, expected.map(|(action, length)| (action.to_owned(), length)));
    // Slices of different length wait for each other. The bubble grows, and the work stays.
    let even = summarize(&sliced(4, 4, 4), &Costs::default()).expect("it runs");
    let uneven = summarize(&sliced(4, 4, 4), &"attention=0.5".parse().expect("costs")).expect("it runs");
    assert!(uneven.makespan > even.makespan, "{} {}", uneven.makespan, even.makespan);
    let work =
        |summary: &pipewright_schedule::simulate::Summary| summary.makespan * (1.0 - summary.bubble_fraction);
    assert!((work(&even) - work(&uneven)).abs() < 1e-9);
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
