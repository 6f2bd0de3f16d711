//! Delayed schedules: sound for any number of batches, with little idle time and few activations.

use std::collections::HashMap;
use std::num::NonZeroU32;

use pipewright_schedule::communicator::{Communicator, Streams, judge};
use pipewright_schedule::delay::Delayed;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::{ProgramSource, SourceError, TrainingLowering, for_training, order_safe};
use pipewright_schedule::simulate::{Steady, logical, steady};
use pipewright_schedule::{
    Action, ActionKind, Costs, Level, LowerConfig, Rank, Schedule, ScheduleSpec, TrainedStages,
    ValidatedProgram, csv, generate,
};

fn spec(ranks: u32, microbatches: u32) -> ScheduleSpec {
    ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() }
}

fn batches(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).expect("a batch")
}

fn lowered(schedule: Schedule) -> Result<ValidatedProgram, SourceError> {
    ProgramSource::Schedule(schedule).program(&LowerConfig::from(TrainingLowering::default()))
}

/// Makes the batches of `name` overlap, and lowers enough of them for training.
fn program(name: &str, spec: &ScheduleSpec, costs: &Costs) -> ValidatedProgram {
    let schedule = generate(name, spec).unwrap_or_else(|error| panic!("{name}: {error}"));
    let alone = lowered(schedule).unwrap_or_else(|error| panic!("{name}: {error}"));
    let delayed = Delayed::at_costs(&alone, costs).unwrap_or_else(|error| panic!("{name}: {error}"));
    let written = delayed.batches(delayed.enough_batches()).expect("batches");
    check_versions(&written);
    lowered(written).unwrap_or_else(|error| panic!("{name} {spec:?}: {error}"))
}

/// Runs the rows with a version of the parameters for each rank, and checks that each batch reads the version of the
/// update with the batch two before it, in its forwards and its backwards. Shares no code with the validator.
fn check_versions(schedule: &Schedule) {
    let per_batch = schedule.microbatches() / schedule.batches();
    for row in schedule.rows() {
        let mut left: HashMap<u32, usize> = HashMap::new();
        let batch = |action: &Action| action.microbatch().expect("a microbatch").get() / per_batch;
        row.iter().flatten().for_each(|action| *left.entry(batch(action)).or_default() += 1);
        let mut version = 0;
        for action in row.iter().flatten() {
            let batch = batch(action);
            // Batches 0 and 1 read version 0, and batch t + 2 the version after the update with batch t.
            let needed = batch.saturating_sub(1);
            assert!(
                needed == version || needed + 1 == version,
                "{action} needs version {needed} of {version}"
            );
            let left = left.get_mut(&batch).expect("counted");
            *left -= 1;
            if *left == 0 {
                version = batch + 1;
            }
        }
        assert_eq!(version, schedule.batches());
    }
}

fn steady_of(name: &str, spec: &ScheduleSpec, costs: &str) -> Steady {
    let costs: Costs = costs.parse().expect(costs);
    steady(program(name, spec, &costs).as_program(), &costs).expect("a steady state")
}

fn trains(name: &str, spec: &ScheduleSpec) -> bool {
    generate(name, spec).is_ok_and(|schedule| {
        schedule.rows().iter().flatten().flatten().any(|action| action.kind() != ActionKind::Forward)
    })
}

#[test]
fn every_schedule_is_sound_and_no_slower_than_with_a_drain() {
    for generator in catalogue() {
        for (ranks, microbatches) in [(1, 1), (1, 3), (2, 1), (2, 4), (3, 3), (4, 2), (4, 8), (5, 10)] {
            let spec = spec(ranks, microbatches);
            if !trains(generator.name, &spec) {
                continue;
            }
            for costs in ["F=1,I=1,W=1", "F=1,I=1.3,W=0.7,hop=0.2", "F=0,I=0,W=0"] {
                let schedule = generate(generator.name, &spec).expect("a schedule");
                let parsed: Costs = costs.parse().expect(costs);
                let alone =
                    steady(lowered(schedule).expect("a program").as_program(), &parsed).expect("a run");
                let delayed = steady_of(generator.name, &spec, costs);
                let name = generator.name;
                assert!(
                    delayed.period <= alone.period * 1.000_001,
                    "{name} {ranks} {microbatches} {costs}: {} after {}",
                    delayed.period,
                    alone.period
                );
            }
        }
    }
}

