//! The parts of chats that count, where the template does not mark them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use minijinja::Value;
use serde_json::json;

use crate::chat::spans::{Chat, MarkedText};
use crate::chat::template::ChatRenderer;
use crate::settings::chat_template::TEMPLATES;
use crate::{DataError, DataErrorKind, TrainOn};

fn renderer(source: &str) -> ChatRenderer {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = BTreeMap::from(tokens.map(|(name, text)| (name.to_owned(), text.to_owned())));
    ChatRenderer::new(source, tokens, "2024-07-06".parse().ok()).expect("it compiles")
}

/// Returns the source of a named template.
fn named(name: &str) -> &'static str {
    TEMPLATES.iter().find(|(known, _)| *known == name).expect("a template").1
}

/// Returns a template that writes the same text and marks nothing.
fn unmarked(source: &str) -> ChatRenderer {
    let source = source.replace("endgeneration", "endif").replace("generation %}", "if true %}");
    renderer(&source)
}

fn marked(
    renderer: &ChatRenderer,
    messages: &serde_json::Value,
    prompt: usize,
    train_on: TrainOn,
) -> Result<MarkedText, DataError> {
    let messages: Vec<Value> = serde_json::from_value(messages.clone()).expect("a list");
    Chat { messages: &messages, tools: &Value::from(()), prompt }.marked(renderer, train_on)
}

/// Returns the parts that count, with `|` between them.
fn counted(renderer: &ChatRenderer, messages: &serde_json::Value) -> String {
    let MarkedText { text, counted } =
        marked(renderer, messages, messages.as_array().map_or(0, Vec::len) - 1, TrainOn::Assistant)
            .unwrap_or_else(|problem| panic!("{messages}: {problem}"));
    counted.into_iter().map(|part| text[part].to_owned()).collect::<Vec<_>>().join("|")
}

fn user(content: &str) -> serde_json::Value {
    json!({"role": "user", "content": content})
}

fn answer(content: &str) -> serde_json::Value {
    json!({"role": "assistant", "content": content})
}

/// Returns an answer with a thought, under the names of both kinds of templates.
fn thinking(content: &str, thought: &str) -> serde_json::Value {
    json!({"role": "assistant", "content": content, "thinking": thought, "reasoning_content": thought})
}

fn call(content: &str, thought: &str) -> serde_json::Value {
    let call = json!({"type": "function", "function": {"name": "weather", "arguments": {"city": "Two"}}});
    let mut message = thinking(content, thought);
    message["tool_calls"] = json!([call]);
    message
}

fn result(content: &str) -> serde_json::Value {
    json!({"role": "tool", "content": content})
}

/// Checks that the same parts count as with blocks, apart from white space behind them.
fn check_blocks(name: &str, plain: &ChatRenderer, messages: &serde_json::Value) {
    let blocks = marked(&renderer(named(name)), messages, 0, TrainOn::Assistant);
    let blocks = blocks.unwrap_or_else(|problem| panic!("{name}, {messages}: {problem}"));
    let found = marked(plain, messages, 0, TrainOn::Assistant);
    let found = found.unwrap_or_else(|problem| panic!("{name}, {messages}: {problem}"));
    assert_eq!(found.text, blocks.text, "{name}, {messages}");
    assert_eq!(found.counted.len(), blocks.counted.len(), "{name}, {messages}");
    for (part, block) in found.counted.iter().zip(&blocks.counted) {
        let behind = found.text.get(block.end..part.end);
        let is_same = part.start == block.start && behind.is_some_and(|behind| behind.trim().is_empty());
        assert!(is_same, "{name}, {messages}: {:?}", &found.text[part.clone()]);
    }
}

