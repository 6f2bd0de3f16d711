"""A step of two Gloo ranks and its prediction: one stage is slower, and the messages in one direction are late."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pipewright_pp as pw
import pipewright_pp.torch as pt
import pytest

#: The seconds of a forward or a backward of a stage as predicted, of the slower stage, and of a late message.
USUAL_S, SLOWER_S, MESSAGE_S = 0.03, 0.06, 0.08
MICROBATCHES = 4


def step_of_ranks(rank: int, folder: Any) -> None:
    """Runs a step twice and writes the trace of the second one."""
    import torch
    import torch.distributed as dist

    class Slow(torch.autograd.Function):
        """Takes some seconds in both directions, between two operations."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            y = x * 1
            time.sleep(seconds)
            return y + 0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            gradient = gradient * 1
            time.sleep(ctx.seconds)
            return gradient + 0, None

    class Stage(torch.nn.Module):
        def __init__(self, seconds: float):
            super().__init__()
            self.linear, self.seconds = torch.nn.Linear(4, 4), seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(self.linear(x), self.seconds if x.device.type != "meta" else 0.0)

    class Late:
        """The work of a message that a thread sends later."""

        def __init__(self, work: Future[Any]):
            self._work = work

        def wait(self, *_: Any) -> None:
            self._work.result().wait()

    plan = pw.schedule("1f1b", ranks=2, microbatches=MICROBATCHES)
    layers = [Stage(USUAL_S), Stage(SLOWER_S)]
    schedule = pt.schedule(plan, pt.stages(plan, layers, boundaries=[1]), torch.nn.functional.mse_loss)

    def step() -> None:
        batch = torch.randn(MICROBATCHES, 4)
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == 1 else {}))

    step()
    original, line = dist.ProcessGroup.__dict__["send"], ThreadPoolExecutor(1)

    def send(group: Any, *args: Any) -> Late:
        def later() -> Any:
            time.sleep(MESSAGE_S)
            return original.__get__(group)(*args)

        return Late(line.submit(later))

    dist.barrier()
    with torch.profiler.profile() as profiler:
        if rank == 0:
            dist.ProcessGroup.send = send
        step()
        dist.ProcessGroup.send = original
    profiler.export_chrome_trace(str(folder / f"{rank}.json"))


@pytest.fixture(scope="module")
def late(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(2, step_of_ranks, folder)
    measured = pt.timeline_of([folder / "0.json", folder / "1.json"])
    program = pt.program_for(pw.schedule("1f1b", ranks=2, microbatches=MICROBATCHES))
    return pw.compare_timelines(measured, program.simulate(pw.Costs(forward=USUAL_S, backward=USUAL_S, hop=0.0005)))


def test_the_slower_stage_is_the_largest_cause(late):
    first = late.causes[0]
    assert (first.kind, first.rank) in {("rank", 1), ("action", 1)}, late.explain()
    assert sum(cause.seconds for cause in late.causes if cause.rank == 1 and cause.kind in ("rank", "action")) == pytest.approx(
        2 * MICROBATCHES * (SLOWER_S - USUAL_S), rel=0.5
    )


def test_the_late_messages_are_named(late):
    links = {(cause.from_rank, cause.rank): cause.seconds for cause in late.causes if cause.kind == "link"}
    assert max(links, key=lambda link: links[link]) == (0, 1), late.explain()
    assert links[0, 1] > 0.6 * MESSAGE_S, late.explain()
    assert any(action.why == "slow message from rank 0" for action in late.actions)


def test_the_parts_add_up_and_an_even_cut_would_gain(late):
    assert sum(cause.seconds for cause in late.causes) == pytest.approx(late.late_s)
    assert "an even cut" in {gain.change for gain in late.gains()}
