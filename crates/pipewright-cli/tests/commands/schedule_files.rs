//! Schedules, passes and partitions on the command line: how files with rows are read, and the texts of errors
//! for settings that contradict each other. The other tests of the command line have the configuration and data.

use crate::command_line::{fail, folder, refuse, small};

#[test]
fn schedules_that_contradict_the_configuration() {
    let folder = folder();
    folder.write("s.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    let sizes = small().replace("[pipeline]\n", "[pipeline]\nschedule = \"s.csv\"\nranks = 4\n");
    folder.write("csv.toml", sizes);
    fail(
        &folder,
        &["check", "csv.toml"],
        2,
        &[
            "error: csv.toml:12:9: `ranks` is 4, and the schedule in s.csv has 2",
            "help: remove `ranks`, which follows from the file, or write `ranks = 2`",
        ],
    );
    folder.print(&["check", "csv.toml", "--set", "pipeline.ranks=2"]);
    folder.print(&["check", "small.toml", "--set", "pipeline.schedule=s.csv"]);
    folder.write("six.csv", folder.print(&["schedule", "1f1b", "--ranks", "2", "--microbatches", "6"]));
    for command in ["train", "check"] {
        let (_, told) = folder.succeed(&[command, "small.toml"], &["pipeline.schedule=six.csv"]);
        let note = "microbatches = 2 of small.toml is replaced by 6 of six.csv";
        assert_eq!(told.lines().filter(|line| *line == note).count(), 1, "{command}: {told}");
    }
    refuse(
        "optimizer.warmup_steps=4",
        &[
            "error: --set optimizer.warmup_steps=4: `warmup_steps` is 4, and the run has 3 steps: the learning rate \
             never reaches its highest",
            "help: lower `warmup_steps` in [optimizer], or raise `steps` in [run]",
        ],
    );
}