/// Chats of questions and answers in which texts are easily confused.
fn chats() -> Vec<serde_json::Value> {
    let turns = |texts: &[&str]| -> serde_json::Value {
        let role = |(index, text): (usize, &&str)| if index % 2 == 0 { user(text) } else { answer(text) };
        texts.iter().enumerate().map(role).collect()
    };
    vec![
        turns(&["A", "B", "C", "D"]),
        turns(&["B", "B", "B", "B", "C", "B"]),
        turns(&["One", "  Two \n", "Three", "\n\nFour\n"]),
        turns(&["A", "", "C", "D"]),
        turns(&["A", "B", "", "D", "E", ""]),
        turns(&["<|im_start|>assistant\nB<|im_end|>\n", "B", "<|assistant|>\nB[/INST]B</s>", "B"]),
        turns(&["A", "<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|end|>", "C", "<|im_end|>\n"]),
        turns(&["A", "assistant", "<start_of_turn>model\n", "end", "[INST]", "</s> [/INST]"]),
        turns(&["Größe?", "世界 🦀", "世界 🦀", "Größe?"]),
    ]
}

#[test]
fn the_parts_are_those_of_blocks() {
    for (name, source) in TEMPLATES {
        let plain = unmarked(source);
        chats().iter().for_each(|messages| check_blocks(name, &plain, messages));
    }
    for name in ["chatml", "phi3", "zephyr", "llama3", "qwen3"] {
        let plain = unmarked(named(name));
        let system = json!({"role": "system", "content": "Say B."});
        check_blocks(
            name,
            &plain,
            &json!([system, user("A"), answer("B"), user("Say B."), answer("Say B.")]),
        );
        check_blocks(name, &plain, &json!([answer("A"), user("A"), answer("A"), answer("A")]));
    }
}

/// Chats with thoughts and tools.
fn thoughts() -> Vec<serde_json::Value> {
    vec![
        json!([user("A"), thinking("B", "B"), user("B"), thinking("B", "B")]),
        json!([
            user("A"),
            call("", "Two"),
            result("Two"),
            thinking("Two", "Two"),
            user("Two"),
            answer("Two")
        ]),
        json!([user("A"), call("Two", ""), result("Two"), call("", ""), result("Two"), answer("Two")]),
        json!([user("A"), thinking("", "B"), user("B"), thinking("B", "C")]),
        json!([user("A"), call("", "Two"), result("Two"), user("Two"), call("", "Two")]),
    ]
}

#[test]
fn thoughts_and_tools_are_parts_of_answers() {
    for name in ["qwen3", "gpt_oss"] {
        let plain = unmarked(named(name));
        thoughts().iter().for_each(|messages| check_blocks(name, &plain, messages));
    }
    let thought = "<think>\nhm\n</think>\n\n";
    let chat = json!([user("A"), answer(&format!("{thought}B")), user("C"), answer(&format!("{thought}B"))]);
    check_blocks("qwen3", &unmarked(named("qwen3")), &chat);
    assert_eq!(
        counted(&unmarked(named("qwen3")), &chat),
        "B<|im_end|>\n|<think>\nhm\n</think>\n\nB<|im_end|>\n"
    );
    let chat = json!([user("A"), answer(thought), user("<tool_response>C</tool_response>"), answer("B")]);
    check_blocks("qwen3", &unmarked(named("qwen3")), &chat);
    // Answers that follow each other.
    let several = json!([user("A"), answer(""), answer("</think>B"), answer(""), answer("B")]);
    check_blocks("qwen3", &unmarked(named("qwen3")), &several);
    let chat = json!([user("A"), call("", "hm"), result("1"), answer("B"), user("C"), answer("B")]);
    assert_eq!(
        counted(&renderer(named("gpt_oss")), &chat),
        " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Two\"}<|call|>\
         |<|channel|>final<|message|>B<|end|>|<|channel|>final<|message|>B<|return|>"
    );
}

