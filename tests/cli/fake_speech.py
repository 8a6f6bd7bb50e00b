"""A speech model of a few lines: it "hears" the name of each file, and finishes the last one first."""

from __future__ import annotations

from types import SimpleNamespace

from core_runner import RequestError
from model_states.speech import Segment, Transcript, Word


class FakeSpeechLLM:
    """`unreadable`: parts of names that cannot be read; `interrupt_after`: transcripts before Ctrl-C."""

    load_error = None
    refusal = None
    interrupt_after = None
    last = None

    def __init__(self, **options):
        if self.load_error is not None:
            raise self.load_error
        type(self).last = self
        self.options, self.closed, self.calls = options, False, []
        self.config = SimpleNamespace(max_num_reqs=2)

    def transcribe_each(self, audio, *, progress, on_bad_audio, **fields):
        if self.refusal is not None:
            raise RequestError(self.refusal)
        assert on_bad_audio == "return"
        self.calls.append((list(audio), fields))
        for done, index in enumerate(reversed(range(len(audio))), 1):
            if self.interrupt_after is not None and done > self.interrupt_after:
                raise KeyboardInterrupt
            progress(10.0 * done, 10.0 * len(audio))
            yield index, self._transcript(audio[index], fields)

    def _transcript(self, source, fields):
        heard = source.rsplit("/", 1)[-1] if isinstance(source, str) else f"{len(source.read())} bytes"
        if "bad" in heard:
            return Transcript(
                text="", language=None, duration=0.0, segments=(), error=f"{source}: is no audio (damaged)"
            )
        if "odd" in heard:
            return Transcript(text="", language=None, duration=3.0, segments=(), error="the logits hold NaN")
        words = [Word(text=f" {heard}", start=0.5, end=2.0, probability=0.5)]
        segments = [
            self._segment(0.5, 2.0, f" {heard}", words if fields.get("word_timestamps") else None),
            self._segment(2.0, 9.5, " & <more>", None),
        ]
        text = "".join(segment.text for segment in segments)
        return Transcript(text=text, language="en", duration=10.0, segments=segments)

    def _segment(self, start, end, text, words):
        return Segment(
            start=start,
            end=end,
            text=text,
            token_ids=[1],
            temperature=0.0,
            avg_logprob=-0.1,
            compression_ratio=1.0,
            no_speech_prob=0.0,
            words=words,
        )

    def close(self):
        self.closed = True
