//! Microbatches that are cut into slices.

use pipewright_schedule::costs::{Link, StageSizes};
use pipewright_schedule::simulate::{summarize, timed};
use pipewright_schedule::{Costs, Level, LowerConfig, Program, Rank, ScheduleSpec, Slices, generate, lower};

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
