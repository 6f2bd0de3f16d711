//! Tests of the problems that `check` finds: weights that cannot be loaded, and too little memory.

use std::fs;

use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize};
use serde_json::json;

use crate::run::Run;

/// Checks `small.toml` with overrides. Returns the exit code, standard output and standard error.
fn check(run: &Run, set: &[&str]) -> (Option<i32>, String, String) {
    run.call(&["check", "small.toml"], set)
}

/// Checks `small.toml` with overrides, which fit. Returns standard output.
fn summary(run: &Run, set: &[&str]) -> String {
    run.succeed(&["check", "small.toml"], set).0
}

/// Returns a run with a model directory next to it.
fn with_model() -> Run {
    let run = Run::new();
    run.train(&["run.steps=1"]);
    run.print(&["export", "out", "model"]);
    run
}

fn check_refused(run: &Run, words: &[&str]) {
    words.iter().for_each(|words| run.refuse(&["check", "small.toml"], &["model.from=model"], words));
    // Training refuses the same weights before it changes the folder of the results.
    let before = run.read("out/config.toml");
    run.refuse(&["train", "small.toml"], &["model.from=model"], words[0]);
    assert_eq!(run.read("out/config.toml"), before);
}

#[test]
fn weights_that_are_cut_short_or_missing_are_found() {
    let run = with_model();
    assert_eq!(check(&run, &["model.from=model"]).0, Some(0));
    let path = run.path("model/model.safetensors");
    let whole = fs::read(&path).expect("weights");
    for length in [whole.len() - 1, whole.len() / 2, 100, 3, 0] {
        fs::write(&path, &whole[..length]).expect("a file");
        check_refused(&run, &["model/model.safetensors: the file has ", "copy or download it again"]);
    }
    let mut garbled = whole.clone();
    garbled[12] = b'!';
    fs::write(&path, garbled).expect("a file");
    check_refused(&run, &["model.safetensors: the file does not begin with a safetensors header"]);
    fs::remove_file(&path).expect("a file");
    // A configuration alone starts from random weights.
    summary(&run, &["model.from=model"]);
}

/// Splits `model.safetensors` into two files with an index. The tensors in `dropped` are left out of their
/// file.
fn split(run: &Run, dropped: &str) {
    let bytes = fs::read(run.path("model/model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("a sound file");
    let mut tensors = file.tensors();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let half = tensors.len() / 2;
    let mut map = serde_json::Map::new();
    for (number, tensors) in [(1, &tensors[..half]), (2, &tensors[half..])] {
        let name = format!("model-0000{number}-of-00002.safetensors");
        let kept: Vec<(String, TensorView<'_>)> =
            tensors.iter().filter(|(tensor, _)| tensor != dropped).cloned().collect();
        map.extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), json!(name))));
        fs::write(run.path("model").join(name), serialize(kept, None).expect("a sound file"))
            .expect("a file");
    }
    let index = json!({"metadata": {}, "weight_map": map});
    run.write("model/model.safetensors.index.json", index.to_string());
}

#[test]
fn every_file_of_an_index_is_looked_at() {
    const LAST: &str = "model/model-00002-of-00002.safetensors";
    let run = with_model();
    split(&run, "");
    fs::remove_file(run.path("model/model.safetensors")).expect("a file");
    assert_eq!(check(&run, &["model.from=model"]).0, Some(0));
    let whole = fs::read(run.path(LAST)).expect("weights");
    fs::write(run.path(LAST), &whole[..whole.len() - 4]).expect("a file");
    check_refused(&run, &[LAST, "its header asks for"]);
    fs::remove_file(run.path(LAST)).expect("a file");
    check_refused(&run, &[LAST, "is missing, and the index in its folder names it"]);
}

