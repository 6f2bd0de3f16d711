//! Tests of the causes that the page of `view` gives for bubbles, for predicted and measured timelines of
//! several schedules, with collectives and waits for sends.

use std::ffi::OsStr;
use std::num::NonZeroU32;
use std::path::Path;

use pipewright_schedule::costs::{Link, SkipTransfer, StageCosts};
use pipewright_schedule::csv::{parse_program, parse_schedule};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::picture::RecordedStep;
use pipewright_schedule::{
    Costs, Event, Level, LowerConfig, ScheduleSpec, StageIndex, Timeline, generate, lower,
};
use serde_json::json;

use crate::browser::Browser;
use crate::made::{Made, pipewright};
use crate::view_run::trained;

/// Defines `faults(source)`, which returns the bubbles of a timeline that the page does not explain: their
/// tip and their panel have to name a cause, and their chain of causes has to end. In a prediction every gap
/// has a cause: the chain begins at the start of the step, and the times in it add up to the time at which it
/// ends. Also defines `kinds(source)`, which counts the causes.
const FAULTS: &str = "
    window.chainOf = ({ lane, next }) => next < 0 ? criticalPath(lane.source) : chainTo(lane, next);
    window.wordsOf = (bubble) => explainBubble({ ...bubble, chain: chainOf(bubble) }).map(({ textContent }) => textContent);
    window.tipOf = ({ lane, from, to }) => describe({ rank: lane, time: (from + to) / 2 }).at(-1);
    window.faultOf = (bubble) => {
        const { lane, next, to } = bubble, { source } = lane, chain = chainOf(bubble), [title, , why] = wordsOf(bubble), tip = tipOf(bubble);
        if (!title.startsWith('Bubble of ') || !(why.length > 60 || why.includes('The step ends when ')) || /undefined|null|NaN/.test(wordsOf(bubble).join() + tip)) return 'words: ' + why;
        if (!/^bubble of .*( waits? (for|until) |; the step ends |: no message is missing)/.test(tip)) return 'tip: ' + tip;
        if (chain.at(-1).cause.lane || chain.length > source.lanes.reduce((sum, { cells }) => sum + cells.start.length, 0)) return 'chain: ' + tip;
        if (source.step) return null;
        const times = next < 0 ? timesOfStep(source) : timesOf(chain), sum = [...times.values()].reduce((sum, time) => sum + time, 0);
        if (times.has('gaps') && times.get('gaps') > source.slack) return 'gaps: ' + tip;
        const end = next < 0 ? source.end : lane.cells.end[next];
        return Math.abs(sum - end) > 1e-6 * source.end ? `the chain spends ${sum}, not ${end}: ` + tip : null;
    };
    window.faults = (source) => bubblesOf(source).map(faultOf).filter(Boolean);
    window.kinds = (source) => {
        const counts = {};
        for (const { lane, next } of bubblesOf(source)) {
            const via = next < 0 ? 'end' : causeOf(lane, next).via;
            counts[via] = (counts[via] ?? 0) + 1;
        }
        return counts;
    };";

/// The timeline of the what-if panel at the costs of the page, with the causes that the page finds.
const AGAIN: &str = "(window.again ??= runProgram('what if', programFor(whatIf.microbatches), costsOfWhatIf(programFor(whatIf.microbatches))))";

/// Opens the page of a lowered program whose collectives take time.
fn open_collectives(schedule: &str) -> Option<(Made, Browser)> {
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
    let program = lower(&generate(schedule, &spec).expect("a schedule"), &LowerConfig::from(Level::Full));
    let mut costs: Costs = "hop=0.25".parse().expect("costs");
    costs.stages[0] = StageCosts { unshard: 0.6, reduce_grad: 0.8, ..costs.stages[0] };
    let made = Made::explained(&program.expect("a program"), &costs, &[]);
    let browser = open(&made.path())?;
    Some((made, browser))
}

