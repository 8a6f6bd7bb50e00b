"""Text in, text out, on the embedded model: what it answers, where it stops, and how it streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model_states_decoder
import pytest
from support.drained import drained_llms

from core_runner import LLM, RequestError, SamplingParams

EMBEDDED = Path(model_states_decoder.__file__).parent / "embedded_model"
STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with drained_llms() as make:
        yield make(device="cpu", dtype="float32", max_model_len=256, max_num_reqs=64, num_blocks=513)


@pytest.fixture(scope="module")
def story(llm: LLM) -> Any:
    """The greedy continuation, 40 tokens, without streaming or stop strings."""
    return llm.generate(STORY, GREEDY)[0].outputs[0]


def _heldout() -> list[dict[str, Any]]:
    return json.loads((EMBEDDED / "heldout.json").read_text())


def test_the_embedded_model_says_what_its_card_says(llm: LLM) -> None:
    """All examples in one batch; `reference` is what transformers made of each alone, in fp32 on a CPU."""
    examples = _heldout()
    prompts = [
        llm.render_chat([{"role": "user", "content": e["prompt"]}])[0] if e["chat"] else e["prompt"]
        for e in examples
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, stop=() if e["chat"] else "\n") for e in examples
    ]
    said = [output.outputs[0].text.strip() for output in llm.generate(prompts, params)]
    different = [(e, s) for e, s in zip(examples, said, strict=True) if s != e["reference"]]
    # A tie may break the other way on another machine's sums.
    assert len(different) <= 1, f"{different}"
    num_right = sum(s == e["answer"] for e, s in zip(examples, said, strict=True))
    expected = sum(e["reference"] == e["answer"] for e in examples)
    assert expected >= 0.9 * len(examples)
    assert num_right >= expected - 1


def test_defaults_come_from_the_checkpoint(llm: LLM) -> None:
    """No parameters: greedy, as generation_config.json has it, and the model's own end."""
    (output,) = llm.generate("12 + 30 =")
    assert output.outputs[0].text.strip().startswith("42")
    assert output.prompt == "12 + 30 ="
    (answer,) = llm.chat([{"role": "user", "content": "What is 27 + 48?"}])
    assert answer.outputs[0].text == "27 + 48 = 75"
    assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == ("stop", None)
    both = llm.chat([[{"role": "user", "content": f"What is {a} + 4?"}] for a in (10, 20)])
    assert [output.outputs[0].text for output in both] == ["10 + 4 = 14", "20 + 4 = 24"]


def test_messages_that_are_none_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="messages=None must be one conversation"):
        llm.chat(None)  # type: ignore[arg-type]


def test_deltas_joined_are_the_text(llm: LLM, story: Any) -> None:
    prompts = [STORY, "reverse: apple ->", "There was once a clever owl"]
    deltas = list(llm.stream(prompts, GREEDY))
    plain = llm.generate(prompts, GREEDY)
    assert plain[0].outputs[0] == story
    for index, want in enumerate(plain):
        own = [delta for delta in deltas if delta.request_index == index]
        assert "".join(delta.text for delta in own) == own[-1].output.outputs[0].text == want.outputs[0].text
        assert own[-1].output.outputs[0] == want.outputs[0]
        assert len(own) == len(want.outputs[0].token_ids), "text comes as it is made"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_stop_strings(is_async: bool, streamed: bool, story: Any) -> None:
    """Every place where a stop string may begin and end, token edges or not, cuts the text just before it."""
    text = story.text
    with drained_llms() as make:
        llm = make(
            device="cpu", dtype="float32", max_model_len=128, max_num_reqs=32, num_blocks=257,
            async_scheduling=is_async,
        )  # fmt: skip
        stops = [text[start : start + length] for start in range(5, 60, 7) for length in (1, 3, 11)]
        params = [SamplingParams(temperature=0.0, max_tokens=40, stop=["never said", stop]) for stop in stops]
        if streamed:
            deltas = list(llm.stream([STORY] * len(stops), params))
            last = sorted((d for d in deltas if d.output), key=lambda delta: delta.request_index)
            outputs = [delta.output for delta in last]
            for index, output in enumerate(outputs):
                joined = "".join(d.text for d in deltas if d.request_index == index)
                assert joined == output.outputs[0].text
        else:
            outputs = llm.generate([STORY] * len(stops), params)
    for stop, output in zip(stops, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.text == text[: text.index(stop)], f"{stop!r}"
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        count = len(completion.token_ids)
        assert completion.token_ids == story.token_ids[:count]
        assert llm.tokenizer is not None
        assert stop in llm.tokenizer.decode(completion.token_ids), "the ids reach to where it was complete"
        assert stop not in llm.tokenizer.decode(completion.token_ids[:-1]), "and no further"


def test_stop_string_at_the_last_token_counts_as_stop(llm: LLM, story: Any) -> None:
    last = story.text[-12:]
    assert story.text.index(last) == len(story.text) - 12
    (output,) = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=40, stop=last))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == story.text[:-12]


def test_special_tokens_are_kept_on_demand(llm: LLM) -> None:
    prompt = llm.render_chat([{"role": "user", "content": "What is 27 + 48?"}])[0]
    texts = [
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=30, skip_special_tokens=skip))[0]
        for skip in (True, False)
    ]
    plain, kept = (output.outputs[0].text for output in texts)
    assert plain == "27 + 48 = 75"
    assert kept == plain + "<|im_end|>"


def test_text_that_cannot_be_tokenized_is_refused_alone(llm: LLM, story: Any) -> None:
    good, bad = llm.generate([STORY, "\ud800"], GREEDY, on_bad_prompt="return")
    assert good.outputs[0] == story
    assert bad.outputs[0].finish_reason == "error"
    assert "tokenized" in bad.error