#[test]
fn a_tensor_that_is_missing_or_has_another_shape_is_found() {
    let run = with_model();
    split(&run, "model.norm.weight");
    fs::remove_file(run.path("model/model.safetensors")).expect("a file");
    check_refused(&run, &["tensor `model.norm.weight` is missing"]);

    let run = with_model();
    let config = run.read("model/config.json");
    fs::write(
        run.path("model/config.json"),
        config.replace("\"intermediate_size\": 24", "\"intermediate_size\": 32"),
    )
    .expect("a file");
    check_refused(&run, &["mlp.", "the configuration asks for [32, 16]"]);
}

#[test]
fn a_run_that_does_not_fit_is_refused_with_what_is_short() {
    let run = Run::new();
    let large = [
        "model.hidden_size=16384",
        "model.intermediate_size=65536",
        "model.num_attention_heads=128",
        "model.num_hidden_layers=80",
    ];
    let (code, printed, said) = check(&run, &large);
    assert_eq!(code, Some(3), "{said}");
    assert!(
        printed
            .contains("\nmemory    rank   parameters    gradients    optimizer  activations        total\n"),
        "{printed}"
    );
    assert!(said.contains("error: the run does not fit into memory: its ranks together need "), "{said}");
    assert!(
        said.contains(" too little; rank 0 needs the most, ") || said.contains(" too little; rank 1 needs"),
        "{said}"
    );
    // With one process per rank, each may run on its own machine. Even one process needs too much memory.
    let stages = ["pipeline.ranks=4", "pipeline.microbatches=4"];
    assert_eq!(check(&run, &[&large[..], &stages].concat()).0, Some(3));
}

