"""Trains one model with PyTorch twice: cut by a plan of Pipewright, and with the layers divided evenly under 1F1B.

The model is a Llama whose head takes as long as several of its layers. Two Gloo processes with one thread each measure its layers
(`pipewright_pp.torch.profile`), plan, and then take steps of both pipelines in turn, from the same parameters on the same
batch. They measure the layers again between the steps, because the clock rate of a machine changes: a step is predicted from
the profiles before and after it. The report has the median times of a step and their spread, how much faster the plan is, the
largest difference between the losses, and the predicted times over the measured ones.

Not here: the blocks of the model (`llama.py`), and the speed of Pipewright's own runtime (`pipeline.py`).
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pipewright_pp as pw
import pipewright_pp.torch as pt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from llama import INITIAL_STD, LlamaBlock, LlamaConfig, rope_tables
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

RANKS = 2

# Longer than the whole bench; a rank that waits longer for the other one fails instead of hanging.
PEER_DEADLINE = timedelta(minutes=10)

# By default, glibc's allocator returns large tensors to the system when they are freed, and the page faults of the next ones
# take up to a third of the time of a layer, depending on what else is in flight. No profile of single layers can know that.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def main() -> None:
    """Starts one process for each rank; rank 0 prints the report."""
    options = parse_options()
    # OpenMP and the allocator read these variables when a process starts, so they are set before the ranks are spawned.
    os.environ |= {"OMP_NUM_THREADS": "1"} | KEEP_FREED_MEMORY
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, Path(folder) / "rendezvous"), nprocs=RANKS)


def run_rank(rank: int, options: argparse.Namespace, rendezvous: Path) -> None:
    """What one process does, from joining the group to leaving it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=RANKS, timeout=PEER_DEADLINE
    )
    layers = make_layers(options)
    inputs, targets = random_batch(options)
    profile = measured_profile(layers, inputs, targets, options.profile_steps, options)
    # Without a limit that ends the search early, both processes find the same plan.
    plan = pw.plan(
        profile, ranks=RANKS, microbatches=options.microbatches, data_parallel=1, head_parts=[1], time_limit=600
    )
    if options.schedule is not None:
        plan = plan_of(plan.plans, options.schedule)
    runs = {
        "default": default_run(rank, copy.deepcopy(layers), options),
        "planned": planned_run(plan, layers),
    }
    measured = Measured(options.warmup)
    for _ in range(options.warmup + options.steps):
        measured.profiles.append(measured_profile(layers, inputs, targets, options.profile_steps_between, options))
        measured.take_step(runs, inputs, targets)
    measured.profiles.append(measured_profile(layers, inputs, targets, options.profile_steps_between, options))
    if rank == 0:
        report = measured.report() | predictions(profile, measured, plan, options)
        print(json.dumps(report) if options.json else text(report), flush=True)
    dist.destroy_process_group()


def measured_profile(
    layers: list[nn.Module], inputs: Tensor, targets: Tensor, repetitions: int, options: argparse.Namespace
) -> pw.Profile:
    """The profile of the layers, which all processes measure at the same time."""
    return pt.profile(
        layers,
        inputs[: options.microbatch_size],
        loss_fn=loss_of,
        target=targets[: options.microbatch_size],
        optimizer=make_optimizer,
        repetitions=repetitions,
    )


