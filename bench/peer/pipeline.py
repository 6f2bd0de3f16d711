"""Trains the bench model with PyTorch and reports its speed: the other side of Pipewright's comparison.

With two or more ranks: one Gloo process a rank under `torch.distributed.pipelining`'s `Schedule1F1B`, or with
`--schedule zbv` under `ScheduleZBVZeroBubble`, whose ranks hold two stages each.
With one rank: one process that accumulates gradients over the same microbatches, without a pipeline.
Either way a step is the same arithmetic: losses averaged over the microbatches, gradients clipped by their
global norm, AdamW. The data are random token ids, the same in every step, because speed does not depend on
their content and a falling loss shows that training works.

Not here: the model (`llama.py`), the installation (`setup.sh`), and any comparison with Pipewright.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from llama import LlamaConfig, LlamaStage, initialise
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

LossFn = Callable[[Tensor, Tensor], Tensor]

# Longer than any step and any compilation; a rank that waits longer for a peer fails instead of hanging.
PEER_DEADLINE = timedelta(minutes=5)


def main() -> None:
    """Starts one process a rank; the last rank, which has the losses, prints the report."""
    options = parse_options()
    # Read by the OpenMP runtime when a process starts, so it is set before the ranks are spawned.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, Path(folder) / "rendezvous"), nprocs=options.ranks)


def run_rank(rank: int, options: argparse.Namespace, rendezvous: Path) -> None:
    """What one process does, from joining the group to leaving it."""
    torch.set_num_threads(options.threads)
    if options.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=options.ranks,
            timeout=PEER_DEADLINE,
        )
    indices = stage_indices(rank, options)
    stages = [LlamaStage(options.model, options.seq_len, index, options.stages) for index in indices]
    for stage in stages:
        initialise(stage, options.seed)
        if options.precision == "bf16":
            stage.to(torch.bfloat16)
        if options.compile:
            for block in stage.layers.values():
                block.compile()
    record = train(stages, rank, options)
    if options.stages - 1 in indices:
        print(render(report(record, options), options.json), flush=True)
    if options.ranks > 1:
        dist.destroy_process_group()


def stage_indices(rank: int, options: argparse.Namespace) -> list[int]:
    """The stages of a rank: its own under 1F1B; under ZBV one on the way down the V and one on the way back."""
    if options.schedule == "1f1b" or options.ranks == 1:
        return [rank]
    return [rank, options.stages - 1 - rank]


def train(stages: list[LlamaStage], rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Runs all steps; returns what was seen in those after the warm-up.

    A step is timed from the end of the one before it, so that nothing between steps goes uncounted and the
    ranks need no barrier.
    """
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    accumulate = make_accumulate(stages, rank, options)
    record: dict[str, list[float]] = {"loss": [], "grad_norm": [], "step_ms": []}
    last_end = time.perf_counter()
    for step in range(options.warmup + options.steps):
        loss = accumulate()
        grad_norm = clip_global_norm(parameters, options)
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        if step >= options.warmup:
            record["loss"].append(loss)
            record["grad_norm"].append(grad_norm)
            record["step_ms"].append(round((end - last_end) * 1e3, 3))
        last_end = end
    return record


def make_accumulate(stages: list[LlamaStage], rank: int, options: argparse.Namespace) -> Callable[[], float]:
    """The function that adds one batch's gradients and returns its loss (0 on ranks that do not see it)."""
    inputs, targets = random_batch(options)

    # The mean over microbatches is taken here, which saves the schedule a pass over all gradients.
    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten()) / options.microbatches

    if options.ranks == 1:
        accumulate = make_unpipelined(stages[0], inputs, targets, loss_fn, options)
    else:
        accumulate = make_pipelined(stages, rank, inputs, targets, loss_fn, options)
    if options.precision == "autocast":
        # Around a whole step: within it, each weight is converted once. A backward has the types of its forward.
        return torch.autocast("cpu", dtype=torch.bfloat16)(accumulate)
    return accumulate


def make_unpipelined(
    stage: LlamaStage, inputs: Tensor, targets: Tensor, loss_fn: LossFn, options: argparse.Namespace
) -> Callable[[], float]:
    """Forward and backward of each microbatch in turn, in one process."""
    microbatches = list(zip(inputs.split(options.microbatch_size), targets.split(options.microbatch_size)))

    def accumulate() -> float:
        total = 0.0
        for microbatch, target in microbatches:
            loss = loss_fn(stage(microbatch), target)
            loss.backward()
            total += loss.item()
        return total

    return accumulate


def make_pipelined(
    stages: list[LlamaStage],
    rank: int,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    options: argparse.Namespace,
) -> Callable[[], float]:
    """One step of the schedule, with the shapes between the stages given beforehand."""
    indices = stage_indices(rank, options)
    is_first, is_last = 0 in indices, options.stages - 1 in indices
    rows, model = options.microbatch_size, options.model
    # Autocast adds the results of its products, in bfloat16, to hidden states in single precision.
    hidden_type = torch.bfloat16 if options.precision == "bf16" else torch.float32
    logits_type = torch.float32 if options.precision == "f32" else torch.bfloat16
    hidden = torch.empty(rows, options.seq_len, model.hidden_size, dtype=hidden_type, requires_grad=True)
    logits = torch.empty(rows, options.seq_len, model.vocab_size, dtype=logits_type, requires_grad=True)
    parts = [
        PipelineStage(
            stage,
            index,
            options.stages,
            torch.device("cpu"),
            input_args=inputs[:rows] if index == 0 else hidden,
            output_args=logits if index == options.stages - 1 else hidden,
        )
        for index, stage in zip(indices, stages)
    ]
    settings = {"n_microbatches": options.microbatches, "loss_fn": loss_fn, "scale_grads": False}
    if options.schedule == "1f1b":
        schedule = Schedule1F1B(parts[0], **settings)
    else:
        schedule = ScheduleZBVZeroBubble(parts, **settings)

    def accumulate() -> float:
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if is_first else []),
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        return sum(loss.item() for loss in losses)

    return accumulate


