//! Chat templates next to transformers, and the tokens of chats that count in the loss.

use std::collections::BTreeMap;
use std::io::Write as _;

use minijinja::Value;
use serde::Deserialize;

use super::{has_error, open_files};
use crate::chat::json_text;
use crate::chat::template::ChatRenderer;
use crate::{ChatTemplate, DataConfig, LongRecords, TokenRows, TrainOn};

/// The texts that transformers renders. `tests/data/make_chats.py` writes it.
#[derive(Deserialize)]
struct Reference {
    tokens: BTreeMap<String, String>,
    date: String,
    chats: Vec<Value>,
    results: Vec<Rendered>,
    #[serde(default)]
    expressions: Vec<Expression>,
    /// The templates by name, apart from the templates of this crate.
    #[serde(default)]
    templates: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Rendered {
    template: String,
    chat: usize,
    prompt: bool,
    text: Option<String>,
    #[serde(default)]
    generated: Vec<[usize; 2]>,
    /// The message that the template raises; `None` for an error of Jinja itself.
    error: Option<String>,
}

#[derive(Deserialize)]
struct Expression {
    source: String,
    /// The text that transformers renders; `None` if it refuses the expression.
    text: Option<String>,
}

/// Returns a file below the folder of the crate.
fn file(path: &str) -> Option<String> {
    std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).ok()
}

/// Compares what transformers renders with what this crate does. Returns each difference with its place, and the
/// numbers of templates and texts that are the same.
fn differences(reference: &str) -> (Vec<String>, (usize, usize)) {
    // The chats have the numbers of the file.
    let parsed = json_text::parse(reference.as_bytes()).expect("JSON");
    let mut reference: Reference = serde_json::from_str(reference).expect("the reference");
    reference.chats = parsed.get_attr("chats").expect("chats").try_iter().expect("a list").collect();
    let date = Some(reference.date.parse().expect("a date"));
    let mut renderers: BTreeMap<&str, ChatRenderer> = BTreeMap::new();
    let (mut found, mut same) = (Vec::new(), 0);
    for expected in &reference.results {
        let Rendered { template, chat, prompt, text, generated, error } = expected;
        let renderer = renderers.entry(template).or_insert_with(|| {
            let own = || file(&format!("tests/data/templates/{template}.jinja"));
            let named = || file(&format!("src/settings/templates/{template}.jinja"));
            let source = reference.templates.get(template).cloned().or_else(own).or_else(named);
            ChatRenderer::new(&source.expect("a template"), reference.tokens.clone(), date).expect(template)
        });
        let [messages, tools] =
            ["messages", "tools"].map(|key| reference.chats[*chat].get_attr(key).expect(key));
        let messages: Vec<Value> = messages.try_iter().expect("a list").collect();
        let rendered = renderer.render(&messages, &tools, *prompt);
        let is_same = match (&rendered, text) {
            (Ok(rendered), Some(text)) => {
                let spans = rendered.generated.iter().map(|span| [span.start, span.end]);
                &rendered.text == text && spans.eq(generated.iter().copied())
            }
            (Err(problem), None) => problem.to_string().ends_with(error.as_deref().unwrap_or_default()),
            _ => false,
        };
        same += usize::from(is_same);
        if !is_same {
            found.push(format!(
                "{template}, chat {chat}, prompt {prompt}\n  transformers {text:?} {error:?} {generated:?}\n  here         {rendered:?}"
            ));
        }
    }
    for Expression { source, text } in &reference.expressions {
        let rendered = ChatRenderer::new(source, reference.tokens.clone(), date)
            .map_err(|malformed| malformed.reason)
            .and_then(|renderer| {
                renderer.render(&[], &Value::from(()), false).map_err(|problem| problem.to_string())
            });
        if rendered.as_ref().ok().map(|rendered| &rendered.text) == text.as_ref() {
            same += 1;
        } else {
            found.push(format!("{source}\n  transformers {text:?}\n  here         {rendered:?}"));
        }
    }
    (found, (renderers.len(), same))
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let reference = file("tests/data/chats.json").expect("the reference is there");
    let (found, same) = differences(&reference);
    assert!(found.is_empty(), "{} differences\n{}", found.len(), found.join("\n"));
    assert_eq!(same, (13, 815));
}

