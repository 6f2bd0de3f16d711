//! Tests of what a resume refuses. The mark `kept` in the table of keys says the same: each key is changed, and the
//! descriptions that a resume compares are equal or not.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::{describe, differences};
use crate::settings::{Base, Settings, Surroundings, kept_marks};
use crate::training::model::read_model;
use crate::training::prepare::prepare_settings;

const LORA: &[&str] = &["model.from=MODELS/llama-tiny", "adapter.kind=lora"];
const DPO: &[&str] = &[
    "model.from=MODELS/llama-tiny",
    "adapter.kind=lora",
    "data.path=FOLDER/pairs.jsonl",
    "preference.loss=dpo",
    "data.seq_len=128",
];
const KTO: &[&str] = &[
    "model.from=MODELS/llama-tiny",
    "adapter.kind=lora",
    "data.path=FOLDER/pairs.jsonl",
    "preference.loss=kto",
    "data.seq_len=128",
    "pipeline.microbatch_size=2",
];
const DOCUMENTS: &[&str] = &["data.bos_id=0", "data.packed=true"];
const CHATS: &[&str] = &["data.path=FOLDER/chats.jsonl", "data.chat_template=chatml"];
const DATED: &[&str] = &[
    "data.path=FOLDER/chats.jsonl",
    "data.chat_template=gpt_oss",
    "data.date=\"2024-07-26\"",
    "data.seq_len=512",
];
const CUT: &[&str] = &["pipeline.partition=explicit", "pipeline.boundaries=[4]"];
const OFFLOAD: &[&str] = &["pipeline.recompute=stage", "pipeline.offload=file"];
const GREEDY: &[&str] = &["pipeline.schedule=zb-greedy"];
const LOOPS: &[&str] = &["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2"];
const LOOPS_H1: &[&str] = &["pipeline.schedule=interleaved-zb-h1", "pipeline.stages_per_rank=2"];
const REPLICAS: &[&str] = &["mesh.data_parallel=2"];
const SHARDED: &[&str] = &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];
const MIXTURE: &[&str] = &["model.architecture=qwen3_moe"];
const BALANCED: &[&str] = &["model.architecture=deepseek_v3"];
const SGD: &[&str] = &["optimizer.name=sgd", "optimizer.momentum=0.5"];
const WSD: &[&str] = &["optimizer.schedule=wsd"];
const EVALUATED: &[&str] = &["data.validation_share=0.1", "run.eval_every=10"];
const SAVED: &[&str] = &["run.checkpoint_every=auto"];
const VERIFIED: &[&str] = &["run.verify=on-suspicion"];
const COPIED: &[&str] = &["run.copy_every=10"];

