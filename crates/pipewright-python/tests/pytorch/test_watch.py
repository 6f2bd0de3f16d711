"""Tests of `watch`: steps that hang in different ways, and steps that end."""

from __future__ import annotations

import doctest
import importlib
import multiprocessing
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import hung  # noqa: E402
from pipewright_pp.torch import HangError, HangReport, Operation, Position, watch  # noqa: E402
from pipewright_pp.torch.hangs import judge  # noqa: E402
from pipewright_pp.torch.positions import standing_of  # noqa: E402

#: Longer than any case.
LIMIT_S = 40

#: The cases that run at the same time. Their ranks wait most of the time.
AT_ONCE = 4


# The ranks are copies of a process that has imported PyTorch.
multiprocessing.get_context("forkserver").set_forkserver_preload(["torch.distributed.pipelining"])


def run_ranks(ranks: int, target: Callable[..., None], arguments: tuple[object, ...], folder: Path, names: Sequence[str]) -> list[Any]:
    """Runs ranks until files of these names exist, and returns their contents; None for a file that is missing.

    Without names, the ranks end themselves, and their exit codes are returned.
    """
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    until = time.monotonic() + LIMIT_S
    if not names:
        for process in processes:
            process.join(max(until - time.monotonic(), 0))
    while not all((folder / name).exists() for name in names) and time.monotonic() < until:
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    found = [pickle.loads((folder / name).read_bytes()) if (folder / name).exists() else None for name in names]
    return found or codes


def run_case(name: str, folder: Path) -> HangReport | None:
    """Runs the ranks of a case, and returns the report of the one that collects."""
    return run_ranks(hung.HUNG[name].ranks, hung.run, (name, folder), folder, ["report"])[0]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[HangReport | None]]:
    """The reports of all cases, which run beside each other."""
    pool = ThreadPoolExecutor(AT_ONCE)
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [of["name"] for of in parameters if of.get("name") in hung.HUNG]
    return {name: pool.submit(run_case, name, tmp_path_factory.mktemp("hung")) for name in chosen}


@pytest.mark.parametrize("name", hung.HUNG)
def test_a_step_that_hangs_is_reported(name, reports):
    case, report = hung.HUNG[name], reports[name].result()
    assert report is not None, "no report"
    text = str(report)
    assert set(report.culprits) == case.culprits, text
    assert report.cycle == case.cycle, text
    for expected in case.texts:
        assert expected in text, f"{expected!r} is missing in:\n{text}"
    assert len(text.splitlines()) <= 20, text


def test_waits_end_with_an_error_if_asked(tmp_path):
    first, second = run_ranks(2, hung.raising, (tmp_path,), tmp_path, ["result0", "result1"])
    for error in (first, second):
        assert isinstance(error, HangError)
        assert error.report.cycle == (0, 1)
        assert "send 1 to rank 1, tag 1" in str(error)


def test_processes_end_if_asked_and_one_of_them_prints(tmp_path):
    assert run_ranks(2, hung.exiting, (tmp_path,), tmp_path, []) == [4, 4]
    texts = [(tmp_path / f"errors{rank}").read_text() for rank in range(2)]
    assert sum("pipewright_pp.torch.watch: the step does not end" in text for text in texts) == 1


