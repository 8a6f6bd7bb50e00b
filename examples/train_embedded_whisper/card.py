"""Write the model card, a checkpoint's README.md, from what training and evaluation wrote: no figure is set by hand."""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from evaluate import noises
from sentences import HELDOUT_SHARE, TEMPLATES
from voices import ACCENTS, HELDOUT_VARIANTS, VARIANTS

RESULTS = Path(__file__).parent / "results"

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: automatic-speech-recognition
---

# The embedded Whisper

A speech recogniser of {millions:.2f} million parameters ({megabytes:.1f} MB in bfloat16) in Whisper's architecture and
token layout. It ships inside core-runner, so that `core-runner transcribe` answers without a download and the tests
have real weights whose transcripts can be checked.

**It does not understand people.** It has heard one thing: the speech synthesizer espeak-ng reading sentences from
{num_templates} templates with about 500 words: commands, numbers, times, dates, short statements ("{example}"). A human
voice, another synthesizer, another word, another language gives nonsense, in the best case none. Its confidence says
nothing there. Use it to see that an engine works; for speech, take a real Whisper.

## Figures

By `evaluate.py`, with transformers' `generate`, greedy, on held-out sentences in held-out voices: one sentence in
{heldout_share} of the grammar's, and {num_heldout_voices} of the {num_voices} speakers that are used here, are never in
the training speech, in any accent. {device}, {dtype}, torch {torch}, transformers {transformers}.

| recordings | words | word error rate | without case and punctuation |
|---|--:|--:|--:|
{wer_rows}

"Known" are sentences and voices of the training side (a quarter of the sentences with a word that does not fit); noise
is white. A full window has sentences with pauses, 8 to 29.5 s. Long silences are up to 25 s before and between the
sentences of a window, zeros or white noise at -60 dB of full scale. Long files, {long_counts} of each length, are cut
into windows by the timestamps, as in the published algorithm ("sequential"). In that, a sentence that comes first in
its window and is cut by the window's end loses its beginning: with nothing said before it there is no time to go on
from. Windows that are cut in pauses ("parallel") avoid that.

Segment times on full windows, where there were as many segments as sentences
({segments_alike} of {segments_count}): the start is off by {segments[start][mean]:.3f} s in the mean
({segments[start][p95]:.2f} s or less for 95%), the end by {segments[end][mean]:.3f} s ({segments[end][p95]:.2f} s).
Word times, by transformers' dynamic time warping over the alignment heads {heads} (layer, head):
starts off by {words[start][mean]:.3f} s in the mean, {words[start][within_0.1]:.0%} within 0.1 s; ends by
{words[end][mean]:.3f} s, {words[end][within_0.1]:.0%}. The truth is espeak's own report of where
its words begin; of words that it runs together ("in the") it is a guess by their letters.

Probability of no speech: at most {speech_no_speech:.2g} in a window with speech, and at least {noise_no_speech}. Where
only the tokens are asked, without a threshold on that, {num_said_in_silence} of the {num_silent} windows without speech
gave text. In training no noise was louder than -32 dB of full scale: white noise at -20 dB mostly gives words, and not
always such as the thresholds mark.

## Recordings

In `examples/`, 16 kHz mono, made by `recordings.py` in held-out voices, of held-out sentences; they are chosen by their
first words, and {recordings_right}.

{recordings}

## Model

Whisper architecture: {shape}. 80 mel bands, windows of 30 s (1,500 positions), 448 text positions. Byte-level BPE of
{num_text_tokens:,} tokens, digits single, then Whisper's special tokens and the timestamps from 0.00 to 30.00 s. The
only language is English, the only task transcription; the generation config presets both. The first timestamp may be
anywhere in the window, and nothing is suppressed.

## Training

{stages}

