"""The processes that measure or train at the same time, and end together if one of them fails."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pipewright_pp.errors import PipewrightError
from pipewright_pp.torch.errors import MeasureError, sentence_of

T = TypeVar("T")


def raise_first(errors: Iterable[str | None], kind: type[PipewrightError]) -> None:
    """Raises an error of this kind for the first rank that has a sentence. `errors` are the sentences by rank."""
    for rank, sentence in enumerate(errors):
        if sentence is not None:
            raise kind(f"rank {rank}: {sentence}", rank=rank)


class Ranks:
    """The processes of a group. All of them make the same calls.

    Between two exchanges of tensors, a rank may fail where others do not. So each of its waits for the others is a call
    of `agree`, in which a rank that fails takes part too, with its error. `ending_together` makes this last call.
    """

    def __init__(self, distributed: Any, group: Any, kind: type[PipewrightError] = MeasureError) -> None:
        self._distributed, self.group, self._kind = distributed, group, kind
        self.rank, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        #: The device of the tensors that the processes exchange. The caller sets it.
        self.device: Any = None
        self.hosts: list[str] = []
        self._is_agreeing = False

    def agree(self, value: T | None = None, error: Exception | None = None) -> list[T]:
        """Waits for all ranks and returns their values.

        Raises `error`, or an error of the group's kind if another rank has one.
        """
        self._is_agreeing = True
        parts: list[Any] = [None] * self.count
        self._distributed.all_gather_object(parts, (None if error is None else sentence_of(error), value), group=self.group)
        if error is not None:
            raise error
        raise_first((message for message, _ in parts), self._kind)
        self._is_agreeing = False
        return [value for _, value in parts]

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Raises an error of one rank on all of them, also at the end of the block."""
        try:
            yield
            self.agree()
        except Exception as error:
            if not self._is_agreeing:
                self.agree(error=error)
            raise

    def find_hosts(self) -> None:
        """Sets the names of the hosts of all ranks."""
        self.hosts = self.agree(socket.gethostname())

    def place(self, other: int | None = None) -> str:
        """Returns whether rank 0 and another rank, or all ranks, share a node."""
        hosts = self.hosts if other is None else [self.hosts[0], self.hosts[other]]
        return "node" if len(set(hosts)) == 1 else "network"

    def slowest(self, own: dict[str, Any]) -> dict[str, Any]:
        """Returns the figures of the rank whose products take longest, for which a step waits, with the links of rank 0."""
        parts = self.agree(own)
        slowest = max(parts, key=lambda part: sum(row["seconds"].value for row in part["products"]))
        return {**slowest, "links": parts[0]["links"]}
