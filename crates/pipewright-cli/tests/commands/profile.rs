//! Tests of `profile`, and of what uses its file: `plan`, and runs whose schedule is `auto`.

use std::fs;

use toml::{Table, Value};

use crate::run::Run;

/// Measures a profile, and returns it.
pub(super) fn profile(run: &Run, set: &[&str]) -> Table {
    let arguments = ["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"];
    let (_, said) = run.succeed(&arguments, set);
    let caption = "median times of a microbatch: F forward, I gradients of inputs, W gradients of\n";
    assert!(said.starts_with(caption) && said.contains("\nlayer "), "{said}");
    run.read_toml("p.toml")
}

/// Replaces the measured times of a profile. What is planned for them would depend on the load of the machine. The head takes
/// `head` times as long as a block, and sums over replicas are slow, so that the ranks form one pipeline.
pub(super) fn write_times(run: &Run, file: &str, head: f64) {
    let mut profile = run.read_toml(file);
    let replace = |section: &mut Value, times: &[(&str, f64)], factor: f64| {
        for (key, time) in times {
            // What a layer does not do stays 0.
            let measured = section.get_mut(key).filter(|found| found.as_float() > Some(0.0));
            measured.into_iter().for_each(|found| *found = Value::Float(factor * time));
        }
    };
    for layer in profile["layers"].as_array_mut().expect("a list") {
        let factor = match layer["kind"].as_str() {
            Some("head") => head,
            Some("embedding") => 0.1,
            _ => 1.0,
        };
        replace(layer, &TIMES, factor);
    }
    replace(&mut profile["link"], &LINK, 1.0);
    run.write(file, profile.to_string());
}

/// The times of a block.
const TIMES: [(&str, f64); 7] = [
    ("forward_s", 0.01),
    ("input_backward_s", 0.01),
    ("weight_backward_s", 0.01),
    ("recompute_s", 0.01),
    ("optimizer_s", 0.001),
    ("norms_s", 0.001),
    ("feed_forward_s", 0.004),
];

const LINK: [(&str, f64); 4] =
    [("latency_s", 1e-5), ("bytes_per_s", 1e9), ("reduce_bytes_per_s", 1e4), ("read_bytes_per_s", 1e9)];

fn layers(profile: &Table) -> Vec<&Table> {
    profile["layers"].as_array().expect("a list").iter().filter_map(Value::as_table).collect()
}

/// Blocks below a kibibyte are not counted, so the model is larger than usual where memory matters.
const SIZES: [&str; 4] =
    ["model.hidden_size=64", "model.intermediate_size=96", "data.seq_len=32", "data.shuffle=false"];

/// The times of the parts of layers that a backward may compute again.
const PARTS: [&str; 2] = ["norms_s", "feed_forward_s"];

#[test]
fn each_kind_of_layer_is_measured_once() {
    let run = Run::new();
    for depth in [2, 9] {
        let depth_key = format!("model.num_hidden_layers={depth}");
        let profile = profile(&run, &[&SIZES[..], &[depth_key.as_str()]].concat());
        let layers = layers(&profile);
        let kinds: Vec<&str> = layers.iter().filter_map(|layer| layer["kind"].as_str()).collect();
        assert_eq!(kinds, ["embedding", "decoder", "head"]);
        assert_eq!(layers[1]["count"], Value::Integer(depth));
        for layer in &layers {
            for key in ["forward_s", "input_backward_s", "weight_backward_s", "optimizer_s"] {
                assert!(layer[key].as_float().is_some_and(|time| time > 0.0), "{key} of {layer}");
            }
            for key in ["output_bytes", "parameter_bytes", "activation_bytes"] {
                assert!(layer[key].as_integer().is_some_and(|size| size > 0), "{key} of {layer}");
            }
            assert!(
                layer.contains_key("recompute_s") && layer.contains_key("weight_activation_bytes"),
                "{layer}"
            );
        }
        let number = |section: &str, key: &str| profile[section][key].as_float().expect(key);
        assert!(number("link", "latency_s") < 0.1 && number("link", "bytes_per_s") > 1e6);
        // Two ranks ran at the same time, as replicas whose gradients were summed.
        assert!(number("link", "reduce_bytes_per_s") > 1e3);
        assert_eq!(profile["device"]["ranks"], Value::Integer(2));
        // Parts are in some layers only, and everything is measured.
        for (layer, has_parts) in layers.iter().zip([false, true, false]) {
            let number = |key| layer.get(key).and_then(Value::as_float);
            let forward = number("forward_s").expect("a time");
            for part in PARTS {
                let found = number(part);
                assert_eq!(found.is_some(), has_parts, "{part} of {layer}");
                assert!(found.is_none_or(|time| time > 0.0 && time < forward), "{part} of {layer}");
            }
        }
        assert_eq!(profile.get("assumed"), None);
        let text = run.read("p.toml");
        let with_spread =
            |line: &&str| PARTS.iter().any(|part| line.starts_with(part) && line.contains("# of "));
        assert_eq!(text.lines().filter(with_spread).count(), PARTS.len(), "{text}");
    }
}

