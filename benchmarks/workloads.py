"""The workloads: token ids drawn request by request from one generator, so that nothing is shared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

SEED = 1234


class Job(NamedTuple):
    """One request: its prompt's ids, and how many tokens it must give."""

    prompt: list[int]
    num_output: int


def shortened(jobs: Sequence[Job], most_tokens: int | None) -> list[Job]:
    """The jobs with no more than so many tokens of output each; None leaves them."""
    return [Job(job.prompt, min(job.num_output, most_tokens or job.num_output)) for job in jobs]


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once. A length is a number, or a range of which each request draws its own."""

    what: str
    num_requests: int
    prompt_len: int | tuple[int, int]
    output_len: int | tuple[int, int]
    unit: Literal["tok/s", "ms"] = "tok/s"

    def jobs(self, vocab_size: int) -> list[Job]:
        """The same requests each time: first their lengths, then their ids, one request after another."""
        draw = random.Random(SEED)
        jobs = []
        for _ in range(self.num_requests):
            prompt_len, num_output = (
                length if isinstance(length, int) else draw.randint(*length)
                for length in (self.prompt_len, self.output_len)
            )
            highest = max(vocab_size - 1000, 101)
            jobs.append(Job([draw.randrange(100, highest) for _ in range(prompt_len)], num_output))
        return jobs


WORKLOADS = {
    "W1": Workload("256 requests at once, 128 in, 256 out", 256, 128, 256),
    "W2": Workload("one request, 128 in, 512 out", 1, 128, 512),
    "W3": Workload("1,024 requests, 32 to 512 in, 64 to 256 out", 1024, (32, 512), (64, 256)),
    "W4": Workload("W1's prompts, one token each (prefill)", 256, 128, 1, "ms"),
}
SMALL_WORKLOADS = {
    "W1": Workload("6 requests at once, 12 in, 5 out", 6, 12, 5),
    "W2": Workload("one request, 12 in, 9 out", 1, 12, 9),
    "W3": Workload("11 requests, 3 to 40 in, 2 to 9 out", 11, (3, 40), (2, 9)),
    "W4": Workload("W1's prompts, one token each (prefill)", 6, 12, 1, "ms"),
}


def workloads(small: bool) -> dict[str, Workload]:
    """Those of `--small`, or the real ones."""
    return SMALL_WORKLOADS if small else WORKLOADS
