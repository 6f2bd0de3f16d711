//! Tests of `plan --cluster` through the binary.

use std::fs;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

use crate::{folder, refuse, run, split, succeed, text, write};

/// The shapes of Llama 3 8B.
pub(crate) const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false}"#;

const MIXTRAL: &str = r#"{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": false}"#;

/// A folder with Llama 3 8B.
pub(crate) fn with_model() -> TempDir {
    let folder = folder();
    write(&folder, "config.json", LLAMA);
    folder
}

/// The arguments of a plan for Llama 3 8B on two nodes, and more.
pub(crate) fn planned<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let usual =
        ["plan", "config.json", "--cluster", "h100", "--nodes", "2", "--batch", "64", "--seq-len", "8192"];
    [&usual[..], more].concat()
}

/// Runs a plan with JSON as output.
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
        check_memory(plan, number(&report["memory_limit_bytes"]));
    }
    let goal = &plans[0]["goal"];
    let steps = (15.6e12_f64 / (64.0 * 8192.0)).ceil();
    assert_eq!(number(&goal["steps"]), steps);
    let hours = steps * number(&plans[0]["predicted_step_s"]) * 16.0 / 3600.0;
    assert!((number(&goal["gpu_hours"]) / hours - 1.0).abs() < 1e-9);
    assert!((number(&goal["kilowatt_hours"]) / (hours * 0.7) - 1.0).abs() < 1e-9);
    // The model has no experts.
    assert_eq!(plans[0].get("expert_tensor_parallel"), None);
    let changes: Vec<&str> = report["upgrades"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|it| it["change"].as_str())
        .collect();
    assert_eq!(changes, ["twice the nodes", "twice the memory", "twice the network's bandwidth"]);
}

/// Checks that each rank of a plan fits, that its memory is the sum of the parts, and that scripts find it by
/// the key that all plans have.
fn check_memory(plan: &Value, limit: f64) {
    let peaks = plan["memory_bytes"].as_array().expect("a list");
    assert_eq!(plan["peak_bytes"], plan["memory_bytes"], "{plan}");
    let parts = plan["memory_parts"].as_array().expect("a list");
    assert_eq!([peaks.len() as f64, parts.len() as f64], [number(&plan["ranks"]); 2]);
    for (peak, parts) in peaks.iter().zip(parts) {
        let parts = parts.as_object().expect("parts");
        let names = ["activations", "buffers", "gradients", "optimizer", "parameters", "temporary"];
        assert_eq!(parts.keys().map(String::as_str).collect::<Vec<_>>(), names);
        let sum: f64 = parts.values().map(number).sum();
        assert!((sum - number(peak)).abs() <= 6.0 && number(peak) <= limit, "{plan}");
    }
}

/// Counts and bytes are integers, and no number is `-0.0`.
#[test]
fn numbers_in_json_have_their_types() {
    let folder = with_model();
    let goal = ["--goal", "tokens=15.6T", "--format", "json", "--pipeline-parallel", "2"];
    let text = succeed(&folder, &planned(&goal));
    assert!(!text.contains("-0.0"), "{text}");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert!(report["memory_limit_bytes"].is_u64(), "{report}");
    let best = &report["plans"][0];
    let lists = ["memory_bytes", "boundaries"].map(|key| &best[key][0]);
    let goal = ["tokens", "steps"].map(|key| &best["goal"][key]);
    assert!(lists.into_iter().chain(goal).all(Value::is_u64), "{best}");
}

#[test]
fn the_text_names_what_is_assumed() {
    let folder = with_model();
    let plan = succeed(&folder, &planned(&["--goal", "tokens=1T"]));
    for words in [
        "llama: 8.03B parameters; 16 GPUs of H100 80 GB SXM, 8 per node; 64 rows of 8192 tokens per step, bf16\n",
        "\nbest  ",
        "\nthen  ",
        " tokens/s per GPU, ",
        "MFU ",
        "      products ",
        "      memory by rank ",
        "      memory of rank 0: parameters 2.7 GiB, gradients ",
        "      1.00T tokens: 1907349 steps, ",
        "\nno plan can take less than ",
        "\ntwice the nodes: ",
        "\ntwice the memory: ",
        "\nassumed: node_latency_us, network_latency_us: 5 us inside a node and 10 us between nodes; shares",
        "shares that programs reach: fitted to published runs of Megatron and NeMo Automodel\n",
    ] {
        assert!(plan.contains(words), "{words}\n{plan}");
    }
}

