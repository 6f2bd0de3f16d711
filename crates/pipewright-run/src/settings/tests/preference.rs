//! The section `[preference]`.

use super::{check, load};

const BASE: &str = "[model]\nfrom = \"models/a\"\n[adapter]\nkind = \"lora\"\n[data]\npath = \"a.jsonl\"\ntokenizer = \"bytes\"\n";

/// Checks the problems of a section of a run with adapters.
fn check_section(text: &str, problems: &[&str]) {
    check(&format!("{BASE}[preference]\n{text}"), problems);
}

#[test]
fn each_loss_has_its_keys() {
    check_section("loss = \"dpo\"\nbeta = 0.2\nlabel_smoothing = 0.1\nreference = \"r.json\"", &[]);
    check_section("loss = \"simpo\"\nmargin = 0.0\nlabel_smoothing = 0.1", &[]);
    check_section(
        "loss = \"dpo\"\nmargin = 0.5",
        &["a.toml:10:10: `margin` has no effect without `loss = \"simpo\"`"],
    );
    check_section(
        "beta = 0.5",
        &["a.toml:9:8: `beta` has no effect without a `loss` with log-probabilities"],
    );
    check_section("loss = \"reward\"\ncenter_rewards_coefficient = 0.1", &[]);
    check_section(
        "loss = \"reward\"\nbeta = 0.1",
        &["a.toml:10:8: `beta` has no effect without a `loss` with log-probabilities"],
    );
    check_section(
        "loss = \"dpo\"\ncenter_rewards_coefficient = 0.1",
        &["a.toml:10:30: `center_rewards_coefficient` has no effect without `loss = \"reward\"`"],
    );
    check_section(
        "loss = \"orpo\"\nreference = \"r.json\"",
        &["a.toml:10:13: `reference` has no effect without `loss = \"dpo\"`, `\"ipo\"` or `\"kto\"`"],
    );
    check_section(
        "loss = \"dop\"\nbeta = 0",
        &[
            "a.toml:9:8: `loss` is \"dop\", where none, dpo, ipo, orpo, simpo, kto, reward is expected",
            "a.toml:10:8: `beta` is 0, where a finite number above 0 is expected",
        ],
    );
}

#[test]
fn a_loss_needs_what_it_compares() {
    let data = "[data]\npath = \"a.jsonl\"\n[preference]\n";
    check(
        &format!("{data}loss = \"ipo\""),
        &["a.toml:4:8: `loss` has no effect without adapters: its reference is the model without them"],
    );
    check(&format!("{data}loss = \"orpo\""), &[]);
    let alone = "a.toml:9:8: `loss` has no effect without several rows in a microbatch (`pipeline.microbatch_size` is 1), whose completions it exchanges";
    check_section("loss = \"kto\"", &[alone]);
    check_section("loss = \"kto\"\n[pipeline]\nmicrobatch_size = 2", &[]);
    check(
        "[preference]\nloss = \"simpo\"",
        &["a.toml:2:8: `loss` has no effect without records with completions"],
    );
    check(
        &format!("{data}loss = \"orpo\"\n[pipeline]\nschedule = \"seq1f1b\""),
        &["a.toml:4:8: `loss` does not work with a schedule that cuts microbatches into slices"],
    );
    check(
        &format!("[data]\ntrain_on = \"all\"\n{}", &data[7..])
            .replace("[preference]", "[preference]\nloss = \"orpo\""),
        &["a.toml:2:12: `train_on` does not work with preference training (`preference.loss`)"],
    );
    check(
        &format!("{data}loss = \"orpo\"\n[run]\nlabel_smoothing = 0.1"),
        &["a.toml:6:19: `label_smoothing` smooths the targets of tokens, and preference training has none"],
    );
}

#[test]
fn labels_need_records_and_are_not_preferences() {
    let data = "[data]\nlabels = [\"a\", \"b\"]\n";
    check(&format!("{data}path = \"a.jsonl\""), &[]);
    check(data, &["a.toml:2:10: `labels` has no effect without records with labels"]);
    check(
        &format!("{data}path = \"a.jsonl\"\ntrain_on = \"all\""),
        &["a.toml:4:12: `train_on` does not work with training on labels (`labels`)"],
    );
    check(
        &format!("{data}path = \"a.jsonl\"\n[preference]\nloss = \"orpo\""),
        &["a.toml:2:10: `labels` does not work with preference training (`preference.loss`)"],
    );
    check(
        "[data]\nlabels = [\"a\"]\npath = \"a.jsonl\"",
        &["a.toml:2:10: `labels` has fewer than two different names, or one name twice"],
    );
}

#[test]
fn losses_survive_being_written_and_read() {
    for own in [
        "loss = \"dpo\"\nreference = \"r.json\"",
        "loss = \"simpo\"\nmargin = 0.25",
        "loss = \"ipo\"\nbeta = 0.1",
        "loss = \"reward\"\ncenter_rewards_coefficient = 0.5",
    ] {
        let settings = load(Some(&format!("{BASE}[preference]\n{own}")), &[]).expect("it is sound");
        assert!(settings.preference.is_some());
        assert_eq!(load(Some(&settings.to_toml()), &[]), Ok(settings));
    }
}
