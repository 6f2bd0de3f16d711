//! Tests of `profile_file.rs`.

use super::*;

const GOOD: &str = "[link]\nlatency_s = 5e-6\nbytes_per_s = 1e10\n[[layers]]\nkind = \"attention\"\ncount = 12\n\
                    forward_s = 1e-3\ninput_backward_s = 1e-3\nweight_backward_s = 1e-3\noutput_bytes = 524288\n\
                    parameter_bytes = 4194304\nactivation_bytes = 6291456\n";

fn problems(text: &str) -> Vec<String> {
    let found = parse(Source { name: "p.toml".into(), text: text.to_owned() }, false);
    found.err().map_or_else(Vec::new, |problems| problems.0.iter().map(ToString::to_string).collect())
}

fn check(from: &str, to: &str, expected: &[&str]) {
    assert!(GOOD.contains(from), "{from}");
    assert_eq!(problems(&GOOD.replacen(from, to, 1)), expected);
}

#[test]
fn a_profile_by_hand() {
    assert_eq!(problems(GOOD), [""; 0]);
    check("[link]", "rows = 2\n[device]\nname = \"x\"\nmemory_bytes = 5\n[link]", &[]);
}

#[test]
fn every_mistake_has_its_line() {
    let unit = "has another unit: times are in seconds and sizes in bytes";
    check("forward_s", "forward_ms", &[&format!("p.toml:7:1: `forward_ms` {unit}")]);
    check("output_bytes", "output_mib", &[&format!("p.toml:10:1: `output_mib` {unit}")]);
    check(
        "forward_s = 1e-3",
        "forward_s = -1",
        &["p.toml:7:13: `forward_s` is -1, where a number of seconds from 0 to 1e6 is expected"],
    );
    check(
        "forward_s = 1e-3",
        "forward_s = nan",
        &["p.toml:7:13: `forward_s` is NaN, where a number of seconds from 0 to 1e6 is expected"],
    );
    check("count = 12", "cuont = 12", &["p.toml:6:1: unknown key `cuont` in [[layers]]"]);
    check(
        "output_bytes = 524288",
        "output_bytes = -1",
        &[
            "p.toml:10:16: `output_bytes` is -1, where a whole number from 0 to 9223372036854775807 is expected",
        ],
    );
    check(
        "kind = \"attention\"",
        "kind = 3",
        &["p.toml:5:8: `kind` is a whole number, where a text in quotes is expected"],
    );
    check("forward_s = 1e-3\n", "", &["p.toml:4:1: `forward_s` is missing in [[layers]]"]);
    for part in ["norms", "feed_forward"] {
        let missing = format!("p.toml:4:1: `{part}_bytes` is missing in [[layers]]");
        check("count = 12", &format!("{part}_s = 1e-5"), &[&missing]);
        check("count = 12", &format!("{part}_bytes = 3"), &[]);
    }
    check(
        "count = 12",
        "norms_bytes = 6000000\nfeed_forward_bytes = 6000000",
        &[
            "p.toml:7:22: `feed_forward_bytes` is 6000000, where a number of bytes from 0 to 291456, a part of \
           `activation_bytes` is expected",
        ],
    );
    check(
        "bytes_per_s = 1e10",
        "bytes_per_s = 0",
        &["p.toml:3:15: `bytes_per_s` is 0, where a number from 1 to 1e18 is expected"],
    );
    check(
        "[link]",
        "rows = 4000000000\ntokens = 0\n[device]\nmemory_bytes = 0\n[link]",
        &[
            "p.toml:1:8: `rows` is 4000000000, where a number from 1 to 1000000 is expected",
            "p.toml:2:10: `tokens` is 0, where a number from 1 to 1000000000 is expected",
            "p.toml:4:16: `memory_bytes` is 0, where a number of bytes from 1 to 1000000000000000 is expected",
        ],
    );
    check(
        "count = 12",
        "count = 99999",
        &["p.toml:6:9: `count` is 99999, where at most 10000 layers in all is expected"],
    );
    check(
        "[link]",
        "[device]\nranks = 0\nthreads_per_rank = 70000\n[link]",
        &[
            "p.toml:2:9: `ranks` is 0, where a number from 1 to 65536 is expected",
            "p.toml:3:20: `threads_per_rank` is 70000, where a number from 1 to 65536 is expected",
        ],
    );
    check(
        "count = 12",
        "count = 5000000000",
        &["p.toml:6:9: `count` is 5000000000, where a whole number from 0 to 4294967295 is expected"],
    );
    let many = "[[layers]]\n".repeat(10_001);
    assert_eq!(
        problems(&format!("[link]\nlatency_s = 0\nbytes_per_s = 1e9\n{many}")),
        ["p.toml:10004:1: `layers` is 10001, where at most 10000 sections is expected"]
    );
    let node = "[node]\nranks = 0\nlatency_s = 1e-6\nbytes_per_s = 1e11\n[link]";
    check("[link]", &node.replace("= 0", "= 8"), &[]);
    check("[link]", node, &["p.toml:2:9: `ranks` is 0, where a number from 1 to 65536 is expected"]);
    check(
        "[link]",
        "[node]\nlatency_s = 0\nbytes_per_s = 1\n[link]",
        &["p.toml:1:1: `ranks` is missing in [node]"],
    );
    assert_eq!(
        problems("[link]\nlatency_s = 0\nbytes_per_s = 1e9\n"),
        ["p.toml:1:1: `layers` is missing in the profile"]
    );
}

