//! The output of `simulate`: the figures of the library, the formats, and the times of the engine.

use pipewright_schedule::simulate::summarize;
use pipewright_schedule::{Costs, Level, LowerConfig, ScheduleSpec, generate, lower};
use serde_json::Value;

use crate::plans::PROFILE;
use crate::{folder, refuse, run, succeed, text, write};

fn simulated(arguments: &[&str]) -> Value {
    let arguments = [&["simulate"], arguments, &["--format", "json"]].concat();
    serde_json::from_str(&succeed(&folder(), &arguments)).expect("JSON")
}

/// Checks that `simulate` prints the figures of the library, for messages that follow whole actions.
fn check_figures(name: &str, stages_per_rank: u32) {
    let spec = ScheduleSpec {
        ranks: 8,
        stages_per_rank: Some(stages_per_rank),
        microbatches: 32,
        ..ScheduleSpec::default()
    };
    let schedule = generate(name, &spec).expect("a schedule");
    let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("a program");
    let summary = summarize(&program, &Costs::default()).expect("it runs");
    let expected: Value =
        serde_json::from_str(&serde_json::to_string(&summary).expect("JSON")).expect("an object");
    let stages_per_rank = stages_per_rank.to_string();
    let size = ["--ranks", "8", "--microbatches", "32", "--stages-per-rank", &stages_per_rank];
    let found = simulated(&[&[name], &size[..], &["--level", "comms"]].concat());
    for (key, value) in expected.as_object().expect("an object") {
        assert_eq!(&found[key], value, "{name}: {key}");
    }
}

/// The tests of the library compare them with the published figures.
#[test]
fn the_figures_are_those_of_the_library() {
    for name in ["1f1b", "zb-h1"] {
        check_figures(name, 1);
    }
    for name in ["zbvzerobubble", "dualpipev", "v-half"] {
        check_figures(name, 2);
    }
    for name in ["interleaved1f1b", "interleaved-zb-h1"] {
        check_figures(name, 4);
    }
}

#[test]
fn each_stage_may_cost_its_own() {
    let makespan = |cost: &str| {
        let found = simulated(&["1f1b", "--ranks", "2", "--microbatches", "2", "--cost", cost]);
        found["makespan"].as_f64().expect("a number")
    };
    // The second rank starts after 1 and is then never idle: 1 + 2 x (3 + 4). The last backward of the first
    // rank follows the input gradient, which comes 2 before the end, and takes 2.
    assert_eq!(makespan("F=1:3,B=2:4"), 15.0);
    assert_eq!(makespan("F=1:3"), 12.0, "costs that are left out have their defaults on all stages");
    let arguments = ["simulate", "gpipe", "--ranks", "2", "--microbatches", "2", "--cost", "F=1:2:3"];
    refuse(&folder(), &arguments, 2, "error: 3 entries for the costs of 2 stages");
    for format in ["svg", "html", "trace"] {
        let cost = ["--format", format, "--cost", "F=1:2"];
        let arguments = [&["schedule", "1f1b", "--ranks", "4", "--microbatches", "8"], &cost[..]].concat();
        refuse(&folder(), &arguments, 2, "error: 2 entries for the costs of 4 stages");
    }
}

#[test]
fn the_keys_of_the_contract_are_there() {
    let found = simulated(&["1f1b", "--ranks", "2", "--microbatches", "2", "--cost", "F=2,I=2,W=2,hop=1"]);
    // The forward and the backward of one microbatch on both ranks without a weight gradient, two hops, and
    // the time that the second one adds.
    assert_eq!(found["makespan"], 18.0);
    assert_eq!(found["steps"], 11);
    assert_eq!(found["peak_activations"], serde_json::json!([2, 1]));
    for key in ["bubble_fraction", "span_bubble_fraction", "exposed_comm_fraction"] {
        assert!(found[key].as_f64().is_some_and(|it| (0.0..=1.0).contains(&it)), "{key}: {found}");
    }
    assert_eq!(found["bubble_per_rank"].as_array().map(Vec::len), Some(2));
    for step in ["generate", "lower", "validate", "simulate"] {
        assert!(found["engine_ms"][step].as_f64().is_some_and(|ms| ms > 0.0), "{step}: {found}");
    }
}

