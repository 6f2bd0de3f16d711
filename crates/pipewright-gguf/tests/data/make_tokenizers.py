"""Makes small tokenizers, each as `NAME.json` in the form of the tokenizers library and as `NAME.gguf`, and `texts.json` with the
ids that the library gives some texts.

    pip install tokenizers==0.23.3 gguf==0.19.0
    python make_tokenizers.py
"""

import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "In 2024, 1234567 people read the metrics server's port: 9090!",
    "def main():\n    print('hello world')\n\n    return  0",
    "Größe, naïve, café, и ещё немного русского текста для проверки.",
    "the theme of the other weather is that they gather together there",
] * 20
TEXTS = [
    "The dog's 12345 metrics\n\n  port", "hello  world\t!", "café", "cafe\u0301 naïve", " leading and trailing ",
    "<|im_start|>user\nWhich port?<|im_end|>", "日本語 🙂", "", "they'll THEY'LL", "a\r\nb\n\n\nc   d",
]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


def byte_level(expression, composed, ignore_merges):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(expression), "isolated")] if expression else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        split + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def pieces():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=first, show_progress=False))
    data = json.loads(tokenizer.to_str())
    # The letters follow the merged tokens, and the score of a token is less than that of the one before it.
    model = data["model"]
    merged = []
    for merge in model["merges"]:
        token = "".join(merge)
        if token not in merged:
            merged.append(token)
    letters = [token for token in model["vocab"] if token not in first and token not in merged]
    model["vocab"] = {token: id for id, token in enumerate(first + merged + letters)}
    # All pairs of tokens that make a token, in the order of the scores.
    vocab, merges = model["vocab"], []
    for token in vocab:
        own = [(token[:end], token[end:]) for end in range(1, len(token))]
        own = [pair for pair in own if pair[0] in vocab and pair[1] in vocab]
        merges += [(-vocab[token], *pair) for pair in sorted(own, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    model["merges"] = [list(merge[1:]) for merge in merges]
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])
    return tokenizer


def write(name, tokenizer, model, pre, begins, ends, unknown=None):
    data = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in data["added_tokens"]}
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(id) for id in range(size)]
    kinds = []
    for id, token in enumerate(tokens):
        if token == unknown:
            kinds.append(gguf.TokenType.UNKNOWN)
        elif id in added:
            kinds.append(gguf.TokenType.CONTROL if added[id]["special"] else gguf.TokenType.USER_DEFINED)
        elif model == "llama" and token.startswith("<0x") and len(token) == 6:
            kinds.append(gguf.TokenType.BYTE)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    writer = gguf.GGUFWriter(HERE / f"{name}.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if model == "llama":
        writer.add_token_scores([-float(id) for id in range(size)])
        writer.add_unk_token_id(0)
    else:
        writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(begins))
    writer.add_eos_token_id(tokens.index(ends))
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (HERE / f"{name}.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")))
    return [tokenizer.encode(text).ids for text in TEXTS]


llama3 = byte_level(LLAMA3, False, True)
start = llama3.token_to_id("<|endoftext|>")
llama3.post_processor = processors.TemplateProcessing(
    single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", start)]
)
ids = {
    "qwen2": write("qwen2", byte_level(QWEN2, True, False), "gpt2", "qwen2", "<|endoftext|>", "<|im_end|>"),
    "llama3": write("llama3", llama3, "gpt2", "llama-bpe", "<|endoftext|>", "<|im_end|>"),
    "gpt2": write("gpt2", byte_level(None, False, False), "gpt2", "gpt-2", "<|endoftext|>", "<|im_end|>"),
    "pieces": write("pieces", pieces(), "llama", "default", "<s>", "</s>", "<unk>"),
}
(HERE / "texts.json").write_text(json.dumps({"texts": TEXTS, "ids": ids}, ensure_ascii=False))
