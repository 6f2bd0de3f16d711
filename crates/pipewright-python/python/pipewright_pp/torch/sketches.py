"""Sketches of tensors: a thousand numbers that differ if the tensors differ. Imports PyTorch.

A sketch is linear: the sketch of a sum is the sum of the sketches, and its norm estimates the tensor's norm within a few
percent. So gradients of large models are compared, and sums of gradients are taken apart, without sending the gradients.
A small tensor is its own sketch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import VerifyError

#: The numbers of a sketch. Each is a sum of values of the tensor with random signs.
BUCKETS = 1024

#: The values of each sum whose signs are independent. After these, the signs repeat, all of them as they are or negated.
LAYERS = 64

#: The largest relative difference of two equal values by their type: sums in another order differ by less.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Sketch:
    """The sketch of a tensor, with its shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: Tensor
    """At most `BUCKETS` numbers of type float64. Infinite values, as in masks of attention, count as 0."""
    infinite: Tensor | None = None
    """The sketch of the signs of the infinite values; None if there are none."""

    @property
    def norm(self) -> float:
        """The estimate of the tensor's norm."""
        return float(self.numbers.norm())

    def times(self, factor: float) -> Sketch:
        """Returns the sketch of the tensor times a factor."""
        return Sketch(self.shape, self.dtype, self.numbers * factor, self.infinite)


def sketch(tensor: Tensor, what: str = "a value") -> Sketch:
    """Returns the sketch of a tensor. Raises `VerifyError` if it has no values in this process's memory."""
    if tensor.device.type == "meta":
        raise VerifyError(f"{what} is on the device meta and has no values; initialize it before the step")
    if torch.nn.parameter.is_lazy(tensor):
        raise VerifyError(f"{what} has no values, because it is lazy; run its module once before the step")
    if hasattr(tensor, "full_tensor"):
        raise VerifyError(f"{what} is sharded (a DTensor); verify the pipeline before FSDP or tensor parallelism is applied")
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    exact = values.dtype in (torch.float32, torch.float16, torch.bfloat16)
    values = values.to(torch.float32 if exact else torch.float64).flatten()
    numbers, infinite = _sums(values), None
    if not bool(torch.isfinite(numbers).all()):
        # In float64, sums of the largest values of float32 are finite.
        values = values.to("cpu", torch.float64)
        is_infinite = values.isinf()
        infinite = _sums(values.sign() * is_infinite) if bool(is_infinite.any()) else None
        numbers = _sums(values.masked_fill(is_infinite, 0))
    return Sketch(tuple(tensor.shape), tensor.dtype, numbers, infinite)


def _sums(values: Tensor) -> Tensor:
    """Returns sums of values with random signs, or a copy of the values if they are few."""
    if values.numel() > BUCKETS:
        size = BUCKETS * LAYERS
        blocks = -(-values.numel() // size)
        values = torch.nn.functional.pad(values, (0, blocks * size - values.numel())).view(blocks, size)
        signs, of_block = (part.to(values.device, values.dtype) for part in (_signs(size), _signs(blocks)))
        with torch.autocast(values.device.type, enabled=False):  # The step may run under it.
            values = ((of_block @ values) * signs).view(LAYERS, BUCKETS).sum(0)
    return values.to("cpu", torch.float64, copy=True)


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    """Returns random signs, the same in all processes."""
    generator = torch.Generator("cpu").manual_seed(count)
    return torch.randint(2, (count,), generator=generator, dtype=torch.float64, device="cpu") * 2 - 1


def sketches(values: Iterable[Tensor], what: str) -> list[Sketch]:
    """Returns the sketches of tensors."""
    return [sketch(value, what) for value in values]


def add(parts: Sequence[Sketch]) -> Sketch:
    """Returns the sketch of a sum."""
    infinite = [part.infinite for part in parts if part.infinite is not None]
    numbers = torch.stack([part.numbers for part in parts]).sum(0)
    return Sketch(parts[0].shape, parts[0].dtype, numbers, torch.stack(infinite).sum(0) if infinite else None)


def difference(value: Sketch, expected: Sketch, floor: float = 0.0) -> float:
    """Returns the norm of the difference relative to the expected value's norm, or to `floor` if that is larger.

    Infinite for values of different shapes, with infinite values in other places, and for values that are not numbers.
    """
    if value.shape != expected.shape or not _same_infinite(value, expected):
        return float("inf")
    distance = float((value.numbers - expected.numbers).norm())
    if distance == 0:
        return 0.0
    scale = max(expected.norm, floor)
    relative = distance / scale if scale > 0 else float("inf")
    return relative if relative == relative else float("inf")


def _same_infinite(value: Sketch, expected: Sketch) -> bool:
    if value.infinite is None or expected.infinite is None:
        return value.infinite is expected.infinite
    return torch.equal(value.infinite, expected.infinite)


def tolerance_of(value: Sketch) -> float:
    """Returns the largest relative difference of equal values of this type; 0 for whole numbers."""
    return TOLERANCES.get(value.dtype, 1e-4 if value.dtype.is_complex else 0.0)


def ratio(value: Sketch, expected: Sketch) -> tuple[float, float]:
    """Returns the factor with which the expected value is nearest to the value, and the relative difference that is left."""
    if value.shape != expected.shape:
        return 0.0, float("inf")
    square = float(expected.numbers @ expected.numbers)
    if square == 0:
        return 0.0, 0.0 if value.norm == 0 else float("inf")
    factor = float(value.numbers @ expected.numbers) / square
    return factor, difference(value, expected.times(factor), value.norm)


def parts_of_sum(value: Sequence[Sketch], parts: Sequence[Sequence[Sketch]]) -> tuple[list[float], float]:
    """Returns the factors with which the sum of `parts` is nearest to `value`, and the relative difference that is left.

    `value` has the sketches of several tensors, and each of `parts` has the same tensors.
    """
    columns = torch.stack([torch.cat([tensor.numbers for tensor in part]) for part in parts], dim=1)
    target = torch.cat([tensor.numbers for tensor in value])
    if not bool(torch.isfinite(target).all()) or not bool(torch.isfinite(columns).all()):
        return [0.0] * len(parts), float("inf")
    factors = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    rest = float((target - columns @ factors).norm())
    norm = float(target.norm())
    return [float(factor) for factor in factors], rest / norm if norm > 0 else 0.0


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of a value: of tuples, lists and dictionaries too, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]
