"""Runs the uncut model on the batch of a step, microbatch by microbatch, and sketches what a pipeline has of it.

Each microbatch runs forward alone, as it does in a pipeline. The loss is computed once, on the outputs of the whole batch, and
the backward follows microbatch by microbatch, so the gradient of each microbatch is known. Imports PyTorch.

The value between two stages is not known by name. Candidates are the inputs and outputs of the modules that run after the
last module with parameters of one stage and before the first one of the next stage.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import VerifyError, sentence_of
from .matching import Names
from .recording import random_state, same_state
from .sketches import Sketch, sketch, sketches, tensors_in


@dataclass
class Candidate:
    """A value between two stages: in each microbatch, the tensor with its sketch, and later its gradient."""

    values: dict[int, Sketch] = field(default_factory=dict)
    gradients: dict[int, Sketch] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Uncut:
    """The values of the uncut model."""

    loss: float
    grad_norm: float
    inputs: list[list[Sketch]]
    outputs: list[list[Sketch]]
    output_gradients: list[list[Sketch | None]]
    boundaries: dict[int, list[Candidate]]
    """The candidates for the values behind each stage but the last one, in the order of their computation."""
    gradients: dict[str, list[Sketch]]
    """The gradient of each trainable parameter by microbatch, before clipping. Names of one parameter have equal lists."""
    norms: dict[str, float]
    """The norm of the gradient of each trainable parameter, by its first name."""
    shared: dict[str, str]
    """The first name of each parameter."""
    trainable: set[str]
    buffers: dict[str, Sketch]
    """The buffers after the step."""
    draws: bool
    """Whether the forward takes random numbers."""
    uses: dict[str, int]
    """How often a forward calls modules with the parameter, by its first name."""
    with_target: Callable[[int, int], list[Sketch | None]]
    """The gradients of the outputs of a microbatch if the loss had another microbatch's target."""
    by_microbatch: bool
    """Whether the outputs differ from those of the whole batch at once, although no random numbers are taken."""
    precisions: set[torch.dtype]
    """The types of the outputs of all modules."""


class Model:
    """A copy of the uncut model, made before the step."""

    def __init__(self, model: Any):
        if model is None:
            raise VerifyError("rank 0 has no uncut model; pass the module, or a function that makes it, on rank 0 at least")
        try:
            self.module = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model()
        except Exception as error:
            raise VerifyError(f"the uncut model cannot be copied or made: {sentence_of(error)}") from error
        if not isinstance(self.module, torch.nn.Module):
            raise VerifyError(f"the uncut model is a {type(self.module).__name__}; a torch.nn.Module was expected")
        self.module.zero_grad(set_to_none=True)
        devices = {str(tensor.device) for tensor in (*self.module.parameters(), *self.module.buffers())}
        if len(devices) > 1:
            raise VerifyError(f"the uncut model is on the devices {sorted(devices)}; move all of it to one of them")
        self.device = devices.pop() if devices else "cpu"
        self.parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self.values = {name: sketch(value, f"{name} of the uncut model") for name, value in self.parameters.items()}
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            self.values[name] = sketch(buffer, f"{name} of the uncut model")
        first: dict[int, str] = {}
        self.shared = {name: first.setdefault(id(parameter), name) for name, parameter in self.parameters.items()}


@dataclass(frozen=True)
class Batch:
    """The batch of the step: positional and keyword arguments of the model, and the target."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any

    def check(self, device: str, microbatches: int) -> None:
        """Raises `VerifyError` if the batch is on another device, or has fewer rows than microbatches."""
        tensors = tensors_in((*self.args, *self.kwargs.values()))
        if not tensors:
            raise VerifyError(f"the inputs are {_types(self.args)}; a tensor, a tuple or a dictionary with tensors was expected")
        for tensor in [*tensors, *tensors_in(self.target)]:
            if str(tensor.device) != device:
                raise VerifyError(f"the uncut model is on {device}, and the batch on {tensor.device}; move both to one device")
        rows = tensors[0].shape[0] if tensors[0].dim() else 0
        if rows < microbatches:
            raise VerifyError(
                f"the batch has {rows} rows, and the pipeline computes {microbatches} microbatches of all replicas; pass the "
                "whole batch of the step"
            )

    def microbatches(self, count: int, given: Container[tuple[int, ...]]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the arguments of each microbatch.

        Tensors are cut along their first dimension, as PyTorch does, unless the first stage gets them whole. `given` are the
        shapes that it gets.
        """
        args = [_chunks(value, count, given) for value in self.args]
        kwargs = {name: _chunks(value, count, given) for name, value in self.kwargs.items()}
        return [
            (tuple(of_arg[index] for of_arg in args), {name: of_arg[index] for name, of_arg in kwargs.items()})
            for index in range(count)
        ]