#[test]
fn mistakes_of_ranks_and_pairs_have_their_lines() {
    let speed = "where a number from 1e-3 to 1e3 is expected";
    check("[link]", "[[rank]]\n[[rank]]\nspeed = 0.35\nspeeds = { attention = 0.3 }\n[link]", &[]);
    check("[link]", "[[rank]]\nspeed = 0\n[link]", &[&format!("p.toml:2:9: `speed` is 0, {speed}")]);
    check("[link]", "[[rank]]\nspeed = nan\n[link]", &[&format!("p.toml:2:9: `speed` is NaN, {speed}")]);
    check(
        "[link]",
        "[[rank]]\n[[rank]]\nspeeds = { attention = -1 }\n[link]",
        &[&format!("p.toml:3:10: `speeds` is -1 for `attention`, {speed}")],
    );
    check(
        "[link]",
        "[[rank]]\nspeeds = { attention = \"fast\" }\n[link]",
        &["p.toml:2:10: `speeds` is a table, where a table of numbers is expected"],
    );
    check(
        "[link]",
        "[[rank]]\nmemory_bytes = 0\n[link]",
        &["p.toml:2:16: `memory_bytes` is 0, where a number of bytes from 1 to 1000000000000000 is expected"],
    );
    let pair = |from: &str, to: &str| {
        format!(
            "[[rank]]\n[[rank]]\n[[pair]]\nfrom = {from}\nto = {to}\nlatency_s = 0\nbytes_per_s = 1e7\n[link]"
        )
    };
    check("[link]", &pair("0", "1"), &[]);
    check("[link]", &pair("0", "2"), &["p.toml:5:6: `to` is 2, where a rank from 0 to 1 is expected"]);
    check("[link]", &pair("1", "1"), &["p.toml:5:6: `to` is 1, where another rank than `from` is expected"]);
    check("[link]", &pair("1", "0").replace("to = 0\n", ""), &["p.toml:3:1: `to` is missing in [[pair]]"]);
    let many = "[[rank]]\n".repeat(257);
    check(
        "[link]",
        &format!("{many}[link]"),
        &["p.toml:257:1: `rank` is 257, where at most 256 sections is expected"],
    );
}

#[test]
fn a_value_in_place_of_a_section_is_named() {
    let section = |key: &str| format!("`{key}` is a whole number, where a section is expected");
    for key in ["device", "node"] {
        let expected = format!("p.toml:1:{}: {}", key.len() + 4, section(key));
        check("[link]", &format!("{key} = 3\n[link]"), &[&expected]);
    }
    let layers = &GOOD[GOOD.find("[[layers]]").expect("layers")..];
    let found = problems(&format!("link = 3\n{layers}"));
    assert_eq!(found.first(), Some(&format!("p.toml:1:8: {}", section("link"))));
    let link = &GOOD[..GOOD.find("[[layers]]").expect("layers")];
    let found = problems(&format!("layers = 3\n{link}"));
    let expected = "p.toml:1:10: `layers` is a whole number, where [[layers]] sections is expected";
    assert_eq!(found.first().map(String::as_str), Some(expected));
}
