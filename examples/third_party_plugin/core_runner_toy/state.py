"""`ToyState`: a recurrence over a request's tokens, one number of state per request."""

from __future__ import annotations

from typing import ClassVar

import torch

from core_runner_toy.checkpoint import FACTOR, LAG
from core_runner_toy.history import TokenHistory
from model_states import InputBatch, ModelConfig, ModelState, RequestView, hookimpl
from model_states.staged import StagedTensor


class ToyState(ModelState):
    """Next token = (running state + the token `LAG` before) mod vocabulary; the formula is in the README."""

    name: ClassVar[str] = "toy"
    api_version: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ("ToyForCausalLM",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"chunked_prefill"})

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.vocab_size = int(config.checkpoint.raw_config["vocab_size"])
        self.components = [TokenHistory(config, LAG)]
        # One row per slot, and the null slot's row for padding.
        self.running = StagedTensor([config.max_num_reqs + 1], torch.int64, config.device)
        self.after_step = self.running.tensor[:0]

    @hookimpl
    def add_request(self, slot: int, request: RequestView) -> None:
        """Start at the length of the user's prompt, also when a preempted request comes back longer."""
        self.running.stage(slot, 0, request.prompt_len % self.vocab_size)

    @hookimpl
    def apply_staged_writes(self) -> None:
        """Send new starts to the device, if there are any."""
        self.running.apply()

    @hookimpl
    def postprocess_state(self, batch: InputBatch) -> None:
        """Move each request on to where its last token of this step left it."""
        self.running.tensor[batch.idx_mapping] = self.after_step

    def forward(self, batch: InputBatch, **inputs: torch.Tensor) -> torch.Tensor:
        """The next id of every token as a hidden state [num_tokens_padded, 1]."""
        num_tokens = len(batch.input_ids)
        lengths = batch.query_start_loc.diff()
        running = self.running.tensor[batch.idx_mapping]
        # One row more than there are tokens: rows that have no j-th token write there.
        at_token = running.new_zeros(num_tokens + 1)
        for j in range(batch.max_query_len):
            active = j < lengths
            token = torch.where(active, batch.query_start_loc[:-1] + j, num_tokens)
            ids = batch.input_ids[token.clamp(max=num_tokens - 1)]
            running = torch.where(active, (FACTOR * running + ids) % self.vocab_size, running)
            at_token[token] = running
        self.after_step = running
        return ((at_token[:num_tokens] + inputs["lagged"]) % self.vocab_size).float().unsqueeze(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] that peak at the hidden state's id."""
        ids = torch.arange(self.vocab_size, device=hidden_states.device)
        return -((hidden_states - ids) ** 2)
