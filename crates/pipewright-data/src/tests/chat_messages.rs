//! Messages as records have them: nulls, reasoning under other names, JSON in texts, and keys that say what counts.

use super::{has_error, open_files};
use crate::{ChatTemplate, DataConfig, TrainOn};

/// A template that writes the keys of messages.
const KEYS: &str = "{% for m in messages %}{{ m }}{{ tools }};{% endfor %}";

/// Opens a chat with a template. Returns the text of its row and the parts that count, or the error.
fn rendered(
    template: &str,
    record: &str,
    change: impl FnOnce(&mut DataConfig),
) -> Result<(String, Vec<String>), String> {
    let files: &[(&str, &[u8])] = &[("a.jsonl", record.as_bytes()), ("t.jinja", template.as_bytes())];
    let mut rows = open_files(files, 256, 1, |config| {
        let template = config.path.pop().expect("two files");
        (config.seq_len, config.chat_template) = (2000, Some(ChatTemplate::File(template.into())));
        change(config);
    })?;
    let batch = rows.next_batch(1).expect("it is in memory");
    let text = |ids: &[i32]| String::from_utf8(ids.iter().map(|id| *id as u8).collect()).expect("UTF-8");
    let length = batch.inputs.iter().position(|id| *id == 0).unwrap_or(batch.inputs.len());
    let parts = batch.targets.split(|id| *id == crate::IGNORED_TARGET).filter(|part| !part.is_empty());
    Ok((text(&batch.inputs[..length]), parts.map(text).collect()))
}

fn all(config: &mut DataConfig) {
    config.train_on = Some(TrainOn::All);
}

fn check(template: &str, record: &str, expected: &str) {
    // The last byte of a text is only a target.
    let (text, _) = rendered(&format!("{template}."), record, all).expect("good data");
    assert_eq!(text, expected, "{record}");
}

fn check_refused(template: &str, record: &str, part: &str) {
    has_error(rendered(template, record, |_| {}), part);
}

