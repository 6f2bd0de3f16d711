//! Agreement with the reference, cell by cell: generators, passes, partitions and the logical simulation.
//!
//! Passes, validation and simulation read the schedules from the golden data, so that they are tested on
//! every case.

use pipewright_schedule::csv::{parse_program, parse_schedule, print_program, print_rows, print_schedule};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::{
    Messages, Pass, PassInput, ReduceWait, UnshardConfig, apply, defer_recv, drop_bubbles, limit_sends,
    merge_bw, reduce_grad, unshard, wait_send,
};
use pipewright_schedule::simulate::logical;
use pipewright_schedule::vpp::{VirtualPipeline, tables};
use pipewright_schedule::{
    Action, Level, LowerConfig, Method, Placement, Program, Rank, ScheduleSpec, StageIndex, generate, lower,
    partition, validate,
};
use serde_json::Value;

fn read(text: &str) -> Value {
    serde_json::from_str(text).expect("golden data is JSON")
}

fn schedules() -> Vec<Value> {
    read(include_str!("golden/schedules.json")).as_array().expect("a list of cases").clone()
}

fn peer_cases() -> Value {
    read(include_str!("golden/peer_cases.json"))
}

fn text<'a>(case: &'a Value, key: &str) -> Option<&'a str> {
    case[key].as_str()
}

fn number(case: &Value, key: &str) -> u32 {
    case[key].as_u64().and_then(|number| number.try_into().ok()).expect("golden data holds small numbers")
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|number| number.as_u64().expect("a number")).collect()
}

fn title(case: &Value) -> String {
    let size = ["ranks", "stages_per_rank", "microbatches"].map(|key| number(case, key));
    format!("{} {size:?}", case["schedule"])
}

/// The cases of the schedules that this crate generates.
fn generated_cases() -> Vec<Value> {
    let known =
        |case: &Value| catalogue().iter().any(|generator| text(case, "schedule") == Some(generator.name));
    schedules().into_iter().filter(known).collect()
}

/// Returns whether a case is of a schedule that the reference has for at least as many microbatches as stages
/// alone.
fn is_few_microbatches(case: &Value) -> bool {
    let is_plain = matches!(text(case, "schedule"), Some("gpipe" | "1f1b"));
    is_plain && number(case, "microbatches") < number(case, "ranks")
}

#[test]
fn generators_agree() {
    let cases = generated_cases();
    assert_eq!(cases.len(), schedules().len(), "every golden schedule is generated");
    for case in cases {
        let spec = ScheduleSpec {
            ranks: number(&case, "ranks"),
            stages_per_rank: Some(number(&case, "stages_per_rank")),
            microbatches: number(&case, "microbatches"),
            ..ScheduleSpec::default()
        };
        let found = generate(text(&case, "schedule").expect("a name"), &spec);
        if let Some(expected) = text(&case, "compute") {
            assert_eq!(print_schedule(&found.expect("a schedule")), expected, "{}", title(&case));
        } else if is_few_microbatches(&case) {
            // The reference rejects it, and it is sound.
            assert!(found.is_ok(), "{} is generated", title(&case));
        } else {
            assert!(found.is_err(), "{} is rejected", title(&case));
        }
    }
}

fn check_lowered(level: Level, key: &str) {
    let mut judged = 0;
    for case in schedules() {
        let (Some(compute), Some(expected)) = (text(&case, "compute"), text(&case, key)) else { continue };
        let schedule = parse_schedule(compute).unwrap_or_else(|error| panic!("{}: {error}", title(&case)));
        let lowered = lower(&schedule, &LowerConfig::from(level))
            .unwrap_or_else(|error| panic!("{}: {error}", title(&case)));
        assert_eq!(print_program(&lowered), expected, "{}", title(&case));
        assert_eq!(schedule.microbatches(), number(&case, "microbatches"));
        judged += 1;
    }
    assert!(judged >= 21, "only {judged} cases have the level {level}");
}

#[test]
fn lowering_agrees_at_comms() {
    check_lowered(Level::Comms, "comms");
}

#[test]
fn lowering_agrees_at_full() {
    check_lowered(Level::Full, "full");
}

