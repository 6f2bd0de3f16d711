"""Trains a model directory with PyTorch and transformers, one step for each line of the standard input.

The folder has a Hugging Face model and `tokens.json`: the rows of ids of a batch, each with one id more than the model
sees at once. A row is a microbatch, and the batch is the same in every step. A step is that of `pipeline.py`: losses
averaged over the microbatches, gradients clipped by their global norm, AdamW on every parameter.

One rank is a process that accumulates the gradients of the microbatches. Two ranks are Gloo processes under
`Schedule1F1B`; the first one has the embedding and the first `--cut` blocks of the model.

With `--adapter-rank`, adapters of PEFT on all linear layers of the blocks, or on those of `--adapter-target`, are trained
in place of the model. They are in the folder `adapter` of the model's folder, and are made there first. PEFT keeps them
in single precision.

The first line of the output has the settings. Each further one has a step's loss, gradient norm and seconds. Every line
is an object in JSON.

Pipewright's bench writes the model and its parameters, and compares the results.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

# Both are read when the libraries load: nothing is fetched, and one thread computes.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from pipeline import PEER_DEADLINE, clip_global_norm, positive  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402


def main() -> None:
    """Answers the lines of the standard input until it ends."""
    options = parse_options()
    if options.adapter_rank:
        make_adapter(options)
    if options.ranks == 1:
        run_rank(0, options, sys.stdin)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    options.rendezvous = options.folder / f"rendezvous-{os.getpid()}"
    processes = mp.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    processes.Process(target=run_first, args=(options, receiver), daemon=True).start()
    receiver.close()
    # This process is the last rank, which has the losses.
    run_rank(1, options, forwarded(sys.stdin, sender))


def run_first(options: argparse.Namespace, receiver: Connection) -> None:
    """What the process of the first rank does."""
    run_rank(0, options, received(receiver))


def forwarded(lines: Iterable[str], sender: Connection) -> Iterator[str]:
    """The lines, which the first rank gets too."""
    for line in lines:
        sender.send(line)
        yield line


def received(receiver: Connection) -> Iterator[str]:
    """The lines that the last rank forwards, until its process ends."""
    while True:
        try:
            yield receiver.recv()
        except EOFError:
            return


def run_rank(rank: int, options: argparse.Namespace, requests: Iterable[str]) -> None:
    """Loads the model and runs a step for each request. The last rank answers."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=options.rendezvous.as_uri(),
            rank=rank,
            world_size=options.ranks,
            timeout=PEER_DEADLINE,
        )
    model = load(options)
    is_last = rank == options.ranks - 1
    if is_last:
        answer_settings(model, options)
    step = make_step(model, rank, options)
    for _ in requests:
        start = time.perf_counter()
        loss, norm = step()
        if is_last:
            answer(loss=loss, grad_norm=norm, seconds=time.perf_counter() - start)


def answer_settings(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Prints the first line of the output."""
    answer(
        torch=torch.__version__,
        transformers=transformers.__version__,
        ranks=options.ranks,
        precision=options.precision,
        threads=torch.get_num_threads(),
        experts=getattr(model.config, "_experts_implementation", None),
        attention=model.config._attn_implementation,
        chunk_size=getattr(model.config, "chunk_size", None),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained_of(model)),
    )


def answer(**figures: object) -> None:
    """Prints a line of the output."""
    print(json.dumps(figures), flush=True)


def make_adapter(options: argparse.Namespace) -> None:
    """Writes new adapters, whose second matrices are zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(17)
    rank = options.adapter_rank
    targets = options.adapter_target or "all-linear"
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    get_peft_model(load_base(options), config).save_pretrained(adapter_of(options))


def adapter_of(options: argparse.Namespace) -> Path:
    """The folder of the adapters."""
    return options.folder / "adapter"


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that training changes."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def load(options: argparse.Namespace) -> torch.nn.Module:
    """The model of the folder, ready for training, with its adapters."""
    model = load_base(options)
    if options.adapter_rank:
        from peft import PeftModel

        # The model itself, whose linear layers have adapters.
        model = PeftModel.from_pretrained(model, adapter_of(options), is_trainable=True).get_base_model()
    model.train()
    return model


def load_base(options: argparse.Namespace) -> torch.nn.Module:
    """The model of the folder."""
    config = AutoConfig.from_pretrained(options.folder)
    if hasattr(config, "chunk_size"):
        config.chunk_size = options.chunk_size
    # Dense models refuse the choice.
    has_experts = hasattr(config, "num_experts") or hasattr(config, "n_routed_experts")
    return AutoModelForCausalLM.from_pretrained(
        options.folder,
        config=config,
        dtype=torch.bfloat16 if options.precision == "bf16" else torch.float32,
        attn_implementation="sdpa",
        **({"experts_implementation": options.experts} if has_experts else {}),
    )


def make_step(
    model: torch.nn.Module, rank: int, options: argparse.Namespace
) -> Callable[[], tuple[float, float]]:
    """The function that runs a step and returns its loss (0 except on the last rank) and its gradient norm."""
    rows = torch.tensor(json.loads((options.folder / "tokens.json").read_text()))
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten()) / len(rows)

    if options.ranks == 1:
        stage: torch.nn.Module = model
        accumulate = make_unpipelined(model, inputs, targets, loss_fn)
    else:
        stage = FirstPart(model, options.cut) if rank == 0 else LastPart(model, options.cut)
        accumulate = make_pipelined(stage, rank, inputs, targets, loss_fn)
    if options.precision == "autocast":
        # Around a whole step: within it, each weight is converted once. A backward has the types of its forward.
        accumulate = torch.autocast("cpu", dtype=torch.bfloat16)(accumulate)
    parameters = trained_of(stage)
    optimizer = torch.optim.AdamW(
        parameters, lr=options.rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )

    def step() -> tuple[float, float]:
        loss = accumulate()
        norm = clip_global_norm(parameters, options)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return step