@dataclass
class Run:
    """A pipeline of this rank, and the optimizer of its stages."""

    schedule: object
    stages: list[PipelineStage]
    optimizer: torch.optim.Optimizer

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """Takes a step that begins on all ranks at the same time; returns its seconds and its mean loss."""
        holds = {stage.stage_index for stage in self.stages}
        is_last = self.stages[0].num_stages - 1 in holds
        losses: list[Tensor] = []
        dist.barrier()
        start = time.perf_counter()
        self.schedule.step(
            *([inputs] if 0 in holds else []),
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        loss = torch.tensor([sum(loss.item() for loss in losses) / max(len(losses), 1)], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        return seconds.item(), loss.item()


def plan_of(plans: list[pw.Plan], name: str) -> pw.Plan:
    """The plan whose schedule has a name."""
    for plan in plans:
        if plan.name == name:
            return plan
    raise SystemExit(f"no plan is of {name}; the best plans are of {', '.join(plan.name for plan in plans)}")


def default_run(rank: int, layers: list[nn.Module], options: argparse.Namespace) -> Run:
    """The layers divided evenly by their number, under PyTorch's `Schedule1F1B`."""
    first, end = (rank * len(layers) // RANKS, (rank + 1) * len(layers) // RANKS)
    stage = PipelineStage(nn.Sequential(*layers[first:end]), rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=loss_of)
    return Run(schedule, [stage], make_optimizer(list(stage.submod.parameters())))


def planned_run(plan: pw.Plan, layers: list[nn.Module]) -> Run:
    """The plan, executed by PyTorch's runtime."""
    stages = pt.stages(plan, layers)
    schedule = pt.schedule(plan, stages, loss_of)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    return Run(schedule, stages, make_optimizer(parameters))


class Measured:
    """The steps of both runs, which are taken in turn, and the profiles before and after each of them.

    The first steps are not measured, but their losses are compared.
    """

    def __init__(self, warmup: int):
        self.warmup = warmup
        self.profiles: list[pw.Profile] = []
        self.load = os.getloadavg()[0]
        self._seconds: dict[str, list[float]] = {"default": [], "planned": []}
        self._losses: dict[str, list[float]] = {"default": [], "planned": []}

    def take_step(self, runs: dict[str, Run], inputs: Tensor, targets: Tensor) -> None:
        """Takes a step of each run."""
        for name, run in runs.items():
            taken, loss = run.step(inputs, targets)
            self._seconds[name].append(taken)
            self._losses[name].append(loss)

    def seconds(self, name: str) -> list[float]:
        """The times of the measured steps of a run."""
        return self._seconds[name][self.warmup :]

    def profiles_of_steps(self) -> list[tuple[pw.Profile, pw.Profile]]:
        """The profile before and the profile after each measured step."""
        kept = self.profiles[self.warmup :]
        return list(zip(kept, kept[1:]))

    def report(self) -> dict[str, object]:
        """What was measured."""
        default, planned = self._losses["default"], self._losses["planned"]
        ratios = [one / other for one, other in zip(self.seconds("default"), self.seconds("planned"))]
        return {
            "default_s": spread(self.seconds("default")),
            "planned_s": spread(self.seconds("planned")),
            "speedup": spread(ratios),
            "losses": planned,
            "largest_loss_difference": max(abs(one - other) for one, other in zip(default, planned)),
            "load": [round(self.load, 2), round(os.getloadavg()[0], 2)],
            "torch": torch.__version__,
        }


def predictions(profile: pw.Profile, measured: Measured, plan: pw.Plan, options: argparse.Namespace) -> dict[str, object]:
    """The predicted times of both steps over the measured ones.

    A step is predicted by the mean over the profiles before and after it. It is simulated with the program that PyTorch
    executes: `Schedule1F1B` never splits a backward.
    """
    default = pw.schedule("1f1b", ranks=RANKS, microbatches=options.microbatches).lower(level="comms")
    programs = {
        "default": (default, [(options.layers + 2) // RANKS]),
        "planned": (pt.program_for(plan), plan.boundaries),
    }
    shares = {}
    for name, (program, boundaries) in programs.items():
        predicted = [
            statistics.fmean(program.simulate(profile=it, boundaries=boundaries).makespan for it in pair)
            for pair in measured.profiles_of_steps()
        ]
        shares[name] = spread([one / other for one, other in zip(predicted, measured.seconds(name))])
    head, block = profile.to_dict()["layers"][-1], profile.to_dict()["layers"][1]
    return {
        "plan": {"schedule": plan.name, "boundaries": list(plan.boundaries)},
        "head_of_block": total(head) / total(block),
        "split_of_whole": (block["input_backward_s"] + block["weight_backward_s"]) / block["backward_s"],
        "predicted_of_measured": shares,
    }


def total(layer: dict[str, float]) -> float:
    """The time of a layer for a microbatch: forward and backward."""
    return layer["forward_s"] + layer["backward_s"]


class Embedding(nn.Module):
    """Token ids `[rows, seq_len]` to hidden states `[rows, seq_len, hidden]`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)


class Block(nn.Module):
    """A block with its tables of positions, so that it maps hidden states to hidden states."""

    def __init__(self, config: LlamaConfig, seq_len: int):
        super().__init__()
        self.block = LlamaBlock(config)
        cos, sin = rope_tables(config, seq_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.cos, self.sin)


class Head(nn.Module):
    """Hidden states to logits `[rows, seq_len, vocab]`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def make_layers(options: argparse.Namespace) -> list[nn.Module]:
    """The layers of the model; each matrix depends on the seed, its layer and its path alone."""
    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
    )
    blocks = [Block(config, options.seq_len) for _ in range(options.layers)]
    layers = [Embedding(config), *blocks, Head(config)]
    for index, layer in enumerate(layers):
        for path, parameter in layer.named_parameters():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(options.seed + zlib.crc32(f"{index}.{path}".encode()))
                nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
    return layers


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a stage, or of a layer while it is measured."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)


def random_batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Token ids and the ids that follow them, both `[microbatches * rows, seq_len]`."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.microbatches * options.microbatch_size, options.seq_len + 1)
    ids = torch.randint(options.vocab_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def spread(values: list[float]) -> dict[str, float]:
    """The median with the quartiles, and the number of values."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": quartiles[1], "quartile_1": quartiles[0], "quartile_3": quartiles[2], "count": len(values)}


def text(report: dict[str, object]) -> str:
    """The report for people."""

    def line(name: str, unit: str, found: dict[str, float]) -> str:
        return f"{name:<22} {found['median']:.3f}{unit} ({found['quartile_1']:.3f} to {found['quartile_3']:.3f})"

    plan, shares = report["plan"], report["predicted_of_measured"]
    return "\n".join(
        [
            f"PyTorch {report['torch']}, {RANKS} processes, load {report['load'][0]} to {report['load'][1]}",
            line("default cut and 1F1B", " s", report["default_s"]),
            line("planned", " s", report["planned_s"]),
            f"plan                   {plan['schedule']}, boundaries {plan['boundaries']}; "
            f"the head takes {report['head_of_block']:.2f} blocks",
            line("speedup", "", report["speedup"]),
            line("default, predicted", " of the measured time", shares["default"]),
            line("planned, predicted", " of the measured time", shares["planned"]),
            f"I and W of a block     {report['split_of_whole']:.2f} of its whole backward",
            f"losses                 {report['losses'][0]:.6f} to {report['losses'][-1]:.6f}, "
            f"largest difference {report['largest_loss_difference']:.1e}",
        ]
    )


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--layers", default=8, help="blocks between the embedding and the head", **number)
    parser.add_argument("--hidden-size", default=512, **number)
    parser.add_argument("--intermediate-size", default=1376, **number)
    parser.add_argument("--vocab-size", default=24576, help="the size of the head", **number)
    parser.add_argument("--seq-len", default=256, **number)
    parser.add_argument("--microbatches", default=8, **number)
    parser.add_argument("--microbatch-size", default=1, help="rows in a microbatch", **number)
    parser.add_argument("--steps", default=10, help="steps of each run that are measured", **number)
    parser.add_argument("--warmup", default=2, type=int, metavar="N", help="steps before those")
    parser.add_argument("--profile-steps", default=20, help="repetitions of the profile of the plan", **number)
    parser.add_argument(
        "--profile-steps-between", default=4, help="repetitions of each profile between two steps", **number
    )
    parser.add_argument("--seed", default=42, type=int, help="of parameters and data")
    parser.add_argument("--schedule", metavar="NAME", help="take the plan of this schedule among the best ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return number


if __name__ == "__main__":
    main()
