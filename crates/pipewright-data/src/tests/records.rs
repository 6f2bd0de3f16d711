//! Tests of the forms of records that other systems write, and of records that cannot be used.

use super::{has_error, open_files};
use crate::{ChatTemplate, DataConfig, LongRecords, RecordKeys, RowPart, TokenRows, TrainOn};

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}]}"#;

fn open(name: &str, content: &str, change: impl FnOnce(&mut DataConfig)) -> Result<TokenRows, String> {
    open_files(&[(name, content.as_bytes())], 256, 0, |config| {
        config.seq_len = 400;
        config.chat_template = Some(ChatTemplate::Named("chatml".to_owned()));
        change(config);
    })
}

/// Returns the text of each row, and the part of it that counts.
fn texts(mut rows: TokenRows) -> Vec<(String, String)> {
    let text = |ids: &mut dyn Iterator<Item = u32>| -> String {
        String::from_utf8(ids.map(|id| id as u8).collect()).expect("UTF-8")
    };
    let count = rows.rows();
    (0..count)
        .map(|_| {
            let RowPart { ids, counts } = rows.next_row_parts().expect("a row").remove(0);
            let counted = ids.iter().zip(&counts).filter(|(_, counts)| **counts).map(|(id, _)| *id);
            (text(&mut ids.iter().copied()), text(&mut { counted }))
        })
        .collect()
}

/// Checks that a record has the texts of the chat.
fn check_same(record: &str, chat: &str) {
    let of = |record: &str| texts(open("a.jsonl", record, |_| {}).expect(record));
    assert_eq!(of(record), of(chat), "{record}");
}

#[test]
fn chats_of_share_gpt_are_chats() {
    for answer in ["gpt", "model", "assistant"] {
        let record = format!(
            r#"{{"conversations": [{{"from": "human", "value": "q"}}, {{"from": "{answer}", "value": "ab"}}]}}"#
        );
        check_same(&record, CHAT);
    }
    check_same(&CHAT.replace("messages", "conversations"), CHAT);
    let system = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}]}"#;
    let record = r#"{"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "ab"}]}"#;
    check_same(record, system);
    let own = r#"{"system": "other", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "ab"}]}"#;
    check_same(own, system);
    let renamed = |config: &mut DataConfig| assert!(config.keys.rename("conversations", "turns"));
    let rows = open("a.jsonl", &record.replace("conversations", "turns"), renamed).expect("a chat");
    assert_eq!(rows.sources()[0].to_string(), "1 file of JSON lines with chats");
}

#[test]
fn a_key_that_is_null_is_missing() {
    let others = r#"{"text": null, "conversations": null, "prompt": null, "completion": null, "#;
    check_same(&CHAT.replacen('{', others, 1), CHAT);
    let completion = r#"{"prompt": "q", "completion": "ab"}"#;
    check_same(&completion.replacen('{', r#"{"messages": null, "#, 1), completion);
    let rows = open("a.jsonl", r#"{"messages": null, "text": "ab"}"#, |config| config.seq_len = 1);
    assert_eq!(rows.expect("a text").sources()[0].to_string(), "1 file of JSON lines with texts");
    let none = open("a.jsonl", r#"{"messages": null}"#, |_| {}).map(|rows| rows.rows());
    has_error(
        none,
        "a.jsonl:1: the record has the keys `messages`, and none of the keys that say what it contains has a value",
    );
    // A chat counts before a text.
    check_same(&CHAT.replacen('{', r#"{"text": "other", "#, 1), CHAT);
}

#[test]
fn a_weight_of_share_gpt_counts() {
    let record = r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "ab", "weight": 0}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "cd"}]}"#;
    let rows = texts(open("a.jsonl", record, |_| {}).expect("a chat"));
    assert_eq!(rows[0].1, "cd<|im_end|>");
}

#[test]
fn names_of_share_gpt_that_are_not_known_are_refused() {
    let record =
        r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "narrator", "value": "ab"}]}"#;
    has_error(
        open("a.jsonl", record, |_| {}).map(|rows| rows.rows()),
        "a.jsonl:1: message 2 is from `narrator`, which is none of human, user, gpt, model, assistant, system, tool",
    );
}

