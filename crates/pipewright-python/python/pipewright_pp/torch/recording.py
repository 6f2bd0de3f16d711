"""Records a step of a pipeline on one rank, by hooks on the modules of its stages. Imports PyTorch.

A stage of PyTorch names the microbatch and the action of each call, with the same wrappers as `annotate`. A plain module has
none, so its forwards are the microbatches in their order. All hooks are removed when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .annotate import WRAPPED, around_computations, before_messages, restore
from .errors import VerifyError
from .records import Buffer, Call, Parameter, RankRecord, StageRecord
from .sketches import Sketch, sketch, sketches, tensors_in


@dataclass(frozen=True)
class Part:
    """A stage of this rank: its module, and PyTorch's stage around it if there is one."""

    index: int
    module: torch.nn.Module
    stage: Any = None


def parts_of(stages: Any) -> list[Part]:
    """Returns the stages of this rank: of a list of `PipelineStage`, or of a mapping from indices to modules.

    Raises `VerifyError` if they are something else.
    """
    if isinstance(stages, Mapping):
        parts = [Part(index, module) for index, module in stages.items()]
    else:
        given: list[Any] = list(stages) if isinstance(stages, Sequence) else [stages]
        parts = [Part(getattr(stage, "stage_index", -1), getattr(stage, "submod", stage), stage) for stage in given]
    for part in parts:
        if not isinstance(part.index, int) or part.index < 0 or not isinstance(part.module, torch.nn.Module):
            raise VerifyError(
                f"a stage is a {type(part.stage if part.stage is not None else part.module).__name__}; a list of "
                "PipelineStage was expected, or a mapping from the indices of stages to modules, such as {0: first}"
            )
    return parts


class Recorder:
    """Records the stages of this rank while its context is open."""

    def __init__(self, parts: Sequence[Part], *, rank: int, replica: int):
        self.record = RankRecord()
        self._parts = list(parts)
        self._stages = [StageRecord(part.index, replica, rank) for part in parts]
        self._undo: list[Callable[[], None]] = []
        self._has_gradients = False
        self._observers: list[_Observer] = []
        self._optimized: set[int] = set()
        self.record.stages = self._stages

    def __enter__(self) -> Recorder:
        try:
            for part, record in zip(self._parts, self._stages):
                for name, parameter in part.module.named_parameters(remove_duplicate=False):
                    what = f"the parameter {name} of stage {part.index}"
                    record.parameters[name] = Parameter(sketch(parameter, what), parameter.requires_grad)
                for name, buffer in part.module.named_buffers(remove_duplicate=False):
                    record.buffers[name] = Buffer(sketch(buffer, f"the buffer {name} of stage {part.index}"))
                observer = _Observer(part, record, self.record.actions, self._undo)
                observer.attach()
                self._observers.append(observer)
            handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_optimizer(optimizer))
            self._undo.append(handle.remove)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def finish(self) -> RankRecord:
        """Records the state after the step, and returns everything.

        Raises `VerifyError` if a stage of plain code only ran without gradients.
        """
        for observer in self._observers:
            observer.check()
        self._take_gradients()
        own = {id(parameter) for part in self._parts for parameter in part.module.parameters()}
        has_copies = not self._optimized <= own
        for part, record in zip(self._parts, self._stages):
            for name, parameter in part.module.named_parameters(remove_duplicate=False):
                record.parameters[name].after = sketch(parameter)
                is_stepped = id(parameter) in self._optimized
                record.parameters[name].is_stepped = None if has_copies and not is_stepped else is_stepped
            for name, buffer in part.module.named_buffers(remove_duplicate=False):
                if name in record.buffers:
                    record.buffers[name].after = sketch(buffer)
        return self.record

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._take_gradients()
        self._optimized |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def _take_gradients(self) -> None:
        """Records the gradients, once: before the first optimizer step, or after the step if there is none."""
        if self._has_gradients:
            return
        self._has_gradients = True
        for part, record in zip(self._parts, self._stages):
            for name, parameter in part.module.named_parameters(remove_duplicate=False):
                gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
                if gradient is not None:
                    record.parameters[name].gradient = sketch(gradient, f"the gradient of {name} of stage {part.index}")