#[test]
fn one_forward_one_backward_is_full_with_its_own_memory() {
    for ranks in [2, 4, 8, 16, 64] {
        let steady = steady_of("1f1b", &spec(ranks, ranks.max(4)), "F=1,I=1,W=1");
        assert_eq!((steady.period, steady.bubble_fraction), (3.0 * f64::from(ranks.max(4)), 0.0));
        let peaks: Vec<u64> = (0..ranks).map(|rank| u64::from(ranks - rank)).collect();
        assert_eq!(steady.peak_activations, peaks, "{ranks} ranks");
    }
}

#[test]
fn split_backwards_are_full_with_their_own_memory() {
    for name in ["zb-h1", "interleavedzerobubble", "zb-greedy"] {
        for ranks in [2, 4, 8] {
            let steady = steady_of(name, &spec(ranks, ranks.max(4)), "F=1,I=1,W=1");
            assert!(steady.bubble_fraction < 1e-9, "{name}, {ranks} ranks: {}", steady.bubble_fraction);
            let stages = if name == "interleavedzerobubble" { 2 } else { 1 };
            assert_eq!(steady.peak_activations, vec![u64::from(ranks * stages); ranks as usize]);
        }
    }
}

#[test]
fn a_batch_waits_for_its_update() {
    // The way through eight stages and back takes 24, and the second microbatch 3 more. Two batches may overlap.
    let steady = steady_of("1f1b", &spec(8, 2), "F=1,I=1,W=1");
    assert!((13.5..=16.0).contains(&steady.period), "{}", steady.period);
}

#[test]
fn the_rows_are_written_out_with_their_batches() {
    let schedule = generate("1f1b", &spec(2, 2)).expect("a schedule");
    let delayed = Delayed::of(&schedule, &Costs::default()).expect("a delayed schedule");
    let row =
        |rank| delayed.row(Rank::new(rank)).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!([row(0), row(1)], ["0F1 0B0 0F0' 0B1".to_owned(), "1F0 1B0 1F1 1B1".to_owned()]);
    let written = delayed.batches(batches(2)).expect("two batches");
    assert_eq!((written.batches(), written.microbatches()), (2, 4));
    assert_eq!(
        csv::print_schedule(&written),
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    );
}