#[test]
fn pictures_of_too_many_exchanges_are_refused() {
    let size = ["--ranks", "4", "--microbatches", "512", "--cost", "exchange=1,exchanges=300"];
    for command in [&["simulate", "1f1b", "--format", "html"][..], &["view", "1f1b"]] {
        let words = "error: a picture of 1228800 exchanges is too large to draw";
        refuse(&folder(), &[command, &size[..]].concat(), 2, words);
    }
}

#[test]
fn exchanges_are_exposed_unless_an_overlap_hides_them() {
    let exposed = |name: &[&str]| {
        let size = ["--ranks", "2", "--microbatches", "8"];
        let found = simulated(&[name, &size[..], &["--cost", "exchange=0.8,exchanges=8"]].concat());
        let ranks = found["exchanges"].as_array().expect("ranks").clone();
        let sum = |key: &str| ranks.iter().filter_map(|rank| rank[key].as_f64()).sum::<f64>();
        sum("exposed") / sum("seconds")
    };
    for plain in ["zbvzerobubble", "interleaved1f1b"] {
        assert!((exposed(&[plain]) - 1.0).abs() < 1e-9, "{plain}");
    }
    let overlapped = [&["dualpipev"][..], &["zbvzerobubble", "--overlap"], &["interleaved1f1b", "--overlap"]];
    let [dual_pipe_v, zbv, interleaved] = overlapped.map(exposed);
    assert!(dual_pipe_v < 0.5 && zbv < 0.5 && interleaved < 0.95, "{dual_pipe_v}, {zbv}, {interleaved}");
    let arguments = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "2", "--cost", "exchange=0.5"];
    let text = succeed(&folder(), &arguments);
    assert!(text.contains("\nexchanges  100.0% exposed, by rank: 2 of 2, 2 of 2\n"), "{text}");
    assert_eq!(simulated(&["1f1b", "--ranks", "2", "--microbatches", "2"])["exchanges"], Value::Null);
}

#[test]
fn ticks_are_counted() {
    let size = ["1f1b", "--ranks", "2", "--microbatches", "2"];
    let found = simulated(&[&size[..], &["--logical"]].concat());
    // Each rank computes four actions in ten ticks, and sends or receives four.
    assert_eq!((&found["makespan"], &found["steps"]), (&Value::from(10.0), &Value::from(10)));
    assert_eq!((&found["bubble_fraction"], &found["exposed_comm_fraction"]), (&0.6.into(), &0.4.into()));
    let grid = [&["simulate"], &size[..], &["--logical", "--format", "grid"]].concat();
    let row = "rank 1  .    1RECV_F0  1F0  1RECV_F1  1B0  1SEND_B0  1F1  1B1  1SEND_B1\n";
    assert!(succeed(&folder(), &grid).ends_with(row));
    let refuse_grid = |further: &[&str], advice: &str| {
        let arguments = [&["simulate"], &size[..], &["--format", "grid"], further].concat();
        let message =
            format!("error: --format grid has one column per tick; {advice}, or use --format svg\n");
        refuse(&folder(), &arguments, 2, &message);
    };
    refuse_grid(&[], "add --logical");
    let choices = [["--profile", "p.toml"], ["--cost", "F=2"], ["--recompute", "stage"]];
    for choice in choices {
        let flag = choice[0];
        let advice =
            format!("--logical has them, without costs and transports: leave {flag} out and add --logical");
        refuse_grid(&choice, &advice);
    }
}

#[test]
fn people_read_the_engines_clock() {
    let found = succeed(&folder(), &["simulate", "1F1B", "--ranks", "2", "--microbatches", "2"]);
    assert!(
        found.starts_with("1f1b: 2 ranks, 2 stages, 2 microbatches\nmakespan   8 units, 11 logical steps\n")
    );
    let alias = succeed(&folder(), &["simulate", "Schedule1F1B", "--ranks", "2", "--microbatches", "2"]);
    assert_eq!(alias.lines().next(), found.lines().next(), "the schedule has one name");
    let last = found.lines().last().expect("a line");
    for step in ["engine ", " ms: generate ", ", lower ", ", validate ", ", simulate "] {
        assert!(last.contains(step), "{last}");
    }
}