/// A folder, `--model`, a configuration for `train`, and tokens of a step mean the same.
#[test]
fn the_forms_of_a_request_agree() {
    let folder = with_model();
    let first = |arguments: &[&str]| json(&folder, arguments)["plans"][0].clone();
    let expected = first(&planned(&["--pipeline-parallel", "1"]));
    let cluster = ["--cluster", "H100", "--ranks", "16", "--pipeline-parallel", "1"];
    let check = |arguments: &[&str]| assert_eq!(first(&[&["plan"], arguments, &cluster].concat()), expected);
    check(&["--model", ".", "--batch-tokens", "512Ki", "--sequence", "8192"]);
    check(&["./config.json", "--global-batch", "64", "--seq-len", "8192", "--precision", "bf16"]);
    let toml =
        "[model]\nfrom = \".\"\n[data]\nseq_len = 8192\n[pipeline]\nmicrobatches = 32\nmicrobatch_size = 2\n";
    write(&folder, "run.toml", toml);
    check(&["run.toml"]);
    write(&folder, "run.toml", toml.replace("8192", "64"));
    check(&["run.toml", "--set", "data.seq_len=8192"]);
}

/// A folder of a configuration may be the cache folder of a model, and in the home folder, as for `check`.
#[test]
fn folders_of_configurations_are_found() {
    let folder = folder();
    let snapshot = folder.path().join("cache/models--llama/snapshots/1234");
    fs::create_dir_all(&snapshot).expect("a folder");
    fs::write(snapshot.join("config.json"), LLAMA).expect("a file");
    write(&folder, "run.toml", "[model]\nfrom = \"~/cache/models--llama\"\n");
    let cluster = ["--cluster", "h100", "--nodes", "1"];
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder.path()).env("HOME", folder.path()).args(["plan", "run.toml"]).args(cluster);
    let output = command.output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let plan = succeed(
        &folder,
        &[&["plan", "cache/models--llama", "--batch", "8", "--seq-len", "256"], &cluster[..]].concat(),
    );
    assert!(plan.starts_with("llama: 8.03B parameters; 8 GPUs of "), "{plan}");
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
    let words = ["--recompute", "full", "--sharding", "optimizer", "--schedule", "dualpipev"];
    let report = json(&with_model(), &planned(&[&flags[..], &words].concat()));
    for plan in report["plans"].as_array().expect("plans") {
        for (_, value, key) in given {
            assert_eq!(plan[key].to_string(), value, "{key}");
        }
        let words = ["recompute", "sharding", "schedule"].map(|key| &plan[key]);
        assert_eq!(words, ["full", "optimizer", "dualpipev"]);
    }
}

/// The text and JSON have the ranks of each expert and sequence parallelism, which the search chooses.
#[test]
fn experts_and_contexts_are_divided_as_given() {
    let folder = folder();
    write(&folder, "config.json", MIXTRAL);
    let given = ["--tensor-parallel", "2", "--context-parallel", "2", "--expert-parallel", "2"];
    let report = json(&folder, &planned(&given));
    let best = &report["plans"][0];
    for key in ["tensor_parallel", "context_parallel", "expert_parallel"] {
        assert_eq!(best[key], 2, "{key}");
    }
    let plan = succeed(&folder, &planned(&given));
    let expert_ranks = number(&best["expert_tensor_parallel"]);
    let words = [
        " x context 2 x expert 2",
        if best["sequence_parallel"] == true { ", sequence parallel" } else { "" },
        if expert_ranks == 1.0 { ", each expert on 1 rank" } else { ", each expert on 2 ranks" },
    ];
    assert!(words.iter().all(|words| plan.contains(words)), "{words:?}: {plan}");
}

