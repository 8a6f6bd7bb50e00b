"""Other engines on the same workloads: each is opened, runs jobs, and gives its memory back.

Each opener is a context manager over (model, small) that yields an `Engine`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import MAX_NUM_REQS, MODELS, free_memory, greedy, open_llm
from workloads import Job

from core_runner import LLM

Run = Callable[[Sequence[Job], float], int]  # (jobs, temperature) -> tokens generated


@dataclass(frozen=True)
class Engine:
    """One engine, open.

    warmups: runs until nothing new is compiled or recorded. warmup_tokens: most tokens that a request gives in them;
    None runs them whole. details: what it says of itself, for the report.
    """

    run: Run
    warmups: int = 1
    warmup_tokens: int | None = 8
    details: Callable[[], dict[str, Any]] = dict


Opener = Callable[[str, bool], AbstractContextManager[Engine]]


def jobs_runner(llm: LLM) -> Run:
    """Ours on an open `LLM`."""

    def run(jobs: Sequence[Job], temperature: float) -> int:
        params = [greedy(job.num_output, temperature) for job in jobs]
        outputs = llm.generate([job.prompt for job in jobs], params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


@contextmanager
def open_core_runner(model: str, small: bool) -> Iterator[Engine]:
    """Ours."""
    with open_llm(model, small) as llm:
        # The first run meets the shapes of its steps, and the second records those that came again.
        yield Engine(jobs_runner(llm), 2, None, lambda: {"steps": llm.stats().step_ways})


@contextmanager
def transformers_model(model: str, small: bool) -> Iterator[Any]:
    """transformers' own model of the shape, with its own attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODELS[model]))
        config = AutoConfig.from_pretrained(directory)
    dtype = torch.float32 if small else torch.bfloat16
    with torch.device("cpu" if small else "cuda"):
        loaded = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    try:
        yield loaded.eval()
    finally:
        del loaded
        free_memory()


@contextmanager
def open_generate(model: str, small: bool) -> Iterator[Engine]:
    """`generate` on the whole batch at once, for jobs of one length: anything else would be padding."""
    with transformers_model(model, small) as loaded:

        def run(jobs: Sequence[Job], temperature: float) -> int:
            (num_output,) = {job.num_output for job in jobs}
            ids = torch.tensor([job.prompt for job in jobs], device=loaded.device)
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                pad_token_id=0,
                do_sample=temperature > 0,
            )
            return int(out.numel() - ids.numel())

        yield Engine(run, details=lambda: {"attention": loaded.config._attn_implementation})


@contextmanager
def open_continuous_batching(model: str, small: bool) -> Iterator[Engine]:
    """transformers' continuous batching in one session, at our batch size and step budget."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    with transformers_model(model, small) as loaded:
        settings = ContinuousBatchingConfig(
            max_batch_tokens=64 if small else 8192,
            max_requests_per_batch=MAX_NUM_REQS[small],
            num_blocks=16 if small else None,
            allow_block_sharing=False,
            # It would do without where attention takes a mask, as SDPA does. Recording wants memory beside the cache.
            use_cuda_graph=None if small else True,
            max_memory_percent=None if small else 0.5,
        )
        # -1 ends nothing: every request runs to its own length.
        plain = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with loaded.continuous_batching_context_manager(
            generation_config=plain, continuous_batching_config=settings
        ) as manager:

            def run(jobs: Sequence[Job], temperature: float) -> int:
                assert temperature == 0.0, "the session decides whether it samples"
                for job in jobs:
                    manager.add_request(job.prompt, max_new_tokens=job.num_output, eos_token_id=-1)
                tokens, unfinished = 0, len(jobs)
                while unfinished:
                    result = manager.get_result(timeout=1)
                    if result is None and not manager.is_running():
                        raise RuntimeError("transformers' generation thread ended")
                    if result is not None and result.is_finished():
                        tokens += len(result.generated_tokens)
                        unfinished -= 1
                return tokens

            graphs = (
                manager.continuous_batching_config.use_cuda_graph
            )  # of steps with prefill, of those without
            found = {"attention": manager.model.config._attn_implementation, "graphs": graphs}
            yield Engine(run, details=lambda: found)


@contextmanager
def open_vllm(model: str, small: bool) -> Iterator[Engine]:
    """vLLM with dummy weights, its defaults but for the batch size, the step budget and the prefix cache."""
    import vllm

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODELS[model]))
        engine = vllm.LLM(
            model=directory,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=1024,
            max_num_seqs=MAX_NUM_REQS[small],
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.5,
        )

        def run(jobs: Sequence[Job], temperature: float) -> int:
            params = [
                vllm.SamplingParams(
                    temperature=temperature, max_tokens=job.num_output, ignore_eos=True, detokenize=False
                )
                for job in jobs
            ]
            prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
            outputs = engine.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        yield Engine(run, warmup_tokens=None, details=lambda: {"vllm": vllm.__version__})


def peers() -> dict[str, Opener]:
    """The peers that this environment has."""
    found: dict[str, Opener] = {
        "transformers continuous batching": open_continuous_batching,
        "transformers generate": open_generate,
    }
    if importlib.util.find_spec("vllm"):
        found["vLLM"] = open_vllm
    return found
