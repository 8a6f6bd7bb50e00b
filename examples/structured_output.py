"""Outputs that keep to a JSON schema, a regex, a choice or a grammar.

    pip install "core-runner[structured]"
    python examples/structured_output.py [MODEL]

Each request of a batch has a form of its own, or none. Output that ends by itself ("stop") has its form; one
that `max_tokens` cuts ("length") may lack its end, so leave room.
"""

from __future__ import annotations

import json
import sys

from core_runner import LLM, SamplingParams, StructuredOutput

ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["fox", "bear", "hare"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}

# Lark, with the rule `start`. The same in GBNF: root ::= sum " = " [0-9]{1,3} and so on.
SUM = r"""
start: NUMBER (OPERATOR NUMBER)~1..2 " = " NUMBER
NUMBER: /[1-9][0-9]?/
OPERATOR: " + " | " - "
"""

FORMS = {
    "Describe an animal of the forest as JSON: ": StructuredOutput(json=ANIMAL),
    "The colour of the hat, in hexadecimal, was #": StructuredOutput(regex="[0-9a-f]{6}"),
    "Is a fox smaller than a bear? ": StructuredOutput(choice=["yes", "no"]),
    "A sum: ": StructuredOutput(grammar=SUM),
    "Once upon a time": None,
}


def main(model: str | None = None) -> dict[str, str]:
    """Generate one text for each form, print and return them."""
    llm = LLM(model, max_num_reqs=8, max_model_len=512)
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=64, structured_output=form)
        for form in FORMS.values()
    ]
    outputs = llm.generate(list(FORMS), params)
    texts = {prompt: output.outputs[0].text for prompt, output in zip(FORMS, outputs, strict=True)}
    for prompt, text in texts.items():
        print(f"{prompt!r} -> {text!r}")
    print("as an object:", json.loads(next(iter(texts.values()))))
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])
