"""Several threads on one LLM: their requests share the steps, and each gets its own answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from core_runner import SamplingParams

PROMPTS = [[3 + i, 5, 8 + i] for i in range(6)]


def test_threads_share_the_steps(drained, llama) -> None:
    llm = drained(llama.directory, device="cpu", max_num_reqs=3, max_model_len=64)
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]

    def ask(number: int) -> list[int]:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            return [token for delta in llm.stream(prompt, params) for token in delta.token_ids]
        return llm.generate(prompt, params)[0].outputs[0].token_ids

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(24)))
    assert together == [alone[number % len(PROMPTS)] for number in range(24)]