#[test]
fn memory_follows_from_microbatches_schedule_and_sharding() {
    let run = Run::new();
    let column = |set: &[&str], column: usize| {
        let printed = summary(&run, set);
        let table = printed.lines().skip_while(|line| !line.starts_with("memory ")).nth(1).expect("rank 0");
        let cells: Vec<&str> = table.split_whitespace().collect();
        // A row has a rank and five figures of two words each.
        format!("{} {}", cells[1 + 2 * column], cells[2 + 2 * column])
    };
    // Rank 0 holds the embedding of 128 x 16 and two blocks of 2208: 6464 parameters of four bytes.
    assert_eq!(column(&[], 0), "25.2 KiB");
    assert_eq!(column(&[], 1), "25.2 KiB");
    assert_eq!(column(&[], 2), "50.5 KiB");
    // A block keeps 8 tokens x (4 x 16 + 2 scales + 4 x 16 + 2 heads + 3 x 24) floats, and the embedding
    // keeps 8 ids of 8 bytes. 1F1B holds two microbatches on the first of two ranks; GPipe holds all four.
    assert_eq!(column(&[], 3), "25.6 KiB");
    assert_eq!(column(&["pipeline.schedule=gpipe"], 3), "51.2 KiB");
    assert_eq!(column(&["pipeline.microbatch_size=2"], 3), "51.2 KiB");
    // A stage that is recomputed holds the activations of one microbatch. Recomputed by block, it keeps the
    // output of each layer but the last, 512 bytes, for two microbatches, and the activations of one block.
    assert_eq!(column(&["pipeline.recompute=stage"], 3), "12.8 KiB");
    assert_eq!(column(&["pipeline.recompute=block"], 3), "8.4 KiB");
    // GPipe keeps the inputs of the two blocks, 1 KiB, of four microbatches. If they leave, a backward holds
    // its own, and the inputs of the next microbatch come back meanwhile.
    let gpipe = ["pipeline.schedule=gpipe", "pipeline.recompute=block"];
    assert_eq!(column(&gpipe, 3), "10.4 KiB");
    assert_eq!(column(&[&gpipe[..], &["pipeline.offload=file"]].concat(), 3), "8.4 KiB");
    // The second block of two microbatches, and the embedding and the first block of one.
    assert_eq!(column(&["pipeline.recompute=[{ stage = 0, layers = 2 }]"], 3), "19.2 KiB");
    // The first two of four microbatches. Later ones are computed again when there is room for them.
    let kept = ["pipeline.schedule=gpipe", "pipeline.recompute=[{ stage = 0, keep = 2 }]"];
    assert_eq!(column(&kept, 3), "25.6 KiB");
    let printed = summary(&run, &kept);
    assert!(
        printed.contains(", recomputes all layers of the microbatches after the first 2 in flight\n"),
        "{printed}"
    );
    let beyond = "`pipeline.recompute` names the first 4 layers of stage 0, which has 3 layers";
    run.refuse(&["check", "small.toml"], &["pipeline.recompute=[{ stage = 0, layers = 4 }]"], beyond);
    let refused_parts = |architecture: &str, recompute: &str, cut: &[&str]| {
        let set = [format!("model.architecture={architecture}"), format!("pipeline.recompute={recompute}")];
        let (code, _, said) = check(&run, &[&[set[0].as_str(), &set[1]], cut].concat());
        assert_eq!(code.filter(|code| [0, 2].contains(code)), code, "{said}");
        said.split_once("names parts that no layer of ")
            .map(|(_, said)| said.split(';').next().unwrap_or("").to_owned())
    };
    // StarCoder2 has layer normalisations and GELU; OLMo 2 has its norms after its layers.
    let beyond = |place, parts| Some(format!("{place} computes again: {parts}"));
    assert_eq!(refused_parts("starcoder2", "parts", &[]), beyond("this model", "norms+feed-forward"));
    let norms = "[{ stage = 0, parts = ['norms'] }]";
    assert_eq!(refused_parts("olmo2", norms, &[]), beyond("stage 0", "norms"));
    assert_eq!(refused_parts("olmo2", "parts", &[]), None);
    // The first stage has only the embedding.
    let cut = ["pipeline.partition=explicit", "pipeline.boundaries=[1]"];
    assert_eq!(refused_parts("llama", norms, &cut), beyond("stage 0", "norms"));
    assert_eq!(refused_parts("llama", "parts", &cut), None);
    let printed = summary(&run, &[&cut[..], &["pipeline.recompute=parts"]].concat());
    let recomputing: Vec<&str> = printed.lines().filter(|line| line.contains("recomputes")).collect();
    assert!(
        recomputing.len() == 1
            && recomputing[0]
                .ends_with(", recomputes the norms and the feed-forward activations of its layers"),
        "{printed}"
    );
    // SGD without momentum has no state, with momentum one number for each parameter. Muon has one for each
    // of the 2176 elements of a block's matrices, and AdamW's two for the others; Adafactor has one for each
    // row and column.
    assert_eq!(column(&["optimizer.name=sgd"], 2), "0 B");
    assert_eq!(column(&["optimizer.name=sgd", "optimizer.momentum=0.9"], 2), "25.2 KiB");
    assert_eq!(column(&["optimizer.name=muon"], 2), "33.5 KiB");
    assert_eq!(column(&["optimizer.name=adafactor"], 2), "2.8 KiB");
    assert_eq!(column(&["optimizer.name=lion"], 2), "25.2 KiB");
    // In 8 bits, two bytes for each of the 6400 elements of matrices, 8 for each of their 368 rows, which have one block,
    // and 8 for each of the 64 elements of norms.
    assert_eq!(column(&["optimizer.name=adamw_8bit"], 2), "15.9 KiB");
    let sharded = ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];
    assert_eq!(column(&sharded, 2), "25.2 KiB");
    // Two groups of two replicas: each holds half, although there are four.
    let in_groups = ["mesh.data_parallel=[2, 2]", "pipeline.microbatches=8"];
    assert_eq!(column(&in_groups, 2), "25.2 KiB");
    assert_eq!(column(&["mesh.data_parallel=[1, 4]", "pipeline.microbatches=8"], 2), "12.6 KiB");
    let printed = summary(&run, &in_groups);
    let line = "mesh      4 replicas in 2 groups of 2, 8 ranks altogether; each holds 1/2 of the parameters and of the \
                optimizer's state\n";
    assert!(printed.contains(line), "{printed}");
}

