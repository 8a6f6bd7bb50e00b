"""The page on sampling: its examples run and do what they say, and its table has every option."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from core_runner import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sampling.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(word):
    (block,) = (block for block in BLOCKS if word in block)
    namespace = {"__name__": "page"}
    exec(compile(block, "sampling.md", "exec"), namespace)
    return namespace


def test_the_processor_example():
    shown = run("logits_processors")
    last = shown["llm"].tokenizer.encode_prompt("The cat")[-1]
    assert shown["raised"] == [last] * 8


def test_the_wrapping_sampler():
    wrapped = run("class Forbids")["wrapped"]
    assert len(wrapped) == 50
    assert 0 not in wrapped


def test_the_replacing_sampler():
    greedy = LLM().generate("The cat", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].token_ids
    assert run("class Greedy")["replaced"] == greedy


def test_every_option_is_in_the_table():
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))))
    assert named == {field.name for field in dataclasses.fields(SamplingParams)}
