//! Tests of `pipewright generate`: the same tokens with and without a cache, on one rank and on several, from
//! a run and from what it exports, and bad input.

use std::fs;
use std::process::Output;

use serde_json::Value;

use crate::run::Run;

/// Trains a few steps of a family.
fn trained(set: &[&str]) -> Run {
    let run = Run::new();
    run.train(&[&["run.steps=3"], set].concat());
    run
}

/// Returns the object that is printed, whose texts are always a list. A single text's members are in the object too.
fn json(run: &Run, model: &str, arguments: &[&str]) -> Value {
    let out = run.print(&[&["generate", model, "--json"], arguments].concat());
    let mut found: Value = serde_json::from_str(&out).expect("an object");
    assert!(found["text"].is_null() && found["tokens"].is_null(), "{found}");
    if let [only] = found["texts"].as_array().expect("a list").as_slice() {
        for (key, value) in only.as_object().cloned().into_iter().flatten() {
            found[key] = value;
        }
    }
    found
}

/// Returns the ids of the tokens that follow the prompt.
fn tokens(found: &Value) -> Vec<u64> {
    found["tokens"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

fn refuse(run: &Run, model: &str, arguments: &[&str], message: &str) {
    let (code, out, said) = run.call(&[&["generate", model], arguments].concat(), &[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains(message) && out.is_empty(), "{said}");
}

const GREEDY: [&str; 6] = ["--prompt", "the quick ", "--tokens", "12", "--temperature", "0"];

#[test]
fn every_family_generates_from_a_run_and_from_its_export() {
    for set in [
        &["model.architecture=llama"][..],
        &["model.architecture=qwen2", "model.tie_word_embeddings=true"],
        &["model.architecture=qwen3", "model.num_key_value_heads=1"],
        &["model.architecture=qwen3_moe", "model.num_experts=4"],
        &["model.architecture=gpt2", "model.n_positions=64"],
        &["model.architecture=gpt_oss", "model.num_local_experts=4", "model.sliding_window=4"],
        &["model.architecture=nemotron_h", "model.hybrid_override_pattern=M-*-", "model.num_hidden_layers=4"],
        &[
            "model.architecture=hybrid",
            "model.pattern=AMDE",
            "model.mtp_loss_weight=0.1",
            "model.mamba_num_heads=2",
            "model.mamba_head_dim=8",
            "model.ssm_state_size=8",
            "model.num_experts=4",
            "model.num_experts_per_tok=2",
            "model.moe_intermediate_size=8",
            "model.bos_token_id=0",
        ],
        &[
            "model.architecture=hybrid",
            "model.pattern=ADAD",
            "model.mod_layers=[1, 2]",
            "model.num_hidden_layers=4",
            "model.bos_token_id=0",
        ],
    ] {
        let run = trained(set);
        let cached = json(&run, "out", &GREEDY);
        assert_eq!(cached["tokens"].as_array().map(Vec::len), Some(12), "{cached}");
        assert_eq!(
            (cached["cache"].as_bool(), cached["stop"].as_str()),
            (Some(true), Some("length")),
            "{set:?}"
        );
        check_on_ranks(&run, &cached);
        let uncached = json(&run, "out", &[&GREEDY[..], &["--no-cache"]].concat());
        assert_eq!(
            (&uncached["tokens"], uncached["cache"].as_bool()),
            (&cached["tokens"], Some(false)),
            "{set:?}"
        );
        run.print(&["export", "out", "exported"]);
        assert_eq!(json(&run, "exported", &GREEDY)["tokens"], cached["tokens"], "{set:?}");
    }
}

#[test]
fn a_text_without_a_cache_says_so() {
    let uncached = [&["generate", "out", "--no-cache"], &GREEDY[..]].concat();
    let note = "without a key-value cache: each token computes all earlier ones again\n";
    trained(&[]).says(&uncached, &[], note);
}

/// Each family's own tests compare its tokens with references; here one rank must give the same ones.
#[test]
fn tensor_ranks_generate_from_a_run_with_tensor_ranks() {
    for set in [
        &["mesh.tensor_parallel=2", "pipeline.ranks=2"][..],
        &[
            "model.architecture=qwen3_moe",
            "model.num_experts=4",
            "mesh.tensor_parallel=2",
            "mesh.whole_experts=true",
            "pipeline.ranks=1",
        ],
        &[
            "model.architecture=nemotron_h",
            "model.hybrid_override_pattern=M-*-",
            "model.num_hidden_layers=4",
            "mesh.tensor_parallel=2",
        ],
    ] {
        let run = trained(set);
        let expected = json(&run, "out", &GREEDY);
        let several = ["--prompt", "fox", "--ranks", "run"];
        let found = json(&run, "out", &[&GREEDY[..], &several].concat());
        assert_eq!(found["texts"][0]["tokens"], expected["tokens"], "{set:?}");
        let places: Vec<u64> = found["ranks"]
            .as_array()
            .expect("ranks")
            .iter()
            .filter_map(|rank| rank["tensor_rank"].as_u64())
            .collect();
        assert!(places.len() >= 2 && places.chunks(2).all(|stage| stage == [0, 1]), "{found}");
        let uncached = [&GREEDY[..], &["--tensor-parallel", "2", "--no-cache"]].concat();
        assert_eq!(json(&run, "out", &uncached)["tokens"], expected["tokens"], "{set:?}");
    }
}

/// Checks a text on three ranks, next to other texts.
fn check_on_ranks(run: &Run, expected: &Value) {
    let several = ["--prompt", "fox", "--prompt", "jumps", "--ranks", "3"];
    let found = json(run, "out", &[&GREEDY[..], &several].concat());
    let texts = found["texts"].as_array().expect("a list");
    let prompts: Vec<&str> = texts.iter().filter_map(|text| text["prompt"].as_str()).collect();
    assert_eq!(prompts, ["the quick ", "fox", "jumps"]);
    assert_eq!((&texts[0]["tokens"], &texts[0]["text"]), (&expected["tokens"], &expected["text"]));
    let parameters = |ranks: &Value| -> Vec<u64> {
        ranks.as_array().expect("ranks").iter().filter_map(|rank| rank["parameters"].as_u64()).collect()
    };
    let (whole, parts) = (parameters(&expected["ranks"]), parameters(&found["ranks"]));
    assert_eq!((whole.len(), parts.len()), (1, 3));
    // A tied head has a copy of the table.
    assert!(parts.iter().sum::<u64>() >= whole[0] && parts.iter().all(|&part| part < whole[0]));
}

#[test]
fn prompts_come_from_arguments_and_lines() {
    let run = trained(&["pipeline.ranks=2"]);
    run.write("prompts.txt", "fox\n\n  \njumps\n");
    let greedy = ["--tokens", "4", "--temperature", "0"];
    let lines = [&greedy[..], &["--prompt", "the", "--prompts", "prompts.txt"]].concat();
    let (out, said) = run.succeed(&[&["generate", "out"], &lines[..]].concat(), &[]);
    let single =
        |prompt: &str| run.print(&[&["generate", "out"], &greedy[..], &["--prompt", prompt]].concat());
    let expected: Vec<String> = (1..)
        .zip(["the", "fox", "jumps"])
        .map(|(n, prompt)| format!("==> {n} <==\n{}", single(prompt)))
        .collect();
    assert_eq!(out, expected.concat());
    assert!(said.contains("12 tokens of 3 texts in ") && said.contains("for prompts of 11 tokens"), "{said}");
    // Standard input has lines too.
    let piped = converse(&run, &[&greedy[..], &["--prompts", "-"]].concat(), "fox\njumps\n");
    assert!(!piped.status.success(), "a chat needs a template");
    run.write("lines.jinja", LINES);
    let chat =
        [&greedy[..], &["--chat-template", "lines.jinja", "--prompts", "-", "--ranks", "run"]].concat();
    let piped = converse(&run, &chat, "fox\njumps\n");
    assert_eq!(piped.status.code(), Some(0), "{}", String::from_utf8_lossy(&piped.stderr));
    let said = String::from_utf8_lossy(&piped.stderr).into_owned();
    assert!(said.contains("8 tokens of 2 texts in ") && said.contains("on 2 ranks"), "{said}");
}

#[test]
fn bad_prompts_and_ranks() {
    let run = trained(&[]);
    refuse(&run, "out", &["--prompts", "no.txt"], "no.txt: ");
    run.write("empty.txt", "\n \n");
    refuse(&run, "out", &["--prompts", "empty.txt"], "empty.txt: no line has a prompt");
    let second = ["--prompt", "a", "--prompt", "caf\u{e9}"];
    refuse(&run, "out", &second, "prompt 2: the text: byte 3: token id 195 lies beyond");
    for (ranks, message) in [
        ("0", "give a number, 1 or above, or `run`"),
        ("some", "give a number, 1 or above, or `run`"),
        ("99", "--ranks: 4 layers cannot fill 99 stages; use at most 4 stages"),
    ] {
        refuse(&run, "out", &["--prompt", "a", "--ranks", ranks], message);
    }
    refuse(&run, "out", &["--prompt", "a", "--devices", "abacus"], "abacus");
    run.print(&["export", "out", "exported"]);
    refuse(
        &run,
        "exported",
        &["--prompt", "a", "--ranks", "run"],
        "`--ranks run` is for the folder of a run",
    );
    // The largest number would take more memory than there is if anything were kept for each rank.
    for (ranks, message) in
        [("3", "is not a multiple of the number of ranks"), ("4294967295", "leaves a rank without a part")]
    {
        refuse(&run, "out", &["--prompt", "a", "--tensor-parallel", ranks], message);
    }
}

/// A build that cannot connect processes would write the same text in each of them.
#[cfg(not(feature = "mpi"))]
#[test]
fn processes_need_a_build_with_mpi() {
    let run = trained(&[]);
    let mut command = run.binary();
    command.args(["generate", "out", "--prompt", "a"]).env("OMPI_COMM_WORLD_SIZE", "2");
    let (code, _, said) = crate::run::finished(&mut command);
    assert!(code == Some(2) && said.contains("several processes were started"), "{said}");
}

#[test]
fn a_seed_repeats_a_text() {
    let run = trained(&[]);
    let sampled = |seed: &str| {
        let how = ["--prompt", "fox", "--tokens", "40", "--seed", seed];
        let (out, said) =
            run.succeed(&[&["generate", "out/checkpoints/step-00000003"], &how[..]].concat(), &[]);
        assert!(said.contains("llama: 40 tokens in ") && said.contains("with a key-value cache"), "{said}");
        assert!(said.contains("the text has 43 tokens, and the model was trained on rows of 8"), "{said}");
        out
    };
    let text = sampled("1");
    assert!(text.starts_with("fox") && text.ends_with('\n'), "{text:?}");
    assert_eq!(sampled("1"), text);
    assert_ne!(sampled("2"), text);
}

#[test]
fn settings_of_the_choice() {
    let run = trained(&[]);
    let greedy = json(&run, "out", &GREEDY);
    let sampled = ["--prompt", "the quick ", "--tokens", "12", "--top-k", "1"];
    assert_eq!(json(&run, "out", &sampled)["tokens"], greedy["tokens"]);
    let penalized = json(&run, "out", &[&GREEDY[..], &["--repetition-penalty", "1000"]].concat());
    let tokens = tokens(&penalized);
    let once: std::collections::BTreeSet<u64> = tokens.iter().copied().collect();
    assert_eq!(once.len(), tokens.len(), "no token twice: {tokens:?}");
}

#[test]
fn a_text_ends_where_the_model_ends_it() {
    let run = trained(&[]);
    run.print(&["export", "out", "exported"]);
    let tokens = tokens(&json(&run, "exported", &GREEDY));
    let ends = format!("{{\"eos_token_id\": [127, {}]}}", tokens[0]);
    run.write("exported/generation_config.json", ends);
    let ended = json(&run, "exported", &GREEDY);
    assert_eq!((ended["tokens"].as_array().map(Vec::len), ended["stop"].as_str()), (Some(0), Some("eos")));
}

#[test]
fn documents_begin_as_in_training() {
    let run = trained(&["data.bos_id=0", "data.packed=true"]);
    assert_eq!(
        json(&run, "out", &GREEDY)["prompt_tokens"].as_array().map(|ids| (ids.len(), ids[0].clone())),
        Some((11, 0.into()))
    );
}

/// A tokenizer of words, which include the words of the text.
const WORDS: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [], "model":
    {"type": "WordLevel", "vocab": {"the": 0, "quick": 1, "brown": 2, "fox": 3, "jumps": 4, "?": 5}, "unk_token": "?"}}"#;

#[cfg(not(feature = "tokenizers"))]
#[test]
fn tokenizer_files_need_a_feature() {
    let run = trained(&[]);
    run.write("words.json", WORDS);
    let arguments = ["--prompt", "the quick", "--tokenizer", "words.json"];
    refuse(&run, "out", &arguments, "words.json: tokenizer files are not compiled in");
}

#[cfg(feature = "tokenizers")]
#[test]
fn a_text_goes_through_the_tokenizer_of_the_run() {
    let run = Run::new();
    run.write("words.json", WORDS);
    run.train(&["run.steps=3", "data.tokenizer=words.json", "data.seq_len=2"]);
    fs::remove_file(run.path("words.json")).expect("the run has a copy");
    let arguments = ["--prompt", "the fox", "--tokens", "4", "--temperature", "0"];
    let of_run = json(&run, "out", &arguments);
    assert_eq!(of_run["prompt_tokens"], serde_json::json!([0, 3]));
    assert_eq!(of_run["tokens"].as_array().map(Vec::len), Some(4));
    run.print(&["export", "out", "exported"]);
    assert_eq!(json(&run, "exported", &arguments)["text"], of_run["text"]);
}

/// A tiny template with a line for each message.
const LINES: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }};\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// Sends lines to a chat, and returns its output.
fn converse(run: &Run, arguments: &[&str], lines: &str) -> Output {
    let mut command = run.binary();
    command.args(["generate", "out", "--chat"]).args(arguments);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().expect("the binary starts");
    let mut input = child.stdin.take().expect("a pipe");
    // The command may end before it has read everything.
    let _ = std::io::Write::write_all(&mut input, lines.as_bytes());
    drop(input);
    child.wait_with_output().expect("its output is short")
}

