"""Tests of traces that are written here: what is read from them, and the errors. None needs PyTorch."""

import gzip
import json

import pytest
from pipewright_pp.torch import TraceError, kineto, traces


def annotation(name, start, end):
    """A named range of the processor, in microseconds."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "pid": 9, "tid": 9}


def operation(name, start):
    """An operation of PyTorch."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": 1, "pid": 9, "tid": 9}


def kernel(name, correlation, launch, start, end):
    """The launch of a kernel by the processor, and the kernel on the device."""
    arguments = {"correlation": correlation}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 1, "args": arguments},
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": arguments},
    ]


def write(path, events, rank=0, **members):
    """Writes the trace of a rank; without a rank, as a process without a group does."""
    info = {} if rank is None else {"distributedInfo": {"rank": rank}}
    path.write_text(json.dumps({"traceEvents": events, **info, **members}))
    return path


def actions(text):
    """The actions of a written trace, with their rank, start and duration."""
    events = json.loads(text)["traceEvents"]
    return [(event["pid"] - 1, event["name"], event["ts"], event["dur"]) for event in sorted(events, key=lambda e: e["ts"])]


FIRST = [annotation("PP:0F0", 0, 10), annotation("PP:0SEND_F0", 10, 11)]
SECOND = [
    annotation("PP:1RECV_F0", 0, 1),
    annotation("PP:1F0", 1, 30),
    operation("c10d::recv_", 2),
    operation("aten::linear", 12),
]


def test_the_wait_of_a_computation_becomes_the_time_of_its_receive(tmp_path):
    files = [write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND, rank=1)]
    expected = [(0, "0F0", 0, 10), (1, "1RECV_F0", 0, 12), (0, "0SEND_F0", 10, 1), (1, "1F0", 12, 18)]
    assert actions(traces.trace_text(files)) == expected
    assert actions(traces.trace_text({1: files[1], 0: files[0]})) == expected
    assert actions(traces.trace_text(reversed(files))) == expected


def test_a_rank_that_computes_does_not_wait(tmp_path):
    events = [
        annotation("PP:1RECV_F0", 0, 1),
        annotation("PP:1B1", 1, 20),
        operation("aten::mm", 1),
        annotation("PP:1F0", 20, 40),
        operation("aten::linear", 22),
    ]
    found = actions(traces.trace_text([write(tmp_path / "a", events)]))
    assert found == [(0, "1B1", 0, 19), (0, "1RECV_F0", 19, 2), (0, "1F0", 21, 18)]


def test_a_computation_without_operations_waits_for_its_whole_range(tmp_path):
    events = [annotation("PP:0RECV_B0", 0, 1), annotation("PP:0I0", 1, 50), operation("aten::mm", 51)]
    path = write(tmp_path / "a", [*events, annotation("PP:0W0", 50, 60)])
    assert actions(traces.trace_text([path])) == [(0, "0RECV_B0", 0, 50), (0, "0I0", 50, 0), (0, "0W0", 51, 9)]


def test_times_are_relative_to_the_base_of_each_trace(tmp_path):
    files = [
        write(tmp_path / "a", FIRST, baseTimeNanoseconds=5_000_000),
        write(tmp_path / "b", SECOND, rank=1, baseTimeNanoseconds=5_002_000),
    ]
    starts = {name: start for _, name, start, _ in actions(traces.trace_text(files))}
    assert (starts["0F0"], starts["1F0"]) == (0, 14)


def test_kernels_are_the_time_of_an_action_on_a_gpu(tmp_path):
    events = [
        annotation("PP:0F0", 0, 5),
        annotation("PP:0SEND_F0", 5, 6),
        annotation("PP:0F1", 6, 9),
        *kernel("gemm", 1, 1, 10, 20),
        *kernel("relu", 2, 4, 20, 25),
        *kernel("ncclDevKernel_SendRecv", 3, 5, 25, 28),
        *kernel("gemm", 4, 7, 28, 40),
    ]
    found = actions(traces.trace_text([write(tmp_path / "a", events)]))
    assert found == [(0, "0F0", 0, 15), (0, "0SEND_F0", 15, 3), (0, "0F1", 18, 12)]


def test_a_trace_has_steps_and_an_incomplete_one_is_left_out(tmp_path):
    def step(at):
        return [annotation("PP:0F0", at, at + 2), annotation("PP:0B0", at + 2, at + 6)]

    path = write(tmp_path / "a", [*step(10), *step(21), *step(30)[:1]])
    assert actions(traces.trace_text([path])) == [(0, "0F0", 0, 2), (0, "0B0", 2, 4)]
    spans = kineto.read(path).spans
    assert [[span.start for span in step] for step in traces.steps_of(spans)] == [[10, 12], [21, 23]]
    with pytest.raises(TraceError, match="step 2 was asked for, but the traces have 2"):
        traces.trace_text([path], step=2)


