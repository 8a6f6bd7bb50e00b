"""The one place that knows the grammar library, llguidance: why it and not another is in docs/structured_output.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core_runner.errors import RequestError
from core_runner.structured.options import StructuredOutput
from core_runner.text import Tokenizer

# At most a line break and some indentation between JSON tokens: whitespace without bound is what a small model
# falls into and never leaves. A schema can say otherwise under its own "x-guidance" key.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"\n?[ ]{0,16}"}


class GrammarError(RequestError):
    """A grammar that the library refuses, with the library's reason."""


def llguidance() -> Any:
    """The library. Raises `RequestError` that says how to install it."""
    try:
        import llguidance as library
    except ImportError as error:
        raise RequestError(
            "structured_output needs the package llguidance, which is not installed; "
            "run: pip install 'core-runner[structured]'"
        ) from error
    return library


def grammar_of(structured: StructuredOutput) -> str:
    """The library's own form of a grammar, checked without a vocabulary. Raises `GrammarError`."""
    library = llguidance()
    text = _translate(library, structured)
    problem = library.LLMatcher.validate_grammar(text)
    if problem and not problem.startswith("WARNING"):
        raise GrammarError(f"structured_output.{structured.kind} is refused: {first_lines(problem)}")
    return text


def _translate(library: Any, structured: StructuredOutput) -> str:
    matcher = library.LLMatcher
    if structured.json is not None:
        return str(matcher.grammar_from_json_schema(structured.json, defaults=_JSON_OPTIONS))
    if structured.regex is not None:
        return str(matcher.grammar_from_regex(structured.regex))
    if structured.choice is not None:
        # A terminal, so that all choices are one automaton and not one lexeme each.
        options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice)
        return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}"))
    assert structured.grammar is not None
    return str(matcher.grammar_from_lark(_as_lark(library, structured.grammar)))


def _as_lark(library: Any, grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    try:
        lark: str = library.gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        # The converter is a small parser of its own and raises what it likes.
        raise GrammarError(f"structured_output.grammar is no GBNF: {error}") from error
    return lark


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise `GrammarError` for a tokenizer whose vocabulary the library cannot read."""
    if not getattr(tokenizer.hf, "is_fast", False):
        raise GrammarError(
            f"structured_output needs a fast tokenizer, which {tokenizer.name!r} is not; choose another with "
            "tokenizer=..."
        )


class Compiler:
    """Grammars over one vocabulary. Safe to use from several threads; compiling lets other threads run.

    vocab_size: ids of the model; those that the tokenizer does not know are never allowed. eos_token_ids: ids
    that may follow when a grammar is complete. num_words: int32 words of one mask.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        library = llguidance()
        check_tokenizer(tokenizer)
        try:
            self._tokenizer = library.LLTokenizer(
                tokenizer.hf.backend_tokenizer.to_str(),
                n_vocab=max(vocab_size, len(tokenizer)),
                eos_token=list(eos_token_ids),
            )
        except ValueError as error:
            raise GrammarError(
                f"the tokenizer {tokenizer.name!r} cannot be used for structured output: {error}"
            ) from error
        self._matcher = library.LLMatcher
        self._executor = library.LLExecutor()
        self._num_words = -(-self._tokenizer.vocab_size // 32)
        self.num_words = -(-vocab_size // 32)

    def compile(self, grammar: str) -> Any:
        """A matcher at the grammar's start, to be copied with `deep_copy`. Raises `GrammarError`."""
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        # The first mask builds what the later ones share, also those of copies.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(first_lines(matcher.get_error()))
        return matcher

    def fill(self, matchers: Sequence[Any]) -> npt.NDArray[np.int32]:
        """Masks of the next id, int32 [n, num_words]; bit i of word w allows id 32 w + i. In parallel."""
        words = np.zeros((len(matchers), self._num_words), np.int32)
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, 4 * self._num_words, len(pairs))
        # A tokenizer may know more ids than the model.
        return words[:, : self.num_words]


def first_lines(message: str) -> str:
    """A library's message without the parser's state that follows it."""
    return message.split("<state>")[0].strip()[:500]