#[test]
fn a_chat_is_rendered_by_its_template() {
    let run = trained(&[]);
    run.write("lines.jinja", LINES);
    let greedy = ["--tokens", "6", "--temperature", "0", "--chat-template", "lines.jinja"];
    let message = |text: &str, more: &[&str]| {
        json(&run, "out", &[&greedy[..], &["--chat", "--prompt", text], more].concat())
    };
    let text_of = |found: &Value| {
        let ids = found["prompt_tokens"].as_array().expect("ids").iter();
        ids.map(|id| char::from(id.as_u64().expect("an id") as u8)).collect::<String>()
    };
    let first = message("two", &[]);
    assert_eq!(text_of(&first), "user: two;\nassistant: ");
    let instructed = message("two", &["--system", "brief"]);
    assert_eq!(text_of(&instructed), "system: brief;\nuser: two;\nassistant: ");
    // The answer continues this text.
    let plain = ["--tokens", "6", "--temperature", "0", "--prompt", "user: two;\nassistant: "];
    assert_eq!(json(&run, "out", &plain)["tokens"], first["tokens"]);
    // Without --json, the answer alone is printed.
    let out = run.print(&[&["generate", "out"], &greedy[..], &["--chat", "--prompt", "two"]].concat());
    assert_eq!(out, format!("{}\n", first["text"].as_str().expect("a text")));
}

