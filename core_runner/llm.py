"""`LLM`: prompts in, text out. The engine with a tokenizer around it."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Literal

from core_runner.calls import Call, Job, refusal
from core_runner.completions import expand
from core_runner.config import RunnerConfig
from core_runner.engine import Engine
from core_runner.errors import ConfigError, RequestError
from core_runner.loader import Progress
from core_runner.output_processor import OutputProcessor
from core_runner.outputs import EngineStats, RequestOutput, TextDelta
from core_runner.programs import ProgramEnd
from core_runner.prompts import Prompt, as_many, as_params, default_params
from core_runner.request import Request
from core_runner.sampling_params import SamplingParams
from core_runner.structured.grammars import Grammars
from core_runner.tasks import TaskCall
from core_runner.text import Tokenizer, load_tokenizer
from core_runner.transcription import (
    AudioProgress,
    OnBadAudio,
    Transcription,
    as_options,
    audio_pool,
    transcriber_of,
)
from model_states import Component, PluginManager
from model_states.speech import Transcript, TranscriptionOptions
from model_states.tasks import Program

Message = Mapping[str, Any]
OnBadPrompt = Literal["raise", "return"]


class LLM:
    """A loaded model that generates. Several threads may call it: their requests share the steps.

    >>> llm = LLM()  # the embedded model
    >>> llm.generate("1 + 1 =", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        plugins: Sequence[Any] = (),
        extensions: Sequence[Component] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Load `model`: a hub name, a directory, or "embedded:NAME"; None is the default embedded one.

        options: the fields of `RunnerConfig`. plugins: plugin modules beside the installed ones. progress(what,
        done, total) follows the loading. Errors: `ConfigError`, or `model_states.ModelStateError` for the model.
        """
        self.config = RunnerConfig(model=model, **options)
        manager = PluginManager(plugins=plugins)
        self.engine = Engine(self.config, plugins=manager, extensions=extensions, progress=progress)
        self.default_sampling_params = default_params(self.engine.generation_defaults)
        self.tokenizer, self._no_tokenizer = self._load_tokenizer()
        self._set_grammars()
        self._processor = OutputProcessor(self.tokenizer, self.engine.finish)
        self._request_numbers = itertools.count()
        self.audio_files = audio_pool(self.engine.runner.device)
        self._lock = threading.RLock()
        self._seeds = random.SystemRandom() if self.config.seed is None else random.Random(self.config.seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        on_bad_prompt: OnBadPrompt = "raise",
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        prompts: one or many of text, token ids, or {"prompt_token_ids": ids, "model_inputs": {...}}.
        sampling_params: one for all, or one per prompt. progress(finished, total). on_bad_prompt: "raise" raises
        `RequestError` before anything starts; "return" gives a result with finish reason "error".
        """
        jobs = self._make_jobs(prompts, sampling_params, on_bad_prompt)
        results: dict[int, RequestOutput] = {}
        for delta in self._run(jobs, stream=False):
            assert delta.output is not None, "only the last delta is handed out without streaming"
            results[delta.request_index] = delta.output
            if progress is not None:
                progress(len(results), len(jobs))
        return [results[index] for index in range(len(jobs))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_bad_prompt: OnBadPrompt = "raise",
    ) -> Generator[TextDelta, None, None]:
        """As `generate`, but text as it comes. Closing the iterator aborts what is not finished."""
        return self._run(self._make_jobs(prompts, sampling_params, on_bad_prompt), stream=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each a list of {"role": ..., "content": ...}."""
        return self.generate(self.render_chat(messages), sampling_params, **options)

    def render_chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Prompt]:
        """The token ids of conversations through the tokenizer's chat template, ready for the answer."""
        if not isinstance(messages, Sequence):
            raise RequestError(f"messages={messages!r} must be one conversation, or a list of several")
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self._require_tokenizer()
        return [tokenizer.apply_chat_template(conversation) for conversation in many]

    def transcribe(
        self,
        audio: Any,
        options: TranscriptionOptions | None = None,
        *,
        progress: AudioProgress | None = None,
        on_bad_audio: OnBadAudio = "raise",
        **fields: Any,
    ) -> list[Transcript]:
        """Write down what is said in each audio; results in the order of the audios.

        audio: one or many of float samples (a 1-D array or tensor, in [-1, 1] at the model's sampling rate), path of an
        audio or video file, its bytes, or a binary file. options: or its fields by keyword. progress(done, total), in
        seconds of what has been read so far. on_bad_audio: "raise" raises what is wrong with one of them, the others
        given up; "return" gives a transcript with an `error`. Raises `RequestError` for a model without transcription.
        """
        ends = self.transcribe_each(audio, options, progress=progress, on_bad_audio=on_bad_audio, **fields)
        return [transcript for _, transcript in sorted(ends, key=itemgetter(0))]

    def transcribe_each(
        self,
        audio: Any,
        options: TranscriptionOptions | None = None,
        *,
        progress: AudioProgress | None = None,
        on_bad_audio: OnBadAudio = "raise",
        **fields: Any,
    ) -> Generator[tuple[int, Transcript], None, None]:
        """As `transcribe`, but each transcript as it is done, with its place. Closing the iterator aborts the rest."""
        checked, transcriber = as_options(options, fields), transcriber_of(self.engine.runner.model_state)
        tokenizer = self._require_tokenizer().hf
        call = Transcription(audio, transcriber, checked, tokenizer, progress, self.audio_files)
        return call.run(lambda programs, on_advance: self.run(programs, on_advance=on_advance), on_bad_audio)

    def run(
        self, programs: Iterable[Program], *, on_advance: Callable[[], None] | None = None
    ) -> Generator[ProgramEnd, None, None]:
        """Run programs of requests (see `model_states.tasks`), all at once; gives each as it ends.

        programs: begun in order, as there is room. A bad request, or whatever else a program raises, ends that program
        alone. on_advance: called when some have gone on. Closing the iterator aborts what is not finished.
        """
        # Short, so that programs that go on come soon; enough for all slots that come free while a model waits.
        queue = max(3 * self.config.max_num_reqs // 8, 4)
        call = Call([], False, self.engine, self._processor, wants_text=False, most_queued=queue)
        task_call = TaskCall(call, self._make_job, self._step, self._lock, self.config.max_num_reqs + queue)
        return task_call.run(programs, on_advance)

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        return self.engine.stats()

    def close(self) -> None:
        """Abort what is running and wait for what is in flight; end the processes that decode audio."""
        self.audio_files.close()
        with self._lock:
            self.engine.abort_all()
            self._processor.end_aborted()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- requests

    def _run(self, jobs: Sequence[Job], stream: bool) -> Generator[TextDelta, None, None]:
        """Feed requests as the queue has room and hand out deltas; on the way out, abort what is left."""
        call = Call(jobs, stream, self.engine, self._processor)
        try:
            while call.is_open:
                with self._lock:
                    call.feed()
                yield from call.take()
                # Without room for the next one, it is others' requests that have to be brought on.
                if call.is_open:
                    self._step()
        finally:
            with self._lock:
                call.abandon()

    def _step(self) -> None:
        """One step, for the requests of every caller; its deltas go to each one's own queue."""
        with self._lock:
            try:
                updates = self.engine.step()
            except BaseException:
                self._processor.end_aborted()  # nobody else must wait for requests that are gone
                raise
            self._processor.process(updates)
            if not updates and not self.engine.has_unfinished:
                self._processor.end_aborted()

    def _make_jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_bad_prompt: OnBadPrompt,
    ) -> list[Job]:
        if on_bad_prompt not in ("raise", "return"):
            raise RequestError(f"on_bad_prompt={on_bad_prompt!r} is not one of 'raise', 'return'")
        many = as_many(prompts)
        params = as_params(
            self.default_sampling_params if sampling_params is None else sampling_params, len(many)
        )
        jobs = []
        for prompt, param in zip(many, params, strict=True):
            try:
                jobs.append(self._make_job(prompt, param))
            except RequestError as error:
                if on_bad_prompt == "raise":
                    raise
                text = prompt if isinstance(prompt, str) else None
                jobs.append(Job(text, [refusal(self._next_id(), text, str(error))]))
        return jobs

    def _make_job(self, prompt: Prompt, params: SamplingParams) -> Job:
        request = self._make_request(self._next_id(), prompt, params)
        self.engine.validate(request)
        text = prompt if isinstance(prompt, str) else None
        return Job(text, expand(request, lambda: self._seeds.getrandbits(63)))

    def _next_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    def _make_request(self, req_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        model_inputs: Mapping[str, Any] = {}
        token_ids: Any = prompt
        if isinstance(prompt, str):
            token_ids = self._require_tokenizer().encode_prompt(prompt)
        elif not isinstance(prompt, list) and isinstance(prompt, Mapping):
            if not {"prompt_token_ids"} <= set(prompt) <= {"prompt_token_ids", "model_inputs"}:
                raise RequestError(
                    f"a prompt given as a dict has 'prompt_token_ids' and, if wanted, 'model_inputs'; this one has "
                    f"{', '.join(map(repr, prompt)) or 'nothing'}"
                )
            token_ids, model_inputs = prompt["prompt_token_ids"], prompt.get("model_inputs", {})
        if params.stop:
            self._require_tokenizer()
        params = self._with_bad_words_as_ids(params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return Request(req_id, token_ids, params, seed, model_inputs)

    def _with_bad_words_as_ids(self, params: SamplingParams) -> SamplingParams:
        """The same parameters, once more checked, now that the ids of the words are known."""
        if not params.bad_words or not any(isinstance(word, str) for word in params.bad_words):
            return params
        encode = self._require_tokenizer().encode_bad_word
        words = [encode(word) if isinstance(word, str) else [word] for word in params.bad_words]
        return replace(params, bad_words=list(itertools.chain(*words)))

    def _load_tokenizer(self) -> tuple[Tokenizer | None, str]:
        """The tokenizer, or why there is none: token ids work without, unless one was named."""
        source = self.config.tokenizer or self.engine.runner.model_state.config.checkpoint.model
        try:
            return load_tokenizer(source, trust_remote_code=self.config.trust_remote_code), ""
        except ConfigError as error:
            if self.config.tokenizer is not None:
                raise
            return None, str(error)

    def _set_grammars(self) -> None:
        if self.tokenizer is not None:
            vocab_size = self.engine.runner.model_state.vocab_size
            self.engine.grammars = Grammars(
                self.tokenizer, vocab_size, self.engine.generation_defaults.eos_token_ids
            )

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(self._no_tokenizer)
        return self.tokenizer
