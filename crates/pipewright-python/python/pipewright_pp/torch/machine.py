"""`measure_machine`: measures the machine at hand in PyTorch, and writes the cluster file that `plan --cluster` reads."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipewright_pp import cluster
from pipewright_pp.torch import versions
from pipewright_pp.torch.backends import device_of_messages
from pipewright_pp.torch.errors import MeasureError
from pipewright_pp.torch.profiling import ASSUMED_LINK
from pipewright_pp.torch.ranks import Ranks

#: The precisions that are measured; `f16` has the same rates as `bf16`.
MEASURED_PRECISIONS = ("bf16", "f32")

#: The keys with which fused attention has half of its final rate in the cost model.
HALF_RATE_KEYS = 700


@dataclass(frozen=True)
class Figure:
    """A measured figure: the median of its measurements."""

    value: float
    spread: float
    """Half the distance of the quartiles, as a share of the median."""
    samples: int
    """The measurements."""

    def with_value(self, value: float) -> Figure:
        """Returns the figure that follows from this one."""
        return Figure(value, self.spread, self.samples)


@dataclass(frozen=True)
class MachineFigures:
    """The figures of a machine, with the keys of a cluster file."""

    keys: Mapping[str, Any]
    """The content of the cluster file. Each measured value is a `Figure`."""
    ranks: int
    """The processes that measured at the same time."""
    path: Path | None = None
    """The file that was written."""

    @property
    def figures(self) -> dict[str, Figure]:
        """The measured figures by their place in the file, such as `measured.product[0].seconds`."""
        return dict(_figures(self.keys, ""))

    def to_toml(self) -> str:
        """Returns the text of the cluster file. A comment behind a figure has its spread."""
        return "\n".join(_lines(self.keys, "")) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster file. It replaces an older file at once, so that nobody reads half of it."""
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(self.to_toml())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise


def measure_machine(
    config: Any,
    layout: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    device: Any = None,
    overlap: float | None = None,
    repetitions: int = 15,
    warmup: int = 3,
    group: Any = None,
    allow_untested: bool = False,
) -> MachineFigures:
    """Measures what a prediction of a model on this machine needs, and writes it as a cluster file.

    `config` and `layout` are the model and the configuration of `pipewright_pp.cluster.predict`: the products, the attention
    and the elementwise kernels have the shapes that a rank has there. They are measured forwards and backwards, in the
    precision of the layout (`bf16`, `f16` or `f32`; others are refused). `device` is CUDA if there is a GPU, and the processor otherwise. If a
    process group exists, all its processes (of `group`) call this function: they measure at the same time, because they
    share caches and memory, and also messages, sums (`all_reduce`) and exchanges (`all_to_all`) between them. Otherwise the
    links are assumed, and the file says so. `overlap` is the share of the sums of gradients that computation hides; 0 for
    a program that sums them after its backward. If it is None, it is measured beside products.

    Each figure is the median of `repetitions` measurements after `warmup` calls. A measurement repeats calls that take less
    than 20 ms. All ranks return the figures of the slowest rank, because a step waits for it, and rank 0 writes `path`.

    The cost model knows no measured times of latent attention; its scores keep their usual share of the peak.

    Raises `MeasureError` for a device that is missing, a folder that does not exist, a group of one rank, or ranks that
    measure different things; `ClusterError` for a mistake in the model or the layout; and `UntestedVersion`. If one rank
    has an error, such as too little memory, all ranks raise at once: that rank its error, and the others a `MeasureError`
    that names the rank and has the error's text.
    """
    # The version is checked where an error ends all ranks.
    torch, _ = versions.load(allow_untested=True)
    dist = torch.distributed
    ranks = Ranks(dist, group) if dist.is_available() and dist.is_initialized() else None
    with ranks.ending_together() if ranks else nullcontext():
        version = versions.version_of(torch.__version__, allow_untested=allow_untested)
        _check(torch, path, overlap, repetitions, warmup)
        device = _device(torch, device)
        work = cluster.shapes(config, layout)
        if work["precision"] not in MEASURED_PRECISIONS:
            raise MeasureError(
                f"the precision of the layout is {work['precision']}, which this function does not measure; use "
                f"{' or '.join(MEASURED_PRECISIONS)}"
            )
        if ranks is not None:
            _prepare(torch, ranks, device, (work, device.type, repetitions, warmup, overlap))

        from pipewright_pp.torch.machine_work import measure

        times = measure(work, device, ranks, repetitions=repetitions, warmup=warmup, measures_overlap=overlap is None)
        keys = _keys(torch, work, times, device, ranks, name, overlap)
        keys["source"] = f"measured with PyTorch {version.text}"
        figures = MachineFigures(keys, ranks.count if ranks else 1, Path(path) if path is not None else None)
        if ranks is not None:
            # No file is written if a rank has failed.
            ranks.agree()
        if path is not None and (ranks is None or ranks.rank == 0):
            try:
                figures.write(path)
            except OSError as error:
                raise MeasureError(f"{path}: cannot write the cluster file: {error.strerror}") from error
    return figures


def _prepare(torch: Any, ranks: Ranks, device: Any, measured: object) -> None:
    """Compares what the ranks measure, and finds their hosts and the device of their messages.

    Raises `MeasureError` if a rank measures something else, or has no other rank.
    """
    if ranks.count == 1:
        raise MeasureError(
            "the process group has one rank, so there is no link to measure; start two ranks, or measure before "
            "`init_process_group`"
        )
    texts = ranks.agree(json.dumps(measured))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise MeasureError(
                f"rank {rank} measures something else than rank 0; give all ranks the same model, layout and options"
            )
    ranks.find_hosts()
    ranks.device = device_of_messages(torch, ranks.group, device)