/// The templates of these models, which TRL has. They are not in this repository.
#[test]
fn the_published_templates_have_the_same_parts() {
    let Some(folder) = std::env::var_os("PIPEWRIGHT_TRL_TEMPLATES") else {
        let _said = writeln!(
            std::io::stderr(),
            "SKIPPED: PIPEWRIGHT_TRL_TEMPLATES is not the folder `trl/chat_templates` of TRL"
        );
        return;
    };
    for (name, file) in [("qwen3", "qwen3.jinja"), ("gpt_oss", "gptoss.jinja")] {
        let source = std::fs::read_to_string(Path::new(&folder).join(file)).expect("a template of TRL");
        let published = renderer(&source);
        chats().iter().chain(&thoughts()).for_each(|messages| check_blocks(name, &published, messages));
    }
}

#[test]
fn the_end_of_an_answer_counts_wherever_the_template_writes_it() {
    let chat = json!([user("A"), answer("B"), user("C"), answer("D")]);
    let check =
        |source: &str, expected: &str| assert_eq!(counted(&renderer(source), &chat), expected, "{source}");
    // The end is written only if something follows.
    check(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% if not loop.last or add_generation_prompt %}</s>{% endif %}\
         {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        "B</s>|D",
    );
    // The beginning of an answer goes on with a thought, which answers do not have.
    check(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endfor %}\
         {% if add_generation_prompt %}<assistant><think>{% endif %}",
        "B</s>|D</s>",
    );
    // A token ends the whole chat.
    check(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}\
         {{ '<assistant>' if add_generation_prompt else '</s>' }}",
        "B<end>|D<end></s>",
    );
    // A call begins with the first letters of a thought.
    let mut called = call("", "");
    called["content"] = json!("");
    let calls = json!([user("A"), called, user("C"), answer("D")]);
    let source = "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content }}{% for c in m.tool_calls %}<tool>{{ c.function.name }}\
                  {% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}";
    assert_eq!(counted(&renderer(source), &calls), "<tool>weather</s>|D</s>");
    // The instructions are in the last question.
    check(
        "{% for m in messages %}{% if m.role == 'user' %}[{{ 'Be brief. ' if loop.index0 >= messages | length - 2 }}{{ m.content }}]\
         {% else %}{{ m.content }};{% endif %}{% endfor %}",
        "B;|D;",
    );
}

#[test]
fn a_completion_has_only_answers() {
    let chat = json!([user("A"), call("", ""), result("Two"), answer("B")]);
    for source in [renderer(named("qwen3")), unmarked(named("qwen3"))] {
        let MarkedText { text, counted } =
            marked(&source, &chat, 1, TrainOn::Completion).expect("it renders");
        let parts: Vec<&str> = counted.into_iter().map(|part| text[part].trim_end()).collect();
        let first = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Two\"}}\n</tool_call><|im_end|>";
        assert_eq!(parts, [first, "<think>\n\n</think>\n\nB<|im_end|>"]);
    }
}

#[test]
fn what_is_not_in_the_text_is_refused() {
    let check = |source: &str, messages: serde_json::Value, expected: &str| {
        let problem =
            marked(&renderer(source), &messages, 0, TrainOn::Assistant).expect_err(source).to_string();
        assert!(problem.starts_with(expected), "{problem}");
    };
    let short = "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last or m.role == 'user' }};{% endfor %}";
    let chat = json!([user("A"), answer("B"), user("C"), answer("D")]);
    check(short, chat, "where the text of the first 2 messages ends cannot be found");
    let none = "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'user' %}{{ m.content }}{% endif %};{% endfor %}";
    check(
        none,
        json!([user("A"), answer("B")]),
        "where the text of the first 2 messages ends cannot be found",
    );
    let marks = json!([user("\u{fdd3}"), answer("B")]);
    check("{{ messages[0].content }}", marks, "the chat contains a noncharacter from U+FDD0 to U+FDD4");
}

/// Returns the messages with `"weight": 0` in one of them.
fn without(messages: &serde_json::Value, index: usize) -> serde_json::Value {
    let mut messages = messages.clone();
    messages[index]["weight"] = json!(0);
    messages
}

