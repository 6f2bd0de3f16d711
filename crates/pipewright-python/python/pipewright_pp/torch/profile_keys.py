"""The keys of a profile, as `pipewright_pp.Profile` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Link:
    """The link between two ranks: the latency in seconds, and the bandwidth in bytes per second."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Layers:
    """Equal layers that follow each other, with the times in seconds and the sizes in bytes of each of them."""

    kind: str
    count: int
    forward_s: float
    input_backward_s: float
    weight_backward_s: float
    backward_s: float
    optimizer_s: float
    output_bytes: int
    parameter_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class ProfileParts:
    """Everything that a profile says."""

    layers: Sequence[Layers]
    link: Link
    device: str
    rows: int
    ranks: int = 1
    threads: int | None = None
    memory_bytes: int | None = None
    assumed: Sequence[str] = ()


def profile_keys(parts: ProfileParts) -> dict[str, Any]:
    """Returns the profile as a dictionary with the keys of its file.

    PyTorch keeps all tensors of a split backward until `W` (`retain_graph` in `stage_backward_input`), so
    `weight_activation_bytes` is the whole of `activation_bytes`.
    """
    device = {
        "name": parts.device,
        "ranks": parts.ranks,
        "memory_bytes": parts.memory_bytes,
        "threads_per_rank": parts.threads,
    }
    layers = [
        {**vars(layer), "backward_s": _whole_backward(layer), "weight_activation_bytes": layer.activation_bytes}
        for layer in parts.layers
    ]
    return {
        "rows": parts.rows,
        "assumed": list(parts.assumed),
        "device": {key: value for key, value in device.items() if value is not None},
        "link": vars(parts.link),
        "layers": layers,
    }


def _whole_backward(layer: Layers) -> float:
    """Returns the time of `B`. It repeats nothing, so if it takes longer than its halves, or less than `I`, that is noise."""
    inputs = layer.input_backward_s
    return min(max(layer.backward_s, inputs), inputs + layer.weight_backward_s)


def merge_equal(layers: Iterable[tuple[object, Layers]]) -> list[Layers]:
    """Merges layers of one kind.

    Each layer comes with its kind. The times of all layers of a kind become their mean, and layers of a kind that
    follow each other become one entry.
    """
    given = list(layers)
    by_kind: dict[object, list[Layers]] = {}
    for kind, layer in given:
        by_kind.setdefault(kind, []).append(layer)
    means = {kind: _mean(of_kind) for kind, of_kind in by_kind.items()}
    merged: list[tuple[object, Layers]] = []
    for kind, _ in given:
        if merged and merged[-1][0] == kind:
            last = merged[-1][1]
            merged[-1] = (kind, replace(last, count=last.count + 1))
        else:
            merged.append((kind, means[kind]))
    return [layer for _, layer in merged]


def _mean(layers: Sequence[Layers]) -> Layers:
    keys = ("forward_s", "input_backward_s", "weight_backward_s", "backward_s", "optimizer_s")
    means = {key: sum(getattr(layer, key) for layer in layers) / len(layers) for key in keys}
    # The first layer that saves a tensor counts it, so a later one of the same kind may count less.
    return replace(layers[0], **means, activation_bytes=max(layer.activation_bytes for layer in layers))
