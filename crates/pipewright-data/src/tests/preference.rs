//! Tests of the records of preference training.

use super::{has_error, open_files};
use crate::{
    ChatTemplate, DOCUMENTS, DataConfig, IGNORED_TARGET, LongRecords, PreferenceData, ROLES, SEQUENCES,
    TokenRows,
};

const PAIRS: PreferenceData = PreferenceData::Pairs { whole_chosen: false };
const UNPAIRED: PreferenceData = PreferenceData::Unpaired { block: 2 };

fn open(
    content: &str,
    preference: PreferenceData,
    change: impl FnOnce(&mut DataConfig),
) -> Result<TokenRows, String> {
    open_files(&[("a.jsonl", content.as_bytes())], 256, 0, |config| {
        config.seq_len = 20;
        config.shuffle = false;
        config.preference = Some(preference);
        change(config);
    })
}

/// Returns the sequences of all rows: the role, the number, the text and its completion.
fn sequences(rows: &TokenRows) -> Vec<(i32, i32, String, String)> {
    let batch = rows.batch(&rows.all_places()).expect("rows");
    let side = |name: &str| &batch.side.iter().find(|side| side.name == name).expect("a side input").values;
    let (roles, numbers, documents) = (side(ROLES), side(SEQUENCES), side(DOCUMENTS));
    let mut found: Vec<(i32, i32, String, String)> = Vec::new();
    for (place, role) in roles.iter().enumerate().filter(|(_, role)| **role != 0) {
        let begins = place % batch.seq_len == 0 || documents[place] != documents[place - 1];
        if begins {
            found.push((role.abs(), numbers[place], String::new(), String::new()));
        }
        let (_, number, text, completion) = found.last_mut().expect("it has begun");
        assert_eq!(*number, numbers[place]);
        text.push(batch.inputs[place] as u8 as char);
        if *role > 0 {
            completion.push(batch.targets[place] as u8 as char);
        }
    }
    found
}

