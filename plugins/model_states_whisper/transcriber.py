"""`WhisperTranscriber`: the task "transcription" of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from model_states.speech import Transcript, TranscriptionOptions
from model_states_whisper.alignment import WordAligner
from model_states_whisper.features import LogMel
from model_states_whisper.parallel import ParallelWindows
from model_states_whisper.segment_maker import SegmentMaker
from model_states_whisper.sequential import PreviousText, SequentialWindows
from model_states_whisper.window_decoder import WindowDecoder

if TYPE_CHECKING:
    from model_states_whisper.state import WhisperState

_FRAMES_PER_POSITION: Final = 2
Samples = npt.NDArray[np.float32]
Progress = Callable[[float], None]
Transcribing = Generator[Sequence[Any], Sequence[Any], Transcript]


class WhisperTranscriber:
    """Long audio in windows, as `TranscriptionOptions.windows` says."""

    def __init__(self, state: WhisperState) -> None:
        self._state = state
        self._tokens, self._vocab_size = state.tokens, state.vocab_size
        self._config = state.encoder.features
        self._log_mel = LogMel(self._config, state.config.device)
        # As much as the model was trained on, and as leaves room to answer.
        self._room = min(state.tokens.max_previous, state.config.max_model_len // 2 - 1)

    @property
    def sampling_rate(self) -> int:
        """See `model_states.tasks.Transcriber`."""
        return self._config.sampling_rate

    @cached_property
    def _aligner(self) -> WordAligner:
        return WordAligner(self._state)

    def transcribe(
        self, audio: Samples, options: TranscriptionOptions, tokenizer: Any, progress: Progress
    ) -> Transcribing:
        """See `model_states.tasks.Transcriber`."""
        if self._tokens.first_timestamp_id is None:
            raise ValueError(
                "this checkpoint's generation config names no no_timestamps_token_id, which windows are cut by; take a "
                "newer version of the checkpoint"
            )
        language, initial = self._language(options), self._initial_prompt(options, tokenizer)
        decoder = WindowDecoder(self._tokens, self._vocab_size, options)
        config = self._config
        position_samples = _FRAMES_PER_POSITION * config.hop_length
        maker = SegmentMaker(
            len(audio),
            config.sampling_rate,
            position_samples,
            self._tokens.end_id,
            tokenizer,
            self._aligner if options.word_timestamps else None,
        )
        if options.windows == "parallel":
            initial = initial[-self._room :]
            windows = ParallelWindows(audio, config, decoder, initial, maker, progress)
            return windows.run(language)
        previous = PreviousText(
            initial,
            self._tokens.first_timestamp_id,
            is_kept=options.condition_on_previous_text and self._tokens.previous_id is not None,
            room=self._room,
        )
        return self._sequential(audio, decoder, previous, maker, progress, language)

    def _sequential(
        self,
        audio: Samples,
        decoder: WindowDecoder,
        previous: PreviousText,
        maker: SegmentMaker,
        progress: Progress,
        language: str | None,
    ) -> Transcribing:
        (features,) = yield [partial(self._log_mel.of_recording, audio)]
        del audio  # which is as long as the recording, and not needed any more
        windows = SequentialWindows(features, self._config, decoder, previous, maker, progress)
        return (yield from windows.run(language))

    def _language(self, options: TranscriptionOptions) -> str | None:
        """Code of the language that is asked for; None for one to be detected, or for a model that knows one alone."""
        tokens, wanted = self._tokens, options.language
        if not tokens.language_ids:
            tokens.prompt(language=wanted, task=options.task)  # which refuses what is not English
            return None
        some = next(iter(tokens.language_ids)) if wanted is None else wanted
        prompt = tokens.prompt(language=some, task=options.task)
        return None if wanted is None else tokens.language_of(prompt[1])

    def _initial_prompt(self, options: TranscriptionOptions, tokenizer: Any) -> list[int]:
        """Tokens of the text that counts as said before the audio."""
        text = (options.initial_prompt or "").strip()
        if not text:
            return []
        if self._tokens.previous_id is None:
            raise ValueError("this model has no token for previous text; leave initial_prompt out")
        token_ids: list[int] = tokenizer.encode(f" {text}", add_special_tokens=False)
        if any(token >= self._tokens.end_id for token in token_ids):
            raise ValueError(f"initial_prompt={text!r} holds special tokens; give text alone")
        return token_ids
