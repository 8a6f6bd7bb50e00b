"""An engine without one of its ideas gives the same tokens; on a CPU, with graphs by `support.replays`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from ablation_variants import VARIANTS, HostInputPreparer
from common import MODELS
from support.replays import replayed_steps

from core_runner import LLM, SamplingParams

_draw = random.Random(3)
PROMPTS = [[_draw.randrange(3, 1211) for _ in range(_draw.randrange(1, 30))] for _ in range(9)]
PARAMS = [SamplingParams(temperature=t, seed=7, max_tokens=9, ignore_eos=True) for t in (0.0, 0.9, 0.0)] * 3
OPTIONS = {
    "device": "cpu",
    "load_format": "dummy",
    "block_size": 4,
    "max_num_reqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "num_blocks": 15,  # so few that requests give way to each other
}


def _tokens(directory: Path, name: str) -> list[list[int]]:
    (directory / "config.json").write_text(json.dumps(MODELS["tiny"]), encoding="utf-8")
    variant = VARIANTS[name]
    with variant.applied(), replayed_steps(), LLM(str(directory), **OPTIONS, **variant.options) as llm:
        twice = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
        assert llm.stats().preemptions > 0
        is_host = isinstance(llm.engine.runner.inputs, HostInputPreparer)
        assert is_host == ("host" in name)
        assert (llm.stats().step_ways.get("step graph", 0) > 0) == (
            variant.has_graphs and "forward" not in name
        )
        tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in twice]
    assert tokens[0] == tokens[1]
    return tokens[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return _tokens(tmp_path_factory.mktemp("everything"), "everything")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "everything"])
def test_variants_give_the_same_tokens(name: str, tmp_path: Path, expected: list[list[int]]) -> None:
    if not VARIANTS[name].is_supported:
        pytest.skip("this version has no such option")
    assert _tokens(tmp_path, name) == expected
