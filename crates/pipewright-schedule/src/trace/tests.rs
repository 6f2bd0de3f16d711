//! Tests of the trace.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::costs::{Costs, Link, SkipTransfer};
use crate::csv::parse_program;
use crate::ids::StageIndex;
use crate::message_record::MessageRecord;
use crate::schedule::Program;
use crate::simulate::{logical, timed};
use crate::timeline::{ClockSkew, ScopeKind};

/// Returns the entries of a trace.
fn entries(timeline: &Timeline) -> Vec<Value> {
    let trace: Value = serde_json::from_str(&timeline.chrome_trace()).expect("JSON");
    trace["traceEvents"].as_array().expect("a list").clone()
}

fn of_rows(rows: &str) -> Vec<Value> {
    let program = parse_program(rows).expect("a program");
    entries(&logical(&program).expect("no deadlock").timeline(1.0))
}

fn of<'a>(entries: &'a [Value], ph: &str) -> Vec<&'a Value> {
    entries.iter().filter(|entry| entry["ph"] == ph).collect()
}

#[test]
fn slices_processes_and_arrows() {
    let entries = of_rows("0F0,0SEND_F0\n1RECV_F0,1F0\n");
    assert_eq!(["M", "X", "s", "f"].map(|ph| of(&entries, ph).len()), [8, 4, 1, 1]);
    let names: Vec<(&Value, &Value)> =
        of(&entries, "M").iter().map(|entry| (&entry["name"], &entry["args"])).collect();
    assert_eq!(names[4], (&json!("process_name"), &json!({"name": "rank 1"})));
    assert_eq!(names[5], (&json!("process_sort_index"), &json!({"sort_index": 1})));
    assert_eq!(names[6], (&json!("thread_name"), &json!({"name": "rank 1"})));
    let expected = json!({
        "name": "forward", "cat": "forward", "ph": "X", "ts": 2e6, "dur": 1e6, "pid": 2, "tid": 2,
        "args": {"action": "1F0", "stage": 1, "microbatch": 0},
    });
    assert_eq!(*of(&entries, "X")[3], expected);
    let (start, end) = (of(&entries, "s")[0], of(&entries, "f")[0]);
    assert_eq!((&start["pid"], &end["pid"]), (&json!(1), &json!(2)));
    let at = |entry: &Value| entry["ts"].as_f64().expect("a time");
    assert!(at(start) <= at(end) && at(end) < 2e6);
}

#[test]
fn skip_connections_have_a_category_and_threads() {
    let program = parse_program(
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n2RECV_F0,2F0,2B0,2SEND_B0\n",
    );
    let skips = vec![SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: 2 }];
    let link = Link { latency: 0.0, bandwidth: 1.0 };
    let run = timed(&program.expect("a program"), &Costs { skips, link, ..Costs::default() });
    let skew = ClockSkew { uncertainty: 25e-6, change: 1e-6 };
    let timeline = run.expect("no deadlock").timeline().clone().with_clock_skew(Some(skew));
    let trace: Value = serde_json::from_str(&timeline.chrome_trace()).expect("JSON");
    assert_eq!(trace["otherData"], json!({"clock_uncertainty_us": 25.0, "clock_change_us": 1.0}));
    let entries = entries(&timeline);
    let skips: Vec<&Value> = entries.iter().filter(|entry| entry["cat"] == "skip").collect();
    assert_eq!(skips.len(), 4, "{skips:?}");
    let expected = json!({
        "name": "receive skip", "cat": "skip", "ph": "X", "ts": 1e6, "dur": 2e6, "pid": 3, "tid": 6,
        "args": {"action": "2RECV_SKIP_F0 from stage 0", "stage": 2, "microbatch": 0, "peer_stage": 0},
    });
    assert!(skips.contains(&&expected), "{skips:?}");
    assert_eq!(["s", "f"].map(|ph| of(&entries, ph).len()), [6, 6]);
}

#[test]
fn messages_have_the_other_rank_the_bytes_and_the_tensors() {
    let program = parse_program("0F0,0SEND_F0\n1RECV_F0,1F0\n").expect("a program");
    let timeline = logical(&program).expect("no deadlock").timeline(1.0);
    let forms: Arc<[TensorForm]> = Arc::from(
        [("f32", vec![2, 3]), ("i64", vec![2])]
            .map(|(dtype, shape)| TensorForm { dtype: dtype.into(), shape }),
    );
    let message = |rank: u32, action: &str, peer: u32| MessageRecord {
        rank: rank.into(),
        end: MessageEnd::Action(action.parse().expect("an action")),
        peer: peer.into(),
        bytes: 40,
        tensors: forms.clone(),
    };
    let misplaced = [message(0, "0SEND_F7", 2), message(9, "0SEND_F0", 1)];
    let known = [message(1, "1RECV_F0", 0), message(0, "0SEND_F0", 1)];
    let timeline = timeline.with_messages([known.to_vec(), misplaced.to_vec()].concat());
    assert_eq!(timeline.messages(), [known[1].clone(), known[0].clone()]);
    let found: Vec<Value> = of(&entries(&timeline), "X").iter().map(|slice| slice["args"].clone()).collect();
    let tensors = json!([{"dtype": "f32", "shape": [2, 3]}, {"dtype": "i64", "shape": [2]}]);
    let of_message = |action: &str, stage: u32, peer: u32| {
        json!({
            "action": action, "stage": stage, "microbatch": 0, "peer_rank": peer, "bytes": 40, "tensors": tensors,
        })
    };
    let plain = |action: &str, stage: u32| json!({"action": action, "stage": stage, "microbatch": 0});
    let expected =
        [plain("0F0", 0), of_message("0SEND_F0", 0, 1), of_message("1RECV_F0", 1, 0), plain("1F0", 1)];
    assert_eq!(found, expected);
}

