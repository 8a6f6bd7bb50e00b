"""`WhisperTokens`: the special tokens of a checkpoint, and the decoder prompts that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from model_states import CheckpointConfig, CheckpointError
from model_states.loading import load_checkpoint_config
from model_states.loading.hub import find_file, read_json

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    """Token ids that the generation config names.

    language_ids: "en" -> id of "<|en|>", empty for an English-only model. task_ids: "transcribe" and "translate".
    forced_ids: what follows the start token where the files say it in the old way, None for "detect it".
    suppressed_ids: never sampled by `TranscriptionRules`; first_suppressed_ids: not as the first token.
    max_initial_timestamp: steps of 0.02 s that the first timestamp may be, None for any.
    """

    start_id: int
    end_id: int
    no_timestamps_id: int | None
    previous_id: int | None
    language_ids: Mapping[str, int]
    task_ids: Mapping[str, int]
    forced_ids: tuple[int | None, ...]
    suppressed_ids: tuple[int, ...]
    first_suppressed_ids: tuple[int, ...]
    max_initial_timestamp: int | None
    max_target_positions: int

    @classmethod
    def load(cls, model: str | CheckpointConfig) -> WhisperTokens:
        """Read them from generation_config.json, and from config.json what that does not say.

        As in transformers, a generation config that suppresses nothing is taken at its word.
        """
        checkpoint = load_checkpoint_config(model) if isinstance(model, str) else model
        path = find_file(checkpoint.model, "generation_config.json")
        raw: dict[str, Any] = dict(checkpoint.raw_config)
        if path is not None:
            raw = {**raw, "suppress_tokens": None, "begin_suppress_tokens": None, **read_json(path)}
        no_timestamps = raw.get("no_timestamps_token_id")
        # The order of these three is the same in every checkpoint: previous text, no speech, no timestamps.
        previous = raw.get("prev_sot_token_id", None if no_timestamps is None else no_timestamps - 2)
        try:
            return cls(
                start_id=int(raw["decoder_start_token_id"]),
                end_id=_first(raw["eos_token_id"]),
                no_timestamps_id=no_timestamps,
                previous_id=previous,
                language_ids={name.strip("<|>"): i for name, i in (raw.get("lang_to_id") or {}).items()},
                task_ids=dict(raw.get("task_to_id") or {}),
                forced_ids=_forced(raw.get("forced_decoder_ids") or ()),
                suppressed_ids=tuple(raw.get("suppress_tokens") or ()),
                first_suppressed_ids=tuple(raw.get("begin_suppress_tokens") or ()),
                max_initial_timestamp=raw.get("max_initial_timestamp_index"),
                max_target_positions=int(raw.get("max_target_positions", 448)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"model {checkpoint.model!r}: generation_config.json and config.json lack or garble {error}; "
                "download the checkpoint again"
            ) from error

    @property
    def first_timestamp_id(self) -> int | None:
        """Id of 0.00 s; the ones after it are 0.02 s apart. What a tokenizer's file says of it may be wrong."""
        return None if self.no_timestamps_id is None else self.no_timestamps_id + 1

    @property
    def max_previous(self) -> int:
        """Most tokens of previous text in a prompt."""
        return self.max_target_positions // 2 - 1

    @property
    def no_speech_id(self) -> int | None:
        """Id of "no speech", the one before that of "no timestamps" in every checkpoint."""
        return None if self.no_timestamps_id is None else self.no_timestamps_id - 1

    def prompt(
        self,
        *,
        language: str | None = None,
        task: Task | None = None,
        timestamps: bool = False,
        previous: Sequence[int] = (),
    ) -> list[int]:
        """Decoder prompt of a transcription.

        language: code or English name; None takes what the files force, and is an error where that is to be detected
        (see `detection_prompt`). previous: tokens of the text before, of which the last ones that fit half the
        positions are taken. Raises `ValueError` for what the model does not have.
        """
        ids = [self.start_id]
        if language is not None or task is not None:
            ids += self._language_and_task(language, task or "transcribe")
        else:
            if None in self.forced_ids or (self.language_ids and not self.forced_ids):
                raise ValueError(
                    "language is to be detected: sample one token after detection_prompt() and give it"
                )
            ids += [token for token in self.forced_ids if token not in (None, self.no_timestamps_id)]
        if not timestamps and self.no_timestamps_id is not None:
            ids.append(self.no_timestamps_id)
        if not previous:
            return ids
        if self.previous_id is None:
            raise ValueError("this model has no token for previous text; leave `previous` out")
        return [self.previous_id, *previous[-self.max_previous :], *ids]

    def detection_prompt(self) -> tuple[list[int], dict[str, Any]]:
        """Prompt and sampling parameters of the one step that finds the language; see `language_of`."""
        if not self.language_ids:
            raise ValueError("this model knows one language, so there is nothing to detect")
        allowed = sorted(self.language_ids.values())
        options = {"temperature": 0.0, "max_tokens": 1, "allowed_token_ids": allowed}
        return [self.start_id], options

    def language_of(self, token_id: int) -> str:
        """Code of the language that a token names."""
        for code, language_id in self.language_ids.items():
            if language_id == token_id:
                return code
        raise ValueError(f"token {token_id} names no language")

    def _language_and_task(self, language: str | None, task: str) -> list[int]:
        if not self.language_ids:
            is_english = language is None or language.lower() in ("en", "english")
            if task != "transcribe" or not is_english:
                raise ValueError(f"language={language!r}, task={task!r}: this model transcribes English only")
            return []
        if task not in self.task_ids:
            raise ValueError(f"task={task!r} is not one of {', '.join(map(repr, self.task_ids))}")
        if language is None:
            raise ValueError(f"task={task!r} needs a language; give one, or detect it first")
        return [self._language_id(language), self.task_ids[task]]

    def _language_id(self, language: str) -> int:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        wanted = language.lower()
        code = wanted if wanted in self.language_ids else TO_LANGUAGE_CODE.get(wanted, wanted)
        if code not in self.language_ids:
            known = ", ".join(sorted(self.language_ids))
            raise ValueError(f"language={language!r} is not one of this model's: {known}")
        return self.language_ids[code]


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


def _forced(pairs: Sequence[Sequence[Any]]) -> tuple[int | None, ...]:
    """Ids of positions 1, 2, ... out of [position, id] pairs."""
    positions = [position for position, _ in pairs]
    if positions != list(range(1, len(positions) + 1)):
        raise ValueError(f"forced_decoder_ids, which names positions {positions}")
    return tuple(token for _, token in pairs)