def test_a_compressed_trace_is_read(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "a", FIRST).read_bytes()))
    assert len(kineto.read(path).spans) == 2


def test_times_keep_their_nanoseconds(tmp_path):
    base = 1_700_000_000_123_456_789
    files = [
        write(tmp_path / "a", [annotation("PP:0F0", 0.001, 10.002)], baseTimeNanoseconds=base),
        write(tmp_path / "b", [annotation("PP:1F0", 0, 30)], rank=1, baseTimeNanoseconds=base + 11),
    ]
    starts = {name: start for _, name, start, _ in actions(traces.trace_text(files))}
    assert starts == {"0F0": 0, "1F0": pytest.approx(0.010, abs=1e-9)}


def test_a_trace_is_read_in_pieces_up_to_the_limit(tmp_path, monkeypatch):
    path = write(tmp_path / "a", FIRST)
    monkeypatch.setattr(kineto, "MAX_BYTES", 1 << 45)
    assert len(kineto.read(path).spans) == 2
    monkeypatch.setattr(kineto, "MAX_BYTES", path.stat().st_size - 1)
    refused("larger than 0 GiB; record fewer steps", [path], path)


def refused(message, files, trace=None):
    """Checks the error for traces that cannot be read."""
    with pytest.raises(TraceError, match=message) as error:
        traces.trace_text(files)
    assert error.value.trace == (None if trace is None else str(trace))


def test_files_that_are_not_traces_are_refused(tmp_path):
    path = tmp_path / "a"
    refused("cannot be read: .*No such file", [path], path)
    path.write_text("0F0,0B0\n")
    refused("not JSON", [path], path)
    path.write_text("[]")
    refused("no list `traceEvents`; a trace of torch.profiler was expected", [path], path)


def test_damaged_archives_are_refused(tmp_path):
    whole = gzip.compress(write(tmp_path / "a", FIRST).read_bytes())
    path = tmp_path / "a.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read: Compressed file ended", [path], path)
    path.write_bytes(whole[:20] + bytes(255 - byte for byte in whole[20:]))
    refused("cannot be read: ", [path], path)


MALFORMED = {
    "`distributedInfo` is a list": {"distributedInfo": [0]},
    "the rank in `distributedInfo` is True": {"distributedInfo": {"rank": True}},
    "the rank in `distributedInfo` is '0'": {"distributedInfo": {"rank": "0"}},
    "`baseTimeNanoseconds` is 'x'": {"baseTimeNanoseconds": "x"},
    "`args` is a list": {"traceEvents": [*FIRST, kernel("gemm", 1, 1, 2, 3)[0] | {"args": [1]}]},
    r"the correlation of a kernel is \[1\]": {"traceEvents": [*FIRST, *kernel("gemm", [1], 1, 2, 3)]},
    "a slice has the time nan": {"traceEvents": [*FIRST, annotation("PP:0F1", float("nan"), 3)]},
    "a slice has the time inf": {"traceEvents": [*FIRST, annotation("PP:0F1", 3, float("inf"))]},
}


@pytest.mark.parametrize("message", MALFORMED)
def test_traces_with_wrong_values_are_refused(tmp_path, message):
    path = tmp_path / "a"
    path.write_text(json.dumps({"traceEvents": FIRST, "distributedInfo": {"rank": 0}} | MALFORMED[message]))
    refused(message, [path], path)


def test_a_trace_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_text("[" * 100_000)
    refused("nested too deeply", [path], path)


def test_traces_without_actions_are_refused(tmp_path):
    path = write(tmp_path / "a", [operation("aten::linear", 2), annotation("Optimizer.step", 1, 2)])
    refused("no action of a pipeline among 1 ranges .none is named PP:.*annotate", [path], path)
    path = write(tmp_path / "a", [annotation("Forward 0", 1, 2), annotation("Backward 0", 2, 3)])
    refused("the names of a single-stage schedule", [path], path)


def test_traces_without_ranks_are_refused(tmp_path):
    path = write(tmp_path / "a", FIRST, rank=None)
    refused("the trace has no rank .`distributedInfo`.*pass a mapping from ranks to files", [path], path)
    assert len(actions(traces.trace_text({0: path}))) == 2


def test_sets_of_traces_that_are_not_those_of_all_ranks_are_refused(tmp_path):
    path = write(tmp_path / "a", FIRST)
    refused("no trace was given", [])
    refused("the files of all ranks were expected", "trace.json")
    refused("both of rank 0; one trace of each rank was expected", [path, path], path)
    refused(r"the mapping has the ranks \[0, 2\]; all ranks from 0 to 1 were expected", {0: path, 2: path})
    refused(r"the mapping has the ranks \[0, 'a'\]", {0: path, "a": path})
    again = write(tmp_path / "b", [*SECOND, *(event | {"ts": event["ts"] + 50} for event in SECOND)], rank=1)
    refused("different numbers of steps .*a: 1.*b: 2", [path, again])