class _Observer:
    """Records the calls of one stage."""

    def __init__(self, part: Part, record: StageRecord, actions: list[str], undo: list[Callable[[], None]]):
        self._part, self._record, self._actions, self._undo = part, record, actions, undo
        self._base = 0
        self._current: int | None = None
        self._state: list[Tensor] = []
        self._without_gradients = 0
        tensors = [*part.module.parameters(), *part.module.buffers()]
        self._devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})

    def check(self) -> None:
        """Raises `VerifyError` if the stage only ran without gradients."""
        if self._without_gradients and not self._record.calls:
            raise VerifyError(
                f"stage {self._part.index} only runs without gradients, as in a checkpoint with use_reentrant=True; use "
                "use_reentrant=False around the stage, and let the step run forwards and backwards"
            )

    def attach(self) -> None:
        module, stage = self._part.module, self._part.stage
        if hasattr(stage, "forward_one_chunk"):
            before = {name: stage.__dict__.get(name) for name in WRAPPED}
            self._undo.append(lambda: restore(stage, before))
            around_computations(stage, self._within)
            before_messages(stage, lambda action, _: self._actions.append(action))
        handles = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._undo.extend(handle.remove for handle in handles)

    @contextmanager
    def _within(self, action: str, microbatch: int) -> Iterator[None]:
        """The context of a computation of PyTorch's stage: names the microbatch of the module's call in it."""
        self._actions.append(action)
        is_forward = action == f"{self._part.index}F{microbatch}"
        if is_forward:
            if microbatch + self._base in self._record.calls:
                self._base = max(self._record.calls) + 1
            self._current = microbatch + self._base
        try:
            yield
        finally:
            if is_forward:
                self._current = None

    def _before_forward(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_plain = not hasattr(self._part.stage, "forward_one_chunk")
        if is_plain:
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                self._without_gradients += 1
                return  # An evaluation, or a backward that computes the stage again.
            self._current = len(self._record.calls)
            self._actions.append(f"{self._part.index}F{self._current}")
        elif self._current is None:
            return  # PyTorch runs the module to learn the shapes of its outputs.
        microbatch = self._current
        call = self._record.calls[microbatch] = Call()
        self._record.shapes |= {tuple(tensor.shape) for tensor in tensors_in((args, kwargs))}
        self._record.autocast = tuple(
            (device, torch.get_autocast_dtype(device)) for device in self._devices if torch.is_autocast_enabled(device)
        )
        given = tensors_in(args) or tensors_in(kwargs)
        call.inputs = sketches(given, f"the input of stage {self._part.index}")
        for position, tensor in enumerate(given):
            if tensor.requires_grad and torch.is_grad_enabled():
                self._observe_gradient(tensor, call.input_gradients, position)
        self._state = random_state()

    def _after_forward(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._current is None:
            return
        microbatch, call = self._current, self._record.calls[self._current]
        if not hasattr(self._part.stage, "forward_one_chunk"):
            self._current = None
        call.draws = not same_state(self._state, random_state())
        made = tensors_in(output)
        if not made:
            raise VerifyError(f"stage {self._part.index} returns a {type(output).__name__}, which has no tensor")
        call.outputs = sketches(made, f"the output of stage {self._part.index}")
        for position, tensor in enumerate(made):
            if tensor.requires_grad:
                self._observe_gradient(tensor, call.output_gradients, position, f"{self._part.index}B{microbatch}")

    def _observe_gradient(self, tensor: Any, gradients: dict[int, Sketch], position: int, action: str = "") -> None:
        def observe(gradient: Tensor) -> None:
            # A backward in two halves reaches the output twice.
            if position in gradients:
                return
            if action and not gradients and not hasattr(self._part.stage, "forward_one_chunk"):
                self._actions.append(action)
            gradients[position] = sketch(gradient)

        handle = tensor.register_hook(observe)
        self._undo.append(handle.remove)


def random_state() -> list[Tensor]:
    """Returns the states of the random generators of this process: of the processor, and of the current GPU if it is used."""
    states = [torch.get_rng_state()]
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        states.append(cuda.get_rng_state())
    return states


def same_state(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Returns whether no random numbers were taken between two states."""
    return len(first) == len(second) and all(torch.equal(one, other) for one, other in zip(first, second))
