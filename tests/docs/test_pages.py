"""Every example of the pages runs as it is written, on models that are shipped or tiny, and shows what it promises.

README and docs/sampling.md have tests of their own, for what their examples do beyond running.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_recurrent import save_tiny

from core_runner import LLM, SamplingParams
from core_runner.audio import load_audio

ROOT = Path(__file__).parents[2]
WHISPER = ROOT / "plugins" / "model_states_whisper" / "embedded_model"
ELSEWHERE = {
    "README.md": "tests/docs/test_readme.py",
    "sampling.md": "tests/docs/test_sampling_page.py",
    "hooks.md": "signatures alone, which docs/generate_hooks.py writes and tests/plugins compares",
}
# What is fetched from the hub cannot run here: such a name stands for one of ours.
STAND_INS = {
    "openai/whisper-small": str(WHISPER),
    "ibm-ai-platform/Bamba-9B-v2": "embedded:mamba",
}
# What an example prints, by page and number.
PRINTS = {
    "constant_state.md 1": " elppa\n\n",
    "encoder_decoder.md 1": "",
    "recurrent_state.md 1": "",
    "recurrent_state.md 2": "",
    "recurrent_state.md 3": "",
    "structured_output.md 1": "[0-9a-f]{6}\n",
    "transcription.md 1": r"(?s) +0\.\d\d +\d\.\d\d .*Ella\. *\n.*none\.mp3 .*\(No such file.*",
    "transcription.md 2": "",
}


def examples() -> list[Any]:
    """Page, number and text of each Python block."""
    found = []
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]):
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        if page.name not in ELSEWHERE:
            found += [(f"{page.name} {number}", block) for number, block in enumerate(blocks, 1)]
    return found


def given_names(name: str, directory: Path) -> dict[str, Any]:
    """What an example leaves to its reader."""
    if name.startswith("encoder_decoder"):
        return {"samples": load_audio(str(WHISPER / "examples" / "lights.wav"), 16_000)}
    if name.startswith("transcription"):
        shutil.copy(WHISPER / "examples" / "lights.wav", directory / "talk.mp3")
        return {"paths": ["talk.mp3", "none.mp3"]}
    if name == "recurrent_state.md 2":
        save_tiny("bamba", directory)
        llm, other = (LLM(str(directory), device="cpu", max_num_reqs=2, max_model_len=64) for _ in range(2))
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return {"llm": llm, "other_llm": other, "params": params, "ids": [5, 6, 7], "next_ids": [8, 9]}
    if name == "recurrent_state.md 3":
        config = LLM("embedded:mamba", device="cpu", max_num_reqs=2).engine.runner.model_state.config
        return {"config": config, "heads": 2, "size": 8, "layers": range(3)}
    return {}


def test_every_example_has_its_line_here() -> None:
    assert [name for name, _ in examples()] == sorted(PRINTS)


@pytest.mark.parametrize(("name", "block"), examples(), ids=[name for name, _ in examples()])
def test_an_example_runs(
    name: str,
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page", **given_names(name, tmp_path)}
    capsys.readouterr()
    for hub_name, ours in STAND_INS.items():
        block = block.replace(f'"{hub_name}"', repr(ours))
    exec(compile(block, name, "exec"), namespace)
    shown = capsys.readouterr().out
    assert re.fullmatch(PRINTS[name], shown), repr(shown)
    check_names(name, namespace)


def check_names(name: str, namespace: dict[str, Any]) -> None:
    """What an example leaves behind for those who read on."""
    if name == "encoder_decoder.md 1":
        assert namespace["output"].outputs[0].text.strip()
    if name == "recurrent_state.md 1":
        recurrent = namespace["llm"].engine.runner.model_state.config.options
        assert recurrent["state_block_size"] == 512
    if name == "recurrent_state.md 2":
        ids = [*namespace["ids"], *namespace["output"].outputs[0].token_ids]
        resumed = namespace["other_llm"].generate([namespace["resumed"]], namespace["params"])[0]
        whole = namespace["llm"].generate([[*ids, *namespace["next_ids"]]], namespace["params"])[0]
        assert resumed.num_cached_tokens == len(ids) - 1
        assert resumed.outputs[0].token_ids == whole.outputs[0].token_ids
    if name == "recurrent_state.md 3":
        assert len(namespace["recurrent"].layers) == 3
    if name == "transcription.md 2":
        assert namespace["samples"].ndim == 1