/// Returns a chat with a message of the assistant that has other keys too.
fn chat(keys: &str) -> String {
    format!(r#"{{"messages": [{{"role": "assistant", "content": "B", {keys}}}]}}"#)
}

#[test]
fn keys_without_a_value_are_missing() {
    let plain = "{'role': 'assistant', 'content': 'B'}None;";
    check(KEYS, &chat(r#""tool_calls": null, "name": null, "thinking": null, "weight": null"#), plain);
    // Only the keys of the message itself.
    let nested = r#""parts": [{"image": null}]"#;
    check(KEYS, &chat(nested), "{'role': 'assistant', 'content': 'B', 'parts': [{'image': None}]}None;");
    check("{{ 'content' in messages[0] }}", r#"{"messages": [{"role": "user", "content": null}]}"#, "False");
    check(
        KEYS,
        &chat(r#""a": 1"#).replace("]}", r#"], "tools": null}"#),
        "{'role': 'assistant', 'content': 'B', 'a': 1}None;",
    );
}

#[test]
fn reasoning_has_several_names() {
    let read = "{{ messages[0].reasoning_content }},{{ messages[0].thinking }}";
    check(read, &chat(r#""thinking": "a""#), "a,a");
    check(read, &chat(r#""reasoning": "a""#), "a,a");
    check(read, &chat(r#""reasoning_content": "a""#), "a,a");
    check(read, &chat(r#""reasoning_content": null, "reasoning": "a""#), "a,a");
    check(read, &chat(r#""reasoning_content": "a", "thinking": "b""#), "a,b");
}

#[test]
fn tools_and_calls_may_be_json_in_a_text() {
    let calls = "{{ messages[0].tool_calls | tojson }}";
    let table = r#"[{"function": {"name": "f", "arguments": {"a": 1e-05}}}]"#;
    check(
        calls,
        &chat(r#""tool_calls": "[{\"function\": {\"name\": \"f\", \"arguments\": {\"a\": 0.00001}}}]""#),
        table,
    );
    check(
        calls,
        &chat(r#""tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1e-5}"}}]"#),
        table,
    );
    check(
        calls,
        &chat(r#""tool_calls": [{"name": "f", "arguments": "{}"}]"#),
        r#"[{"name": "f", "arguments": {}}]"#,
    );
    // A template that joins the arguments with other text gets the text.
    let joined = "{{ 'a' + messages[0].tool_calls[0].arguments }}";
    check(joined, &chat(r#""tool_calls": [{"arguments": "{\"a\":1}"}]"#), r#"a{"a":1}"#);
    let tools =
        |tools: &str| format!(r#"{{"messages": [{{"role": "user", "content": "A"}}], "tools": {tools}}}"#);
    check("{{ tools }}", &tools(r#""[{\"name\": \"f\"}]""#), "[{'name': 'f'}]");
    check("{{ tools }}", &tools(r#"["{\"name\": \"f\"}"]"#), "[{'name': 'f'}]");
    for wrong in [r#""f""#, r#"{"name": "f"}"#, "[1]", "3", r#"["f"]"#] {
        check_refused("", &tools(wrong), "`tools` is neither a list of tables nor a JSON text of one");
        let calls = chat(&format!(r#""tool_calls": {wrong}"#));
        check_refused("", &calls, "`tool_calls` of message 1 is neither a list of tables");
    }
    for wrong in [r#""f""#, "[1]", "3", r#""[1]""#] {
        let calls = chat(&format!(r#""tool_calls": [{{"function": {{"arguments": {wrong}}}}}]"#));
        check_refused("", &calls, "the arguments of a tool call of message 1 are neither a table");
    }
}

#[test]
fn messages_may_not_count() {
    let plain = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    let blocks = "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }};\
                  {% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}";
    let wide = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a:{{ m.content }};{% endgeneration %}\
                {% else %}u:{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    let record = |key: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "A", "weight": 1}}, {{"role": "assistant", "content": "B", {key}}},
            {{"role": "user", "content": "C", "train": false}}, {{"role": "assistant", "content": "D"}}]}}"#
        )
        .replace('\n', "")
    };
    let counted = |template: &str, key: &str| rendered(template, &record(key), |_| {}).expect("good data").1;
    for key in [
        r#""weight": 0"#,
        r#""weight": 0.0"#,
        r#""train": false"#,
        r#""training": false"#,
        r#""training": 0"#,
    ] {
        assert_eq!(counted(plain, key), ["D;"], "{key}");
        assert_eq!(counted(blocks, key), ["D;"], "{key}");
        assert_eq!(counted(wide, key), ["a:D;"], "{key}");
    }
    for key in [r#""weight": 1"#, r#""train": true"#, r#""training": null"#] {
        assert_eq!(counted(plain, key), ["B;", "D;"], "{key}");
    }
    check_refused(
        plain,
        &record(r#""weight": 0.5"#),
        "`weight` of message 2 is neither 0 or false nor 1 or true",
    );
    check_refused(
        plain,
        &record(r#""loss_mask": 1"#),
        "message 2 has the key `loss_mask`, which may say which of its tokens",
    );
    check_refused(plain, &record(r#""training_detail": []"#), "message 2 has the key `training_detail`");
    let user = record("\"a\": 1").replace("\"weight\": 1", "\"train\": true");
    check_refused(
        plain,
        &user,
        "message 1 says with `train` that its tokens count, and only the assistant's answers can",
    );
    let none = chat(r#""weight": 0"#);
    check_refused(plain, &none, "no token of the record counts in the loss");
    has_error(
        rendered(plain, &record(r#""weight": 0"#), all),
        "message 2 says that its tokens do not count, and `train_on = \"all\"`",
    );
}

#[test]
fn templates_have_the_line_ends_of_unix() {
    let template = "{% for m in messages %}\r\n{{ m.role }}\r\n{% endfor %}\r\na\rb";
    check(template, r#"{"messages": [{"role": "user", "content": "A"}]}"#, "user\na\nb");
}

/// Checks that a template is refused for a small chat.
fn check_limit(template: &str, part: &str) {
    check_refused(template, &chat("\"a\": 1"), part);
}

#[test]
fn templates_are_not_deep() {
    let check = check_limit;
    let deep = "is malformed in line 1: more than 64 brackets or blocks are inside each other, or more than 256 operators";
    let nested = |before: &str, middle: &str, after: &str| {
        format!("{{{{ {}{middle}{} }}}}", before.repeat(50_000), after.repeat(50_000))
    };
    for (before, middle, after) in [
        ("not ", "x", ""),
        ("-", "1", ""),
        ("(", "1", ")"),
        ("[", "1", "]"),
        ("{1:", "1", "}"),
        ("f(", "1", ")"),
        ("", "x", "|upper"),
        ("", "x", ".a"),
        ("", "x", "[0]"),
        ("", "x", "()"),
        ("", "1", " + 1"),
        ("", "1", " ~ 1"),
        ("", "1", " or 1"),
        ("", "1", " if 1 else 1"),
        ("", "1", " is defined"),
        ("", "1", " ** 1"),
        ("", "1", " % 1"),
    ] {
        check(&nested(before, middle, after), deep);
    }
    let blocks = |begin: &str, end: &str| format!("{}{}", begin.repeat(50_000), end.repeat(50_000));
    check(&blocks("{% if 1 %}", "{% endif %}"), deep);
    check(&blocks("{% for a in b %}", "{% endfor %}"), deep);
    check(&blocks("{% set a %}", "{% endset %}"), deep);
    check(&blocks("{% generation %}", "{% endgeneration %}"), deep);
    check(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(50_000)), deep);
    check(&format!("{{% set {}a{} = 1 %}}", "(".repeat(50_000), ")".repeat(50_000)), deep);
    check(&format!("{{% set a{} = 1 %}}", ".b".repeat(50_000)), deep);
    check(&nested("(", "", ""), "is malformed in line 1: a tag has no end");
    check(&" ".repeat(2 << 20), "is malformed: it has more than 1048576 bytes");
    check("{{ loop.cycle() }}", "is malformed in line 1: `cycle` needs values");
}

#[test]
fn values_of_templates_are_not_deep() {
    let deep = "a value has more than 300 lists inside each other";
    for value in ["[a]", "a, 1", "(a, 1)", "{'b': a}", "dict(b=a)", "a | batch(1) | list"] {
        let deeper = format!("{{% set a = {value} %}}").repeat(5_000);
        check_limit(&format!("{{% set a = [1] %}}{deeper}"), deep);
    }
    for value in ["a[0:]", "a | reverse", "a + []", "a * 1"] {
        let same = format!("{{% set a = {value} %}}").repeat(1_000);
        let message = r#"{"messages": [{"role": "user", "content": "A"}]}"#;
        check(&format!("{{% set a = [] %}}{same}{{{{ a | length }}}}"), message, "0");
    }
}

#[test]
fn templates_pay_for_what_they_read() {
    let steps = "the chat template takes more than ";
    let shared = "{% set a = [1, 1] %}".to_owned() + &"{% set a = [a, a] %}".repeat(60);
    check_limit(&shared, steps);
    let shared = "{% set a = [1, 1] %}".to_owned() + &"{% set a = [a, a] %}".repeat(12);
    let text = "{% set a = 'ab ' * 300000 %}".to_owned();
    for (value, operations) in [
        (
            shared,
            "{[a]:1} | [a] == [a] | loop.changed(a) | {'x':a,'y':a}|dictsort(by='value') | [a].index(a) | a < a | [a]|sort",
        ),
        (
            text.clone(),
            "a|wordcount | a == a | a[::-1] | a[999999] | a is lower | a is sameas a | a.find('c') | a|attr(a) | {a:1}",
        ),
        (
            text,
            "loop.changed(a) | '%s' % a | '{}'.format(a) | messages|map(attribute=a)|list | a.split() | a|last | a in [a]",
        ),
        (
            "{% set a = range(100000) %}".to_owned(),
            "a|join | a|sort | a[0:] | a + a | a|batch(2) | a == a | 'b' in a",
        ),
    ] {
        for operation in operations.split(" | ") {
            check_limit(
                &format!("{value}{{% for b in range(100000) %}}{{% set c = {operation} %}}{{% endfor %}}"),
                if operation.starts_with("{[") { "cannot be a key" } else { steps },
            );
        }
    }
    let pattern = "{% set a = 'a' * 100000 %}{{ ";
    check_limit(&format!("{pattern}('{{0}}' * 100000).format(a) }}}}"), steps);
    check_limit(&format!("{pattern}('%(a)s' * 100000) % {{'a': a}} }}}}"), steps);
    check_limit("{{ ('{0:9999}' * 100000).format(1) }}", steps);
    check_limit(
        "{% macro f(a, n) %}{% if n %}{{ f(a + a, n - 1) }}{% endif %}{% endmacro %}{{ f([1], 40) }}",
        steps,
    );
    check_limit("{{ none[1:] }}", "a value of the type none has no parts");
    check_limit("{{ a[1:] }}", "a value of the type undefined has no parts");
}

#[test]
fn templates_end() {
    let check = check_limit;
    let steps = "the chat template takes more than ";
    check("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", steps);
    check(
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(18) }}",
        steps,
    );
    check(
        "{% set ns = namespace(x='ab') %}{% for a in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        steps,
    );
    check("{% for a in range(100000) %}{{ 'x' * 10000 }}{% endfor %}", steps);
    check("{{ 'a'.zfill(10 ** 12) }}", steps);
    check("{{ 'a' | indent(10 ** 12, true) }}", steps);
    check("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}", "a namespace cannot keep a namespace");
    check(
        "{% set ns = namespace(x=[]) %}{% for a in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "a value has more than 300 lists inside each other",
    );
    check("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template fails in line 1: ");
    check("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "the chat template fails in line 1: ");
    check("{{ range(10 ** 9) }}", "the chat template fails in line 1: ");
    check(
        "{% block a %}{{ self.a() }}{% endblock %}",
        "the statement `block` is not available in chat templates",
    );
    check("{{ '%1000000000d' % 1 }}", "a width or a precision of a pattern has more than four digits");
    check("{{ '{:1000000000}'.format(1) }}", "a width or a precision of a pattern has more than four digits");
    check("{% include 'chat template' %}", "the statement `include` is not available in chat templates");
}
