"""`Engine`: the loop between a scheduler and a runner, a step ahead of the tokens it reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from core_runner.async_output import AsyncOutput
from core_runner.config import RunnerConfig
from core_runner.errors import RequestError
from core_runner.loader import Progress, use_prefix_cache
from core_runner.outputs import EngineStats
from core_runner.request import Request, RequestStatus
from core_runner.runner import ModelRunner
from core_runner.scheduling.output import SchedulerOutput
from core_runner.scheduling.prefix_cache import GroupSpec
from core_runner.scheduling.prompt_logprobs import PromptLogprobsLimits
from core_runner.scheduling.scheduler import Scheduler
from core_runner.scheduling.step import RequestUpdate, ScheduledStep, SchedulerConfig
from core_runner.structured.grammars import Grammars
from model_states import Component, PluginManager
from model_states.input_names import check_input_names

_PAUSE_S = 0.0005


class Engine:
    """Continuous batching over one `ModelRunner`.

    With `async_scheduling`, a step is launched before the tokens of the one before it are read, so that the
    device always has work queued. What arrives a step late (an end id, an abort) changes nothing for others.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        plugins: PluginManager | None = None,
        extensions: Sequence[Component] = (),
        progress: Progress | None = None,
    ) -> None:
        """Load the model and build its scheduler; the checkpoint's end ids end a request unless it ignores them."""
        self.config = config
        self.runner = ModelRunner(config, plugins=plugins, extensions=extensions, progress=progress)
        self.generation_defaults = self.runner.generation_defaults
        self.scheduler = self._make_scheduler()
        # What requests with structured_output need; whoever has the tokenizer sets it.
        self.grammars: Grammars | None = None
        self._in_flight: deque[tuple[ScheduledStep, AsyncOutput]] = deque()
        self._depth = 1 if config.async_scheduling else 0  # steps that may stay unread
        self._hands_over = "restore" in self.runner.model_state.capabilities
        self._is_stepping = self._has_ended = False
        self._steps = 0
        self._elapsed_s = 0.0

    @property
    def has_unfinished(self) -> bool:
        """Whether a further `step` can bring anything."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def validate(self, request: Request) -> None:
        """Raise the `RequestError` with which a request can never be served; `add_request` will not look again."""
        self.scheduler.validate(request)
        self._name_inputs(request)
        if request.sampling_params.structured_output is not None and request.constraint is None:
            try:
                self._require_grammars().check(request.sampling_params)
            except RequestError as error:
                raise RequestError(f"request {request.req_id!r}: {error}") from error
        request.approved_by = self.scheduler

    def add_request(self, request: Request) -> None:
        """Queue a request; raises `RequestError` and changes nothing when it cannot be served."""
        if request.approved_by is not self.scheduler:
            self.validate(request)
        structured = request.sampling_params.structured_output
        if structured is not None and request.constraint is None:
            request.constraint = self._require_grammars().constrain(structured)
        self.scheduler.add_request(request)

    def abort(self, req_id: str) -> bool:
        """End a request at once, wherever it stands; False when there is none of that name. It emits no more."""
        return self._ended(self.scheduler.abort(req_id))

    def finish(self, req_id: str) -> bool:
        """End a request as stopped, for a reason that only the caller sees, such as a stop string."""
        return self._ended(self.scheduler.finish(req_id))

    def step(self) -> list[RequestUpdate]:
        """Launch one step and read the oldest one that is due: what its requests gained.

        An exception that comes out of it (Ctrl-C, a plugin's error) has ended every request as aborted.
        """
        self._is_stepping = True
        try:
            return self._step()
        except BaseException:
            self._start_over()
            raise
        finally:
            self._is_stepping = False

    def _step(self) -> list[RequestUpdate]:
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self.runner.execute_model(self._complete(scheduled))
            output = self.runner.sample_tokens()
            if output is not None:
                self._in_flight.append((scheduled, output))
            self._steps += 1
        updates = self.scheduler.take_failed()
        if self._in_flight and (scheduled is None or len(self._in_flight) > self._depth):
            oldest, output = self._in_flight.popleft()
            updates += self.scheduler.update(oldest, output.get_output())
        elif scheduled is None and self.scheduler.has_unfinished and not self._flush():
            time.sleep(_PAUSE_S)  # every request waits for its grammar, whose thread needs the time
        if self._hands_over and (
            self._has_ended or any(u.finish_reason and u.request.model_inputs for u in updates)
        ):
            self._has_ended = False
            self._flush()
        self._elapsed_s += time.perf_counter() - started
        return updates

    def _complete(self, scheduled: ScheduledStep) -> SchedulerOutput:
        """The step's output with the masks of constrained rows."""
        if not len(scheduled.constrained):
            return scheduled.output
        return self._require_grammars().add_bitmask(scheduled)

    def _name_inputs(self, request: Request) -> None:
        """Have model inputs checked and named by content, once: completions of a prompt take over its names."""
        hooks = self.runner.hooks
        if not request.input_keys:
            try:
                if request.model_inputs:
                    check_input_names(request.model_inputs, hooks.input_names)
                request.input_keys = hooks.input_keys(request)
            except ValueError as error:
                raise RequestError(f"request {request.req_id!r}: {error}") from error
        state = self.runner.model_state
        if request.model_inputs and request.num_restored_tokens and "restore" not in state.capabilities:
            raise RequestError(
                f"request {request.req_id!r} brings the state after its first {request.num_restored_tokens} tokens, "
                f"which model state {state.name!r} cannot take over; give the tokens alone"
            )

    def _require_grammars(self) -> Grammars:
        if self.grammars is None:
            raise RequestError(
                "structured_output needs the model's tokenizer, and none is loaded; name one with tokenizer=..., "
                "or set Engine.grammars"
            )
        return self.grammars

    def abort_all(self) -> None:
        """End every request, so that nothing of them is left."""
        for req_id in self.scheduler.unfinished_ids():
            self.abort(req_id)
        self.settle()

    def settle(self) -> None:
        """With no request left: read what is in flight and have the runner give up the last slots."""
        while self.has_unfinished:
            self.step()
        self._flush()

    def _ended(self, has_ended: bool) -> bool:
        """Where a request may leave its state, it is there as soon as the request has ended, or its step has."""
        if has_ended and self._hands_over:
            if self._is_stepping:  # the runner may be about to run the request
                self._has_ended = True
            else:
                self._flush()
        return has_ended

    def _flush(self) -> bool:
        """Have the runner give up slots without a step: what they held may be what the next request waits for."""
        removals = self.scheduler.flush()
        if removals is not None:
            self.runner.execute_model(removals)
        return removals is not None

    def stats(self) -> EngineStats:
        """Counters and free resources as the host knows them now."""
        s = self.scheduler.stats()
        return EngineStats(
            steps=self._steps,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            cached_tokens=s.cached_tokens,
            queried_tokens=s.queried_tokens,
            cached_blocks=sum(s.cached_blocks),
            preemptions=s.preemptions,
            elapsed_s=self._elapsed_s,
            free_blocks=sum(s.free_blocks),
            num_blocks=sum(num - 1 for num in self.runner.num_blocks),
            free_slots=s.free_slots,
            max_num_reqs=self.config.max_num_reqs,
            running=s.running,
            waiting=s.waiting,
            step_ways=dict(self.runner.graphs.counts),
        )

    def _start_over(self) -> None:
        """Nobody can say which half of an interrupted step was done: begin again with empty slots and blocks."""
        for request in self.scheduler.unfinished():
            request.status = RequestStatus.FINISHED_ABORT
        self._in_flight.clear()
        self._has_ended = False
        self.scheduler = self._make_scheduler()
        self.runner.reset()

    def _make_scheduler(self) -> Scheduler:
        config, state = self.config, self.runner.model_state
        groups = [GroupSpec(g.block_size, g.sliding_window) for g in self.runner.cache_groups]
        return Scheduler(
            SchedulerConfig(
                max_num_reqs=config.max_num_reqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=self.runner.max_model_len,
                policy=config.policy,
                max_waiting=config.max_waiting,
                enable_prefix_caching=use_prefix_cache(config, state),
                num_draft_tokens=config.num_draft_tokens,
                vocab_size=state.vocab_size,
                enable_chunked_prefill="chunked_prefill" in state.capabilities,
                share_prompts="prefix_cache" in state.capabilities,
                prompt_logprobs=PromptLogprobsLimits(
                    self.runner.prompt_scorer.row_bytes,
                    config.prompt_logprobs_bytes,
                    config.prompt_logprobs_result_bytes,
                    state.vocab_size,
                ),
                explain_refusal=self.runner.processors.explain_refusal,
                reserve=self.runner.hooks.reserve,
                expect=self.runner.hooks.expect_requests
                if self.runner.hooks.has("expect_requests")
                else None,
            ),
            groups,
            self.runner.num_blocks,
            eos_token_ids=self.generation_defaults.eos_token_ids,
        )