fn open(page: &Path) -> Option<Browser> {
    let mut browser = Browser::open(page, 1200, 900)?;
    browser.value(&format!("(() => {{ {FAULTS} }})()"));
    Some(browser)
}

/// Checks that the page explains every bubble of a timeline, and that each of these causes occurs.
fn check(browser: &mut Browser, source: &str, name: &str, causes: &[&str]) {
    assert_eq!(browser.value(&format!("faults({source})")), json!([]), "{name}");
    let kinds = browser.value(&format!("kinds({source})"));
    for cause in causes {
        assert!(kinds[cause].as_u64().is_some_and(|count| count > 0), "{name}: {cause} in {kinds}");
    }
}

/// Makes the page of a schedule's program, lowered further by `pass` if there is one.
fn lowered(schedule: &str, level: &str, pass: Option<&str>) -> Made {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("program.csv");
    let run = |arguments: &str| {
        pipewright(arguments.split(' ').map(OsStr::new).chain([OsStr::new("-o"), file.as_os_str()]));
    };
    run(&format!("schedule {schedule} --ranks 4 --microbatches 8 --level {level}"));
    if let Some(pass) = pass {
        run(&format!("lower {} --pass {pass}", file.display()));
    }
    Made::view(&format!("{} --cost hop=0.25", file.display()))
}

#[test]
fn every_bubble_of_a_prediction_has_a_cause() {
    for name in ["1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev"] {
        let made = lowered(name, "full", None);
        let Some(mut browser) = open(&made.path()) else { return };
        check(&mut browser, "predictedSource", name, &["message", "end"]);
        check(&mut browser, AGAIN, name, &["message", "end"]);
        drop(browser);
        let Some((_made, mut browser)) = open_collectives(name) else { return };
        // Only a rank with several stages waits for a sum before it has computed everything.
        let has_chunks = name != "1f1b";
        for source in ["predictedSource", AGAIN] {
            check(&mut browser, source, name, &["message", "end", "gather"]);
            assert_eq!(browser.holds(&format!("kinds({source}).sum > 0")), has_chunks, "{name}");
        }
        let kinds = format!("JSON.stringify(kinds({AGAIN})) === JSON.stringify(kinds(predictedSource))");
        assert!(browser.holds(&kinds), "{name}");
    }
}

#[test]
fn waits_for_sends_and_collectives_are_named_with_what_they_wait_for() {
    let made = lowered("1f1b", "comms", Some("wait-send"));
    let Some(mut browser) = open(&made.path()) else { return };
    check(&mut browser, "predictedSource", "wait-send", &["message", "end"]);
    // With messages that take longer than two actions, ranks wait for their own messages in between.
    let program = parse_program("0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n");
    let made = Made::explained(&program.expect("a program"), &"hop=5".parse().expect("costs"), &[]);
    drop(browser);
    let Some(mut browser) = open(&made.path()) else { return };
    for source in ["predictedSource", AGAIN] {
        check(&mut browser, source, "slow", &["send", "message"]);
        let words = browser.value(&format!(
            "wordsOf(bubblesOf({source}).find(({{ lane, next }}) => lane.rank === 0 && next === 1))"
        ));
        let words = words[2].as_str().unwrap_or_default().to_owned();
        let expected = "The program waits (WAIT_SEND_F) until the message of 0F0, which ends at 1, has left. That is at 6.";
        assert!(words.ends_with(expected), "{words}");
    }
    drop(browser);
    let Some((_made, mut browser)) = open_collectives("interleaved1f1b") else { return };
    for source in ["predictedSource", AGAIN] {
        check_collectives(&mut browser, source);
    }
}

