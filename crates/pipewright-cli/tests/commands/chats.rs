//! Training on chats through the command line: the losses and gradient norms of transformers, which weighs
//! tokens by the targets of the step that count, for every family, schedule, mesh and accumulation.

use std::fs;

use serde_json::Value;

use super::command_line::reference;
use crate::run::{Run, assert_near, in_one_line, numbers};

/// Writes a configuration that trains a model on the chats of the reference.
fn folder(model: &str) -> Run {
    let folder = Run::empty();
    let chats = reference("masked/chats.jsonl");
    let config = format!(
        "[model]\n{model}\n[data]\npath = \"{chats}\"\ntokenizer = \"bytes\"\nchat_template = \"phi3\"\nseq_len = 127\n\
         shuffle = false\n[pipeline]\nmicrobatches = 8\n[optimizer]\nlearning_rate = 2e-3\n[run]\nsteps = 2\nout = \"out\"\n"
    );
    folder.write("small.toml", config);
    folder
}

/// Trains with overrides. Returns the loss and the gradient norm of each step.
fn train(folder: &Run, set: &[&str]) -> Vec<[f64; 2]> {
    let _ = fs::remove_dir_all(folder.out());
    folder.train(set);
    folder.losses()
}

fn assert_close(found: &[[f64; 2]], expected: &[[f64; 2]], place: &str) {
    let only =
        |index: usize, figures: &[[f64; 2]]| figures.iter().map(|step| [step[index]; 2]).collect::<Vec<_>>();
    for (index, share) in [(0, 5e-6), (1, 5e-5)] {
        assert_near(&only(index, found), &only(index, expected), share, place);
    }
}

/// Compares a model with transformers, whose losses of masked chats the reference has.
fn check_reference(model: &str, steps: usize, set: &[&str]) {
    let expected = fs::read_to_string(reference("masked/expected.json")).expect("the reference");
    let expected: Value = serde_json::from_str(&expected).expect("JSON");
    let expected = numbers(&expected["models"][model].as_array().expect("the steps")[..steps]);
    let folder = folder(&format!("from = \"{}\"", reference(model)));
    let steps = format!("run.steps={steps}");
    assert_close(&train(&folder, &[set, &[&steps]].concat()), &expected, &format!("{model}, {set:?}"));
}

#[test]
fn families_train_on_answers_as_in_transformers() {
    for model in ["llama-tiny", "llama-tied-tiny", "llama31-tiny", "qwen2-tiny", "qwen3-tiny"] {
        check_reference(model, 4, &[]);
    }
}

#[test]
fn every_schedule_and_mesh_weighs_tokens_as_transformers_does() {
    let ways: &[&[&str]] = &[
        &[
            "pipeline.schedule=gpipe",
            "pipeline.ranks=4",
            "pipeline.microbatches=4",
            "pipeline.microbatch_size=2",
        ],
        &["pipeline.schedule=zbv", "pipeline.stages_per_rank=2"],
        &["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2"],
        &["pipeline.schedule=seq1f1b", "pipeline.slices=2", "data.seq_len=128"],
        &["pipeline.head_parts=2"],
        &["mesh.data_parallel=2"],
        &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"],
        &["mesh.tensor_parallel=2"],
        &["run.accumulate=2", "pipeline.microbatches=4"],
        &["run.accumulate=4", "pipeline.microbatches=2", "mesh.data_parallel=2"],
        &["pipeline.recompute=stage"],
    ];
    for set in ways {
        check_reference("qwen3-tiny", 2, set);
    }
}

/// Compares microbatches of one row with microbatches of four, for families that transformers does not have
/// or whose balance loss depends on the microbatches.
fn check_split(model: &str) {
    let folder = folder(model);
    let whole = train(&folder, &["pipeline.microbatches=2", "pipeline.microbatch_size=4"]);
    assert_close(&train(&folder, &[]), &whole, model);
}