#[test]
fn every_level_of_every_case_is_sound() {
    for case in schedules() {
        for (level, key) in [(Level::Compute, "compute"), (Level::Comms, "comms"), (Level::Full, "full")] {
            let Some(rows) = text(&case, key) else { continue };
            let program = parse_program(rows).expect("golden rows parse");
            let validated =
                validate(program, level).unwrap_or_else(|error| panic!("{} {key}: {error}", title(&case)));
            assert!(!validated.is_forward_only());
        }
    }
}

#[test]
fn logical_simulation_agrees() {
    let mut judged = 0;
    for case in schedules() {
        let (Some(comms), Some(expected)) = (text(&case, "comms"), text(&case, "simulated")) else {
            continue;
        };
        let program = parse_program(comms).expect("golden rows parse");
        let run = logical(&program).unwrap_or_else(|error| panic!("{}: {error}", title(&case)));
        assert_eq!(
            print_rows(program.placement().all_ranks().map(|rank| run.row(rank))),
            expected,
            "{}",
            title(&case)
        );
        assert_eq!(run.steps(), number(&case, "steps"), "{}", title(&case));
        judged += 1;
    }
    assert!(judged >= 19, "only {judged} cases are simulated");
}

fn check_partition(case: &Value, key: &str, stages: u32, method: &Method) {
    let weights = numbers(&case["weights"]);
    let found = partition(&weights, stages, method).unwrap_or_else(|error| panic!("{weights:?}: {error}"));
    let found: Vec<Vec<u64>> =
        found.ranges().map(|range| vec![range.start as u64, range.end as u64 - 1]).collect();
    let expected: Vec<Vec<u64>> = case[key].as_array().expect("a list").iter().map(numbers).collect();
    assert_eq!(found, expected, "{key} {weights:?} in {stages}");
}

#[test]
fn partitions_agree() {
    let golden = read(include_str!("golden/partitions.json"));
    for case in golden["partitions"].as_array().expect("a list of cases") {
        let stages = number(case, "stages");
        check_partition(case, "even", stages, &Method::Even);
        check_partition(case, "weighted", stages, &Method::Weighted);
        if case["boundaries"].is_array() {
            let boundaries: Vec<usize> =
                numbers(&case["boundaries"]).iter().map(|&first| first as usize).collect();
            let stages = boundaries.len() as u32 + 1;
            check_partition(case, "explicit", stages, &Method::Explicit { boundaries });
        }
    }
}

#[test]
fn virtual_pipelines_agree() {
    let golden = read(include_str!("golden/partitions.json"));
    let cases = golden["vpp"].as_array().expect("a list of cases");
    assert_eq!(cases.len(), 16);
    for case in cases {
        let pipeline = VirtualPipeline {
            ranks: number(case, "pp"),
            chunks: number(case, "chunks"),
            microbatches: number(case, "microbatches"),
            group_size: case["group"].is_u64().then(|| number(case, "group")),
        };
        let found = serde_json::to_value(tables(&pipeline).expect("tables")).expect("JSON");
        for key in ["stage_ids", "table", "warmup", "warmup_forward_only"] {
            assert_eq!(found[key], case[key], "{key} of {pipeline:?}");
        }
    }
}

/// Makes a program from rows of cells separated by blanks, in which `.` is a bubble, with its stages on the
/// given ranks.
fn peer_program(rows: &[&str], ranks: &[u64], microbatches: u32) -> Program {
    let placement =
        Placement::explicit(ranks.iter().map(|&rank| Rank::new(rank as u32)).collect()).expect("a placement");
    let cells = |row: &&str| {
        row.split(' ').filter(|&cell| cell != ".").map(|cell| cell.parse().expect(cell)).collect()
    };
    Program::new(placement, microbatches, rows.iter().map(cells).collect()).expect("a program")
}

fn peer_rows(program: &Program) -> Vec<String> {
    print_program(program).lines().map(|row| row.replace(',', " ")).collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|text| text.as_str().expect("a text")).collect()
}

#[test]
fn peer_actions_round_trip() {
    for text in strings(&peer_cases()["action_parse_roundtrip"]) {
        let action: Action = text.parse().expect(text);
        assert_eq!(action.to_string(), text);
    }
}

