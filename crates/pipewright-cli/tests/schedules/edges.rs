//! Edge cases that matter to scripts: where data is written, exit codes, and impossible sizes.

use std::fs;

use crate::{folder, refuse, run, succeed, text, write};

/// The smallest size that most schedules support.
const SMALL: [&str; 4] = ["--ranks", "2", "--microbatches", "4"];

#[test]
fn names_have_no_case() {
    let folder = folder();
    let of = |name: &str| succeed(&folder, &[&["schedule", name], &SMALL[..]].concat());
    assert_eq!(of("1F1B"), "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n");
    assert_eq!(of("GPipe"), of("gpipe"));
    assert_eq!(of("ZB-h1"), of("zb-h1"));
    assert_eq!(of("InterleavedZeroBubble"), of("interleavedzerobubble"));
}

#[test]
fn every_listed_schedule_is_made_lowered_and_proved() {
    let folder = folder();
    let list = succeed(&folder, &["schedule", "--list"]);
    assert_eq!(list.lines().count(), 18);
    for line in list.lines() {
        let (name, summary) = line.split_once("  ").expect("a name and a summary");
        assert!(!summary.trim().is_empty(), "{name}");
        for level in ["compute", "comms", "full"] {
            let made = ["schedule", name, "--level", level, "-o", "s.csv"];
            assert_eq!(succeed(&folder, &[&made[..], &SMALL[..]].concat()), "", "{name}");
            let proved = succeed(&folder, &["validate", "s.csv", "--level", level]);
            assert!(proved.starts_with(&format!("s.csv: sound at level {level}: 2 ranks, ")), "{proved}");
        }
    }
}

#[test]
fn settings_of_single_schedules() {
    let folder = folder();
    let of = |name: &str, further: &[&str]| {
        let size = ["--ranks", "4", "--stages-per-rank", "2", "--microbatches", "8"];
        succeed(&folder, &[&["schedule", name], &size[..], further].concat())
    };
    assert_ne!(of("group-interleaved", &["--group-size", "2"]), of("group-interleaved", &[]));
    assert_ne!(of("interleaved-zb-h1", &["--wide-warmup"]), of("interleaved-zb-h1", &[]));
    let unused = [&["schedule", "gpipe", "--group-size", "2"], &SMALL[..]].concat();
    refuse(&folder, &unused, 2, "error: `gpipe` has no setting `group_size`; leave it out\n");
}