/// Checks what the page says about collectives in a timeline.
fn check_collectives(browser: &mut Browser, source: &str) {
    let mut words = |which: &str| {
        let words = browser.value(&format!("wordsOf(bubblesOf({source}).find({which})).join(' ')"));
        words.as_str().unwrap_or_default().to_owned()
    };
    let gather = words("({ lane, next }) => lane.rank === 0 && next === 0");
    let expected = "It waits for the parameters of stage 0. The communication begins at the start of the step and ends at 0.6. \
                    The other replicas are not in this picture; the prediction assumes that they are as far as this one.";
    assert!(gather.contains(expected), "{gather}");
    let sum = words("({ lane, next }) => next >= 0 && causeOf(lane, next).via === 'sum'");
    assert!(
        sum.contains("The program waits (WAIT_REDUCE_GRAD) for the sum of the gradients of stage ")
            && sum.contains("The communication begins after "),
        "{sum}"
    );
    let end = words("({ lane, next }) => next < 0 && lane.rank === 3");
    assert!(end.contains("The rank has computed all its actions. The program waits (WAIT_REDUCE_GRAD) for the sum of the gradients of stage 3"), "{end}");
    assert!(end.contains("The rank has no work left. The step ends with a wait of rank 0."), "{end}");
    let last = words("({ lane, next }) => next < 0 && lane.rank === 0");
    assert!(last.contains("The step ends then."), "{last}");
}

#[test]
fn every_bubble_of_a_run_with_replicas_has_a_cause() {
    let replicas = "mesh.data_parallel=2";
    let sharded = [
        replicas,
        "mesh.data_parallel_mode=sharded",
        "pipeline.schedule=interleaved1f1b",
        "pipeline.stages_per_rank=2",
    ];
    let runs = [
        vec![replicas],
        sharded.to_vec(),
        vec!["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2"],
    ];
    for set in runs {
        let folder = trained(&[set.as_slice(), &["run.timelines=3"]].concat());
        let page = folder.path().join("view.html");
        pipewright([
            OsStr::new("view"),
            folder.path().join("out").as_os_str(),
            OsStr::new("-o"),
            page.as_os_str(),
        ]);
        let Some(mut browser) = open(&page) else { return };
        for step in 0..browser.number("recorded.length") as u32 {
            browser.value(&format!("showStep({step})"));
            check(&mut browser, "measuredSource()", &format!("{set:?}"), &["message"]);
        }
        check(&mut browser, "predictedSource", &format!("{set:?}"), &["message"]);
        let ends = "bubblesOf(measuredSource()).filter(({ next }) => next < 0).map((bubble) => wordsOf(bubble).join(' '))";
        let added = format!(
            "{ends}.some((words) => words.includes('The last replica begins to add its gradients after '))"
        );
        assert_eq!(browser.holds(&added), set.contains(&replicas), "{set:?}");
    }
}

#[test]
fn a_skip_connection_is_a_cause() {
    // The message from stage 0 to stage 2 takes longer than both messages over stage 1.
    let program = parse_program(
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n2RECV_F0,2F0,2B0,2SEND_B0\n",
    );
    let skips = vec![SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: 6 }];
    let link = Link { latency: 0.1, bandwidth: 1.0 };
    let costs = Costs { skips, link, ..Costs::default() };
    let made = Made::explained(&program.expect("a program"), &costs, &[]);
    let Some(mut browser) = open(&made.path()) else { return };
    for source in ["predictedSource", AGAIN] {
        check(&mut browser, source, "skips", &["message"]);
        let cause = format!("causeOf({source}.lanes[2], 0)");
        let is_skip = format!("{cause}.tensor === 'skip connection' && {cause}.lane.rank === 0");
        assert!(browser.holds(&is_skip), "{source}");
    }
}

