#!/usr/bin/env python3
"""Trains LoRA on a base of the shape of Llama 7B in NF4 (random weights, 3.9 GB) twice: with the base in memory, and with the
base in its file under a limit of memory. Prints the times of the steps, the highest memory of both, and what `check` says.

    python3 bench/stream/run.py [PIPEWRIGHT]     (default: target/release/pipewright)

The limit is that of a control group, if this user can make one, which counts the page cache too; otherwise it is only compared
with the highest resident memory. The base and the runs need 5 GB of disk below $TMPDIR and are removed afterwards. Settings:
STEPS (3), TOKENS of a row (256), MICROBATCHES (4), LIMIT in bytes (3e9), LAYERS (32), REPEAT=1 to keep the folder.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HIDDEN, INNER, VOCABULARY = 4096, 11008, 32000
LAYERS = int(os.environ.get("LAYERS", 32))
STEPS = int(os.environ.get("STEPS", 3))
TOKENS = int(os.environ.get("TOKENS", 256))
MICROBATCHES = int(os.environ.get("MICROBATCHES", 4))
LIMIT = int(float(os.environ.get("LIMIT", 3e9)))
BLOCK, NESTED = 64, 256
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]


def floats(numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


def base_tensors():
    """Yields the name, the type, the shape and a function of the bytes of each tensor."""
    noise = os.urandom(1 << 24)

    def random(count):
        return (noise * (count // len(noise) + 1))[:count]

    def halves(rows, columns):
        # Bfloat16 numbers of about 0.01.
        pattern = b"".join(struct.pack("<H", sign | 0x3C00 | byte >> 1) for byte, sign in zip(noise[:4096], (0, 0x8000) * 2048))
        return lambda: (pattern * (rows * columns // 4096 + 1))[: 2 * rows * columns]

    def ones(count):
        return lambda: struct.pack("<H", 0x3F80) * count

    yield "model.embed_tokens.weight", "BF16", [VOCABULARY, HIDDEN], halves(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for norm in ["input_layernorm", "post_attention_layernorm"]:
            yield f"{path}.{norm}.weight", "BF16", [HIDDEN], ones(HIDDEN)
        matrices = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        matrices |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        for name, (rows, columns) in matrices.items():
            count, weight = rows * columns, f"{path}.{name}.weight"
            blocks = count // BLOCK
            state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [rows, columns]}
            state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": 0.04}
            state = json.dumps(state).encode()
            yield weight, "U8", [count // 2, 1], lambda count=count: random(count // 2)
            yield f"{weight}.absmax", "U8", [blocks], lambda blocks=blocks: random(blocks)
            yield f"{weight}.quant_map", "F32", [16], lambda: floats(NF4)
            groups = -(-blocks // NESTED)
            yield f"{weight}.nested_absmax", "F32", [groups], lambda groups=groups: floats([0.01] * groups)
            yield f"{weight}.nested_quant_map", "F32", [256], lambda: floats([i / 128 - 1 for i in range(256)])
            yield f"{weight}.quant_state.bitsandbytes__nf4", "U8", [len(state)], lambda state=state: state
    yield "model.norm.weight", "BF16", [HIDDEN], ones(HIDDEN)
    yield "lm_head.weight", "BF16", [VOCABULARY, HIDDEN], halves(VOCABULARY, HIDDEN)


def write_base(folder):
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, position = {}, 0
    for name, kind, shape, data in base_tensors():
        length = {"U8": 1, "BF16": 2, "F32": 4}[kind]
        for size in shape:
            length *= size
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, position + length]}
        position += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, data in base_tensors():
            file.write(data())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_config(folder, stream):
    path = folder / f"stream-{stream}.toml"
    path.write_text(
        f"""[model]
from = "{folder / 'base'}"
stream = {str(stream).lower()}

[adapter]
kind = "lora"
rank = 16
alpha = 32

[data]
path = "{folder / 'text.txt'}"
tokenizer = "bytes"
seq_len = {TOKENS}

[pipeline]
ranks = 1
schedule = "looped-bfs"
stages_per_rank = {LAYERS + 2}
microbatches = {MICROBATCHES}
microbatch_size = 1
recompute = "stage"

[run]
precision = "bf16"
steps = {STEPS}
out = "{folder / f'run-{stream}'}"
"""
    )
    return path


def group_of(limit):
    """Returns the file of a new control group to which a process is added; None if this user cannot make one."""
    name = f"pipewright-stream-{os.getpid()}"
    for root, file in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]:
        group = Path(root) / name
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
            return group
        except OSError:
            try:
                group.rmdir()
            except OSError:
                pass
    return None


def train(binary, config, group):
    def join():
        if group:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [binary, "train", str(config)]
    process = subprocess.Popen(command, preexec_fn=join, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    # The highest resident memory of this child alone.
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the run failed:\n{errors[-2000:]}")
    return usage.ru_maxrss * 1024


def main():
    binary = os.path.realpath(sys.argv[1] if len(sys.argv) > 1 else "target/release/pipewright")
    folder = Path(os.environ.get("FOLDER") or tempfile.mkdtemp(prefix="pipewright-stream-"))
    folder.mkdir(exist_ok=True)
    try:
        if not (folder / "base").exists():
            write_base(folder / "base")
        (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
        size = (folder / "base" / "model.safetensors").stat().st_size
        print(f"base: {size / 1e9:.2f} GB; load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        results = {}
        for stream in [True, False]:
            config = write_config(folder, stream)
            check = subprocess.run([binary, "check", config, "--format", "json"], capture_output=True, text=True)
            if check.returncode not in (0, 3):
                sys.exit(check.stderr)
            needed = json.loads(check.stdout)["memory"]["needed"]
            group = group_of(LIMIT) if stream else None
            try:
                resident = train(binary, config, group)
            finally:
                if group:
                    group.rmdir()
            lines = (folder / f"run-{stream}" / "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            steps = [step for step in steps if "peak_bytes" in step]
            peak = max(step["peak_bytes"][0] for step in steps)
            times, losses = [step["step_ms"] / 1000 for step in steps], [step["loss"] for step in steps]
            results[stream] = times
            where = "in its file" if stream else "in memory"
            limit = f"within {LIMIT / 1e9:.1f} GB" if group else "without a limit"
            print(
                f"base {where}, {limit}: steps of {', '.join(f'{time:.1f}' for time in times)} s; check {needed / 1e9:.3f} GB, "
                f"highest {peak / 1e9:.3f} GB of the rank, {resident / 1e9:.3f} GB resident; losses {losses}; "
                f"load {os.getloadavg()[0]:.1f}"
            )
        rate = sum(results[False]) / sum(results[True])
        print(f"the rate with the base in its file is {rate:.2f} of the rate with the base in memory")
    finally:
        if not os.environ.get("REPEAT"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