#[test]
fn slices_of_microbatches() {
    let folder = folder();
    let seq = |command: &str, further: &[&str]| {
        let size = ["seq1f1b", "--ranks", "4", "--microbatches", "8", "--slices", "4"];
        succeed(&folder, &[&[command], &size[..], further].concat())
    };
    let made = seq("schedule", &["--level", "comms"]);
    write(&folder, "seq.csv", &made);
    let proved = succeed(&folder, &["validate", "seq.csv", "--slices", "4"]);
    assert_eq!(proved, "seq.csv: sound at level comms: 4 ranks, 4 stages, 8 microbatches of 4 slices\n");
    // The table alone says nothing of slices.
    let whole = succeed(&folder, &["validate", "seq.csv"]);
    let (first, hint) = whole.split_once('\n').expect("two lines");
    assert_eq!(first, "seq.csv: sound at level comms: 4 ranks, 4 stages, 32 microbatches");
    assert!(hint.ends_with("if the actions number slices, add --slices 4\n"), "{hint}");
    assert!(succeed(&folder, &["simulate", "--csv", "seq.csv"]).contains(hint), "{hint}");
    // Rank 3 holds the forwards of one microbatch, and rank 0 the forwards of three further slices.
    let figures = seq("simulate", &[]);
    assert!(figures.starts_with("seq1f1b: 4 ranks, 4 stages, 8 microbatches of 4 slices\n"), "{figures}");
    let held = "7 6 5 4 activations of slices at most, by rank; 4 slices make a microbatch\n";
    assert!(figures.contains(held), "{figures}");
    // The file has the messages of PyTorch's program.
    let of_file = succeed(&folder, &["simulate", "--csv", "seq.csv", "--slices", "4", "--format", "csv"]);
    assert_eq!(of_file, seq("simulate", &["--level", "comms", "--format", "csv"]));
    write(&folder, "seq.csv", seq("schedule", &[]));
    let of_file = succeed(&folder, &["simulate", "--csv", "seq.csv", "--slices", "4", "--format", "csv"]);
    assert_eq!(of_file, seq("simulate", &["--format", "csv"]));
    assert_ne!(of_file, seq("simulate", &["--format", "csv", "--cost", "attention=0.3"]));
    assert!(seq("simulate", &["--format", "svg"]).contains("<title>0B7.3 on rank 0, "));
    let size = ["--ranks", "4", "--microbatches", "8"];
    for other in ["gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble", "loopedbfs"] {
        write(&folder, "s.csv", succeed(&folder, &[&["schedule", other], &size[..]].concat()));
        let proved = succeed(&folder, &["validate", "s.csv"]);
        assert_eq!(proved.lines().count(), 1, "{other}: {proved}");
    }
    // Slice 1 of microbatch 0 before slice 0.
    write(
        &folder,
        "swapped.csv",
        made.replacen("0F0,", "0F1,", 1).replacen("0SEND_F0,0F1,", "0SEND_F0,0F0,", 1),
    );
    let arguments = ["validate", "swapped.csv", "--slices", "4", "--level", "comms"];
    let output = run(&folder, &arguments);
    assert_eq!(output.status.code(), Some(3));
    let found = text(&output.stdout);
    assert!(
        found.contains("at stage 0, slice 1 of microbatch 0 attends to the keys and values of slice 0;"),
        "{found}"
    );
}

#[test]
fn slices_that_do_not_fit_are_refused() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0F1,0F2,0B2,0B1,0B0\n");
    let uneven = "s.csv: the actions number 3 slices, which do not make microbatches of 2; use a number that divides 3\n";
    for command in [&["validate", "s.csv"][..], &["simulate", "--csv", "s.csv"], &["view", "s.csv"]] {
        refuse(&folder, &[command, &["--slices", "2"]].concat(), 2, &format!("error: {uneven}"));
    }
    let none = ["schedule", "seq1f1b", "--ranks", "2", "--microbatches", "2", "--slices", "0"];
    refuse(&folder, &none, 2, "error: invalid value '0' for '--slices <K>': use a whole number, at least 1");
    let unused = [&["schedule", "1f1b", "--slices", "2"], &SMALL[..]].concat();
    refuse(&folder, &unused, 2, "error: `1f1b` has no setting `slices`; leave it out\n");
}

#[test]
fn grids_and_json() {
    let folder = folder();
    let of = |format: &str| {
        succeed(&folder, &["schedule", "gpipe", "--ranks", "2", "--microbatches", "2", "--format", format])
    };
    let grid = "        0   1   2   3   4   5   6   7\n\
                rank 0  0F0 0F1         0B0---- 0B1----\n\
                rank 1      1F0 1F1 1B0---- 1B1----\n";
    assert_eq!(of("grid"), grid);
    let of_level =
        ["schedule", "gpipe", "--ranks", "2", "--microbatches", "2", "--format", "grid", "--level", "comms"];
    assert!(
        succeed(&folder, &of_level).contains("rank 0  0F0       0SEND_F0  0F1       0SEND_F1"),
        "messages on request"
    );
    assert!(
        succeed(&folder, &[&of_level[..8], &["--cost", "F=2"]].concat())
            .contains("rank 0  0F0 0F1       0B0 0B1\n")
    );
    refuse(
        &folder,
        &[&of_level[..], &["--cost", "F=2"]].concat(),
        2,
        "error: `gpipe` has no setting `costs`",
    );
    let json = "{\"level\":\"compute\",\"rows\":[[\"0F0\",\"0F1\",\"0B0\",\"0B1\"],[\"1F0\",\"1F1\",\"1B0\",\"1B1\"]],\
                \"stage_to_rank\":[0,1]}\n";
    assert_eq!(of("json"), json);
}