#[test]
fn every_family_weighs_the_tokens_of_microbatches_alike() {
    let sizes = "vocab_size = 256\nhidden_size = 16\nintermediate_size = 24\nnum_attention_heads = 2";
    let mamba = "mamba_num_heads = 2\nmamba_head_dim = 8\nssm_state_size = 8";
    let nemotron = "architecture = \"nemotron_h\"\nhybrid_override_pattern = \"M*-\"";
    let experts = "num_hidden_layers = 2\nnum_experts = 4";
    check_split(&format!("architecture = \"qwen3_moe\"\n{sizes}\n{experts}"));
    check_split(&format!("{nemotron}\n{sizes}\n{mamba}"));
    check_split(&format!("architecture = \"hybrid\"\npattern = \"AMD\"\n{sizes}\n{mamba}"));
    // The losses of further predictions and the balance losses are means over a microbatch.
    let auxiliary = "mtp_loss_weight = 0.0\nmoe_aux_loss_weight = 0.0\nmoe_router_z_loss_weight = 0.0";
    check_split(&format!(
        "architecture = \"hybrid\"\npattern = \"AEDE\"\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\n{auxiliary}\n{sizes}"
    ));
}

/// Packing puts several chats into a row, and each counts as if it were alone.
#[test]
fn packed_chats_have_the_loss_of_chats_in_rows_of_their_own() {
    let sizes = "vocab_size = 256\nhidden_size = 16\nintermediate_size = 24\nnum_attention_heads = 2\nnum_hidden_layers = 2";
    let folder = folder(sizes);
    // All chats are in one step.
    let alone = train(&folder, &["run.steps=1", "pipeline.microbatches=32"]);
    let set = ["pipeline.microbatches=1", "data.packed=true", "data.seq_len=384"];
    let summary = folder.json(&["check", "small.toml"], &set);
    let rows = summary["data"]["rows"].as_u64().expect("a number");
    assert!((6..12).contains(&rows), "{rows} rows");
    let microbatches = format!("pipeline.microbatches={rows}");
    let packed = train(&folder, &["run.steps=1", "data.packed=true", "data.seq_len=384", &microbatches]);
    assert_close(&packed, &alone, "packed");
}

#[test]
fn validation_counts_by_targets_and_a_run_resumes() {
    let folder = folder(&format!("from = \"{}\"", reference("qwen3-tiny")));
    let chats = format!("data.validation={}", reference("masked/chats.jsonl"));
    let set = ["run.eval_every=1", "optimizer.learning_rate=1e-30", "run.checkpoint_every=1", &chats];
    let losses = |microbatches: &str| {
        train(&folder, &[&set[..], &[microbatches]].concat());
        folder.steps()[0]["validation_loss"].as_f64().expect("a number")
    };
    // 16 batches of two chats, and one batch of all of them.
    let (small, whole) = (losses("pipeline.microbatches=2"), losses("pipeline.microbatches=32"));
    assert!(((small - whole) / whole).abs() < 1e-6, "{small} {whole}");
    folder.resume(&["run.steps=3"]);
    let other = "the checkpoint is of another model, of other adapters or of other data";
    folder.refuse(&["resume", "out"], &["run.steps=4", "data.train_on=all"], other);
}

#[test]
fn rows_are_shown_with_what_counts() {
    let folder = folder("vocab_size = 256");
    let show = |arguments: &[&str]| folder.print(&[&["data", "show"], arguments].concat());
    let shown = show(&["small.toml", "--rows", "2"]);
    let first = "row 1 of 32: 50 tokens, 9 targets in the loss\n\u{2039}<|user|>\n\u{4e16}\u{754c} is<|end|>\n<|assistant|>\n\u{203a}\
                 be<|end|>\u{2039}\n\u{203a}\n\nrow 2 of 32: ";
    assert!(shown.starts_with(first), "{shown}");
    let packed = show(&["small.toml", "--rows", "1", "--set", "data.packed=true"]);
    assert!(packed.contains("\n---\n\u{2039}<|user|>"), "{packed}");
    // Rows can be looked at before there are enough for a step.
    let few = show(&["small.toml", "--rows", "1", "--set", "pipeline.microbatches=100"]);
    assert!(few.starts_with("row 1 of 32: "), "{few}");
    folder.write("a[b].txt", "to be or not to be");
    let text = show(&["a[b].txt", "--set", "data.seq_len=4", "--set", "data.shuffle=false", "--rows", "9"]);
    assert!(text.starts_with("row 1 of 4: 5 tokens, 4 targets in the loss\nto be\n\nrow 2 of 4: "), "{text}");
}

