"""Tests of schedules of PyTorch as programs. They need PyTorch, but no process group."""

import pipewright_pp as pw
import pytest
from pipewright_pp.torch import TableError, program_of, schedule, versions


class Stage:
    """The parts of a stage that a schedule reads before its first step."""

    def __init__(self, torch, index, stages, ranks):
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = None


@pytest.fixture(scope="module")
def schedules(torch):
    """PyTorch's module of schedules."""
    from torch.distributed.pipelining import schedules

    return schedules


def multi(torch, kind, ranks, microbatches, *, is_v=False, **options):
    """A multi-stage schedule with two stages on each rank."""
    count = 2 * ranks
    stages = [Stage(torch, index, count, ranks) for index in ([0, count - 1] if is_v else [0, ranks])]
    return kind(stages, microbatches, loss_fn=torch.nn.MSELoss(), **options)


CASES = {
    "ScheduleLoopedBFS": "loopedbfs",
    "ScheduleInterleaved1F1B": "interleaved1f1b",
    "ScheduleInterleavedZeroBubble": "interleavedzerobubble",
    "ScheduleZBVZeroBubble": "zbvzerobubble",
    "ScheduleDualPipeV": "dualpipev",
}


@pytest.mark.parametrize("name", CASES)
def test_a_multi_stage_schedule_is_read_with_its_messages(torch, schedules, name):
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    program = program_of(multi(torch, getattr(schedules, name), 2, 4, is_v=is_v))
    assert (program.ranks, program.stages, program.microbatches, program.level) == (2, 4, 4, "full")
    assert program.validate(transport="edge") == {"edge": "sound"}

    def computations(rows):
        return [[cell for cell in row if cell and cell.strip("0123456789") in ("F", "B", "I", "W")] for row in rows]

    ours = pw.schedule(CASES[name], ranks=2, microbatches=4)
    if name != "ScheduleDualPipeV":
        assert computations(program.rows) == computations(ours.rows)
    assert program.simulate(costs="F=1,I=1,W=1").makespan > 0


def test_wrong_gradients_of_deferred_receives_are_found(torch, schedules):
    if not versions.load()[1].has_waits:
        pytest.skip("only PyTorch 2.15 is known to defer receives so that messages cross")
    deferred = program_of(multi(torch, schedules.ScheduleZBVZeroBubble, 2, 4, is_v=True, defer_pp_recv=True))
    with pytest.raises(pw.ValidationError) as error:
        deferred.validate(transport="edge")
    assert error.value.verdicts == {"edge": "crossed"}


@pytest.mark.parametrize("name, ours", [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
def test_a_single_stage_schedule_is_read(torch, schedules, name, ours):
    program = program_of(getattr(schedules, name)(Stage(torch, 1, 3, 3), 4, loss_fn=torch.nn.MSELoss()))
    expected = pw.schedule(ours, ranks=3, microbatches=4).lower(passes=["reduce-grad", "send-recv"])
    assert program.csv() == expected.csv()
    program.validate(transport="edge")


def test_a_forward_only_schedule_is_read(torch, schedules):
    program = program_of(schedules._ScheduleForwardOnly(Stage(torch, 0, 2, 2), 2))
    assert program.csv() == "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"


def test_a_runtime_without_a_table_is_refused(torch, schedules):
    empty = multi(torch, schedules._PipelineScheduleRuntime, 2, 4)
    with pytest.raises(TableError, match="_PipelineScheduleRuntime has no table yet; load one"):
        program_of(empty)


def test_an_untested_version_is_refused_for_schedules_of_pytorch(torch, schedules, monkeypatch):
    read = schedules.Schedule1F1B(Stage(torch, 0, 2, 2), 4, loss_fn=torch.nn.MSELoss())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(pw.PipewrightError, match="PyTorch 2.99.0 was never tried"):
        program_of(read)
    with pytest.raises(pw.PipewrightError, match="PyTorch 2.99.0 was never tried"):
        schedule(pw.schedule("1f1b", ranks=2, microbatches=4), [], None)
    assert program_of(read, allow_untested=True).ranks == 2
