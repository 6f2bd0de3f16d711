"""Measures the layers of a model one by one, as a pipeline computes them. Imports PyTorch.

All layers run as a chain. The output of each is detached before the next one gets it, so each has a tape of its own and its
backward can be timed alone. A repetition runs the chain twice: once with the whole backward (`B`), and once with the two
halves into which PyTorch's pipeline runtime splits it (`I` and `W`). In both, the forwards of all layers run first, and the
backwards follow in reverse, so that a layer does not find its tensors in the caches only because it has just used them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipewright_pp.torch.errors import ChainError


@dataclass(frozen=True)
class Loss:
    """The loss that the last layer computes: its function, and the targets of the microbatch."""

    function: Callable[[Any, Any], Tensor]
    target: Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer in bytes."""

    output: int
    parameters: int
    activations: int


class Stopwatch:
    """Times of calls in seconds. Waits for the device before and after each call."""

    def __init__(self, device: torch.device):
        self._device = device

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def time(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Returns the time of a call and its result."""
        self._synchronize()
        start = time.perf_counter()
        result = call()
        self._synchronize()
        return time.perf_counter() - start, result


@dataclass(frozen=True)
class Times:
    """The times of a layer in seconds, or of one repetition."""

    forward: float
    input_backward: float
    weight_backward: float
    backward: float


@dataclass
class _Run:
    """The tape of one layer: its inputs that require gradients, and its outputs that have some."""

    layer: torch.nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def measure(
    layers: Sequence[torch.nn.Module],
    example: tuple[Any, ...],
    loss: Loss | None,
    *,
    repetitions: int,
    warmup: int,
) -> list[Times]:
    """Returns for each layer the mean times of `F`, `I`, `W` and `B`, for the microbatch `example`.

    A step is a sum of many actions, so slow ones count as well, and a median would leave them out.

    The gradients of parameters exist while backwards run, as in all microbatches of a step but the first. They are
    removed afterwards.

    Raises `ChainError` if the layers are not a chain, or PyTorch cannot split the backward of one.
    """
    stopwatch = Stopwatch(device_of(layers, example))
    samples: list[list[Times]] = [[] for _ in layers]
    for repetition in range(warmup + repetitions):
        forwards, whole = _timed(layers, example, loss, stopwatch, _whole_backward)
        again, halves = _timed(layers, example, loss, stopwatch, _split_backward)
        if repetition >= warmup:
            for index, of_layer in enumerate(samples):
                forward = (forwards[index] + again[index]) / 2
                of_layer.append(Times(forward, *halves[index], sum(whole[index])))
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return [_means(of_layer) for of_layer in samples]


def sizes(layers: Sequence[torch.nn.Module], example: tuple[Any, ...], loss: Loss | None) -> list[Sizes]:
    """Returns the sizes of each layer for the microbatch `example`.

    Activations are the tensors that the forward saves for the backward, without parameters and without what an earlier
    layer has saved already.
    """
    seen = {tensor.untyped_storage().data_ptr() for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    held: list[Any] = []
    measured = []
    values = example
    for index, layer in enumerate(layers):
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                saved += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run, values = _forward(index, layer, values, loss if index == len(layers) - 1 else None)
        # Storages are compared by address, so none may be freed before the last layer has run.
        held.append((run, values))
        parameters = sum(parameter.nbytes for parameter in layer.parameters())
        measured.append(Sizes(sum(value.nbytes for value in values if isinstance(value, Tensor)), parameters, saved))
    return measured


def optimizer_times(
    layers: Sequence[torch.nn.Module], make: Callable[[list[torch.nn.Parameter]], Any], *, repetitions: int
) -> list[float]:
    """Returns for each layer the median time of an optimizer's step in seconds. Parameters keep their values."""
    times = []
    for layer in layers:
        parameters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in layer.parameters()]
        if not parameters:
            times.append(0.0)
            continue
        stopwatch = Stopwatch(parameters[0].device)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = make(parameters)
        # The first step allocates the optimizer's state.
        samples = [stopwatch.time(optimizer.step)[0] for _ in range(repetitions + 1)][1:]
        times.append(statistics.median(samples))
    return times


