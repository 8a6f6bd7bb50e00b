"""Train the model's byte-level BPE tokenizer and write it in transformers' format.

Digits stay single tokens, so that arithmetic sees them; the pre-tokenizer is Qwen2's pattern, because
transformers may rebuild a Qwen tokenizer from its vocabulary and merges alone and must then split alike.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from grammar import END, documents
from stories import make_story
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048
PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, IM_START, IM_END, PAD)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _corpus(seed: int, count: int) -> Iterator[str]:
    """Stories, and documents of every kind: the latter also carry the letter pairs of made-up words."""
    rng = random.Random(seed)
    for document in itertools.islice(documents(seed), count):
        yield "".join(text for text, _ in document)
        yield make_story(rng)[0]


def train_tokenizer(seed: int = 0, count: int = 20_000) -> Tokenizer:
    """The BPE of our own text; a few seconds on one core."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, count), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"the text gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}; raise count"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, its configuration and the chat template, as files that any transformers 5 reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    save_tokenizer(train_tokenizer(), parser.parse_args().folder)
