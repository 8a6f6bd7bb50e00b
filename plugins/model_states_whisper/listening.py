"""`Listener`: how strongly each token of a known text attends to each position of its audio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from model_states import CheckpointConfig, CheckpointError
from model_states.loading.hub import find_file, read_json
from model_states.staged import HostToDevice

if TYPE_CHECKING:
    from model_states_whisper.state import WhisperState

_BATCH: Final = 16
_WEIGHTS_BYTES: Final = 512 << 20  # of the attention of one batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A text and its audio: prompt and text as token ids, inputs of the encoder, its positions that hold audio."""

    prompt: Sequence[int]
    text: Sequence[int]
    model_inputs: Mapping[str, Any]
    num_positions: int


class Listening(NamedTuple):
    """What the decoder did with a text of n tokens after a prompt of p.

    weights: float32 [heads, p + n + 1, num_positions] on the device, how token i attends when it predicts token i + 1;
    the last is the end token's, which is left out where it is past the last position of the decoder. probabilities:
    float32 [n] on the device, of each token of the text among all text tokens.
    """

    weights: torch.Tensor
    probabilities: torch.Tensor


class Listener:
    """Runs the decoder over known text, several at a time.

    Encoder outputs that the model still keeps are used; the others are computed again. To be called between the steps
    of the engine, by whoever makes them: in another thread a step might give an entry away that is being read. The
    host never waits for the device in here.
    """

    def __init__(self, state: WhisperState) -> None:
        """Raises `CheckpointError` where the checkpoint names attention heads that it does not have."""
        self._state = state
        layers = state.decoder.layers
        heads = load_alignment_heads(state.config.checkpoint, len(layers), layers[0].spec.num_heads)
        self._heads = [[head for at, head in heads if at == layer] for layer in range(len(layers))]
        self._num_heads = len(heads)
        self._device = state.config.device
        self._transfer = HostToDevice(self._device)

    @torch.inference_mode()
    def listen(self, texts: Sequence[Spoken]) -> Iterator[Listening]:
        """What comes of each, in order."""
        longest = max((len(one.prompt) + len(one.text) + 1 for one in texts), default=1)
        row_bytes = 4 * self._num_heads * self._state.encoder.max_positions
        size = min(max(_WEIGHTS_BYTES // (row_bytes * longest), 1), _BATCH)
        for first in range(0, len(texts), size):
            yield from self._listen(texts[first : first + size])

    def _listen(self, texts: Sequence[Spoken]) -> list[Listening]:
        state = self._state
        limit, end = state.tokens.max_target_positions, state.tokens.end_id
        rows = [[*one.prompt, *one.text, end][:limit] for one in texts]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        flat = self._to_device(ids.reshape(-1))
        positions = torch.arange(ids.shape[1], device=flat.device).repeat(len(rows))
        x, source, seen = state.embed(flat, positions), self._find_audio(texts), []
        for index, (layer, heads) in enumerate(zip(state.decoder.layers, self._heads, strict=True)):
            dense = _DenseAttention(len(rows), layer.spec.scale, *source.keys_and_values(index), heads)
            x = layer.run(x, dense.attend, dense.attend_across)
            if dense.scores is not None:
                seen.append(dense.scores)
        scores = torch.cat(seen, 1)
        hidden_states = state.norm(x).unflatten(0, ids.shape)
        return [
            Listening(
                scores[i, :, : len(row), : one.num_positions].softmax(-1), self._score(hidden_states[i], one)
            )
            for i, (row, one) in enumerate(zip(rows, texts, strict=True))
        ]

    def _find_audio(self, texts: Sequence[Spoken]) -> _Source:
        state = self._state
        entries = [state.cross_attention.find(one.model_inputs) for one in texts]
        missing = [row for row, entry in enumerate(entries) if entry is None]
        # Entry 0, which is nobody's, stands for what is computed.
        places = self._to_device(np.array([entry or 0 for entry in entries]))
        if not missing:
            return _Source(state, places)
        hidden_states = state.encoder.forward(
            state.encoder.stage([texts[row].model_inputs for row in missing])
        )
        return _Source(state, places, self._to_device(np.array(missing)), hidden_states)

    def _to_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        out = torch.empty(len(values), dtype=torch.int64, device=self._device)
        self._transfer.copy(values, out)
        return out

    def _score(self, hidden_states: torch.Tensor, one: Spoken) -> torch.Tensor:
        """Probabilities of the text's tokens, each predicted by the token before it."""
        first, end = len(one.prompt) - 1, self._state.tokens.end_id
        logits = self._state.compute_logits(hidden_states[first : first + len(one.text)])
        chosen = self._to_device(np.array(one.text))[:, None]
        return logits[:, :end].float().softmax(-1).gather(1, chosen)[:, 0]


class _Source:
    """Keys and values of the texts' audio: out of the pool, but for rows `missing`, whose hidden states there are."""

    def __init__(
        self,
        state: WhisperState,
        entries: torch.Tensor,
        missing: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> None:
        self._state, self._entries, self._missing, self._hidden_states = (
            state,
            entries,
            missing,
            hidden_states,
        )

    def keys_and_values(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of layer `index`, each [n, num_heads, positions, head_size]."""
        both = self._state.cross_attention.kept.keys_and_values(index, self._entries)
        if self._missing is not None and self._hidden_states is not None:
            computed = self._state.decoder.layers[index].project(self._hidden_states)
            for kept, new in zip(both, computed, strict=True):
                kept.index_copy_(0, self._missing, new.transpose(1, 2))
        return both[0], both[1]


class _DenseAttention:
    """Attention of one layer over texts of one padded length; a token sees those before it and all of its audio.

    scores: of `heads` over the audio before the softmax, fp32 [n, heads, tokens, positions], once the layer has run;
    None where there are none.
    """

    def __init__(
        self,
        num_texts: int,
        scale: float | None,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: Sequence[int],
    ) -> None:
        self._num_texts, self._scale, self._key, self._value, self._heads = (
            num_texts,
            scale,
            key,
            value,
            heads,
        )
        self.scores: torch.Tensor | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `CrossDecoderLayer.run`."""
        q, k, v = map(self._by_head, (query, key, value))
        return self._flat(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale))

    def attend_across(self, query: torch.Tensor) -> torch.Tensor:
        """See `CrossDecoderLayer.run`."""
        q, scale = self._by_head(query), self._scale
        if self._heads:
            chosen, keys = (torch.stack([x[:, head] for head in self._heads], 1) for x in (q, self._key))
            self.scores = (chosen.float() * (scale or 1.0)) @ keys.float().mT
        return self._flat(functional.scaled_dot_product_attention(q, self._key, self._value, scale=scale))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[num_texts * tokens, heads, size] as [num_texts, heads, tokens, size]."""
        return x.view(self._num_texts, -1, *x.shape[1:]).transpose(1, 2)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(0, 1)


def load_alignment_heads(
    checkpoint: CheckpointConfig, num_layers: int, num_heads: int
) -> list[tuple[int, int]]:
    """(layer, head) of those that follow the audio; where generation_config.json names none, the later half of all.

    Raises `CheckpointError` for heads that the model does not have.
    """
    path = find_file(checkpoint.model, "generation_config.json")
    given = read_json(path).get("alignment_heads") if path else None
    if given is None or given == []:
        return [(layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads)]
    try:
        heads = [(int(layer), int(head)) for layer, head in given]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: alignment_heads={given!r} must be pairs of layer and head") from error
    wrong = [pair for pair in heads if not (0 <= pair[0] < num_layers and 0 <= pair[1] < num_heads)]
    if wrong:
        raise CheckpointError(
            f"{path}: alignment_heads names {wrong}, and the decoder has {num_layers} layers of {num_heads} "
            "heads; take out the entry to have the later half of them used"
        )
    return heads