def make_unpipelined(
    model: torch.nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], float]:
    """Forward and backward of each microbatch in turn."""
    microbatches = list(zip(inputs.split(1), targets.split(1)))

    def accumulate() -> float:
        total = 0.0
        for microbatch, target in microbatches:
            loss = loss_fn(model(input_ids=microbatch, use_cache=False).logits, target)
            loss.backward()
            total += loss.item()
        return total

    return accumulate


def make_pipelined(
    part: torch.nn.Module,
    rank: int,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[], float]:
    """One step of the schedule. The first one finds out the shapes between the stages."""
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=len(inputs), loss_fn=loss_fn, scale_grads=False)

    def accumulate() -> float:
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
            return 0.0
        losses: list[Tensor] = []
        schedule.step(target=targets, losses=losses, return_outputs=False)
        return sum(loss.item() for loss in losses)

    return accumulate


class FirstPart(torch.nn.Module):
    """The embedding and the first blocks of a model."""

    def __init__(self, model: torch.nn.Module, cut: int) -> None:
        super().__init__()
        self.body = model.model
        self.body.layers = self.body.layers[:cut]
        # Nemotron-H has another name for it.
        setattr(self.body, "norm_f" if hasattr(self.body, "norm_f") else "norm", torch.nn.Identity())

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(input_ids=ids, use_cache=False).last_hidden_state


class LastPart(torch.nn.Module):
    """The other blocks, the norm and the head."""

    def __init__(self, model: torch.nn.Module, cut: int) -> None:
        super().__init__()
        self.model = model
        model.model.layers = model.model.layers[cut:]
        model.set_input_embeddings(torch.nn.Identity())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model(inputs_embeds=hidden, use_cache=False).logits


def parse_options() -> argparse.Namespace:
    """Reads the command line. The defaults are the fastest settings on one core, as `README.md` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the model with its tokens.json")
    parser.add_argument("--experts", default="grouped_mm", choices=["eager", "grouped_mm"])
    parser.add_argument("--chunk-size", default=64, type=int, metavar="N", help="of the scan of Mamba-2")
    parser.add_argument("--rate", default=3e-5, type=float, help="the learning rate")
    parser.add_argument("--clip-norm", default=1.0, type=float, help="limit of the global gradient norm")
    parser.add_argument("--adapter-rank", type=positive, metavar="N", help="train adapters of this rank with PEFT")
    help_of_target = "a layer that has an adapter, once for each; all linear layers of the blocks without it"
    parser.add_argument("--adapter-target", action="append", metavar="NAME", help=help_of_target)
    parser.add_argument("--ranks", default=1, type=int, choices=[1, 2])
    parser.add_argument("--cut", type=positive, metavar="N", help="blocks of the first of two ranks")
    parser.add_argument(
        "--precision",
        default="f32",
        choices=["f32", "autocast", "bf16"],
        help="bf16: parameters and optimizer too",
    )
    options = parser.parse_args()
    if options.ranks == 2 and options.cut is None:
        parser.error("two ranks need --cut")
    return options


if __name__ == "__main__":
    main()