#[test]
fn a_batch_that_comes_too_early_is_a_violation() {
    let schedule = generate("1f1b", &spec(1, 1)).expect("a schedule");
    let delayed = Delayed::of(&schedule, &Costs::default()).expect("a delayed schedule");
    let written = delayed.batches(batches(3)).expect("three batches");
    let mut row = written.rows()[0].clone();
    let first = row.iter().position(|cell| cell.is_some_and(|action| action.to_string() == "0F2"));
    let moved = row.remove(first.expect("the forward of batch 2"));
    row.insert(1, moved);
    let moved = Schedule::new(written.placement().clone(), 3, vec![row]).expect("rows");
    let moved = moved.with_batches(batches(3)).expect("three batches");
    let error = lowered(moved).expect_err("batch 2 before the end of batch 0");
    let expected = "0F2 of batch 2 reads the parameters after the update with batch 0";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn replicas_and_sharded_parameters_are_refused() {
    let schedule = generate("1f1b", &spec(2, 2)).expect("a schedule");
    let written = Delayed::of(&schedule, &Costs::default()).and_then(|delayed| delayed.batches(batches(3)));
    let lowering = TrainingLowering { replicas: 2, ..TrainingLowering::default() };
    let source = ProgramSource::Schedule(written.expect("three batches"));
    let error = source.program(&LowerConfig::from(lowering)).expect_err("replicas").to_string();
    assert!(error.contains("once per batch"), "{error}");
}

#[test]
fn bad_schedules_are_refused() {
    let refused = |schedule: &Schedule| {
        Delayed::of(schedule, &Costs::default()).expect_err("a schedule that cannot be delayed").to_string()
    };
    let written = |count| {
        let schedule = generate("1f1b", &spec(2, 2)).expect("a schedule");
        let delayed = Delayed::of(&schedule, &Costs::default()).expect("a delayed schedule");
        delayed.batches(batches(count))
    };
    assert!(refused(&written(2).expect("two batches")).contains("overlap already"));
    assert!(written(u32::MAX).expect_err("too many").to_string().contains("more than a schedule holds"));
    let stuck = csv::parse_schedule("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n").expect("rows");
    assert!(refused(&stuck).contains("deadlock"));
    let missing = csv::parse_schedule("0F0,0B0\n1B0\n").expect("rows");
    assert!(refused(&missing).contains("1F0"));
}

/// A program with messages has the turns of its computations, and each rank computes a batch in its own order.
#[test]
fn a_program_has_the_rows_of_its_schedule() {
    for name in ["gpipe", "1f1b", "zb-h1", "interleaved1f1b", "zbvzerobubble", "dualpipev", "seq1f1b"] {
        let schedule = generate(name, &spec(2, 4)).expect("a schedule");
        let program = lowered(schedule).unwrap_or_else(|error| panic!("{name}: {error}"));
        let delayed = Delayed::of_program(&program).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (rank, turns) in (0..).map(Rank::new).zip(delayed.turns()) {
            let of_batch = |is_next| delayed.row(rank).iter().filter(move |cell| cell.is_next == is_next);
            let batch: Vec<Action> = of_batch(true).chain(of_batch(false)).map(|cell| cell.action).collect();
            let row = program.row(rank).iter().copied().filter(|action| action.is_compute());
            assert_eq!(row.collect::<Vec<_>>(), batch, "{name}, rank {rank}");
            assert_eq!(turns.len(), batch.len());
        }
    }
    let program = lowered(generate("1f1b", &spec(2, 4)).expect("a schedule")).expect("it lowers");
    let text =
        |row: &Vec<bool>| row.iter().map(|is_next| if *is_next { 'n' } else { 'o' }).collect::<String>();
    let rows: Vec<String> =
        Delayed::of_program(&program).expect("it overlaps").turns().iter().map(text).collect();
    // The last rank sends its gradients early, so its backwards are two computations.
    assert_eq!(rows, ["oooooono", "oooooooooooo"]);
}

/// Stages without trained parameters have no weight gradients, and below the first trained one no backward. Such ranks keep no
/// activations, or none for longer than their gradient takes.
#[test]
fn stages_that_are_frozen_overlap_and_are_no_slower_than_with_a_drain() {
    let mut count = 0;
    for generator in catalogue() {
        for (ranks, microbatches) in [(2, 4), (4, 8)] {
            let spec = spec(ranks, microbatches);
            if !trains(generator.name, &spec) {
                continue;
            }
            let schedule = generate(generator.name, &spec).expect("a schedule");
            let stages = schedule.placement().stages();
            let lower_half = |stage: u32| stage < stages / 2;
            let patterns: [&dyn Fn(u32) -> bool; 4] =
                [&lower_half, &|stage| !lower_half(stage), &|stage| stage == 0, &|stage| stage + 1 < stages];
            for (pattern, is_frozen) in patterns.into_iter().enumerate() {
                let trained =
                    TrainedStages::of(&(0..stages).map(|stage| !is_frozen(stage)).collect::<Vec<_>>());
                let name = format!("{}, {ranks} ranks, pattern {pattern}", generator.name);
                let lowered = |schedule: &Schedule, delayed| {
                    let lowering =
                        TrainingLowering { delayed, trained: trained.clone(), ..TrainingLowering::default() };
                    for_training(schedule, &lowering).unwrap_or_else(|error| panic!("{name}: {error}"))
                };
                let delayed = Delayed::of_program(&lowered(&schedule, true))
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
                let batches = delayed.batches(delayed.enough_batches()).expect("batches");
                let costs: Costs = "F=1,I=1,W=1".parse().expect("costs");
                let period = |program: &ValidatedProgram| {
                    steady(program.as_program(), &costs).expect("a steady state").period
                };
                let [overlapping, alone] =
                    [&batches, &schedule].map(|schedule| period(&lowered(schedule, false)));
                assert!(overlapping <= alone * 1.000_001, "{name}: {overlapping} after {alone}");
                count += usize::from(overlapping < alone * 0.95);
            }
        }
    }
    assert!(count > 60, "{count} are faster");
    // The last of four stages is trained: a batch of 8 microbatches takes 3 + 8 * 3, and ranks with nothing to train never wait.
    let schedule = generate("1f1b", &spec(4, 8)).expect("a schedule");
    let trained = TrainedStages::of(&[false, false, false, true]);
    let lowering = TrainingLowering { trained, delayed: true, ..TrainingLowering::default() };
    let program = for_training(&schedule, &lowering).expect("a program");
    let delayed = Delayed::of_program(&program).expect("it overlaps");
    let batches = delayed.batches(delayed.enough_batches()).expect("batches");
    let costs: Costs = "F=1,I=1,W=1".parse().expect("costs");
    let found =
        steady(for_training(&batches, &lowering).expect("a program").as_program(), &costs).expect("a run");
    assert_eq!((found.period, found.peak_activations), (24.0, vec![1; 4]));
}

/// Checks the idle share of schedules with as many microbatches as ranks.
fn check_bubbles(names: &[&str], most: f64) {
    for name in names {
        for ranks in [8, 16] {
            let microbatches = if *name == "dualpipev" { 2 * ranks } else { ranks };
            let steady = steady_of(name, &spec(ranks, microbatches), "F=1,I=1,W=1");
            assert!(steady.bubble_fraction <= most, "{name}, {ranks} ranks: {}", steady.bubble_fraction);
        }
    }
}

/// GPipe and looped BFS run all forwards of a batch before its first backward.
#[test]
fn merged_batches_are_full() {
    check_bubbles(&["gpipe", "loopedbfs", "vocab1f1b"], 0.0);
}

/// Ranks that take the older batch first would wait 4% to 13% of the time.
#[test]
fn batches_by_due_times_are_full() {
    check_bubbles(&["interleaved1f1b", "group-interleaved", "zb-h2", "seq1f1b", "dualpipev"], 0.0125);
}

#[test]
fn split_backwards_are_full_on_more_ranks() {
    check_bubbles(&["zb-h1", "zb-greedy", "interleavedzerobubble", "interleaved-zb-h1"], 1e-9);
}

/// With each batch in the order of the schedule, ranks would wait 2% to 9% of the time. A stream of microbatches is full with the
/// schedule's own memory, or one activation more; the stream of ZBV keeps no more than V-Half's. Hanayo has rows in its own order
/// that are nearly full.
#[test]
fn streams_of_blocks_are_full_with_little_memory() {
    let check = |name: &str, ranks: u32, (bubble, most): (f64, u64)| {
        let steady = steady_of(name, &spec(ranks, ranks), "F=1,I=1,W=1");
        assert!(steady.bubble_fraction < bubble, "{name}, {ranks} ranks: {}", steady.bubble_fraction);
        let peak = steady.peak_activations.into_iter().max();
        assert!(peak.is_some_and(|peak| peak <= most), "{name}, {ranks} ranks: {peak:?}");
    };
    for (ranks, v_min, v_half, hanayo) in [(8, 8, 10, 19), (16, 12, 18, 36)] {
        check("v-min", ranks, (1e-9, v_min));
        check("v-half", ranks, (1e-9, v_half + 1));
        check("zbvzerobubble", ranks, (1e-9, v_half + 1));
        check("hanayo", ranks, (0.0205, hanayo));
    }
}

/// The search is at its limit before the last resort, a stream, is proved.
#[test]
fn a_stream_is_the_last_resort_on_many_ranks() {
    let steady = steady_of("hanayo", &spec(64, 64), "F=1,I=1,W=1");
    assert!(steady.bubble_fraction < 1e-9, "{}", steady.bubble_fraction);
}

/// Lowering gives a program the order of its stream, and then its batches overlap in that order.
#[test]
fn a_program_for_delayed_weights_has_the_order_of_its_stream() {
    let bubble = |program: &ValidatedProgram| {
        let delayed = Delayed::of_program(program).expect("it overlaps");
        let batches = lowered(delayed.batches(delayed.enough_batches()).expect("batches"));
        let batches = batches.expect("it is sound");
        steady(batches.as_program(), &Costs::default()).expect("a steady state").bubble_fraction
    };
    for (name, ranks) in [("v-min", 8), ("v-min", 16), ("v-half", 8), ("v-half", 16), ("zbvzerobubble", 16)] {
        let schedule = generate(name, &spec(ranks, ranks)).expect("a schedule");
        let lowered = |delayed| {
            let lowering = TrainingLowering { delayed, ..TrainingLowering::default() };
            let source = ProgramSource::Schedule(schedule.clone());
            source.program(&LowerConfig::from(lowering)).expect("it is sound")
        };
        let (own, ordered) = (lowered(false), lowered(true));
        assert_ne!(own, ordered, "{name}, {ranks} ranks");
        assert!(ordered.as_program().computation().adds_in_order(), "{name}, {ranks} ranks");
        let [of_own, of_ordered] = [bubble(&own), bubble(&ordered)];
        assert!(of_ordered < 1e-9 && of_own > 1e-3, "{name}, {ranks} ranks: {of_ordered} {of_own}");
        if (name, ranks) == ("v-min", 8) {
            assert!(of_own > 0.02, "{of_own}");
        }
    }
    // 1F1B is full in its own order, and GPipe with sums in descending order keeps it.
    for name in ["1f1b", "loopedbfs"] {
        let schedule = generate(name, &spec(4, 4)).expect("a schedule");
        let of =
            |delayed| for_training(&schedule, &TrainingLowering { delayed, ..TrainingLowering::default() });
        assert_eq!(of(true).expect("it is sound"), of(false).expect("it is sound"), "{name}");
    }
}

/// Three batches of one microbatch. Rank 1 ends batch 0 after it has waited for its gradient of batch 1, which is sent after
/// the output of batch 2 is received. Rank 0 computes that output after the end of batch 0 on rank 1.
#[test]
fn waits_for_updates_count_on_communicators_and_in_ticks() {
    let rows = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2\n\
                1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1I1,1RECV_F2,1SEND_B1,1WAIT_SEND_B1,1W0,1W1,1F2,1I2,1SEND_B2,1W2\n";
    let one_batch = csv::parse_program(rows).expect("rows");
    let delayed = one_batch.clone().with_batches(batches(3)).expect("three batches");
    let communicator = Communicator { streams: Streams::Pair, ..Communicator::default() };
    let verdict = |program| judge(program, Level::Comms, &communicator).expect("whole rows");
    assert!(verdict(&one_batch).is_sound(), "{}", verdict(&one_batch));
    let hang = verdict(&delayed).to_string();
    assert!(hang.contains("rank 0 at position 6 (0F2) waits for the end of batch 0 on rank 1"), "{hang}");
    assert!(logical(&one_batch).is_ok());
    let deadlock = logical(&delayed).expect_err("a deadlock").to_string();
    assert!(deadlock.contains("0F2"), "{deadlock}");
    let error = order_safe(delayed, &communicator).expect_err("no order of the messages").to_string();
    assert!(error.contains("update"), "{error}");
}

#[test]
fn delayed_programs_end_on_communicators_and_in_ticks() {
    for name in ["1f1b", "gpipe", "zb-h1"] {
        let program = program(name, &spec(4, 4), &Costs::default());
        let verdict =
            judge(program.as_program(), Level::Comms, &Communicator::default()).expect("whole rows");
        assert!(verdict.is_sound(), "{name}: {verdict}");
        logical(program.as_program()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