#[test]
fn data_goes_to_a_file() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n");
    for arguments in [
        &["schedule", "gpipe", "--ranks", "1", "--microbatches", "1"][..],
        &["lower", "s.csv", "--pass", "unshard"],
        &["simulate", "--csv", "s.csv", "--logical", "--format", "csv"],
        &["partition", "--weights", "1,2", "--stages", "2"],
        &["vpp", "--ranks", "1", "--chunks", "1", "--microbatches", "1"],
    ] {
        let printed = succeed(&folder, arguments);
        assert_eq!(succeed(&folder, &[arguments, &["-o", "out"]].concat()), "", "{arguments:?}");
        assert_eq!(fs::read_to_string(folder.path().join("out")).ok().as_deref(), Some(printed.as_str()));
    }
    let nowhere = ["schedule", "gpipe", "--ranks", "1", "--microbatches", "1", "-o", "none/out"];
    refuse(&folder, &nowhere, 2, "error: none/out: cannot be written: ");
}

#[test]
fn schedules_that_do_not_exist() {
    let refuse = |name: &str, message: &str| {
        let arguments = ["schedule", name, "--ranks", "4", "--microbatches", "2"];
        refuse(&folder(), &arguments, 2, &format!("error: {message}\n"));
    };
    refuse("gpip", "unknown schedule `gpip`; did you mean `gpipe`?");
    refuse(
        "dualpipev",
        "`dualpipev` needs at least as many microbatches as its 8 stages, not 2; use 8 microbatches",
    );
    for command in ["schedule", "simulate"] {
        let unsized_name = "error: unknown schedule `nosuch`; the schedules are forwardonly, gpipe, 1f1b, ";
        crate::refuse(&folder(), &[command, "nosuch"], 2, unsized_name);
    }
    let missing = "error: --microbatches is missing; give a size, such as --ranks 4 --microbatches 8\n";
    crate::refuse(&folder(), &["schedule", "gpipe", "--ranks", "2"], 2, missing);
}

#[test]
fn absurd_sizes_are_refused_at_once() {
    let folder = folder();
    let huge = "4000000000";
    for line in succeed(&folder, &["schedule", "--list"]).lines() {
        let name = line.split(' ').next().expect("a name");
        for (ranks, microbatches) in [(huge, huge), (huge, "1"), ("1", huge), ("0", "4"), ("4", "0")] {
            let size = ["--ranks", ranks, "--microbatches", microbatches];
            refuse(&folder, &[&["schedule", name], &size[..]].concat(), 2, "error: ");
            refuse(&folder, &[&["simulate", name], &size[..]].concat(), 2, "error: ");
        }
        let many = ["--ranks", "2", "--microbatches", "4", "--stages-per-rank", huge];
        refuse(&folder, &[&["schedule", name], &many[..]].concat(), 2, "error: ");
    }
    for size in [["1", "1", huge], [huge, "1", "1"], ["1", huge, "1"], ["0", "1", "1"]] {
        let [ranks, chunks, microbatches] = size;
        let arguments = ["vpp", "--ranks", ranks, "--chunks", chunks, "--microbatches", microbatches];
        refuse(&folder, &arguments, 2, "error: ");
    }
}

#[test]
fn what_is_no_number_is_refused() {
    let folder = folder();
    for cost in ["F=1e308", "F=nan", "W=-1", "hop=inf", "F=", "F", "X=1", "F=1;I=2"] {
        for command in ["simulate", "schedule"] {
            let arguments = [&[command, "zb-greedy", "--cost", cost], &SMALL[..]].concat();
            refuse(&folder, &arguments, 2, "error: invalid value");
        }
    }
    for ranks in ["-1", "1.5", "many", "99999999999999999999", ""] {
        let arguments = ["schedule", "gpipe", "--ranks", ranks, "--microbatches", "4"];
        refuse(&folder, &arguments, 2, "error: ");
    }
    for limit in ["0", "4,3,2", "-1", "x"] {
        let arguments = [&["schedule", "zb-greedy", "--memory-limit", limit], &SMALL[..]].concat();
        refuse(&folder, &arguments, 2, "error: ");
    }
}

