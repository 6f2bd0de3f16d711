//! Models with a score or labels: the losses and metrics of TRL and transformers, every cut and kind of ranks, adapters, exports,
//! and what such models refuse.

use std::fs;

use serde_json::{Value, json};

use super::command_line::reference;
use crate::run::{Run, assert_near};

/// Returns a folder with a run of a model of the reference. `data` is in `preference` for rewards, and in `score` otherwise.
fn folder(model: &str, adapter: Option<&str>, data: &str, more: &str) -> Run {
    let folder = Run::empty();
    let base = reference(&format!("score/{model}"));
    let adapter = adapter.map_or_else(String::new, |adapter| {
        format!("[adapter]\nkind = \"lora\"\npath = \"{}\"\n", reference(&format!("score/{adapter}")))
    });
    let (data, tokenizer) = (reference(data), reference("preference/tokenizer.json"));
    folder.write(
        "small.toml",
        format!(
            "{more}[model]\nfrom = \"{base}\"\n{adapter}[data]\npath = \"{data}\"\ntokenizer = \"{tokenizer}\"\nseq_len = 128\n\
             shuffle = false\n[pipeline]\nranks = 2\nmicrobatches = 2\nmicrobatch_size = 2\n[optimizer]\nlearning_rate = 5e-3\n\
             [run]\nsteps = 10\nout = \"out\"\n"
        ),
    );
    folder
}

const REWARD: &str = "[preference]\nloss = \"reward\"\n";

fn rewards() -> Run {
    folder("llama", None, "preference/pairs.jsonl", REWARD)
}

fn labels() -> Run {
    folder("qwen3", None, "score/texts.jsonl", "")
}

/// Compares every number of all steps with the number of TRL or transformers.
fn check(name: &str, folder: &Run) {
    folder.succeed(&["train", "small.toml"], &[]);
    let text = fs::read_to_string(reference("score/expected.json")).expect("the reference");
    let expected: Value = serde_json::from_str(&text).expect("JSON");
    let (found, steps) = (folder.steps(), expected[name].as_array().expect("the steps"));
    assert_eq!((found.len(), steps.len()), (10, 10), "{name}");
    for (step, (found, expected)) in found.iter().zip(steps).enumerate() {
        for (key, expected) in expected.as_object().expect("the numbers of a step") {
            let is_of_step = ["loss", "grad_norm"].contains(&key.as_str()) || name.starts_with("classes");
            let own = if is_of_step { &found[key] } else { &found["preference"][key] };
            let (own, expected) = (own.as_f64(), expected.as_f64().expect("a number"));
            let own = own.unwrap_or_else(|| panic!("{name}, step {step}: {key} is missing: {found}"));
            let error = (own - expected).abs() / expected.abs().max(1.0);
            assert!(error <= 5e-6, "{name}, step {step}, {key}: {own} for {expected}");
        }
    }
}

#[test]
fn rewards_train_as_with_trl() {
    check("reward", &rewards());
    let centred = format!("{REWARD}center_rewards_coefficient = 0.1\n");
    check("reward_centered", &folder("llama", None, "score/margins.jsonl", &centred));
}

#[test]
fn rewards_of_messages_train_as_with_trl() {
    let lora = Some("llama-adapter");
    check("reward_chat_lora", &folder("llama", lora, "preference/chats.jsonl", REWARD));
    check("reward_shared_lora", &folder("llama", lora, "preference/shared.jsonl", REWARD));
}

#[test]
fn labels_train_as_with_transformers() {
    check("classes", &labels());
    check("classes_gpt2", &folder("gpt2", None, "score/texts.jsonl", ""));
    check("classes_chat_lora", &folder("qwen3", Some("qwen3-adapter"), "score/chats.jsonl", ""));
}

/// Returns the numbers of each step that do not depend on times.
fn numbers(folder: &Run) -> Vec<String> {
    let keys = ["loss", "grad_norm", "accuracy", "preference", "validation_loss", "validation_accuracy"];
    let of = |step: &Value| keys.map(|key| step[key].to_string()).join(" ");
    folder.steps().iter().map(of).collect()
}

#[test]
fn every_cut_and_schedule_has_the_same_bits_and_a_resumed_run_too() {
    for folder in [rewards(), labels()] {
        let short = ["run.steps=3", "data.validation_share=0.5", "run.eval_every=2"];
        let train = |set: &[&str]| {
            folder.train(&[&short, set].concat());
            numbers(&folder)
        };
        let expected = train(&["pipeline.ranks=1"]);
        assert!(expected[1].contains("accuracy") || !expected[1].contains("null 0."), "{expected:?}");
        for set in [
            &["pipeline.schedule=zb-h1"][..],
            &["pipeline.schedule=zbv", "pipeline.stages_per_rank=2"],
            &["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2"],
            &["pipeline.ranks=3", "pipeline.recompute=stage"],
        ] {
            assert_eq!(train(set), expected, "{set:?}");
        }
        folder.train(&[&short[1..], &["run.steps=2"]].concat());
        folder.resume(&["run.steps=3"]);
        assert_eq!(numbers(&folder), expected);
    }
}

