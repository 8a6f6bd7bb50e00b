"""Text on stdout as it comes, prompt after prompt, and nothing else there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from core_runner.outputs import RequestOutput, TextDelta

# A model's text must not move the cursor or set a title: control characters other than tab and newline.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")


def for_terminal(text: str) -> str:
    """The text with its control characters replaced."""
    return text.translate(_CONTROLS)


class TextWriter:
    """Writes the deltas of several prompts in the order of the prompts, and each one's completions in theirs.

    Each text ends with a newline. The one whose turn it is goes out at once; later ones wait.
    """

    def __init__(self, num_prompts: int, num_completions: int) -> None:
        self._num_completions = num_completions
        self._waiting = [""] * (num_prompts * num_completions)
        self._ended = [False] * (num_prompts * num_completions)
        self._turn = 0
        self._last = ""
        self._to_terminal = sys.stdout.isatty()
        # A terminal that is not UTF-8 shows a question mark rather than ending the run.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    def write(self, delta: TextDelta) -> None:
        """Take one delta and flush what can be shown."""
        first = delta.request_index * self._num_completions
        self._waiting[first + delta.index] += delta.text
        self._ended[first + delta.index] |= delta.finish_reason is not None
        if delta.output is not None:  # also for completions that a refused prompt never had
            self._ended[first : first + self._num_completions] = [True] * self._num_completions
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
            sys.stdout.write(for_terminal(text) if self._to_terminal else text)

    def _finish_line(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
        self._last = ""


def write_texts(
    deltas: Iterable[TextDelta], num_prompts: int, num_completions: int = 1
) -> Iterator[RequestOutput | None]:
    """Write every delta; yields after each one, with the whole output where a prompt has ended."""
    writer = TextWriter(num_prompts, num_completions)
    for delta in deltas:
        writer.write(delta)
        yield delta.output


def print_logprobs(output: RequestOutput, tokenizer: Any) -> None:
    """List tokens on stderr, each with its log-probability and the best alternatives, where they were asked for.

    Those of the prompt come first, then those of each completion.
    """
    _print_tokens(output.prompt_token_ids, output.prompt_logprobs or (), tokenizer)
    for completion in output.outputs:
        _print_tokens(completion.token_ids, completion.logprobs or (), tokenizer)


def _print_tokens(token_ids: Sequence[int], positions: Sequence[Any], tokenizer: Any) -> None:
    for token_id, position in zip(token_ids, positions, strict=False):
        entry = position or {}
        others = [f"{tokenizer.decode([t])!r} {p.logprob:.3f}" for t, p in entry.items() if t != token_id]
        value = f"{entry[token_id].logprob:8.3f}" if entry else ""
        click.echo("   ".join([f"{tokenizer.decode([token_id])!r:<16} {value}".rstrip(), *others]), err=True)