/// The bytes that a decoder layer keeps for one row, from the list of its tensors: see `describe` of the
/// model.
#[test]
fn the_memory_that_a_layer_keeps_is_measured() {
    let run = Run::new();
    let one = profile(&run, &SIZES);
    let two = profile(&run, &[&SIZES[..], &["pipeline.microbatch_size=2"]].concat());
    let kept =
        |profile: &Table| layers(profile)[1]["activation_bytes"].as_integer().expect("a number") as f64;
    let row = 32.0 * 4.0;
    // Eleven tensors of the width or less, three of the inner width; norms and attention add a few numbers a
    // token.
    assert!((6.0 * 64.0 * row..14.0 * 96.0 * row).contains(&kept(&one)), "{}", kept(&one));
    assert!((kept(&two) / kept(&one) - 2.0).abs() < 0.15, "{} and {}", kept(&one), kept(&two));
}

#[test]
fn half_precision_halves_the_messages() {
    let run = Run::new();
    let [whole, half] = ["f32", "bf16"].map(|precision| {
        let precision = format!("run.precision={precision}");
        profile(&run, &[&SIZES[..], &["pipeline.ranks=1", &precision]].concat())
    });
    let size = |profile: &Table, layer: usize, key: &str| layers(profile)[layer][key].as_integer();
    for layer in [0, 1] {
        let [whole, half] = [&whole, &half].map(|profile| size(profile, layer, "output_bytes"));
        assert_eq!(half.map(|half| 2 * half), whole, "layer {layer}");
    }
    assert_eq!(size(&half, 1, "parameter_bytes"), size(&whole, 1, "parameter_bytes"));
    assert_eq!(
        [&whole, &half].map(|profile| profile["device"]["precision"].as_str()),
        [Some("f32"), Some("bf16")]
    );
    let set = [&SIZES[..], &["run.precision=bf16"]].concat();
    run.succeed(&["plan", "small.toml", "--profile", "p.toml"], &set);
    // Estimates halve too.
    let peaks = |precision: &str| {
        let precision = format!("run.precision={precision}");
        let set = [&SIZES[..], &["pipeline.microbatch_size=16", &precision]].concat();
        let plan = run.json(&["plan", "small.toml"], &set);
        plan["plans"][0]["peak_bytes"][0].as_u64().expect("a size")
    };
    assert!(peaks("bf16") < peaks("f32"));
}

#[test]
fn a_plan_for_larger_microbatches_estimates_the_sizes_of_the_profile_once() {
    let run = Run::new();
    profile(&run, &[]);
    write_times(&run, "p.toml", 1.0);
    let text = run.read("p.toml");
    let is_size = |line: &&str| line.starts_with("activation_bytes") || line.starts_with("output_bytes");
    let without: String =
        text.lines().filter(|line| !is_size(line)).map(|line| format!("{line}\n")).collect();
    run.write("without.toml", without);
    let plan = |file: &str, size: &str| {
        let size = format!("pipeline.microbatch_size={size}");
        let plan = run.json(&["plan", "small.toml", "--profile", file, "--time-limit", "2s"], &[&size]);
        let peaks = plan["plans"][0]["peak_bytes"].as_array().expect("a list").clone();
        peaks.iter().filter_map(serde_json::Value::as_u64).max().expect("a rank") as f64
    };
    let growth = |file: &str| plan(file, "16") / plan(file, "1");
    let (measured, estimated) = (growth("p.toml"), growth("without.toml"));
    assert!(estimated < 2.0 * measured, "{estimated} and {measured}");
}