#[test]
fn costs_make_the_greedy_schedule() {
    let folder = folder();
    let made = |cost: &str| {
        let size = ["zb-greedy", "--ranks", "3", "--microbatches", "6"];
        succeed(&folder, &[&["schedule"], &size[..], &["--cost", cost]].concat())
    };
    assert_eq!(made("F=1,I=1,W=1"), made("F=0.1,I=0.1,W=0.1"));
    assert_ne!(made("F=1,I=1,W=1"), made("F=1,I=3,W=1,hop=2"));
    let limited = ["schedule", "zb-greedy", "--ranks", "3", "--microbatches", "6", "--memory-limit", "1"];
    assert!(succeed(&folder, &limited).starts_with("0F0,0I0,0W0,0F1,"));
}

#[test]
fn every_format_comes_from_names_and_files() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1F0,1B0\n");
    let beginnings = [
        ("text", "s.csv: 2 ranks"),
        ("json", "{\"makespan\":5.0,"),
        ("csv", "rank,action,start,end\n0,0F0,0,1\n0,0SEND_F0,1,1\n"),
        ("trace", "{\"displayTimeUnit\":\"ms\","),
        ("svg", "<svg "),
        ("html", "<!DOCTYPE html>"),
    ];
    for (format, beginning) in beginnings {
        let found = succeed(&folder, &["simulate", "--csv", "s.csv", "--format", format]);
        assert!(found.starts_with(beginning), "{format}: {}", &found[..80.min(found.len())]);
    }
    for (format, beginning) in &beginnings[3..] {
        let drawn = ["schedule", "dualpipev", "--ranks", "2", "--microbatches", "4", "--format", format];
        assert!(succeed(&folder, &drawn).starts_with(beginning), "{format}");
    }
}

#[test]
fn pictures_of_schedules_are_to_scale() {
    let drawn = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--format", "svg"];
    let found = succeed(&folder(), &drawn);
    assert!(found.contains("<title>0B0 on rank 0, 3 to 5</title>"), "a backward takes two units");
    assert!(found.contains("bubble, 25.0 %"));
}

#[test]
fn unsound_files_are_not_simulated() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1B0,1F0\n");
    refuse(
        &folder,
        &["simulate", "--csv", "s.csv"],
        3,
        "error: s.csv: unsound program, 1 violation; the first",
    );
    refuse(&folder, &["simulate", "--csv", "none.csv"], 2, "error: none.csv: cannot read the schedule");
    let beside = ["simulate", "--csv", "s.csv", "--ranks", "2"];
    refuse(&folder, &beside, 2, "error: --ranks follows from the file of --csv; leave it out\n");
}