/// A key with another value, and settings that the run has before and after the change, without the key if it is
/// among them.
type Change = (&'static str, &'static [&'static str]);

const CHANGES: &[Change] = &[
    ("adapter.kind=lora", &["model.from=MODELS/llama-tiny"]),
    ("adapter.rank=4", LORA),
    ("adapter.alpha=3.5", LORA),
    ("adapter.dropout=0.1", LORA),
    ("adapter.rslora=true", LORA),
    ("adapter.dora=true", LORA),
    ("adapter.targets=[\"q_proj\"]", LORA),
    ("adapter.modules_to_save=[\"lm_head\"]", LORA),
    (
        "adapter.path=MODELS/lora/../lora/llama-tiny",
        &["model.from=MODELS/llama-tiny", "adapter.kind=lora", "adapter.path=MODELS/lora/llama-tiny"],
    ),
    ("preference.loss=ipo", DPO),
    ("preference.beta=0.2", DPO),
    ("preference.label_smoothing=0.1", DPO),
    ("preference.margin=0.2", &["data.path=FOLDER/pairs.jsonl", "preference.loss=simpo"]),
    (
        "preference.center_rewards_coefficient=0.1",
        &["data.path=FOLDER/pairs.jsonl", "preference.loss=reward", "data.seq_len=128"],
    ),
    ("preference.desirable_weight=2.0", KTO),
    ("preference.undesirable_weight=2.0", KTO),
    ("preference.reference=FOLDER/reference.json", DPO),
    ("data.path=FOLDER/a.txt", &[]),
    (
        "data.mix=[{ path = \"FOLDER/a.txt\", weight = 0.7 }, { path = \"FOLDER/b.txt\", weight = 0.3 }]",
        &["data.mix=[{ path = \"FOLDER/a.txt\", weight = 0.5 }, { path = \"FOLDER/b.txt\", weight = 0.5 }]"],
    ),
    ("data.seq_len=128", &[]),
    ("data.shuffle=false", &[]),
    ("data.validation=[\"FOLDER/a.txt\"]", &["data.validation=[\"FOLDER/b.txt\"]", "run.eval_every=10"]),
    ("data.validation_share=0.2", EVALUATED),
    ("data.bos_id=1", &["data.bos_id=0"]),
    ("data.packed=true", &["data.bos_id=0"]),
    ("data.restart_positions=true", DOCUMENTS),
    ("data.keys={ text = \"content\" }", &["data.path=FOLDER/texts.jsonl"]),
    ("data.chat_template=qwen3", CHATS),
    (
        "data.chat_template_kwargs={ end = \"!\" }",
        &["data.path=FOLDER/chats.jsonl", "data.chat_template=FOLDER/turns.jinja"],
    ),
    ("data.bad_records=5", CHATS),
    ("data.train_on=all", CHATS),
    ("data.labels=[\"b\", \"a\"]", &["data.path=FOLDER/labels.jsonl", "data.labels=[\"a\", \"b\"]"]),
    (
        "data.long_records=skip",
        &[
            "data.path=FOLDER/chats.jsonl",
            "data.chat_template=chatml",
            "data.seq_len=100",
            "data.long_records=cut",
        ],
    ),
    ("data.date=\"2025-01-02\"", DATED),
    ("pipeline.ranks=1", &[]),
    ("pipeline.stages_per_rank=3", LOOPS),
    ("pipeline.schedule=gpipe", &[]),
    ("pipeline.microbatches=4", &[]),
    ("pipeline.microbatch_size=2", &[]),
    ("pipeline.partition=even", &[]),
    ("pipeline.boundaries=[3]", CUT),
    ("pipeline.layout=E A*3 | A*5 L", &["pipeline.layout=E A*4 | A*4 L"]),
    ("pipeline.head_parts=2", &[]),
    ("pipeline.embedding_parts=2", &[]),
    ("pipeline.threads_per_rank=2", &[]),
    ("pipeline.profile_ranks=[0, 2]", &[]),
    ("pipeline.recompute=stage", &[]),
    ("pipeline.offload=none", OFFLOAD),
    ("pipeline.offload_folder=FOLDER", OFFLOAD),
    ("pipeline.group_size=4", LOOPS),
    ("pipeline.wide_warmup=true", LOOPS_H1),
    ("pipeline.memory_limit=3", GREEDY),
    ("pipeline.costs=F=1,I=2,W=1,hop=0", GREEDY),
    ("pipeline.overlap=true", LOOPS),
    ("pipeline.slices=4", &["pipeline.schedule=seq1f1b", "pipeline.slices=2"]),
    ("mesh.data_parallel=2", &[]),
    ("mesh.batch_shares=[3, 1]", &["mesh.data_parallel=2", "pipeline.microbatch_size=2"]),
    ("mesh.data_parallel_mode=sharded", REPLICAS),
    ("mesh.tensor_parallel=2", &[]),
    ("mesh.whole_experts=true", &["model.architecture=qwen3_moe", "mesh.tensor_parallel=2"]),
    ("mesh.sequence_parallel=true", &["mesh.tensor_parallel=2"]),
    ("mesh.expert_parallel=2", &["model.architecture=qwen3_moe", "mesh.data_parallel=2"]),
    ("mesh.unshard_window=2", &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]),
    ("mesh.unshard_lookahead=1", SHARDED),
    (
        "mesh.keep_gathered=true",
        &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", "run.accumulate=2"],
    ),
    ("mesh.reduce_wait=deferred", REPLICAS),
    ("optimizer.name=adam", &[]),
    ("optimizer.learning_rate=1e-3", &[]),
    ("optimizer.betas=[0.8, 0.9]", &[]),
    ("optimizer.eps=1e-7", &[]),
    ("optimizer.momentum=0.7", SGD),
    ("optimizer.nesterov=true", SGD),
    ("optimizer.weight_decay=0.2", &[]),
    ("optimizer.no_decay=[\"norm\"]", &[]),
    ("optimizer.clip_norm=2.0", &[]),
    ("optimizer.clip_value=2.0", &[]),
    ("optimizer.post_validation=true", &[]),
    ("optimizer.delay=1", &[]),
    ("optimizer.delay_correction=error-feedback", &["optimizer.delay=1"]),
    ("optimizer.schedule=cosine", &[]),
    ("optimizer.min_learning_rate=1e-5", &["optimizer.schedule=cosine"]),
    ("optimizer.warmup_steps=5", &[]),
    ("optimizer.decay_steps=20", WSD),
    ("optimizer.restart_at=5", &[]),
    ("optimizer.expert_balance_speed=0.01", BALANCED),
    ("optimizer.groups=[{ parameters = [\"embedding\"], learning_rate = 1e-4 }]", &[]),
    ("run.steps=50", &[]),
    ("run.epochs=2", &[]),
    ("run.seed=7", &[]),
    ("run.out=FOLDER/out", &[]),
    ("run.checkpoint_every=10", &[]),
    ("run.failure_every=12h", SAVED),
    ("run.keep_checkpoints=2", &[]),
    ("run.deadline_seconds=30", &[]),
    ("run.restarts=1", &[]),
    ("run.replace_slow=true", &[]),
    ("run.replan=when-slow", &[]),
    ("run.verify=on-suspicion", &[]),
    ("run.replace_wrong=true", VERIFIED),
    ("run.grow=false", &[]),
    ("run.copy_every=10", &[]),
    ("run.copy_folder=FOLDER", COPIED),
    ("run.devices=[\"flex\"]", &[]),
    ("run.exclusive=true", &["pipeline.ranks=1"]),
    ("run.precision=bf16", &[]),
    ("run.exact=everywhere", &[]),
    ("run.loss_scale=1024", &["run.precision=f16"]),
    ("run.loss_scale_interval=10", &["run.precision=f16"]),
    ("run.timelines=4", &[]),
    ("run.tensorboard=true", &[]),
    ("run.planned_step_ms=2.0", &[]),
    ("run.label_smoothing=0.1", &[]),
    ("run.neftune_alpha=5.0", &[]),
    ("run.accumulate=2", &[]),
    ("run.rampup_steps=5", &["run.accumulate=2"]),
    ("run.fingerprint_every=2", &[]),
    ("run.eval_every=20", EVALUATED),
    ("run.eval_batches=2", EVALUATED),
    ("run.patience=2", EVALUATED),
    ("run.sample_prompts=[\"Once\"]", EVALUATED),
    (
        "run.sample_tokens=4",
        &["data.validation_share=0.1", "run.eval_every=10", "run.sample_prompts=[\"Once\"]"],
    ),
    ("model.architecture=qwen2", &[]),
    ("model.vocab_size=300", &[]),
    ("model.hidden_size=256", &[]),
    ("model.num_hidden_layers=6", &[]),
    ("model.tie_word_embeddings=true", &[]),
    ("model.num_experts=4", MIXTURE),
];

/// Keys whose values need what this build or machine lacks: files of another feature, side inputs of a hybrid model,
/// another device, or processes.
const NOT_CHANGED: [&str; 6] =
    ["data.tokenizer", "data.side", "data.validation_side", "pipeline.transport", "run.device", "run.copies"];

/// Writes the data of the runs.
fn write_data(folder: &Path) {
    let chat = |words: usize| {
        let (question, answer) = ("How are you? ".repeat(words), "Well. ".repeat(words));
        json!({"messages": [
            {"role": "user", "content": question}, {"role": "assistant", "content": answer},
        ]})
    };
    let chats = (1..60).map(|number| format!("{}\n", chat(1 + number % 3))).collect::<String>();
    let text = |number| json!({"text": format!("{number} one"), "content": format!("{number} two")});
    let texts = (1..2000).map(|number| format!("{}\n", text(number))).collect::<String>();
    let pair = json!({"prompt": "q", "chosen": "ab", "rejected": "c", "completion": "d", "label": true});
    let files = [
        ("empty.toml", String::new()),
        ("a.txt", "All is well that ends well. ".repeat(1000)),
        ("b.txt", "Much ado about nothing. ".repeat(1000)),
        ("chats.jsonl", chats),
        ("turns.jinja", "{% for turn in messages %}{{ turn.content }}{{ end }}{% endfor %}".to_owned()),
        ("texts.jsonl", texts),
        ("labels.jsonl", "{\"text\": \"to be\", \"label\": 1}\n".repeat(40)),
        ("pairs.jsonl", format!("{pair}\n").repeat(40)),
    ];
    for (name, content) in files {
        std::fs::write(folder.join(name), content).expect("the scratch folder takes files");
    }
}

/// Returns what a resume compares, of a run with these settings.
fn description(folder: &Path, settings: &[&str]) -> Result<serde_json::Value, String> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
    let [place, models] = [folder, &models].map(|path| path.to_str().expect("a path of UTF-8 text"));
    let texts: Vec<String> =
        settings.iter().map(|text| text.replace("FOLDER", place).replace("MODELS", models)).collect();
    let surroundings = Surroundings { working_folder: folder.to_owned(), variable: |_| None };
    let file = folder.join("empty.toml");
    let loaded =
        Settings::load(Base::File(&file), &texts, &surroundings).map_err(|error| error.to_string())?;
    let model = read_model(&loaded.settings).map_err(|error| error.text())?;
    let scheduled = loaded.scheduled().map_err(|_| "a plan chooses the schedule".to_owned())?;
    let prepared = prepare_settings(scheduled, Arc::new(model)).map_err(|error| error.text())?;
    describe(&prepared).map(serde_json::Value::Object).map_err(|error| error.text())
}

