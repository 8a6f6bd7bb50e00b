"""`WindowDecoder`: one window to tokens, at rising temperatures while the result looks wrong."""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from model_states.speech import TranscriptionOptions
from model_states.tasks import TaskOutput, TaskRequest
from model_states_whisper.segments import WindowPieces, split_window
from model_states_whisper.tokens import WhisperTokens

_ODD: Final = 0x9E3779B97F4A7C15  # spreads seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowInput:
    """What a window is decoded from.

    model_inputs: of the encoder, with a key, so that every request of the window finds the same output. previous:
    tokens of the text before. number: tells windows of an audio apart, for their seeds. place: for messages.
    """

    model_inputs: Mapping[str, Any]
    language: str | None
    previous: Sequence[int]
    number: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedWindow:
    """What came of a window: tokens without the end token, and the figures of `model_states.speech.Segment`.

    is_silent: it is taken for silence, whatever the tokens say. is_suspect: over a threshold at every temperature.
    """

    token_ids: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    is_silent: bool
    is_suspect: bool


Decoding = Generator[Sequence[Any], Sequence[Any], DecodedWindow]


class WindowDecoder:
    """Makes the requests of windows and judges what comes of them, under one set of options."""

    def __init__(self, tokens: WhisperTokens, vocab_size: int, options: TranscriptionOptions) -> None:
        self._tokens, self._options = tokens, options
        # As transformers counts: each token in as many bytes, little endian. The reference takes the text's bytes.
        self._token_bytes = int(math.log2(vocab_size) / 8) + 1

    @property
    def knows_languages(self) -> bool:
        """Whether a language has to be named or detected."""
        return bool(self._tokens.language_ids)

    def split(self, token_ids: Sequence[int], num_positions: int) -> WindowPieces:
        """See `split_window`."""
        first_timestamp_id = self._tokens.first_timestamp_id
        assert first_timestamp_id is not None, "a transcriber needs timestamps"
        return split_window(token_ids, first_timestamp_id, num_positions)

    def detect_language(
        self, model_inputs: Mapping[str, Any]
    ) -> Generator[Sequence[Any], Sequence[Any], str]:
        """Part of a program: code of the language of an encoder input."""
        prompt, params = self._tokens.detection_prompt()
        (output,) = yield [TaskRequest(prompt, params, model_inputs)]
        return self._tokens.language_of(_tokens_of(output, "the language")[0])

    def decode(self, window: WindowInput) -> Decoding:
        """Part of a program: the first result that no threshold objects to, or else the last."""
        prompt = self.prompt(window.language, previous=window.previous)
        result, no_speech_prob = None, 0.0
        for attempt, temperature in enumerate(self._options.temperatures):
            group = [self._request(prompt, window, attempt, temperature)]
            if attempt == 0:
                group.append(self._no_speech_request(prompt, window))
            outputs = yield group
            tokens = _tokens_of(outputs[0], window.place)
            if attempt == 0:
                _tokens_of(outputs[1], window.place)
                no_speech_prob = math.exp(outputs[1].logprobs[0])
            result = self._judge(tokens, outputs[0].logprobs, temperature, no_speech_prob)
            if not result.is_suspect:
                break
        assert result is not None, "options hold at least one temperature"
        return result

    def prompt(
        self, language: str | None, *, timestamps: bool = True, previous: Sequence[int] = ()
    ) -> list[int]:
        """The decoder's prompt; one that is in English only has neither language nor task."""
        task = self._options.task if self._tokens.language_ids else None
        return self._tokens.prompt(language=language, task=task, timestamps=timestamps, previous=previous)

    def _request(
        self, prompt: Sequence[int], window: WindowInput, attempt: int, temperature: float
    ) -> TaskRequest:
        options = self._options
        seed = (int(options.seed) + _ODD * (window.number * len(options.temperatures) + attempt)) % 2**63
        params = {
            "temperature": temperature,
            "seed": seed,
            "max_tokens": None,
            "logprobs": 0,
            "logprobs_mode": "adjusted",  # as in the reference, the temperature does not count
            "logits_processors": {"whisper": {"timestamps": True, "greedy": temperature == 0.0}},
        }
        return TaskRequest(prompt, params, window.model_inputs)

    def _no_speech_request(self, prompt: Sequence[int], window: WindowInput) -> TaskRequest:
        """How likely the model finds "no speech" right behind the start token, before any rule."""
        start = len(prompt) - 1 - prompt[::-1].index(self._tokens.start_id)
        no_speech = self._tokens.no_speech_id
        params = {
            "temperature": 0.0,
            "max_tokens": 1,
            "logprobs": 0,
            "logits_processors": {"whisper": {"only": no_speech, "greedy": True}},
            # It runs beside the request that begins alike, so there is nothing to share yet.
            "cache_salt": "no speech",
        }
        return TaskRequest(prompt[: start + 1], params, window.model_inputs)

    def _judge(
        self, tokens: Sequence[int], logprobs: Sequence[float], temperature: float, no_speech_prob: float
    ) -> DecodedWindow:
        options = self._options
        avg_logprob = sum(logprobs) / len(logprobs)
        ratio = self._compression_ratio(tokens)
        is_unlikely = options.logprob_threshold is not None and avg_logprob < options.logprob_threshold
        is_repetitive = (
            options.compression_ratio_threshold is not None and ratio > options.compression_ratio_threshold
        )
        is_silent = (
            options.no_speech_threshold is not None
            and no_speech_prob > options.no_speech_threshold
            and (is_unlikely or options.logprob_threshold is None)
        )
        return DecodedWindow(
            token_ids=tokens[:-1] if tokens[-1] == self._tokens.end_id else tokens,
            temperature=temperature,
            avg_logprob=avg_logprob,
            compression_ratio=ratio,
            no_speech_prob=no_speech_prob,
            is_silent=is_silent,
            is_suspect=(is_unlikely or is_repetitive) and not is_silent,
        )

    def _compression_ratio(self, tokens: Sequence[int]) -> float:
        """Bytes of the tokens to those of their compressed form; above 2 or 3, they repeat themselves."""
        raw = b"".join(token.to_bytes(self._token_bytes, "little") for token in tokens)
        return len(raw) / len(zlib.compress(raw))


def _tokens_of(output: TaskOutput, place: str) -> Sequence[int]:
    if output.finish_reason == "error":
        raise ValueError(f"{place} could not be decoded: {output.error}")
    return output.token_ids