#[test]
fn replicas_tensor_ranks_and_packed_rows_have_the_same_losses() {
    for (folder, length) in [(rewards(), 128), (labels(), 64)] {
        let length = format!("data.seq_len={length}");
        let train = |set: &[&str]| {
            folder.train(&[&["run.steps=4", length.as_str()], set].concat());
            folder.losses()
        };
        let expected = train(&[]);
        for set in [&["mesh.tensor_parallel=2"][..], &["mesh.data_parallel=2"]] {
            assert_near(&train(set), &expected, 2e-5, &format!("{set:?}"));
        }
        folder.refuse_settings(
            &["pipeline.head_parts=2"],
            "a head of labels is one part: set `pipeline.head_parts` to 1",
        );
        let shares = ["mesh.tensor_parallel=2", "mesh.sequence_parallel=true"];
        folder.refuse_settings(&shares, "its head of labels needs all tokens on every rank");
    }
}

/// Records of equal length, so that packed rows have them in their order.
#[test]
fn packed_rows_train_like_rows_of_one_record() {
    let letter = |number: usize| char::from(b'a' + (number % 26) as u8);
    let text = |number: usize| {
        let (one, two) = (letter(number), letter(7 * number));
        format!("{{\"text\": \"{one}{one}{two}{two}\", \"label\": {}}}\n", number % 3)
    };
    let pair = |number: usize| {
        let (one, two) = (letter(number), letter(7 * number + 3));
        format!(
            "{{\"chosen\": \"{one}{two}{two}\", \"rejected\": \"{one}{one}{one}\", \"margin\": {}}}\n",
            number % 2
        )
    };
    let texts = (labels(), (0..32).map(text).collect::<String>(), 4);
    for (folder, records, length) in [texts, (rewards(), (0..32).map(pair).collect(), 6)] {
        folder.write("even.jsonl", records);
        let path = format!("data.path={}", folder.path("even.jsonl").display());
        let train = |length: u32, set: &[&str]| {
            let length = format!("data.seq_len={length}");
            folder.train(&[&[path.as_str(), "run.steps=4", "data.tokenizer=bytes", &length], set].concat());
            folder.losses()
        };
        let alone = train(length, &["pipeline.microbatch_size=4"]);
        let packed = train(2 * length, &["pipeline.microbatch_size=2", "data.packed=true"]);
        assert_near(&packed, &alone, 2e-5, "packed");
    }
}