/// Opens the page of a program with a recorded step, whose events are `ACTION@START-END` for each rank.
fn open_recorded(program: &str, events: &[&str]) -> Option<(Made, Browser)> {
    let event = |(rank, text): (u32, &str)| {
        let (action, times) = text.split_once('@').expect("an event");
        let (start, end) = times.split_once('-').expect("two times");
        let number = |text: &str| text.parse().expect("a number");
        let action = action.parse().expect("an action");
        Event { rank: rank.into(), action, start: number(start), end: number(end) }
    };
    let rows = (0..).zip(events).flat_map(|(rank, row)| row.split(' ').map(move |text| (rank, text)));
    let timeline = Timeline::new(events.len() as u32, rows.map(event).collect());
    let program = parse_program(program).expect("a program");
    let made = Made::explained(&program, &Costs::default(), &[RecordedStep { step: 3, before: 0, timeline }]);
    let browser = open(&made.path())?;
    Some((made, browser))
}

#[test]
fn recorded_communication_in_a_gap_is_its_cause() {
    // Rank 0 sends between its actions. The message of 0F1 is made at 2.9 and received from 3 to 6.
    let program = "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2\n1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2\n";
    let events = ["0F0@0-1 0SEND_F0@1-1.8 0F1@1.9-2.9 0F2@5-6", "1F0@2-3 1RECV_F1@3-6 1F1@6-7"];
    let Some((_made, mut browser)) = open_recorded(program, &events) else { return };
    assert_eq!(browser.value("faults(measuredSource())"), json!([]));
    let words = |browser: &mut Browser, rank: u32, next: u32| {
        let bubble = format!(
            "bubblesOf(measuredSource()).find((bubble) => bubble.lane.rank === {rank} && bubble.next === {next})"
        );
        browser.value(&format!("wordsOf({bubble})[2]")).as_str().unwrap_or_default().to_owned()
    };
    let sends = "No message is missing. The runtime or the machine took the time before it. For most of it the rank ran 0SEND_F0, which took 0.8.";
    assert!(words(&mut browser, 0, 1).ends_with(sends), "{}", words(&mut browser, 0, 1));
    let idle = words(&mut browser, 0, 2);
    assert!(idle.ends_with("The runtime or the machine took the time before it."), "{idle}");
    let receives = words(&mut browser, 1, 1);
    assert!(
        receives.contains("the message of 0F1 from rank 0")
            && receives.ends_with("the message arrived at 6."),
        "{receives}"
    );
}

/// Two ranks: the gradient waits behind the receive of the second activation.
const RECEIVE_IN_FRONT: &str = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                                1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";

#[test]
fn an_operation_in_front_of_a_message_is_a_cause() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("program.csv");
    std::fs::write(&file, RECEIVE_IN_FRONT).expect("the scratch folder takes files");
    let view = |arguments: &str| Made::view(&format!("{} --cost hop=5 {arguments}", file.display()));
    let made = view("--transport pair");
    let Some(mut browser) = open(&made.path()) else { return };
    for source in ["predictedSource", AGAIN] {
        check(&mut browser, source, "pair", &["message", "queue"]);
        let bubble = format!("bubblesOf({source}).find(({{ lane, next }}) => lane.rank === 0 && next === 2)");
        let words = browser.value(&format!("wordsOf({bubble})[2]")).as_str().unwrap_or_default().to_owned();
        let expected = "That action ends at 9. On rank 1, receive 1RECV_F1 waits in front of 1SEND_B0 on the same \
                        communicator (head-of-line blocking) until 12. The message arrives at 17.";
        assert!(words.ends_with(expected), "{words}");
        let tip = browser.value(&format!("tipOf({bubble})")).as_str().unwrap_or_default().to_owned();
        let expected = "; receive 1RECV_F1 waits in front of 1SEND_B0 on the same communicator";
        assert!(tip.ends_with(expected), "{tip}");
    }
    assert!(browser.holds(
        "document.body.textContent.includes('The prediction runs on the transport pair: one queue per pair')"
    ));
    drop(browser);
    // On edges, the gradient does not wait for the activation.
    let made = view("--transport edge");
    let Some(mut browser) = open(&made.path()) else { return };
    check(&mut browser, "predictedSource", "edge", &["message"]);
    assert!(
        browser.holds("kinds(predictedSource).queue === undefined && predictedSource.waits.length === 1")
    );
}