def run(
    model: Model,
    batch: Batch,
    loss_fn: Callable[..., Any] | None,
    microbatches: int,
    names: Names,
    given: Container[tuple[int, ...]],
    autocast: Sequence[tuple[str, torch.dtype]],
) -> Uncut:
    """Runs a step of the uncut model.

    `given` are the shapes of the tensors that the first stage gets. `autocast` are the types of devices with the precision of
    the model's forward and the loss. Raises `VerifyError` if the model or the loss fails.
    """
    batch.check(model.device, microbatches)
    module = model.module
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
    watcher = _Watcher(model, names)
    outputs: list[Any] = []
    arguments = batch.microbatches(microbatches, given)
    draws = False
    devices = [model.device] if model.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        with _autocast(autocast):
            for index, (args, kwargs) in enumerate(arguments):
                state = random_state()
                watcher.begin(index)
                outputs.append(_called(f"the uncut model fails on microbatch {index}", module, *args, **kwargs))
                draws = draws or not same_state(state, random_state())
            watcher.end()
            after = {name: sketch(buffer) for name, buffer in module.named_buffers(remove_duplicate=False)}
            made = [tensors_in(output) for output in outputs]
            if not all(made):
                raise VerifyError(f"the uncut model returns a {type(outputs[0]).__name__}, which has no tensor")
            loss, gradients_of_outputs = _loss(outputs, made, batch.target, loss_fn)
        gradients: dict[str, list[Sketch]] = {}
        totals: dict[str, Tensor] = {}
        trainable = {name for name, parameter in model.parameters.items() if parameter.requires_grad}
        for index, of_microbatch in enumerate(made):
            pairs = [
                (tensor, gradient)
                for tensor, gradient in zip(of_microbatch, gradients_of_outputs[index])
                if tensor.requires_grad and gradient is not None
            ]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
            watcher.take_gradients(index)
            for name in sorted(trainable):
                if model.shared[name] != name:
                    continue
                parameter = model.parameters[name]
                own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                gradients.setdefault(name, []).append(sketch(own))
                totals[name] = own if name not in totals else totals[name] + own
                parameter.grad = None
    norms = {name: float(total.double().norm()) for name, total in totals.items()}
    return Uncut(
        loss=loss,
        grad_norm=math.hypot(*norms.values()),
        inputs=[sketches(tensors_in(args) or tensors_in(kwargs), "the batch") for args, kwargs in arguments],
        outputs=[sketches(of_microbatch, "the output of the uncut model") for of_microbatch in made],
        output_gradients=[[None if part is None else sketch(part) for part in parts] for parts in gradients_of_outputs],
        boundaries=watcher.boundaries,
        gradients={name: gradients[model.shared[name]] for name in trainable},
        norms=norms,
        shared=model.shared,
        trainable=trainable,
        buffers=after,
        draws=draws,
        uses=watcher.uses,
        with_target=lambda microbatch, other: _with_target(outputs, made, batch.target, loss_fn, microbatch, other),
        by_microbatch=not draws and bool(buffers) and _differs_at_once(module, batch, made, buffers),
        precisions=watcher.precisions,
    )


@contextlib.contextmanager
def _autocast(states: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype in states:
            stack.enter_context(torch.autocast(device, dtype))
        yield


def _loss(
    outputs: Sequence[Any], made: Sequence[Sequence[Tensor]], target: Any, loss_fn: Callable[..., Any] | None
) -> tuple[float, list[list[Tensor | None]]]:
    """Returns the loss of the whole batch, and its gradient with respect to each output of each microbatch."""
    leaves = [
        [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in of_microbatch] for of_microbatch in made
    ]
    if loss_fn is None:
        if made[0][0].numel() != 1:
            raise VerifyError("the uncut model does not return a loss; pass loss_fn(output, target)")
        loss = torch.stack([of_microbatch[0].reshape(()) for of_microbatch in leaves]).mean()
    else:
        joined = [torch.stack(parts) if parts[0].dim() == 0 else torch.cat(parts) for parts in zip(*leaves)]
        output = _filled(outputs[0], iter(joined))
        loss = _called("the loss fails on the outputs of the whole batch", loss_fn, output, target)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise VerifyError(f"loss_fn returns a {type(loss).__name__} that is not a loss; a tensor with one number was expected")
    torch.autograd.backward([loss])
    return float(loss.detach()), [[leaf.grad for leaf in of_microbatch] for of_microbatch in leaves]


def _with_target(
    outputs: Sequence[Any],
    made: Sequence[Sequence[Tensor]],
    target: Any,
    loss_fn: Callable[..., Any] | None,
    microbatch: int,
    other: int,
) -> list[Sketch | None]:
    """Returns the gradients of a microbatch's outputs if the loss has the target of `other` for it."""
    chunks = _chunks(target, len(made))
    if not isinstance(target, Tensor) or chunks[microbatch].shape != chunks[other].shape:
        return []
    chunks[microbatch] = chunks[other]
    gradients = _loss(outputs, made, torch.cat(chunks), loss_fn)[1][microbatch]
    return [None if gradient is None else sketch(gradient) for gradient in gradients]


def _differs_at_once(
    module: torch.nn.Module, batch: Batch, made: Sequence[Sequence[Tensor]], buffers: Mapping[str, Tensor]
) -> bool:
    """Returns whether the model's outputs for the whole batch at once are other ones, as with batch norm."""
    if not any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training for part in module.modules()):
        return False
    with torch.no_grad():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        at_once = tensors_in(module(*batch.args, **batch.kwargs))
    joined = [torch.cat([part.detach() for part in parts]) for parts in zip(*made) if parts[0].dim()]
    return any(one.shape != other.shape or not torch.allclose(one, other, 1e-4, 1e-5) for one, other in zip(joined, at_once))


