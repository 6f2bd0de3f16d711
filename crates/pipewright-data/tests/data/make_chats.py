"""Renders chats with the chat templates of this folder and of `src/settings/templates` as transformers does.

The output, `chats.json`, has the texts, the bytes of them that are in `generation` blocks, and the messages of the
exceptions that templates raise:

    python make_chats.py > chats.json

Where TRL is installed, the texts of `qwen3` and `gpt_oss` are compared with those of the published templates, which TRL
has.
"""

import datetime
import importlib.util
import json
import sys
from pathlib import Path

import jinja2
import transformers
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
FOLDERS = [HERE / "../../src/settings/templates", HERE / "templates"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DATE = datetime.datetime(2024, 7, 6)

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "units": ["C", "<F>"], "z": {}, "a": None}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Says \"sun\" & 'rain'", "parameters": {"city": "string", "days": [1, 2, 3]}}}


PARAMETERS = {
    "type": "object", "required": ["city"],
    "properties": {
        "city": {"type": "string", "description": "The city"},
        "units": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "days": {"type": "array", "items": {"type": "integer"}, "nullable": True, "default": [1, 2]},
        "where": {"type": "object", "properties": {"north": {"type": "number"}, "name": {"type": "string"}}, "required": ["north"]},
        "when": {"oneOf": [{"type": "string", "description": "a date"}, {"type": "integer", "default": 0}]},
        "all": {"type": ["boolean", "null"]}, "any": {}, "lists": {"type": "array"}, "note": {"type": "string", "nullable": True},
        "many": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
    },
}
SCHEMA = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time"}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def thinking(content, thought, **more):
    """Returns an answer with its thought under the names of both kinds of templates."""
    return assistant(content, thinking=thought, reasoning_content=thought, **more)


def result(content):
    return {"role": "tool", "content": content}


CHATS = [
    ([user("To be?"), assistant("Or not.")], None),
    ([{"role": "system", "content": "Be brief."}, user("To be?"), assistant(" Or not. "), user("Why so?"), assistant("It is the question.")], None),
    ([user("  Grüße\n\n世界 🦀 <b>&amp;</b>\t"), assistant("\n\"ja\" \\ 'nein'\r\n")], None),
    ([user("One"), assistant("<think>\nhmm\n</think>\n\nTwo"), user("Three"), assistant("<think>\nwell\n</think>\n\nFour"), user("Five"), assistant("Six")], None),
    ([user("Rain?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "{\"rain\": true}"}, assistant("Yes.")], [TOOL]),
    ([user("One"), user("Two"), assistant("Three")], None),
    ([{"role": "system", "content": "Nothing else."}], None),
    ([assistant("First.")], None),
    ([user("Hello")], None),
    ([user("One"), assistant("a", reasoning_content="b"), user("Two"), assistant("c", reasoning_content="d")], None),
    ([{"role": "system", "content": "Be brief."}, user("Rain?"), thinking("", "Ask.", tool_calls=[CALL]), result("No."),
      thinking("Dry.", "So it is."), user("Time?"), assistant("Look:", tool_calls=[{"name": "clock", "arguments": "{}"}]),
      result("12"), thinking("Noon.", "It is.")], [SCHEMA, CLOCK]),
    ([user("Rain?"), assistant("Asks", reasoning_content="\nFirst.\n", tool_calls=[CALL, CALL]), result("No."), result("Yes."),
      assistant("Both.", reasoning_content="Hm.")], None),
]


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def render(source, messages, tools, prompt):
    """Returns the text with the bytes of its `generation` blocks, or the message of an exception."""
    try:
        texts, indices = chat_template_utils.render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True,
            add_generation_prompt=prompt, **TOKENS)
    except (jinja2.exceptions.TemplateError, TypeError) as error:
        return {"error": str(error) if type(error) is jinja2.exceptions.TemplateError else None}
    text = texts[0]
    generated = [[len(text[:at].encode()) for at in span] for span in indices[0]]
    return {"text": text, "generated": generated}


def compare_with_published():
    """Stops if a template of this library writes another text than the published one."""
    trl = importlib.util.find_spec("trl")
    if trl is None:
        print("TRL is not installed, so qwen3 and gpt_oss are not compared with the published templates", file=sys.stderr)
        return
    for name, published in [("qwen3", "qwen3"), ("gpt_oss", "gptoss")]:
        own = (FOLDERS[0] / f"{name}.jinja").read_text()
        source = (Path(trl.origin).parent / f"chat_templates/{published}.jinja").read_text()
        for index, (messages, tools) in enumerate(CHATS):
            for prompt in [False, True]:
                expected = render(source, messages, tools, prompt).get("text")
                result = render(own, messages, tools, prompt)
                # What the published template leaves out or fails on without a reason is an error with a message here.
                if result.get("text") != expected and not result.get("error"):
                    sys.exit(f"{name}, chat {index}, prompt {prompt}:\n{expected!r}\n{result}")


def main():
    chat_template_utils.datetime = FixedDate
    compare_with_published()
    results = []
    for path in sorted(path for folder in FOLDERS for path in folder.glob("*.jinja")):
        source = path.read_text()
        for index, (messages, tools) in enumerate(CHATS):
            for prompt in [False, True]:
                result = render(source, messages, tools, prompt)
                results.append({"template": path.stem, "chat": index, "prompt": prompt, **result})
    chats = [{"messages": messages, "tools": tools} for messages, tools in CHATS]
    json.dump({"transformers": transformers.__version__, "tokens": TOKENS, "date": DATE.strftime("%Y-%m-%d"), "chats": chats,
               "results": results}, sys.stdout, ensure_ascii=False, indent=1)
    print()


if __name__ == "__main__":
    main()
