"""Tokenizers built in code: byte-level BPE, and two with a marker for spaces and a fallback to raw bytes."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the cat sat on the mat. naïve café — שלום 你好 👩🏽 and 'quotes' , then\nlines\t  with  spaces"
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return _wrap(tokenizer)


def byte_fallback():
    letters = sorted(set("thecasonmdiwlfqu.,'\n") | {"▁"})
    pieces = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], *letters, ""]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("c", "a"), ("▁", "ca"), ("▁ca", "t"), ("a", "t")]
    vocab = {piece: i for i, piece in enumerate(pieces + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer)


def metaspace():
    pieces = [
        "<unk>",
        "▁",
        "▁the",
        "▁cat",
        "▁sat",
        "s",
        ".",
        ",",
        "a",
        "t",
        "é",
        "你",
        "好",
        "",
    ]  # the empty piece leaves no text
    tokenizer = Tokenizer(models.Unigram([(p, -1.0 - len(p) * 0.1) for p in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrap(tokenizer)


def _wrap(tokenizer):
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<x>")]
    )
    # "<x>" is flagged special but has no role, as chat markers often are.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )


def single_bytes(hf, text):
    """Ids of `text`, one per byte."""
    names = _byte_names(hf)
    return [hf.convert_tokens_to_ids(names[b]) for b in text.encode()]


def _byte_names(hf):
    if hf.convert_tokens_to_ids("<0x41>") not in (None, hf.unk_token_id):
        return [f"<0x{b:02X}>" for b in range(256)]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