#[test]
fn a_backward_that_computes_its_forward_again_takes_longer_and_holds_less() {
    let size = ["1f1b", "--ranks", "2", "--microbatches", "3"];
    let found = simulated(&[&size[..], &["--recompute", "stage"]].concat());
    // On rank 1 each backward follows its forward at once, so only rank 0 computes three seconds more. Two of
    // them are in bubbles.
    assert_eq!((simulated(&size)["makespan"].as_f64(), found["makespan"].as_f64()), (Some(11.0), Some(12.0)));
    assert_eq!(found["peak_activations"], serde_json::json!([1, 1]));
    assert_eq!(simulated(&[&size[..], &["--recompute", "1"]].concat())["makespan"], 11.0);
    let print = |format| {
        succeed(&folder(), &[&["simulate"], &size[..], &["--recompute", "0", "--format", format]].concat())
    };
    let csv = print("csv");
    assert!(["\n0,0F0,2,3\n", "\n0,0B0,3,5\n"].iter().all(|line| csv.contains(line)), "{csv}");
    // The second forward is a cell of its own in pictures and a slice of its own in traces.
    assert_eq!(print("svg").matches("<title>0F0 on rank 0, ").count(), 2);
    assert_eq!(print("trace").matches("\"action\":\"0F0\"").count(), 2);
    assert_ne!(
        print("html"),
        succeed(&folder(), &[&["simulate"], &size[..], &["--format", "html"]].concat())
    );
    let refused = |choice: &str, message: &str| {
        refuse(&folder(), &[&["simulate"], &size[..], &["--recompute", choice]].concat(), 2, message);
    };
    refused("2", "error: stage 2 of 2 is to be recomputed; name stages that exist");
    for parts in ["parts", "0:parts=norms"] {
        refused(parts, "error: --recompute names parts of layers, whose sizes and times are in a profile");
    }
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    for (choice, place, parts) in
        [("parts", "the profile", "norms+feed-forward"), ("1:layers=1:parts=norms", "stage 1", "norms")]
    {
        let arguments = ["--profile", "p.toml", "--recompute", choice];
        let said =
            format!("error: no layer of {place} has these parts, which are to be recomputed: {parts}; write");
        refuse(&folder, &[&["simulate"], &size[..], &arguments].concat(), 2, &said);
    }
}

#[test]
fn programs_that_offload_are_made_checked_and_timed() {
    let folder = folder();
    write(&folder, "plain.csv", "0F0,0F1,0F2,0B0,0B1,0B2\n");
    write(&folder, "lost.csv", "0F0,0OFFLOAD0,0F1,0B0,0B1\n");
    succeed(&folder, &["lower", "plain.csv", "--pass", "offload", "-o", "moving.csv"]);
    let moving = std::fs::read_to_string(folder.path().join("moving.csv")).expect("rows");
    assert_eq!(moving, "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0F2,0OFFLOAD2,0RELOAD1,0B0,0RELOAD2,0B1,0B2\n");
    succeed(&folder, &["validate", "moving.csv"]);
    let lost = "rank 0, position 1: 0OFFLOAD0 has no RELOAD, and 0B0 at position 3 uses the tensors";
    let output = run(&folder, &["validate", "lost.csv"]);
    let found = text(&output.stdout);
    assert!(output.status.code() == Some(3) && found.contains(lost), "{found}");
    let makespan = |costs: &str| {
        let arguments =
            ["simulate", "--csv", "moving.csv", "--recompute", "stage", "--cost", costs, "--format", "json"];
        let found: Value = serde_json::from_str(&succeed(&folder, &arguments)).expect("JSON");
        found["makespan"].as_f64()
    };
    assert_eq!(makespan("F=1"), Some(12.0));
    assert_eq!(makespan("offload=1.5"), Some(14.5));
}

#[test]
fn one_program_is_predicted_drawn_and_trained() {
    let folder = folder();
    let size = ["1f1b", "--ranks", "4", "--microbatches", "8"];
    let makespan = |further: &[&str]| {
        let found = simulated(&[&size[..], &["--cost", "hop=0.1"], further].concat());
        found["makespan"].as_f64().map(|time| (time * 1e6).round() / 1e6)
    };
    assert_eq!(makespan(&[]), Some(30.6));
    assert_eq!(makespan(&["--level", "comms"]), Some(34.6));
    // The program of `train`, from its passes.
    succeed(&folder, &[&["schedule"], &size[..], &["-o", "1f1b.csv"]].concat());
    let passes = ["lower", "1f1b.csv", "--pass", "send-early,send-recv", "-o", "trained.csv"];
    succeed(&folder, &passes);
    let events = |arguments: &[&str]| {
        let cost = ["--cost", "hop=0.1", "--format", "csv"];
        succeed(&folder, &[&["simulate"], arguments, &cost[..]].concat())
    };
    let named = events(&size);
    assert_eq!(events(&["--csv", "1f1b.csv"]), named);
    assert_eq!(events(&["--csv", "trained.csv"]), named);
    let level = ["simulate", "--csv", "trained.csv", "--level", "comms"];
    refuse(&folder, &level, 2, "error: trained.csv: the file has messages already, and --level");
    let page = succeed(&folder, &[&["view"], &size[..]].concat());
    let trained = succeed(&folder, &["view", "trained.csv"]);
    let program = trained.split_once("\"programs\":[").and_then(|(_, rest)| rest.split_once("],\"columns\""));
    let (program, _) = program.expect("the page has programs");
    assert!(program.len() > 1000 && page.contains(program), "the page has the program of `train`");
    let drawn =
        succeed(&folder, &[&["schedule"], &size[..], &["--format", "svg", "--cost", "hop=0.1"]].concat());
    assert!(drawn.contains("bubble, 21.6 %"), "the picture is of the same run");
}

