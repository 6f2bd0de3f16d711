"""Long calls release the interpreter's lock and end with Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import pipewright_pp as pw

# A shell starts background processes with SIGINT ignored, and Python then leaves it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

LAYERS = [
    {
        "kind": f"block {index}",
        "forward_s": 1e-3 * (1 + index % 7),
        "input_backward_s": 1e-3 * (1 + index % 5),
        "weight_backward_s": 1e-3 * (1 + index % 3),
        "output_bytes": 1 << 20,
        "parameter_bytes": 1 << 24,
        "activation_bytes": 1 << 24,
    }
    for index in range(96)
]
PROFILE = pw.Profile({"link": {"latency_s": 1e-5, "bytes_per_s": 1e10}, "layers": LAYERS})


def long_plan():
    """Takes many seconds if nothing ends it."""
    return pw.plan(PROFILE, ranks=16, microbatches=128, time_limit=600.0)


def long_schedule():
    """Takes many seconds if nothing ends it: a search for the best of several large runs."""
    return pw.schedule("zb-greedy", ranks=256, microbatches=20000)


@pytest.mark.parametrize("call", [long_plan, long_schedule])
def test_ctrl_c_ends_a_call(call):
    begin = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call()
    assert time.monotonic() - begin < 5.0


def test_an_interrupted_process_ends():
    script = "import test_calls\ntest_calls.long_schedule()\n"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=os.path.dirname(__file__), stderr=subprocess.PIPE)
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert b"KeyboardInterrupt" in errors
    assert process.returncode != 0


def test_an_exception_of_another_signal_ends_a_call():
    def expire(_number, _frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeoutError):
            long_plan()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_run_meanwhile():
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    pw.plan(PROFILE, ranks=8, microbatches=32, time_limit=1.0)
    done.set()
    thread.join()
    longest = max(after - before for before, after in zip(ticks, ticks[1:]))
    assert len(ticks) > 20
    assert longest < 0.5


def test_the_time_limit_ends_a_plan():
    begin = time.monotonic()
    plan = pw.plan(PROFILE, ranks=16, microbatches=128, time_limit=0.5)
    assert time.monotonic() - begin < 10.0
    assert plan.stopped
