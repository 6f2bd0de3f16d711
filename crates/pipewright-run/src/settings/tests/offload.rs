//! Tests of the keys for inputs that leave memory.

use super::{check_set, load};

#[test]
fn what_leaves_is_a_word_or_a_table() {
    let written = |set: &str| {
        let arguments = ["pipeline.recompute=block", &format!("pipeline.offload={set}")];
        load(None, &arguments).map(|settings| {
            assert_eq!(load(Some(&settings.to_toml()), &[]).as_ref(), Ok(&settings), "{set}");
            let text = settings.to_toml();
            let from =
                text.find("\noffload = ").map_or_else(|| text.find("[pipeline.offload]"), |at| Some(at + 1));
            text[from.expect("the key")..]
                .lines()
                .take_while(|line| !line.is_empty())
                .collect::<Vec<_>>()
                .join("; ")
        })
    };
    let begins = |set: &str, expected: &str| {
        let found = written(set).expect(set);
        assert!(found.starts_with(expected), "{set}: {found}");
    };
    begins("none", "offload = \"none\"");
    begins("file", "offload = \"file\"");
    begins("{ to = 'file' }", "offload = \"file\"");
    assert!(written("{ to = 'file', stages = [1, 0], keep = 2 }").is_ok());
    for (set, expected) in [
        ("disk", "where none, host, file is expected"),
        ("true", "a word, or a table such as"),
        ("{ stages = [0] }", "a word, or a table such as"),
        ("{ to = 'file', stages = [] }", "a word, or a table such as"),
        ("{ to = 'file', first = 1 }", "a word, or a table such as"),
        ("{ to = 'file', stages = [2] }", "`offload` is 2"),
    ] {
        let error = written(set).expect_err(set);
        assert!(error.contains(expected), "{set}: {error}");
    }
}

#[test]
fn what_cannot_leave_is_refused() {
    let file = "pipeline.offload=file";
    let refuse = |arguments: &[&str], message: &str| {
        let culprit = arguments[arguments.len() - 1];
        check_set(arguments, &[&format!("--set {culprit}: {message}")]);
    };
    let without = "`offload` has no effect without `recompute`, because only recomputed forwards keep inputs that can leave \
                   memory, and no tapes";
    refuse(&[file], without);
    refuse(&["pipeline.recompute=parts", file], without);
    refuse(
        &["pipeline.recompute=[0]", "pipeline.offload={ to = 'file', stages = [1] }"],
        "`offload` is 1, where stages that recompute forwards (`recompute`) is expected",
    );
    refuse(
        &["pipeline.recompute=block", "pipeline.offload=host"],
        "`offload` has no effect without a device other than the processor (`run.device`), whose tensors are in the host's \
         memory already",
    );
    refuse(
        &["pipeline.schedule=auto", file],
        "`offload` has no effect without a schedule by name or from a file",
    );
    refuse(
        &["pipeline.offload_folder=/tmp"],
        "`offload_folder` has no effect without files (`offload = \"file\"`)",
    );
    assert!(load(None, &["pipeline.recompute=block", file, "pipeline.offload_folder=/tmp"]).is_ok());
}