/// Runs with the templates of the packages of a Python: `PIPEWRIGHT_PYTHON` names one that has transformers, and
/// Axolotl or TRL.
#[test]
fn templates_of_packages_render_as_transformers_renders_them() {
    let Some(python) = std::env::var_os("PIPEWRIGHT_PYTHON") else {
        let _said = writeln!(std::io::stderr(), "SKIPPED: PIPEWRIGHT_PYTHON names no Python");
        return;
    };
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/make_chats.py");
    let output = std::process::Command::new(python).arg(script).arg("packages").output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (found, (templates, same)) = differences(&text);
    let _said = writeln!(std::io::stderr(), "{templates} templates, {same} texts are the same");
    assert!(found.is_empty(), "{} differences\n{}", found.len(), found.join("\n"));
}

/// Opens `.jsonl` lines with a named template, whose tokens are bytes.
fn open(lines: &str, template: &str, change: impl FnOnce(&mut DataConfig)) -> Result<TokenRows, String> {
    open_files(&[("a.jsonl", lines.as_bytes())], 256, 1, |config| {
        config.seq_len = 255;
        config.chat_template = Some(ChatTemplate::Named(template.to_owned()));
        change(config);
    })
}

/// Returns the inputs of the first row as text without its filling, and what of it counts, with `|` between
/// the parts.
fn first_row(rows: &mut TokenRows) -> (String, String) {
    let batch = rows.next_batch(1).expect("it is in memory");
    let text = |ids: &[i32]| String::from_utf8(ids.iter().map(|id| *id as u8).collect()).expect("UTF-8");
    let length = batch.inputs.iter().position(|id| *id == 0).unwrap_or(batch.inputs.len());
    let parts = batch.targets.split(|id| *id == crate::IGNORED_TARGET).filter(|part| !part.is_empty());
    (text(&batch.inputs[..length]), parts.map(text).collect::<Vec<_>>().join("|"))
}

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}]}"#;

fn check(template: &str, train_on: Option<TrainOn>, expected: &str) {
    let mut rows =
        open(&CHAT.replace('\n', ""), template, |config| config.train_on = train_on).expect("good data");
    assert_eq!(first_row(&mut rows).1, expected, "{template}, {train_on:?}");
}

#[test]
fn the_answers_of_the_assistant_count() {
    check("chatml", None, "B<|im_end|>|D<|im_end|>");
    check("chatml", Some(TrainOn::Assistant), "B<|im_end|>|D<|im_end|>");
    check("chatml", Some(TrainOn::Completion), "D<|im_end|>");
    let whole = "|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n\
                 <|im_start|>assistant\nD<|im_end|>\n";
    check("chatml", Some(TrainOn::All), whole);
    check("gemma", None, "B<end_of_turn>|D<end_of_turn>");
}

/// Opens the chat with a template in a file.
fn with_file(source: &str, change: impl FnOnce(&mut DataConfig)) -> Result<TokenRows, String> {
    let chat = CHAT.replace('\n', "");
    let files: &[(&str, &[u8])] = &[("a.jsonl", chat.as_bytes()), ("t.jinja", source.as_bytes())];
    open_files(files, 256, 1, |config| {
        let template = config.path.pop().expect("two files");
        (config.seq_len, config.chat_template) = (255, Some(ChatTemplate::File(template.into())));
        change(config);
    })
}

/// A template without `generation` blocks.
const PLAIN: &str = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

