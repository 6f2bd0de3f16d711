"""Renders chats with the chat templates of this folder and of `src/settings/templates` as transformers does.

The output, `chats.json`, has the texts, the bytes of them that are in `generation` blocks, and the messages of the
exceptions that templates raise:

    python make_chats.py > chats.json
"""

import datetime
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


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


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


def main():
    chat_template_utils.datetime = FixedDate
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