#[test]
fn pictures_of_too_much_are_refused() {
    let folder = folder();
    let size = ["--ranks", "512", "--microbatches", "2048"];
    for format in ["svg", "html", "trace", "grid", "json"] {
        let arguments = [&["schedule", "gpipe", "--format", format], &size[..]].concat();
        refuse(&folder, &arguments, 2, "error: a picture of ");
    }
}

#[test]
fn partitions() {
    let folder = folder();
    let of = |rest: &[&str]| succeed(&folder, &[&["partition", "--stages", "3", "--weights"], rest].concat());
    assert_eq!(
        of(&["5,5,6,6", "--method", "optimal", "--format", "json"]),
        "{\"stages\":[[0,1],[2,2],[3,3]],\"weights\":[10,6,6]}\n"
    );
    assert_eq!(
        of(&["1,2,3,4", "--method", "explicit", "--boundaries", "1,3"]),
        "stage 0: layers 0 to 0, weight 1\nstage 1: layers 1 to 2, weight 5\nstage 2: layers 3 to 3, weight 4\n"
    );
    assert_eq!(
        of(&["9,1,1,1,1,9", "--method", "blocks"]),
        "stage 0: layers 0 to 2, weight 11\nstage 1: layers 3 to 3, weight 1\nstage 2: layers 4 to 5, weight 10\n"
    );
    assert_eq!(
        of(&["9,1,1,1,1,9", "--method", "blocks", "--boundaries", "1,2", "--format", "json"]),
        "{\"stages\":[[0,1],[2,2],[3,5]],\"weights\":[10,1,11]}\n"
    );
    let few = ["partition", "--weights", "1,2,3,4", "--stages", "3", "--method", "blocks"];
    refuse(&folder, &few, 2, "error: 2 blocks cannot fill 3 stages; use at most 2 stages\n");
    let few = ["partition", "--weights", "1,2", "--stages", "3", "--method", "even"];
    refuse(&folder, &few, 2, "error: 2 layers cannot fill 3 stages; use at most 2 stages\n");
    for boundaries in ["2,1", "0,1", "1,9", "1", "1,1", "x", "-1", "99999999999999999999999"] {
        let explicit = ["partition", "--weights", "1,2,3,4", "--stages", "3", "--method", "explicit"];
        refuse(&folder, &[&explicit[..], &["--boundaries", boundaries]].concat(), 2, "error: ");
    }
    for weights in ["", "1,,2", "-1", "1e3", "99999999999999999999999"] {
        refuse(&folder, &["partition", "--stages", "1", "--weights", weights], 2, "error: ");
    }
    refuse(&folder, &["partition", "--weights", "1,2", "--stages", "4000000000"], 2, "error: ");
    refuse(&folder, &["partition", "--weights", "1,2", "--stages", "0"], 2, "error: ");
}