#[test]
fn settings_of_chats_are_checked() {
    let folder = folder("vocab_size = 256");
    let refused = |set: &str, part: &str| folder.refuse(&["check", "small.toml"], &[set], part);
    refused("data.chat_template=chatmi", "did you mean `chatml`?");
    refused("data.chat_template=no/such.jinja", "no/such.jinja: cannot be read");
    refused("data.train_on=answers", "`train_on` is \"answers\"");
    refused("data.long_records=drop", "`long_records` is \"drop\"");
    refused("data.date=today", "where a date such as \"2024-07-26\" is expected");
    folder.refuse(
        &["check", "small.toml"],
        &["data.seq_len=20", "data.long_records=refuse"],
        "chats.jsonl:1: the record has ",
    );
    refused(
        "data.chat_template_kwargs=on",
        "where a table of values, such as { enable_thinking = false } is expected",
    );
    refused(
        "data.chat_template_kwargs={ tools = 1 }",
        "`chat_template_kwargs` has `tools`, which the template gets",
    );
    fs::create_dir(folder.path("a")).expect("the scratch folder takes folders");
    folder.write("a/tokenizer.model", "pieces");
    refused(
        "data.tokenizer=a/tokenizer.model",
        "a/tokenizer.model: the tokenizer is in a form that is not read; write a",
    );
}

#[test]
fn a_run_says_how_many_records_are_cut() {
    let folder = folder("vocab_size = 256");
    let long = "{\"prompt\": \"a\", \"completion\": \"to be or not to be\"}\n";
    let short = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    folder.write("a.jsonl", [long, &short.repeat(9)].concat());
    let set = ["data.path=a.jsonl", "data.seq_len=12", "data.long_records=skip", "pipeline.microbatches=1"];
    let (_, said) = folder.succeed(&["train", "small.toml"], &set);
    let note = "data: 1 of 10 records do not fit into a row of seq_len 12: skipped\n";
    assert!(said.contains(note), "{said}");
}

const SHARE_GPT: &str = r#"[
  {"conversations": [{"from": "human", "value": "to be or"}, {"from": "gpt", "value": "not to be"}]},
  {"conversations": [{"from": "narrator", "value": "to be"}]},
  {"conversations": [{"from": "human", "value": "be"}, {"from": "gpt", "value": "or not"}]}
]"#;

#[test]
fn a_run_says_how_many_records_are_left_out() {
    let folder = folder("vocab_size = 256");
    folder.write("a.json", SHARE_GPT);
    let set = ["data.path=a.json", "pipeline.microbatches=1"];
    let note = "a.json:3:3: message 1 is from `narrator`, which is none of human";
    for command in ["check", "train"] {
        let (_, said) = folder.succeed(&[command, "small.toml"], &set);
        let said = in_one_line(&said);
        assert!(
            said.contains("data: 1 record cannot be used and is left out: ") && said.contains(note),
            "{said}"
        );
    }
    let checked = &folder.json(&["check", "small.toml"], &set)["data"];
    assert_eq!((&checked["rows"], &checked["bad_records"]["count"]), (&2.into(), &1.into()), "{checked}");
    folder.refuse(&["train", "small.toml"], &[&set[..], &["data.bad_records=0"]].concat(), note);
    let tokenize = ["tokenize", "a.json", "--tokenizer", "bytes", "--chat-template", "phi3", "-o", "a.pwtok"];
    let (_, said) = folder.succeed(&tokenize, &[]);
    assert!(in_one_line(&said).contains(note), "{said}");
    folder.refuse(&[&tokenize[..], &["--bad-records", "0"]].concat(), &[], note);
}