@pytest.mark.parametrize(
    ("killed", "has_path", "texts"),
    [
        (1, False, ["rank 1 does not answer: process", "has ended", "rank 2 (step 1"]),
        (0, True, ["rank 0 does not answer: process", "has ended", "rank 1 (step 1"]),
        (0, False, ["the store of the process group is in the process of rank 0"]),
    ],
)
def test_the_end_of_a_rank_is_reported_with_a_server_as_store(killed, has_path, texts, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "meeting" if has_path else None
    report = run_ranks(3, hung.with_a_server, (tmp_path, port, path, killed), tmp_path, ["report"])[0]
    assert report is not None
    for text in texts:
        assert text in str(report)
    assert report.culprits == (killed,) if len(texts) > 1 else killed in report.silent


def test_steps_that_end_are_not_reported(tmp_path):
    for rank, (reports, report, standings, counts, is_removed) in enumerate(
        run_ranks(2, hung.sound, (tmp_path,), tmp_path, ["result0", "result1"])
    ):
        assert (reports, report) == ([], None)
        assert [standing.departure for standing in standings] == [None] * 5
        assert len({standing.digest for standing in standings}) == 5
        kind, other = ("send", 1) if rank == 0 else ("recv", 0)
        assert counts["0", kind, other, 0] > 100
        assert is_removed


def waiting(rank: int, kind: str, peer: int, number: int = 1, **options: Any) -> Position:
    """A rank that waits for a message."""
    operation = Operation(kind, "0", number, peer)
    streams = {operation.stream: (operation,)}
    return Position(rank, waits=(operation,), streams=streams, groups={"0": tuple(range(64))}, **options)


def test_a_chain_of_64_ranks_has_a_short_picture():
    positions = {rank: waiting(rank, "recv", rank - 1) for rank in range(2, 64)}
    positions |= {0: Position(0, "left", step=3), 1: waiting(1, "recv", 0)}
    report = judge(positions, {}, idle_s=60)
    assert (report.culprits, report.cycle) == ((0,), ())
    assert str(report).splitlines() == [
        "the step does not end: no progress for 60 s, 63 of 64 ranks wait",
        "rank 0 has left the watch after step 3",
        "  rank 1 (step 0) waits for recv 1 from rank 0, tag 0: rank 0 has left the watch",
        "waiting for these: ranks 2-63",
    ]


def test_a_cycle_among_64_ranks_has_a_short_picture():
    positions = {rank: waiting(rank, "send", (rank + 1) % 64) for rank in range(64)}
    report = judge(positions, {}, idle_s=60)
    assert report.cycle == tuple(range(64))
    lines = str(report).splitlines()
    assert lines[1].startswith("cycle: rank 0 -> rank 1 -> ") and lines[1].endswith("-> ... -> rank 63 -> rank 0")
    assert lines[-1] == "waiting for these: ranks 8-63"
    assert len(lines) < 13


def test_a_message_that_all_have_issued_is_under_way():
    positions = {0: waiting(0, "send", 1), 1: waiting(1, "recv", 0)}
    report = judge(positions, {})
    assert (report.culprits, report.cycle) == ((0, 1), ())
    assert "all ranks have done their part, so it is under way, or its link is slow or broken" in str(report)


def test_a_silent_rank_is_named():
    report = judge({0: waiting(0, "recv", 1)}, {1: "process 7 has ended", 2: "process 8 is blocked"}, idle_s=5)
    assert report.culprits == (1,)
    assert "rank 1 does not answer: process 7 has ended" in str(report)
    assert "not answering: rank 2; process 8 is blocked" in str(report)


ROWS = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "(1F0;1B0)OVERLAP_F_B", "1SEND_B0"]]


@pytest.mark.parametrize(
    ("row", "ran", "place", "departure"),
    [
        (0, [], "before its first action", None),
        (0, ["0F0", "0SEND_F0"], "at 0SEND_F0, action 2 of 4", None),
        (1, ["1RECV_F0", "1F0", "1B0"], "at 1B0, action 2 of 3", None),
        (0, ["0F0", "0RECV_B0"], "at 0RECV_B0, action 3 of 4", "it runs 0RECV_B0 as action 2 of the step, where the program has 0SEND_F0"),
        (0, ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1"], "in 0F1, which is not in its row", "it runs 0F1 as action 5 of the step, where the program has the end of the step"),
    ],
)
def test_a_rank_stands_in_its_program(row, ran, place, departure):
    standing = standing_of(ROWS, row, ran, computations_only=False)
    assert (standing.place, standing.departure) == (place, departure)


def test_the_message_of_an_action_has_its_stage_and_microbatch():
    operation = Operation("recv", "0", 3, 2, action="12RECV_F34")
    assert (operation.stage, operation.microbatch) == (12, 34)
    assert (Operation("recv", "0", 3, 2).stage, Operation("recv", "0", 3, 2).microbatch) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no process group; call torch.distributed.init_process_group"),
        ({"deadline_s": 0}, "deadline_s is 0; a number of seconds above 0 was expected"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"on_hang": "stop"}, "on_hang is 'stop'; \"report\", \"raise\" or \"exit\" was expected"),
        ({"schedule": 7}, "read a int; a schedule of torch.distributed.pipelining was expected"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        watch(**options)


@pytest.mark.parametrize("name", ["watch", "hangs", "positions"])
def test_the_examples_of_the_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"pipewright_pp.torch.{name}"))
    assert result.attempted > 1 and result.failed == 0
