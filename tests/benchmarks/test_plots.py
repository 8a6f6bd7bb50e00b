"""Charts of small runs' reports: each is valid SVG and names its panels, its rows and their parts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import ablations
import agreement
import arrivals
import matplotlib
import offline
import plots
import profile_step
import pytest
import recurrent
import startup
import transcription
from step_profile import CLASSES

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(path: Path) -> list[str]:
    """Every text of an SVG, in the order of drawing."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


@pytest.fixture(autouse=True)
def texts_stay_texts():
    """Otherwise letters are drawn as shapes, and nothing says what they spell."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


@pytest.fixture
def draw(run_small, tmp_path):
    """Run a script, draw its report from the file, as a person does later, and give the chart's texts."""

    def run(script: ModuleType, options: str) -> list[str]:
        run_small(script, *options.split())
        report, chart = tmp_path / f"{script.__name__}.json", tmp_path / "chart.svg"
        script.main(["--from-json", str(report), "--plot", str(chart)])
        return texts_of(chart)

    return run


PANELS = {
    "ablations": (
        ablations,
        "--variants everything --workloads W1 W4 --repeats 1",
        "What each idea brings, tiny, ",
        ["W1, output tokens a second", "W4, output tokens a second", "everything"],
    ),
    "agreement": (
        agreement,
        "",
        "Greedy tokens that transformers chooses too",
        ["all at once, float32", "one at a time, float32", "%"],
    ),
    "arrivals": (
        arrivals,
        "--rates 40 80 --seconds 0.05",
        "Requests arriving at a rate, tiny, ",
        [
            "time to first token, ms",
            "time per output token, ms",
            "output tokens a second",
            "requests a second",
            *(f"p{p}" for p in arrivals.PERCENTILES),
        ],
    ),
    "offline": (
        offline,
        "--workloads W1 W4 --repeats 1",
        "tiny, ",
        ["(tok/s)", "(ms, less is better)", "core-runner", "core-runner, temperature 1"],
    ),
    "recurrent": (
        recurrent,
        "--repeats 1",
        "Decode",
        ["1 requests", "4 requests", "measured", "floor", "tok/s"],
    ),
    "transcription": (
        transcription,
        "--windows 1 2 --ways arriving --rounds 2 --repeats 1",
        "transcription, tiny-speech, ",
        [
            "1 windows at once",
            "2 windows at once",
            "core-runner",
            "core-runner, arriving",
            "core-runner, arriving, middle half",
            "seconds of audio in a second",
        ],
    ),
}


@pytest.mark.parametrize(("script", "options", "title", "names"), PANELS.values(), ids=PANELS)
def test_panels_are_named(draw, script: ModuleType, options: str, title: str, names: list[str]) -> None:
    texts = draw(script, options)
    assert any(text.startswith(title) for text in texts)
    assert set(names) <= set(texts)


def test_a_step_is_drawn_as_its_classes(draw, monkeypatch) -> None:
    """A CPU's profile has no device time, so here every class took a millisecond, but for prefill, the lone step."""
    measured = profile_step.device_profile

    def on_a_device(step, steps):
        classes = dict.fromkeys(CLASSES, 1.0 if steps > 1 else 0.0)
        return measured(step, steps) | {"device_ms": sum(classes.values()), "classes_ms": classes}

    monkeypatch.setattr(profile_step, "device_profile", on_a_device)
    texts = draw(profile_step, "--requests 1 2 --steps 2 --repeats 1")
    assert {"decode, 1", "decode, 2", "mixed", "% of the device's time"} <= set(texts)
    assert "prefill" not in texts, "it has no shares to draw"
    assert [text for text in texts if text in CLASSES] == list(CLASSES)
    assert sum(text.strip().startswith(f"{len(CLASSES)}.00 ms (wall ") for text in texts) == 3


def test_a_start_is_drawn_as_its_parts(draw, monkeypatch) -> None:
    """Processes take seconds each; what one would have measured is enough for a chart."""
    parts = dict(zip(startup.PARTS, (1.0, 2.0, 3.0, 4.0, 5.5), strict=True))
    start = dict.fromkeys(("imports_s", "ready_s", "first_tokens_s", "again_s"), 1.0)
    start |= {"ready_parts_s": parts, "parts_s": parts, "kernels_compiled": 0, "graphs_recorded": 0}
    monkeypatch.setattr(startup, "measure_process", lambda args, cache, site: start)
    texts = draw(startup, "--only own --repeats 1")
    assert {"own first start", "own cold start", "own warm start", "seconds"} <= set(texts)
    assert [text for text in texts if text in startup.PARTS] == list(startup.PARTS)
    assert [text.strip() for text in texts].count("15.5") == 3


def test_a_panel_that_nothing_was_measured_for_is_empty(tmp_path: Path) -> None:
    """As where a benchmark's time was over before a workload's first row."""
    chart = tmp_path / "chart.svg"
    plots.barh_panels(chart, "title", {"full": {"row": 1234.5}, "nothing": {}}, "unit")
    texts = [text.strip() for text in texts_of(chart)]
    assert {"title", "full", "nothing", "row", "1,234", "unit"} <= set(texts)