#[test]
fn without_generation_blocks_the_first_messages_are_compared() {
    let check = |source: &str, train_on, expected: &str| {
        let mut rows = with_file(source, |config| config.train_on = train_on).expect("good data");
        assert_eq!(first_row(&mut rows).1, expected, "{source}");
    };
    check(PLAIN, None, "B;|D;");
    check(PLAIN, Some(TrainOn::Completion), "D;");
    // Without a beginning of an answer, the name of the role counts too.
    let bare = PLAIN.split("{% if").next().expect("it has a beginning");
    check(bare, None, "a:B;|a:D;");
    // A template that shows only the last answer in full.
    let short = "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last or m.role == 'user' }};{% endfor %}\
                 {% if add_generation_prompt %}a:{% endif %}";
    check(short, Some(TrainOn::Completion), "D;");
    has_error(
        with_file(short, |_| {}),
        "a.jsonl:1: where the text of the first 2 messages ends cannot be found in the text of the chat",
    );
}

#[test]
fn a_completion_has_the_generation_blocks_behind_its_prompt() {
    let check = |answer: &str, expected: &str| {
        let source = format!(
            "{{% for m in messages %}}{{% if m.role == 'user' %}}u:{{{{ m.content }}}};{{% else %}}{answer}{{% endif %}}{{% endfor %}}\
             {{% if add_generation_prompt %}}a:{{% endif %}}"
        );
        let train_on = |config: &mut DataConfig| config.train_on = Some(TrainOn::Completion);
        let mut rows = with_file(&source, train_on).expect("good data");
        assert_eq!(first_row(&mut rows).1, expected, "{source}");
    };
    let block = |text: &str| format!("{{% generation %}}{text}{{% endgeneration %}}");
    check(&format!("a:{}", block("{{ m.content }};")), "D;");
    let two = format!("a:{},{}", block("<{{ m.content }}>"), block("{{ m.content }};"));
    check(&two, "<D>|D;");
    // Only the last answer has a block.
    check(&format!("{{% if loop.last %}}a:{}{{% else %}}a:B;{{% endif %}}", block("{{ m.content }};")), "D;");
    // The block includes the beginning of the answer.
    check(&block("a:{{ m.content }};"), "a:D;");
}

#[test]
fn completions_and_instructions() {
    let lines = r#"{"prompt": "to be ", "completion": "or not"}"#;
    let mut rows = open(lines, "chatml", |_| {}).expect("good data");
    assert_eq!(rows.sources()[0].to_string(), "1 file of JSON lines with prompts and completions");
    assert_eq!(first_row(&mut rows), ("to be or no".to_owned(), "or not".to_owned()));
    let all = |config: &mut DataConfig| config.train_on = Some(TrainOn::All);
    assert_eq!(first_row(&mut open(lines, "chatml", all).expect("good data")).1, "o be or not");
    let lines = r#"{"prompt": [{"role": "user", "content": "A"}], "completion": [{"role": "assistant", "content": "B"}]}"#;
    let mut rows = open(lines, "chatml", |_| {}).expect("good data");
    assert_eq!(first_row(&mut rows).1, "B<|im_end|>");
    let lines = r#"{"instruction": "Add", "input": "1 2", "output": "3"}"#;
    let mut rows = open(lines, "phi3", |_| {}).expect("good data");
    assert_eq!(
        first_row(&mut rows),
        ("<|user|>\nAdd\n\n1 2<|end|>\n<|assistant|>\n3<|end|>".to_owned(), "3<|end|>".to_owned())
    );
}

