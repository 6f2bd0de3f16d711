"""Predicts a training step of PyTorch from a measurement of this machine, and compares it with the measured step.

Two Gloo processes of one thread each measure the machine (`pipewright_pp.torch.measure_machine`) and then train the model of
`llama.py` in f32. Both have the whole model and a half of the batch, and a step is: forward, cross entropy, backward, a
barrier, a sum of each gradient over both (`all_reduce`, after the backward), and PyTorch's AdamW. Measuring and training
alternate in rounds. The prediction is `pipewright_pp.cluster.predict` with the cluster file alone.

    bench/.venv/bin/python bench/peer/measured_machine.py [--rounds 5] [--json]

It needs the package `pipewright` in its environment (`.ci/run python` installs it). Measure on an idle machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from llama import LlamaConfig, LlamaStage, initialise
from pipewright_pp.cluster import predict
from pipewright_pp.torch import measure_machine

RANKS = 2

# By default, glibc's allocator returns large tensors to the system when they are freed, and the page faults of the next ones
# depend on what else is in flight. No measurement of single kernels can know that.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def main() -> None:
    """Runs the rounds, and prints the predicted and the measured seconds of each, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7, help="steps of a round, without two to warm up")
    parser.add_argument("--rows", type=int, default=1, help="rows of a process")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
    )
    layout = {
        "gpus": RANKS,
        "mbs": options.rows,
        "gbs": RANKS * options.rows,
        "seq": options.sequence,
        "precision": "f32",
        "data_parallel": "none",
        "compiled": False,
    }
    # The allocator reads these variables when a process starts, so they are set before the ranks are spawned.
    os.environ.update(KEEP_FREED_MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (config, layout, options.rounds, options.steps, Path(folder))
        mp.spawn(rank_main, args=arguments, nprocs=RANKS)
        rounds = json.loads((Path(folder) / "rounds.json").read_text())
    report(rounds, options.json)


def report(rounds: list[dict], as_json: bool) -> None:
    """Prints the rounds and their medians."""
    predicted, measured = (statistics.median(of_round[key] for of_round in rounds) for key in ("predicted_s", "measured_s"))
    error = predicted / measured - 1
    if as_json:
        print(json.dumps({"predicted_s": predicted, "measured_s": measured, "error": error, "rounds": rounds}))
        return
    for number, of_round in enumerate(rounds, 1):
        print(f"round {number}: {line(of_round['predicted_s'], of_round['measured_s'])}")
        for part, (of_prediction, of_step) in of_round["parts"].items():
            print(f"    {part:12} predicted {of_prediction:.3f} s, measured {of_step:.3f} s")
    print(f"medians: {line(predicted, measured)}")


def line(predicted: float, measured: float) -> str:
    """Returns the text of a comparison."""
    return f"predicted {predicted:.3f} s, measured {measured:.3f} s, error {100 * (predicted / measured - 1):+.1f}%"


def rank_main(rank: int, config: LlamaConfig, layout: dict, rounds: int, steps: int, folder: Path) -> None:
    """Measures and trains in turns; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=RANKS)
    keys = {"architectures": ["LlamaForCausalLM"], **asdict(config)}
    step = Step(config, layout, rank)
    results = []
    for _ in range(rounds):
        measure_machine(keys, layout, folder / "machine.toml", overlap=0.0)
        prediction = predict(keys, folder / "machine.toml", layout)
        samples = [step.run() for _ in range(2 + steps)][2:]
        seconds, wait, data, optimizer = (statistics.median(of_part) for of_part in zip(*samples))
        parts = prediction.parts
        model = sum(parts[part] for part in ("products", "attention", "elementwise"))
        computed = seconds - wait - data - optimizer
        shown = {"computation": (model, computed), "wait": (0.0, wait), "data": (parts["data"], data)}
        shown["optimizer"] = (parts["optimizer"], optimizer)
        results.append({"predicted_s": prediction.seconds, "measured_s": seconds, "parts": shown})
    if rank == 0:
        (folder / "rounds.json").write_text(json.dumps(results))
    dist.destroy_process_group()


class Step:
    """The training step of one rank."""

    def __init__(self, config: LlamaConfig, layout: dict, rank: int):
        self.model = LlamaStage(config, layout["seq"], 0, 1)
        initialise(self.model, seed=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(config.vocab_size, (layout["mbs"], layout["seq"] + 1), generator=generator)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].flatten()

    def run(self) -> tuple[float, float, float]:
        """Returns the seconds of a step, of the wait for the other rank, of the sums of gradients, and of the update."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets)
        (loss / RANKS).backward()
        waiting = time.perf_counter()
        dist.barrier()
        summed = time.perf_counter()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        updated = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return end - start, summed - waiting, updated - summed, end - updated


if __name__ == "__main__":
    main()