/// The default of the argument is the default of the key.
#[test]
fn as_many_records_are_left_out_of_a_file_as_of_a_run() {
    let folder = folder("vocab_size = 256");
    let bad = "{\"txt\": \"a\"}\n";
    let good = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    let tokenize = ["tokenize", "a.jsonl", "--tokenizer", "bytes", "-o", "a.pwtok"];
    let set = ["data.path=a.jsonl", "pipeline.microbatches=1"];
    folder.write("a.jsonl", [&bad.repeat(100), good].concat());
    folder.succeed(&tokenize, &[]);
    folder.succeed(&["check", "small.toml"], &set);
    folder.write("a.jsonl", [&bad.repeat(101), good].concat());
    let refusal = "this is the first of 101 records that cannot be used, and `bad_records` in [data] leaves out at most 100";
    folder.refuse(&tokenize, &[], refusal);
    folder.refuse(&["check", "small.toml"], &set, refusal);
}

#[test]
fn a_run_keeps_the_variables_of_its_template() {
    let folder = folder("vocab_size = 256");
    folder.write("a.json", SHARE_GPT);
    folder.write("a.jinja", "{{ greeting }} {% for message in messages %}{{ message.content }}|{% endfor %}");
    let set = [
        "data.path=a.json",
        "data.chat_template=a.jinja",
        "data.chat_template_kwargs={ greeting = \"hi\" }",
        "data.train_on=all",
        "pipeline.microbatches=1",
        "run.steps=1",
    ];
    folder.train(&set);
    let prompt = |further: &[&str]| {
        let chat = ["generate", "out", "--chat", "--prompt", "be", "--tokens", "1", "--json"];
        let printed: Value =
            serde_json::from_str(&folder.print(&[&chat[..], further].concat())).expect("JSON");
        let ids = printed["texts"][0]["prompt_tokens"].as_array().expect("a list");
        ids.iter().map(|id| id.as_u64().expect("an id") as u8 as char).collect::<String>()
    };
    assert_eq!(prompt(&[]), "hi be|");
    assert_eq!(prompt(&["--chat-template-kwargs", "greeting=hello"]), "hello be|");
    let wrong = ["generate", "out", "--chat", "--prompt", "be", "--chat-template-kwargs", "greeting"];
    folder.refuse(&wrong, &[], "--chat-template-kwargs greeting: not a variable and its value");
}

/// Rows are filled up to their length, and `check` says how much packing would save.
#[test]
fn check_says_how_much_of_the_rows_is_filled() {
    let folder = folder(&format!("from = \"{}\"", reference("llama-tiny")));
    folder.write("texts.jsonl", "{\"prompt\": \"q\", \"completion\": \"12345678\"}\n".repeat(16));
    let set = ["data.path=texts.jsonl", "data.seq_len=32"];
    let said =
        "data      tokens fill 25.0% of the rows; with `data.packed = true`, all records fit into 4 rows\n";
    folder.prints(&["check", "small.toml"], &set, said);
    let packed = [set[0], set[1], "data.packed=true", "pipeline.microbatches=4"];
    folder.prints(&["check", "small.toml"], &packed, "data      tokens fill 100.0% of the rows\n");
    let json: Value = serde_json::from_str(&folder.print(&[
        "check",
        "small.toml",
        "--format",
        "json",
        "--set",
        set[0],
        "--set",
        set[1],
    ]))
    .expect("an object");
    assert_eq!(
        json["data"]["fill"],
        serde_json::json!({"tokens": 128, "places": 512, "rows": 16, "packed_rows": 4})
    );
    folder.refuse_settings(&["data.group_by_length=true"], "`packed`");
}
