"""Tables of figures: as lists, for Arrow, for pandas, and in the memory that they may take."""

import copy
import pathlib
import subprocess
import sys

import pytest

import pipewright_pp as pw

PROFILE = pathlib.Path(__file__).parent / "golden" / "profile.toml"


@pytest.fixture(name="timeline")
def of_zbv():
    return pw.schedule("zbvzerobubble", ranks=4, microbatches=8, costs="hop=0.5").lower().simulate()


def check(frame, **kinds):
    """Checks that each way of reading a frame has the same rows, and that the named columns have these kinds."""
    assert list(frame) == frame.keys() == [name for name, _ in frame.items()] and len(frame) == len(frame.keys())
    columns = dict(frame)
    assert list(columns.values()) == frame.values() == [frame[name] for name in frame]
    assert {len(column) for column in columns.values()} == {frame.rows}
    for name, kind in kinds.items():
        assert {type(value) for value in columns[name]} <= {kind, type(None)}, name
    assert copy.deepcopy(frame) is frame and "no column" not in frame
    with pytest.raises(KeyError, match=f"there is no column `nothing`; the columns are {', '.join(frame)}"):
        frame["nothing"]
    with pytest.raises(TypeError, match="a frame is no array; use to_pandas()"):
        frame.__array__()
    return columns


def test_events_causes_and_memory_are_frames(timeline):
    check(timeline.events, rank=int, action=str, microbatch=int, start=float)
    check(timeline.causes(), bubble=float, cause=str, from_rank=int, from_action=str, in_line=str, critical=bool)
    check(timeline.memory(), rank=int, time=float, held=int)


def test_the_memory_of_ranks_has_the_peaks_of_the_timeline(timeline):
    for predicted in (timeline, pw.schedule("1f1b", ranks=2, microbatches=4).simulate(profile=PROFILE)):
        memory = predicted.memory()
        peaks = [max(held for rank, held in zip(memory["rank"], memory["held"]) if rank == one) for one in range(max(memory["rank"]) + 1)]
        if predicted.peak_bytes is None:
            assert peaks == predicted.peak_activations
        else:
            # The peak bytes have the parameters and the optimizer's state too.
            assert all(0 < peak < whole for peak, whole in zip(peaks, predicted.peak_bytes))


def test_arrow_reads_frames(timeline):
    pyarrow = pytest.importorskip("pyarrow")
    for frame in (timeline.events, timeline.causes(), timeline.memory()):
        table = pyarrow.table(frame)
        assert table.to_pydict() == dict(frame)
    schema = pyarrow.table(timeline.events).schema
    assert [str(field.type) for field in schema] == ["uint32", "string", "uint32", "uint32", "uint32", "double", "double"]


def test_arrow_reads_frames_without_a_copy(timeline):
    pyarrow = pytest.importorskip("pyarrow")
    events = timeline.events
    addresses = {pyarrow.table(events).column("start").chunk(0).buffers()[1].address for _ in range(3)}
    assert len(addresses) == 1


def test_polars_reads_frames(timeline):
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(timeline.causes()).to_dict(as_series=False) == dict(timeline.causes())


def test_pandas_reads_frames(timeline):
    pandas = pytest.importorskip("pandas")
    causes = timeline.causes()
    table = causes.to_pandas()
    assert list(table.columns) == list(causes) and len(table) == causes.rows
    for name, column in dict(causes).items():
        assert [None if pandas.isna(value) else value for value in table[name].tolist()] == column, name
    assert str(table["from_rank"].dtype) == "UInt32" and str(table["critical"].dtype) == "bool"
    assert table.groupby("cause")["bubble"].sum().sum() == pytest.approx(sum(causes["bubble"]))
    with pytest.raises(TypeError, match="use to_pandas()"):
        pandas.DataFrame(causes)


def test_four_million_events_take_megabytes():
    code = """if True:
        import pipewright_pp as pw
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        timeline = pw.schedule("1f1b", ranks=64, microbatches=9200).simulate()
        before = resident()
        events = timeline.events
        print(events.rows, (resident() - before) >> 20)
    """
    if not pathlib.Path("/proc/self/statm").exists():
        pytest.skip("the memory of a process is not known here")
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rows, mebibytes = map(int, run.stdout.split())
    assert rows > 4_000_000 and mebibytes < 400