#[test]
fn files_of_any_level_are_simulated_drawn_and_checked() {
    let folder = folder();
    let collectives = [
        "0UNSHARD,0F0,0B0\n1F0,1B0\n",
        "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0\n1F0,1B0\n",
        "0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n",
        "0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1UNSHARD,1F0,1I0,1W0\n",
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    ];
    for rows in collectives {
        write(&folder, "s.csv", rows);
        succeed(&folder, &["validate", "s.csv"]);
        for command in [&["simulate", "--csv", "s.csv"][..], &["simulate", "--csv", "s.csv", "--logical"]] {
            succeed(&folder, command);
        }
        succeed(&folder, &["view", "s.csv", "-o", "page.html"]);
        let set = ["check", "--set", "pipeline.schedule=s.csv", "--set", "run.steps=1"];
        let checked = run(&folder, &set);
        assert_eq!(checked.status.code(), Some(0), "{rows}: {}", text(&checked.stderr));
    }
}

#[test]
fn activations_have_buffers() {
    let found = simulated(&["1f1b", "--ranks", "2", "--microbatches", "3"]);
    let buffers = found["activation_buffers"].as_array().expect("a list");
    assert_eq!([&buffers[0]["slots"], &buffers[1]["slots"]], [2, 1]);
    // 0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2
    let live = serde_json::json!([
        { "stage": 0, "microbatch": 0, "first": 0, "last": 5, "slot": 0 },
        { "stage": 0, "microbatch": 1, "first": 2, "last": 9, "slot": 1 },
        { "stage": 0, "microbatch": 2, "first": 6, "last": 11, "slot": 0 },
    ]);
    assert_eq!(buffers[0]["live"], live);
    let lines = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "3", "--format", "activations"];
    let expected = "rank,stage,microbatch,first,last,slot\n0,0,0,0,5,0\n0,0,1,2,9,1\n0,0,2,6,11,0\n1,1,0,";
    let found = succeed(&folder(), &lines);
    assert!(found.starts_with(expected) && found.lines().count() == 7, "{found}");
    let page = succeed(&folder(), &["view", "1f1b", "--ranks", "2", "--microbatches", "3"]);
    assert!(page.contains("Buffers for activations, by rank: 2 1<"), "the page lists them");
}

#[test]
fn costs_have_no_unit_and_profiles_have_seconds() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let size = ["1f1b", "--ranks", "2", "--microbatches", "4"];
    let of = |command: &str, further: &[&str]| succeed(&folder, &[&[command], &size[..], further].concat());
    assert!(of("simulate", &[]).contains("\nmakespan   14 units, "));
    assert!(of("simulate", &["--profile", "p.toml"]).contains(" s, "));
    let svg = |further: &[&str]| of("simulate", &[&["--format", "svg"], further].concat());
    assert!(svg(&[]).contains("on rank 0, 0 to 1<") && svg(&["--profile", "p.toml"]).contains(" ms<"));
    let view = of("view", &["--cost", "F=1"]);
    assert!(view.contains("\"seconds\":false"), "the page shows plain numbers");
    let html = |further: &[&str]| of("simulate", &[&["--format", "html"], further].concat());
    assert!(
        html(&[]).contains("\"seconds\":false")
            && html(&["--profile", "p.toml"]).contains("\"seconds\":true")
    );
}
