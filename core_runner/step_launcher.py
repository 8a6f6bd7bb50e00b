"""`StepLauncher`: what one step launches on the device, eagerly or out of graphs; and steps of padding alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core_runner.graphs import StepGraphs, StepShape
from core_runner.input_batch import InputPreparer
from core_runner.loader import Progress
from core_runner.sampling.sampler import DefaultSampler
from core_runner.scheduling.output import SchedulerOutput
from model_states import InputBatch, ModelState, SamplerOutput
from model_states.binding import Hooks
from model_states.interface import Component, may_record_step
from model_states.kernels.compile_ahead import compiling_ahead
from model_states.sampler import GraphSampler, Sampler


class StepLauncher:
    """Preparation, forward, sampling and post-update of one loaded model.

    implementations: everything that `hooks` are bound to. Where all of them may be recorded, and the sampler too, one
    graph holds the whole step; else a graph holds the model's forward.
    """

    def __init__(
        self,
        model_state: ModelState,
        hooks: Hooks,
        implementations: Sequence[Component],
        inputs: InputPreparer,
        sampler: Sampler,
        graphs: StepGraphs,
    ) -> None:
        self._model_state, self._hooks = model_state, hooks
        self._inputs, self._sampler, self._graphs = inputs, sampler, graphs
        self._graph_sampler = sampler if isinstance(sampler, GraphSampler) else None
        self._records_hooks = all(map(may_record_step, implementations))
        self._last_variant: str | None = None
        self._max_model_len = model_state.config.max_model_len
        self._num_rejected = torch.zeros(
            inputs.max_num_reqs, dtype=torch.int32, device=model_state.config.device
        )

    def begin(self, step: SchedulerOutput, shape: StepShape | None) -> InputBatch:
        """The step's batch, padded to `shape`; its host part is on the way to the device, and nothing is launched."""
        if shape is None:
            return self._inputs.begin(step)
        batch = self._inputs.begin(step, shape.num_tokens, shape.num_reqs)
        # A graph's launches are sized once, for any lengths.
        batch.max_query_len, batch.max_seq_len = shape.max_query_len, self._max_model_len
        return batch

    def run(
        self, batch: InputBatch, shape: StepShape | None, *, samples: bool, repeats: bool = False
    ) -> tuple[torch.Tensor, SamplerOutput | None]:
        """Hidden states of the step, and what it sampled, where one graph could hold all of it.

        samples: whether the graph may sample, as nothing has to happen between forward and sampling. Where it has
        not, `sample` and `post_update` are still to be called. repeats: the rows are those of the last run.
        """
        variant = None
        if samples and shape is not None:
            # A plugin's sampler may look at more than rows.
            known = self._last_variant if repeats and type(self._sampler) is DefaultSampler else None
            variant = known or self._variant(batch)
        self._last_variant = variant
        if shape is None or variant is None or self._graphs.is_refused("step", shape, variant):
            return self._forward(batch, shape), None
        batch.sampling_variant = variant
        return self._graphs.run("step", shape, variant, lambda: self._whole_step(batch))

    def sample(self, batch: InputBatch, hidden_states: torch.Tensor, num_logits: int) -> SamplerOutput:
        """Ids of the first `num_logits` rows of logits."""
        logits = self._model_state.compute_logits(hidden_states[batch.logits_indices[:num_logits]])
        return self._sampler.sample(logits, batch)

    def post_update(self, batch: InputBatch, sampled: SamplerOutput) -> None:
        """Carry what was sampled into the slots and the model's state."""
        num_sampled, num_rejected = batch.cu_num_logits.diff(), self._num_rejected[: len(batch.idx_mapping)]
        self._inputs.post_update(batch, sampled.token_ids, num_sampled, num_rejected)
        self._hooks.postprocess_state(batch, num_sampled, num_rejected)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Have the kernels of steps of several sizes compiled side by side; whatever the steps write is garbage."""
        if self._graph_sampler is None or not self._records_hooks:
            return
        graphs = self._graphs
        # Few rows go through kernels that are cut for their number; a prefill's cut depends on its longest query.
        shapes = [*map(graphs.decode_shape, graphs.decode_rows), *graphs.full_shapes()]
        with compiling_ahead() as compiler:
            for number, shape in enumerate([shapes[-1], *shapes[:-1]]):
                # Where the kernels of the first two have been kept, so have the others': launches will find them.
                if number == 2 and not compiler.is_cold:
                    break
                batch = self._padding(shape)
                hidden_states = self._forward(batch, None)
                for variant in self._graph_sampler.graph_variants:
                    batch.sampling_variant = variant
                    sampled = self.sample(batch, hidden_states, len(batch.logits_indices))
                    self.post_update(batch, sampled)

    @torch.inference_mode()
    def record_decode_graphs(self, progress: Progress | None) -> None:
        """Record a graph for every size of a decode step, the largest first: its memory serves the others."""
        sizes = self._graphs.decode_rows[::-1]
        for done, num_rows in enumerate(sizes, start=1):
            shape = self._graphs.decode_shape(num_rows)
            self.run(self._padding(shape), shape, samples=True)
            if progress is not None:
                progress("graphs", done, len(sizes))

    @torch.inference_mode()
    def peak_bytes(self, max_num_logits: int, scoring_bytes: int) -> int:
        """Device memory in use, by anybody, at the height of the largest step.

        max_num_logits: most rows of logits of a step. scoring_bytes: what scoring prompts may take.
        """
        device, max_num_reqs = self._model_state.config.device, self._inputs.max_num_reqs
        max_num_tokens = self._inputs.max_num_tokens
        torch.cuda.reset_peak_memory_stats(device)
        batch = self._padding(StepShape(max_num_tokens, max_num_reqs, 0))
        self._inputs.fill(batch)
        self._hooks.prepare_attn(batch)
        inputs = self._hooks.prepare_dummy_inputs(max_num_reqs, max_num_tokens)
        hidden_states = self._model_state.forward(batch, **inputs)
        logits = self._model_state.compute_logits(hidden_states[:max_num_logits])
        # The sampler works on an fp32 copy or two of the logits; prompts are scored before it.
        sampler_bytes = max(2 * 4 * logits.numel(), scoring_bytes)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        return others + torch.cuda.max_memory_allocated(device) + sampler_bytes

    def _padding(self, shape: StepShape) -> InputBatch:
        """A batch that has no request, and changes nobody's state."""
        return self.begin(SchedulerOutput.empty(self._inputs.num_groups), shape)

    def _variant(self, batch: InputBatch) -> str | None:
        """Which launches the batch's sampling makes; None where it must follow the forward eagerly."""
        if self._graph_sampler is None or not self._records_hooks:
            return None
        return self._graph_sampler.graph_variant(batch)

    def _whole_step(self, batch: InputBatch) -> tuple[torch.Tensor, SamplerOutput]:
        """Everything between two steps' host work; launches that depend on the batch's sizes alone."""
        hidden_states = self._forward(batch, None)
        sampled = self.sample(batch, hidden_states, len(batch.logits_indices))
        self.post_update(batch, sampled)
        return hidden_states, sampled

    def _forward(self, batch: InputBatch, shape: StepShape | None) -> torch.Tensor:
        """Hidden states of the step, the model's part as a graph where a shape is given."""
        hooks = self._hooks
        self._inputs.fill(batch)
        hooks.preprocess_state(batch)
        hooks.prepare_attn(batch)
        inputs = hooks.prepare_inputs(batch)
        if shape is None:
            hidden_states = self._model_state.forward(batch, **inputs)
        else:
            hidden_states = self._graphs.run(
                "forward", shape, "", lambda: self._model_state.forward(batch, **inputs)
            )
        hooks.after_forward(batch, hidden_states)
        return hidden_states
