"""What the embedded hybrid is asked, and what it must say.

`reference` in heldout.json is what transformers made of each example alone, in fp32 on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core_runner import LLM, SamplingParams
from model_states import PluginManager

MODEL = "embedded:mamba"
FOLDER = Path(PluginManager().locate(MODEL))
EXAMPLES = json.loads((FOLDER / "heldout.json").read_text())
DISTANT = [row for row in EXAMPLES if "distance" in row]
SIZES = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "max_num_reqs": 4}


def as_prompt(llm: LLM, example: dict[str, Any]) -> Any:
    """A text as it stands, or a chat's first turn."""
    if not example["chat"]:
        return example["prompt"]
    return llm.render_chat([{"role": "user", "content": example["prompt"]}])[0]


def answers(llm: LLM, examples: list[dict[str, Any]]) -> list[Any]:
    """Outputs; a text's answer ends with its line and a chat's with the turn, and six tokens late at the latest."""
    assert llm.tokenizer is not None
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(llm.tokenizer.encode_prompt(e["answer"])) + 6,
            stop=() if e["chat"] else "\n",
        )
        for e in examples
    ]
    return llm.generate([as_prompt(llm, e) for e in examples], params)


def check_answers(llm: LLM, examples: list[dict[str, Any]]) -> list[Any]:
    """Outputs, each of which is what transformers made of the example."""
    outputs = answers(llm, examples)
    for example, output in zip(examples, outputs, strict=True):
        assert output.outputs[0].text.strip() == example["reference"], example["prompt"][-60:]
    return outputs
