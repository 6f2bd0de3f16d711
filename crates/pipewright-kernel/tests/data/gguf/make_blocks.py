"""Writes blocks of GGUF files with the elements that gguf-py (0.19) decodes from them, and elements with the blocks of Q8_0
that gguf-py makes of them.

    python make_blocks.py

NAME.bin has the blocks, then the decoded elements as float32. q8_0_from.bin has 1024 elements, then their blocks.
"""

from pathlib import Path

import gguf
import numpy as np

folder = Path(__file__).parent
random = np.random.default_rng(7)
for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]:
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (1536 // elements, size), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(name, [0, 2])
    for place in halves:
        numbers = random.normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = numbers.view(np.uint8).reshape(-1, 2)
    decoded = gguf.quants.dequantize(blocks.reshape(-1), kind).astype(np.float32)
    (folder / f"{name.lower()}.bin").write_bytes(blocks.tobytes() + decoded.tobytes())
elements = random.normal(0, 0.02, 1024).astype(np.float32)
elements[64:96] = 0
elements[96:128] = np.round(elements[96:128] * 1000) / 2
blocks = gguf.quants.quantize(elements.reshape(1, -1), gguf.GGMLQuantizationType.Q8_0)
(folder / "q8_0_from.bin").write_bytes(elements.tobytes() + blocks.tobytes())