class _Watcher:
    """Collects the candidates between the stages, by hooks on all modules of the model."""

    def __init__(self, model: Model, names: Names):
        self.boundaries: dict[int, list[Candidate]] = {}
        self.uses: dict[str, int] = {}
        owners: dict[str, set[int]] = {}
        for stage, of_stage in names.items():
            for name in of_stage.values():
                owners.setdefault(name.rpartition(".")[0], set()).add(stage)
        self.precisions: set[torch.dtype] = set()
        self._microbatch = 0
        self._finished: int | None = None
        self._window: list[Tensor] = []
        self._handles: list[Any] = []
        for name, module in model.module.named_modules():
            of_module = sorted(owners.get(name, ()))
            shared = sorted({model.shared[path] for path in model.shared if path.rpartition(".")[0] == name})
            self._handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, owners=of_module: self._enter(owners, (args, kwargs)), with_kwargs=True
                )
            )
            self._handles.append(
                module.register_forward_hook(
                    lambda _, args, output, owners=of_module, shared=shared: self._leave(owners, shared, output)
                )
            )

    def begin(self, microbatch: int) -> None:
        """Starts a microbatch."""
        self._microbatch, self._finished, self._window = microbatch, None, []

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def take_gradients(self, microbatch: int) -> None:
        """Sketches the gradients of the candidates in a microbatch, and lets their tensors go."""
        for candidates in self.boundaries.values():
            for candidate in candidates:
                tensor = candidate.tensors.pop(microbatch, None)
                if tensor is not None and tensor.grad is not None:
                    candidate.gradients[microbatch] = sketch(tensor.grad)

    def _enter(self, owners: Sequence[int], given: Any) -> None:
        if self._finished is None:
            return
        self._window.extend(tensors_in(given))
        if owners and self._finished not in owners:
            following = self._finished + 1
            if following in owners and self._microbatch not in self._closed(self._finished):
                self._close()
            self._finished, self._window = None, []

    def _leave(self, owners: Sequence[int], shared: Sequence[str], output: Any) -> None:
        self.precisions |= {tensor.dtype for tensor in tensors_in(output)}
        if self._microbatch == 0:
            for name in shared:
                self.uses[name] = self.uses.get(name, 0) + 1
        if owners:
            later = [stage for stage in owners if self._finished is None or stage >= self._finished]
            self._finished, self._window = (later or owners)[0], []
        if self._finished is not None:
            self._window.extend(tensors_in(output))

    def _closed(self, stage: int) -> set[int]:
        return {microbatch for candidate in self.boundaries.get(stage, []) for microbatch in candidate.values}

    def _close(self) -> None:
        """Keeps the window as the candidates behind the finished stage."""
        assert self._finished is not None
        candidates = self.boundaries.setdefault(self._finished, [])
        while len(candidates) < len(self._window):
            candidates.append(Candidate())
        for candidate, tensor in zip(candidates, self._window):
            candidate.values[self._microbatch] = sketch(tensor)
            if tensor.requires_grad:
                if not tensor.is_leaf:
                    tensor.retain_grad()
                candidate.tensors[self._microbatch] = tensor


def _called(problem: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise VerifyError(f"{problem}: {sentence_of(error)}") from error


def _chunks(value: Any, count: int, given: Container[tuple[int, ...]] = ()) -> list[Any]:
    if isinstance(value, Tensor) and value.dim() and value.shape[0] >= count:
        parts = torch.tensor_split(value, count)
        if tuple(value.shape) not in given or tuple(parts[0].shape) in given:
            return list(parts)
    return [value] * count


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns an output of the model with other tensors, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, part in value.items():
            made[key] = _filled(part, tensors)
        return made
    if isinstance(value, (tuple, list)):
        parts = [_filled(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _types(values: Sequence[Any]) -> str:
    return ", ".join(type(value).__name__ for value in values) or "missing"