#[test]
fn the_memory_of_a_rank_can_be_given() {
    let folder = with_model();
    let report = json(&folder, &planned(&["--memory", "40GiB"]));
    assert_eq!(report["memory_limit_bytes"], 40_u64 << 30);
    assert!(number(&report["plans"][0]["memory_bytes"][0]) <= (40_u64 << 30) as f64);
}

/// Both ranks have as many blocks, and the tables of the embedding and the head are equally large.
#[test]
fn the_first_of_equally_large_ranks_is_named() {
    let folder = folder();
    write(&folder, "config.json", LLAMA.replace("128256", "1000"));
    let parts = ["--pipeline-parallel", "2", "--schedule", "gpipe", "--recompute", "full"];
    let memory = json(&folder, &planned(&parts))["plans"][0]["memory_bytes"].clone();
    assert_eq!(memory[0], memory[1]);
    let plan = succeed(&folder, &planned(&parts));
    assert!(plan.contains("\n      memory of rank 0: "), "{plan}");
}

/// The user did not ask for twice the nodes, so the reason comes without advice on the options.
#[test]
fn an_upgrade_without_a_plan_has_its_reason() {
    let folder = with_model();
    let mesh = ["--tensor-parallel", "2", "--pipeline-parallel", "1", "--context-parallel", "1"];
    let given = planned(&[&mesh[..], &["--data-parallel", "8"]].concat());
    let reason = "the given mesh (--tensor-parallel 2, --pipeline-parallel 1, --data-parallel 8, --context-parallel 1) \
                  has 16 GPUs, not 32";
    let plan = succeed(&folder, &given);
    assert!(plan.contains(&format!("\ntwice the nodes: no plan: {reason}\n")), "{plan}");
    assert_eq!(json(&folder, &given)["upgrades"][0]["reason"], reason);
}

#[test]
fn products_in_fp8_take_less_time() {
    let folder = with_model();
    let products = |precision| {
        let report = json(&folder, &planned(&["--precision", precision, "--pipeline-parallel", "1"]));
        assert_eq!(report["cluster"]["precision"], precision);
        number(&report["plans"][0]["costs"]["products"])
    };
    assert!(products("fp8") < 0.8 * products("bf16"));
}