def _timed(
    layers: Sequence[torch.nn.Module],
    example: tuple[Any, ...],
    loss: Loss | None,
    stopwatch: Stopwatch,
    backward: Callable[[int, _Run, Stopwatch], tuple[float, float]],
) -> tuple[list[float], list[tuple[float, float]]]:
    """Returns the times of all forwards and of all backwards in two parts."""
    values = example
    runs, forwards = [], []
    for index, layer in enumerate(layers):
        of_layer = loss if index == len(layers) - 1 else None
        seconds, (run, values) = stopwatch.time(lambda: _forward(index, layer, values, of_layer))
        runs.append(run)
        forwards.append(seconds)
    backwards = [(0.0, 0.0)] * len(layers)
    for index in reversed(range(len(layers))):
        run = runs.pop()
        if run.outputs:
            backwards[index] = backward(index, run, stopwatch)
    return forwards, backwards


def _forward(index: int, layer: torch.nn.Module, values: tuple[Any, ...], loss: Loss | None) -> tuple[_Run, tuple[Any, ...]]:
    """Runs a layer on the detached outputs of the one before it; returns its tape and its outputs."""
    given = tuple(_leaf(value, is_boundary=index > 0) for value in values)
    try:
        output = layer(*map(_changeable, given))
        if loss is not None:
            output = loss.function(output, loss.target)
    except Exception as error:
        raise ChainError(
            f"layer {index} ({type(layer).__name__}) does not run on {_shapes(given)}, the output of the layer before it: {error}",
            layer=index,
        ) from error
    outputs = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(value, Tensor) for value in outputs):
        raise ChainError(
            f"layer {index} ({type(layer).__name__}) returns {[type(value).__name__ for value in outputs]}; a tensor or a tuple of "
            "tensors was expected, which a pipeline can send",
            layer=index,
        )
    inputs = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
    return _Run(layer, inputs, [value for value in outputs if value.requires_grad]), outputs


def _leaf(value: Any, *, is_boundary: bool) -> Any:
    """Returns an input without the tape before it. The inputs of the model require no gradient, others do if they can."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(is_boundary and value.is_floating_point())


def _changeable(value: Any) -> Any:
    """Returns an input that a layer may change in place, which PyTorch forbids for leaves and for their views.

    It has the memory of the leaf, and its gradient is the leaf's.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return torch.ops.aten._unsafe_view.default(value, value.shape)


def _whole_backward(_: int, run: _Run, stopwatch: Stopwatch) -> tuple[float, float]:
    """Times `B`. The gradients of the outputs are made beforehand."""
    gradients = [torch.ones_like(output) for output in run.outputs]
    return stopwatch.time(lambda: torch.autograd.backward(run.outputs, gradients))[0], 0.0


def _split_backward(index: int, run: _Run, stopwatch: Stopwatch) -> tuple[float, float]:
    """Times `I` and `W` as PyTorch's runtime computes them: without inputs that require gradients, `W` is the whole backward."""
    if not run.inputs:
        return 0.0, _whole_backward(index, run, stopwatch)[0]
    # PyTorch detaches the outputs in place, which it forbids for views.
    outputs = [torch.ops.aten._unsafe_view.default(output, output.shape) for output in run.outputs]
    gradients = [torch.ones_like(output) for output in outputs]
    run.outputs.clear()
    try:
        inputs, (_, groups) = stopwatch.time(
            lambda: stage_backward_input(outputs, gradients, run.inputs, run.layer.parameters())
        )
        weights, _ = stopwatch.time(lambda: stage_backward_weight(run.layer.parameters(), groups))
    except Exception as error:
        raise ChainError(
            f"PyTorch cannot split the backward of layer {index} ({type(run.layer).__name__}) into gradients of inputs and of "
            f"weights: {error}",
            layer=index,
        ) from error
    return inputs, weights


def _means(samples: list[Times]) -> Times:
    return Times(*(statistics.fmean(times) for times in zip(*(vars(sample).values() for sample in samples))))


def device_of(layers: Sequence[torch.nn.Module], example: tuple[Any, ...]) -> torch.device:
    """Returns the device of the layers, or of the example if no layer has parameters.

    Raises `ChainError` if neither the layers nor the example have a tensor.
    """
    tensors = (tensor for layer in layers for tensor in layer.parameters())
    first: Tensor | None = next(tensors, None)
    if first is None:
        first = next((value for value in example if isinstance(value, Tensor)), None)
    if first is None:
        raise ChainError("neither the layers nor the example have a tensor")
    return first.device


def _shapes(values: tuple[Any, ...]) -> str:
    return ", ".join(str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__ for value in values)
