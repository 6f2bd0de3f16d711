//! Checks that what an error advises is accepted by the same command, that few microbatches are said, and
//! that numbers agree with their nouns.

use crate::{folder, refuse, run, succeed, text, write};

/// Returns the numbers of a noun that standard error advises: `use 6 microbatches, or use 8 microbatches`.
fn advised(stderr: &str, noun: &str) -> Vec<String> {
    let words: Vec<&str> =
        stderr.split_whitespace().map(|word| word.trim_end_matches([',', ';', '.'])).collect();
    let is_advice = |at: &usize| ["use", "write", "and", "or"].contains(&words[*at]);
    let numbers = (0..words.len().saturating_sub(2)).filter(is_advice);
    let numbers =
        numbers.filter(|at| words[at + 2].starts_with(noun) && words[at + 1].parse::<u32>().is_ok());
    numbers.map(|at| words[at + 1].to_owned()).collect()
}

/// Checks that `schedule` and `simulate` refuse a size, and that both accept each number of microbatches that
/// they advise.
fn check_microbatches(name: &str, ranks: &str, microbatches: &str) {
    let folder = folder();
    for command in ["schedule", "simulate"] {
        let size = |microbatches: &str| {
            [command, name, "--ranks", ranks, "--microbatches", microbatches].map(str::to_owned)
        };
        let run = |arguments: [String; 6]| run(&folder, &arguments.each_ref().map(String::as_str));
        let refused = run(size(microbatches));
        let stderr = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{stderr}");
        let numbers = advised(&stderr, "microbatch");
        assert!(!numbers.is_empty(), "{stderr}");
        for number in numbers {
            let accepted = run(size(&number));
            assert_eq!(accepted.status.code(), Some(0), "{stderr}{number}: {}", text(&accepted.stderr));
        }
    }
}

#[test]
fn advised_microbatches_are_accepted() {
    check_microbatches("interleaved1f1b", "2", "7");
    check_microbatches("interleaved-zb-h1", "3", "10");
    check_microbatches("dualpipev", "3", "5");
    check_microbatches("group-interleaved", "4", "6");
    check_microbatches("gpipe", "2", "0");
}

#[test]
fn group_sizes_are_those_of_the_tables() {
    let folder = folder();
    let size = ["--ranks", "2", "--microbatches", "7"];
    for flag in ["--group-size", "--group"] {
        let group = [flag, "3"];
        let schedule = succeed(&folder, &[&["schedule", "interleaved1f1b"], &size[..], &group].concat());
        let row = schedule.lines().next().expect("a row");
        let forwards: Vec<(u64, u64)> = row
            .split(',')
            .filter_map(|cell| cell.split_once('F'))
            .map(|(stage, microbatch)| {
                (microbatch.parse().expect("a number"), stage.parse::<u64>().expect("a number") / 2)
            })
            .collect();
        let tables =
            succeed(&folder, &[&["vpp", "--chunks", "2", "--format", "json"], &size[..], &group].concat());
        let tables: serde_json::Value = serde_json::from_str(&tables).expect("JSON");
        let table: Vec<(u64, u64)> = serde_json::from_value(tables["table"].clone()).expect("pairs");
        assert_eq!(forwards, table);
        let simulated = succeed(&folder, &[&["simulate", "interleaved1f1b"], &size[..], &group].concat());
        assert!(simulated.starts_with("interleaved1f1b: 2 ranks, 4 stages, 7 microbatches\n"), "{simulated}");
        succeed(&folder, &[&["view", "interleaved1f1b", "-o", "page.html"], &size[..], &group].concat());
    }
    let refused = ["schedule", "interleaved1f1b", "--ranks", "4", "--microbatches", "8", "--group-size", "3"];
    let words = "error: groups of 3 microbatches are not possible with 4 ranks and 8 microbatches: the group size is from 4 \
                 to 8; use a group size of 4\n";
    refuse(&folder, &refused, 2, words);
}

