"""Renders chats with the chat templates of this folder and of `src/settings/templates` as transformers does.

The output, `chats.json`, has the texts, the bytes of them that are in `generation` blocks, the messages of the
exceptions that templates raise, and the texts of single expressions:

    python make_chats.py > chats.json

Where TRL is installed, the texts of `qwen3` and `gpt_oss` are compared with those of the published templates, which TRL
has.

With `packages`, it has the templates of the packages that are installed and ship some (Axolotl and TRL), and what they
render:

    python make_chats.py packages
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
      thinking("Dry.", "So it is."), user("Time?"), assistant("Look:", tool_calls=[{"name": "clock", "arguments": {}}]),
      result("12"), thinking("Noon.", "It is.")], [SCHEMA, CLOCK]),
    ([user("Rain?"), assistant("Asks", reasoning_content="\nFirst.\n", tool_calls=[CALL, CALL]), result("No."), result("Yes."),
      assistant("Both.", reasoning_content="Hm.")], None),
    # Parquet and logs of OpenAI have all keys in all messages.
    ([{**user("One"), "tool_calls": None, "name": None}, {**assistant("a"), "tool_calls": None, "refusal": None, "thinking": None}], None),
    ([user("Rain?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "1", "tool_call_id": None}, assistant("Yes.")], [TOOL]),
    ([user("One"), assistant("a", thinking="b"), user("Two"), assistant("c", reasoning="d", tool_calls=None)], None),
    ([user([{"type": "text", "text": "One", "image": None}]), assistant([{"type": "text", "text": "Two"}])], None),
    ([user("One"), assistant("", tool_calls=[{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {
        "numbers": [1e-05, 1e16, 1e20, 123456789012345678901234567890, -0.0, 2.5, 10**25], "items": {"values": None}}}}]),
      {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "f"}, assistant("Three")], [TOOL]),
]

# The values of expressions.
VARIABLES = """{% set text = "  Grüße an <b>Die</b> Welt\\n\\nund 'mehr' & \\t\\"alles\\" mit 1e5 " %}{% set word = "abcabc" %}{% set long = \
"one two three four five six seven eight nine ten" %}{% set list = [3, 1.5, "a", none, true, [1, 2], {"k": 1e-05}] %}{% set table = \
{"b": 1, "a": [1e20, none], "items": "own"} %}{% set small = 0.00001 %}{% set whole = 12345678901234567890123 %}"""

EXPRESSIONS = """
list ~ table|table ~ none ~ true ~ small|whole|whole + 1|list|table|(1,)|(1, 2)|["it's", 'a "quote"', "both ' and \"", "é\n\t\\"]
small ~ ""|"%s" % small|"%d-%s-%5.2f|%-5s|%05d|%x" % (3, "a", 2.5, "b", 42, 255)|"%s and %s" % ("a", [1])|"100%%" % ()
7 % 3|-7 % 3|7.5 % 2|-7 // 2|7 / 2|2 ** 10|2 ** -1|1e300 * 10|10 * 1.5|"ab" * 3|1e16 + 0|1e15 + 0.5
1 < 2 < 3|1 < 2 > 3|"a" < "b"|[1, 2] < [1, 3]|1 == 1.0|true == 1|none == missing|missing == missing|"a" in word|"k" in table|1.5 in list|3 not in list
none < 1|missing < 1|"a" < 1|1 in "abc"|"a" in none|"a" in 5
none is iterable|missing is iterable|"a" is iterable|5 is iterable|"a" is sequence|table is sequence|list is sequence|none is sequence|(1, 2) is sequence
list[1:] is sequence|table is mapping|list is mapping|true is number|true is integer|1 is integer|1.0 is integer|1.0 is float|true is boolean|none is none
"ABC" is upper|"abc" is lower|"" is lower|3 is odd|4 is even|9 is divisibleby 3|9 is divisibleby(4)|range is callable|"a" is callable|1 is sameas 1|"a" is eq "a"
[1, 2] is eq [1, 2]|2 is gt 1|1 is in [1, 2]|missing is defined|none is defined|word is string|5 is string
list[1:]|list[::-1]|word[1:4]|word[::2]|word[-2:]|list[-1]|list[10] is defined|word[10:]
table.items is string|table["items"]|table.b|table["b"]|table.keys() @list|table.values() @list|table.items() @list|table.get("x")|table.get("x", 5)|table.missing is defined
table.keys is defined|table["keys"] is defined|{"a": 1}["items"] is string
text @upper|text @lower|text @title|text @capitalize|text @trim|text @string|text @length|text @wordcount|text @striptags|text @e|text @escape @e|text @forceescape
text @urlencode|"a/b c" @urlencode|{"a b": "c/d"} @urlencode|[["x", 1]] @urlencode|long @truncate(20)|long @truncate(20, true)|long @truncate(20, false, "…", 0)|long @truncate(45)
long @truncate(10, end="")|"a\nb\n\nc" @indent|"a\nb\n\nc" @indent(2, true)|"a\nb\n\nc" @indent(width=2, blank=true)|"a\nb" @indent("> ")|"a\r\nb\x0bc" @indent(1)
word @center(20)|word @center(9)|"a" @center|word @replace("a", "x")|word @replace("b", "", 1)|word @replace("", "-")|5 @replace(5, 6)
1 @filesizeformat|999 @filesizeformat|1500 @filesizeformat|1500 @filesizeformat(true)|10 ** 12 @filesizeformat|1234567890123 @filesizeformat|"2048" @filesizeformat(binary=true)
"42" @int|"42.9" @int|"x" @int|"x" @int(7)|"0x1F" @int(0, 16)|"1_000" @int|" 5 " @int|2.9 @int|-2.9 @int|none @int|true @int|"1e3" @int|[] @int|"inf" @int
"1.5" @float|"x" @float|"x" @float(1.5)|"1e-7" @float|5 @float|none @float|"1_0.5" @float|2.5 @round|3.5 @round|2.675 @round(2)|2.5 @round(0, "ceil")|-2.5 @round(0, "floor")|5 @round|1234.5678 @round(2)
-5 @abs|-2.5 @abs|none @abs|none @length|missing @length|5 @length|missing @upper|none @upper|5.0 @upper|missing @trim|none @trim|small @string|[small] @string
[1, small, none, "a"] @join|[1, small] @join(", ")|"abc" @join("-")|[{"a": small}, {"a": 2}] @join("|" , attribute="a")|none @join|missing @join|5 @join
table @tojson|list @tojson|list @tojson(indent=2)|table @tojson(sort_keys=true)|text @tojson|text @tojson(ensure_ascii=true)|table @tojson(separators=(",", ":"))|missing @tojson|whole @tojson|{1: 2, none: 3, true: 4, 1.5: 5} @tojson|[] @tojson(indent=2)|1e16 @tojson|table @tojson(false, 1)|(1, 2) @tojson
word.removeprefix("abc")|word.removesuffix("bc")|word.removeprefix("x")|"a.b.c".rsplit(".", 1)|"a.b.c".split(".", 1)|" a  b c ".split()|" a  b c ".split(none, 1)|" a  b c ".rsplit(none, 1)|" a  b c ".rsplit()|"a,b".split(",")|"a,b,".split(",")|"".split()|"".split(",")|"a".split("")
"a=b=c".partition("=")|"a=b=c".rpartition("=")|"abc".partition("=")|"abc".rpartition("=")|word.index("c")|word.index("x")|word.rindex("c")|word.find("c", 3)|word.find("c", 3, 5)|word.rfind("a")|word.count("bc")|word.count("")|word.find("x")|[1, 2, 1].index(2)|[1, 2, 1].count(1)|[1].index(5)
"42".zfill(5)|"-42".zfill(5)|"+4".zfill(1)|"".zfill(3)|"ab".center(5)|"ab".center(6, "*")|"ab".ljust(5, ".") ~ "|"|"ab".rjust(5)|"ab".center(1)|"a\tb".expandtabs(4)|"aBc".swapcase()|"they're bill's".title()|"hello world-wide web".title()|"ÀÉ".lower()|"straße".upper()
"a\nb\r\nc\x0bd\x85e\n".splitlines()|"a\nb".splitlines(true)|"  x ".strip()|"xxaxx".strip("x")|"xyaxy".lstrip("xy")|"xyaxy".rstrip("xy")|"\x1ca\x1f".strip()|"abc".startswith(("x", "a"))|"abc".endswith("bc")|"abc".startswith("b", 1)|"abc".startswith(["a"])
"123".isdigit()|"12a".isdigit()|"".isdigit()|"abc".isalpha()|"ab1".isalnum()|" ".isspace()|"ABC".isupper()|"abc".islower()|"Ab Cd".istitle()|"abc".isascii()|", ".join(["a", "b"])|", ".join([1])|"{} {}".format("a", 1)|"{0}-{b}".format("a", b=2)|"{:>5}|{:.2f}".format("a", 2.5)
word.upper()|word.capitalize()|"ABC".capitalize()|"aXbX".replace("X", "-", 1)|[1].append(2)|table.update({})|word.nothing()
[3, 1, 2] @sort|["b", "A", "c"] @sort|[3, 1, 2] @sort(reverse=true)|[{"a": 2}, {"a": 1}] @sort(attribute="a")|[1, 1, 2] @unique @list|[1, 2, 3] @sum|[1.5, 2] @sum|[3, 1] @min|[3, 1] @max|[] @min is defined|["a", 1] @sort
[1, 2, 3] @first|[1, 2, 3] @last|[] @first is defined|"abc" @first|"abc" @last|[1, 2, 3] @reverse @list|"abc" @reverse|"abc" @list|table @list|missing @list|[1, 2, 3, 4, 5] @batch(2) @list|[1, 2, 3] @batch(2, 0) @list|[1, 2, 3, 4, 5] @slice(2) @list
[1, 2, 3] @map("string") @list|[{"a": 1}, {"a": 2}] @map(attribute="a") @list|[{"a": 1}, {}] @map(attribute="a", default=0) @list|[1, 2, 3] @select("odd") @list|[1, 2, 3] @reject("odd") @list|[0, 1, none] @select @list|[{"a": 1}, {"a": 0}] @selectattr("a") @list|[{"a": 1}, {"a": 0}] @rejectattr("a") @list|[{"a": 1}, {"a": 0}] @selectattr("a", "equalto", 0) @list
missing @default("d")|none @default("d")|none @default("d", true)|"" @d("d", true)|"" @d("d")|table @dictsort|table @items @list|"%s-%s" @format("a", small)|"a" @attr("b") is defined|text @safe|"a" @split|"a" @nothing
[1, 2] + [3]|(1, 2) + (3,)|[1] * 2|"a" + 1|"a" + none|missing + "a"|1 + true|none ~ "a"|missing ~ "a"|1 - 0.1|0.1 + 0.2|10 / 5|-(5) @abs|not missing|not ""|"" or "x"|"y" and "x"|"a" if missing else "b"|"a" if missing
dict(a=1, b=2)|dict({"a": 1}, c=3)|range(3) @list|range(1, 7, 2) @list|range(5, 0, -2) @list|range(1000000)|namespace(a=1).a|loop is defined|'a' 'b'|"\x41\101\u00e9\q\'"|1_000|0x1F|1.5e3|true and 1|None|True
"a" @upper ~ "b" @lower|"a" ~ 1 + 2 @string|-1 @abs|2 * 3 ~ 4|1 + 2 ~ 3|"a" ~ "b" == "ab"|"x" in "a" ~ "x"|{"a": 1 ~ 2, "b": [1 % 2, 3 ~ none]}|table.b ~ table["a"][0]|"a,b".split(",")[0] ~ "c"|("a" ~ "b") @upper|not 1 == 2|1 not in [2]
"""


def expressions():
    """Yields templates with one expression each. In the list above, `|` ends an expression and `@` is a filter."""
    for line in EXPRESSIONS.strip().split("\n"):
        expression = ""
        for letter in line + "|":
            # A `|` in quotation marks is text.
            quotes = expression.replace("\\\"", "")
            if letter != "|" or quotes.count('"') % 2:
                expression += letter
                continue
            yield VARIABLES + "{{ " + expression.replace("@", "| ") + " }}"
            expression = ""


def packages():
    """Returns the templates of the packages that are installed, by name."""
    templates = {}
    for name in ["axolotl", "trl"]:
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations if spec else []:
            for path in sorted(Path(folder).rglob("*.jinja")):
                templates[f"{name}/{path.stem}"] = path.read_text()
    return templates


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def render(source, messages, tools, prompt):
    """Returns the text with the bytes of its `generation` blocks, or the message of an exception."""
    # `apply_chat_template` does this.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        texts, indices = chat_template_utils.render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True,
            add_generation_prompt=prompt, **TOKENS)
    except Exception as error:
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
            # The published templates leave out texts in parts, or fail on them.
            if any(isinstance(message["content"], list) for message in messages):
                continue
            for prompt in [False, True]:
                expected = render(source, messages, tools, prompt).get("text")
                result = render(own, messages, tools, prompt)
                # What the published template leaves out or fails on without a reason is an error with a message here.
                if result.get("text") != expected and not result.get("error"):
                    sys.exit(f"{name}, chat {index}, prompt {prompt}:\n{expected!r}\n{result}")


def main():
    chat_template_utils.datetime = FixedDate
    own = {path.stem: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))}
    is_own = sys.argv[1:] != ["packages"]
    templates = own if is_own else packages()
    if is_own:
        compare_with_published()
    results = []
    for name, source in sorted(templates.items()):
        for index, (messages, tools) in enumerate(CHATS):
            for prompt in [False, True]:
                result = render(source, messages, tools, prompt)
                results.append({"template": name, "chat": index, "prompt": prompt, **result})
    chats = [{"messages": messages, "tools": tools} for messages, tools in CHATS]
    texts = [{"source": source, "text": render(source, [], None, False).get("text")} for source in expressions()]
    output = {"transformers": transformers.__version__, "tokens": TOKENS, "date": DATE.strftime("%Y-%m-%d"), "chats": chats,
              "results": results}
    output |= {"expressions": texts} if is_own else {"templates": templates}
    json.dump(output, sys.stdout, ensure_ascii=False, indent=1)
    print()


if __name__ == "__main__":
    main()