#[test]
fn a_resume_refuses_what_the_table_marks() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_data(folder.path());
    let mut faults = Vec::new();
    let mut left: BTreeSet<String> = kept_marks().map(|(key, _)| key).collect();
    for &(change, context) in CHANGES {
        let key = change.split_once('=').expect("a key with a value").0;
        let has_key = |text: &&&str| text.split_once('=').is_some_and(|(other, _)| other == key);
        let others: Vec<&str> = context.iter().filter(|text| !has_key(text)).copied().collect();
        let [before, after] = [context.to_vec(), [&others[..], &[change]].concat()]
            .map(|settings| description(folder.path(), &settings));
        let is_refused = match (before, after) {
            (Ok(before), Ok(after)) => !differences("run", Some(&after), Some(&before)).is_empty(),
            (before, after) => {
                faults.push(format!("{change} after {context:?}: {before:?}, {after:?}"));
                continue;
            }
        };
        left.remove(key);
        let is_marked =
            key.starts_with("model.") || kept_marks().any(|(name, is_kept)| name == key && is_kept);
        if is_refused != is_marked {
            faults.push(format!("{change}: a resume refuses it: {is_refused}, marked as kept: {is_marked}"));
        }
    }
    left.retain(|key| !key.starts_with("model.") && !NOT_CHANGED.contains(&key.as_str()));
    assert!(faults.is_empty() && left.is_empty(), "{}\nnot changed: {left:?}", faults.join("\n"));
}

#[test]
fn only_what_differs_is_named() {
    let (run, stored) = (json!({"a": 1, "b": 2}), json!({"a": 1, "b": 3, "c": null}));
    let found = differences("model", Some(&run), Some(&stored));
    assert_eq!(found, ["model.b was 3 and is 2", "model.c was null and is absent"]);
    assert!(differences("model", Some(&run), Some(&run)).is_empty());
}
