"""The core and the contract name no model family."""

from __future__ import annotations

import re

import pytest
from source_tree import REPOSITORY, ROOTS, name_of

# Long names are looked for anywhere, also inside identifiers. "opt" is too common a word to look for.
ANYWHERE = (
    "llama qwen gemma mistral mixtral whisper mamba jamba bamba zamba deepseek falcon nemotron "
    "granite gpt2 gpt_neo gptneo gpt_oss gptoss gptj smollm starcoder rwkv olmo cohere exaone "
    "minimax kimi chatglm internlm baichuan bloomz pixtral codestral ministral stablelm persimmon "
    "florence moonshine parakeet voxtral hunyuan"
).split()
# Short ones as a word of their own, perhaps with a number behind.
AS_WORDS = "phi gpt bert roberta t5 bart mpt yi glm bloom dbrx arctic xlstm seamless".split()
PATTERN = re.compile(
    rf"{'|'.join(ANYWHERE)}|(?<![a-z])(?:{'|'.join(AS_WORDS)})(?:[-_]?\d[\w.]*)?(?![a-z])", re.IGNORECASE
)


def test_pattern_finds_names_and_leaves_words_alone():
    for text in (
        "LlamaForCausalLM",
        "is_whisper",
        "phi3",
        "Phi-3",
        "GPT-2",
        "gpt2_config",
        "a T5 model",
        "mamba2",
    ):
        assert PATTERN.search(text), text
    for text in ("an option", "the graph", "dolphin", "yield", "apply", "morphism", "prompt", "embeddings"):
        assert not PATTERN.search(text), text


@pytest.mark.parametrize("root", ["core_runner", "model_states"])
def test_no_model_family_word(root):
    found = []
    for path in sorted(ROOTS[root].rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [f"{name_of(path)}:{number}: {match.group()}" for match in PATTERN.finditer(line)]
    assert found == []


def test_no_file_is_named_after_a_family():
    for root in ("core_runner", "model_states"):
        names = [path.relative_to(REPOSITORY).as_posix() for path in ROOTS[root].rglob("*.py")]
        assert [name for name in names if PATTERN.search(name)] == []
