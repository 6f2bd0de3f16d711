"""Uses the package as its types allow; `mypy --strict` reads this file, and nothing runs it."""

from pathlib import Path

import pipewright_pp as pw
from pipewright_pp import cluster
from pipewright_pp.cluster import Prediction, predict
from pipewright_pp.torch import Fault, Finding, Report, verify

schedule: pw.Schedule = pw.schedule("zbvzerobubble", ranks=4, microbatches=16)
rows: list[list[str | None]] = schedule.rows
program: pw.Program = schedule.lower(["send-recv"])
verdicts: dict[str, str] = program.validate(transport="rank", eager="64KiB")
timeline: pw.Timeline = program.simulate(costs=pw.Costs(forward=[1.0, 2.0], hop=0.1))
proved: dict[str, str] = schedule.validate("rank")
same: pw.Timeline = schedule.simulate(logical=True)
bubbles: list[float] = timeline.causes()["bubble"]
starts: list[float] = timeline.events["start"]
timeline.view(Path("x.html"))
table: pw.Frame = timeline.memory()
comparison: pw.Comparison = pw.compare(["1f1b", schedule, program], ranks=4, microbatches=16, costs=pw.Costs.of_model(forward=8))
plan: pw.Plan = pw.plan({"layers": []}, ranks=8, memory="80GiB")
cut: list[int] = plan.boundaries

try:
    pw.read_csv("x.csv").validate()
except pw.ValidationError as error:
    ranks: list[int] = [violation.rank for violation in error.violations]

prediction: Prediction = predict({"model_type": "llama"}, Path("machine.toml"), {"gpus": 2, "precision": "f32"})
parameters: int = prediction.memory_parts[0]["parameters"]
seconds: dict[str, float] = prediction.parts

report: Report = verify(lambda: {"loss": 1.0}, None, None, stages={0: None}, deadline_s=10)
findings: tuple[Finding, ...] = report.findings
if report.first is not None:
    place: tuple[Fault, int | None, int | None] = (report.first.fault, report.first.stage, report.first.microbatch)
best: cluster.ClusterPlan = cluster.plan({"model_type": "llama"}, "h100", gpus=8, batch=8, sequence=8, layout={"tp": 2})[0]
files: dict[str, str] = best.emit("megatron")
rates: list[float] = [machine["figures"]["bf16_tflops"]["value"] for machine in cluster.clusters()]
judged: cluster.Judgement = cluster.check({"model_type": "llama"}, "h100", "train.sh", gpus=8, sequence=8)
option, before, after = judged.changes[0]
