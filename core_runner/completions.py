"""Several completions of one prompt: a request for each, with a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core_runner.request import Request
from core_runner.scheduling.prompt_group import PromptGroup

_MASK_64, _MASK_63 = (1 << 64) - 1, (1 << 63) - 1
# Odd, so that the seeds of different completions differ before they are mixed.
_STRIDE = 0x9E3779B97F4A7C15


def completion_seed(seed: int, index: int) -> int:
    """Seed with which a request of its own gives completion `index` of a request with this seed and n > index.

    Completion 0 has the seed itself. The others have, for seed in [0, 2**63) (a negative one counts modulo
    2**63), the upper 63 bits of SplitMix64's output for the state seed + index * 0x9E3779B97F4A7C15.
    """
    if index == 0:
        return seed
    mixed = ((seed & _MASK_63) + index * _STRIDE) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) >> 1


def expand(first: Request, draw_seed: Callable[[], int]) -> list[Request]:
    """`first` and the requests of the prompt's other completions, which draw seeds where the user set none."""
    params = first.sampling_params
    if params.n == 1:
        return [first]
    first.group = PromptGroup(first.req_id, params.n)
    # The prompt is scored once, by the completion that computes it.
    rest = replace(params, prompt_logprobs=None)
    seeds = (
        draw_seed() if params.seed is None else completion_seed(params.seed, index)
        for index in range(1, params.n)
    )
    return [
        first,
        *(
            replace(first, req_id=f"{first.req_id}.{index}", sampling_params=rest, seed=seed, index=index)
            for index, seed in enumerate(seeds, 1)
        ),
    ]
