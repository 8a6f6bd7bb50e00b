"""An `LLM` of a few lines: it answers with the prompt's words, one delta each, without a model."""

from __future__ import annotations

from types import SimpleNamespace

from core_runner import EngineStats, RequestError, SamplingParams
from core_runner.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta

EMPTY = "the prompt is empty; give at least one token"


class FakeTokenizer:
    def decode(self, ids):
        return "".join(map(chr, ids))


class FakeGraphs:
    enabled = True

    def report(self):
        return "step        4 tokens\n       4 steps step graph"


class FakeLLM:
    """Deltas come round robin over the prompts, so that a batch interleaves; `script` replaces the text."""

    script = None
    graphs = FakeGraphs()
    load_error = None

    def __init__(self, **options):
        if self.load_error is not None:
            raise self.load_error
        type(self).last = self
        self.options = options
        if options.get("progress"):
            options["progress"]("Loading weights", 1, 2)
            if options.get("record_graphs_at_start"):
                for done in (1, 2, 3):
                    options["progress"]("graphs", done, 3)
        self.config = SimpleNamespace(max_num_reqs=2)
        self.engine = SimpleNamespace(runner=SimpleNamespace(graphs=self.graphs))
        self.default_sampling_params = SamplingParams(temperature=0.5, top_p=0.9)
        self.tokenizer = FakeTokenizer()
        self.streams, self.params, self.aborted, self.closed, self.steps = [], [], 0, False, 0

    def render_chat(self, conversations):
        if not all("content" in m for messages in conversations for m in messages):
            raise RequestError("a message has no content")
        texts = ["/".join(f"{m['role']}={m['content']}" for m in messages) for messages in conversations]
        return [[ord(c) for c in text] for text in texts]

    def stream(self, prompts, sampling_params=None, *, on_bad_prompt="raise"):
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        refused = [i for i, prompt in enumerate(prompts) if prompt in ("", [])]
        if refused and on_bad_prompt == "raise":
            raise RequestError(EMPTY)
        return self._run(prompts, params, refused)

    def _run(self, prompts, params, refused):
        self.streams.append(list(prompts))
        self.params += params
        for i in refused:
            completion = CompletionOutput(0, "", [], "error")
            error = f"request 'r': {EMPTY}"
            yield TextDelta(
                i, "", [], "error", RequestOutput("r", prompts[i], [], [completion], True, 0, error)
            )
        running = {i: iter(self._pieces(p)) for i, p in enumerate(prompts) if i not in refused}
        texts = dict.fromkeys(running, "")
        try:
            while running:
                self.step_done()
                for index in list(running):
                    piece = next(running[index], None)
                    texts[index] += piece or ""
                    if piece is None:
                        del running[index]
                    yield self._delta(
                        index, prompts[index], piece or "", texts[index], piece is None, params[index]
                    )
        finally:
            self.aborted += len(running)

    def _pieces(self, prompt):
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        return self.script if self.script is not None else [f"{word} " for word in text.split()]

    def _delta(self, index, prompt, piece, text, last, params):
        if not last:
            return TextDelta(index, piece, [len(piece)])
        failed = "nan" in text
        ids = [ord(c) for c in text]
        logprobs = (
            None if params.logprobs is None else [{i: Logprob(-0.5, 1), 65: Logprob(-1.5, 2)} for i in ids]
        )
        reason = "error" if failed else "stop"
        completion = CompletionOutput(0, text, ids, reason, logprobs=logprobs)
        error = "the logits hold NaN" if failed else None
        output = RequestOutput("r", prompt, list(range(len(prompt))), [completion], True, 0, error)
        return TextDelta(index, "", [], reason, output)

    def step_done(self):
        self.steps += 1

    def stats(self):
        return EngineStats(
            self.steps, 11, 13, 3, 2, 0.5, 90, 100, 2, 2, 0, 0, {"step graph": 4, "eager: no graphs": 1}
        )

    def close(self):
        self.closed = True
