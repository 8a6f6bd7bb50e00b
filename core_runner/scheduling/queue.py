"""The bounded waiting queue, in the order in which requests may be admitted."""

from __future__ import annotations

import heapq

from core_runner.errors import QueueFullError
from core_runner.request import Request
from core_runner.scheduling.prompt_group import PromptGroup


class WaitingQueue:
    """Requests by `rank`, smallest first.

    Under "fcfs" a rank is (0, arrival), so a preempted request goes back in front of all that came later;
    under "priority" it is (priority, arrival). One heap serves both: ranks that only grow are pushed in O(1).
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: set[int] = set()  # arrivals; the heap may hold discarded entries until they surface
        self._unready: dict[int, Request] = {}  # by arrival; they hold up nobody
        self.num_changes = 0  # grows whenever somebody comes or leaves

    def __len__(self) -> int:
        return len(self._members) + len(self._unready)

    @property
    def has_unready(self) -> bool:
        """Whether `settle` has somebody to look at."""
        return bool(self._unready)

    @property
    def has_room(self) -> bool:
        """Whether one more new request may wait."""
        return len(self) < self._max_waiting

    def check_room(self, req_id: str) -> None:
        """Refuse one more new request when the queue is full."""
        if not self.has_room:
            raise QueueFullError(
                f"request {req_id!r}: {len(self)} requests wait already (max_waiting={self._max_waiting}); "
                "retry later or raise max_waiting"
            )

    def push(self, request: Request) -> None:
        """Add a request; a preempted one is never refused. One whose constraint is not ready stands aside."""
        self.num_changes += 1
        constraint = request.constraint
        if constraint is not None and (not constraint.is_ready() or constraint.error is not None):
            self._unready[request.arrival] = request
            return
        self._members.add(request.arrival)
        # One that waits for another to compute its prompt counts as waiting, but holds up nobody.
        if request.group is None or not request.group.holds_back(request):
            heapq.heappush(self._heap, (request.rank, request))

    def release(self, group: PromptGroup) -> None:
        """Put those in the line who need not wait for the group's prompt any more."""
        for request in group.take_held():
            if request.arrival in self._members:
                self.push(request)

    def settle(self) -> list[Request]:
        """Let requests that have become ready take the place of their rank; gives those that never will.

        These stay here until they are discarded.
        """
        failed = []
        for request in list(self._unready.values()):
            assert request.constraint is not None, "only a constraint makes a request wait"
            if request.constraint.is_ready() and request.constraint.error is None:
                del self._unready[request.arrival]
                self.push(request)
            elif request.constraint.is_ready():
                failed.append(request)
        return failed

    def peek(self) -> Request | None:
        """The request that is next, or None."""
        heap = self._heap
        while heap and heap[0][1].arrival not in self._members:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def near_front(self, count: int) -> list[Request]:
        """Up to `count` requests of those that are next, in order: the front of the heap holds most of them."""
        front = sorted(self._heap[:count])
        return [request for _, request in front if request.arrival in self._members]

    def pop(self) -> Request:
        """Take the request that is next."""
        request = self.peek()
        assert request is not None, "the waiting queue is empty"
        self.num_changes += 1
        heapq.heappop(self._heap)
        self._members.remove(request.arrival)
        return request

    def discard(self, request: Request) -> None:
        """Remove a request from anywhere in the queue, O(1) amortised."""
        self.num_changes += 1
        if self._unready.pop(request.arrival, None) is not None:
            return
        self._members.discard(request.arrival)
        # Entries of discarded requests must not pile up behind one that never surfaces.
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1].arrival in self._members]
            heapq.heapify(self._heap)
