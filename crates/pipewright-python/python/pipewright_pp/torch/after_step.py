"""Compares what a step reports and leaves behind: losses, norms and tokens; buffers and parameters after it."""

from __future__ import annotations

from .comparison import Comparison, buffer_fault
from .findings import Fault
from .records import RankRecord, StageRecord
from .sketches import difference


def judge_figures(compared: Comparison, is_explained: bool) -> None:
    """Compares the figures that the step returns: only the tokens, if an earlier difference explains the others."""
    uncut, count = compared.uncut, compared.setting.microbatches * compared.setting.replicas
    reported: set[tuple[str, float]] = set()
    for rank in compared.ranks:
        stage = rank.stages[-1] if rank.stages else None
        known = (("tokens", compared.setting.tokens), ("grad_norm", uncut.grad_norm), ("loss", uncut.loss))
        for name, right in known[: 1 if is_explained else None]:
            for value in rank.figures.get(name, []):
                if right is None or compared.near(value, right) or (name, value) in reported:
                    continue
                reported.add((name, value))
                fault, advice = {"grad_norm": Fault.NORM, "loss": Fault.LOSS, "tokens": Fault.TOKENS}[name], ""
                if name == "grad_norm":
                    advice = _norm_advice(compared, rank, value)
                elif name == "loss" and compared.near(value * count, right):
                    fault, advice = Fault.DIVIDED, f"it is the loss over the {count} microbatches"
                elif name == "loss" and compared.near(value, right * count):
                    fault, advice = Fault.UNDIVIDED, f"it is the loss times the {count} microbatches"
                label = {"grad_norm": "the norm of the gradients", "loss": "the loss", "tokens": "the number of tokens"}[name]
                text = f"{label} is {value:.6g}, and the uncut model's is {right:.6g}, so it differs"
                compared.find(fault, text, abs(value - right) / max(abs(right), 1e-30), stage, advice=advice)
        losses = rank.figures.get("losses", [])
        mean = sum(losses) / len(losses) if losses else 0.0
        if not losses or is_explained or compared.setting.replicas > 1:
            continue
        if not compared.near(mean, uncut.loss) and not compared.near(sum(losses), uncut.loss):
            text = f"the mean of the losses is {mean:.6g}, and the uncut model's loss is {uncut.loss:.6g}, so it differs"
            compared.find(Fault.LOSS, text, abs(mean - uncut.loss) / max(abs(uncut.loss), 1e-30), stage)


def _norm_advice(compared: Comparison, rank: RankRecord, value: float) -> str:
    """Returns whose norm a wrong norm is."""
    squares = 0.0
    for record in rank.stages:
        squares += sum(parameter.gradient.norm**2 for parameter in record.parameters.values() if parameter.gradient is not None)
    if squares and abs(squares**0.5 / value - 1) < 0.1:
        return f"it is the norm of the gradients of rank {compared.ranks.index(rank)} alone"
    return "it depends on how the model is cut"


def judge_state(compared: Comparison) -> None:
    """Compares buffers and parameters after the step, and whether the stages take random numbers."""
    trainable = compared.trainable()
    stepped: dict[bool, list[tuple[StageRecord, str]]] = {True: [], False: []}
    for record in compared.stages:
        frozen_moved: list[tuple[str, float]] = []
        for name, parameter in record.parameters.items():
            canonical = compared.canonical(record, name)
            if parameter.after is None:
                continue
            change = difference(parameter.after, parameter.before)
            if canonical not in trainable:
                compared.judged.values += 1
                if change != 0:
                    frozen_moved.append((name, change))
            elif not any(part.norm > 0 for part in compared.uncut.gradients[canonical]):
                continue
            elif parameter.is_stepped or (parameter.is_stepped is False and change == 0):
                stepped[parameter.is_stepped].append((record, name))
        for name, change in frozen_moved[:1]:
            text = f"{name} is frozen in the uncut model, and the step changes it"
            compared.find(Fault.FROZEN, text, change, record)
        for name, buffer in record.buffers.items():
            buffer_name = compared.names[record.stage].get(name)
            if buffer_name is None or buffer.after is None or compared.setting.replicas > 1:
                continue
            fine, relative = compared.close(buffer.after, compared.uncut.buffers[buffer_name])
            if not fine and not compared.judged.findings:
                advice = "the step does not change it" if difference(buffer.after, buffer.before) == 0 else ""
                text = f"after the step, the buffer {name} differs"
                compared.find(buffer_fault(name), text, relative, record, advice=advice)
        draws = [index for index, call in record.calls.items() if call.draws]
        if draws and not compared.uncut.draws:
            text = f"the stage takes random numbers in {len(draws)} forwards, and the uncut model takes none"
            compared.find(Fault.RANDOM, text, None, record, compared.number_of(record, draws[0]), f"{record.stage}F{draws[0]}")
    # A rank may update its parameters without an optimizer of PyTorch, and an optimizer may leave a value as it is.
    compared.judged.values += len(stepped[True]) + len(stepped[False])
    if stepped[True] and stepped[False]:
        record, name = stepped[False][0]
        text = f"the optimizers leave out {len(stepped[False])} parameters with gradients, the first is {name}"
        compared.find(Fault.PARTIAL_STEP, text, None, record, advice="the step does not change them either")
