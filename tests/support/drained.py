"""DRAINED: after a test, every free count is what it was, and one more request gives what it gave at first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from core_runner import LLM, SamplingParams
from model_states.components.cross_attention import CrossAttention

Drained = Callable[..., LLM]
_PROBE = [5, 6, 7, 8, 9]
_PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def _free(llm: LLM) -> dict[str, Any]:
    stats = llm.stats()
    free = {name: getattr(stats, name) for name in ("free_blocks", "free_slots", "running", "waiting")}
    pools = [c.pool for c in llm.engine.runner.model_state.components if isinstance(c, CrossAttention)]
    return {**free, "held entries": [pool.num_held for pool in pools]}


@contextmanager
def drained_llms() -> Iterator[Drained]:
    """A factory of engines, in poison mode, each checked when the test is over."""
    made: list[tuple[LLM, Any, dict[str, Any], list[int]]] = []

    def make(model: str | None = None, probe: Any = _PROBE, **options: Any) -> LLM:
        llm = LLM(model, **{"poison": True, **options})
        first = llm.generate(probe, _PARAMS)[0].outputs[0].token_ids
        made.append((llm, probe, _free(llm), first))
        return llm

    yield make
    for llm, probe, free, first in made:
        llm.close()
        assert _free(llm) == free, "not everything was given back"
        llm.engine.scheduler.check_integrity()
        assert llm.generate(probe, _PARAMS)[0].outputs[0].token_ids == first, "one more request is not exact"
        assert _free(llm) == free
