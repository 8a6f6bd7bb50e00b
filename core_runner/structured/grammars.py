"""`Grammars`: grammars compiled beside the engine's loop, one matcher for each request, and the masks of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from core_runner.errors import RequestError
from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.output import GrammarBitmask, SchedulerOutput
from core_runner.scheduling.step import ScheduledStep
from core_runner.structured.library import Compiler, check_tokenizer, first_lines, grammar_of
from core_runner.structured.options import StructuredOutput
from core_runner.text import Tokenizer

_MAX_CACHED = 256
_NUM_THREADS = 2

# What a grammar is in the library's form, and whether it is sound, depends on no vocabulary.
_checked_grammar = lru_cache(_MAX_CACHED)(grammar_of)


class GrammarConstraint:
    """A request's place in its grammar: the `TokenConstraint` of the scheduler.

    It follows the tokens that are known on the host, so it stays right through preemption and resume.
    """

    def __init__(self, compiled: Future[Any]) -> None:
        self._compiled = compiled
        self._matcher: Any = None
        self.error: str | None = None

    def is_ready(self) -> bool:
        """Whether the grammar is compiled; `error` says why it could not be."""
        if self._matcher is None and self.error is None and self._compiled.done():
            # Whatever it is: a grammar must not end the engine.
            problem = self._compiled.exception()
            if problem is None:
                self._matcher = self._compiled.result().deep_copy()
            else:
                self._fail(str(problem) or type(problem).__name__)
        return self._matcher is not None or self.error is not None

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on by tokens that were sampled; False, with `error`, if the grammar does not allow them."""
        taken = self.matcher.try_consume_tokens(list(token_ids))
        if self.matcher.is_error():
            self._fail(first_lines(self.matcher.get_error()))
        elif taken < len(token_ids):
            self._fail(f"token {token_ids[taken]} was sampled, which the grammar does not allow there")
        return self.error is None

    @property
    def matcher(self) -> Any:
        """The library's matcher, of a constraint that is ready."""
        assert self._matcher is not None, "the grammar is not compiled"
        return self._matcher

    def finish_mask(self, words: npt.NDArray[np.int32], stop_token_ids: Sequence[int]) -> None:
        """Complete a filled mask [num_words]: the request's own stop ids where the text may end."""
        if self.matcher.is_error():
            # The library would now allow the end ids, and half a text would pass for a whole one.
            words[:] = 0
            self._fail(first_lines(self.matcher.get_error()))
        elif stop_token_ids and self.matcher.is_accepting():
            ids = np.array([i for i in stop_token_ids if i < 32 * len(words)], np.int64)
            bits = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)).view(np.int32)
            np.bitwise_or.at(words, ids // 32, bits)

    def _fail(self, reason: str) -> None:
        self.error = f"structured output: {reason}"


class Grammars:
    """The grammars of one tokenizer and model. `close` ends its threads.

    vocab_size: ids of the model's logits. eos_token_ids: ids that may follow a complete output. A grammar is
    compiled once and kept while it is among the `max_cached` used last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_cached: int = _MAX_CACHED,
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        # Not the tokenizer's own, which need not end a request.
        self._eos = [i for i in eos_token_ids if i < vocab_size]
        self._compiler: Future[Compiler] | None = None
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._cache: OrderedDict[str, Future[Any]] = OrderedDict()
        self._max_cached = max_cached

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError`, with the library's reason, for a grammar that can never be used."""
        if params.structured_output is None:
            return
        _checked_grammar(params.structured_output)
        check_tokenizer(self._tokenizer)
        if not self._eos:
            raise RequestError(
                "structured_output needs an end id with which an output can end, and the checkpoint names none; "
                "give its config an eos_token_id"
            )

    def constrain(self, structured: StructuredOutput) -> GrammarConstraint:
        """A constraint at the grammar's start; compiling begins now, in another thread."""
        grammar = _checked_grammar(structured)
        if self._compiler is None:
            # Before any grammar, whose thread waits for it.
            self._compiler = self._pool.submit(Compiler, self._tokenizer, self._vocab_size, self._eos)
        compiled = self._cache.get(grammar)
        # A failure is not kept: it may have been the moment's, such as a lack of memory.
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = self._cache[grammar] = self._pool.submit(_compile, self._compiler, grammar)
        self._cache.move_to_end(grammar)
        if len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return GrammarConstraint(compiled)

    def add_bitmask(self, step: ScheduledStep) -> SchedulerOutput:
        """The step's output with the masks of its constrained rows, which are filled while the model runs."""
        requests = [step.requests[row] for row in step.constrained.tolist()]
        bitmask = GrammarBitmask(
            slots=step.output.slots[step.constrained],
            positions=np.zeros(len(requests), np.int32),
            words=partial(self.fill, requests),
        )
        return replace(step.output, grammar_bitmask=bitmask)

    def fill(self, requests: Sequence[Request]) -> npt.NDArray[np.int32]:
        """Masks of the next id of constrained requests, int32 [n, ceil(vocab_size / 32)]."""
        assert self._compiler is not None, "a constraint was made elsewhere"
        constraints = [c for r in requests if isinstance(c := r.constraint, GrammarConstraint)]
        words = self._compiler.result().fill([constraint.matcher for constraint in constraints])
        for request, constraint, row in zip(requests, constraints, words, strict=True):
            constraint.finish_mask(row, request.sampling_params.stop_token_ids)
        return words

    def close(self) -> None:
        """Drop what is still to be compiled and end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(compiler: Future[Compiler], grammar: str) -> Any:
    return compiler.result().compile(grammar)
