"""`annotate`: names the actions of schedules whose actions PyTorch does not name in traces.

PyTorch's multi-stage runtime names the range of each action. `Schedule1F1B` names none, and `ScheduleGPipe` does not name
stages. This module wraps the methods of their stages that compute and that make messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pipewright.torch import versions
from pipewright.torch.errors import TableError
from pipewright.torch.kineto import PREFIX

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
    index = stage.stage_index
    stage.forward_one_chunk = _around(stage.forward_one_chunk, record, lambda microbatch, _: f"{index}F{microbatch}")

    def backward(microbatch: int, options: dict[str, Any]) -> str:
        return f"{index}{'B' if options.get('full_backward', True) else 'I'}{microbatch}"

    stage.backward_one_chunk = _around(stage.backward_one_chunk, record, backward)
    stage.backward_weight_one_chunk = _around(
        stage.backward_weight_one_chunk, record, lambda microbatch, _: f"{index}W{microbatch}"
    )
    for method, kind in _MESSAGES.items():
        setattr(stage, method, _before(getattr(stage, method), record, f"{PREFIX}{index}{kind}"))


def _around(method: Callable[..., Any], record: Callable[[str], Any], name: Callable[[int, dict], str]) -> Callable[..., Any]:
    """Returns the method within a named range."""

    def named(microbatch: int, *args: Any, **options: Any) -> Any:
        with record(PREFIX + name(microbatch, options)):
            return method(microbatch, *args, **options)

    named.names_actions = True  # type: ignore[attr-defined]
    return named


def _before(method: Callable[[int], list], record: Callable[[str], Any], name: str) -> Callable[[int], list]:
    """Returns the method with a named range that marks the time of its call, if it makes a message."""

    def named(microbatch: int) -> list:
        operations = method(microbatch)
        if operations:
            with record(f"{name}{microbatch}"):
                pass
        return operations

    return named