fn check(content: &str, preference: PreferenceData, expected: &[(i32, &str, &str)]) {
    let found = sequences(&open(content, preference, |_| {}).expect("they are records"));
    assert!((1..).zip(&found).all(|(number, found)| found.1 == number), "{found:?}");
    let found: Vec<(i32, &str, &str)> =
        found.iter().map(|(role, _, text, completion)| (*role, text.as_str(), completion.as_str())).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_pair_is_two_sequences_of_one_row() {
    let expected = [(1, "qa", "ab"), (2, "q", "c")];
    check(r#"{"prompt": "q", "chosen": "ab", "rejected": "c"}"#, PAIRS, &expected);
}

#[test]
fn a_prompt_that_is_not_written_is_what_both_completions_begin_with() {
    let expected = [(1, "to be a", " ab"), (2, "to be c", " cd")];
    check(r#"{"chosen": "to be ab", "rejected": "to be cd"}"#, PAIRS, &expected);
    let chat = |chosen: &str, rejected: &str, rest: &str| {
        let message = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
        let list = |texts: &[String]| format!("[{}]", texts.join(", "));
        let (prompt, [chosen, rejected]) =
            (message("user", "q"), [chosen, rejected].map(|text| message("assistant", text)));
        if rest.is_empty() {
            let lists = [[prompt.clone(), chosen], [prompt, rejected]].map(|texts| list(&texts));
            format!(r#"{{"chosen": {}, "rejected": {}}}"#, lists[0], lists[1])
        } else {
            let [prompt, chosen, rejected] = [prompt, chosen, rejected].map(|text| list(&[text]));
            format!(r#"{{"prompt": {prompt}, "chosen": {chosen}, "rejected": {rejected}}}"#)
        }
    };
    let of = |record: &str| {
        let rows = open(record, PAIRS, |config| {
            config.seq_len = 200;
            config.chat_template = Some(ChatTemplate::Named("chatml".to_owned()));
        });
        sequences(&rows.expect("a pair"))
    };
    let (implicit, written) = (of(&chat("ab", "c", "")), of(&chat("ab", "c", "written")));
    assert_eq!(implicit, written);
    // All tokens behind the prompt count, and so does what the template writes behind an answer.
    assert_eq!(written[0].3, "ab<|im_end|>\n");
}

#[test]
fn completions_of_a_block_are_exchanged() {
    let record = |prompt: &str, completion: &str, label: bool| {
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\", \"label\": {label}}}\n")
    };
    let records = record("p", "aa", true) + &record("q", "b", false) + &record("r", "cc", true);
    let expected = [
        (1, "pa", "aa"),
        (3, "p", "b"),
        (2, "q", "b"),
        (3, "qa", "aa"),
        // The last block has one record.
        (1, "rc", "cc"),
        (3, "rc", "cc"),
    ];
    check(&records, UNPAIRED, &expected);
}

#[test]
fn packed_rows_have_whole_records() {
    let record =
        |letter: char| format!("{{\"prompt\": \"{letter}\", \"chosen\": \"ab\", \"rejected\": \"c\"}}\n");
    let records: String = ('p'..'z').map(record).collect();
    let rows = |packed| open(&records, PAIRS, |config| config.packs_examples = packed).expect("pairs");
    let (packed, alone) = (rows(true), rows(false));
    // A record takes three of twenty places.
    assert_eq!((packed.rows(), alone.rows()), (2, 10));
    assert_eq!(sequences(&packed), sequences(&alone));
}

#[test]
fn all_tokens_of_chosen_sequences_may_have_targets() {
    let record = r#"{"prompt": "qr", "chosen": "ab", "rejected": "cd"}"#;
    let targets = |preference| {
        let rows = open(record, preference, |_| {}).expect("a pair");
        let batch = rows.batch(&rows.all_places()).expect("a row");
        batch
            .targets
            .iter()
            .filter(|target| **target != IGNORED_TARGET)
            .map(|id| *id as u8 as char)
            .collect::<String>()
    };
    assert_eq!(targets(PAIRS), "abcd");
    assert_eq!(targets(PreferenceData::Pairs { whole_chosen: true }), "rabcd");
}

#[test]
fn a_sequence_takes_half_a_row() {
    let record = r#"{"prompt": "q", "chosen": "abcdefghijklm", "rejected": "c"}"#;
    let rows = open(record, PAIRS, |_| {}).expect("it is cut");
    assert_eq!(sequences(&rows)[0].3, "abcdefghij");
    let long = rows.long_records().expect("one").to_string();
    assert_eq!(long, "1 of 1 records do not fit into half a row of seq_len 20: cut");
    let refuse = |config: &mut DataConfig| config.long_records = LongRecords::Refuse;
    has_error(
        open(record, PAIRS, refuse).map(|rows| rows.rows()),
        "a.jsonl:1: the record has 14 tokens, and half a row of seq_len 20 takes 11; raise",
    );
    let record = r#"{"prompt": "a long question", "chosen": "a", "rejected": "c"}"#;
    has_error(
        open(record, PAIRS, |_| {}).map(|rows| rows.rows()),
        "a.jsonl:1: after the cut to the 11 tokens of half a row of seq_len 20, nothing",
    );
}

#[test]
fn records_that_cannot_be_used_are_refused() {
    let check = |content: &str, preference, expected: &str| {
        has_error(open(content, preference, |_| {}).map(|rows| rows.rows()), expected);
    };
    check(
        r#"{"prompt": "q", "chosen": "a"}"#,
        PAIRS,
        "a.jsonl:1: the record has no `rejected`, and the loss takes pairs",
    );
    check(
        r#"{"prompt": "q", "completion": "a"}"#,
        UNPAIRED,
        "a.jsonl:1: the record has no `label`, and the loss takes",
    );
    check(r#"{"prompt": "q", "chosen": "", "rejected": "c"}"#, PAIRS, "a.jsonl:1: `chosen` is empty");
    check(
        r#"{"prompt": "q", "completion": "", "label": true}"#,
        UNPAIRED,
        "a.jsonl:1: `completion` is empty",
    );
    check(
        r#"{"prompt": "q", "chosen": 4, "rejected": "c"}"#,
        PAIRS,
        "a.jsonl:1: `chosen` is neither a text nor a list of messages but a value of the type number",
    );
    check(
        r#"{"prompt": "q", "completion": "a", "label": "yes"}"#,
        UNPAIRED,
        "a.jsonl:1: `label` is neither true nor false but a value of the type string",
    );
    let others = open(r#"{"chosen": "a", "rejected": "b"}"#, PAIRS, |config| config.preference = None);
    has_error(others.map(|rows| rows.rows()), "write a `loss` in [preference]");
    check("[1, 2, 3]", PAIRS, "a.jsonl: preference training takes records with completions");
}

#[test]
fn all_tokens_of_scored_pairs_are_inputs_and_margins_are_their_numbers() {
    let records = "{\"prompt\": \"q\", \"chosen\": \"ab\", \"rejected\": \"c\", \"margin\": 0.5}\n\
                   {\"chosen\": \"12345678abc\", \"rejected\": \"12345678dd\"}\n";
    let rows = open(records, PreferenceData::Scored, |_| {}).expect("they are records");
    let margin = 0.5f32.to_bits().cast_signed();
    let found = sequences(&rows);
    let texts: Vec<(i32, i32, &str)> =
        found.iter().map(|(role, number, text, _)| (*role, *number, text.as_str())).collect();
    // A row has 20 tokens, and a sequence takes at most half of it.
    let expected = [(1, margin, "qab"), (2, margin, "qc"), (1, 0, "12345678ab"), (2, 0, "12345678dd")];
    assert_eq!(texts, expected);
    assert_eq!(rows.long_records().map(|count| count.long), Some(1));
    // Other margins are other data.
    let hash = |margin: &str| {
        let rows = open(&records.replace("0.5", margin), PreferenceData::Scored, |_| {}).expect("records");
        rows.identity().expect("it is in memory").hash
    };
    assert_ne!(hash("0.5"), hash("0.25"));
}

#[test]
fn a_sequence_of_one_token_is_scored() {
    let record = "{\"chosen\": \"a\", \"rejected\": \"b\"}\n";
    let rows = open(record, PreferenceData::Scored, |_| {}).expect("it is a record");
    let texts: Vec<String> = sequences(&rows).into_iter().map(|(_, _, text, _)| text).collect();
    assert_eq!((texts, rows.bad_records()), (vec!["a".to_owned(), "b".to_owned()], None));
    // Other losses need a token before a target.
    has_error(
        open(record, PAIRS, |_| {}).map(|rows| rows.rows()),
        "no token of the record counts in the loss",
    );
    // Nothing is left of completions after a long prompt.
    let long = r#"{"prompt": "1234567890", "chosen": "a", "rejected": "b"}"#;
    has_error(
        open(long, PreferenceData::Scored, |_| {}).map(|rows| rows.rows()),
        "after the cut to the 10 tokens",
    );
}

/// Opens texts with labels.
fn open_labelled(content: &str, change: impl FnOnce(&mut DataConfig)) -> Result<TokenRows, String> {
    open_files(&[("a.jsonl", content.as_bytes())], 256, 0, |config| {
        config.seq_len = 5;
        config.shuffle = false;
        config.labels = ["no", "yes"].map(str::to_owned).to_vec();
        change(config);
    })
}

/// A row of Parquet has both columns.
#[test]
fn a_labelled_record_is_a_chat_or_a_text_whose_other_keys_are_null() {
    let texts = |content: &str| {
        let change = |config: &mut DataConfig| {
            config.chat_template = Some(ChatTemplate::Named("chatml".to_owned()));
            config.seq_len = 99;
        };
        let mut rows = open_labelled(content, change).expect("they are records");
        let ids = rows.next_row_parts().expect("a row").remove(0).ids;
        String::from_utf8(ids[..ids.len() - 1].iter().map(|id| *id as u8).collect()).expect("UTF-8")
    };
    let chat = r#""messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]"#;
    let rendered = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n";
    assert_eq!(texts(&format!("{{{chat}, \"text\": null, \"label\": 1}}")), rendered);
    assert_eq!(texts(&format!("{{{chat}, \"text\": \"other\", \"label\": 1}}")), rendered);
    assert_eq!(texts(r#"{"messages": null, "text": "ab", "label": 1}"#), "ab");
    let none = open_labelled(r#"{"messages": null, "text": null, "label": 1}"#, |_| {});
    has_error(none.map(|rows| rows.rows()), "the record has no `text`");
    let none = open_labelled(r#"{"text": "a", "label": null}"#, |_| {});
    has_error(none.map(|rows| rows.rows()), "the record has no `label`");
}

#[test]
fn a_label_is_the_target_of_the_last_token_that_is_scored() {
    let records = "{\"text\": \"ab\", \"label\": 1}\n{\"text\": \"abcdefg\", \"label\": \"no\"}\n";
    let rows = open_labelled(records, |_| {}).expect("they are records");
    let batch = rows.batch(&rows.all_places()).expect("rows");
    let none = IGNORED_TARGET;
    assert_eq!(batch.inputs, [97, 98, 0, 0, 0, 97, 98, 99, 100, 101]);
    assert_eq!(batch.targets, [none, 1, none, none, none, none, none, none, none, 0]);
    assert_eq!(rows.counted_targets().expect("it is in memory"), Some(2));
    assert_eq!(rows.long_records().map(|count| count.long), Some(1));
    let packed =
        open_labelled("{\"text\": \"ab\", \"label\": 1}\n{\"text\": \"cde\", \"label\": 0}\n", |config| {
            config.packs_examples = true;
        });
    let packed = packed.expect("they are records");
    let batch = packed.batch(&packed.all_places()).expect("rows");
    assert_eq!((batch.inputs, batch.targets), (vec![97, 98, 99, 100, 101], vec![none, 1, none, none, 0]));
}
