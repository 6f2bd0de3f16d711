//! Tests of `profile.rs`.

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

/// Checks a profile for a model of 12 layers on the processor.
fn check_for(from: &str, to: &str, expected: &[&str], assumed: &[&str]) {
    check_on("flex", from, to, expected, assumed);
}

/// Checks a profile for a model of 12 layers on devices with these names.
fn check_on(device: &str, from: &str, to: &str, expected: &[&str], assumed: &[&str]) {
    use pipewright_schedule::{LayerDesc, ModelDesc};
    let layer = LayerDesc {
        path: String::new(),
        kind: "attention".into(),
        parameters: 1 << 20,
        weight: 6 << 20,
        activation_bytes: 6_291_456,
        output_bytes: 524_288,
        keys_values_bytes: 0,
        norms_bytes: 1_048_576,
        feed_forward_bytes: 0,
        products: 0,
        mixing: 0,
        copied: 0,
        device_activation_bytes: None,
        trained: None,
    };
    let model = ModelDesc { layers: vec![layer; 12] };
    let run = ProfiledRun {
        workload: Workload { model: &model, tokens: 256, rows: 1 },
        rates: PeakRates { flops_per_s: 1e12, bytes_per_s: 1e12 },
        device: device.into(),
        precision: Precision::F32,
        threads_per_rank: 1,
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), GOOD.replacen(from, to, 1)).expect("a file");
    match read_for(file.path(), &run) {
        Ok(profile) => assert_eq!(
            (profile.assumed, expected),
            (assumed.iter().map(|&name| name.to_owned()).collect(), &[""; 0][..])
        ),
        Err(ConfigError::Problems(problems)) => {
            let name = file.path().display().to_string();
            let found: Vec<String> =
                problems.0.iter().map(|problem| problem.to_string().replace(&name, "p.toml")).collect();
            assert_eq!(found, expected);
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_profile_of_another_run_is_refused_where_it_differs() {
    check_for("count", "count", &[], &[]);
    check_for("4194304", "4200000", &[], &[]);
    check_for(
        "count = 12",
        "count = 11",
        &["p.toml:5:8: the profile has 11 layers, and the model of the configuration has 12"],
        &[],
    );
    check_for(
        "4194304",
        "8388608",
        &["p.toml:11:19: `parameter_bytes` is 8388608, and layer 0 of the model (attention) has 4194304"],
        &[],
    );
    check_for(
        "524288",
        "262144",
        &["p.toml:10:16: `output_bytes` is 262144, and layer 0 of the model (attention) has 524288"],
        &[],
    );
    check_for(
        "[link]",
        "[device]\ndevice = \"cuda\"\n[link]",
        &["p.toml:2:10: the profile is of the device cuda, and the configuration computes on flex"],
        &[],
    );
    check_for("[link]", "[device]\nprecision = \"f32\"\n[link]", &[], &[]);
    // The name is for people, and a profile may be of a machine that is not at hand.
    check_for("[link]", "[device]\nname = \"another\"\nthreads_per_rank = 1\n[link]", &[], &[]);
    check_for(
        "[link]",
        "[device]\nthreads_per_rank = 4\n[link]",
        &[
            "p.toml:2:20: `threads_per_rank` of the profile is 4, and `pipeline.threads_per_rank` of the configuration is 1",
        ],
        &[],
    );
    check_for(
        "[link]",
        "tokens = 128\n[link]",
        &["p.toml:1:10: `tokens` of the profile is 128, and `data.seq_len` of the configuration is 256"],
        &[],
    );
    check_for(
        "[link]",
        "[device]\nprecision = \"bf16\"\n[link]",
        &["p.toml:2:13: the profile is of the precision bf16, and the configuration computes in f32"],
        &[],
    );
}

#[test]
fn a_profile_is_for_all_devices_of_its_kind() {
    let check = |profile: &str, run: &str, is_refused: bool| {
        let expected = format!(
            "p.toml:2:10: the profile is of the device {profile}, and the configuration computes on {run}"
        );
        let to = format!("[device]\ndevice = \"{profile}\"\n[link]");
        check_on(run, "[link]", &to, &[expected.as_str()][usize::from(!is_refused)..], &[]);
    };
    check("cuda", "cuda:0", false);
    check("cuda:1", "cuda:0, cuda:1, cuda:2", false);
    check("wgpu:integrated", "wgpu:integrated:1", false);
    check("cuda", "rocm", true);
    check("wgpu:cpu", "wgpu:0", true);
    check("flex", "flex, cuda", true);
    check("a device of its own", "cuda", true);
}

#[test]
fn what_a_profile_lacks_is_estimated_if_the_model_is_known() {
    check_for("forward_s = 1e-3\n", "", &[], &["attention.forward_s"]);
    // The parts of activations are estimated with them.
    let assumed = ["attention.activation_bytes", "attention.norms_s"];
    check_for("activation_bytes = 6291456\n", "", &[], &assumed);
    check_for("activation_bytes = 6291456\n", "norms_bytes = 2000\nnorms_s = 1e-5\n", &[], &assumed);
    let kind = "kind = \"attention\"\n";
    let missing = "p.toml:4:1: `norms_bytes` is missing in [[layers]]";
    check_for(kind, &format!("{kind}norms_s = 1e-5\n"), &[missing], &[]);
    check_for("kind = \"attention\"\n", "", &["p.toml:4:1: `kind` is missing in [[layers]]"], &[]);
}