#[test]
fn records_may_be_longer_than_a_row() {
    let lines =
        "{\"prompt\": \"ab\", \"completion\": \"cdefgh\"}\n{\"prompt\": \"ab\", \"completion\": \"c\"}";
    let open = |long| open(lines, "chatml", |config| (config.seq_len, config.long_records) = (4, long));
    let error = open(LongRecords::Refuse).map(|rows| rows.rows()).expect_err("8 tokens");
    let message = "a.jsonl:1: the record has 8 tokens, and a row of seq_len 4 takes 5; raise seq_len, or write \
                   `long_records = \"cut\"` or \"skip\" in [data]";
    assert_eq!(error, message);
    let mut cut = open(LongRecords::Cut).expect("good data");
    assert_eq!((cut.rows(), first_row(&mut cut)), (2, ("abcd".to_owned(), "cde".to_owned())));
    let mut skipped = open(LongRecords::Skip).expect("good data");
    assert_eq!((skipped.rows(), first_row(&mut skipped)), (1, ("ab".to_owned(), "c".to_owned())));
    let found = |rows: &TokenRows| rows.long_records().map(|count| count.to_string());
    let words = "1 of 2 records do not fit into a row of seq_len 4: ";
    assert_eq!(found(&cut), Some(format!("{words}cut")));
    assert_eq!(found(&skipped), Some(format!("{words}skipped")));
}

#[test]
fn nothing_may_be_left_of_long_records() {
    let check = |lines: &str, long, expected: &str| {
        let rows = open(lines, "chatml", |config| (config.seq_len, config.long_records) = (4, long));
        assert_eq!(rows.map(|rows| rows.rows()), Err(expected.to_owned()));
    };
    let line = "{\"prompt\": \"abcde\", \"completion\": \"fg\"}";
    let cut = "a.jsonl:2: after the cut to the 5 tokens of a row of seq_len 4, nothing of the record counts in the loss; \
               raise seq_len, or write `long_records = \"skip\"` in [data]";
    check(&format!("{{\"prompt\": \"a\", \"completion\": \"b\"}}\n{line}"), LongRecords::Cut, cut);
    let skipped = "a.jsonl: all 2 records have more tokens than the 5 of a row of seq_len 4, and are skipped; raise \
                   seq_len, or write `long_records = \"cut\"` in [data]";
    check(&format!("{line}\n{line}"), LongRecords::Skip, skipped);
}

#[test]
fn packed_records_share_rows() {
    let lines = "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n{\"prompt\": \"e\", \"completion\": \"f\"}";
    let pack = |config: &mut DataConfig| (config.seq_len, config.packs_examples) = (5, true);
    let mut rows = open(lines, "chatml", pack).expect("good data");
    let batch = rows.next_batch(1).expect("it is in memory");
    assert_eq!((rows.rows(), batch.inputs), (1, vec![97, 98, 99, 101, 0]));
    assert_eq!(batch.targets, [-100, 99, 100, 102, -100]);
    let side: Vec<(&str, &[i32])> =
        batch.side.iter().map(|side| (side.name.as_str(), side.values.as_slice())).collect();
    let counts = ("row_valid_token_counts", &[4][..]);
    assert_eq!(side, [counts, ("doc_ids", &[0, 0, 0, 1, 2]), ("position_ids", &[0, 1, 2, 0, 0])]);
    let text = open_files(&[("a.txt", b"to be or not")], 256, 1, |config| config.packs_examples = true);
    has_error(text, "write `bos_id` in [data], the token id that begins each document");
}

#[test]
fn a_share_of_the_records_is_held_out() {
    let lines: Vec<String> =
        (0..5).map(|row| format!("{{\"prompt\": \"{row}\", \"completion\": \"x\"}}")).collect();
    let rows = open(&lines.join("\n"), "chatml", |_| {}).expect("good data");
    let whole = rows.identity().expect("it is in memory");
    let (mut training, mut held) = rows.hold_out(0.4).expect("it divides");
    assert_eq!(
        (training.rows(), held.rows(), held.counted_targets().expect("it is in memory")),
        (3, 2, Some(2))
    );
    assert_eq!((first_row(&mut training).0, first_row(&mut held).0), ("0".to_owned(), "3".to_owned()));
    assert!(
        training.identity().expect("it is in memory") != whole
            && training.identity().expect("it is in memory").hash
                != held.identity().expect("it is in memory").hash
    );
}

