"""Training windows out of the pool, on its device: audio with gaps and noise, and the tokens that Whisper would write.

With timestamps a window reads

    [<|startofprev|> text ...] <|startoftranscript|> <|en|> <|transcribe|> <|0.32|> text <|2.10|> <|2.56|> text <|4.8|>
    ... <|endoftext|>

and ends in the start of a sentence alone if the window's end cuts that sentence. Without timestamps it has
<|notimestamps|> and the texts, and no sentence is cut. Of a window without speech, <|nospeech|> is the label of
<|startoftranscript|>, and nothing else is to be said (Radford et al. 2022, section 2.3).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from clip_pool import TICK_SAMPLES, ClipPool
from clips import MAX_TOKENS
from model_states_whisper.features import FeatureConfig, LogMel
from token_pieces import Pieces, concatenate
from vocabulary import (
    END_ID,
    ENGLISH_ID,
    FIRST_TIMESTAMP_ID,
    NO_SPEECH_ID,
    NO_TIMESTAMPS_ID,
    PREVIOUS_ID,
    START_ID,
    TRANSCRIBE_ID,
)

IGNORED = -100
MAX_POSITIONS, MAX_PREVIOUS = 1500, 223
NO_SPEECH_SHARE, TIMESTAMPS_SHARE, PREVIOUS_SHARE = 0.04, 0.7, 0.3
CHANGING_NOISE_SHARE = 0.25
LONGEST_SILENCE = 1250  # ticks before or between sentences
LONG_SILENCES_SHARE, LONG_LEAD_SHARE, LONG_GAP_SHARE = 0.4, 0.6, 0.3  # of windows, and in those


@dataclass(frozen=True)
class WindowShape:
    """Sizes of a batch: windows, ticks of a window, most sentences of a window, tokens (padded).

    Windows of 30 s are as in use: cut sentences, previous texts, long silences, padding. Shorter ones are all speech,
    and stand at any place of the encoder's positions.
    """

    rows: int
    ticks: int
    max_clips: int
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether a window is as long as the model's."""
        return self.ticks == MAX_POSITIONS


class Layout(NamedTuple):
    """Who speaks when: clips [rows, n], their starts in ticks, those that are heard in full, and per row [rows, 1] the
    first that is cut (n for none), and the texts' form."""

    clips: torch.Tensor
    starts: torch.Tensor
    kept: torch.Tensor
    cut: torch.Tensor
    timestamps: torch.Tensor
    shift: torch.Tensor  # position of the window's first tick


class Windows(NamedTuple):
    """A batch.

    features: float32 [rows, 80, 2 * ticks]. positions: the encoder's, [rows, ticks]. input_ids, labels: [rows,
    num_tokens]; what is ignored is IGNORED. spans: [rows, num_tokens, 2], where a label is heard, in ticks of the
    window; 0, 0 for those that are not heard. frame_tokens: [rows, ticks], the token spoken in a tick plus one, or 0.
    """

    features: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    spans: torch.Tensor
    frame_tokens: torch.Tensor