def random_batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Token ids and the ids that follow them, both `[microbatches * rows, seq_len]`."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.microbatches * options.microbatch_size, options.seq_len + 1)
    ids = torch.randint(options.model.vocab_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def clip_global_norm(parameters: list[Tensor], options: argparse.Namespace) -> float:
    """Scales all gradients by `min(1, clip / norm)` for the norm over every rank, which is returned."""
    norm = get_total_norm([parameter.grad for parameter in parameters], foreach=True)
    if options.ranks > 1:
        square = norm.float().square()
        dist.all_reduce(square)
        norm = square.sqrt()
    clip_grads_with_norm_(parameters, options.clip_norm, norm, foreach=True)
    return norm.item()


def report(record: dict[str, list[float]], options: argparse.Namespace) -> dict[str, object]:
    """The figures of a run, with everything that is needed to repeat it."""
    tokens = options.microbatches * options.microbatch_size * options.seq_len
    return {
        "tokens_per_second": round(tokens * 1e3 / statistics.median(record["step_ms"]), 1),
        **record,
        "torch": torch.__version__,
        "schedule": options.schedule if options.ranks > 1 else "none",
        "ranks": options.ranks,
        "threads_per_rank": options.threads,
        "compiled": options.compile,
        "precision": options.precision,
        "microbatches": options.microbatches,
        "microbatch_size": options.microbatch_size,
        "seq_len": options.seq_len,
        "seed": options.seed,
        "warmup": options.warmup,
        "model": asdict(options.model),
    }


def render(figures: dict[str, object], as_json: bool) -> str:
    """The report as one line of JSON, or as a line for people."""
    if as_json:
        return json.dumps(figures)
    milliseconds = statistics.median(figures["step_ms"])
    return (
        f"PyTorch {figures['torch']}, {figures['ranks']} rank(s): {figures['tokens_per_second']} tokens/s, "
        f"{milliseconds:.0f} ms a step (median of {len(figures['step_ms'])}), "
        f"loss {figures['loss'][0]:.4f} to {figures['loss'][-1]:.4f}"
    )


def parse_options() -> argparse.Namespace:
    """Reads and checks the command line; the sizes of the model become `options.model`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--ranks", default=2, help="processes; 1 trains without a pipeline", **number)
    parser.add_argument("--schedule", default="1f1b", choices=["1f1b", "zbv"])
    parser.add_argument("--steps", default=10, help="steps that are measured", **number)
    parser.add_argument("--warmup", default=2, type=int, metavar="N", help="steps before those")
    parser.add_argument("--seed", default=42, type=int, help="of parameters and data")
    parser.add_argument("--threads", default=1, help="threads of each process", **number)
    parser.add_argument("--microbatches", default=8, **number)
    parser.add_argument("--microbatch-size", default=1, help="rows in a microbatch", **number)
    parser.add_argument("--seq-len", default=256, **number)
    parser.add_argument("--clip-norm", default=1.0, type=float, help="limit of the global gradient norm")
    for field, default in asdict(LlamaConfig()).items():
        kind = positive if isinstance(default, int) else float
        parser.add_argument(f"--{field.replace('_', '-')}", default=default, type=kind, metavar="N")
    parser.add_argument(
        "--precision",
        default="f32",
        choices=["f32", "autocast", "bf16"],
        help="bf16: parameters and optimizer too",
    )
    parser.add_argument("--compile", action="store_true", help="compile each block (needs a C++ compiler)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.stages = options.ranks * (2 if options.schedule == "zbv" and options.ranks > 1 else 1)
    options.model = LlamaConfig(**{field: getattr(options, field) for field in asdict(LlamaConfig())})
    for holds, message in requirements(options):
        if not holds:
            parser.error(message)
    return options


def requirements(options: argparse.Namespace) -> list[tuple[bool, str]]:
    """What the options must satisfy together, each with the message for when they do not."""
    model = options.model
    return [
        (options.warmup >= 0, "--warmup must not be negative"),
        (options.stages <= model.num_hidden_layers, "the stages must not exceed --num-hidden-layers"),
        (options.ranks <= options.microbatches, "--ranks must not exceed --microbatches"),
        (
            model.hidden_size % (2 * model.num_attention_heads) == 0,
            "--hidden-size must be an even multiple of --num-attention-heads",
        ),
        (
            model.num_attention_heads % model.num_key_value_heads == 0,
            "--num-attention-heads must be a multiple of --num-key-value-heads",
        ),
    ]


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not an integer of at least 1")
    return int(text)


if __name__ == "__main__":
    main()