#[test]
fn questions_are_chats_whose_answers_count() {
    let rows = open("a.jsonl", r#"{"question": "q", "answer": "ab"}"#, |_| {}).expect("a pair");
    assert_eq!(rows.sources()[0].to_string(), "1 file of JSON lines with questions and answers");
    let counted = texts(rows).remove(0).1;
    assert_eq!(counted, "ab<|im_end|>");
    let chat = open("a.jsonl", CHAT, |config| config.train_on = Some(TrainOn::Completion)).expect("a chat");
    assert_eq!(texts(chat)[0].1, counted);
}

#[test]
fn a_list_has_the_rows_of_lines() {
    let records = [CHAT.to_owned(), CHAT.replace("ab", "x\\\"],[{\\\\"), CHAT.replace("ab", "\u{e9}")];
    let of = |name: &str, content: &str| texts(open(name, content, |_| {}).expect(content));
    let lines = of("a.jsonl", &records.join("\n"));
    assert_eq!(lines.len(), 3);
    for (before, between, after) in
        [("[", ",", "]"), ("\u{feff}[\n  ", ",\n  ", "\n]\n"), (" [ ", " , ", " ] \r\n")]
    {
        let list = format!("{before}{}{after}", records.join(between));
        for name in ["a.json", "a.jsonl"] {
            assert_eq!(of(name, &list), lines, "{list}");
        }
    }
    let rows = open("a.json", &format!("[{CHAT}]"), |_| {}).expect("a list");
    assert_eq!(rows.sources()[0].to_string(), "1 file of a JSON list with chats");
}

/// A file is read in parts of 64 KiB.
#[test]
fn a_list_is_read_across_the_ends_of_its_parts() {
    for length in [(1 << 16) - 120, 1 << 16, 200_000] {
        let texts_of = |name: &str, begin: &str, between: &str, end: &str| {
            let long = "\\\\\\\"]".repeat(length / 5);
            let records =
                ["a", &long, "b", &long[..long.len() - 5], "c"].map(|it| format!("{{\"text\": \"{it}\"}}"));
            let content = format!("{begin}{}{end}", records.join(between));
            let mut rows = open(name, &content, |_| {}).expect("texts");
            let count = rows.rows();
            (0..count).map(|_| rows.next_batch(1).expect("a row").inputs).collect::<Vec<_>>()
        };
        let lines = texts_of("a.jsonl", "", "\n", "");
        assert_eq!(texts_of("a.json", "[", ",", "]"), lines, "{length}");
        assert_eq!(texts_of("a.json", " [\n", "\n ,\n", "\n]\n"), lines, "{length}");
    }
}

#[test]
fn each_key_can_have_another_name() {
    for (index, key) in RecordKeys::KEYS.iter().enumerate() {
        let mut keys = RecordKeys::default();
        assert!(keys.rename(key, "other"), "{key}");
        let expected: Vec<&str> = RecordKeys::KEYS
            .iter()
            .enumerate()
            .map(|(at, key)| if at == index { "other" } else { key })
            .collect();
        assert_eq!(keys.names()[..RecordKeys::KEYS.len()], expected, "{key}");
    }
    assert!(!RecordKeys::default().rename("tools", "other"));
}

#[test]
fn a_malformed_list_is_refused_with_its_place() {
    let refused =
        |list: &str, part: &str| has_error(open("a.json", list, |_| {}).map(|rows| rows.rows()), part);
    let text = r#"{"text": "a"}"#;
    refused(&format!("[{text},\n {text}"), "a.json:2:15: the JSON list is malformed: the list has no end");
    refused(&format!("[{text} {text}]"), "a.json:1:16: the JSON list is malformed: there is no comma");
    refused(
        &format!("[{text},]"),
        "a.json:1:16: the JSON list is malformed: there is no record behind a comma",
    );
    refused(&format!("[{text}] x"), "a.json:1:17: the JSON list is malformed: something follows the list");
    refused("[{\"text\": \"a", "the list has no end");
    refused(&format!("[{text}, [1, 2]]"), "a.json:1:17: the file has both records and arrays of token ids");
    refused("[{\"text\": nul}]", "a.json:1:14: not JSON: expected ident; write records such as");
    refused("[\n {\n  \"text\" 3}]", "a.json:3:10: not JSON: expected `:`");
    refused("[\n {\"txt\": 3}]", "a.json:2:2: the record has the keys `txt`");
}

/// Opens one good record between bad ones, of which `most` are left out.
fn with_bad(bad: &[&str], most: u64) -> Result<TokenRows, String> {
    let lines = [&[CHAT], bad, &[CHAT]].concat().join("\n");
    open("a.jsonl", &lines, |config| config.bad_records = most)
}

#[test]
fn records_that_cannot_be_used_are_left_out() {
    let bad = [
        r#"{"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": "no answer"}]}"#,
        r#"{"conversations": [{"from": "narrator", "value": "b"}]}"#,
        r#"{"messages": []}"#,
        r#"{"txt": "a"}"#,
        r#"{"messages": [{"role": "user""#,
    ];
    let rows = with_bad(&bad, 6).expect("two good records");
    let left_out = rows.bad_records().expect("bad records");
    assert_eq!((rows.rows(), left_out.count), (2, 6));
    let first = "6 records cannot be used and are left out; the first of them: ";
    assert!(left_out.to_string().starts_with(first), "{left_out}");
    assert!(left_out.first.contains("a.jsonl:2:50: not JSON: "), "{left_out}");
    for (number, record) in bad.iter().enumerate() {
        assert_eq!(with_bad(&[record], 1).map(|rows| rows.rows()), Ok(2), "{number}");
        has_error(with_bad(&[record], 0).map(|rows| rows.rows()), "a.jsonl:2:");
    }
    assert_eq!(with_bad(&[], 6).map(|rows| rows.bad_records()), Ok(None));
}

#[test]
fn more_bad_records_are_refused_with_the_first() {
    let bad = [r#"{"messages": []}"#, r#"{"messages": 1}"#, r#"{"messages": 2}"#];
    has_error(
        with_bad(&bad, 2).map(|rows| rows.rows()),
        "a.jsonl:2: the chat has no messages; remove the record; this is the first of 3 records that cannot be used, and \
         `bad_records` in [data] leaves out at most 2",
    );
}

#[test]
fn data_without_a_good_record_is_refused() {
    let open = |lines: &str| open("a.jsonl", lines, |config| config.bad_records = 9).map(|rows| rows.rows());
    has_error(open(r#"{"messages": 1}"#), "a.jsonl:1: the chat is a number");
    has_error(open("{\"messages\": 1}\n{\"a\": 1}"), "; none of the 2 records can be used");
}

#[test]
fn mistakes_in_the_settings_are_not_left_out() {
    let refused = |lines: &str, change: &dyn Fn(&mut DataConfig), part: &str| {
        let rows = open("a.jsonl", lines, |config| {
            config.bad_records = 9;
            change(config);
        });
        has_error(rows.map(|rows| rows.rows()), part);
    };
    refused(CHAT, &|config| config.chat_template = None, "there is no chat template");
    refused(&format!("{CHAT}\n[1, 2]"), &|_| {}, "a.jsonl:2: the file has both records and arrays");
    refused("[1, x]", &|_| {}, "not an array of token ids");
    refused(
        CHAT,
        &|config| (config.seq_len, config.long_records) = (9, LongRecords::Refuse),
        "the record has ",
    );
    let own = |config: &mut DataConfig| {
        config.chat_template_kwargs = [("messages".to_owned(), true.into())].into();
    };
    refused(CHAT, &own, "`chat_template_kwargs` has `messages`, which the template gets from each chat");
}

#[test]
fn a_long_chat_is_cut_if_a_target_is_left() {
    let long = CHAT.replace("\"q\"", &format!("\"{}\"", "q".repeat(60)));
    let cut = |seq_len: usize| {
        let lines = format!("{CHAT}\n{long}");
        open("a.jsonl", &lines, |config| (config.seq_len, config.bad_records) = (seq_len, 1))
            .expect("a record")
    };
    let kept = cut(110);
    assert_eq!((kept.rows(), kept.bad_records()), (2, None));
    assert_eq!(texts(kept)[1].1, "a");
    let left_out = cut(109);
    assert_eq!(left_out.rows(), 1);
    let bad = left_out.bad_records().expect("nothing is left of the second");
    assert!(bad.first.contains("a.jsonl:2: after the cut to the 110 tokens"), "{bad}");
}

#[test]
fn templates_get_further_variables() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let template = folder.path().join("a.jinja");
    std::fs::write(&template, "{{ deep.a[0] }} {{ enable_thinking is false }} {{ messages[1].content }}")
        .expect("a file");
    let mut rows = open("a.jsonl", CHAT, |config| {
        config.chat_template = Some(ChatTemplate::File(template));
        config.train_on = Some(TrainOn::All);
        let deep = serde_json::json!({"a": [true]});
        config.chat_template_kwargs =
            [("enable_thinking".to_owned(), false.into()), ("deep".to_owned(), deep)].into();
    })
    .expect("a chat");
    let ids = rows.next_row_parts().expect("a row").remove(0).ids;
    assert_eq!(ids.iter().map(|id| *id as u8 as char).collect::<String>(), "True True ab");
}
