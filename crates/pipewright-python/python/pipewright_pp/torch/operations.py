"""Records the operations of torch.distributed on this process: what it has issued, and what each thread waits for.

The hooks replace methods of PyTorch's classes `ProcessGroup` and `Work`, below `isend`, `recv`, `all_reduce` and so on, so
they see the operations of PyTorch's schedules and of the user's code. Reductions that C++ issues (DDP) are not seen.
Nothing keeps a tensor alive. Imports PyTorch.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from .positions import UNKNOWN, Operation, Stream, shape_text, size_of

#: The methods of `ProcessGroup` that are operations, with the names that users know.
_COLLECTIVE = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_single",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
_PEER = {"send": "send", "recv": "recv", "recv_anysource": "recv"}

#: The collective operations with a root, which their options name.
_ROOTED = ("broadcast", "reduce", "gather", "scatter")

#: The operations of a stream that are kept, and the works without a wait.
_KEPT, _KEPT_WORKS = 8, 4096


#: An operation as it is recorded, because a tuple takes the least time: the kind, the stream, the number in it, the types and
#: shapes of its tensors, and the action.
_Issued = tuple[str, Stream, int, "list[tuple[Any, Any]]", "str | None"]


def _described(issued: _Issued, dropped: frozenset[int] = frozenset()) -> Operation:
    kind, (group, _, peer, tag), number, tensors, action = issued
    shapes = tuple(shape_text(dtype, shape) for dtype, shape in tensors)
    size = sum(size_of(dtype, shape) for dtype, shape in tensors)
    return Operation(kind, group, number, peer, tag, shapes, size, action, id(issued) in dropped)


class Operations:
    """The operations of this process while the hooks are installed."""

    def __init__(self, failed: Callable[[RuntimeError], Exception | None]):
        #: Counts all that begins and ends.
        self.events = 0
        #: The longest wait; None waits as PyTorch does.
        self.limit: timedelta | None = None
        #: The actions of messages that PyTorch has made and not yet issued, by the identity of their tensors.
        self.actions: dict[int, str] = {}
        self._failed = failed
        self._streams: dict[Stream, deque[_Issued]] = {}
        self._works: dict[int, tuple[weakref.ref[Any], _Issued]] = {}
        self._waiting: dict[int, _Issued | None] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Installs the hooks."""
        for method, kind in (_PEER | _COLLECTIVE).items():
            if hasattr(dist.ProcessGroup, method):
                issuing = self._to_peer if method in _PEER else self._in_group
                self._replace(dist.ProcessGroup, method, partial(issuing, kind))
        self._replace(dist.Work, "wait", self._wait)

    def remove(self) -> None:
        """Removes the hooks."""
        while self._undo:
            self._undo.pop()()

    def waits(self) -> tuple[Operation, ...]:
        """Returns the operations for which threads wait."""
        return tuple(UNKNOWN if issued is None else _described(issued) for issued in self._waiting.copy().values())

    def streams(self) -> dict[Stream, tuple[Operation, ...]]:
        """Returns the last operations of each stream."""
        dropped = frozenset(id(issued) for work, issued in self._works.copy().values() if work() is None)
        return {stream: tuple(_described(issued, dropped) for issued in kept.copy()) for stream, kept in self._streams.copy().items()}

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Returns the ranks of the groups."""
        return self._groups.copy()

    def _replace(self, owner: type, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        # The attribute itself binds `self`; what `getattr` returns for a method in C++ does not.
        attribute = owner.__dict__.get(method)
        setattr(owner, method, make(getattr(owner, method)))
        self._undo.append(lambda: delattr(owner, method) if attribute is None else setattr(owner, method, attribute))

    def _to_peer(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        takes_any = original.__name__ == "recv_anysource"
        actions, groups, issue = self.actions, self._groups, self._issue

        def to_peer(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            name = group.group_name
            ranks = groups.get(name) or self._ranks_of(name, group)
            given = (*args, *kwargs.values()) if kwargs else args
            peer = None if takes_any else ranks[given[0]]
            tag = given[-1] if len(given) > (0 if takes_any else 1) else 0
            tensor = tensors[0]
            action = actions.pop(id(tensor), None) if actions else None
            described = [(tensor.dtype, tensor.shape)]
            return issue(kind, (name, kind, peer, tag), described, action, original, (group, tensors, *args), kwargs)

        return to_peer

    def _in_group(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def in_group(group: Any, *args: Any, **kwargs: Any) -> Any:
            name = group.group_name
            if name not in self._groups:
                self._ranks_of(name, group)
            tensors = [(tensor.dtype, tensor.shape) for tensor in _tensors(args[:1])]
            root = getattr(args[-1], "rootRank", None) if args and kind in _ROOTED else None
            named = kind if root is None else f"{kind} with root {root}"
            return self._issue(named, (name, "collective", None, 0), tensors, None, original, (group, *args), kwargs)

        return in_group

    def _ranks_of(self, name: str, group: Any) -> tuple[int, ...]:
        self._groups[name] = tuple(dist.get_process_group_ranks(group))
        return self._groups[name]

    def _issue(
        self,
        kind: str,
        stream: Stream,
        tensors: list[tuple[Any, Any]],
        action: str | None,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records and issues an operation. The call may wait too, for a connection or in back ends that are not asynchronous."""
        kept = self._streams.get(stream)
        if kept is None:
            kept = self._streams[stream] = deque(maxlen=_KEPT)
        issued: _Issued = (kind, stream, kept[-1][2] + 1 if kept else 1, tensors, action)
        kept.append(issued)
        self.events += 1
        thread = threading.get_ident()
        self._waiting[thread] = issued
        try:
            work = original(*args, **kwargs)
        except RuntimeError as error:
            if (hang := self._failed(error)) is not None:
                raise hang from error
            raise
        finally:
            del self._waiting[thread]
            self.events += 1
        if work is not None:
            if len(self._works) >= _KEPT_WORKS:
                del self._works[next(iter(self._works))]
            self._works[id(work)] = (weakref.ref(work), issued)
        return work

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._works.pop(id(work), None)
            thread = threading.get_ident()
            self._waiting[thread] = found[1] if found is not None and found[0]() is work else None
            self.events += 1
            try:
                if self.limit is not None and not args and not kwargs:
                    return original(work, self.limit)
                return original(work, *args, **kwargs)
            except RuntimeError as error:
                if (hang := self._failed(error)) is not None:
                    raise hang from error
                raise
            finally:
                self._waiting.pop(thread, None)
                self.events += 1

        return wait


def _tensors(values: Any) -> list[Any]:
    """Returns the first tensors in nested lists."""
    found: list[Any] = []
    for value in values:
        if hasattr(value, "dtype"):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value[:3])
    return found[:3]
