"""The work that `measure_machine` times: products, attention, elementwise kernels, copies and messages. Imports PyTorch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipewright_pp.torch.machine import Figure
from pipewright_pp.torch.ranks import Ranks

#: The bytes of a copy: more than any cache of a core.
COPIED = 64 << 20

#: The numbers of an update, whose tensors no cache has.
UPDATED = 1 << 25

#: The fewest bytes of a large message, which takes much longer than a small one.
LARGE_MESSAGE = 4 << 20

#: The fewest seconds of a measurement.
LEAST_SECONDS = 0.02

Parts = Callable[[], list[float]]


class Meter:
    """Takes medians of repeated measurements, while all ranks do the same.

    A measurement repeats short calls: a call that ends between two interruptions does not show that a step has them.
    """

    def __init__(self, device: torch.device, ranks: Ranks | None, repetitions: int, warmup: int):
        self.device, self.ranks, self._repetitions, self._warmup = device, ranks, repetitions, warmup

    def seconds(self, call: Callable[[], Any]) -> float:
        """Returns the seconds of one call: between two events on CUDA, by the clock on a processor."""
        return self.timed(call)[0]

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Returns the seconds of one call and its result."""
        if self.device.type == "cuda":
            make: Callable[..., torch.cuda.Event] = torch.cuda.Event
            start, end = (make(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3, result
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result

    def medians(self, parts: Parts, members: list[int] | None = None) -> list[Figure]:
        """Returns the figures of the times that `parts` returns. Ranks that are not members do nothing in it."""
        if self.ranks is not None:
            self.ranks.agree()
        for _ in range(self._warmup):
            parts()
        calls = max(1, round(LEAST_SECONDS / max(sum(parts()), 1e-9)))
        if self.ranks is not None:
            calls = max(self.ranks.agree(calls if members is None or self.ranks.rank in members else 1))
        samples = [_sums(parts() for _ in range(calls)) for _ in range(self._repetitions)]
        return [_figure([seconds / calls for seconds in of_part]) for of_part in zip(*samples)]

    def median(self, call: Callable[[], Any], members: list[int] | None = None) -> Figure:
        """Returns the figure of the time of a call, in which ranks that are not members do nothing."""
        return self.medians(lambda: [self.seconds(call)], members)[0]

    def both(self, forward: Callable[..., Tensor], *inputs: Tensor) -> list[Figure]:
        """Returns the figures of a forward and of its backward for all inputs that have gradients."""
        needed = [value.requires_grad_() for value in inputs if value.is_floating_point()]

        def parts() -> list[float]:
            first, output = self.timed(lambda: forward(*inputs))
            gradient = torch.ones_like(output)
            return [first, self.seconds(lambda: torch.autograd.grad(output, needed, gradient))]

        return self.medians(parts)


def measure(
    work: dict[str, Any],
    device: torch.device,
    ranks: Ranks | None,
    *,
    repetitions: int,
    warmup: int,
    measures_overlap: bool,
) -> dict[str, Any]:
    """Returns the figures of all parts of the work, as `pipewright_pp.cluster.shapes` lists it, of the slowest rank."""
    meter = Meter(device, ranks, repetitions, warmup)
    kind = torch.float32 if work["precision"] == "f32" else torch.bfloat16

    def random(*shape: float) -> Tensor:
        return torch.randn([int(size) for size in shape], device=device, dtype=kind)

    weights = [(row["columns"], row["rows"]) for row in work["products"] if row["role"] == "weight"]
    source, target = (torch.ones(COPIED // 4, device=device) for _ in range(2))
    one = torch.ones(1, device=device)
    host = torch.ones(COPIED // 4).pin_memory() if device.type == "cuda" else None
    message_bytes = max(int(work["tokens"] * work["kernels"][0]["width"]) * 4, LARGE_MESSAGE)
    largest = max(LARGE_MESSAGE, *(int(rows * columns) * 4 for rows, columns in weights))
    own = {
        "products": _products(meter, work["products"], random),
        "scores": _scores(meter, work["scores"], work["precision"], random),
        "kernels": _kernels(meter, work, random, weights),
        "memory": meter.median(lambda: target.copy_(source)),
        "copied_bytes": 2 * COPIED,
        "launch": meter.median(lambda: one.add_(1.0)),
        "host": meter.median(lambda: target.copy_(host, non_blocking=True)) if host is not None else None,
        "links": _links(Meter(ranks.device, ranks, repetitions, warmup), ranks, message_bytes, _parameters(work, weights)) if ranks else [],
        "overlap": _overlap(meter, ranks, weights[0], largest) if ranks and measures_overlap else None,
    }
    return ranks.slowest(own) if ranks else own


def _products(meter: Meter, rows: list[dict[str, Any]], random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    """Measures each product once for each of its uses; products of one shape get the mean of their times."""
    uses: dict[tuple[float, ...], list[Figure]] = {}
    precisions: dict[tuple[float, ...], str] = {}
    done: set[tuple[Any, ...]] = set()
    for row in rows:
        shape = (row["rows"], row["columns"], row["inner"])
        precisions[shape] = row["precision"]
        if (*shape, row["role"]) not in done:
            done.add((*shape, row["role"]))
            uses.setdefault(shape, []).append(_product(meter, row["role"], *shape, random))
    return [
        {
            **{key: int(size) for key, size in zip(("rows", "columns", "inner"), shape)},
            "precision": precisions[shape],
            "seconds": max(of_shape, key=lambda figure: figure.spread).with_value(statistics.fmean(figure.value for figure in of_shape)),
        }
        for shape, of_shape in uses.items()
    ]


def _product(meter: Meter, role: str, rows: float, columns: float, inner: float, random: Callable[..., Tensor]) -> Figure:
    """Measures a product of `rows x inner` and `inner x columns` as a linear layer computes it.

    Repetitions take turns with several pairs of tensors, so that a pair is not in a cache because it was just used.
    """
    calls: dict[str, tuple[tuple[float, float], tuple[float, float], Callable[[Tensor, Tensor], Tensor]]] = {
        "forward": ((rows, inner), (columns, inner), F.linear),
        "input": ((rows, inner), (inner, columns), torch.mm),
        "weight": ((inner, rows), (inner, columns), lambda x, gradient: gradient.t().mm(x)),
    }
    first, second, call = calls[role]
    pairs = max(1, min(8, COPIED // int(4 * inner * (rows + columns))))
    turns = cycle([(random(*first), random(*second)) for _ in range(pairs)])
    with torch.no_grad():
        return meter.median(lambda: call(*next(turns)))


def _scores(meter: Meter, shape: dict[str, int] | None, precision: str, random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    """Measures fused causal attention, of heads that lie next to each other."""
    if shape is None:
        return []
    rows, sequence, size = shape["rows"], shape["sequence"], shape["head_size"]
    queries, keys, values = (
        random(rows, sequence, shape[heads], size).transpose(1, 2) for heads in ("heads", "key_value_heads", "key_value_heads")
    )
    is_grouped = shape["heads"] != shape["key_value_heads"]
    times = meter.both(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped), queries, keys, values
    )
    return [{**shape, "precision": precision, "forward_s": times[0], "backward_s": times[1]}]


def _kernels(
    meter: Meter, work: dict[str, Any], random: Callable[..., Tensor], weights: list[tuple[float, float]]
) -> list[dict[str, Any]]:
    """Measures elementwise kernels as the rates at which the bytes pass that the cost model counts for them."""
    kernels = []
    for row in work["kernels"]:
        forward, backward = _kernel(meter, row["kind"], row["width"], work, random)
        rates = {
            "forward_gb_per_s": forward.with_value(row["forward_bytes"] / forward.value / 1e9),
            "backward_gb_per_s": backward.with_value(row["backward_bytes"] / backward.value / 1e9),
        }
        kernels.append({"kind": row["kind"], **rates})
    parameters = [random(*shape).requires_grad_() for shape in _parameters(work, weights)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    # Most tokens of the vocabulary are not in a microbatch, and a processor takes longer for zeros.
    table = random(work["vocabulary"], work["kernels"][0]["width"]).requires_grad_()
    table.grad = torch.zeros_like(table)
    table.grad[: int(work["tokens"])] = 1.0
    parameters.append(table)
    update = meter.median(torch.optim.AdamW(parameters).step)
    updated = sum(parameter.numel() for parameter in parameters)
    rate = update.with_value(work["optimizer_bytes"] * updated / update.value / 1e9)
    return [*kernels, {"kind": "optimizer", "forward_gb_per_s": rate}]


def _parameters(work: dict[str, Any], weights: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns parameters for an update, about `UPDATED` at most: the matrices of the blocks and of the head, with queries,
    keys, values, gates and up projections apart, as most models have them.
    """
    scores = work["scores"] or {"heads": 0, "key_value_heads": 0, "head_size": 0}
    widths = [scores["head_size"] * scores[heads] for heads in ("heads", "key_value_heads", "key_value_heads")]
    gates = [[row["width"]] * 2 for row in work["kernels"] if row["kind"] == "gated"]
    apart = {sum(parts): parts for parts in [widths, *gates]}
    shapes = [(part, rows) for columns, rows in weights[:-1] for part in apart.get(columns, [columns])]
    blocks = int(UPDATED // sum(columns * rows for columns, rows in shapes))
    return [*shapes * max(1, min(work["blocks"], blocks)), weights[-1]]


def _kernel(meter: Meter, kind: str, width: float, work: dict[str, Any], random: Callable[..., Tensor]) -> list[Figure]:
    """Measures the forward and the backward of a kind of kernels on all tokens of a microbatch."""
    tokens = int(work["tokens"])
    if kind == "norm":
        return meter.both(lambda x, weight: F.rms_norm(x, (int(width),), weight), random(tokens, width), random(width))
    if kind == "residual":
        x, y = random(tokens, width), random(tokens, width)
        # The backward sums the gradients of both branches.
        return meter.medians(lambda: [meter.seconds(lambda: x + y), meter.seconds(lambda: x + y)])
    if kind == "rotary":
        return _positions(meter, width, tokens, work["rotary"], random)
    if kind == "gated":
        return meter.both(lambda gate, x: F.silu(gate) * x, random(tokens, width), random(tokens, width))
    if kind == "plain":
        return meter.both(F.gelu, random(tokens, width))
    logits = random(tokens, width) if kind == "loss" else random(work["vocabulary"], width)
    ids = torch.randint(work["vocabulary"] if kind == "embedding" else int(width), (tokens,), device=meter.device)
    if kind == "loss":
        return meter.both(lambda x: F.cross_entropy(x, ids), logits)
    return meter.both(lambda table: F.embedding(ids, table), logits)


def _positions(
    meter: Meter, width: float, tokens: int, parts: dict[str, int], random: Callable[..., Tensor]
) -> list[Figure]:
    """Measures rotary positions. Latent attention joins the parts of queries and keys with and without positions, and copies
    values, for each head.
    """
    plain, size, values = (parts[key] for key in ("plain_size", "rotary_size", "value_size"))
    cos, sin = random(tokens, size), random(tokens, size)
    if plain + values == 0:
        return meter.both(lambda x: _rotate(x, cos, sin), random(tokens, max(1.0, width / size), size).transpose(0, 1))
    split = [plain, size, plain, size, values]
    x = random(tokens, max(1.0, width / sum(split)), sum(split)).transpose(0, 1)

    def join(x: Tensor) -> Tensor:
        queries, rotated_queries, keys, rotated_keys, rest = torch.split(x, split, dim=-1)
        rotated = [_rotate(part, cos, sin) for part in (rotated_queries, rotated_keys)]
        return torch.cat((queries, rotated[0], keys, rotated[1], rest), dim=-1)

    return meter.both(join, x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _links(meter: Meter, ranks: Ranks, message_bytes: int, gradients: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Measures messages and collectives, each with a small tensor and with much more: the latency and the bandwidth."""
    count, group = ranks.count, ranks.group
    rounds, share = math.ceil(math.log2(count)), (count - 1) / count
    links = []
    # The first rank sends to the next one, and to the first one of another node.
    for other in dict.fromkeys([1, *(rank for rank in range(count) if ranks.place(rank) == "network")][:2]):
        times = [meter.median(lambda: _there_and_back(ranks, tensor, other), [0, other]) for tensor in _tensors(ranks, message_bytes)]
        links.append(_link("message", ranks.place(other), times, message_bytes, 0.5, 1.0))
    on_host = ranks.hosts.count(ranks.hosts[0]) if ranks.place() == "network" else 1
    # Programs sum gradients one by one, and find none of them in a cache.
    small = [_tensors(ranks, message_bytes)[:1]]
    large = [[torch.zeros([int(side) for side in shape], device=ranks.device) for shape in gradients] for _ in range(3)]
    times = [
        meter.median(lambda: [dist.all_reduce(tensor, group=group) for tensor in next(turns)])
        for turns in (cycle(small), cycle(large))
    ]
    summed_bytes = sum(4 * tensor.numel() for tensor in large[0])
    links.append(_link("all_reduce", ranks.place(), times, summed_bytes, 1 / (2 * rounds), 2 * share / on_host))
    received = [(tensor, torch.empty_like(tensor)) for tensor in _tensors(ranks, message_bytes)]
    times = [meter.median(lambda: dist.all_to_all_single(target, source, group=group)) for source, target in received]
    links.append(_link("all_to_all", ranks.place(), times, message_bytes, 1 / rounds, share))
    return links


def _tensors(ranks: Ranks, size: int) -> list[Tensor]:
    """Returns a small and a large tensor, whose elements all ranks can divide among themselves."""
    large = max(size // 4 // ranks.count, 1024)
    return [torch.ones(elements * ranks.count, device=ranks.device) for elements in (1, large)]


def _link(use: str, place: str, times: list[Figure], size: int, of_latency: float, of_bytes: float) -> dict[str, Any]:
    """Returns the rate of a link. A message is `of_latency` of the small time, and `of_bytes` of the large size pass."""
    small, large = times
    # On a busy machine, the small message may take as long as the large one.
    seconds = max(large.value - small.value, large.value / 2) * (0.5 if use == "message" else 1.0)
    return {
        "use": use,
        "between": place,
        "gb_per_s": large.with_value(of_bytes * size / seconds / 1e9),
        "latency_us": small.with_value(of_latency * small.value * 1e6),
    }


def _there_and_back(ranks: Ranks, tensor: Tensor, other: int) -> None:
    if ranks.rank == 0:
        dist.send(tensor, group=ranks.group, group_dst=other)
        dist.recv(tensor, group=ranks.group, group_src=other)
    elif ranks.rank == other:
        dist.recv(tensor, group=ranks.group, group_src=0)
        dist.send(tensor, group=ranks.group, group_dst=0)


def _overlap(meter: Meter, ranks: Ranks, shape: tuple[float, float], size: int) -> Figure:
    """Measures the share of a sum of gradients that products hide, which take as long as the sum alone."""
    summed = _tensors(ranks, size)[1]
    x = torch.randn([int(side) for side in shape], device=meter.device)

    def wait(summing: Any) -> None:
        summing.wait()
        if meter.device.type == "cuda":
            torch.cuda.synchronize(meter.device)

    alone = meter.median(lambda: wait(dist.all_reduce(summed, group=ranks.group, async_op=True)))
    once = meter.median(lambda: x.t().mm(x))
    repeated = max(1, round(alone.value / once.value))

    def computed() -> None:
        for _ in range(repeated):
            x.t().mm(x)

    def beside() -> None:
        summing = dist.all_reduce(summed, group=ranks.group, async_op=True)
        computed()
        wait(summing)

    computing, both = meter.median(computed), meter.median(beside)
    hidden = (alone.value + computing.value - both.value) / min(alone.value, computing.value)
    return both.with_value(min(max(hidden, 0.0), 1.0))


def _sums(parts: Iterable[list[float]]) -> list[float]:
    return [sum(of_part) for of_part in zip(*parts)]


def _figure(samples: list[float]) -> Figure:
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (median, median, median)
    return Figure(median, (high - low) / 2 / median if median > 0 else 0.0, len(samples))