#[test]
fn passes_have_settings() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,1F0,1B0,0B0\n");
    let of = |further: &[&str]| succeed(&folder, &[&["lower", "s.csv", "--pass"], further].concat());
    let narrow = "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD\n";
    assert_eq!(of(&["unshard", "--window", "1"]), narrow);
    assert_eq!(of(&["unshard=1"]), narrow);
    let late = "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1RESHARD,0B0,0RESHARD\n";
    assert_eq!(of(&["unshard", "--lookahead", "1"]), late);
    assert_eq!(of(&["unshard=3:1"]), late);
    for full in ["full", "auto", "2", "3"] {
        let early = "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1RESHARD,0B0,0RESHARD\n";
        assert_eq!(of(&["unshard", "--lookahead", full]), early, "{full}");
    }
    let deferred = "0F0,1F0,1B0,1REDUCE_GRAD,0B0,1WAIT_REDUCE_GRAD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n";
    assert_eq!(of(&["reduce-grad", "--defer-wait"]), deferred);
    assert_eq!(of(&["reduce-grad=deferred"]), deferred);
    let at_end = "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD\n";
    assert_eq!(of(&["reduce-grad=at-end"]), at_end);
    write(&folder, "two.csv", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
    let budget = ["lower", "two.csv", "--pass", "send-recv,wait-send", "--budget", "1"];
    let rank_0 = "0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F1\n";
    assert!(succeed(&folder, &budget).starts_with(rank_0));
    let each = succeed(&folder, &["lower", "two.csv", "--pass", "unshard", "--lookahead", "1,3"]);
    assert!(each.starts_with("0UNSHARD,0F0,"), "{each}");
    let grid = ["lower", "two.csv", "--pass", "merge-bw", "--format", "grid"];
    assert!(succeed(&folder, &grid).ends_with("rank 1  1F0  1F1  1B0  1B1\n"));
}

#[test]
fn passes_that_cannot_run() {
    let folder = folder();
    write(&folder, "one.csv", "0F0,1F0,1B0,0B0\n");
    let ahead = |lookahead: &str, words: &str| {
        refuse(&folder, &["lower", "one.csv", "--pass", "unshard", "--lookahead", lookahead], 2, words);
    };
    ahead(
        "4",
        "error: one.csv: rank 0 has a lookahead of 4 stages, and the window has 3; use a lookahead from 1 to 3",
    );
    ahead("1,2", "error: one.csv: 2 lookaheads for 1 rank; give one for each rank, or one number for all");
    for wrong in ["some", "0"] {
        let option = format!("error: invalid value '{wrong}' for '--lookahead <full|auto|STAGES|STAGES,..>'");
        let known =
            "is not a lookahead; use full, auto, a number of stages from 1, or a number for each rank";
        ahead(wrong, &format!("{option}: `{wrong}` {known}"));
    }
    write(&folder, "s.csv", "0F0,0B0\n1B0,1F0\n");
    write(&folder, "stuck.csv", "0F0,0B0,0F1\n1F0,1F1,1B0\n");
    let lower = |file: &str, further: &[&str], code: i32, words: &str| {
        refuse(&folder, &[&["lower", file, "--pass"], further].concat(), code, words);
    };
    lower("s.csv", &["sendrecv"], 2, "error: invalid value 'sendrecv' for '--pass <PASS,..>': unknown pass");
    lower(
        "s.csv",
        &["merge-bw", "--budget", "2"],
        2,
        "error: --budget 2 belongs to the pass wait-send, which",
    );
    // 3 is the default of the pass.
    let twice = "error: --window 5 and --pass unshard=3 are given; leave one setting out";
    lower("s.csv", &["unshard=3", "--window", "5"], 2, twice);
    lower("s.csv", &["wait-send", "--budget", "0"], 2, "error: invalid value '0'");
    lower("s.csv", &["merge-bw", "--stage-to-rank", "0,7"], 2, "error: s.csv: rank 1 owns no stage");
    lower("s.csv", &["merge-bw", "--microbatches", "4000000000"], 2, "error: s.csv: 2 stages and 4000000000");
    lower(
        "stuck.csv",
        &["send-recv"],
        3,
        "error: stuck.csv: no rank can continue: rank 0 at position 1 (0B0)",
    );
    lower("none.csv", &["send-recv"], 2, "error: none.csv: cannot read the schedule: ");
}

#[test]
fn every_violation_has_its_line() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1B0,1F0,1F0\n");
    let output = run(&folder, &["validate", "s.csv"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(text(&output.stderr), "error: s.csv: the schedule is unsound, 2 violations\n");
    let lines = text(&output.stdout);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.lines().all(|line| line.starts_with("rank 1, position ")), "{lines}");
    let marked = text(&run(&folder, &["validate", "s.csv", "--format", "grid"]).stdout);
    assert_eq!(marked.lines().nth(2), Some("rank 1  1B0! 1F0  1F0!"));
    assert!(marked.ends_with(&lines), "{marked}");
    write(&folder, "two.csv", "0F0,0B0\n0F1,0B1\n");
    refuse(&folder, &["validate", "two.csv"], 3, "error: two.csv: the schedule is unsound, 1 violation\n");
}