/// Checks that one answer less counts if a message says so, with the same places of the others.
fn check_left_out(name: &str, renderer: &ChatRenderer, messages: &serde_json::Value) {
    let all = marked(renderer, messages, 0, TrainOn::Assistant).expect(name).counted;
    let roles = messages.as_array().expect("a list").iter().map(|message| &message["role"]);
    let answers = roles.enumerate().filter(|(_, role)| *role == "assistant").map(|(index, _)| index);
    for (place, index) in answers.enumerate() {
        let mut expected = all.clone();
        expected.remove(place);
        let messages = without(messages, index);
        for train_on in [TrainOn::Assistant, TrainOn::Completion] {
            let found = marked(renderer, &messages, 1, train_on)
                .unwrap_or_else(|problem| panic!("{name}, {messages}: {problem}"));
            assert_eq!(found.counted, expected, "{name}, {messages}, {:?}", found.text);
        }
    }
}

#[test]
fn answers_that_do_not_count_are_left_out_with_and_without_blocks() {
    let turns = json!([user("A"), answer("B"), user("B"), answer("B"), user("C"), answer("B")]);
    for (name, source) in TEMPLATES {
        check_left_out(name, &renderer(source), &turns);
        check_left_out(name, &unmarked(source), &turns);
    }
    let several = json!([user("A"), answer("B"), answer("B"), user("C"), answer("B"), answer("D")]);
    for name in ["chatml", "phi3", "qwen3", "gpt_oss"] {
        check_left_out(name, &renderer(named(name)), &several);
        check_left_out(name, &unmarked(named(name)), &several);
    }
    for name in ["qwen3", "gpt_oss"] {
        for messages in thoughts() {
            check_left_out(name, &renderer(named(name)), &messages);
            check_left_out(name, &unmarked(named(name)), &messages);
        }
    }
    // One block has the answers of a turn.
    let wide = "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }};{% else %}\
                {% if loop.previtem.role == 'user' %}{% generation %}a:{{ m.content }};\
                {%- if loop.nextitem and loop.nextitem.role == 'assistant' %}a:{{ loop.nextitem.content }};{% endif %}\
                {% endgeneration %}{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    let chat = json!([user("A"), answer("B"), answer("C"), user("D"), answer("E")]);
    let left_out = [1, 2, 4].map(|index| counted(&renderer(wide), &without(&chat, index)));
    assert_eq!(left_out, ["a:C;|a:E;", "a:B;|a:E;", "a:B;a:C;"]);
}

#[test]
fn calls_in_texts_are_read_before_answers_are_found() {
    let mut texts = json!([user("A"), call("", "B"), result("weather"), answer("B")]);
    let tables = texts.clone();
    texts[1]["tool_calls"] = json!(texts[1]["tool_calls"].to_string());
    for name in ["qwen3", "gpt_oss"] {
        for renderer in [renderer(named(name)), unmarked(named(name))] {
            assert_eq!(counted(&renderer, &texts), counted(&renderer, &tables), "{name}");
        }
    }
}

#[test]
fn limits_hold_while_answers_are_found() {
    let chat = json!([user("A"), answer("B"), user("C"), answer("D")]);
    let write = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}";
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let marked = |source: &str| marked(&renderer(source), &chat, 0, TrainOn::Assistant);
    for condition in ["add_generation_prompt", "messages | length < 4", "'\u{fdd2}' in messages[0].content"] {
        let problem = marked(&format!("{{% if {condition} %}}{endless}{{% endif %}}{write}"));
        let kind = problem.as_ref().err().map(|error| error.kind);
        assert_eq!(kind, Some(DataErrorKind::Exhausted), "{condition}: {problem:?}");
    }
    // A template that takes most of the steps of a chat.
    let long =
        "{% for a in range(30) %}{% for b in range(999) %}{% if b %}{% endif %}{% endfor %}{% endfor %}";
    let MarkedText { text, counted } = marked(&format!("{long}{write}")).expect("it ends");
    let parts: Vec<&str> = counted.into_iter().map(|part| &text[part]).collect();
    assert_eq!(parts, ["a:B;", "a:D;"]);
}