fn check_refused(lines: &str, template: &str, part: &str) {
    has_error(open(lines, template, |_| {}), part);
}

#[test]
fn chats_that_cannot_be_used() {
    let good = "{\"messages\": [{\"role\": \"user\", \"content\": \"A\"}, {\"role\": \"assistant\", \"content\": \"B\"}]}\n";
    let second = |messages: &str| format!("{good}{{\"messages\": {messages}}}");
    let twice = second(r#"[{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]"#);
    check_refused(&twice, "gemma", "a.jsonl:2: the chat template fails in line 7: the roles must alternate");
    let alone = second(r#"[{"role": "user", "content": "A"}]"#);
    check_refused(
        &alone,
        "chatml",
        "a.jsonl:2: no token of the record counts in the loss (the assistant's answers count)",
    );
    check_refused(&second("[]"), "chatml", "a.jsonl:2: the chat has no messages; remove the record");
    check_refused(&second("\"A\""), "chatml", "a.jsonl:2: the chat is a string and not a list of messages");
    check_refused(
        &second(r#"[{"role": "user", "content": "A"}, "B"]"#),
        "chatml",
        "message 2 is not a table with `role`",
    );
    let missing = second(r#"[{"role": "user"}]"#);
    check_refused(&missing, "chatml", "a.jsonl:2: the chat template fails in line 6: ");
    let marked = second(r#"[{"role": "user", "content": "\ufdd0"}, {"role": "assistant", "content": "B"}]"#);
    check_refused(&marked, "chatml", "a.jsonl:2: the chat contains a noncharacter from U+FDD0");
    let completion = |config: &mut DataConfig| config.train_on = Some(TrainOn::Completion);
    let chat = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"B\"}, {\"role\": \"user\", \"content\": \"A\"}]}";
    has_error(
        open(chat, "chatml", completion),
        "no token of the record counts in the loss (the completion counts)",
    );
    let empty = "{\"prompt\": \"a\", \"completion\": \"\"}";
    check_refused(
        empty,
        "chatml",
        "a.jsonl:1: no token of the record counts in the loss (the completion counts)",
    );
    check_refused(good, "chatmi", "there is no chat template named \"chatmi\"; name one of chatml, gemma,");
    let error = open(good, "chatml", |config| config.chat_template = None).map(|rows| rows.rows());
    assert!(
        error
            .expect_err("no template")
            .contains("there is no chat template next to the tokenizer: name a file or one of chatml")
    );
    let mixed = format!("{good}{{\"text\": \"A\"}}");
    check_refused(
        &mixed,
        "chatml",
        "a.jsonl:2: the record contains texts, and the records before it in the file contain chats",
    );
}

#[test]
fn templates_that_cannot_be_used() {
    let check = |source: &str, part: &str| {
        has_error(with_file(source, |_| {}), part);
    };
    check("{% for m in messages %}\n{{ m.content }", "the chat template t.jinja is malformed in line 2: ");
    check(
        "a\n{{ messages | nothing }}",
        "a.jsonl:1: the chat template fails in line 2: unknown filter: filter nothing is unknown",
    );
    let dated = "{{ strftime_now('%d %b %Y') }}";
    check(dated, "in line 1: the template asks for the date: write `data.date`, such as 2024-07-26");
    let mut rows = with_file(&format!("{dated}{PLAIN}"), |config| {
        config.date = "2024-07-06".parse().ok();
    })
    .expect("good data");
    assert!(first_row(&mut rows).0.starts_with("06 Jul 2024u:A;"));
}

#[cfg(feature = "tokenizers")]
mod with_a_tokenizer {
    use super::*;
    use crate::{TokenCodec, Tokenizer};

    /// A tokenizer of words that puts `<s>` (id 1) before a text. `ab` is one token across two messages.
    const TOKENIZER: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [
            {"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
            {"id": 2, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "model": {"type": "WordLevel", "vocab": {"?": 0, "<s>": 1, "</s>": 2, "to": 3, "be": 4, "or": 5, "not": 6},
            "unk_token": "?"}}"#;

    fn targets(lines: &str, settings: &str) -> (Vec<i32>, Vec<i32>) {
        targets_of(TOKENIZER, lines, settings)
    }

    fn targets_of(tokenizer: &str, lines: &str, settings: &str) -> (Vec<i32>, Vec<i32>) {
        let files: &[(&str, &[u8])] = &[
            ("a.jsonl", lines.as_bytes()),
            ("tokenizer.json", tokenizer.as_bytes()),
            ("tokenizer_config.json", settings.as_bytes()),
        ];
        let mut rows = open_files(files, 8, 1, |config| {
            config.path.truncate(1);
            let folder = std::path::Path::new(&config.path[0]).parent().expect("a folder");
            (config.seq_len, config.tokenizer) = (6, Tokenizer::File(folder.join("tokenizer.json")));
        })
        .expect("good data");
        let batch = rows.next_batch(1).expect("it is in memory");
        (batch.inputs, batch.targets)
    }

    #[test]
    fn the_template_and_the_special_tokens_are_next_to_it() {
        let lines = r#"{"messages": [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]}"#;
        let template = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }}\
                        {{ eos_token }}{% endgeneration %}{% else %} {{ m.content }}{% endif %}{% endfor %}";
        let settings = serde_json::json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>", "special": true},
            "chat_template": [{"name": "tool_use", "template": "{{ x.y.z }}"}, {"name": "default", "template": template}],
        });
        let (inputs, targets) = targets(lines, &settings.to_string());
        assert_eq!((inputs, targets), (vec![1, 3, 4, 5, 6, 0], vec![-100, -100, 5, 6, 2, -100]));
    }

    #[test]
    fn a_completion_ends_with_the_token_that_ends_a_text() {
        let lines = r#"{"prompt": "to be ", "completion": "or not"}"#;
        let (inputs, targets) = targets(lines, r#"{"eos_token": "</s>"}"#);
        assert_eq!((inputs, targets), (vec![1, 3, 4, 5, 6, 0], vec![-100, -100, 5, 6, 2, -100]));
    }

    #[test]
    fn the_token_that_ends_a_text_is_not_doubled() {
        let both = TOKENIZER.replacen(
            r#"{"Sequence": {"id": "A", "type_id": 0}}],"#,
            r#"{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],"#,
            1,
        );
        let both = both.replace(
            r#"{"id": "<s>", "ids": [1], "tokens": ["<s>"]}"#,
            r#"{"id": "<s>", "ids": [1], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}"#,
        );
        for completion in ["or not", "or not</s>"] {
            let lines = format!(r#"{{"prompt": "to be ", "completion": "{completion}"}}"#);
            for settings in [r#"{"eos_token": "</s>"}"#, "{}"] {
                let expected = (vec![1, 3, 4, 5, 6, 0], vec![-100, -100, 5, 6, 2, -100]);
                assert_eq!(targets_of(&both, &lines, settings), expected, "{lines}, {settings}");
            }
        }
    }

    #[test]
    fn runs_of_tokens_keep_the_spaces_between_them() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, TOKENIZER).expect("a file");
        let codec = TokenCodec::open(&Tokenizer::File(path)).expect("a tokenizer");
        let runs: [&[u32]; 3] = [&[1, 3], &[4], &[5, 6]];
        assert_eq!(codec.decode_runs(runs).expect("they are known"), ["<s> to", " be", " or not"]);
        let bytes = TokenCodec::open(&Tokenizer::Bytes).expect("bytes need no file");
        let runs: [&[u32]; 2] = [&[0x61, 0xc3], &[0xa9, 0x62]];
        assert_eq!(bytes.decode_runs(runs).expect("they are bytes"), ["a\u{fffd}", "\u{fffd}b"]);
    }
}
