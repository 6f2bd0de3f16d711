"""`annotate`: names the actions of schedules whose actions PyTorch does not name in traces.

PyTorch's multi-stage runtime names the range of each action. `Schedule1F1B` names none, and `ScheduleGPipe` does not name
stages. This module wraps the methods of their stages that compute and that make messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pipewright_pp.torch import versions
from pipewright_pp.torch.errors import TableError
from pipewright_pp.torch.kineto import PREFIX

Annotated = TypeVar("Annotated")

# The method of a stage that makes the operations of a message, and the kind of the action.
_MESSAGES = {
    "get_fwd_recv_ops": "RECV_F",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_bwd_send_ops": "SEND_B",
}


def annotate(schedule: Annotated, *, allow_untested: bool = False) -> Annotated:
    """Makes a schedule of PyTorch name its actions in traces, and returns it. Multi-stage schedules do so already.

    The range of a forward lacks the loss, because single-stage schedules compute it between two actions.

    Raises `TableError` if `schedule` is not a schedule of PyTorch, and `UntestedVersion`.
    """
    torch, _ = versions.load(allow_untested=allow_untested)
    if hasattr(schedule, "pipeline_order_with_comms"):
        return schedule
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages == [None]:
        raise TableError(f"read a {type(schedule).__name__}; a schedule of torch.distributed.pipelining was expected")
    for stage in stages:
        _annotate_stage(stage, torch.profiler.record_function)
    return schedule


def _annotate_stage(stage: Any, record: Callable[[str], Any]) -> None:
    if getattr(stage.forward_one_chunk, "names_actions", False):
        return

    def mark(action: str, _: list[Any]) -> None:
        with record(PREFIX + action):
            pass

    around_computations(stage, lambda action, _: record(PREFIX + action))
    before_messages(stage, mark)


def around_computations(stage: Any, within: Callable[[str, int], AbstractContextManager[Any]]) -> None:
    """Runs each computation of a stage within a context.

    `within` gets the action, such as `1F0`, and its microbatch, and makes the context.
    """
    index = stage.stage_index

    def backward(options: dict[str, Any]) -> str:
        return "B" if options.get("full_backward", True) else "I"

    stage.forward_one_chunk = _around(stage.forward_one_chunk, within, lambda _: f"{index}F")
    stage.backward_one_chunk = _around(stage.backward_one_chunk, within, lambda options: f"{index}{backward(options)}")
    stage.backward_weight_one_chunk = _around(stage.backward_weight_one_chunk, within, lambda _: f"{index}W")


def before_messages(stage: Any, mark: Callable[[str, list[Any]], None]) -> None:
    """Calls `mark` with the action of each message of a stage, such as `1RECV_F0`, and its operations, when PyTorch makes them."""
    for method, kind in _MESSAGES.items():
        setattr(stage, method, _before(getattr(stage, method), mark, f"{stage.stage_index}{kind}"))


#: The attributes of a stage that `around_computations` and `before_messages` replace.
WRAPPED = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", *_MESSAGES)


def restore(stage: Any, attributes: Mapping[str, Any]) -> None:
    """Sets the attributes of an object to what they were; None removes one."""
    for name, value in attributes.items():
        if value is None:
            stage.__dict__.pop(name, None)
        else:
            setattr(stage, name, value)


def _around(
    method: Callable[..., Any],
    within: Callable[[str, int], AbstractContextManager[Any]],
    name: Callable[[dict[str, Any]], str],
) -> Callable[..., Any]:
    """Returns the method within the context of its action."""

    def named(microbatch: int, *args: Any, **options: Any) -> Any:
        with within(f"{name(options)}{microbatch}", microbatch):
            return method(microbatch, *args, **options)

    named.names_actions = True  # type: ignore[attr-defined]
    return named


def _before(method: Callable[[int], list[Any]], mark: Callable[[str, list[Any]], None], name: str) -> Callable[[int], list[Any]]:
    """Returns the method with a call of `mark` after it, if it makes a message."""

    def named(microbatch: int) -> list[Any]:
        operations = method(microbatch)
        if operations:
            mark(f"{name}{microbatch}", operations)
        return operations

    return named