#[test]
fn a_level_says_what_must_be_there() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1F0,1B0\n");
    assert_eq!(
        succeed(&folder, &["validate", "s.csv"]),
        "s.csv: sound at level compute: 2 ranks, 2 stages, 1 microbatch\n"
    );
    let unsound = "error: s.csv: the schedule is unsound, ";
    refuse(&folder, &["validate", "s.csv", "--level", "comms"], 3, &format!("{unsound}4 violations\n"));
    refuse(&folder, &["validate", "s.csv", "--level", "full"], 3, unsound);
    refuse(&folder, &["validate", "s.csv", "--level", "half"], 2, "error: invalid value 'half'");
}

#[test]
fn bad_files_are_located() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1F0, 1B0x\n");
    refuse(&folder, &["validate", "s.csv"], 2, "error: s.csv:2:9: ");
    refuse(&folder, &["lower", "s.csv", "--pass", "merge-bw"], 2, "error: s.csv:2:9: ");
    refuse(&folder, &["simulate", "--csv", "s.csv"], 2, "error: s.csv:2:9: ");
    write(&folder, "huge.csv", "0F4294967295,0F0\n");
    refuse(&folder, &["validate", "huge.csv"], 3, "error: huge.csv: ");
    write(&folder, "far.csv", "0F0,16777216F0\n");
    refuse(&folder, &["validate", "far.csv"], 2, "error: far.csv:1:5: number too large: at most 16777215");
    write(&folder, "latin.csv", b"0F0,\xe9\n");
    refuse(&folder, &["validate", "latin.csv"], 2, "error: latin.csv: cannot read the schedule: ");
    refuse(&folder, &["validate", "."], 2, "error: .: cannot read the schedule: ");
    write(&folder, "empty.csv", "");
    refuse(
        &folder,
        &["validate", "empty.csv"],
        3,
        "error: empty.csv: the schedule is unsound, 1 violation\n",
    );
}

#[test]
fn what_the_loader_of_pytorch_refuses() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1F0,1B0\n");
    let validate = |file: &'static str| ["validate", file, "--loader", "pytorch"];
    let found = succeed(&folder, &validate("s.csv"));
    assert!(found.ends_with("PyTorch 2.15 loads it with `_load_csv(file, \"compute_only\")`\n"), "{found}");
    succeed(&folder, &["lower", "s.csv", "--pass", "send-recv", "-o", "comms.csv"]);
    let name = "error: comms.csv: the schedule is sound, and PyTorch does not load it, for 2 reasons";
    refuse(&folder, &validate("comms.csv"), 3, name);
    let output = run(&folder, &validate("comms.csv"));
    let line = "rank 0, position 1: PyTorch does not load a send without a wait; run the pass wait-send\n";
    assert!(text(&output.stdout).starts_with(line), "{}", text(&output.stdout));
    let json = run(&folder, &[&validate("comms.csv")[..], &["--format", "json"]].concat());
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("an object");
    assert_eq!((&json["sound"], &json["loader"]["refused"][1]["rank"]), (&true.into(), &1.into()));
    succeed(&folder, &["lower", "comms.csv", "--pass", "wait-send", "-o", "waits.csv"]);
    let json = succeed(&folder, &[&validate("waits.csv")[..], &["--format", "json"]].concat());
    assert!(json.contains("\"loader\":{\"format\":\"compute_comms\"}"), "{json}");
    let both = [&validate("waits.csv")[..], &["--transport", "rank"]].concat();
    refuse(
        &folder,
        &both,
        2,
        "error: --loader and --transport have verdicts of their own; leave one of them out",
    );
}
