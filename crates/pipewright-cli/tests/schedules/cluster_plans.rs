//! Tests of `plan --cluster` through the binary.

use serde_json::Value;
use tempfile::TempDir;

use crate::{folder, refuse, run, succeed, text, write};

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false}"#;

/// A folder with Llama 3 8B.
fn with_model() -> TempDir {
    let folder = folder();
    write(&folder, "config.json", LLAMA);
    folder
}

/// The arguments of a plan for Llama 3 8B on two nodes, and more.
fn planned<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let usual =
        ["plan", "config.json", "--cluster", "h100", "--nodes", "2", "--batch", "64", "--seq-len", "8192"];
    [&usual[..], more].concat()
}

fn json(folder: &TempDir, arguments: &[&str]) -> Value {
    let output = succeed(folder, &[arguments, &["--format", "json"]].concat());
    serde_json::from_str(&output).expect("JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("a number: {value}"))
}

#[test]
fn a_plan_has_all_figures_and_their_parts_sum_to_the_step() {
    let report = json(&with_model(), &planned(&["--goal", "tokens=15.6T"]));
    let plans = report["plans"].as_array().expect("plans");
    assert!(plans.len() > 1);
    let mut before = 0.0;
    for plan in plans {
        let step = number(&plan["predicted_step_s"]);
        let costs = plan["costs"].as_object().expect("costs");
        assert!((costs.values().map(number).sum::<f64>() / step - 1.0).abs() < 1e-6, "{plan}");
        assert!(step >= before && number(&report["lower_bound_s"]) <= step);
        before = step;
        let size = |key: &str| number(&plan[key]);
        let ranks = ["ranks", "data_parallel", "tensor_parallel", "context_parallel"].map(size);
        assert_eq!(ranks.iter().product::<f64>(), 16.0, "{plan}");
        assert_eq!(size("microbatches") * size("microbatch_size") * size("data_parallel"), 64.0, "{plan}");
        let tokens = 64.0 * 8192.0 / step / 16.0;
        assert!((size("tokens_per_s_per_gpu") / tokens - 1.0).abs() < 1e-9);
        assert!((0.2..0.7).contains(&size("mfu")), "{plan}");
        let memory = plan["memory_bytes"].as_array().expect("a list");
        assert_eq!(memory.len() as f64, size("ranks"));
        assert!(memory.iter().all(|bytes| number(bytes) <= number(&report["memory_limit_bytes"])));
    }
    let goal = &plans[0]["goal"];
    let steps = (15.6e12_f64 / (64.0 * 8192.0)).ceil();
    assert_eq!(number(&goal["steps"]), steps);
    let hours = steps * number(&plans[0]["predicted_step_s"]) * 16.0 / 3600.0;
    assert!((number(&goal["gpu_hours"]) / hours - 1.0).abs() < 1e-9);
    assert!((number(&goal["kilowatt_hours"]) / (hours * 0.7) - 1.0).abs() < 1e-9);
    let changes: Vec<&str> = report["upgrades"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|it| it["change"].as_str())
        .collect();
    assert_eq!(changes, ["twice the nodes", "twice the memory", "twice the network's bandwidth"]);
}

#[test]
fn the_text_names_what_is_assumed_and_what_is_not_predicted() {
    let folder = with_model();
    write(&folder, "config.json", LLAMA.replace("{", "{\"altup_num_inputs\": 4, "));
    let plan = succeed(&folder, &planned(&["--goal", "tokens=1T"]));
    for words in [
        "llama: 8.0B parameters; 16 GPUs of H100 80 GB SXM, 8 per node; 64 rows of 8192 tokens per step, bf16\n",
        "\nbest  ",
        "\nthen  ",
        " tokens/s per GPU, ",
        "MFU ",
        "      products ",
        "      memory by rank ",
        "      1.00T tokens: 1907349 steps, ",
        "\nno plan can take less than ",
        "\ntwice the nodes: ",
        "\ntwice the memory: ",
        "\nin the model's file, and not in the prediction: altup_num_inputs\n",
        "\nassumed: node_latency_us, network_latency_us: 5 us inside a node and 10 us between nodes; shares",
        "shares that programs reach: fitted to NeMo's and Megatron-Bridge's performance summaries\n",
    ] {
        assert!(plan.contains(words), "{words}\n{plan}");
    }
}

/// A folder, `--model`, a configuration for `train`, and tokens of a step mean the same.
#[test]
fn the_forms_of_a_request_agree() {
    let folder = with_model();
    let first = |arguments: &[&str]| json(&folder, arguments)["plans"][0].clone();
    let expected = first(&planned(&[]));
    let cluster = ["--cluster", "H100", "--ranks", "16"];
    let check = |arguments: &[&str]| assert_eq!(first(&[&["plan"], arguments, &cluster].concat()), expected);
    check(&["--model", ".", "--batch-tokens", "512Ki", "--sequence", "8192"]);
    check(&["./config.json", "--global-batch", "64", "--seq-len", "8192", "--precision", "bf16"]);
    let toml =
        "[model]\nfrom = \".\"\n[data]\nseq_len = 8192\n[pipeline]\nmicrobatches = 32\nmicrobatch_size = 2\n";
    write(&folder, "run.toml", toml);
    check(&["run.toml"]);
}

#[test]
fn given_parts_of_the_plan_are_kept() {
    let given = [
        ("--tensor-parallel", "4", "tensor_parallel"),
        ("--data-parallel", "2", "data_parallel"),
        ("--pipeline-parallel", "2", "ranks"),
        ("--microbatch-size", "2", "microbatch_size"),
        ("--stages-per-rank", "2", "stages_per_rank"),
    ];
    let flags: Vec<&str> = given.iter().flat_map(|&(flag, value, _)| [flag, value]).collect();
    let words = ["--recompute", "full", "--sharding", "optimizer"];
    let report = json(&with_model(), &planned(&[&flags[..], &words].concat()));
    for plan in report["plans"].as_array().expect("plans") {
        for (_, value, key) in given {
            assert_eq!(plan[key].to_string(), value, "{key}");
        }
        assert_eq!([&plan["recompute"], &plan["sharding"]], ["full", "optimizer"]);
    }
}

#[test]
fn measurements_replace_predictions_and_are_named() {
    let folder = with_model();
    write(&folder, "m.toml", "[products]\nshare = 0.4\n[network]\ngb_per_s = 41\n");
    let before = json(&folder, &planned(&[]));
    let after = json(&folder, &planned(&["--measured", "m.toml"]));
    assert!(
        number(&after["plans"][0]["costs"]["products"])
            > 1.3 * number(&before["plans"][0]["costs"]["products"])
    );
    let said = ["41 GB/s between nodes instead of 37.9", "0.4 of the bf16 peak in products instead of 0.678"];
    assert_eq!(after["measured"].as_array().map(Vec::as_slice), Some(&said.map(Value::from)[..]));
    write(&folder, "m.toml", "[network]\ngb_per_s = \"41 GB\"\n");
    refuse(
        &folder,
        &planned(&["--measured", "m.toml"]),
        2,
        "error: m.toml:2:12: `gb_per_s` is `41 GB`, which",
    );
}

#[test]
fn bad_input_is_refused() {
    let folder = with_model();
    let check =
        |arguments: &[&str], message: &str| refuse(&folder, arguments, 2, &format!("error: {message}"));
    check(&["plan", "config.json"], "config.json: this is a model and not a configuration; name the cluster");
    check(&["plan", "--cluster", "h100"], "--cluster needs a model; name a config.json");
    let model = ["plan", "config.json", "--cluster", "h100"];
    check(&model, "--seq-len is missing; give it, such as --seq-len 8192");
    check(&[&model[..], &["--seq-len", "8192"]].concat(), "--global-batch is missing");
    check(&[&model[..], &["--seq-len", "8192", "--batch", "64"]].concat(), "--nodes is missing");
    check(
        &[&model[..], &["--seq-len", "8192", "--batch-tokens", "100000", "--nodes", "1"]].concat(),
        "--batch-tokens 100000 is not a whole number of rows of 8192 tokens; use --batch-tokens 98304",
    );
    check(
        &planned(&["--tensor-parallel", "32"]),
        "16 GPUs are not a multiple of 32, the product of tp = 32, pp = 1 and cp = 1; use 32 GPUs, or another mesh",
    );
    check(&planned(&["--data-parallel", "3"]), "16 GPUs are not a multiple of 3 replicas of 1 GPU;");
    check(&planned(&["--schedule", "1f2b"]), "unknown schedule `1f2b`; did you mean `1f1b`?");
    let of = |cluster| {
        ["plan", "config.json", "--cluster", cluster, "--nodes", "1", "--seq-len", "8", "--batch", "8"]
    };
    check(&of("h10"), "there is no machine `h10`; the nearest name is `h100`");
    check(
        &[&of("a100")[..], &["--precision", "fp8"]].concat(),
        "--precision fp8: A100 80 GB SXM (Selene) has no rate",
    );
    check(&["plan", "none.json", "--cluster", "h100"], "none.json: cannot read the model");
    write(&folder, "bad.json", LLAMA.replace("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 7"));
    check(
        &["plan", "bad.json", "--cluster", "h100"],
        "bad.json: `num_key_value_heads` is 7; use a number that",
    );
}

/// The error names the missing bytes and the rank.
#[test]
fn a_model_that_does_not_fit_is_refused_with_what_is_short() {
    let folder = with_model();
    let output = run(
        &folder,
        &["plan", "config.json", "--cluster", "4090", "--ranks", "1", "--seq-len", "8192", "--batch", "1"],
    );
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.starts_with("error: no plan fits into 22.3 GiB per GPU: the smallest needs "), "{stderr}");
    assert!(
        stderr.contains(" GiB on rank 0 of its pipeline, ") && stderr.contains(" GiB too much, with "),
        "{stderr}"
    );
}

/// The commands of the page of the book, in its order.
#[test]
fn the_commands_of_the_book_work() {
    let folder = with_model();
    let path = pipewright_book::root().join("docs/cluster-plans.md");
    let page = std::fs::read_to_string(path).expect("the page");
    let block = |word: &str| {
        let blocks = pipewright_book::markdown::code_blocks(&page);
        blocks
            .into_iter()
            .find(|block| block.language == "toml" && block.text.contains(word))
            .expect(word)
            .text
    };
    write(&folder, "measured.toml", block("[[layer]]"));
    write(&folder, "group.toml", block("of our group"));
    let commands = pipewright_book::markdown::shell_lines(&page);
    assert!(commands.len() >= 6, "{}", commands.len());
    for command in &commands {
        let arguments: Vec<&str> = command.text.split_whitespace().skip(1).collect();
        succeed(&folder, &arguments);
    }
    let own = succeed(&folder, &["clusters", "group.toml"]);
    assert!(own.contains("network_gb_per_s = 25 ") && own.contains("memory_gb_per_s = 3350 "), "{own}");
}