#[test]
fn peer_unshard_agrees() {
    for case in peer_cases()["unshard_reshard"].as_array().expect("a list of cases") {
        let row = strings(case);
        let stages = if row[0].contains("1F0") { vec![0, 0] } else { vec![0] };
        let lowered = unshard(peer_program(&row[..1], &stages, 2), &UnshardConfig::default());
        let lowered = lowered.expect("the lookahead is the window");
        assert_eq!(peer_rows(&lowered), row[1..]);
    }
}

#[test]
fn peer_reduce_grad_agrees_up_to_the_wait() {
    for case in peer_cases()["reduce_grad_pre215_nmb2"].as_array().expect("a list of cases") {
        let row = strings(case);
        let stages = if row[0].contains("1F0") { vec![0, 0] } else { vec![0] };
        let lowered = peer_rows(&reduce_grad(peer_program(&row[..1], &stages, 2), ReduceWait::AtOnce));
        // That version of the reference does not wait for the reduction.
        let without_wait: Vec<&str> =
            lowered[0].split(' ').filter(|cell| !cell.contains("WAIT_REDUCE")).collect();
        assert_eq!(without_wait.join(" "), row[1]);
    }
}

#[test]
fn peer_send_recv_agrees() {
    for case in peer_cases()["send_recv"].as_array().expect("a list of cases") {
        let row = |row: &str| row.split(' ').map(|cell| cell.parse().ok().filter(|_| cell != ".")).collect();
        let rows = strings(&case["compute"]).into_iter().map(row).collect();
        let input = PassInput { rows, stage_to_rank: None, microbatches: None };
        let lowered = apply(input, &[Pass::SendRecv]).expect("a program");
        let ranks: Vec<u64> =
            lowered.placement().all_stages().map(|it| lowered.placement().rank_of(it).get().into()).collect();
        assert_eq!(ranks, numbers(&case["map"]));
        assert_eq!(peer_rows(&lowered), strings(&case["comms"]));
        assert_eq!(logical(&lowered).expect("no deadlock").steps(), number(case, "steps"));
    }
}

#[test]
fn peer_merge_bw_agrees() {
    for case in peer_cases()["merge_bw"].as_array().expect("a list of cases") {
        let row = strings(case);
        assert_eq!(peer_rows(&merge_bw(peer_program(&row[..1], &[0], 3))), row[1..]);
    }
}

#[test]
fn peer_defer_recv_agrees() {
    for case in peer_cases()["defer_recv"].as_array().expect("a list of cases") {
        let program = peer_program(&strings(&case["input"]), &numbers(&case["map"]), 2);
        assert_eq!(peer_rows(&defer_recv(program)), strings(&case["out"]));
    }
}

#[test]
fn deferred_receives_are_sound_with_waits() {
    for case in schedules() {
        let Some(comms) = text(&case, "comms") else { continue };
        let program = parse_program(comms).expect("golden rows parse");
        let lowered = defer_recv(wait_send(program.clone()));
        validate(lowered, Level::Comms).unwrap_or_else(|error| panic!("{}: {error}", title(&case)));
        for budget in 1..4 {
            let budget = budget.try_into().expect("above 0");
            let lowered = limit_sends(program.clone(), budget).expect("it is sound with blocking sends");
            validate(lowered, Level::Comms).unwrap_or_else(|error| panic!("{}: {error}", title(&case)));
        }
    }
}

#[test]
fn placement_follows_from_the_rows() {
    for case in schedules() {
        let Some(compute) = text(&case, "compute") else { continue };
        let schedule = parse_schedule(compute).expect("golden rows parse");
        let (ranks, per_rank) = (number(&case, "ranks"), number(&case, "stages_per_rank"));
        let is_v = ["zbvzerobubble", "dualpipev"].contains(&text(&case, "schedule").expect("a name"));
        let expected = if is_v { Placement::v(ranks, per_rank) } else { Placement::looped(ranks, per_rank) };
        assert_eq!(schedule.placement(), &expected.expect("a placement"));
        assert_eq!(drop_bubbles(&schedule).placement().last_stage(), StageIndex::new(ranks * per_rank - 1));
    }
}

