"""`ModelRunner`: one step at a time, for any model state. The host never waits for the device in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from core_runner.async_output import AsyncOutput, OutputBuffers
from core_runner.block_tables import BlockTables
from core_runner.cache_sizes import choose_num_blocks
from core_runner.config import RunnerConfig
from core_runner.errors import ConfigError, SchedulerOutputError
from core_runner.graphs import StepGraphs
from core_runner.input_batch import InputPreparer
from core_runner.loader import Progress, load_model_state, use_graphs
from core_runner.prompt_logprobs import PromptScorer, ScoredTokens
from core_runner.request_states import RequestStates
from core_runner.sampling.logit_options import LogitOptions
from core_runner.sampling.sampler import DefaultSampler
from core_runner.sampling.slot_processors import SlotProcessors
from core_runner.sampling.states import SamplerStates
from core_runner.scheduling.output import (
    BlockUpdate,
    GrammarBitmask,
    NewRequest,
    RemovedRequest,
    SchedulerOutput,
)
from core_runner.step_launcher import StepLauncher
from core_runner.structured.step_masks import StepMasks
from model_states import Caches, Component, InputBatch, PluginManager, SamplerOutput, bind
from model_states.kernels.compile_ahead import can_compile_ahead
from model_states.loading import load_generation_config
from model_states.recording import CudaRecorder
from model_states.staged_writer import StagedWriter


class _Pending(NamedTuple):
    """A step between `execute_model` and `sample_tokens`. sampled: what it has sampled, if its graph did that too."""

    batch: InputBatch
    hidden_states: torch.Tensor
    sampled: SamplerOutput | None
    bitmask: GrammarBitmask | None


class ModelRunner:
    """Request slots, input preparation, forward and sampling around one loaded model state.

    Bring your own scheduler: `execute_model(SchedulerOutput)`, then `sample_tokens()`, then, whenever it suits,
    `get_output()` of what that returned. Steps may be queued before the outputs of earlier ones are read.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        plugins: PluginManager | None = None,
        extensions: Sequence[Component] = (),
        progress: Progress | None = None,
    ) -> None:
        """Load the model and allocate every buffer. extensions: hook implementations beside the model state's."""
        self.config = config
        self.model_state = load_model_state(config, plugins or PluginManager(), progress)
        model = self.model_state.config
        self.device, self.max_model_len = model.device, model.max_model_len
        implementations = [self.model_state, *self.model_state.components, *extensions]
        self.hooks = bind(implementations)
        self.cache_groups = self.hooks.cache_groups()
        self._writer = StagedWriter(self.device)
        self.request_states = RequestStates(
            config.max_num_reqs,
            self.max_model_len,
            config.num_draft_tokens,
            self.device,
            poison=config.poison,
            writer=self._writer,
        )
        self.block_tables = BlockTables(
            [(g.block_size, g.sliding_window) for g in self.cache_groups],
            config.max_num_reqs,
            self.max_model_len,
            self.device,
            poison=config.poison,
            writer=self._writer,
        )
        self.inputs = InputPreparer(
            self.request_states, self.block_tables, config.max_num_batched_tokens, self.device, self._writer
        )
        self._build_sampling()
        # What a model state runs beside the steps may wait for them, not they for it.
        records = use_graphs(config, self.model_state)
        recorder = CudaRecorder(self.device, urgent=True) if records else None
        self.graphs = StepGraphs(config.max_num_reqs, config.max_num_batched_tokens, recorder)
        self.launcher = StepLauncher(
            self.model_state, self.hooks, implementations, self.inputs, self.sampler, self.graphs
        )
        max_num_logits = config.max_num_reqs * (config.num_draft_tokens + 1)
        self._outputs = OutputBuffers(self.device, max_num_logits) if self.device.type == "cuda" else None
        self._pending: _Pending | None = None
        self._last_output: AsyncOutput | None = None
        self.hooks.init_caches({g.name: g.allocate(2, self.device) for g in self.cache_groups})
        if self.device.type == "cuda" and self.model_state.compiles_ahead and can_compile_ahead():
            self.launcher.compile_kernels()
        self.num_blocks, self.caches = self._build_caches()
        self.block_tables.num_blocks = self.num_blocks
        if config.record_graphs_at_start and self.graphs.enabled:
            self.launcher.record_decode_graphs(progress)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the changes of a step and run the model on its tokens; `sample_tokens` finishes it.

        Raises `SchedulerOutputError`, before anything is changed, for a step that breaks the runner's rules.
        """
        if self._pending is not None:
            raise SchedulerOutputError("execute_model was called twice; call sample_tokens() after each step")
        self.inputs.validate(scheduler_output)
        self.prompt_scorer.validate(scheduler_output.new_requests)
        self.processors.validate(scheduler_output.new_requests)
        self.step_masks.validate(scheduler_output)
        self._apply_changes(scheduler_output)
        if not scheduler_output.num_reqs:
            self._writer.flush()
            return
        shape, bitmask = self.graphs.shape(scheduler_output), scheduler_output.grammar_bitmask
        if self._last_output is not None:
            self._last_output.release()
        batch = self.launcher.begin(scheduler_output, shape)
        self.hooks.run_encoder(batch)
        samples = bitmask is None and batch.num_logits > 0 and not self.prompt_scorer.has_wishes
        results = self.launcher.run(batch, shape, samples=samples, repeats=scheduler_output.is_repeat)
        self._pending = _Pending(batch, *results, bitmask)

    @torch.inference_mode()
    def sample_tokens(self) -> AsyncOutput | None:
        """Sample the step's finished rows and update their state on the device; None for a step without rows."""
        if self._pending is None:
            return None
        (batch, hidden_states, sampled, bitmask), self._pending = self._pending, None
        scored = None
        if sampled is None:
            # First, so that the memory of its pieces is free again when the sampler wants some.
            scored = self.prompt_scorer.score(batch, hidden_states)
            # Only now: the device has the forward to do while the host fills the masks.
            if bitmask is not None:
                batch.grammar_mask = self.step_masks.to_device(bitmask, batch)
            sampled = self.launcher.sample(batch, hidden_states, batch.num_logits)
            output = self._start_copy(batch, sampled, scored)
            self.launcher.post_update(batch, sampled)
            return output
        return self._start_copy(batch, sampled, None)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget every request, also a step that was begun: for an engine whose step was interrupted."""
        self._pending = None
        held = [slot for slot, req_id in enumerate(self.request_states.req_ids) if req_id is not None]
        self._apply_changes(
            SchedulerOutput.empty(
                len(self.cache_groups), [RemovedRequest(slot, "interrupted") for slot in held]
            )
        )
        self._writer.flush()

    def _start_copy(
        self, batch: InputBatch, sampled: SamplerOutput, scored: ScoredTokens | None
    ) -> AsyncOutput:
        max_sampled = self.config.num_draft_tokens + 1
        self._last_output = AsyncOutput(batch, sampled, max_sampled, self._outputs, scored)
        return self._last_output

    def _apply_changes(self, step: SchedulerOutput) -> None:
        """Removals, then admissions, then block tables; staged on the host, and written by the writer's kernel."""
        for removed in step.removed:
            self._remove_request(removed)
        if step.removed:
            slots = [removed.slot for removed in step.removed]
            self.request_states.clear(slots)
            self.block_tables.remove(*slots)
        self.request_states.fill(step.new_requests)
        for new in step.new_requests:
            self._add_request(new)
        for group, update in enumerate(step.block_updates):
            self.block_tables.stage_update(group, update)
            if self.config.poison:
                self._poison_new_blocks(group, update, step.new_requests)
        self.request_states.apply_staged_writes()
        self.sampler_states.apply_staged_writes()
        self.processors.apply_staged_writes()
        self.block_tables.apply_staged_writes()
        self.hooks.apply_staged_writes()

    def _add_request(self, new: NewRequest) -> None:
        self.sampler_states.add(new.slot, new.sampling_params, new.seed)
        self.processors.add(new)
        self.prompt_scorer.add(new)
        self.hooks.add_request(new.slot, new)

    def _remove_request(self, removed: RemovedRequest) -> None:
        self.hooks.remove_request(removed.slot, removed.reason)
        self.sampler_states.remove(removed.slot)
        self.processors.remove(removed.slot)
        self.prompt_scorer.remove(removed.slot)

    def _build_sampling(self) -> None:
        """What turns hidden states into tokens and log-probabilities, with the options of every slot."""
        config = self.config
        model, vocab_size = self.model_state.config, self.model_state.vocab_size
        self.generation_defaults = load_generation_config(model.checkpoint)
        logit_options = LogitOptions(
            config.max_num_reqs,
            vocab_size,
            self.request_states.history,
            self.generation_defaults.eos_token_ids,
            self.device,
        )
        self.sampler_states = SamplerStates(config.max_num_reqs, self.device, logit_options, self._writer)
        self.processors = SlotProcessors(
            self.hooks.logits_processors(model, vocab_size), config.max_num_reqs, vocab_size, self.device
        )
        self.sampler = self.hooks.custom_sampler(
            DefaultSampler(self.sampler_states, vocab_size, self.processors)
        )
        self.prompt_scorer = PromptScorer(
            self.model_state, config.prompt_logprobs_bytes, config.max_num_batched_tokens
        )
        max_num_logits = config.max_num_reqs * (config.num_draft_tokens + 1)
        self.step_masks = StepMasks(self.request_states, max_num_logits, vocab_size, self.device)

    def _build_caches(self) -> tuple[list[int], Caches]:
        """Size the caches by what a full step leaves free, then allocate them."""
        config, groups = self.config, self.cache_groups
        if self._outputs is None:
            free_bytes = config.cpu_cache_bytes
        else:
            total = torch.cuda.get_device_properties(self.device).total_memory
            max_num_logits = config.max_num_reqs * (config.num_draft_tokens + 1)
            used = self.launcher.peak_bytes(max_num_logits, config.prompt_logprobs_bytes)
            free_bytes = int(total * config.gpu_memory_utilization) - used
        num_blocks = choose_num_blocks(config, groups, self.max_model_len, free_bytes)
        try:
            caches = {g.name: g.allocate(n, self.device) for g, n in zip(groups, num_blocks, strict=True)}
        except RuntimeError as error:  # a GPU that is full, and on a CPU nothing more special
            sizes = ", ".join(
                f"{n} blocks of {g.block_bytes} bytes" for g, n in zip(groups, num_blocks, strict=True)
            )
            raise ConfigError(
                f"caches of {sizes} could not be allocated ({error}); lower num_blocks, block_size or "
                "gpu_memory_utilization"
            ) from error
        self.hooks.init_caches(caches)
        return num_blocks, caches

    def _poison_new_blocks(self, group: int, update: BlockUpdate, admitted: Sequence[NewRequest]) -> None:
        """Debug mode: NaN in every handed-out block that holds no cached prefix, so that a stale read is loud."""
        spec = self.cache_groups[group]
        computed = np.zeros(self.config.max_num_reqs, np.int32)
        for new in admitted:
            computed[new.slot] = new.num_computed_tokens
        run_starts = np.cumsum(update.lengths) - update.lengths
        columns = np.arange(len(update.block_ids)) + np.repeat(update.starts - run_starts, update.lengths)
        fresh = columns * spec.block_size >= np.repeat(computed[update.slots], update.lengths)
        block_ids = torch.from_numpy(update.block_ids[fresh & (update.block_ids > 0)].astype(np.int64))
        for layer in self.caches[spec.name].values():
            for tensor in layer.values():
                poison = torch.nan if tensor.is_floating_point() else -1
                tensor.index_fill_(0, block_ids.to(self.device), poison)
