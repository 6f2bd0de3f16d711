"""Tokenizes texts with small tokenizers of the class `LlamaTokenizer` as transformers 5 does.

The output, `llama_ids.json`, has the `tokenizer.json` without its variations, and for each of these the files next to it
and the ids of the texts:

    python make_llama_ids.py > llama_ids.json
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers

SPACE = "\u2581"
VOCABULARY = ["<unk>", "<s>", "</s>", SPACE, *"abINST[]/<>s\n", SPACE + "a", SPACE * 2, "ab"]
MERGES = [f"{SPACE} a", f"{SPACE} {SPACE}", "a b"]
TEXTS = ["a", " a", "  a", "", " ", "<s>", "<s> ", "<s>a", "<s> a", "</s> a</s>  a", "<s>[INST] a [/INST] ab </s><s>[INST] b [/INST]", "a\n b"]

SPECIAL = [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
           for number, text in enumerate(VOCABULARY[:3])]
BASE = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": SPECIAL, "post_processor": None, "decoder": None,
    "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
              "fuse_unk": True, "byte_fallback": False, "vocab": {text: number for number, text in enumerate(VOCABULARY)}, "merges": MERGES},
}
OLD = {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}}


def metaspace(scheme):
    return {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}}


def llama(**more):
    return {"tokenizer_class": "LlamaTokenizer", **more}


# The part of `tokenizer.json`, `tokenizer_config.json` and `config.json`.
CASES = [
    (OLD, llama(), {}), (OLD, llama(legacy=False), {"model_type": "llama"}), (OLD, llama(legacy=True), {"model_type": "llama"}),
    (OLD, llama(legacy=None, add_prefix_space=None), {}), (OLD, llama(add_prefix_space=False), {}),
    (OLD, {"tokenizer_class": "LlamaTokenizerFast"}, {}), (OLD, llama(), {"model_type": "mistral"}), (OLD, llama(), {"model_type": "phi3"}),
    (OLD, llama(), {"model_type": "smollm3"}), (OLD, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "llama"}),
    (OLD, {}, {"model_type": "llama"}), (OLD, {}, {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}),
    (metaspace("first"), llama(), {}), (metaspace("always"), llama(), {}), (metaspace("never"), llama(legacy=True), {}),
]


def main():
    cases = []
    for part, settings, model in CASES:
        with tempfile.TemporaryDirectory() as folder:
            named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
            files = {"tokenizer.json": {**BASE, **part}, "tokenizer_config.json": named, "config.json": model}
            for name, content in files.items():
                (Path(folder) / name).write_text(json.dumps(content))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
        cases.append({"part": part, "settings": named, "model": model, "ids": ids})
    out = {"transformers": transformers.__version__, "tokenizer": BASE, "texts": TEXTS, "cases": cases}
    json.dump(out, sys.stdout, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