#[test]
fn few_microbatches_are_run_and_said() {
    let folder = folder();
    for (name, note) in [
        ("gpipe", "2 microbatches cannot fill the pipeline of 4 ranks: the bubble is 50% of a step"),
        ("1f1b", "2 microbatches cannot fill the pipeline of 4 ranks: the bubble is 50% of a step"),
        ("zb-h1", "2 microbatches cannot fill the pipeline of 4 ranks: the bubble is "),
    ] {
        for command in ["schedule", "simulate", "view"] {
            let arguments = [command, name, "--ranks", "4", "--microbatches", "2"];
            let output = run(&folder, &arguments);
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
            assert_eq!(stderr.matches(note).count(), 1, "{arguments:?}: {stderr}");
        }
    }
    let figures =
        run(&folder, &["simulate", "gpipe", "--ranks", "4", "--microbatches", "2", "--format", "json"]);
    let figures: serde_json::Value = serde_json::from_slice(&figures.stdout).expect("JSON");
    assert!((figures["bubble_fraction"].as_f64().expect("a number") - 0.5).abs() < 1e-9, "{figures}");
    let full = run(&folder, &["schedule", "1f1b", "--ranks", "4", "--microbatches", "4"]);
    assert_eq!(text(&full.stderr), "");
    // It evaluates, and has no backward whose bubble matters.
    let forward = run(&folder, &["schedule", "forwardonly", "--ranks", "4", "--microbatches", "2"]);
    assert_eq!(text(&forward.stderr), "");
}

#[test]
fn one_has_no_plural() {
    let folder = folder();
    let one = ["--ranks", "1", "--microbatches", "1"];
    let simulated = succeed(&folder, &[&["simulate", "gpipe"], &one[..]].concat());
    assert!(simulated.starts_with("gpipe: 1 rank, 1 stage, 1 microbatch\n"), "{simulated}");
    write(&folder, "s.csv", succeed(&folder, &[&["schedule", "gpipe"], &one[..]].concat()));
    assert_eq!(
        succeed(&folder, &["validate", "s.csv"]),
        "s.csv: sound at level compute: 1 rank, 1 stage, 1 microbatch\n"
    );
    let refused = ["schedule", "gpipe", "--ranks", "1", "--stages-per-rank", "2", "--microbatches", "1"];
    refuse(
        &folder,
        &refused,
        2,
        "error: `gpipe` runs 1 stage on each rank, not 2; use 1 stage on each rank\n",
    );
    let refused = ["partition", "--weights", "1", "--stages", "2"];
    refuse(&folder, &refused, 2, "error: 1 layer cannot fill 2 stages; use at most 1 stage\n");
}

#[test]
fn long_values_are_not_repeated() {
    let folder = folder();
    let digits = "1".repeat(300);
    let cost = format!("F={digits}");
    for arguments in [
        ["schedule", "gpipe", "--microbatches", "1", "--ranks", &digits],
        ["simulate", "gpipe", "--microbatches", "1", "--cost", &cost],
        ["partition", "--stages", "2", "--method=even", "--weights", &digits],
    ] {
        let stderr = text(&run(&folder, &arguments).stderr);
        assert!(!stderr.contains(&"1".repeat(100)), "{stderr}");
    }
    let stderr = text(&run(&folder, &["check", "--set", &format!("pipeline.ranks={digits}")]).stderr);
    assert!(!stderr.contains(&"1".repeat(100)), "{stderr}");
}

#[test]
fn the_largest_odd_number_of_stages_has_no_even_one_above() {
    let arguments =
        ["schedule", "hanayo", "--ranks", "1", "--microbatches", "1", "--stages-per-rank", "4294967295"];
    let stderr = text(&run(&folder(), &arguments).stderr);
    let stages = advised(&stderr, "stage");
    assert!(!stages.is_empty() && !stages.contains(&"4294967295".to_owned()), "{stderr}");
}