#[test]
fn each_stage_has_its_bytes() {
    let run = Run::new();
    let rows = |set: &[&str]| -> Vec<String> {
        let printed = summary(&run, set);
        let table = printed.lines().skip_while(|line| !line.starts_with("stages ")).skip(1);
        let rows = table.take_while(|line| line.starts_with("stage "));
        rows.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    // The embedding of 128 x 16 and both blocks of 2208 parameters; the norm of 16 and the head of 128 x 16.
    // The blocks keep 6464 bytes each, the embedding 8 ids of 8 bytes, and 1F1B holds two microbatches on the
    // first rank. The last stage keeps the normalised rows, their scales and the logits: 8 x (16 + 16 + 1 +
    // 128) floats.
    let expected = rows(&[]);
    assert_eq!(expected[0], "stage 0 0 25.2 KiB 25.2 KiB 50.5 KiB 25.6 KiB");
    assert_eq!(expected.len(), 2);
    // Looped BFS runs all forwards first: a block holds four microbatches.
    let four = rows(&["pipeline.schedule=loopedbfs", "pipeline.stages_per_rank=2"]);
    let ranks: Vec<&str> = four.iter().map(|row| row.split(' ').nth(2).expect("a rank")).collect();
    assert_eq!(ranks, ["0", "1", "0", "1"]);
    assert_eq!(four[1], "stage 1 1 8.6 KiB 8.6 KiB 17.2 KiB 25.5 KiB");
    assert_eq!(four[1].split_once("stage 1 1"), four[2].split_once("stage 2 0"), "equal blocks");
    // A replica holds its part of the parameters and of the state, and whole gradients.
    let sharded = rows(&["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]);
    assert_eq!(sharded[0], "stage 0 0 12.6 KiB 25.2 KiB 25.2 KiB 25.6 KiB");
    assert_eq!(rows(&["mesh.data_parallel=[2, 2]", "pipeline.microbatches=8"])[0], sharded[0]);
    // In half precision a stage computes with a copy of its parameters, of half their bytes.
    let half = rows(&["run.precision=bf16"]);
    assert!(half[0].starts_with("stage 0 0 37.9 KiB 25.2 KiB 50.5 KiB "), "{half:?}");
}

#[test]
fn what_stages_share_is_listed() {
    let run = Run::new();
    let printed = summary(&run, &["model.tie_word_embeddings=true"]);
    let line = "shared    model.embed_tokens.weight: one parameter, with a copy in each of stages 0 and 1\n";
    assert!(printed.contains(line), "{printed}");
    // 128 ids of 16 numbers, also for ranks that hold slices of it.
    for set in [
        &["model.tie_word_embeddings=true"][..],
        &["model.tie_word_embeddings=true", "mesh.tensor_parallel=2"],
    ] {
        let printed = summary(&run, set);
        assert!(
            printed.contains("shared    model.embed_tokens.weight: 2048 numbers in each copy\n"),
            "{printed}"
        );
    }
    let printed = summary(&run, &[]);
    assert!(!printed.contains("shared"), "{printed}");
}

/// Checks `small.toml` with overrides and returns the report.
fn report(run: &Run, set: &[&str]) -> serde_json::Value {
    run.json(&["check", "small.toml"], set)
}

#[test]
fn the_report_has_what_the_text_has() {
    let run = Run::new();
    let found = report(&run, &["pipeline.schedule=interleaved1f1b", "model.tie_word_embeddings=true"]);
    assert_eq!(found["model"]["layers"], 4);
    let stages = found["stages"].as_array().expect("a list");
    assert_eq!(stages.len(), 4);
    assert_eq!(stages[3]["rank"], 1);
    assert_eq!(stages[3]["layers"], json!([3, 3]));
    assert_eq!(stages[0]["kinds"], json!({ "embedding": 1 }));
    assert!(stages.iter().all(|stage| stage["bytes"]["activations"].as_u64() > Some(0)), "{found}");
    assert_eq!(found["shared"], json!([{ "parameter": "model.embed_tokens.weight", "stages": [0, 3] }]));
    assert_eq!(
        found["schedule"],
        json!({
            "name": "interleaved1f1b", "ranks": 2, "stages_per_rank": 2, "microbatches": 4, "slices": 1, "recompute": "none",
            "offload": "none"
        })
    );
    let mesh =
        json!({ "data_parallel": 1, "shards": 1, "tensor_parallel": 1, "expert_parallel": 1, "ranks": 2 });
    assert_eq!(found["mesh"], mesh);
    assert_eq!(found["data"]["rows_per_step"], 4);
    assert_eq!(found["run"]["steps"], 40);
    let ranks = found["memory"]["ranks"].as_array().expect("a list");
    let total: u64 = ranks.iter().filter_map(|rank| rank["total"].as_u64()).sum();
    assert_eq!((ranks.len(), found["memory"]["needed"].as_u64()), (2, Some(total)));
    assert_eq!(found["memory"]["fits"], true);
    // Errors stay on standard error.
    let refused = run.command(&["check", "small.toml", "--format", "json", "--set", "pipeline.ranks=9"]);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0));
}

#[test]
fn layers_may_be_weighed_by_their_parameters() {
    let run = Run::new();
    let cut = |partition: &str| -> Vec<String> {
        let partition = format!("pipeline.partition={partition}");
        let found = report(
            &run,
            &[&partition, "model.num_hidden_layers=5", "model.vocab_size=4096", "pipeline.ranks=3"],
        );
        found["stages"].as_array().expect("a list").iter().map(|stage| stage["layers"].to_string()).collect()
    };
    // The embedding and the head have most parameters.
    assert_eq!(cut("parameters"), ["[0,0]", "[1,5]", "[6,6]"]);
    assert_ne!(cut("even"), cut("parameters"));
    let large = run.read("small.toml").replace("vocab_size = 128", "vocab_size = 4096");
    run.write("large.toml", large);
    let arguments = ["partition", "--config", "large.toml", "--method", "parameters", "--stages", "3"];
    assert_eq!(run.json(&arguments, &[])["stages"], json!([[0, 0], [1, 2], [3, 3]]));
}

/// The message counts the microbatches of one replica, and the key counts the microbatches of all replicas.
#[test]
fn advice_counts_the_microbatches_of_all_replicas() {
    let run = Run::new();
    for (schedule, replicas, microbatches) in [
        ("dualpipev", 2, 6),
        ("interleaved1f1b", 2, 14),
        ("1f1b", 3, 4),
        ("group-interleaved", 2, 6),
        ("zbv", 2, 3),
    ] {
        let set = |microbatches: &str| {
            let set = [
                format!("pipeline.schedule={schedule}"),
                format!("mesh.data_parallel={replicas}"),
                format!("pipeline.microbatches={microbatches}"),
            ];
            check(
                &run,
                &[set.each_ref().map(String::as_str).as_slice(), &["model.num_hidden_layers=6"]].concat(),
            )
        };
        let (code, _, said) = set(&microbatches.to_string());
        assert_eq!(code, Some(2), "{schedule}: {said}");
        let words: Vec<&str> = said.split([' ', ',', '\n']).filter(|word| !word.is_empty()).collect();
        let advice =
            |pair: &&[&str]| ["use", "write", "or"].contains(&pair[0]) && pair[1].parse::<u32>().is_ok();
        let advised: Vec<&str> = words.windows(2).filter(advice).map(|pair| pair[1]).collect();
        assert!(!advised.is_empty(), "{said}");
        for number in advised {
            let (code, _, again) = set(number);
            assert_eq!(code, Some(0), "{schedule}: {said}: {number}: {again}");
        }
    }
}

#[test]
fn too_few_layers_are_the_cause_before_microbatches() {
    let run = Run::new();
    let (code, _, said) = check(&run, &["pipeline.ranks=9", "pipeline.schedule=dualpipev"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("4 layers cannot fill 18 stages; use at most 4 stages, not 9 ranks with 2 stages each, so use 2 ranks"), "{said}");
    assert!(!said.contains("at least as many microbatches"), "{said}");
}