def _check(torch: Any, path: Any, overlap: float | None, repetitions: int, warmup: int) -> None:
    if repetitions < 1 or warmup < 0:
        raise MeasureError(f"repetitions is {repetitions} and warmup {warmup}; numbers from 1 and from 0 were expected")
    if overlap is not None and not 0 <= overlap <= 1:
        raise MeasureError(f"overlap is {overlap}; a share from 0 to 1 was expected")
    if path is not None and not Path(path).parent.is_dir():
        raise MeasureError(f"the folder {Path(path).parent} does not exist; make it, or name a file in another folder")
    if path is not None and Path(path).is_dir():
        raise MeasureError(f"{path} is a folder; name a file in it, such as {Path(path) / 'machine.toml'}")


def _device(torch: Any, device: Any) -> Any:
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and not torch.cuda.is_available():
        raise MeasureError("device is cuda, and PyTorch finds no CUDA device; use device=\"cpu\", or install a driver and a CUDA build")
    if found.type not in ("cuda", "cpu"):
        raise MeasureError(f"device is {found.type}; cpu or cuda was expected")
    return found


def _keys(
    torch: Any, work: dict[str, Any], times: dict[str, Any], device: Any, ranks: Any, name: str | None, overlap: float | None
) -> dict[str, Any]:
    """Returns the keys of the cluster file from the times of all parts."""
    precision = work["precision"]
    rates = [(2 * row["rows"] * row["columns"] * row["inner"] / row["seconds"].value, row["seconds"]) for row in times["products"]]
    peak, fastest = max(rates, key=lambda rate: rate[0])
    constants: dict[str, Any] = {
        "product": statistics.median(rate for rate, _ in rates) / peak,
        "memory": 1.0,
        "link": 1.0,
        "hidden": 0.0,
        "launch": times["launch"].with_value(min(times["launch"].value, 1e-3)),
    }
    if times["scores"]:
        constants["attention"] = _attention_share(times["scores"], peak)
    hosts = ranks.hosts if ranks else [socket.gethostname()]
    on_host = max(hosts.count(host) for host in hosts)
    assumed: dict[str, str] = {}
    rates_of_links: dict[str, Any] = {}
    for place, key in (("node", "node_gb_per_s"), ("network", "network_gb_per_s")):
        found = next((link for link in times["links"] if (link["use"], link["between"]) == ("message", place)), None)
        rates_of_links[key] = found["gb_per_s"] if found else ASSUMED_LINK.bytes_per_s / 1e9
        if found is None:
            assumed[key] = "assumed: 10 GB/s, because it was not measured"
    keys: dict[str, Any] = {
        "name": name or _name(torch, device),
        f"{'f32' if precision == 'f32' else 'bf16'}_tflops": fastest.with_value(peak / 1e12),
        "memory_gb": _memory(torch, device) / 2**30 / (on_host if device.type == "cpu" else 1),
        "memory_gb_per_s": times["memory"].with_value(times["copied_bytes"] / times["memory"].value / 1e9),
        **rates_of_links,
        "gpus_per_node": on_host,
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1,
    }
    if times["host"]:
        keys["host_gb_per_s"] = times["host"].with_value(times["copied_bytes"] / 2 / times["host"].value / 1e9)
    measured: dict[str, Any] = {}
    if overlap is not None or times["overlap"]:
        measured["overlap"] = overlap if overlap is not None else times["overlap"]
    measured["product"] = times["products"]
    measured["scores"] = times["scores"]
    measured["kernel"] = times["kernels"]
    measured["link"] = times["links"]
    return {**keys, "constants": constants, "sources": assumed, "measured": measured}


def _attention_share(scores: Sequence[Mapping[str, Any]], peak: float) -> Figure:
    """Returns the share of the peak that the attention would reach with many keys, as the cost model counts it."""
    row = scores[0]
    operations = 2 * row["rows"] * row["heads"] * row["head_size"] * row["sequence"] ** 2
    final = (row["sequence"] + HALF_RATE_KEYS) / row["sequence"]
    seconds: Figure = row["forward_s"]
    return seconds.with_value(min(max(operations / seconds.value / peak * final, 0.01), 1.0))


def _name(torch: Any, device: Any) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.processor() or platform.machine()} with {torch.get_num_threads()} threads"


def _memory(torch: Any, device: Any) -> int:
    """Returns the bytes of memory of the device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _figures(value: Any, place: str) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Figure):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _figures(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            yield from _figures(inner, f"{place}[{index}]")


def _lines(keys: Mapping[str, Any], table: str) -> Iterator[str]:
    """Writes a table in TOML, its own values first."""
    for key, value in keys.items():
        if isinstance(value, Figure):
            yield f"{key} = {value.value!r} # {value.samples} measurements, +-{100 * value.spread:.1f}%"
        elif not isinstance(value, (Mapping, list)):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from ("", f"[{table}{key}]", *_lines(value, f"{table}{key}."))
        elif isinstance(value, list):
            for entry in value:
                yield from ("", f"[[{table}{key}]]", *_lines(entry, f"{table}{key}."))
