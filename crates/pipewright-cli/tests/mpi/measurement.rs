//! Test of a schedule that is planned in several processes: they measure their link, and share one plan.

use std::fs;

use super::{folder, processes, words};

#[test]
fn processes_measure_their_link_and_share_one_plan() {
    let folder = folder();
    let overrides = ["pipeline.ranks=2", "pipeline.schedule=auto"];
    let output = processes(folder.path(), 2, &overrides);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let said = words(&output);
    assert_eq!(said.matches("of the best possible; measured in ").count(), 1, "{said}");
    let profile = fs::read_dir(folder.path().join("out")).expect("the folder of the run").flatten();
    let profile = profile
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("profile-")));
    let text = fs::read_to_string(profile.expect("the profile is kept")).expect("text");
    let assumed: Vec<&str> = text.lines().filter(|line| line.contains("assumed")).collect();
    assert_eq!(assumed, ["assumed = [\"link.reduce_bytes_per_s\"]"], "a process measures one rank");
    assert!(text.contains("latency_s = ") && text.contains("\nranks = 2\n"), "{text}");
}
