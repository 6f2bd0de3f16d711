"""Tests that `verify` names public faults of pipelines by their stage and kind."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from faults import FAULTS, all_faults
from pipewright_pp.torch import Fault


@pytest.fixture(scope="module")
def reports(run_ranks):
    """The reports of both ranks by the name of the fault."""
    return run_ranks(2, all_faults, list(FAULTS))


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_is_named(reports, name):
    case = FAULTS[name]
    if not case.can_run:
        pytest.skip(f"needs PyTorch {case.since[0]}.{case.since[1]}")
    for of_rank in reports:
        first = of_rank[name].first
        assert first is not None, "no difference"
        found = (first.fault, first.stage, first.microbatch, first.action)
        assert found == (case.fault, case.stage, case.microbatch, case.action), str(of_rank[name])


#: The page about `verify`, whose example runs here.
PAGE = Path(__file__).parents[4] / "docs/verify.md"


def run_page(rank, changes):
    """Runs the example of the page with the given changes, and returns its output."""
    import torch.distributed as dist

    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    for line in ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"):
        assert line in code
        code = code.replace(line, "")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for change in changes:
            exec(code.replace(*change), {})
    assert dist.is_initialized()
    return output.getvalue()


def test_the_example_of_the_page_prints_what_the_page_says(run_ranks):
    expected = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    first, second = run_ranks(2, run_page, [("", ""), (", scale_grads=False", "")])
    # The size of a difference of equal values depends on the machine.
    without_size = lambda text: re.sub(r"difference is .*", "", text)  # noqa: E731
    assert without_size(first) == without_size("".join(expected))
    assert second == ""


def test_the_page_lists_the_public_faults():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| \S+/\S+#\d+ \|", line)]
    found = {row[0].removeprefix("| "): (row[2], row[3].removesuffix(" |")) for row in rows}
    assert list(found) == [case.source for case in FAULTS.values()]
    for case in FAULTS.values():
        kind, place = found[case.source]
        numbers = [int(number) for number in re.findall(r"\d+", place)]
        assert kind == case.fault.value, case.source
        assert numbers == [case.stage, *([] if case.microbatch is None else [case.microbatch])], case.source


def test_the_page_lists_all_kinds():
    section = PAGE.read_text().split("## Kinds of faults")[1].split("\n## ")[0]
    assert re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:] == [fault.value for fault in Fault]