/// Writes a row of computations with the actions that passes have added: `6:2R` is a `2RESHARD` after 6
/// computations.
fn with_added(compute: &str, added: &str) -> Vec<String> {
    let mut row: Vec<Vec<String>> = vec![Vec::new()];
    row.extend(compute.split(',').map(|cell| vec![cell.to_owned()]));
    for cell in added.split(' ') {
        let (at, action) = cell.split_once(':').expect("a place");
        let (stage, letter) = action.split_at(action.len() - 1);
        let word = match letter {
            "U" => "UNSHARD",
            "R" => "RESHARD",
            "G" => "REDUCE_GRAD",
            "A" => "WAIT_REDUCE_GRAD",
            other => panic!("{other} is not an action"),
        };
        row[at.parse::<usize>().expect("a number")].push(format!("{stage}{word}"));
    }
    row.into_iter().flatten().collect()
}

/// The options of PyTorch 2.15 for sharded parameters. `bench/peer/schedules.py dump` writes the file.
#[test]
fn lookahead_and_deferred_waits_agree() {
    let golden = read(include_str!("golden/lowering_2_15.json"));
    let mut judged = 0;
    for table in golden["tables"].as_array().expect("a list of tables") {
        let compute = text(table, "compute").expect("rows");
        let schedule = parse_schedule(compute).expect("golden rows parse");
        for case in table["cases"].as_array().expect("a list of cases") {
            let config = UnshardConfig {
                window: number(case, "window").try_into().expect("a window"),
                lookahead: text(case, "lookahead").and_then(|text| text.parse().ok()).expect("a lookahead"),
                frozen: false,
            };
            let is_deferred = case["deferred"].as_bool().expect("true or false");
            let config = LowerConfig {
                unshard: Some(config),
                reduce_grad: Some(if is_deferred { ReduceWait::Deferred } else { ReduceWait::AtOnce }),
                communicate: None,
                ..LowerConfig::from(Level::Full)
            };
            let found = print_program(&lower(&schedule, &config).expect("it lowers"));
            let rows = found.lines().zip(compute.lines()).zip(strings(&case["rows"]));
            for (rank, ((found, compute), added)) in rows.enumerate() {
                let found: Vec<&str> = found.split(',').collect();
                assert_eq!(found, with_added(compute, added), "rank {rank} of {}, {case}", title(table));
            }
            judged += 1;
        }
    }
    assert_eq!(judged, 536);
}

/// Checks the rules of PyTorch 2.15 for a row with communication: one later wait for each send, and at most
/// one pending reduction, whose wait follows.
fn check_waits(row: &[Action], title: &str) {
    let (mut sends, mut waited, mut pending) = (Vec::new(), 0, None);
    for action in row {
        match *action {
            Action::SendForward { stage, microbatch } => {
                sends.push(Action::WaitSendForward { stage, microbatch });
            }
            Action::SendBackward { stage, microbatch } => {
                sends.push(Action::WaitSendBackward { stage, microbatch });
            }
            Action::WaitSendForward { .. } | Action::WaitSendBackward { .. } => {
                assert!(sends.contains(action), "{title}: {action} before its send");
                waited += 1;
            }
            Action::ReduceGrad { stage } => {
                assert_eq!(pending.replace(stage), None, "{title}: {action}");
            }
            Action::WaitReduceGrad { stage } => assert_eq!(pending.take(), Some(stage), "{title}: {action}"),
            _ => {}
        }
    }
    assert_eq!((waited, pending), (sends.len(), None), "{title}");
}

/// The help of `pipewright schedule`. `bench/peer/schedules.py load` lets PyTorch itself read the files.
#[test]
fn waits_make_every_schedule_readable_for_pytorch() {
    for generator in catalogue() {
        let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
        let schedule = generate(generator.name, &spec).expect(generator.name);
        for level in [Level::Comms, Level::Full] {
            let program = lower(&schedule, &LowerConfig::from(level)).expect(generator.name);
            let program = wait_send(program);
            for row in program.rows() {
                check_waits(row, generator.name);
            }
        }
    }
}

