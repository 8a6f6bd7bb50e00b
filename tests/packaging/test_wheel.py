"""The built package, not the checkout: what the wheel holds, and what works where nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "third_party_plugin"


def run(*command, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project, folder):
    run("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of core-runner."""
    return build(REPOSITORY, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with core-runner and the example plugin installed from their wheels, and an empty one to run in."""
    folder = tmp_path_factory.mktemp("installed")
    example = build(EXAMPLE, tmp_path_factory.mktemp("example"))
    for each in (wheel, example):
        run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, each, cwd=folder)
    return folder


def run_installed(installed, tmp_path, *command):
    return run(*command, cwd=tmp_path, PYTHONPATH=str(installed))


def test_wheel_holds_our_packages_and_nothing_generic(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert packages == {Path(package).name for package in listed["packages"]}
    plugins = {"decoder", "linear", "mamba", "seq2seq", "whisper"}
    assert packages == {"core_runner", "model_states", *(f"model_states_{name}" for name in plugins)}
    for package in packages:
        assert f"{package}/py.typed" in names
    assert not [name for name in names if name.endswith((".pyc", ".log")) or "/tests/" in name]


def test_wheel_holds_every_source_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    plugins = sorted((REPOSITORY / "plugins").glob("model_states_*"))
    for package in (REPOSITORY / "core_runner", REPOSITORY / "model_states", *plugins):
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                assert path.relative_to(package.parent).as_posix() in names


@pytest.mark.parametrize("plugin", ["decoder", "mamba"])
def test_wheel_holds_the_embedded_model(wheel, plugin):
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"model_states_{plugin}/embedded_model/{file}" in names


def test_installed_wheels_are_found_through_their_entry_points(installed, tmp_path):
    command = "from core_runner.cli import main; main()"
    rows = json.loads(run_installed(installed, tmp_path, "-c", command, "plugins", "--strict", "--json"))
    found = {row["name"]: (row["distribution"], row["version"], row["status"]) for row in rows}
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for name in ("decoder", "linear", "mamba", "seq2seq", "whisper"):
        assert found[name] == ("core-runner", version, "ok")
    assert found["toy"] == ("core-runner-toy", "0.1.0", "ok")


SERVE_TOY = """
import multiprocessing
import queue
from pathlib import Path

def serve(results):
    import core_runner, core_runner_toy, model_states
    from core_runner import LLM, SamplingParams

    llm = LLM("toy-model", device="cpu", max_num_batched_tokens=8, max_num_reqs=2)
    outputs = llm.generate([[3, 1, 4, 1, 5], list(range(20))], SamplingParams(temperature=0.0, max_tokens=12))
    tokens = [list(map(int, output.outputs[0].token_ids)) for output in outputs]
    results.put((tokens, [package.__file__ for package in (core_runner, core_runner_toy, model_states)]))

if __name__ == "__main__":
    import json
    from core_runner_toy.checkpoint import expected_tokens, write_checkpoint

    write_checkpoint(Path("toy-model"))
    results = queue.Queue()
    serve(results)
    answers = [results.get()]
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        worker = context.Process(target=serve, args=(results,))
        worker.start()
        answers.append(results.get(timeout=120))
        worker.join(60)
    expected = [expected_tokens(prompt, 12) for prompt in ([3, 1, 4, 1, 5], list(range(20)))]
    print(json.dumps({"answers": [tokens for tokens, _ in answers], "expected": expected, "files": answers[0][1]}))
"""


def test_an_unknown_architecture_is_served_from_wheels_in_every_kind_of_process(installed, tmp_path):
    (tmp_path / "serve.py").write_text(SERVE_TOY)
    seen = json.loads(run_installed(installed, tmp_path, "serve.py").splitlines()[-1])
    assert seen["answers"] == [seen["expected"]] * 3
    assert len(seen["files"]) == 3
    assert all(Path(file).is_relative_to(installed) for file in seen["files"])