#[test]
fn a_chat_has_a_turn_for_each_line() {
    let run = trained(&[]);
    run.write("lines.jinja", LINES);
    let greedy = ["--tokens", "6", "--temperature", "0", "--chat-template", "lines.jinja"];
    let output = converse(&run, &greedy, "two\n\n  three  \n");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let plain = |prompt: &str| {
        let arguments = ["--tokens", "6", "--temperature", "0", "--prompt", prompt];
        json(&run, "out", &arguments)["text"].as_str().expect("a text").to_owned()
    };
    let first = plain("user: two;\nassistant: ");
    let second = plain(&format!("user: two;\nassistant: {first};\nuser: three;\nassistant: "));
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{first}\n{second}\n"));
}

/// The template and the special tokens belong to the tokenizer, which need not be the model's.
#[cfg(feature = "tokenizers")]
#[test]
fn a_run_keeps_the_template_of_its_tokenizer() {
    let run = Run::new();
    fs::create_dir(run.path("words")).expect("a folder");
    run.write("words/tokenizer.json", WORDS);
    let template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}";
    run.write("words/chat_template.jinja", template);
    run.write("words/tokenizer_config.json", "{\"bos_token\": \"brown\"}");
    run.train(&["run.steps=3", "data.tokenizer=words/tokenizer.json", "data.seq_len=2"]);
    fs::remove_dir_all(run.path("words")).expect("the run has copies");
    let found = json(&run, "out", &["--chat", "--prompt", "the fox", "--tokens", "2"]);
    assert_eq!(found["prompt_tokens"], serde_json::json!([2, 0, 3]));
}