/// With `defer_pp_recv=True`, PyTorch 2.15 moves receives and leaves sends, and its messages have no tags.
/// Where two messages change places, `bench/peer/defer_recv.py` measures wrong gradients; validation refuses
/// exactly these tables.
#[test]
fn deferred_receives_of_pytorch_that_mix_up_messages_are_refused() {
    let mut refused = Vec::new();
    for table in read(include_str!("golden/deferred_2_15.json")).as_array().expect("a list of tables") {
        let program = parse_program(text(table, "comms").expect("rows")).expect("golden rows parse");
        if let Err(violations) = validate(program, Level::Comms) {
            let violations = violations.to_string();
            assert!(violations.contains("; receive in the order of the sends"), "{violations}");
            refused.push(title(table));
        }
    }
    let expected = [
        "\"interleavedzerobubble\" [2, 2, 4]",
        "\"zbvzerobubble\" [2, 2, 4]",
        "\"zbvzerobubble\" [4, 2, 8]",
        "\"dualpipev\" [4, 2, 8]",
    ];
    assert_eq!(refused, expected);
}

/// The FNV-1a hash of a text, as `bench/peer/schedules.py` makes it.
fn digest(text: &str) -> String {
    let hash = text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    format!("{hash:016x}")
}

/// Limits of sends (`max_outstanding_sends`), with and without deferred receives (`defer_pp_recv`). The tables
/// in which the deferral of PyTorch mixes up messages begin with PyTorch's rows.
#[test]
fn limits_of_sends_agree() {
    let (mut equal, mut refused, mut mixed) = (0, 0, 0);
    for table in read(include_str!("golden/budgets_2_15.json")).as_array().expect("a list of tables") {
        let name = text(table, "schedule").expect("a name");
        let spec = ScheduleSpec {
            ranks: number(table, "ranks"),
            stages_per_rank: Some(number(table, "stages_per_rank")),
            microbatches: number(table, "microbatches"),
            ..ScheduleSpec::default()
        };
        let schedule = generate(name, &spec).expect("a schedule");
        let defer_recv = table["deferred"].as_bool().expect("true or false");
        let lowered = |budget| {
            let communicate = Some(Messages::Waited { defer_recv, budget });
            lower(&schedule, &LowerConfig { communicate, ..LowerConfig::from(Level::Full) })
        };
        let rows = text(table, "free_rows");
        let free = rows.map_or_else(
            || lowered(None).expect("a program"),
            |rows| parse_program(rows).expect("golden rows parse"),
        );
        assert_eq!(Some(&*digest(&print_program(&free))), text(table, "free"), "{}", title(table));
        for (budget, expected) in table["budgets"].as_object().expect("an object") {
            let (title, expected) =
                (format!("{}, {budget}", title(table)), expected.as_str().expect("a text"));
            let limit = budget.parse().expect("a number");
            let found = if rows.is_some() { limit_sends(free.clone(), limit) } else { lowered(Some(limit)) };
            match (expected.split_once(" "), found) {
                (Some(_), Err(error)) => {
                    let (rank, send) = expected.rsplit_once(' ').expect("a rank and a send");
                    let start = format!("{rank} cannot start {send} with {budget} send");
                    assert!(error.to_string().starts_with(&start), "{title}: {error}");
                    refused += 1;
                }
                (None, Ok(program)) => {
                    assert_eq!(digest(&print_program(&program)), expected, "{title}");
                    if rows.is_none() {
                        validate(program, Level::Full).unwrap_or_else(|error| panic!("{title}: {error}"));
                    }
                    equal += 1;
                }
                (_, found) => panic!("{title}: {expected} became {:?}", found.map(|it| print_program(&it))),
            }
            mixed += usize::from(rows.is_some());
        }
    }
    assert_eq!((equal, refused, equal + refused, mixed), (225, 15, 240, 48));
}

/// A limit depends on the places of the receives, so both orders of the passes mean the same.
#[test]
fn a_limit_of_sends_comes_after_the_deferral() {
    let spec =
        ScheduleSpec { ranks: 5, stages_per_rank: Some(4), microbatches: 10, ..ScheduleSpec::default() };
    let schedule = generate("interleaved1f1b", &spec).expect("a schedule");
    let of = |passes: &str| {
        let rows = schedule.rows().to_vec();
        let passes = Pass::parse_list(passes).expect("passes");
        let program =
            apply(PassInput { rows, stage_to_rank: None, microbatches: None }, &passes).expect("a program");
        validate(program.clone(), Level::Comms).expect("no deadlock");
        program
    };
    assert_eq!(of("send-recv,wait-send=1,defer-recv"), of("send-recv,defer-recv,wait-send=1"));
}
