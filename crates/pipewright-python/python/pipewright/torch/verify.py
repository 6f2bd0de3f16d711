"""`verify`: compares one training step of a pipeline with the uncut model on the same batch."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import versions
from .errors import VerifyError
from .exchange import Exchange
from .findings import Report

if TYPE_CHECKING:
    from .recording import Part
    from .records import RankRecord
    from .uncut import Model

#: The figures that a step may return.
FIGURES = ("loss", "losses", "grad_norm", "tokens")

_calls = itertools.count()


def verify(
    step: Callable[[], Mapping[str, Any] | None],
    model: Any,
    inputs: Any,
    target: Any = None,
    *,
    stages: Any,
    loss_fn: Callable[..., Any] | None = None,
    max_norm: float | None = None,
    tokens: int | None = None,
    names: Callable[[int, str], str] | None = None,
    replica: int = 0,
    replicas: int = 1,
    tolerance: float | None = None,
    deadline_s: float = 300.0,
    allow_untested: bool = False,
) -> Report:
    """Runs one training step of a pipeline, compares it with the uncut model, and returns the differences on all ranks.

    All ranks call it. `step()` runs the step of this rank: forwards, backwards and, if it does, sums between replicas, clipping
    and the optimizer. It may return a dictionary with the figures `loss`, `losses` (of the microbatches), `grad_norm` and
    `tokens`. `stages` are this rank's stages: a list of PyTorch's `PipelineStage`, or a mapping from their indices to modules for
    a pipeline of plain sends and receives. The other arguments are used on rank 0, which runs the uncut model: `model` is the
    module, or a function that makes it, with the same values as the stages before the step; `inputs` (a tensor, a tuple or a
    dictionary) and `target` are the whole batch of all microbatches, and of all replicas in their order.
    `loss_fn(output, target)` is the loss of the whole batch; without it, the mean of the model's outputs is. `max_norm` clips the
    gradients. `tokens` is the right number of tokens, by default the targets other than -100 if they are whole numbers.

    Names of parameters are those of the model, or follow from their values; `names(stage, name)` says it otherwise. The ranks of
    a pipeline have its number in `replica` if there are several (`replicas`). `tolerance` is the relative difference of equal
    values, by default 1e-4 in f32. The step runs in a thread of its own. Each rank waits at most `deadline_s` seconds for the step,
    and as long for each other rank.

    The model is copied, so it does not change. The step trains the stages as it always does.

    Raises `VerifyError` on all ranks if an argument is wrong, or if a rank fails or does not respond; and `UntestedVersion`.

    >>> import torch, pipewright.torch as pt
    >>> layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> x, y, loss_fn = torch.randn(6, 4), torch.randn(6, 4), torch.nn.functional.mse_loss
    >>> def step():
    ...     for rows, target in zip(x.split(2), y.split(2)):
    ...         loss_fn(layers[1](layers[0](rows)), target).backward()  # not divided by the microbatches
    >>> report = pt.verify(step, torch.nn.Sequential(*layers), x, y, stages=dict(enumerate(layers)), loss_fn=loss_fn)
    >>> report.first.fault.value, report.first.advice
    ('a loss that is not divided', 'it is not divided by the 3 microbatches')
    """
    torch, _ = versions.load(allow_untested=allow_untested)
    exchange = _exchange(torch)
    own: Any = None
    copied: Model | None = None
    try:
        _check(deadline_s, replica, replicas, tolerance, max_norm)
        if exchange.rank == 0:
            from .uncut import Model

            copied = Model(model)
        own = _record(torch, step, stages, exchange.rank, replica, deadline_s)
    except Exception as error:
        own = error if isinstance(error, VerifyError) else VerifyError(f"the step fails: {error}", rank=exchange.rank)
    exchange.publish("record", own)
    if exchange.rank == 0:
        exchange.publish("report", _judged(exchange, copied, inputs, target, loss_fn, max_norm, tokens, names, replicas, tolerance,
                                           deadline_s))
    result = exchange.receive("report", 0, time.monotonic() + 3 * max(deadline_s, 1.0))
    if isinstance(own, Exception):
        raise own
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Report)
    return result


def _check(deadline_s: float, replica: int, replicas: int, tolerance: float | None, max_norm: float | None) -> None:
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise VerifyError(f"deadline_s is {deadline_s}; a number of seconds above 0 was expected")
    if not 0 <= replica < replicas:
        raise VerifyError(f"replica is {replica} of {replicas}; a number from 0 below the number of replicas was expected")
    for name, value in (("tolerance", tolerance), ("max_norm", max_norm)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise VerifyError(f"{name} is {value}; a number above 0 was expected")


def _exchange(torch: Any) -> Exchange:
    dist = torch.distributed
    name = f"verify-{next(_calls)}"
    if not dist.is_available() or not dist.is_initialized():
        return Exchange(None, 0, 1, name)
    return Exchange(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), name)


def _record(torch: Any, step: Callable[[], Any], stages: Any, rank: int, replica: int, deadline_s: float) -> RankRecord:
    """Runs the step in a thread, with hooks on the stages, and returns the values of this rank.

    Raises `VerifyError` if the step does not end in time, and the step's own errors.
    """
    from .recording import Recorder, parts_of

    parts: Sequence[Part] = parts_of(stages)
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    ended: list[Any] = []

    def work() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        try:
            ended.append((step(), None))
        except BaseException as error:
            ended.append((None, error))

    recorder = Recorder(parts, rank=rank, replica=replica)
    with recorder:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(deadline_s)
    if not ended:
        last = recorder.record.actions[-1] if recorder.record.actions else "none"
        raise VerifyError(
            f"the step of rank {rank} has not ended after {deadline_s:g} s; the last action that it began is {last}, so it waits "
            "for a message of another rank, or it takes longer than deadline_s",
            rank=rank,
        )
    figures, error = ended[0]
    if error is not None:
        raise VerifyError(f"the step of rank {rank} fails: {error}", rank=rank) from error
    record = recorder.finish()
    record.figures = _figures(torch, figures)
    return record


def _figures(torch: Any, figures: Any) -> dict[str, list[float]]:
    if figures is None:
        return {}
    if not isinstance(figures, Mapping) or not set(figures) <= set(FIGURES):
        raise VerifyError(f"the step returns {figures!r}; None or a dictionary with {', '.join(FIGURES)} was expected")
    found: dict[str, list[float]] = {}
    for name, value in figures.items():
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        try:
            found[name] = [float(number) for number in values]
        except (TypeError, ValueError, RuntimeError) as error:
            raise VerifyError(f"the step returns {value!r} as {name}; numbers were expected") from error
    return found


def _judged(
    exchange: Exchange,
    model: Model | None,
    inputs: Any,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    max_norm: float | None,
    tokens: int | None,
    names: Callable[[int, str], str] | None,
    replicas: int,
    tolerance: float | None,
    deadline_s: float,
) -> Report | VerifyError:
    """Returns the report, or the error that all ranks raise."""
    try:
        until = time.monotonic() + deadline_s
        records = [exchange.receive("record", rank, until) for rank in range(exchange.ranks)]
        for rank, record in enumerate(records):
            if isinstance(record, VerifyError):
                return VerifyError(f"rank {rank}: {record}", rank=rank)
        assert model is not None
        return _compared(records, model, inputs, target, loss_fn, max_norm, tokens, names, replicas, tolerance)
    except VerifyError as error:
        return error
    except Exception as error:
        return VerifyError(f"the comparison fails: {type(error).__name__}: {error}")


def _compared(
    records: Sequence[RankRecord],
    model: Model,
    inputs: Any,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    max_norm: float | None,
    tokens: int | None,
    names: Callable[[int, str], str] | None,
    replicas: int,
    tolerance: float | None,
) -> Report:
    from .judging import Judge, Setting
    from .matching import match
    from .uncut import Batch, run

    stages = [stage for record in records for stage in record.stages]
    _check_stages(stages, replicas)
    microbatches = max(len(stage.calls) for stage in stages)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else inputs if isinstance(inputs, tuple) else (inputs,)
    matched = match(stages, model.values, names)
    uncut = run(model, Batch(args, kwargs, target), loss_fn, microbatches * replicas, matched)
    setting = Setting(microbatches, replicas, tolerance, max_norm, tokens if tokens is not None else _tokens(target))
    judged = Judge(records, uncut, matched, setting, model.values).run()
    return Report(
        findings=tuple(judged.findings),
        values=judged.values,
        largest=judged.largest,
        actions=[record.actions for record in records],
        loss=uncut.loss,
        grad_norm=uncut.grad_norm,
    )


def _check_stages(stages: Sequence[Any], replicas: int) -> None:
    """Raises `VerifyError` if the ranks together do not have each stage of each replica once, with its calls."""
    count = max((stage.stage for stage in stages), default=-1) + 1
    owners: dict[tuple[int, int], list[int]] = {}
    for stage in stages:
        owners.setdefault((stage.replica, stage.stage), []).append(stage.rank)
    for replica in range(replicas):
        for index in range(max(count, 1)):
            ranks = owners.pop((replica, index), [])
            if len(ranks) != 1:
                found = f"the ranks {ranks} have" if ranks else "no rank has"
                raise VerifyError(
                    f"{found} stage {index} of replica {replica}; each stage on one rank was expected: pass all stages of each "
                    "rank, and the number of its pipeline as `replica` if there are several"
                )
    if owners:
        raise VerifyError(f"a rank has replica {max(replica for replica, _ in owners)}, and there are {replicas}; pass replicas")
    if not any(stage.calls for stage in stages):
        raise VerifyError(
            "the step runs no forward of a stage; pass the modules that the step calls, and let the step run forwards and backwards"
        )


def _tokens(target: Any) -> int | None:
    """Returns the number of targets that the loss counts, if they are whole numbers."""
    if hasattr(target, "is_floating_point") and not target.is_floating_point() and target.dim() > 0:
        return int((target != -100).sum())
    return None
