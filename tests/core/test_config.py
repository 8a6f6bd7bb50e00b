"""Values of the configuration that could only fail later are refused by name."""

from __future__ import annotations

import pytest

from core_runner import ConfigError, RunnerConfig

BAD = [
    ("max_num_reqs", 0),
    ("max_num_reqs", True),
    ("max_num_batched_tokens", 1.5),
    ("max_model_len", -1),
    ("num_blocks", 1),
    ("block_size", 12),
    ("cpu_cache_bytes", -1),
    ("num_draft_tokens", 2),
    ("gpu_memory_utilization", 0.0),
    ("gpu_memory_utilization", "x"),
    ("gpu_memory_utilization", None),
    ("trust_remote_code", "no"),
    ("async_scheduling", "no"),
    ("enable_prefix_caching", "no"),
    ("cuda_graphs", 1),
    ("poison", None),
    ("policy", "lifo"),
    ("dtype", "float64"),
    ("load_format", "pickle"),
    ("model", 5),
    ("tokenizer", 5),
    ("device", 0),
    ("model_options", None),
    ("model_options", "state_dtype=float32"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_that_cannot_work_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        RunnerConfig(**{name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


def test_defaults_are_accepted() -> None:
    assert RunnerConfig().block_size == 16