#[test]
fn a_plan_takes_the_profile_of_its_model_only() {
    let run = Run::new();
    profile(&run, &[]);
    let plan = |set: &[&str]| run.call(&["plan", "small.toml", "--profile", "p.toml"], set);
    let (code, printed, said) = plan(&[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(printed.starts_with("best  ") && !printed.contains("assumed"), "{printed}");

    let refused = |set: &str, words: &str| {
        let (code, _, said) = plan(&[set]);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("error: p.toml:") && said.contains(words), "{said}");
    };
    refused(
        "model.num_hidden_layers=3",
        "the profile has 4 layers, and the model of the configuration has 5",
    );
    refused(
        "model.vocab_size=256",
        "`parameter_bytes` is 8192, and layer 0 of the model (embedding) has 16384",
    );
    refused(
        "run.precision=bf16",
        "the profile is of the precision f32, and the configuration computes in bf16",
    );
    refused("data.seq_len=16", "`output_bytes` is 512, and layer 0 of the model (embedding) has 1024");

    // A figure that is left out is estimated.
    let text = run.read("p.toml");
    let without: String =
        text.lines().filter(|line| !line.starts_with("forward_s")).map(|line| format!("{line}\n")).collect();
    run.write("p.toml", without);
    let (code, printed, said) = plan(&[]);
    assert_eq!(code, Some(0), "{said}");
    let expected = "assumed, not measured: embedding.forward_s, decoder.forward_s, head.forward_s\n";
    assert!(printed.ends_with(expected), "{printed}");
}

#[test]
fn a_plan_with_tensor_ranks_is_checked_and_trained() {
    let run = Run::new();
    profile(&run, &[]);
    let node = "[node]\nranks = 4\nlatency_s = 1e-6\nbytes_per_s = 1e11\n";
    let text = run.read("p.toml");
    run.write("p.toml", format!("{text}{node}"));
    let plan = |tensor_ranks: &str, set: &[&str]| {
        let file = ["plan", "small.toml", "--profile", "p.toml", "-o", "planned.toml"];
        let mesh = ["--data-parallel", "1", "--tensor-parallel", tensor_ranks];
        run.succeed(&[&file[..], &mesh].concat(), set);
        let planned: Table = run.read_toml("planned.toml");
        [("pipeline", "ranks"), ("mesh", "tensor_parallel")]
            .map(|(section, key)| planned[section][key].as_integer())
    };
    assert_eq!(plan("2", &["pipeline.ranks=4"]), [Some(2), Some(2)]);
    let (printed, _) = run.succeed(&["check", "planned.toml"], &[]);
    assert!(printed.contains("2 tensor ranks compute each stage together, 4 ranks altogether"), "{printed}");
    run.succeed(&["train", "planned.toml"], &[]);
    // The plan's mesh replaces the mesh of the configuration, whose ranks are counted.
    assert_eq!(plan("1", &["pipeline.ranks=2", "mesh.tensor_parallel=2"]), [Some(4), Some(1)]);
}

#[test]
fn a_plan_without_a_profile_says_what_it_assumes() {
    let run = Run::new();
    let (printed, _) = run.succeed(&["plan", "small.toml"], &[]);
    assert!(
        printed.contains("assumed, not measured: link.latency_s, link.bytes_per_s, embedding."),
        "{printed}"
    );
    let json = run.json(&["plan", "small.toml"], &[]);
    assert_eq!(json["assumed"][0], "link.latency_s");
    let (code, _, said) = run.call(&["plan"], &[]);
    assert_eq!(code, Some(2), "{said}");
}

#[test]
fn auto_measures_plans_and_runs() {
    let run = Run::new();
    let auto = ["pipeline.schedule=auto", "run.steps=3"];
    let (_, said) = run.succeed(&["train", "small.toml"], &auto);
    let chosen = said.lines().find(|line| line.contains("of the best possible"));
    let chosen = chosen.expect("a line about the choice");
    assert!(
        chosen.starts_with("auto: ") && chosen.contains(" of the best possible; measured in "),
        "{chosen}"
    );
    assert_eq!(run.figures().len(), 3);
    // The display, the summary and the metrics compare the run with the plan.
    assert!(said.contains(" (planned ") && said.contains("\nmedian step "), "{said}");
    let steps = run.steps();
    let planned: Vec<f64> = steps.iter().filter_map(|step| step["planned_step_ms"].as_f64()).collect();
    assert!(planned.len() == 3 && planned[0] > 0.0 && planned[1..] == [planned[0]; 2], "{planned:?}");

    // The plan is stored, so resuming and moving the folder work.
    let config = run.read("out/config.toml");
    assert!(
        !config.contains("\"auto\"") && config.contains("boundaries") | config.contains("\"even\""),
        "{config}"
    );
    fs::rename(run.path("out"), run.path("moved")).expect("a folder");
    let (_, said) = run.succeed(&["resume", "moved"], &["run.steps=5"]);
    assert!(!said.contains("auto: ") && said.contains(" (planned "), "{said}");
    fs::rename(run.path("moved"), run.path("out")).expect("a folder");

    // The profile is kept, and used by the next run in the folder.
    let (_, said) = run.succeed(&["train", "small.toml"], &auto);
    assert!(said.contains("measured before (profile-"), "{said}");
    let (_, said) = run.succeed(&["train", "small.toml"], &[&auto[..], &["model.hidden_size=32"]].concat());
    assert!(said.contains("measured in "), "a profile of another model is not used: {said}");
}

/// The times of the profile are written, because those of a busy machine may show no heavy head.
#[test]
fn auto_cuts_a_heavy_head() {
    let run = Run::new();
    let set = ["pipeline.schedule=auto", "run.steps=1", "model.vocab_size=4096"];
    run.succeed(&["train", "small.toml"], &set);
    let files = fs::read_dir(run.out()).expect("a folder").filter_map(Result::ok);
    let names: Vec<String> = files.filter_map(|file| file.file_name().into_string().ok()).collect();
    let name = names.iter().find(|name| name.starts_with("profile-")).expect("a profile is kept");
    write_times(&run, &format!("out/{name}"), 10.0);
    let (_, said) = run.succeed(&["train", "small.toml"], &set);
    let chosen = said.lines().find(|line| line.starts_with("auto: ") && line.contains("measured before"));
    assert!(chosen.is_some_and(|line| line.contains(", head in ")), "{said}");
    let config = run.read("out/config.toml");
    assert!(config.contains("head_parts = ") && !config.contains("head_parts = 1\n"), "{config}");
}

#[test]
fn a_plan_leaves_a_head_whole_that_the_optimizer_updates_as_a_whole() {
    let run = Run::new();
    let set = ["optimizer.name=adafactor", "model.vocab_size=4096"];
    let arguments = ["plan", "small.toml", "--time-limit", "1s", "-o", "planned.toml"];
    run.succeed(&arguments, &set);
    run.succeed(&["check", "planned.toml"], &[]);
}

#[test]
fn check_says_what_auto_would_do() {
    let run = Run::new();
    let (printed, _) = run.succeed(&["check", "small.toml"], &["pipeline.schedule=auto"]);
    assert!(printed.starts_with("auto: ") && printed.contains("for assumed costs: "), "{printed}");
    assert!(printed.contains("proved sound"), "{printed}");
}

#[test]
fn a_run_is_not_resumed_with_another_plan() {
    let run = Run::new();
    run.train(&["run.steps=1"]);
    run.refuse(
        &["resume", "out"],
        &["pipeline.schedule=auto", "run.steps=2"],
        "a run resumes with the plan that it stored",
    );
}

/// Input that is not a profile ends at once, with a place, and with few of its mistakes.
#[test]
fn files_of_another_kind_are_refused_at_once() {
    let run = Run::new();
    let nested = format!("a = {}", "[".repeat(100_000));
    let keys: String = (0..20_000).map(|key| format!("key{key} = 1\n")).collect();
    let sections = "[[layers]]\n".repeat(200_000);
    for (text, expected) in [
        (nested, "wrong.toml:1:"),
        (keys, "19952 more mistakes in the same input are not shown"),
        (sections, "wrong.toml:10001:1: `layers` is 200000, where at most 10000 sections is expected"),
        ("\u{feff}rowz = 1\n".to_owned(), "wrong.toml:1:1: unknown key `rowz`"),
    ] {
        run.write("wrong.toml", text);
        let arguments = ["plan", "--profile", "wrong.toml", "--ranks", "2", "--microbatches", "4"];
        run.refuse(&arguments, &[], expected);
    }
}

/// The memory of a rank is a share of the machine, so more ranks than were measured have less each.
#[test]
fn more_ranks_than_were_measured_share_the_memory() {
    let run = Run::new();
    let layer = "[[layers]]\nkind = \"block\"\ncount = 4\nforward_s = 1e-3\ninput_backward_s = 1e-3\n\
                 weight_backward_s = 1e-3\noutput_bytes = 1000\nparameter_bytes = 1000000\nactivation_bytes = 1000\n";
    let link = "[link]\nlatency_s = 0.0\nbytes_per_s = 1e9\n";
    let device = "[device]\nname = \"x\"\nranks = 1\nmemory_bytes = 16200000\n";
    run.write("p.toml", format!("{device}{link}{layer}"));
    let plan = |ranks: &str| {
        let arguments = [
            "plan",
            "--profile",
            "p.toml",
            "--ranks",
            ranks,
            "--microbatches",
            "4",
            "--data-parallel",
            ranks,
        ];
        run.call(&arguments, &[])
    };
    // Parameters, gradients and the state of AdamW of four layers: 16 MB a rank.
    let (code, _, said) = plan("1");
    assert_eq!(code, Some(0), "{said}");
    let (code, _, said) = plan("2");
    assert_eq!(code, Some(3), "{said}");
}
