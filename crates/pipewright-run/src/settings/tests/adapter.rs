//! The section `[adapter]`.

use super::{check, load};

const BASE: &str = "[model]\nfrom = \"models/a\"\n";

/// Checks the problems of a section of a model with weights.
fn check_section(text: &str, problems: &[&str]) {
    check(&format!("{BASE}[adapter]\n{text}"), problems);
}

#[test]
fn an_adapter_needs_its_kind_and_a_model_with_weights() {
    check_section("kind = \"none\"", &[]);
    check_section("kind = \"lora\"\nrank = 4\ntargets = [\"q_proj\", \"*.mlp.*\"]", &[]);
    check_section("rank = 4", &["a.toml:4:8: `rank` has no effect without `kind = \"lora\"`"]);
    check("[adapter]\nkind = \"lora\"", &["a.toml:2:8: `kind` has no effect without `from` in [model]"]);
    check_section("kind = \"dora\"", &["a.toml:4:8: `kind` is \"dora\", where none, lora is expected"]);
}

#[test]
fn values_are_in_their_ranges() {
    check_section(
        "kind = \"lora\"\nrank = 0\nalpha = 0\ndropout = 1.0\nrslora = 1\ntargets = []",
        &[
            "a.toml:7:11: `dropout` is 1.0, where a number from 0 to below 1 is expected",
            "a.toml:5:8: `rank` is 0, where a whole number from 1 to 65536 is expected",
            "a.toml:6:9: `alpha` is 0, where a finite number above 0 is expected",
            "a.toml:8:10: `rslora` is a whole number, where true or false is expected",
            "a.toml:9:11: `targets` is empty",
        ],
    );
}

#[test]
fn a_directory_has_the_settings() {
    check_section("kind = \"lora\"\npath = \"adapters/a\"\ndropout = 0.1", &[]);
    check_section(
        "kind = \"lora\"\npath = \"adapters/a\"\nalpha = 4",
        &[
            "a.toml:6:9: `alpha` is written next to `path`, and with `path` it follows from adapter_config.json",
        ],
    );
}

#[test]
fn adapters_survive_being_written_and_read() {
    for own in ["rank = 3\nalpha = 0.1\nrslora = true\ndora = true\ntargets = \"q_proj\"", "path = \"a\"", ""]
    {
        let settings =
            load(Some(&format!("{BASE}[adapter]\nkind = \"lora\"\n{own}")), &[]).expect("it is sound");
        assert!(settings.adapter.is_some());
        assert_eq!(load(Some(&settings.to_toml()), &[]), Ok(settings));
    }
}