#[test]
fn bad_chats() {
    let run = trained(&[]);
    let chat = ["--chat", "--prompt", "two"];
    refuse(&run, "out", &chat, "there is no chat template next to the tokenizer");
    refuse(
        &run,
        "out",
        &[&chat[..], &["--chat-template", "no-such"]].concat(),
        "there is no chat template named \"no-such\"; name one of chatml, ",
    );
    run.write("refuses.jinja", "\n{{ raise_exception('no questions') }}");
    let refuses = ["--chat-template", "refuses.jinja"];
    refuse(&run, "out", &[&chat[..], &refuses].concat(), "the chat template fails in line 2: no questions");
    refuse(&run, "out", &["--chat", "--json"], "`--json` is for answers to known messages");
    refuse(&run, "out", &["--tokens", "3"], "--prompt <TEXT>");
    refuse(&run, "out", &["--prompt", "a", "--system", "b"], "--chat");
    run.write("lines.jinja", LINES);
    let long = converse(&run, &["--chat-template", "lines.jinja"], &"x".repeat((1 << 20) + 1));
    assert_eq!(long.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&long.stderr).contains("a line has more than 1 MiB"));
}

#[test]
fn bad_input() {
    let run = trained(&[]);
    refuse(&run, "out", &["--prompt", ""], "`--prompt` is empty");
    refuse(&run, "out", &["--prompt", "caf\u{e9}"], "byte 3: token id 195 lies beyond the vocabulary of 128");
    refuse(
        &run,
        "out",
        &["--prompt", "a", "--temperature", "-1"],
        "the temperature is -1: give a finite number",
    );
    refuse(&run, "out", &["--prompt", "a", "--top-p", "0"], "the top-p is 0: give a number above 0");
    refuse(
        &run,
        "out",
        &["--prompt", "a", "--repetition-penalty", "0"],
        "the repetition penalty is 0: give a number from 0.001 to 1000",
    );
    refuse(&run, "nowhere", &["--prompt", "a"], "nowhere: there is no model here");
    fs::create_dir(run.path("empty")).expect("a folder");
    refuse(&run, "empty", &["--prompt", "a"], "empty: there is no model here");

    run.print(&["export", "out", "exported"]);
    let mut config = run.read_json("exported/config.json");
    config["max_position_embeddings"] = 8.into();
    run.write("exported/config.json", config.to_string());
    refuse(
        &run,
        "exported",
        &["--prompt", "fox", "--tokens", "6"],
        "3 tokens of the prompt and 6 more are above the 8 positions of the model",
    );
    run.print(&["generate", "exported", "--prompt", "fox", "--tokens", "5"]);

    let weights = run.path("exported/model.safetensors");
    let mut bytes = fs::read(&weights).expect("weights");
    let end = bytes.len();
    // The last tensor of the file, whichever it is, becomes NaN.
    bytes[end - 64..].copy_from_slice(&f32::NAN.to_le_bytes().repeat(16));
    fs::write(&weights, bytes).expect("weights");
    refuse(&run, "exported", &["--prompt", "fox", "--tokens", "5"], "is not finite");
}