#[test]
fn named_spans_have_threads_after_all_others() {
    let program = parse_program("0F0,0B0\n").expect("a program");
    let scope = |kind, start, end| Scope { rank: Rank::new(0), kind, start, end };
    let exchange = ScopeKind::Exchange("0F0".parse().expect("an action"));
    let scopes = vec![
        scope(ScopeKind::User("first".into()), 0.5, 1.5),
        scope(exchange, 1.0, 2.0),
        scope(ScopeKind::User("third".into()), 2.0, 2.5),
    ];
    let timeline = timed(&program, &Costs::default()).expect("no deadlock").timeline().clone();
    let entries = entries(&timeline.with_scopes(scopes));
    let found: Vec<&Value> = entries
        .iter()
        .filter(|entry| ["scope", "exchange"].iter().any(|category| entry["cat"] == *category))
        .collect();
    // The second span begins during the first one, and the third after it.
    assert_eq!([0, 1, 2].map(|index| &found[index]["tid"]), [&json!(2), &json!(3), &json!(2)]);
    let expected = json!({
        "name": "exchange of 0F0", "cat": "exchange", "ph": "X", "ts": 1e6, "dur": 1e6, "pid": 1, "tid": 3,
    });
    assert_eq!(*found[1], expected);
    let names = |entry: &&Value| entry["args"]["name"] == "rank 0, scopes";
    assert_eq!(entries.iter().filter(names).count(), 2);
}

#[test]
fn names_and_categories_group_slices() {
    let entries = of_rows("0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
    let found: BTreeSet<(&str, &str)> = of(&entries, "X")
        .iter()
        .map(|slice| (slice["cat"].as_str().expect("a text"), slice["name"].as_str().expect("a text")))
        .collect();
    let names = ["backward", "backward input", "backward weight", "forward", "receive", "send"];
    assert_eq!(found, names.map(|name| (name, name)).into());
}

#[test]
fn an_overlap_has_both_places_as_arguments() {
    let entries = of_rows("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
    let expected = json!({
        "action": "(0F1;0B0)OVERLAP_F_B", "stage": 0, "microbatch": 1,
        "backward_stage": 0, "backward_microbatch": 0,
    });
    assert_eq!(of(&entries, "X")[1]["args"], expected);
}

#[test]
fn memory_is_counted_for_each_rank() {
    let entries = of_rows("0F0,0F1,0B0,0B1\n");
    let counted: Vec<(f64, u64)> = of(&entries, "C")
        .iter()
        .map(|entry| {
            (entry["ts"].as_f64().unwrap_or(-1.0), entry["args"]["activations"].as_u64().unwrap_or(9))
        })
        .collect();
    assert_eq!(counted, [(0.0, 1), (1e6, 2), (3e6, 1), (4e6, 0)]);
}

#[test]
fn numbers_fit_31_bits() {
    let thread = Thread { rank: Rank::new(u32::MAX), index: u32::MAX, content: Content::Skips };
    assert_eq!((thread.process(), thread.number(u32::MAX)), (LARGEST_NUMBER, LARGEST_NUMBER));
    let rows: String = (0..300).map(|stage| format!("{stage}F0\n")).collect();
    let program = parse_program(&rows).expect("a program");
    for entry in entries(&Timeline::new(300, events_at_once(&program))) {
        for number in [&entry["pid"], &entry["tid"], &entry["args"]["sort_index"]] {
            assert!(number.is_null() || number.as_u64().is_some_and(|it| it < 1 << 31), "{entry}");
        }
    }
}

/// Returns every action of a program as an event in the first second.
fn events_at_once(program: &Program) -> Vec<Event> {
    let rows = (0..).map(Rank::new).zip(program.rows());
    let event = |rank, action| Event { rank, action, start: 0.0, end: 1.0 };
    rows.flat_map(|(rank, row)| row.iter().map(move |&action| event(rank, action))).collect()
}

#[test]
fn slices_of_a_thread_do_not_overlap() {
    let program = parse_program("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n").expect("a program");
    let costs = "hop=0.5".parse().expect("costs");
    let entries = entries(timed(&program, &costs).expect("no deadlock").timeline());
    let mut ends = std::collections::BTreeMap::new();
    for slice in of(&entries, "X") {
        let [start, length] = [&slice["ts"], &slice["dur"]].map(|it| it.as_f64().expect("a time"));
        let end = ends.insert(slice["tid"].to_string(), start + length);
        assert!(end.is_none_or(|end| end <= start), "{slice}");
    }
    assert!(ends.len() > 2, "messages run in parallel with computation");
}