class WindowMaker:
    """Draws windows of one shape, from torch's generator of the device."""

    def __init__(self, pool: ClipPool, shape: WindowShape) -> None:
        self.pool, self.shape, self.device = pool, shape, pool.device
        self._log_mel = LogMel(FeatureConfig(feature_size=80, num_frames=2 * shape.ticks), self.device)

    @torch.no_grad()
    def draw(self) -> Windows:
        """One batch."""
        layout = self.lay_out()
        rows = self._audio_rows(layout)
        features = self._features(self._mix(self.pool.audio[rows]), layout)
        ids, labels, spans = self.tokens(layout)
        return Windows(
            features=features,
            positions=layout.shift + torch.arange(self.shape.ticks, device=self.device),
            input_ids=ids,
            labels=labels,
            spans=spans,
            frame_tokens=self.pool.frame_tokens[rows].long(),
        )

    def lay_out(self) -> Layout:
        """Place sentences one after another: after a first silence, with gaps, as many as are wanted and fit."""
        shape, pool = self.shape, self.pool
        clips = pool.choose(shape.rows, shape.max_clips)
        lengths = pool.of("ticks", clips)
        lead, gaps = self._silences()
        starts = (lead + (lengths + gaps).cumsum(1) - lengths - gaps).long()
        wanted = 1 + (self._uniform(1) * shape.max_clips).long()
        wanted = torch.where(self._uniform(1) < 0.4, shape.max_clips, wanted)
        wanted = wanted * (self._uniform(1) >= NO_SPEECH_SHARE)
        order = torch.arange(shape.max_clips, device=self.device)
        fits = (starts + lengths <= shape.ticks) & (order < wanted)
        num_kept = fits.long().cumprod(1).sum(1, keepdim=True)  # a long one may be followed by one that fits
        kept = order < num_kept
        timestamps = self._uniform(1) < TIMESTAMPS_SHARE
        next_start = starts.gather(1, num_kept.clamp(max=shape.max_clips - 1))
        is_cut = timestamps & (num_kept > 0) & (num_kept < wanted) & (next_start < shape.ticks - 10)
        cut = torch.where(is_cut & shape.is_whole, num_kept, shape.max_clips)
        shift = (self._uniform(1) * (MAX_POSITIONS - shape.ticks + 1)).long()
        return Layout(clips, starts, kept, cut, timestamps, shift)

    def _silences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ticks before the first sentence [rows, 1] and after each [rows, max_clips].

        They are mostly short. In a share of the whole windows, any of them may be so long that one sentence fits.
        """
        count = self.shape.max_clips
        lead = self._exponential(1, 25) * (self._uniform(1) < 0.7)
        gaps = 2 + self._exponential(count, 25)
        has_long = (self._uniform(1) < LONG_SILENCES_SHARE) & self.shape.is_whole
        is_long = has_long & (self._uniform(1) < LONG_LEAD_SHARE)
        lead = torch.where(is_long, self._uniform(1) * LONGEST_SILENCE, lead)
        is_long = has_long & (self._uniform(count) < LONG_GAP_SHARE)
        return lead, torch.where(is_long, self._uniform(count) * LONGEST_SILENCE, gaps)

    def _audio_rows(self, layout: Layout) -> torch.Tensor:
        """Rows of the pool's audio [rows, ticks]."""
        ticks = torch.arange(self.shape.ticks, device=self.device).expand(self.shape.rows, -1).contiguous()
        place = (torch.searchsorted(layout.starts, ticks, right=True) - 1).clamp(min=0)
        within = ticks - layout.starts.gather(1, place)
        clip = layout.clips.gather(1, place)
        heard = (layout.kept.gather(1, place) | (place == layout.cut)) & (within >= 0)
        heard &= within < self.pool.of("ticks", clip)
        return torch.where(heard, self.pool.of("starts", clip) + within, self.pool.silence)

    def _mix(self, speech: torch.Tensor) -> torch.Tensor:
        """Audio [rows, ticks * 320] in [-1, 1] of int16 [rows, ticks, 320]: loudness, colour, noise."""
        speech = speech.flatten(1).float() / 32768
        speech = self._tilt(speech, 0.35) * 10 ** self._between(-0.8, 0.3)
        noise = self._tilt(torch.randn_like(speech), 0.95)
        noise = noise / noise.square().mean(1, keepdim=True).sqrt()
        noise_level = 10 ** self._between(-4.5, -1.6) * (self._uniform(1) < 0.75)
        noise = noise * self._comes_and_goes().repeat_interleave(TICK_SAMPLES, 1)
        seconds = torch.arange(speech.shape[1], device=self.device) / (TICK_SAMPLES * 50)
        hum = torch.sin(2 * torch.pi * 10 ** self._between(1.7, 3.5) * seconds)
        hum_level = 10 ** self._between(-4.5, -2.0) * (self._uniform(1) < 0.15)
        return (speech + noise * noise_level + hum * hum_level).clamp(-1, 1)

    def _comes_and_goes(self) -> torch.Tensor:
        """Whether there is noise, if a window has any [rows, ticks]: always; in some whole ones between two moments, or
        before the one and after the other."""
        ticks = torch.arange(self.shape.ticks, device=self.device)
        first, last = (self._uniform(2) * self.shape.ticks).sort(1).values[..., None].unbind(1)
        changes = (self._uniform(1) < CHANGING_NOISE_SHARE) & self.shape.is_whole
        is_inside = (ticks >= first) & (ticks < last)
        return (is_inside ^ (self._uniform(1) < 0.5)) | ~changes

    def _tilt(self, audio: torch.Tensor, most: float) -> torch.Tensor:
        """Make it brighter or darker: each sample plus a part of the one before."""
        return audio + self._between(-most, most) * torch.nn.functional.pad(audio, (1, 0))[:, :-1]

    def _features(self, audio: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Log-mel features [rows, 80, 2 * ticks], with what long files do to them.

        After the last sentence a file may be over: zeros in the audio, or in the features, which is how transformers
        pads the last window. The floor follows the loudest frame of the whole file, which may be in another window.
        """
        shape = self.shape
        ticks = torch.arange(shape.ticks, device=self.device)
        end = self._last_end(layout) + 1 + self._exponential(1, 40).long()
        over = (ticks >= end) & (layout.cut == shape.max_clips) & (self._uniform(1) < 0.6)
        audio = audio * ~over.repeat_interleave(TICK_SAMPLES, 1)
        features = self._log_mel(audio)
        raised = self._uniform(1) * (self._uniform(1) < 0.3) / 4
        floor = features.amax((1, 2), keepdim=True) - 2 + raised[:, None]
        bands = torch.arange(features.shape[1], device=self.device)
        first = (self._uniform(1) * len(bands)).long()
        masked = (bands >= first) & (bands < first + self._uniform(1) * 12) & (self._uniform(1) < 0.4)
        features = torch.where(masked[..., None], floor, torch.maximum(features, floor))
        blank = over & (self._uniform(1) < 0.5)
        return features * ~blank.repeat_interleave(2, 1)[:, None]

    def _last_end(self, layout: Layout) -> torch.Tensor:
        """Tick in which the last whole sentence ends, [rows, 1]; 0 if there is none."""
        ends = layout.starts + self.pool.of("ticks", layout.clips)
        return (ends * layout.kept).amax(1, keepdim=True)

    def tokens(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, labels and spans [rows, num_tokens(, 2)] of a layout."""
        pieces = [*self._previous(), self._head(layout), self._said(layout), self._end(layout)]
        tokens, spans, weights, lengths = (torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
        ids, spans, counted = concatenate(tokens, spans, weights, lengths, self.shape.num_tokens + 1)
        labels = torch.where(counted, ids, IGNORED)[:, 1:]
        spoken = layout.kept.any(1, keepdim=True)
        at_start = (ids[:, :-1] == START_ID) & ~spoken
        labels = torch.where(at_start, NO_SPEECH_ID, labels)
        return ids[:, :-1], labels, spans[:, 1:]

    def _previous(self) -> list[Pieces]:
        """Text before the window, which counts for nothing: other sentences, half of them with timestamps."""
        shape = self.shape
        if not shape.is_whole:
            return []
        clips = self.pool.choose(shape.rows, shape.max_clips)
        starts = (self._uniform(shape.max_clips) * 140).long().cumsum(1)
        timestamps = self._uniform(1) < 0.5
        pieces = self._texts(clips, starts, timestamps)
        wanted = (self._uniform(1) * (shape.max_clips + 1)).long() * (self._uniform(1) < PREVIOUS_SHARE)
        order = torch.arange(shape.max_clips, device=self.device)
        lengths = pieces.lengths * (order < wanted)
        lengths = lengths * (lengths.cumsum(1) <= MAX_PREVIOUS)
        marker = self._fixed([PREVIOUS_ID], [False], (lengths[:, :1] > 0).long())
        nothing = torch.zeros_like(pieces.spans)
        return [
            marker,
            pieces._replace(spans=nothing, counted=torch.zeros_like(pieces.counted), lengths=lengths),
        ]

    def _head(self, layout: Layout) -> Pieces:
        spoken = layout.kept.any(1, keepdim=True)
        head = self._fixed(
            [START_ID, ENGLISH_ID, TRANSCRIBE_ID, NO_TIMESTAMPS_ID], [False, True, True, False], 4
        )
        counted = head.counted & spoken[..., None]
        return head._replace(counted=counted, lengths=4 - layout.timestamps.long())

    def _said(self, layout: Layout) -> Pieces:
        pieces = self._texts(layout.clips, layout.starts, layout.timestamps, layout.shift)
        order = torch.arange(self.shape.max_clips, device=self.device)
        lengths = torch.where(layout.kept, pieces.lengths, 0)
        return pieces._replace(lengths=torch.where(order == layout.cut, 1, lengths))

    def _end(self, layout: Layout) -> Pieces:
        """The end; before it <|0.00|> where timestamps are wanted and there is no speech, since rules ask for one."""
        silent = ~layout.kept.any(1, keepdim=True) & layout.timestamps
        order = torch.arange(self.shape.max_clips, device=self.device)
        cut_start = (layout.starts * (order == layout.cut)).amax(1, keepdim=True)
        spans = _around(torch.maximum(self._last_end(layout), cut_start))[:, :, None] + 2
        end = self._fixed([FIRST_TIMESTAMP_ID, END_ID], [True, True], 2)
        lengths = 1 + silent.long()
        tokens = torch.where(silent[..., None], end.tokens, end.tokens.roll(-1, 2))
        return end._replace(tokens=tokens, spans=spans.expand_as(end.spans), lengths=lengths)

    def _texts(
        self,
        clips: torch.Tensor,
        starts: torch.Tensor,
        timestamps: torch.Tensor,
        shift: torch.Tensor | int = 0,
    ) -> Pieces:
        """Texts of clips, each between its timestamps where they are wanted."""
        pool = self.pool
        counts, ends = pool.of("counts", clips)[..., None].long(), starts + pool.of("ticks", clips)
        width = MAX_TOKENS + 2
        tokens = torch.zeros(*clips.shape, width, dtype=torch.long, device=self.device)
        spans = torch.zeros(*clips.shape, width, 2, dtype=torch.long, device=self.device)
        tokens[..., 1:-1] = pool.of("tokens", clips)
        spans[..., 1:-1, :] = pool.of("spans", clips) + starts[..., None, None]
        last = counts + 1
        tokens.scatter_(2, last, _timestamp(ends + shift)[..., None])
        spans.scatter_(2, last[..., None].expand(-1, -1, -1, 2), _around(ends)[..., None, :])
        tokens[..., 0], spans[..., 0, :] = _timestamp(starts + shift), _around(starts)
        # Without timestamps the text alone: what follows the first, and not the last.
        plain = ~timestamps[..., None]
        tokens = torch.where(plain, tokens.roll(-1, 2), tokens)
        spans = torch.where(plain[..., None], spans.roll(-1, 2), spans)
        lengths = counts[..., 0] + 2 * timestamps.long()
        return Pieces(tokens, spans, torch.ones_like(tokens, dtype=torch.bool), lengths)

    def _fixed(self, ids: list[int], counted: list[bool], length: torch.Tensor | int) -> Pieces:
        """The same tokens in every row."""
        rows, width = self.shape.rows, MAX_TOKENS + 2
        tokens = torch.zeros(rows, 1, width, dtype=torch.long, device=self.device)
        weights = torch.zeros(rows, 1, width, dtype=torch.bool, device=self.device)
        for place, (token, weight) in enumerate(zip(ids, counted, strict=True)):
            tokens[..., place], weights[..., place] = token, weight
        spans = torch.zeros(rows, 1, width, 2, dtype=torch.long, device=self.device)
        lengths = torch.zeros(rows, 1, dtype=torch.long, device=self.device) + length
        return Pieces(tokens, spans, weights, lengths)

    def _uniform(self, count: int) -> torch.Tensor:
        return torch.rand(self.shape.rows, count, device=self.device)

    def _between(self, low: float, high: float) -> torch.Tensor:
        return low + self._uniform(1) * (high - low)

    def _exponential(self, count: int, mean: float) -> torch.Tensor:
        """Mostly short, sometimes long, in ticks; [rows, count]."""
        return -mean * torch.log(1 - self._uniform(count))


def _timestamp(ticks: torch.Tensor) -> torch.Tensor:
    return FIRST_TIMESTAMP_ID + ticks.clamp(0, MAX_POSITIONS)


def _around(ticks: torch.Tensor) -> torch.Tensor:
    """A few ticks on either side of a moment; [..., 2]."""
    return torch.stack((ticks - 2, ticks + 2), -1)
