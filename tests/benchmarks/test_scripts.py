"""Every script runs on a CPU with `--small`, and its report has what the documentation takes from it."""

from __future__ import annotations

import itertools

import ablations
import agreement
import arrivals
import gated_delta
import offline
import profile_step
import pytest
import startup
import transcription
from ablation_variants import VARIANTS
from step_profile import CLASSES
from workloads import SMALL_WORKLOADS


def test_offline(run_small, capsys) -> None:
    report = run_small(offline, "--repeats", "2")
    found = {(r["engine"], r["workload"], r["temperature"]): r for r in report["results"]}
    assert set(found) == {("core-runner", w, 0.0) for w in SMALL_WORKLOADS} | {("core-runner", "W1", 1.0)}
    for (_, name, _), result in found.items():
        jobs = SMALL_WORKLOADS[name].jobs(1211)
        assert result["tokens"] == sum(job.num_output for job in jobs)
        assert result["prompt_tokens"] == sum(len(job.prompt) for job in jobs)
        assert len(result["seconds"]) == 2
        median = sum(result["seconds"]) / 2
        expected = 1000 * median if result["unit"] == "ms" else result["tokens"] / median
        assert result["speed"] == pytest.approx(expected)
    shown = capsys.readouterr().out
    assert report["environment"]["command"] in shown
    assert all(name in shown for name in ("torch", "W3 tok/s", "W4 ms", "core-runner, temperature 1"))


def test_offline_beside_transformers(run_small) -> None:
    report = run_small(offline, "--peers", "--repeats", "1", "--workloads", "W2", "W3")
    found = {(r["engine"], r["workload"]): r["tokens"] for r in report["results"]}
    assert found["transformers generate", "W2"] == found["core-runner", "W2"]
    assert found["transformers continuous batching", "W3"] == found["core-runner", "W3"]
    assert ("transformers generate", "W3") not in found


def test_shorter_workloads_are_shorter_for_everybody(run_small, capsys) -> None:
    arguments = ["--peers", "--repeats", "1", "--workloads", "W2", "W3", "--output-tokens", "4"]
    report = run_small(offline, *arguments)
    found = {(r["engine"], r["workload"]): r["tokens"] for r in report["results"]}
    assert {tokens for (_, name), tokens in found.items() if name == "W2"} == {4}
    wanted = sum(min(job.num_output, 4) for job in SMALL_WORKLOADS["W3"].jobs(1211))
    assert found["transformers continuous batching", "W3"] == found["core-runner", "W3"] == wanted
    assert "at most 4 of them" in capsys.readouterr().out


def test_transcription_beside_transformers(run_small, capsys) -> None:
    report = run_small(transcription, "--peers", "--repeats", "2")
    found = {(r["engine"], r["windows"]): r for r in report["results"]}
    assert set(found) == {(e, w) for e in ("core-runner", "transformers generate") for w in (3, 1)}
    for (_, windows), result in found.items():
        assert result["tokens"] == windows * 5
        assert result["speed"] == pytest.approx(windows * 30 * 2 / sum(result["seconds"]))
    assert "windows at once" in capsys.readouterr().out


def test_transcription_of_windows_that_come_one_by_one(run_small, capsys) -> None:
    ways = ["--ways", "wav", "arriving", "--rounds", "4"]
    report = run_small(transcription, "--windows", "3", *ways, "--repeats", "1")
    found = {r["way"]: r for r in report["results"]}
    assert list(found) == ["batch", "arriving", "wav"]
    for way, result in found.items():
        windows = 3 if way == "batch" else 12
        assert result["tokens"] == windows * 5
        assert result["speed"] == pytest.approx(windows * 30 / result["seconds"][0])
        assert way == "batch" or result["middle_speed"] > 0
    assert 0 < found["arriving"]["latency_s"][0] <= found["arriving"]["latency_s"][1]
    assert "core-runner, wav, middle half" in capsys.readouterr().out


def test_transcription_as_users_run_it(run_small) -> None:
    ways = ["transcribe", "transcribe-wav", "transcribe-long"]
    report = run_small(transcription, "--windows", "2", "--ways", *ways, "--repeats", "1", "--rounds", "20")
    found = {r["way"]: r for r in report["results"]}
    assert list(found) == ["batch", *ways]
    for way in ways:
        exactly = found[way]["speed"] * found[way]["seconds"][0] / 30
        windows = round(exactly)
        assert exactly == pytest.approx(windows)
        assert windows >= (10 if way != "transcribe-long" else 3)  # of which the pause is left out
        # What each says fills the positions behind its prompt, or ends at an end token; one token looks for silence.
        assert 2 * windows <= found[way]["tokens"] <= 7 * windows


def test_agreement(run_small, capsys) -> None:
    report = run_small(agreement)
    found = {(r["asked"], r["oracle"]): r for r in report["results"]}
    assert set(found) == {(way, "float32") for way in ("all at once", "one at a time")}
    for result in found.values():
        assert result["tokens"] == 30
        assert result["same"] >= 29  # a tie may fall either way
        assert result["largest_gap_nat"] < 1e-4
    assert "largest_gap_nat" in capsys.readouterr().out


def test_arrivals(run_small) -> None:
    report = run_small(arrivals, "--rates", "40", "80", "--seconds", "0.1")
    assert [found["rate"] for found in report["rates"]] == [40.0, 80.0]
    for found, count in zip(report["rates"], (4, 8), strict=True):
        assert found["requests"] == count
        assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
        for name in ("ttft_ms", "tpot_ms"):
            assert 0 < found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"]


