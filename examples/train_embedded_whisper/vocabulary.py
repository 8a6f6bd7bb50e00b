"""The tokenizer: a byte-level BPE of the grammar's words, with Whisper's special tokens behind it.

text tokens, <|endoftext|>, <|startoftranscript|>, <|en|>, <|translate|>, <|transcribe|>, <|startoflm|>,
<|startofprev|>, <|nospeech|>, <|notimestamps|>, <|0.00|>, <|0.02|>, ..., <|30.00|>
"""

import itertools
import json
from pathlib import Path

from sentences import sentences
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import WhisperTokenizer

NUM_TEXT_TOKENS, NUM_TIMESTAMPS = 1018, 1501
END_ID = NUM_TEXT_TOKENS
START_ID, ENGLISH_ID, TRANSLATE_ID, TRANSCRIBE_ID, LM_ID, PREVIOUS_ID, NO_SPEECH_ID, NO_TIMESTAMPS_ID = range(
    END_ID + 1, END_ID + 9
)
FIRST_TIMESTAMP_ID = NO_TIMESTAMPS_ID + 1
VOCAB_SIZE = FIRST_TIMESTAMP_ID + NUM_TIMESTAMPS

_SPECIAL = [
    "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
    "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip


def train_bpe(seed: int = 0, count: int = 40_000) -> Tokenizer:
    """Merges learned from the grammar's sentences; none has a digit, so that numbers are written digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (" " + sentence.text for sentence in itertools.islice(sentences(f"bpe:{seed}"), count))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_tokenizer(seed: int = 0) -> WhisperTokenizer:
    """The tokenizer as transformers' class, with every special token and timestamp in its vocabulary."""
    bpe = json.loads(train_bpe(seed).to_str())["model"]
    merges = [tuple(pair) for pair in bpe["merges"]]
    tokenizer = WhisperTokenizer(
        vocab=bpe["vocab"], merges=merges, pad_token="<|endoftext|>", extra_special_tokens=_SPECIAL
    )
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(NUM_TIMESTAMPS)])
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == END_ID
    assert tokenizer.convert_tokens_to_ids("<|notimestamps|>") == NO_TIMESTAMPS_ID
    assert tokenizer.convert_tokens_to_ids("<|30.00|>") == VOCAB_SIZE - 1
    return tokenizer


def read_tokenizer(folder: Path) -> WhisperTokenizer:
    """The tokenizer of a checkpoint, as it was saved."""
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # how it was read, which transformers would save with it
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def save_tokenizer(tokenizer: WhisperTokenizer, folder: Path) -> None:
    """Its files, and those of the feature extractor."""
    from transformers import WhisperFeatureExtractor

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)


def generation_config() -> dict[str, object]:
    """What transformers' generation, and the plugin, read of a Whisper checkpoint; alignment heads are measured later.

    English and transcription are preset, since there is nothing else; a first timestamp may be anywhere in the window;
    nothing is suppressed, so that silence can end at once.
    """
    return {
        "decoder_start_token_id": START_ID,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "prev_sot_token_id": PREVIOUS_ID,
        "no_timestamps_token_id": NO_TIMESTAMPS_ID,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH_ID},
        "task_to_id": {"transcribe": TRANSCRIBE_ID, "translate": TRANSLATE_ID},
        "language": "en",
        "task": "transcribe",
        "max_initial_timestamp_index": NUM_TIMESTAMPS - 1,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "return_timestamps": False,
        "max_length": 448,
        "alignment_heads": [],
    }
