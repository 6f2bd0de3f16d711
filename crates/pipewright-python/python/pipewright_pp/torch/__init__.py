"""Pipewright for `torch.distributed.pipelining`, of PyTorch 2.12 to 2.15.

- `program_of` reads a schedule of PyTorch as a program, to validate, simulate or view it.
- `profile` measures the layers of a model, for `pipewright_pp.plan`.
- `measure_machine` writes the cluster file of the machine at hand, for `pipewright_pp.cluster.predict` and `plan --cluster`.
- `stages` cuts the model into the stages that a plan gives to this rank, and `schedule` executes the plan on them.
  `program_for` is the program that it executes.
- `verify` compares a step of any pipeline in PyTorch with the uncut model, and names the first stage that differs.
- `watch` prints who waits for which message of whom when a step does not end.
- `timeline_of` reads the profiler's traces of all ranks as a timeline. `annotate` names the actions of single-stage
  schedules in these traces.

```python
import pipewright_pp as pw
import pipewright_pp.torch as pt

profile = pt.profile(layers, example, loss_fn=loss_fn, target=target)
plan = pw.plan(profile, ranks=4, microbatches=16, data_parallel=1)
stages = pt.stages(plan, layers)
schedule = pt.schedule(plan, stages, loss_fn)
schedule.step(inputs, target=targets)          # as with any schedule of PyTorch
```

Importing this package does not import PyTorch. Each function that needs it checks its version first.
"""

from pipewright_pp.torch import errors
from pipewright_pp.torch.annotate import annotate
from pipewright_pp.torch.errors import *
from pipewright_pp.torch.findings import Fault, Finding, Report
from pipewright_pp.torch.hangs import HangReport, Wait
from pipewright_pp.torch.machine import Figure, MachineFigures, measure_machine
from pipewright_pp.torch.positions import Operation, Position, Standing
from pipewright_pp.torch.profile_keys import Link
from pipewright_pp.torch.profiling import profile
from pipewright_pp.torch.reading import program_of
from pipewright_pp.torch.runtime import program_for, schedule
from pipewright_pp.torch.stages import stages
from pipewright_pp.torch.traces import timeline_of
from pipewright_pp.torch.verify import verify
from pipewright_pp.torch.versions import TESTED
from pipewright_pp.torch.watch import Watch, watch

__all__ = [
    *errors.__all__,
    "TESTED",
    "Fault",
    "Figure",
    "Finding",
    "HangReport",
    "Link",
    "MachineFigures",
    "Operation",
    "Position",
    "Report",
    "Standing",
    "Wait",
    "Watch",
    "annotate",
    "measure_machine",
    "profile",
    "program_for",
    "program_of",
    "schedule",
    "stages",
    "timeline_of",
    "verify",
    "watch",
]
