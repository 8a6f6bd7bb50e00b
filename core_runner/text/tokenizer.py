"""A checkpoint's tokenizer as the runner uses it: prompts in, text out, errors that name the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core_runner.errors import ConfigError, RequestError


class Tokenizer:
    """A transformers tokenizer, `hf`, with the few calls that the runner needs.

    skipped_ids: ids that leave no text when special tokens are skipped.
    """

    def __init__(self, hf: Any, name: str = "") -> None:
        self.hf = hf
        self.name = name or str(getattr(hf, "name_or_path", ""))
        self.skipped_ids = _skipped_ids(hf)
        self._texts: tuple[dict[int, str], dict[int, str]] = ({}, {})

    def __len__(self) -> int:
        """Ids that the tokenizer knows; a model's vocabulary may be padded beyond it."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end id; a checkpoint's generation config may name more."""
        value: int | None = self.hf.eos_token_id
        return value

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self.hf.chat_template)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer puts around it. Raises RequestError."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string or token ids, not {type(text).__name__}: {text!r}")
        try:
            # Quiet: a prompt that is too long is refused by name later.
            return list(self.hf.encode(text, verbose=False))
        except (TypeError, ValueError) as error:
            # Lone surrogates (bytes of a file that were no UTF-8) are what a tokenizer cannot take.
            raise RequestError(f"the prompt {text[:40]!r} cannot be tokenized: {error}") from error

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Ids of a word at the start of a line and after a space, each once, without special tokens.

        Raises RequestError for a word that cannot be encoded or leaves no id.
        """
        texts = (word, f" {word.lstrip()}")
        try:
            encoded = [tuple(self.hf.encode(text, add_special_tokens=False)) for text in texts]
        except (TypeError, ValueError) as error:
            raise RequestError(f"bad_words: {word!r} cannot be tokenized: {error}") from error
        if not all(encoded):
            raise RequestError(f"bad_words: {word!r} has no tokens in the tokenizer of {self.name!r}")
        return list(dict.fromkeys(encoded))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Ids of a conversation: mappings with "role" and "content". `options` go to the template.

        Raises RequestError: no template, or messages that are malformed or refused by the template.
        """
        if not self.has_chat_template:
            raise RequestError(
                f"the tokenizer of {self.name!r} has no chat template; pass the prompt as plain text, or use "
                "a checkpoint that was trained for chat"
            )
        _check_messages(messages)
        # Ids are what the runner takes, whatever form a caller of transformers is used to.
        options = {**options, "tokenize": True, "return_dict": False}
        try:
            ids = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except Exception as error:
            # A template is a program of its own and raises what it likes.
            raise RequestError(f"the chat template of {self.name!r} refuses the messages: {error}") from error
        return list(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids as they stand: spaces before punctuation stay, so that text can stream."""
        text: str = self.hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def decode_one(self, token_id: int, *, skip_special_tokens: bool = False) -> str:
        """`decode([token_id])`, which is remembered: a stream asks for it at nearly every token."""
        texts = self._texts[skip_special_tokens]
        text = texts.get(token_id)
        if text is None:
            text = texts[token_id] = self.decode([token_id], skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's string of one id; None for padding of a model's vocabulary, which has no text."""
        try:
            piece: str | None = self.hf.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, OverflowError):
            return None
        return piece


def load_tokenizer(name_or_dir: str, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a hub name or directory.

    Raises ConfigError where there is none; prompts of token ids need no tokenizer.
    """
    from transformers import AutoTokenizer

    hint = "name one that has a tokenizer (tokenizer=...), or pass prompts as token ids, which need none"
    try:
        hf = AutoTokenizer.from_pretrained(name_or_dir, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Missing files, missing packages and broken files each raise their own kind.
        raise ConfigError(f"no tokenizer could be loaded from {name_or_dir!r} ({error}); {hint}") from error
    # Without vocabulary files transformers may still build one of special tokens alone, which eats any text.
    if len(set(hf.get_vocab()) - set(hf.all_special_tokens)) == 0:
        raise ConfigError(f"{name_or_dir!r} has no tokenizer files with a vocabulary; {hint}")
    return Tokenizer(hf, name_or_dir)


def _skipped_ids(hf: Any) -> frozenset[int]:
    """A fast tokenizer skips every added token that is flagged special, named in a role or not."""
    flagged = {i for i, token in hf.added_tokens_decoder.items() if token.special}
    return frozenset(flagged if hf.is_fast else hf.all_special_ids)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages={messages!r} must be a list of mappings with 'role' and 'content'")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or message.keys() <= {"role", "name"}:
            raise RequestError(f"message {message!r} must be a mapping with 'role' and 'content'")
