"""`verify`: compares one training step of a pipeline with the uncut model on the same batch."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

from . import versions
from .errors import VerifyError, sentence_of
from .exchange import Exchange
from .findings import Report

if TYPE_CHECKING:
    from .recording import Part
    from .records import RankRecord
    from .uncut import Model

#: The figures that a step may return.
FIGURES = ("loss", "losses", "grad_norm", "tokens")

#: The seconds between two questions whether another rank has failed.
POLL_S = 0.2

_calls = itertools.count()


def verify(
    step: Callable[[], Any],
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

    All ranks call it. `step()` runs the step of this rank: forwards, backwards and, if it has them, sums between replicas,
    clipping and the optimizer. It may return a dictionary with the figures `loss`, `losses` (of the microbatches), `grad_norm`
    and `tokens`; other results are ignored. `stages` are this rank's stages: a list of PyTorch's `PipelineStage`, or a mapping
    from their indices to modules for a pipeline of plain sends and receives.

    Rank 0 runs the uncut model, and only it uses the other arguments. `model` is the module, or a function that makes it, with
    the same values as the stages before the step. `inputs` (a tensor, a tuple or a dictionary) and `target` are the whole batch
    of all microbatches, and of all replicas in their order.
    `loss_fn(output, target)` is the loss of the whole batch; without it, the mean of the model's outputs is. `max_norm` clips the
    gradients. `tokens` is the right number of tokens, by default the targets other than -100 if they are whole numbers.

    Names of parameters are those of the model, or follow from their values; `names(stage, name)` says it otherwise. The ranks of
    a pipeline have its number in `replica` if there are several (`replicas`). `tolerance` is the relative difference of equal
    values, by default 1e-4 in f32. The step runs in a thread of its own. Each rank waits at most `deadline_s` seconds for the
    other ranks to call `verify`, then as long for its step, and then three times as long for rank 0, which waits `deadline_s`
    seconds for the records of all ranks and runs the uncut model. Only the uncut model itself has no limit.

    The model is copied, so it does not change. The step trains the stages as it always does.

    Raises `VerifyError` on all ranks if an argument is wrong, or if a rank fails or does not respond; and `UntestedVersion`.

    >>> import torch, pipewright_pp.torch as pt
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
    exchange = _exchange(torch, deadline_s)
    asked = _Asked(inputs, target, loss_fn, max_norm, tokens, names, replicas, tolerance)
    try:
        report = _verified(exchange, step, model, stages, replica, deadline_s, asked)
    except Exception:
        exchange.close()
        raise
    exchange.close()
    return report


@dataclass(frozen=True)
class _Asked:
    """The arguments that rank 0 uses."""

    inputs: Any
    target: Any
    loss_fn: Callable[..., Any] | None
    max_norm: float | None
    tokens: int | None
    names: Callable[[int, str], str] | None
    replicas: int
    tolerance: float | None


def _verified(
    exchange: Exchange, step: Any, model: Any, stages: Any, replica: int, deadline_s: float, asked: _Asked
) -> Report:
    copied: Model | None = None
    parts: Sequence[Part] = ()
    ready: VerifyError | None = None
    try:
        from .recording import parts_of
        from .uncut import Model

        _check(step, deadline_s, replica, asked)
        parts = parts_of(stages)
        copied = Model(model) if exchange.rank == 0 else None
    except Exception as error:
        ready = _verify_error("an argument cannot be used", error)
    exchange.agree("check", ready)
    own: RankRecord | VerifyError
    try:
        own = _record(step, parts, replica, exchange)
    except Exception as error:
        own = _verify_error(f"the step of rank {exchange.rank} cannot be recorded", error)
    exchange.publish("record", own)
    if copied is not None:
        exchange.publish("report", _judged(exchange, copied, asked))
    report = exchange.receive("report", 0, time.monotonic() + 3 * exchange.deadline_s)
    if isinstance(own, VerifyError) and not (own.timed_out and isinstance(report, VerifyError)):
        raise own
    if isinstance(report, VerifyError):
        raise report
    assert isinstance(report, Report)
    return report


def _verify_error(problem: str, error: Exception) -> VerifyError:
    """Returns the error itself if it is a `VerifyError`, or else one that says the problem."""
    if isinstance(error, VerifyError):
        return error
    made = VerifyError(f"{problem}: {sentence_of(error)}")
    made.__cause__ = error
    return made


def _check(step: Any, deadline_s: Any, replica: Any, asked: _Asked) -> None:
    """Raises `VerifyError` if an argument has another type, or is out of range."""
    for name, value in (("deadline_s", deadline_s), ("tolerance", asked.tolerance), ("max_norm", asked.max_norm)):
        if not _is_positive(value) and (value is not None or name == "deadline_s"):
            raise VerifyError(f"{name} is {value!r}; a number above 0 was expected")
    for name, value in (("replica", replica), ("replicas", asked.replicas), ("tokens", asked.tokens)):
        if not isinstance(value, Integral) and (value is not None or name != "tokens"):
            raise VerifyError(f"{name} is {value!r}; a whole number was expected")
    if not 0 <= replica < asked.replicas:
        raise VerifyError(f"replica is {replica} of {asked.replicas}; a number from 0 below the number of replicas was expected")
    for name, function in (("step", step), ("loss_fn", asked.loss_fn), ("names", asked.names)):
        if not callable(function) and (function is not None or name == "step"):
            raise VerifyError(f"{name} is a {type(function).__name__}; a function was expected")


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf


def _exchange(torch: Any, deadline_s: Any) -> Exchange:
    dist = torch.distributed
    name, limit = f"verify-{next(_calls)}", deadline_s if _is_positive(deadline_s) else 60.0
    if not dist.is_available() or not dist.is_initialized():
        return Exchange(None, 0, 1, name, limit)
    return Exchange(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), name, limit)


def _record(step: Callable[[], Any], parts: Sequence[Part], replica: int, exchange: Exchange) -> RankRecord:
    """Runs the step in a thread, with hooks on the stages, and returns the values of this rank.

    Raises `VerifyError` if the step fails, does not end in time, or another rank fails before it ends.
    """
    import torch

    from .recording import Recorder

    rank, limit, cuda = exchange.rank, exchange.deadline_s, cast(Any, torch.cuda)
    device = cuda.current_device() if cuda.is_available() and cuda.is_initialized() else None
    ended: list[Any] = []

    def work() -> None:
        if device is not None:
            cuda.set_device(device)
        try:
            ended.append((step(), None))
        except BaseException as error:
            ended.append((None, error))

    recorder = Recorder(parts, rank=rank, replica=replica)
    with recorder:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        failed, until = None, time.monotonic() + limit
        while thread.is_alive() and failed is None and (left := until - time.monotonic()) > 0:
            thread.join(min(left, POLL_S))
            failed = exchange.failed() if thread.is_alive() else None
    if not ended:
        last = recorder.record.actions[-1] if recorder.record.actions else "none"
        cause = f"has not ended after {limit:g} s" if failed is None else f"has not ended, and rank {failed} has failed"
        raise VerifyError(
            f"the step of rank {rank} {cause}; the last action that it began is {last}, so it waits for a message of another "
            "rank, or it takes longer than deadline_s",
            rank=rank,
            timed_out=True,
        )
    figures, error = ended[0]
    if error is not None:
        raise VerifyError(f"the step of rank {rank} fails: {sentence_of(error)}", rank=rank) from error
    record = recorder.finish()
    record.figures = _figures(figures)
    return record


def _figures(figures: Any) -> dict[str, list[float]]:
    """Returns the figures of a step. Other results than a dictionary are ignored, such as the output of a schedule."""
    if not isinstance(figures, Mapping):
        return {}
    if not set(figures) <= set(FIGURES):
        raise VerifyError(f"the step returns a dictionary with {list(figures)}; the keys {', '.join(FIGURES)} were expected")
    found: dict[str, list[float]] = {}
    for name, value in figures.items():
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        try:
            found[name] = [float(number.detach() if hasattr(number, "detach") else number) for number in values]
        except (TypeError, ValueError, RuntimeError) as error:
            raise VerifyError(f"the step returns {value!r} as {name}; numbers were expected") from error
    return found


def _judged(exchange: Exchange, model: Model, asked: _Asked) -> Report | VerifyError:
    """Returns the report, or the error that all ranks raise."""
    try:
        until = time.monotonic() + exchange.deadline_s
        records = [_received(exchange, rank, until) for rank in range(exchange.ranks)]
        errors = [(rank, record) for rank, record in enumerate(records) if isinstance(record, VerifyError)]
        for rank, error in sorted(errors, key=lambda entry: entry[1].timed_out):
            return error if error.rank is not None else VerifyError(f"rank {rank}: {error}", rank=rank)
        return _compared(records, model, asked)
    except Exception as error:
        return _verify_error("the comparison fails", error)


def _received(exchange: Exchange, rank: int, until: float) -> Any:
    """Returns the record of a rank, or the error of a rank that has failed or does not respond."""
    try:
        return exchange.receive("record", rank, until)
    except VerifyError as error:
        return error


def _compared(records: Sequence[RankRecord], model: Model, asked: _Asked) -> Report:
    from .comparison import Comparison, Setting
    from .judging import judge
    from .matching import match
    from .uncut import Batch, run

    stages = [stage for record in records for stage in record.stages]
    _check_stages(stages, asked.replicas)
    microbatches = max(len(stage.calls) for stage in stages)
    inputs, tokens = asked.inputs, asked.tokens if asked.tokens is not None else _tokens(asked.target)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else inputs if isinstance(inputs, tuple) else (inputs,)
    names = match(stages, model.values, asked.names)
    states = {stage.autocast for stage in stages}
    autocast = states.pop() if len(states) == 1 else ()
    given = {shape for stage in stages if stage.stage == 0 for shape in stage.shapes}
    batch = Batch(args, kwargs, asked.target)
    uncut = run(model, batch, asked.loss_fn, microbatches * asked.replicas, names, given, autocast)
    setting = Setting(microbatches, asked.replicas, asked.tolerance, asked.max_norm, tokens)
    judged = judge(Comparison(records, uncut, names, setting, model.values))
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
            "the step runs no forward of a stage; pass the modules that the step calls, and let it run forwards and backwards"
        )


def _tokens(target: Any) -> int | None:
    """Returns the number of targets that the loss counts, if they are whole numbers."""
    if hasattr(target, "is_floating_point") and not target.is_floating_point() and target.dim() > 0:
        return int((target != -100).sum())
    return None