def test_arrivals_are_poisson_and_always_the_same() -> None:
    times = arrivals.poisson_arrivals(4000, 50.0)
    assert times == arrivals.poisson_arrivals(4000, 50.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(2.718**-1, rel=0.1)


def test_profile_step(run_small) -> None:
    report = run_small(profile_step, "--requests", "1", "9", "3", "--steps", "2", "--repeats", "2")
    assert list(report["steps"]) == ["1", "3", "9", "mixed", "prefill"]
    for found in report["steps"].values():
        assert found["wall_ms"] > 0
        assert found["device_ms"] == pytest.approx(sum(found["classes_ms"].values()))
        assert found["cuda_calls"] == pytest.approx(sum(found["calls"].values()))
        assert list(found["classes_ms"]) == list(CLASSES)
        assert 0 < found["host_ms"] <= found["wall_ms"]
        assert found["host_ms"] <= found["slowest_host_ms"]
        assert found.get("eager_steps", 2) == 2  # a CPU records nothing
    assert report["memory_gib"]["weights"] > 0
    assert report["memory_gib"]["caches"] > 0


def test_ablations(run_small) -> None:
    names = ["everything", "inputs built on the host"]
    report = run_small(ablations, "--variants", *names, "--workloads", "W1", "--repeats", "1")
    assert list(report["variants"]) == names
    assert {found["W1"]["tokens"] for found in report["variants"].values()} == {30}
    assert set(names) <= set(VARIANTS)


def test_ablations_for_which_no_time_is_left_are_shown_as_such(run_small, capsys, monkeypatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(ablations.time, "monotonic", lambda: next(clock))
    names = ["everything", "no graphs"]
    report = run_small(ablations, "--variants", *names, "--repeats", "1", "--budget", "3")
    assert [list(report["variants"][name]) for name in names] == [["W1", "W3"], ["W1"]]
    shown = capsys.readouterr().out
    assert "no graphs, W3: left out" in shown
    assert shown.splitlines()[-1].split()[-2:] == ["-", "-"]


def test_gated_delta(run_small, capsys) -> None:
    report = run_small(gated_delta, "--repeats", "1")
    assert [found["step"] for found in report["cases"]] == ["decode 4", "prefill 2 x 40"]
    for found in report["cases"]:
        assert found["fla us"] is None  # for want of a GPU
        assert min(found[name] for name in ("ours us", "ours fp32 us", "floor us")) > 0
        assert 0 < found["ours off"] < 2**-8  # what rounding the outputs to bfloat16 makes
    shown = capsys.readouterr().out
    assert report["environment"]["command"] in shown
    assert "ours fp32 us" in shown


@pytest.mark.slow
def test_a_start_is_the_sum_of_its_parts(run_small, monkeypatch) -> None:
    monkeypatch.setattr(startup, "measure_process", _start)
    report = run_small(startup, "--repeats", "2", "--only", "own")
    assert list(report["starts"]) == ["own first", "own cold", "own warm"]
    for start in report["starts"].values():
        whole = start["imports_s"] + start["ready_s"] + start["first_tokens_s"]
        assert sum(start["parts_s"].values()) == pytest.approx(whole)
        assert sum(start["ready_parts_s"].values()) == pytest.approx(start["ready_s"])
        assert start["parts_s"]["weights"] > 0


_starts = []


def _start(args, cache, site):
    """One process serves as all of them: it is the slow part of this file."""
    if not _starts:
        _starts.append(PROCESS(args, cache, site))
        assert list((cache / "bytecode").rglob("llm.*.pyc"))
    return _starts[0]


PROCESS = startup.measure_process


def test_warm_starts_are_repeated_and_the_middle_one_counts(run_small, monkeypatch, capsys) -> None:
    ready, sites = iter([9.0, 8.0, 5.0, 7.0, 6.0] * 2), []
    parts = dict.fromkeys(startup.PARTS, 0.0)

    def start(args, cache, site):
        sites.append(site is not None)
        figures = dict.fromkeys(("imports_s", "first_tokens_s", "again_s"), 0.0)
        return {
            "ready_s": next(ready),
            "ready_parts_s": parts,
            "kernels_compiled": 0,
            "graphs_recorded": 0,
        } | figures

    monkeypatch.setattr(startup, "measure_process", start)
    found = run_small(startup, "--repeats", "3")["starts"]
    assert sites == [False] * 5 + [True] * 5
    assert [found[name]["ready_s"] for name in ("first", "cold", "warm", "own warm")] == [9.0, 8.0, 6.0, 6.0]
    assert found["own warm"]["all_ready_s"] == [5.0, 6.0, 7.0]
    assert "own warm: ready after 5.0, 6.0, 7.0 s" in capsys.readouterr().out


def test_parts_do_not_count_twice() -> None:
    phases = startup.Phases()
    with phases.part("weights"):
        with phases.part("kernels"):
            sum(range(100_000))
        inner = phases.seconds["kernels"]
        phases.seconds["graphs"] += 1000.0  # as a listener adds what it was told
    assert phases.seconds["kernels"] == inner > 0
    assert phases.seconds["weights"] < 0, "the thousand seconds were taken off what they lay in"
