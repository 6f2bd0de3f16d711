//! Tests of `clusters` through the binary.

use serde_json::Value;

use crate::{folder, refuse, run, succeed, write};

#[test]
fn known_machines_are_listed_with_the_source_of_each_figure() {
    let folder = folder();
    let list = succeed(&folder, &["clusters"]);
    for name in ["a100", "h100", "h200", "b200", "gb200", "mi300x", "l40s", "4090"] {
        assert!(
            list.lines().filter(|line| line.starts_with(&format!("{name} "))).count() == 3,
            "{name}: {list}"
        );
    }
    for title in ["node switch", "network latency us", "collectives", "launch us"] {
        assert!(list.contains(title), "{title}: {list}");
    }
    let json: Value =
        serde_json::from_str(&succeed(&folder, &["clusters", "--format", "json"])).expect("JSON");
    let clusters = json["clusters"].as_array().expect("a list");
    assert!(clusters.len() >= 9);
    for cluster in clusters {
        let figures = cluster["figures"].as_object().expect("figures");
        assert!(figures.len() >= 10, "{cluster}");
        for (key, figure) in figures {
            assert!(figure["value"].as_f64().is_some_and(|value| value > 0.0), "{key}: {cluster}");
            assert!(figure["source"].as_str().is_some_and(|source| source.len() > 10), "{key}: {cluster}");
        }
        for key in ["node_switch_source", "constants_source"] {
            assert!(cluster[key].as_str().is_some_and(|source| source.len() > 10), "{key}: {cluster}");
        }
    }
}

#[test]
fn each_cell_of_the_tables_stands_below_its_title() {
    let folder = folder();
    let list = succeed(&folder, &["clusters"]);
    // Titles and cells are right-aligned, but the first two columns.
    let ends = |line: &str| {
        let characters: Vec<char> = line.chars().collect();
        let separated = |end: usize| end == characters.len() || characters[end..].starts_with(&[' ', ' ']);
        (1..=characters.len())
            .filter(|&end| characters[end - 1] != ' ' && separated(end))
            .skip(2)
            .collect::<Vec<_>>()
    };
    let tables: Vec<&str> = list.split("\n\n").take(2).collect();
    for table in tables {
        let mut lines = table.lines().skip_while(|line| !line.starts_with("name "));
        let titles = ends(lines.next().expect("titles"));
        assert!(titles.len() > 6, "{table}");
        for line in lines {
            assert_eq!(ends(line), titles, "{line}\n{table}");
        }
    }
}

#[test]
fn a_machine_is_shown_as_a_file_that_can_be_edited() {
    let folder = folder();
    let shown = succeed(&folder, &["clusters", "H100"]);
    let edited = shown.replace("memory_gb = 80 ", "memory_gb = \"64 GiB\" ");
    assert_ne!(shown, edited);
    write(&folder, "mine.toml", &edited);
    let again = succeed(&folder, &["clusters", "mine.toml"]);
    assert_eq!(again.replace("memory_gb = 64 ", "memory_gb = 80 "), shown);
}

#[test]
fn names_that_are_not_known_suggest_near_ones() {
    let folder = folder();
    refuse(
        &folder,
        &["clusters", "h10"],
        2,
        "error: there is no machine `h10`; the nearest name is `h100`; known are a100, h100, h100-500w, h200, b200, \
         gb200, gb300, b300, h800, mi300x, mi355x, l40s, 4090; the path of a cluster file ends in .toml",
    );
}

#[test]
fn mistakes_in_a_cluster_file_have_a_place() {
    let folder = folder();
    let check = |text: &str, message: &str, help: &str| {
        write(&folder, "mine.toml", text);
        refuse(&folder, &["clusters", "mine.toml"], 2, &format!("error: {message}"));
        let stderr = crate::text(&run(&folder, &["clusters", "mine.toml"]).stderr);
        assert!(stderr.contains(&format!("help: {help}")), "{stderr}");
    };
    check(
        "name = \"h100\"\nmemory_gb = \"80 TFLOP/s\"\n",
        "mine.toml:2:13: `memory_gb` is \"80 TFLOP/s\", which measures operations per second, such as `989 TFLOP/s`",
        "write bytes, such as `80 GB`",
    );
    check(
        "name = \"h100\"\n\ngpus_per_node = -8\n",
        "mine.toml:3:17: `gpus_per_node` is -8, where a number from 1",
        "write a number from 1",
    );
    check(
        "name = \"h100\"\nmemory = 80\n",
        "mine.toml:2:1: unknown key `memory` in the cluster file",
        "did you mean `memory_gb`?",
    );
    check("memory_gb = 80\n", "mine.toml:1:1: `name` is missing", "write `name = ...`");
    refuse(&folder, &["clusters", "none.toml"], 2, "error: none.toml: cannot read the cluster file");
}
