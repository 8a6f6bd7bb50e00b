"""Text on stdout as it comes, prompt after prompt, and nothing else there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from core_runner.outputs import RequestOutput, TextDelta

# A model's text must not move the cursor or set a title: control characters other than tab and newline.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")


class TextWriter:
    """Writes the deltas of several prompts in the order of the prompts, each text ending with a newline.

    The text of the prompt whose turn it is goes out at once; that of later ones waits.
    """

    def __init__(self, num_prompts: int) -> None:
        self._waiting = [""] * num_prompts
        self._ended = [False] * num_prompts
        self._turn = 0
        self._last = ""
        self._to_terminal = sys.stdout.isatty()
        # A terminal that is not UTF-8 shows a question mark rather than ending the run.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    def write(self, delta: TextDelta) -> None:
        """Take one delta and flush what can be shown."""
        self._waiting[delta.request_index] += delta.text
        self._ended[delta.request_index] |= delta.output is not None
        while self._turn < len(self._ended):
            self._emit(self._waiting[self._turn])
            self._waiting[self._turn] = ""
            if not self._ended[self._turn]:
                break
            self._finish_line()
            self._turn += 1
        sys.stdout.flush()

    def _emit(self, text: str) -> None:
        if text:
            self._last = text[-1]
            sys.stdout.write(text.translate(_CONTROLS) if self._to_terminal else text)

    def _finish_line(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
        self._last = ""


def write_texts(deltas: Iterable[TextDelta], num_prompts: int) -> Iterator[RequestOutput | None]:
    """Write every delta; yields after each one, with the whole output where a prompt has ended."""
    writer = TextWriter(num_prompts)
    for delta in deltas:
        writer.write(delta)
        yield delta.output


def print_logprobs(output: RequestOutput, tokenizer: Any) -> None:
    """List the generated tokens on stderr, each with its log-probability and the best alternatives."""
    completion = output.outputs[0]
    for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=False):
        others = [f"{tokenizer.decode([t])!r} {p.logprob:.3f}" for t, p in position.items() if t != token_id]
        sampled = f"{tokenizer.decode([token_id])!r:<16} {position[token_id].logprob:8.3f}"
        click.echo("   ".join([sampled, *others]), err=True)