All of it on one {train_device} (torch {train_torch}, transformers {train_transformers}), other work beside it.
Sentences come from a seed; {num_accents} English accents, {num_voices_trained} speakers, 125 to 205 words a minute,
random pitch, loudness, colour, noise and hum. No recording, text or weights of others went in. espeak-ng (GPL-3.0)
made the sound and is no part of this package. Two runs differ: the number of steps follows the clock, and espeak's
noise does not start over.
"""


def _wer_rows(evaluation: dict[str, Any]) -> str:
    return "\n".join(
        f"| {prefix}{name} | {result['words']:,} | {result['wer']:.2%} | {result['wer_normalized']:.2%} |"
        for part, prefix in (("wer", ""), ("long", "long file, seconds: "))
        for name, result in evaluation[part].items()
    )


def _stages(stages: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{place}. `{stage['command']}` in `examples/train_embedded_whisper`: {stage['steps']:,} steps on "
        f"{stage['hours_heard']:,.0f} hours of windows, cut and mixed from {stage['hours_spoken']:,.0f} hours of "
        f"speech, in {stage['loop_seconds']:.0f} seconds ({stage['seconds']:.0f} with the start and the compilation)."
        + (f" {stage['note']}" if "note" in stage else "")
        for place, stage in enumerate(stages, 1)
    )


def _silence(evaluation: dict[str, Any]) -> dict[str, Any]:
    probabilities = {name: value[0] for name, value in evaluation["no_speech"].items()}
    speech = probabilities.pop("speech")
    return {
        "speech_no_speech": speech,
        "noise_no_speech": ", ".join(f"{value:.4g} in {name}" for name, value in probabilities.items()),
        "num_said_in_silence": len(evaluation["said_in_silence"]) or "none",
    }


def _recordings(recordings: dict[str, dict[str, str]]) -> dict[str, str]:
    right = all(row["said"] == row["heard"] for row in recordings.values())
    rows = [f"- `{name}`: {row['said']}" for name, row in recordings.items()]
    return {
        "recordings": "\n".join(rows),
        "recordings_right": "the model transcribes both exactly" if right else "the model errs on them",
    }


def render(
    stages: list[dict[str, Any]], evaluation: dict[str, Any], config: dict[str, Any], num_bytes: int
) -> str:
    """The card's text."""
    shape = (
        f"{config['encoder_layers']} encoder and {config['decoder_layers']} decoder layers, width {config['d_model']}, "
        f"{config['encoder_attention_heads']} heads of 64, feed-forward {config['encoder_ffn_dim']}"
    )
    alignment, last = evaluation["alignment"], stages[-1]
    counts = [result["texts"] for result in evaluation["long"].values()]
    text = CARD.format(
        **{key: evaluation[key] for key in ("device", "dtype", "torch", "transformers", "segments")},
        **{f"train_{key}": last[key] for key in ("device", "torch", "transformers")},
        **_silence(evaluation),
        num_silent=sum(map(len, noises().values())),
        **_recordings(evaluation["recordings"]),
        shape=shape,
        stages=_stages(stages),
        millions=last["parameters"] / 1e6,
        megabytes=num_bytes / 1e6,
        example="Remind me to water the plants tomorrow. The meeting is on 3 May at 7:45. Anna found a small key.",
        num_templates=len(TEMPLATES),
        heldout_share=HELDOUT_SHARE,
        num_heldout_voices=len(HELDOUT_VARIANTS),
        num_voices=len(VARIANTS) + len(HELDOUT_VARIANTS),
        num_voices_trained=len(VARIANTS),
        num_accents=len(ACCENTS),
        wer_rows=_wer_rows(evaluation),
        long_counts=f"{min(counts)} to {max(counts)}",
        segments_alike=evaluation["segments"]["alike"],
        segments_count=evaluation["segments"]["recordings"],
        words=alignment["measured"][str(alignment["alignment_heads"])],
        heads=alignment["alignment_heads"],
        num_text_tokens=config["eos_token_id"],
    )
    head, separator, body = text.partition("\n---\n\n")
    return head + separator + "\n\n".join(map(_wrapped, body.split("\n\n")))


def _wrapped(block: str) -> str:
    """A paragraph or list filled to 120 columns; headings and tables as they are."""
    if block.lstrip().startswith(("|", "#")):
        return block
    items = re.split(r"\n(?=- |\d+\. )", block.strip("\n"))
    return "\n".join(
        textwrap.fill(" ".join(item.split()), 120, subsequent_indent="  " * bool(re.match(r"-|\d\.", item)))
        for item in items
    )


def main() -> None:
    """Write README.md into the checkpoint's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--train", type=Path, nargs="+", default=sorted(RESULTS.glob("train*.json")))
    parser.add_argument("--evaluation", type=Path, default=RESULTS / "eval.json")
    args = parser.parse_args()
    evaluation, config = (
        json.loads(file.read_text()) for file in (args.evaluation, args.checkpoint / "config.json")
    )
    stages = [json.loads(file.read_text()) for file in args.train]
    size = (args.checkpoint / "model.safetensors").stat().st_size
    (args.checkpoint / "README.md").write_text(render(stages, evaluation, config, size))


if __name__ == "__main__":
    main()
