"""`SegmentMaker`: pieces of windows become segments with true times, and words if wanted; segments a transcript."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from model_states.speech import Segment, Transcript
from model_states_whisper.alignment import AlignedWindow, WordAligner
from model_states_whisper.segments import Piece
from model_states_whisper.window_decoder import DecodedWindow, WindowInput


class SegmentMaker:
    """Segments of one audio.

    num_samples: of the audio, at sampling_rate. position_samples: between two timestamps. end_id: ids below are text.
    aligner: finds the words; None leaves them out.
    """

    def __init__(
        self,
        num_samples: int,
        sampling_rate: int,
        position_samples: int,
        end_id: int,
        tokenizer: Any,
        aligner: WordAligner | None = None,
    ) -> None:
        self._aligner = aligner
        self._num_samples, self._rate, self._position_samples = num_samples, sampling_rate, position_samples
        self._end_id, self._tokenizer = end_id, tokenizer

    @property
    def duration(self) -> float:
        """Of the audio, in seconds."""
        return self._num_samples / self._rate

    def run(
        self,
        start: int,
        num_samples: int,
        pieces: Sequence[Piece],
        decoded: DecodedWindow,
        window: WindowInput,
        prompt: Sequence[int],
    ) -> Generator[Sequence[Any], Sequence[Any], list[Segment]]:
        """Part of a program: `make`, and the words of its segments.

        num_samples: of the window that are audio. prompt: of text without timestamps.
        """
        segments = self.make(start, pieces, decoded)
        if self._aligner is None:
            return segments
        aligned = AlignedWindow(
            segments=segments,
            prompt=prompt,
            model_inputs=window.model_inputs,
            start=start / self._rate,
            duration=num_samples / self._rate,
            language=window.language,
        )
        return (yield from self._aligner.add_words(aligned, self._tokenizer))

    def make(self, start: int, pieces: Sequence[Piece], window: DecodedWindow) -> list[Segment]:
        """Segments of a window that begins at sample `start`; those without text are left out."""
        segments = []
        for piece in pieces:
            token_ids = [token for token in piece.token_ids if token < self._end_id]
            text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
            if not text.strip():
                continue
            begin = self._seconds(start, piece.start)
            segments.append(
                Segment(
                    start=begin,
                    end=max(self._seconds(start, piece.end), begin),
                    text=text,
                    token_ids=tuple(piece.token_ids),
                    temperature=window.temperature,
                    avg_logprob=window.avg_logprob,
                    compression_ratio=window.compression_ratio,
                    no_speech_prob=window.no_speech_prob,
                    suspect=window.is_suspect,
                )
            )
        return segments

    def transcript(self, segments: Sequence[Segment], language: str | None) -> Transcript:
        """All of an audio, in order."""
        return Transcript(
            text="".join(segment.text for segment in segments).strip(),
            language=language,
            duration=self.duration,
            segments=tuple(segments),
        )

    def _seconds(self, start: int, position: int) -> float:
        """Time in the audio of a position of a window; not past the end, as a window is padded to its full length."""
        return min(start + position * self._position_samples, self._num_samples) / self._rate
