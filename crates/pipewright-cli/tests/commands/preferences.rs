//! Preference training: the losses, rewards and gradient norms of TRL's trainers, equal bits for every cut, the reference
//! and its file, and records that cannot be used.

use std::fs;

use serde_json::Value;

use super::command_line::reference;
use crate::run::{Run, assert_near};

fn expected(name: &str) -> Value {
    let text = fs::read_to_string(reference("preference/expected.json")).expect("the reference");
    let mut all: Value = serde_json::from_str(&text).expect("JSON");
    all[name].take()
}

/// Returns a folder with a run on the records of TRL, in microbatches of `batch` rows.
fn folder(loss: &str, data: &str, batch: u64, accumulated: u64) -> Run {
    let folder = Run::empty();
    let (base, adapter) = (reference("llama-tiny"), reference("preference/adapter"));
    let tokenizer = reference("preference/tokenizer.json");
    let data = reference(&format!("preference/{data}"));
    folder.write(
        "small.toml",
        format!(
            "[model]\nfrom = \"{base}\"\n[adapter]\nkind = \"lora\"\npath = \"{adapter}\"\n[preference]\n{loss}\n[data]\n\
             path = \"{data}\"\ntokenizer = \"{tokenizer}\"\nseq_len = 128\nshuffle = false\n[pipeline]\nranks = 2\n\
             microbatches = {accumulated}\nmicrobatch_size = {batch}\n[optimizer]\nlearning_rate = 5e-3\n[run]\nsteps = 10\n\
             out = \"out\"\n"
        ),
    );
    folder
}

/// Compares every number of all steps with TRL's number.
fn check(name: &str, loss: &str) {
    let expected = expected(name);
    let count = |key: &str| expected[key].as_u64().expect("a count");
    let folder =
        folder(loss, expected["data"].as_str().expect("a file"), count("batch"), count("accumulated"));
    folder.succeed(&["train", "small.toml"], &[]);
    let (found, steps) = (folder.steps(), expected["steps"].as_array().expect("the steps"));
    assert_eq!((found.len(), steps.len()), (10, 10), "{name}");
    for (step, (found, expected)) in found.iter().zip(steps).enumerate() {
        for (key, expected) in expected.as_object().expect("the numbers of a step") {
            let own = match key.as_str() {
                "loss" | "grad_norm" => &found[key],
                // TRL has a loss of 0 next to the one of SimPO.
                "nll_loss" if name == "simpo" => continue,
                _ => &found["preference"][key],
            };
            let (own, expected) = (own.as_f64(), expected.as_f64().expect("a number"));
            let own = own.unwrap_or_else(|| panic!("{name}, step {step}: {key} is missing"));
            let error = (own - expected).abs() / expected.abs().max(1.0);
            assert!(error <= 5e-6, "{name}, step {step}, {key}: {own} for {expected}");
        }
    }
}

#[test]
fn dpo_trains_as_with_trl() {
    check("dpo", "loss = \"dpo\"");
    check("dpo_smoothed", "loss = \"dpo\"\nlabel_smoothing = 0.2");
}

#[test]
fn dpo_on_messages_trains_as_with_trl() {
    check("dpo_chat", "loss = \"dpo\"\nbeta = 0.3");
    check("dpo_shared", "loss = \"dpo\"");
}

#[test]
fn ipo_trains_as_with_trl() {
    check("ipo", "loss = \"ipo\"");
}

#[test]
fn orpo_trains_as_with_trl() {
    check("orpo", "loss = \"orpo\"");
}

#[test]
fn simpo_trains_as_with_trl() {
    check("simpo", "loss = \"simpo\"\nbeta = 2.0\nmargin = 0.3\nlabel_smoothing = 0.1");
}

#[test]
fn kto_trains_as_with_trl() {
    check("kto", "loss = \"kto\"\ndesirable_weight = 1.5\nundesirable_weight = 0.75");
}

/// Returns the numbers of each step that do not depend on times.
fn numbers(folder: &Run) -> Vec<String> {
    let of = |step: &Value| {
        let keys = ["loss", "grad_norm", "preference", "validation_loss", "validation_preference"];
        keys.map(|key| step[key].to_string()).join(" ")
    };
    folder.steps().iter().map(of).collect()
}

