"""Writes the reference of AdamW in 8 bits: what bitsandbytes computes on the processor.

    python bench/peer/adamw8bit.py > crates/pipewright-kernel/tests/golden/adamw8bit.txt

It needs PyTorch and bitsandbytes. The numbers of the trial are exact in binary, so that the test makes the same ones.
"""

import bitsandbytes
import bitsandbytes.backends.cpu.ops as on_processor
import torch

ROWS, WIDTH, STEPS = 2, 512, 4


def numbers(factor: int, modulus: int, scale: float) -> torch.Tensor:
    index = torch.arange(ROWS * WIDTH, dtype=torch.int64)
    return (((index * factor) % modulus - modulus // 2).float() * scale).reshape(ROWS, WIDTH)


def quantize(moment: torch.Tensor, code: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, block: int) -> None:
    """Writes the nearest codes. The compiled form searches in a table that misses the nearest one for small numbers."""
    blocks = moment.reshape(-1, block)
    scales.copy_(blocks.abs().amax(1))
    shares = blocks / scales[:, None]
    codes.copy_((shares[..., None] - code).abs().argmin(-1).reshape(codes.shape))


on_processor._quant_blockwise_fp32_direct = quantize
parameter = torch.nn.Parameter(numbers(7919, 1001, 2.0**-9))
optimizer = bitsandbytes.optim.AdamW8bit(
    [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, min_8bit_size=1
)
for step in range(STEPS):
    parameter.grad = numbers(104729 + 31 * step, 1999, 2.0 ** (-10 - 2 * step))
    optimizer.step()
state = optimizer.state[parameter]
print(f"# bitsandbytes {bitsandbytes.__version__}, PyTorch {torch.__version__.split('+')[0]}; written by bench/peer/adamw8bit.py")
print("# For each element: the parameter, and the codes of both moments; then the scales of both moments.")
values = zip(parameter.detach().flatten().tolist(), state["state1"].flatten().tolist(), state["state2"].flatten().tolist())
for value, first, second in values:
    print(f"{value:.9g} {first} {second}")
for first, second in zip(state["absmax1"].tolist(), state["absmax2"].tolist()):
    print(f"{first:.9g} {second:.9g}")