#[test]
fn every_bubble_on_a_transport_has_a_cause() {
    for (name, transport) in [("1f1b", "pair"), ("zbvzerobubble", "rank"), ("dualpipev", "rank --grouped")] {
        let made =
            Made::view(&format!("{name} --ranks 4 --microbatches 8 --cost hop=0.25 --transport {transport}"));
        let Some(mut browser) = open(&made.path()) else { return };
        check(&mut browser, "predictedSource", name, &["message", "queue", "end"]);
        check(&mut browser, AGAIN, name, &["message", "queue", "end"]);
    }
}

/// Returns what the page says of the bubbles of a timeline: in the panel with its chain of causes and its shares, and in the tip.
fn said(browser: &mut Browser, source: &str) -> String {
    let said = browser.value(&format!(
        "bubblesOf({source}).map((bubble) => {{ const chain = chainOf(bubble);
            return [wordsOf(bubble).join(' '), chainList(chain).textContent, shareBar(timesOf(chain)).textContent, tipOf(bubble)].join(' / ');
        }}).join(' | ')"
    ));
    said.as_str().expect("a text").to_owned()
}

/// A program that sums no gradients reads a frozen base from its file.
#[test]
fn a_wait_for_the_disk_is_named() {
    let rows = "0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n";
    let schedule = parse_schedule(rows).expect("a schedule");
    let window = NonZeroU32::new(1);
    let lowering = TrainingLowering { stream_window: window, ..TrainingLowering::default() };
    let program = for_training(&schedule, &lowering).expect("a sound program");
    let mut costs = Costs::default();
    costs.stages[0] = StageCosts { unshard: 5.0, ..costs.stages[0] };
    let made = Made::explained(program.as_program(), &costs, &[]);
    let Some(mut browser) = open(&made.path()) else { return };
    check(&mut browser, "predictedSource", "disk", &["gather"]);
    let words = said(&mut browser, "predictedSource");
    for part in [
        "It waits for the disk, which reads the base of stage 1 from its file. The read begins after ",
        ", after the disk had read a base on rank 0",
        "disk 5, ",
        "waits for the disk, which reads the base of stage 1 from its file",
    ] {
        assert!(words.contains(part), "{words}\nhas not: {part}");
    }
    assert!(!words.contains("replicas") && !words.contains("gather, reduce"), "{words}");
}

/// In a recorded step, the end of the read is known. Replicas that read a base send no parameters; without the base in a file, the
/// same program gathers them.
#[test]
fn a_recorded_wait_for_the_disk_is_named_with_replicas_too() {
    let program = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n";
    let program = parse_program(program).expect("a program");
    let event = |(action, start, end): (&str, f64, f64)| {
        let action = action.parse().expect("an action");
        Event { rank: 0.into(), action, start, end }
    };
    let events =
        [("0UNSHARD", 0.0, 4.0), ("0F0", 4.0, 5.0), ("0B0", 5.0, 7.0), ("0REDUCE_GRAD", 7.0, 8.0)].map(event);
    for (reads_base, purpose, share) in [
        (true, "It waits for the disk, which reads the base of stage 0 from its file until 4.", "disk 4, "),
        (
            false,
            "It waits for the parameters of stage 0 until 4. The other replicas are not",
            "gather, reduce 4, ",
        ),
    ] {
        let timeline = Timeline::new(1, events.to_vec());
        let steps = [RecordedStep { step: 3, before: 0, timeline }];
        let made = Made::of_base(&program, &Costs::default(), &steps, reads_base);
        let Some(mut browser) = open(&made.path()) else { return };
        assert_eq!(browser.value("faults(measuredSource())"), json!([]));
        let words = said(&mut browser, "measuredSource()");
        assert!(words.contains(purpose) && words.contains(share), "{words}\nhas not: {purpose} or {share}");
        assert_eq!(words.contains("had read a base on"), reads_base, "{words}");
    }
}
