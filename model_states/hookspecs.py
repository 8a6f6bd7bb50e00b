"""The hooks of the contract. This file is the manual: docs/hooks.md is generated from it.

Cold hooks are implemented by a plugin's module and called once, when plugins are loaded. Hot hooks are
implemented by a model state, its components and extensions, one set of instances per loaded model; they are
bound to plain calls at load (`model_states.binding`), in the order state, components, extensions.

An implementation is a plain method marked with `hookimpl`, named like the hook. It may leave out arguments it
does not need; it has no default values, no `*args` and no arguments that the spec has not.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from model_states.cold_hooks import ColdHooks
from model_states.hook_markers import API_VERSION, PROJECT_NAME, SUPPORTED_API_VERSIONS, hookimpl, hookspec

if TYPE_CHECKING:
    import torch

    from model_states.batch import InputBatch, RemoveReason, RequestInputs, RequestView
    from model_states.cache import CacheGroup, Caches
    from model_states.config import ModelConfig
    from model_states.logits_processor import LogitsProcessor
    from model_states.sampler import Sampler

__all__ = [
    "API_VERSION",
    "PROJECT_NAME",
    "SUPPORTED_API_VERSIONS",
    "ColdHooks",
    "HotHooks",
    "hookimpl",
    "hookspec",
]


class HotHooks:
    """Hooks of one loaded model."""

    @hookspec
    def cache_groups(self) -> list[CacheGroup]:
        """Say which caches the runner has to allocate.

        Called once at load, before `init_caches`; never during capture.

        :returns: the groups of this implementation; the lists of all are concatenated in call order, and a group's
            index in `InputBatch.block_tables` is its place there. None counts as an empty list.

        Must not allocate the caches itself. Group names are unique within a model.

        .. versionadded:: 0.1
        """

    @hookspec
    def init_caches(self, caches: Caches) -> None:
        """Take the caches that were allocated.

        Called at load, after `cache_groups` and before any forward; never during capture. It is called twice: with
        caches of a few blocks to measure memory, then with the real ones, which replace them.

        :param caches: group name -> layer name -> tensor name -> tensor [num_blocks, *block_shape] of the dtype that
            the group asked for, zeroed; block 0 is the null block.
        :returns: nothing.

        Must not copy or resize the tensors: graphs hold their addresses.

        .. versionadded:: 0.1
        """

    @hookspec
    def input_keys(self, request: RequestInputs) -> Mapping[str, bytes]:
        """Check what a request brings beside tokens, and name its content.

        Called once for each request that comes, before it waits; never during capture.

        :param request: it has no slot yet, and no `input_keys`.
        :returns: a name of the implementation's own -> bytes that requests have in common only if what it reads of
            their model inputs is the same; merged. Requests share prefix blocks by tokens and keys. None adds nothing.

        Must raise `ValueError`, saying how to fix it, for inputs that cannot be served, and must change nothing.

        .. versionadded:: 0.1
        """

    @hookspec
    def reserve(self, request: RequestInputs) -> Mapping[str, str]:
        """Set aside what an admission takes beside slot and blocks, or say what is short.

        Called when all else allows the admission, which then follows in the step being built; never during capture.

        :param request: the next one that waits; if anything is short, it is asked about again in the next step.
        :returns: what is short -> why, in words; merged. None, or an empty mapping, lets the request in.

        Must forget what it set aside in `apply_staged_writes`: others may be short. What removed requests held counts
        as taken until `remove_request`.

        .. versionadded:: 0.1
        """

    @hookspec
    def expect_requests(self, requests: Sequence[RequestInputs]) -> None:
        """Get ready for requests that wait, beside the rows that run.

        Called after the admissions of a step, unless it repeats the one before it; never during capture.

        :param requests: those that wait, or some, nearly in the order of admission; replaces what was told before.
        :returns: nothing.

        Must hold nothing for them that an admission could not have, and must not wait for the device.

        .. versionadded:: 0.1
        """

    @hookspec
    def add_request(self, slot: int, request: RequestView) -> None:
        """Set up what is kept for a request in its slot.

        Called at every admission, before the step that first schedules it; a resume after preemption is an admission
        too (`prefill_len > prompt_len`, or a new slot with the same `req_id`). Never during capture.

        :param slot: the request's row, in [0, max_num_reqs); its own until `remove_request`.
        :param request: prompt, prefill tokens, prefix hit and model inputs; read it here, it is not kept alive.
        :returns: nothing.

        Must write every field of the slot, which is reused, and must not wait: stage for `apply_staged_writes`.

        .. versionadded:: 0.1
        """

    @hookspec
    def remove_request(self, slot: int, reason: RemoveReason) -> None:
        """Let go of what is kept for a request.

        Called when a request leaves its slot, before any further admission. Never during capture.

        :param slot: the slot that `add_request` was given.
        :param reason: "finished", "aborted", "preempted" (it comes back), or "interrupted" (a step failed).
        :returns: nothing.

        Must not free device memory that a step in flight may still use, and must not wait for the device.

        .. versionadded:: 0.1
        """

    @hookspec
    def apply_staged_writes(self) -> None:
        """Send staged host-side differences to the device.

        Called once a step, between admissions and the preparation of its inputs. Never during capture.

        :returns: nothing.

        Must launch nothing when nothing is dirty, and must not wait for the device.

        .. versionadded:: 0.1
        """

    @hookspec
    def run_encoder(self, batch: InputBatch) -> None:
        """Run the encoder of requests that need it in this step.

        Called every step, also one that is replayed, first of the hooks that take the batch; never during capture (an
        encoder has graphs of its own, if any).

        :param batch: this step; rows whose `num_computed_tokens_np` is 0 are at their first token. Its ids, positions,
            lengths and tables are not on the device yet: what the host knows (`_np`) and the slots are.
        :returns: nothing; results go to the implementation's own buffers or caches.

        Must return at once when no row needs it, and must not wait for the device.

        .. versionadded:: 0.1
        """

    @hookspec
    def preprocess_state(self, batch: InputBatch) -> None:
        """Prepare state for the tokens of this step.

        Called every step after `run_encoder`, and during capture. A step that is replayed from a graph of all of it
        launches what was recorded and calls nothing (see `Component.records_step`); so too for the hooks below.

        :param batch: this step in batch rows; tensors as `InputBatch` describes them.
        :returns: nothing.

        Must not synchronise with the host, nor allocate during replay: what a graph records is launches on persistent
        buffers. Padding rows point at the null slot and may be written there only.

        .. versionadded:: 0.1
        """

    @hookspec
    def prepare_attn(self, batch: InputBatch) -> None:
        """Build attention metadata for the layers of this implementation.

        Called every step after `preprocess_state`, when memory is measured, and during capture.

        :param batch: this step; `block_tables` and `slot_mappings` hold one entry per cache group.
        :returns: nothing.

        Must not synchronise with the host, nor allocate during replay.

        .. versionadded:: 0.1
        """

    @hookspec
    def prepare_inputs(self, batch: InputBatch) -> Mapping[str, torch.Tensor]:
        """Give keyword arguments of the forward beside the batch.

        Called every step after `prepare_attn`, and during capture.

        :param batch: this step.
        :returns: argument name -> tensor, token tensors [num_tokens_padded, ...] in views of persistent buffers. All
            mappings are merged; one name from two implementations is a `PluginHookError`. None adds nothing.

        Must not synchronise with the host, nor allocate during replay. "batch" is not a free name.

        .. versionadded:: 0.1
        """

    @hookspec
    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> Mapping[str, torch.Tensor]:
        """Give the same keyword arguments as `prepare_inputs`, for a batch that is all padding.

        Called at load for memory profiling and before a capture, outside the capture itself.

        :param num_reqs: rows of the dummy batch, at most max_num_reqs.
        :param num_tokens: its tokens, at most max_num_batched_tokens.
        :returns: argument name -> tensor, merged like `prepare_inputs`: the same names, the same persistent buffers,
            since a graph holds their addresses. None adds nothing.

        Must not change the state of any slot.

        .. versionadded:: 0.1
        """

    @hookspec
    def after_forward(self, batch: InputBatch, hidden_states: torch.Tensor) -> None:
        """Look at, or keep, the forward's result.

        Called every step between the forward and the logits, and during capture.

        :param batch: this step.
        :param hidden_states: [num_tokens_padded, hidden_size] in the model's dtype; padding behind `num_tokens`.
        :returns: nothing.

        Must not synchronise with the host, nor allocate during replay.

        .. versionadded:: 0.1
        """

    @hookspec
    def postprocess_state(
        self, batch: InputBatch, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Bring state to the tokens that count, once the step has sampled.

        Called every step after sampling and before drafts are proposed, and during capture where a graph holds both.

        :param batch: this step.
        :param num_sampled: int32 [num_reqs_padded] on the device; 0 for a chunk that is not the last one.
        :param num_rejected: int32 [num_reqs_padded] on the device; drafts of the row that were not accepted: their
            tokens were computed in this step and must leave the state.
        :returns: nothing.

        Must not synchronise with the host, nor allocate during replay.

        .. versionadded:: 0.1
        """

    @hookspec
    def custom_sampler(self, sampler: Sampler) -> Sampler | None:
        """Wrap or replace the sampler.

        Called once at load, before `init_caches`, in order: each is given what the one before it made.

        :param sampler: the sampler so far (see `model_states.sampler.Sampler` for its rules).
        :returns: the sampler to use from here on; None keeps the one that was given.

        Must not sample here. A wrapper (`hookimpl(wrapper=True)`) is refused on this hook.

        .. versionadded:: 0.1
        """

    @hookspec
    def logits_processors(self, config: ModelConfig, vocab_size: int) -> list[LogitsProcessor]:
        """Bring processors that requests may ask for by name.

        Called once at load, before `custom_sampler`; never during capture.

        :param config: sizes and device of the loaded model; slots are below `max_num_reqs`.
        :param vocab_size: columns of the logits that a processor is given.
        :returns: processors with names of their own (see `LogitsProcessor`), concatenated. None is an empty list.

        Must not return one object twice. What a processor allocates here stays for as long as the model does.

        .. versionadded:: 0.1
        """