/// Names from files cannot break lines or colour the terminal.
#[test]
fn control_characters_of_names_are_escapes() {
    let folder = with_model();
    write(&folder, "config.json", LLAMA.replace("\"llama\"", r#""ll\u001b[31ma\nma""#));
    write(&folder, "group.toml", r#"name = "our\n\u001b H100""#);
    let cluster = ["--cluster", "group.toml", "--nodes", "1", "--batch", "8", "--seq-len", "1"];
    let plan = succeed(&folder, &[&["plan", "config.json"], &cluster[..]].concat());
    let title = r"ll\u{1b}[31ma\nma: 8.03B parameters; 8 GPUs of our\n\u{1b} H100, 8 per node; 8 rows of 1 token per step, bf16";
    assert_eq!(plan.lines().next(), Some(title));
    assert!(!plan.contains('\u{1b}'), "{plan}");
}

/// A schedule is named also where a pipeline has one rank, and small goals have units that suit.
#[test]
fn a_plan_of_one_rank_names_its_schedule() {
    let plan = succeed(
        &with_model(),
        &planned(&["--schedule", "zb-h1", "--pipeline-parallel", "1", "--goal", "tokens=1"]),
    );
    for words in ["; zb-h1 with 1 stage per rank; ", "\n      1 token: 1 step, "] {
        assert!(plan.contains(words), "{words}: {plan}");
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
    // A link of 50 GB/s of which programs reach 80%, and products that reach 70% of the peak.
    write(
        &folder,
        "fixed.toml",
        "name = \"our H100\"\nnetwork_gb_per_s = 50\n[constants]\nlink = 0.8\nproduct = 0.7\n",
    );
    let fixed = [
        "plan",
        "config.json",
        "--cluster",
        "fixed.toml",
        "--nodes",
        "2",
        "--batch",
        "64",
        "--seq-len",
        "8192",
    ];
    let measured = json(&folder, &[&fixed[..], &["--measured", "m.toml"]].concat())["measured"].clone();
    let said = ["41 GB/s between nodes instead of 40", "0.4 of the bf16 peak in products instead of 0.7"];
    assert_eq!(measured, serde_json::json!(said));
    let product = "[[product]]\nrows = 3\ncolumns = 5\ninner = 7\nseconds = 1\n";
    write(&folder, "m.toml", product);
    let said = succeed(&folder, &planned(&["--measured", "m.toml"]));
    let unused = "the best plan does not use the product of 3 x 7 and 7 x 5";
    assert!(said.contains(unused), "{said}");
    write(&folder, "m.toml", "[node]\nlatency_us = 8\n");
    let assumed = json(&folder, &planned(&["--measured", "m.toml"]))["assumed"].to_string();
    assert!(assumed.contains("\"network_latency_us: 5 us inside a node"), "{assumed}");
    write(&folder, "m.toml", "[network]\ngb_per_s = \"41 GB\"\n");
    refuse(
        &folder,
        &planned(&["--measured", "m.toml"]),
        2,
        "error: m.toml:2:12: `gb_per_s` is \"41 GB\", which",
    );
}

/// Checks the output of the first command of the page.
fn check_example(page: &str, output: &str) {
    let blocks = pipewright_book::markdown::code_blocks(page);
    let example = blocks.into_iter().find(|block| block.language == "text").expect("an example").text;
    let begin: Vec<&str> = output.lines().take(example.lines().count()).collect();
    assert_eq!(example.lines().collect::<Vec<_>>(), begin);
}

/// The commands of the page of the book, in its order.
#[test]
fn the_commands_of_the_book_work() {
    let folder = with_model();
    let path = pipewright_book::root().join("docs/cluster-plans.md");
    let page = fs::read_to_string(path).expect("the page");
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
    write(&folder, "my.toml", "[model]\nfrom = \".\"\n[data]\nseq_len = 512\n");
    // In place of a file that a program of PyTorch writes.
    succeed(&folder, &["clusters", "h100", "-o", "machine.toml"]);
    let commands = pipewright_book::markdown::shell_lines(&page);
    assert!(commands.len() >= 6, "{}", commands.len());
    for (index, command) in commands.iter().enumerate() {
        let arguments: Vec<&str> = command.text.split_whitespace().skip(1).collect();
        let output = succeed(&folder, &arguments);
        if index == 0 {
            check_example(&page, &output);
        }
    }
    let group = split("plan config.json --cluster group.toml --nodes 4 --batch 64 --seq-len 8192");
    let plan = succeed(&folder, &group);
    assert!(plan.contains("figures that the file does not give: from H100 80 GB SXM"), "{plan}");
    let own = succeed(&folder, &["clusters", "group.toml"]);
    assert!(own.contains("network_gb_per_s = 25 ") && own.contains("memory_gb_per_s = 3350 "), "{own}");
}

/// The folder has no weights, which a plan does not need.
#[test]
fn adapters_of_a_configuration_are_planned() {
    let folder = with_model();
    write(
        &folder,
        "run.toml",
        "[model]\nfrom = \".\"\n[adapter]\nkind = \"lora\"\nrank = 16\n[data]\nseq_len = 512\n",
    );
    let plan = ["plan", "run.toml", "--cluster", "h100", "--ranks", "1", "--format", "json"];
    let planned = |set: &[&str]| {
        let set = set.iter().flat_map(|set| ["--set", set]);
        let output = run(&folder, &plan.iter().copied().chain(set).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: Value = serde_json::from_str(&text(&output.stdout)).expect("JSON");
        let trained = json["model"]["trained_parameters"].as_u64().expect("a number");
        (trained, json["plans"][0]["predicted_step_s"].as_f64().expect("seconds"))
    };
    // Queries and outputs of 4096 to 4096, keys and values of 4096 to 1024, and three layers of 4096 and
    // 14336.
    let of_block = 16 * (2 * 8192 + 2 * 5120 + 3 * 18432);
    let (all, seconds) = planned(&[]);
    assert_eq!(all, 32 * of_block);
    let (upper, upper_seconds) = planned(&["adapter.targets=['*.layers.3?.*']"]);
    assert_eq!(upper, 2 * of_block);
    assert!(upper_seconds < 0.75 * seconds, "{upper_seconds} {seconds}");
    let (magnitudes, _) = planned(&["adapter.dora=true"]);
    assert_eq!(magnitudes, 32 * (of_block + 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096));
    refuse(
        &folder,
        &[&plan[..], &["--set", "adapter.targets=['query']"]].concat(),
        2,
        "error: `adapter.targets`: `query` is not a linear layer of the model",
    );
    refuse(
        &folder,
        &[&plan[..], &["--emit", "megatron"]].concat(),
        2,
        "error: --emit megatron: the configuration has an [adapter], and a plan leaves out the weight gradients",
    );
    // One GPU cannot train the whole model.
    let whole =
        ["plan", "config.json", "--cluster", "h100", "--ranks", "1", "--batch", "8", "--seq-len", "512"];
    let whole = run(&folder, &whole);
    assert_eq!(whole.status.code(), Some(3));
}

/// Plans Llama 3 8B for two nodes and `system`, and returns the output as JSON with the file of options.
fn emitted(system: &str, file: &str, more: &[&str]) -> (Value, String) {
    let folder = with_model();
    let report = json(&folder, &planned(&[more, &["--emit", system]].concat()));
    let files = report["emit"]["files"].as_array().expect("files");
    assert!(files.iter().all(|path| folder.path().join(path.as_str().expect("a path")).exists()));
    let mapping = fs::read_to_string(folder.path().join(system).join("mapping.md")).expect("the mapping");
    assert!(
        mapping.contains(&format!("| stage | rank | layers of the profile | {} |", name_of(system))),
        "{mapping}"
    );
    (report, fs::read_to_string(folder.path().join(system).join(file)).expect("the options"))
}

fn name_of(system: &str) -> &str {
    match system {
        "megatron" => "Megatron",
        "deepspeed" => "DeepSpeed",
        other => other,
    }
}

#[test]
fn a_plan_is_written_for_other_systems() {
    let pipeline = ["--pipeline-parallel", "4", "--tensor-parallel", "2"];
    let (report, options) = emitted("megatron", "megatron.args", &pipeline);
    let plan = &report["emit"]["plan"];
    assert_eq!((&plan["ranks"], &plan["tensor_parallel"]), (&4.into(), &2.into()), "{plan}");
    assert!(options.contains("--pipeline-model-parallel-size 4\n"), "{options}");
    assert!(
        options.contains("--num-layers 32\n--seq-length 8192\n") && options.contains("--bf16\n"),
        "{options}"
    );
    let longer = number(&report["emit"]["longer"]);
    let best = number(&report["plans"][0]["predicted_step_s"]);
    assert!((number(&plan["predicted_step_s"]) / best - 1.0 - longer).abs() < 1e-9, "{longer}");
    assert_eq!(report["emit"]["refusal"].is_null(), longer == 0.0, "{report}");
    let (_, options) = emitted("torchtitan", "torchtitan.args", &pipeline);
    assert!(options.contains("--parallelism.fsdp_reshard_after_forward "), "{options}");
    assert!(
        options.lines().last().is_some_and(|line| line.starts_with("activation-checkpoint:")),
        "{options}"
    );
    let (_, options) = emitted("deepspeed", "deepspeed.json", &[]);
    assert!(options.contains("\"zero_optimization\""), "{options}");
    let said = succeed(&with_model(), &planned(&["--emit", "deepspeed"]));
    assert!(
        said.contains(
            "\nDeepSpeed cannot run the best plan: DeepSpeed does not shard parameters in a pipeline"
        ),
        "{said}"
    );
    assert!(said.contains("\nthe best that DeepSpeed runs takes "), "{said}");
}
