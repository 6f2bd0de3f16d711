"""Interprets one rank of a program over MPI, without computations: `run_on_mpi.py` describes the communicators."""

import collections
import time

from reorder import MESSAGE, is_operation, parts


class Interpreter:
    """One rank of a program."""

    def __init__(self, mpi, communicator, rows, streams, sizes):
        self.mpi, self.communicator, self.streams = mpi, communicator, streams
        self.row = rows[communicator.Get_rank()]
        self.sizes = sizes
        self.owner = {part[0]: rank for rank, row in enumerate(rows) for cell in row for part in parts(cell)}
        # The requests with their buffers, by cell, and the operations of each pair that have not started.
        self.requests, self.queues = {}, collections.defaultdict(collections.deque)
        self.completed, self.crossed = set(), 0

    def run(self, watch):
        """Runs the row. Returns whether it has finished; if not, no rank made progress until the deadline."""
        self.watch = watch
        position = 0
        while position < len(self.row):
            group = self.group(position)
            if group:
                if not self.give(group):
                    return False
                position += len(group)
            else:
                needed = self.needs(self.row[position])
                if not self.wait(needed):
                    return False
                self.completed.add(self.row[position])
                position += 1
            self.report()
        left = [cell for queue in self.queues.values() for cell in queue]
        if not self.wait(left + list(self.requests)):
            return False
        return self.finish()

    def finish(self):
        """Waits until every rank has finished, or the program is over."""
        self.watch.set(-1)
        while not self.watch.all_done():
            if self.watch.is_over():
                return not self.requests
            time.sleep(1e-3)
        return True

    def group(self, position):
        """The operations that start together at this position; none if it has another action."""
        group = []
        for cell in self.row[position:]:
            if not is_operation(cell):
                break
            group.append(cell)
            if "grouped" not in self.streams:
                break
        return group

    def give(self, group):
        """Starts operations, and waits for them where the rank is one queue."""
        for cell in group:
            if self.streams.startswith("pair"):
                self.queues[self.peer(cell)].append(cell)
            else:
                self.start(cell)
        return self.wait(group) if self.streams.startswith("rank") else True

    def needs(self, cell):
        """The operations of this rank that an action waits for."""
        needed = []
        for stage, kind, microbatch in parts(cell):
            if kind.startswith("WAIT_SEND"):
                needed.append(f"{stage}SEND_{kind[-1]}{microbatch}")
            elif kind == "F":
                needed.append(f"{stage}RECV_F{microbatch}")
            elif kind in ("B", "I"):
                needed.append(f"{stage}RECV_B{microbatch}")
        return [cell for cell in needed if cell in self.row]

    def wait(self, cells):
        while not all(cell in self.completed for cell in cells):
            self.progress()
            if self.watch.is_over():
                return False
        return True

    def progress(self):
        """Completes requests, and starts the next operation of each pair."""
        done = [cell for cell, (request, _) in self.requests.items() if request.Test()]
        for cell in done:
            self.complete(cell)
        for peer, queue in self.queues.items():
            is_busy = any(self.peer(cell) == peer for cell in self.requests)
            if queue and not is_busy:
                self.start(queue.popleft())
        self.report()
        if not done:
            time.sleep(1e-3)

    def report(self):
        self.watch.set(1 + len(self.completed))

    def complete(self, cell):
        _, buffer = self.requests.pop(cell)
        self.completed.add(cell)
        if "RECV" in cell and buffer[:SIGNED] != self.signature(cell):
            self.crossed += 1

    def start(self, cell):
        """Starts a send or a receive."""
        peer = self.peer(cell)
        if "RECV" in cell:
            buffer = bytearray(max(self.sizes))
            request = self.communicator.Irecv([buffer, self.mpi.BYTE], peer)
        else:
            buffer = self.message(cell)
            send = self.communicator.Isend if "eager" in self.streams else self.communicator.Issend
            request = send([buffer, self.mpi.BYTE], peer)
        self.requests[cell] = (request, buffer)

    def message(self, cell):
        size = self.sizes[boundary(cell) % 2]
        return self.signature(cell) + bytearray(size - SIGNED)

    @staticmethod
    def signature(cell):
        """The boundary, the direction and the microbatch of a message, the same at both ends."""
        _, kind, microbatch = MESSAGE.match(cell).groups()
        return bytearray(f"{boundary(cell)}{kind[-1]}{microbatch}".ljust(SIGNED).encode())

    def peer(self, cell):
        stage, kind, _ = parts(cell)[0]
        is_down = kind in ("SEND_F", "RECV_B")
        return self.owner[stage + 1 if is_down else stage - 1]


# The bytes of a message that say which one it is.
SIGNED = 16


def boundary(cell):
    """The stage before the boundary that a message crosses."""
    stage, kind, _ = parts(cell)[0]
    return stage if kind in ("SEND_F", "RECV_B") else stage - 1