#[test]
fn every_cut_and_schedule_has_the_same_bits() {
    for (loss, data) in [("loss = \"dpo\"", "pairs.jsonl"), ("loss = \"kto\"", "labelled.jsonl")] {
        let folder = folder(loss, data, 2, 4);
        let short = ["run.steps=3", "data.validation_share=0.5", "run.eval_every=2"];
        let train = |set: &[&str]| {
            folder.train(&[&short, set].concat());
            numbers(&folder)
        };
        let expected = train(&["pipeline.ranks=1"]);
        assert!(expected[1].contains("rewards/chosen"), "{expected:?}");
        for set in [
            &["pipeline.schedule=zb-h1"][..],
            &["pipeline.schedule=zbv", "pipeline.stages_per_rank=2"],
            &["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2"],
            &["pipeline.ranks=3", "pipeline.recompute=stage"],
        ] {
            assert_eq!(train(set), expected, "{loss} {set:?}");
        }
    }
}

#[test]
fn packed_rows_parts_of_the_head_and_tensor_ranks_have_the_same_losses() {
    let folder = folder("loss = \"dpo\"", "pairs.jsonl", 2, 2);
    let train = |set: &[&str]| {
        folder.train(&[&["run.steps=4"], set].concat());
        folder.losses()
    };
    let expected = train(&[]);
    for set in [&["pipeline.head_parts=2"][..], &["mesh.tensor_parallel=2"], &["mesh.data_parallel=2"]] {
        assert_near(&train(set), &expected, 2e-5, &format!("{set:?}"));
    }
}

/// Records of equal length, so that packed rows have them in their order.
#[test]
fn packed_rows_train_like_rows_of_one_record() {
    let folder = folder("loss = \"dpo\"", "pairs.jsonl", 2, 2);
    let record = |number: usize| {
        let letter = |shift: usize| char::from(b'a' + ((number + shift) % 26) as u8);
        let (prompt, chosen, rejected) = (letter(0), letter(7), letter(11));
        format!(
            "{{\"prompt\": \"{prompt}{prompt}\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}\n"
        )
    };
    folder.write("even.jsonl", (0..32).map(record).collect::<String>());
    let path = format!("data.path={}", folder.path("even.jsonl").display());
    let train = |set: &[&str]| {
        folder.train(&[&[path.as_str(), "run.steps=4", "data.tokenizer=bytes"], set].concat());
        folder.losses()
    };
    // A record takes four places, and a row has four records.
    let alone = train(&["pipeline.microbatch_size=8", "data.seq_len=16"]);
    let packed = train(&["pipeline.microbatch_size=2", "data.seq_len=16", "data.packed=true"]);
    assert_near(&packed, &alone, 1e-4, "packed");
}

#[test]
fn the_reference_is_computed_once_and_recognised() {
    let folder = folder("loss = \"dpo\"", "pairs.jsonl", 2, 2);
    folder.says(&["check", "small.toml"], &[], "one forward pass over all rows computes the reference");
    folder.train(&["run.steps=4"]);
    let expected = numbers(&folder);
    let written = folder.read("out/reference.json");
    folder.train(&["run.steps=2"]);
    // A resumed run reads the file: with other numbers, it is refused.
    let resume = ["resume", "out"];
    folder.write("out/reference.json", &written[..written.len() / 2]);
    folder.refuse(&resume, &["run.steps=4"], "the log-probabilities of the reference are damaged (");
    folder.write("out/reference.json", written.replacen("\"training\":[-", "\"training\":[-1", 1));
    folder.refuse(&resume, &["run.steps=4"], "are damaged (numbers are missing or were changed)");
    folder.write("out/reference.json", &written);
    folder.resume(&["run.steps=4"]);
    assert_eq!(numbers(&folder), expected);
    // Another run may take it, if its model and data are the same.
    let named = |name: &str| format!("preference.reference={}", folder.path(name).display());
    folder.write("kept.json", &written);
    let kept = named("kept.json");
    folder.train(&["run.steps=4", &kept]);
    assert_eq!((numbers(&folder), folder.path("out/reference.json").exists()), (expected, false));
    folder.refuse_settings(
        &[&kept, "data.seq_len=64"],
        "are of another run, which differs in: data: name the file",
    );
    fs::create_dir(folder.path("base")).expect("a folder");
    folder.write("base/config.json", fs::read(reference("llama-tiny/config.json")).expect("a configuration"));
    let mut weights = fs::read(reference("llama-tiny/model.safetensors")).expect("weights");
    *weights.last_mut().expect("a byte") ^= 1;
    folder.write("base/model.safetensors", weights);
    let other = format!("model.from={}", folder.path("base").display());
    folder.refuse_settings(&[&other, &kept], "which differs in: weights of the base: name the file");
    folder.refuse_settings(
        &[&named("missing.json")],
        "missing.json: the log-probabilities of the reference cannot be read",
    );
}

