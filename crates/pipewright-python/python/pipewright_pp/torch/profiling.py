"""`profile`: measures the layers of a model in PyTorch, for `pipewright_pp.plan`."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pipewright_pp
from pipewright_pp.torch import versions
from pipewright_pp.torch.backends import device_of_messages
from pipewright_pp.torch.errors import ChainError
from pipewright_pp.torch.profile_keys import Layers, Link, ProfileParts, merge_equal, profile_keys
from pipewright_pp.torch.stages import layers_of

#: The link of a profile that was measured in one process: it is assumed, and the profile says so.
ASSUMED_LINK = Link(latency_s=20e-6, bytes_per_s=10e9)


def profile(
    modules: Any,
    example: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    optimizer: Callable[[list[Any]], Any] | None = None,
    link: Link | None = None,
    memory_bytes: int | None = None,
    repetitions: int = 10,
    warmup: int = 3,
    group: Any = None,
    allow_untested: bool = False,
) -> pipewright_pp.Profile:
    """Measures the times and the sizes of a model's layers, and returns their profile.

    `modules` are the layers in order: a `torch.nn.Sequential` or a list. `example` is the input of a microbatch, a tensor or a
    tuple, whose first dimension is its rows. `loss_fn(output, target)` is measured as a part of the last layer.
    `optimizer` makes an optimizer from parameters, such as `torch.optim.AdamW`; without it, the update takes no time.

    Layers with the same text (`repr`), parameters and outputs are one kind, and get the mean of their times. If a process group
    exists, all its processes (of `group`) call this function at the same time, because they share caches and memory, and the
    times are means over them; then the link is measured too, unless `link` is given. Otherwise it is assumed.

    Raises `ChainError` if a layer does not run on the output of the one before it, and `UntestedVersion`.
    """
    torch, _ = versions.load(allow_untested=allow_untested)
    from pipewright_pp.torch import layers as measured

    layers = layers_of(modules)
    given = example if isinstance(example, tuple) else (example,)
    check(layers, given, repetitions, warmup)
    loss = None if loss_fn is None else measured.Loss(loss_fn, target)
    sizes = measured.sizes(layers, given, loss)
    shared = _Shared(torch, group, measured.device_of(layers, given))
    shared.wait()
    times = measured.measure(layers, given, loss, repetitions=repetitions, warmup=warmup)
    updates = [0.0] * len(layers)
    if optimizer is not None:
        updates = measured.optimizer_times(layers, optimizer, repetitions=repetitions)
    rows = shared.means([[*vars(of_layer).values(), update] for of_layer, update in zip(times, updates)])
    entries = [
        (
            _kind(layer, size),
            Layers(type(layer).__name__, 1, forward, of_inputs, of_weights, backward, update, size.output, size.parameters, size.activations),
        )
        for layer, size, (forward, of_inputs, of_weights, backward, update) in zip(layers, sizes, rows)
    ]
    found_link = link or shared.link(max(size.output for size in sizes[:-1] or sizes), repetitions)
    parts = ProfileParts(
        layers=merge_equal(entries),
        link=found_link or ASSUMED_LINK,
        device=_device_name(torch, layers),
        rows=_rows(given),
        ranks=shared.ranks,
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        assumed=() if found_link else ("link.latency_s", "link.bytes_per_s"),
    )
    return pipewright_pp.Profile(profile_keys(parts))


def check(layers: list[Any], example: tuple[Any, ...], repetitions: int, warmup: int) -> None:
    """Checks what can be checked before anything runs. Raises `ChainError`."""
    if not layers:
        raise ChainError("there are no layers; the layers of a model were expected, in order")
    if repetitions < 1:
        raise ChainError(f"repetitions is {repetitions}; a number from 1 was expected")
    if warmup < 0:
        raise ChainError(f"warmup is {warmup}; a number from 0 was expected")
    if not example:
        raise ChainError("the example is an empty tuple; the input of a microbatch was expected")


class _Shared:
    """The processes that measure at the same time: the members of a group, or this process alone."""

    def __init__(self, torch: Any, group: Any, device: Any):
        self._torch, self._group, self._of_layers = torch, group, device
        dist = torch.distributed
        self.ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1

    def wait(self) -> None:
        """Waits for the other processes."""
        if self.ranks > 1:
            self._torch.distributed.barrier(self._group)

    def means(self, values: list[list[float]]) -> list[list[float]]:
        """Returns the means over the processes."""
        if self.ranks == 1:
            return values
        tensor = self._torch.tensor(values, dtype=self._torch.float64, device=self._device())
        self._torch.distributed.all_reduce(tensor, group=self._group)
        means: list[list[float]] = (tensor / self.ranks).tolist()
        return means

    def link(self, message_bytes: int, repetitions: int) -> Link | None:
        """Returns the measured link; None for one process."""
        if self.ranks == 1:
            return None
        from pipewright_pp.torch.links import measure_link

        return measure_link(self._group, message_bytes=message_bytes, device=self._device(), repetitions=repetitions)

    def _device(self) -> Any:
        """Returns the device of the tensors that the processes exchange."""
        return device_of_messages(self._torch, self._group, self._of_layers)


def _kind(layer: Any, sizes: Any) -> tuple[Any, ...]:
    parameters = tuple((tuple(parameter.shape), str(parameter.dtype)) for parameter in layer.parameters())
    return repr(layer), parameters, sizes.output


def _rows(example: tuple[Any, ...]) -> int:
    shapes = [value.shape for value in example if hasattr(value, "shape") and len(value.shape) > 0]
    return int(shapes[0][0]) if shapes else 1


def _device_name(torch: Any, layers: list[Any]) -> str:
    parameter = next((parameter for layer in layers for parameter in layer.parameters()), None)
    if parameter is not None and parameter.device.type == "cuda":
        return str(torch.cuda.get_device_name(parameter.device))
    return platform.processor() or platform.machine()