/// Trains a base without a head of labels, exports it, and trains on.
#[test]
fn a_base_gets_a_drawn_head_and_its_export_is_a_model_of_transformers() {
    let folder = labels();
    let base = format!("model.from={}", reference("llama-tiny"));
    let set = [base.as_str(), "data.labels=[\"bad\", \"fair\", \"good\"]", "run.steps=2"];
    folder.says(
        &["check", "small.toml"],
        &set,
        "there is no head of labels: `score.weight` is drawn (`run.seed`)",
    );
    folder.train(&set);
    let first = folder.losses();
    folder.train(&[&set[..], &["pipeline.ranks=4"]].concat());
    assert_eq!(folder.losses(), first);
    folder.train(&[&set[..], &["run.seed=9"]].concat());
    assert_ne!(folder.losses()[0], first[0]);
    folder.succeed(&["export", "out", "trained"], &[]);
    let config = folder.read_json("trained/config.json");
    assert_eq!(config["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({"0": "bad", "1": "fair", "2": "good"}));
    assert_eq!(config["label2id"]["good"], 2);
    // The export has no `lm_head`, and is a start without a key.
    let from = format!("model.from={}", folder.path("trained").display());
    let (_, said) = folder.succeed(&["check", "small.toml"], &[&from]);
    assert!(!said.contains("drawn") && !said.contains("does not use"), "{said}");
    folder.refuse_settings(&[&from, "data.labels=[\"a\", \"b\"]"], "has 3 labels, and `data.labels` has 2");
    folder.refuse_settings(
        &[&from, "preference.loss=reward"],
        "a reward is the output of a head with one label",
    );
    for model in ["trained", "out"] {
        folder.refuse(
            &["generate", model, "--prompt", "to be"],
            &[],
            "scores texts and does not continue them",
        );
    }
    folder.refuse(
        &["export", "out", "trained.gguf", "--format", "gguf"],
        &[],
        "GGUF has no head of labels here",
    );
}

#[test]
fn rows_are_shown_with_their_labels() {
    let folder = labels();
    folder.prints(&["data", "show", "small.toml", "--rows", "1"], &[], "\nlabel: ");
    folder.prints(&["data", "show", "small.toml", "--rows", "1"], &[], " tokens, 1 label in the loss\n");
    let shown = rewards().print(&["data", "show", "small.toml", "--rows", "1"]);
    assert!(shown.contains(" tokens, 2 rewards in the loss\n"), "{shown}");
    assert!(
        !shown.contains("label") && shown.contains("\n---\n") && !shown.contains("<|system|>"),
        "{shown}"
    );
}

#[test]
fn adapters_train_the_head_too_also_on_a_quantised_base() {
    let folder = labels();
    folder.succeed(&["quantize", &reference("llama-tiny"), "nf4", "--to", "nf4"], &[]);
    let base = format!("model.from={}", folder.path("nf4").display());
    let set =
        [base.as_str(), "adapter.kind=lora", "data.labels=[\"bad\", \"fair\", \"good\"]", "run.steps=3"];
    folder.says(&["check", "small.toml"], &set, "and 1 module as a whole");
    folder.train(&set);
    folder.succeed(&["export", "out", "adapter"], &[]);
    let config = folder.read_json("adapter/adapter_config.json");
    assert_eq!((&config["task_type"], &config["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["score"])));
    let losses = folder.losses();
    let path = format!("adapter.path={}", folder.path("adapter").display());
    folder.train(&[set[0], set[1], set[2], &path, "run.steps=1"]);
    assert!(folder.losses()[0][0] < losses[0][0], "{losses:?}");
    // A head of labels stays as it is, and a model with labels has no other head.
    folder.succeed(&["quantize", &reference("score/qwen3"), "labels", "--to", "nf4"], &[]);
    let skipped =
        folder.read_json("labels/config.json")["quantization_config"]["llm_int8_skip_modules"].clone();
    let skips = |module: &str| skipped.as_array().expect("a list").contains(&json!(module));
    assert!(skips("score") && !skips("lm_head"), "{skipped}");
    // Adapters of a model that continued texts start with the head of the base.
    let (base, path) = (reference("llama-tiny"), reference("lora/llama-tiny"));
    let of_text = [format!("model.from={base}"), format!("adapter.path={path}")];
    folder.train(&[&of_text[0], &of_text[1], set[1], set[2], "run.steps=1", "run.precision=bf16"]);
    assert!(folder.losses()[0][0].is_finite());
}

#[test]
fn records_and_settings_that_do_not_fit_are_refused_with_a_sentence() {
    let refuse = |folder: &Run, record: &str, expected: &str| {
        folder.write("bad.jsonl", record);
        let path = format!("data.path={}", folder.path("bad.jsonl").display());
        folder.refuse_settings(&[&path, "data.bad_records=0"], expected);
    };
    let folder = labels();
    refuse(&folder, "{\"text\": \"a\"}\n", "bad.jsonl:1: the record has no `label`");
    refuse(
        &folder,
        "{\"text\": \"a\", \"label\": 3}\n",
        "`label` is 3, which is neither one of the labels `bad`, `fair`, `good`",
    );
    refuse(&folder, "{\"text\": \"a\", \"label\": \"best\"}\n", "`label` is best, which is neither one of");
    refuse(&folder, "{\"text\": \"\", \"label\": 0}\n", "the record has a text without a token");
    refuse(&folder, "[1, 2, 3]\n", "training on labels takes records with a label");
    folder.refuse_settings(
        &["preference.loss=orpo"],
        "the model has a head of labels, and only `reward` trains such a model",
    );
    for set in ["data.train_on=all", "data.side=side.safetensors"] {
        let key = set.split_once('=').expect("a key").0;
        let sentence =
            format!("the model in `model.from` has labels, and `{key}` does not work with training on them");
        folder.refuse_settings(&[set], &sentence);
    }
    folder.refuse_settings(&["data.labels=[\"a\", \"a\"]"], "`labels` has fewer than two different names");
    let samples = ["run.eval_every=5", "data.validation_share=0.5", "run.sample_prompts=[\"to\"]"];
    folder.refuse_settings(&samples, "a model with a head of labels does not continue texts");
    let folder = rewards();
    refuse(
        &folder,
        "{\"chosen\": \"a\", \"rejected\": \"b\", \"margin\": \"much\"}\n",
        "`margin` is not a finite number",
    );
    folder.refuse_settings(
        &["preference.loss=none"],
        "has one label, whose output is a reward: write `loss = \"reward\"`",
    );
    folder.refuse_settings(
        &["preference.beta=0.1"],
        "`beta` has no effect without a `loss` with log-probabilities",
    );
    let granite = format!("model.from={}", reference("granite-tiny"));
    folder.refuse_settings(&[&granite], "models of the family `granite` have no head of labels");
}