#[test]
fn records_that_cannot_be_used_are_refused_with_a_sentence() {
    let folder = folder("loss = \"dpo\"", "pairs.jsonl", 2, 2);
    let refuse = |record: &str, set: &[&str], expected: &str| {
        folder.write("bad.jsonl", record);
        let path = format!("data.path={}", folder.path("bad.jsonl").display());
        folder.refuse_settings(&[&[path.as_str(), "data.bad_records=0"], set].concat(), expected);
    };
    refuse("{\"prompt\": \"q\", \"chosen\": \"a\"}\n", &[], "bad.jsonl:1: the record has no `rejected`");
    refuse("{\"prompt\": \"q\", \"chosen\": \"\", \"rejected\": \"b\"}\n", &[], "`chosen` is empty");
    let long =
        format!("{{\"prompt\": \"{}\", \"chosen\": \"a\", \"rejected\": \"b\"}}\n", "to be ".repeat(90));
    refuse(&long, &[], "nothing of the record counts in the loss");
    let label = "{\"prompt\": \"q\", \"completion\": \"a\", \"label\": 1}\n";
    refuse(
        label,
        &["preference.loss=kto"],
        "`label` is neither true nor false but a value of the type number",
    );
    folder.refuse_settings(&["preference.lss=dpo"], "did you mean `loss`?");
    // Some such records are left out, and counted.
    let good = fs::read_to_string(reference("preference/pairs.jsonl")).expect("the records");
    folder.write("bad.jsonl", long + &good);
    let path = format!("data.path={}", folder.path("bad.jsonl").display());
    folder.says(&["check", "small.toml"], &[&path], "1 of 17 records");
}

/// The commands of the page, on a tiny model.
#[test]
fn the_page_trains_an_adapter() {
    let page = include_str!("../../../../docs/preferences.md");
    let block = |kind: &str| {
        let (_, rest) = page.split_once(&format!("```{kind}\n")).expect("a block");
        rest.split_once("```").expect("its end").0.to_owned()
    };
    let folder = Run::empty();
    let config =
        block("toml").replace("Qwen3-0.6B", &reference("qwen3-tiny")).replace("steps = 200", "steps = 20");
    folder
        .write("preferences.toml", config.replace("seq_len = 1024", "seq_len = 256\ntokenizer = \"bytes\""));
    folder.write("pairs.jsonl", block("json").repeat(50));
    for line in block("sh").lines() {
        let arguments: Vec<&str> = line.split_whitespace().skip(1).collect();
        folder.succeed(&arguments, &[]);
    }
    assert!(folder.path("adapter/adapter_config.json").exists());
    assert!(folder.read("report.html").contains("preference_validation rewards/margins"));
    let last = folder.metrics_in("runs/preferences").pop().expect("a step");
    assert_eq!(last["preference"]["rewards/accuracies"].as_f64(), Some(1.0));
    assert_eq!(last["validation_preference"]["rewards/accuracies"].as_f64(), Some(1.0));
    // The loss is not a mean over tokens in nats.
    assert!(last["validation_perplexity"].is_null() && last["validation_accuracy"].is_null(), "{last}");
}
