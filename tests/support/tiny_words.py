"""A tiny random Whisper whose tokens are laid out as Whisper's are, and its tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.encoder_decoder import NUM_FRAMES, save_speech_model

# Text below the end token, then the special tokens, then the timestamps.
END, START, ENGLISH, JAPANESE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(170, 179)
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
PROMPT = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
GENERATION: dict[str, Any] = {
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "lang_to_id": {"<|en|>": ENGLISH, "<|ja|>": JAPANESE},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "prev_sot_token_id": PREVIOUS,
    "is_multilingual": True,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
    "max_initial_timestamp_index": NUM_FRAMES // 2,
}
ALIGNMENT_HEADS = [[0, 1], [1, 0], [1, 3]]


def save_word_model(directory: Path, **generation: Any) -> Any:
    """As `save_speech_model`, with these ids."""
    return save_speech_model(directory, **{**GENERATION, "alignment_heads": ALIGNMENT_HEADS, **generation})


def make_tokenizer() -> Any:
    """Bytes, and a few pieces of several: spaces begin words, as in every tokenizer of this kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("\u0120", "c"), ("a", "t"), ("\u0120c", "at")]
    # What English is made of comes first, below the end token.
    pieces = ["\u0120", *map("".join, merges), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