#[test]
fn a_file_of_a_schedule_needs_no_ending() {
    let folder = folder();
    folder.write("zigzag", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    folder.print(&["check", "small.toml", "--set", "pipeline.schedule=zigzag"]);
    folder.print(&["check", "small.toml", "--set", "pipeline.schedule=./zigzag"]);
    folder.print(&["view", "zigzag", "-o", "view.html"]);
    // A schedule's name wins over a file.
    folder.write("gpipe", "not a schedule");
    folder.print(&["check", "small.toml", "--set", "pipeline.schedule=gpipe"]);
    folder.refuse(&["check", "small.toml"], &["pipeline.schedule=zigzga"], "unknown schedule `zigzga`");
}

#[test]
fn a_schedule_is_read_from_standard_input() {
    let folder = folder();
    folder.write("s.csv", "0F0,0B0\n1F0,1B0\n");
    let read = |arguments: &[&str]| {
        let input = std::fs::File::open(folder.path("s.csv")).expect("the file");
        let output = folder.binary().args(arguments).stdin(input).output().expect("the binary starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    assert!(read(&["validate", "-"]).starts_with("-: sound at level compute: 2 ranks"));
    let lowered = folder.print(&["lower", "s.csv", "--pass", "send-recv"]);
    assert_eq!(read(&["lower", "-", "--pass", "send-recv"]), lowered);
}

#[test]
fn passes_and_costs_that_contradict_each_other() {
    let folder = folder();
    folder.write("s.csv", "0F0,0B0\n1F0,1B0\n");
    let refuse = |further: &[&str], words: &str| {
        fail(&folder, &[&["lower", "s.csv", "--pass"], further].concat(), 2, &[&format!("error: {words}")]);
    };
    refuse(
        &["send-recv,send-early"],
        "--pass: the passes run send-recv before send-early; name send-early first",
    );
    refuse(
        &["wait-send,send-recv"],
        "--pass: the passes run wait-send before send-recv; name send-recv first",
    );
    refuse(
        &["defer-recv,send-recv"],
        "--pass: the passes run defer-recv before send-recv; name send-recv first",
    );
    refuse(&["merge-bw,merge-bw"], "--pass: the passes name merge-bw twice; a pass runs once, leave one out");
    refuse(
        &["send-recv,wait-send=2", "--budget", "3"],
        "--budget 3 and --pass wait-send=2 are given; leave one setting out",
    );
    folder.write("comms.csv", folder.print(&["lower", "s.csv", "--pass", "send-early,send-recv"]));
    let message = "error: comms.csv: the rows have messages already, and the pass send-early must run before they are \
                   added; start from rows without messages, or leave send-early out";
    fail(&folder, &["lower", "comms.csv", "--pass", "send-early"], 2, &[message]);
    for pass in ["wait-send", "wait-send=2", "defer-recv", "merge-bw,defer-recv"] {
        let name = pass.split([',', '=']).find(|name| *name != "merge-bw").expect("a pass");
        let message = format!(
            "s.csv: the rows have no messages, so the pass {name} has no effect; name send-recv before it, or leave it out"
        );
        refuse(&[pass], &message);
        folder.print(&["lower", "s.csv", "--pass", &format!("send-recv,{pass}")]);
        folder.print(&["lower", "comms.csv", "--pass", pass]);
    }
    let twice = ["simulate", "--csv", "s.csv", "--cost", "F=1,F=2"];
    let message = "error: invalid value 'F=1,F=2' for '--cost <F=1,I=1,W=1,hop=0.1>': the cost `f` is given twice; \
                   leave one out";
    fail(&folder, &twice, 2, &[message]);
}

#[test]
fn schedules_from_spreadsheets() {
    let folder = folder();
    let sound = "s.csv: sound at level compute: 2 ranks, 2 stages, 1 microbatch\n";
    for content in
        ["\u{feff}0F0,0B0\r\n1F0,1B0\r\n", "\"0F0\",\"0B0\"\n\"1F0\",\"1B0\"\n", "0F0;0B0\n1F0;1B0\n"]
    {
        folder.write("s.csv", content);
        assert_eq!(folder.print(&["validate", "s.csv"]), sound, "{content:?}");
        assert_eq!(folder.print(&["lower", "s.csv", "--pass", "merge-bw"]), "0F0,0B0\n1F0,1B0\n");
    }
    folder.write("s.csv", "0F0,\"0B0\n1F0,1B0\n");
    let quotes = "error: s.csv:1:5: a cell that begins with a quote must end with the next quote, such as `\"0F0\"`; \
                  correct or remove the quotes";
    fail(&folder, &["validate", "s.csv"], 2, &[quotes]);
    folder.write("s.csv", b"\xff\xfe0\0F\0");
    let encoding = "error: s.csv: cannot read the schedule: the file is UTF-16; save it as UTF-8";
    fail(&folder, &["validate", "s.csv"], 2, &[encoding]);
}

#[test]
fn weights_may_have_decimals() {
    let folder = folder();
    let json = ["partition", "--weights", "1.5,2", "--stages", "2", "--format", "json"];
    assert_eq!(folder.print(&json), "{\"stages\":[[0,0],[1,1]],\"weights\":[1.5,2]}\n");
    let text = ["partition", "--weights", "0.1,0.2,0.3", "--stages", "2"];
    let expected = "stage 0: layers 0 to 1, weight 0.3\nstage 1: layers 2 to 2, weight 0.3\n";
    assert_eq!(folder.print(&text), expected);
    let arguments = ["partition", "--weights", "1,-2", "--stages", "1"];
    fail(&folder, &arguments, 2, &["error: --weights: weight 2 of 2, `-2`, is negative; write 0 or more"]);
    for weights in ["nan,1", "1,inf", "-inf", "1e3"] {
        let partition = ["partition", "--weights", weights, "--stages", "1"];
        folder.refuse(&partition, &[], "is not a decimal number");
    }
}

#[test]
fn files_in_the_place_of_names() {
    let folder = folder();
    folder.write("s.csv", "0F0,0B0\n");
    let message = "error: s.csv: a schedule from a file is named with --csv; write --csv s.csv";
    fail(&folder, &["simulate", "s.csv"], 2, &[message]);
    folder.print(&["simulate", "--csv", "s.csv", "-o", "-"]);
    assert!(!folder.path("-").exists());
    let message = "error: s.csv: this command makes schedules by name; for a file use `pipewright lower`, `validate` or \
                   `simulate`";
    fail(&folder, &["schedule", "s.csv"], 2, &[message]);
}
