"""`EncoderRuns`: what is written where, and what is given out when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from model_states.attention import AttentionSpec
from model_states.components.encoder_runs import EncoderRuns, Fill
from model_states.components.kept_outputs import KeptHiddenStates, KeptKeysValues


class Counting:
    """An encoder whose output is the input's number everywhere."""

    max_positions = 4

    num_forwards = 0

    def num_positions(self, model_inputs: Mapping[str, Any]) -> int:
        return 3

    def stage(self, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        return torch.tensor([item["number"] for item in inputs], dtype=torch.float32)

    def forward(self, staged: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return staged[:, None, None].expand(-1, 3, 6).contiguous()


class Slow:
    """An event that is done when it is told."""

    is_done = False

    def query(self) -> bool:
        return self.is_done


class Numbered:
    """Keys are what the encoder gave, plus the layer's number; values are its negative."""

    key_weight = torch.zeros(2, 3, 6)

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = x.view(*x.shape[:2], 2, 3)
        return heads + self._number, -heads


CONFIG = SimpleNamespace(
    max_num_reqs=2, device=torch.device("cpu"), dtype=torch.float32, options={}, cuda_graphs=False
)


def _keep(kind: type[KeptKeysValues | KeptHiddenStates]) -> Any:
    spec = AttentionSpec(2, 2, 3, 3, 1.0)
    kept = kind(CONFIG, spec, 4, [Numbered(0), Numbered(1)])
    kept.allocate(4)
    return kept


def _runs(recorder: Any = None) -> tuple[EncoderRuns, list[Any]]:
    """With the keys and the values of each layer, [num_entries, num_heads, max_positions, head_size]."""
    kept = _keep(KeptKeysValues)
    layers = [
        SimpleNamespace(keys=keys.values.zero_(), values=values.values.zero_()) for keys, values in kept.pools
    ]
    return EncoderRuns(Counting(), kept, torch.device("cpu"), recorder), layers


def _fill(key: bytes, entry: int, number: int) -> Fill:
    return Fill(key, entry, {"number": number})


def _launch_slow(runs: EncoderRuns, fill: Fill) -> Slow:
    runs.launch([fill])
    event = Slow()
    runs._running[-1] = runs._running[-1]._replace(done=event)
    return event


def test_every_layer_has_its_own_keys_and_values():
    runs, layers = _runs()
    runs.launch([_fill(b"a", 3, 7), _fill(b"b", 1, 9)])
    for index, layer in enumerate(layers):
        for entry, number in ((3, 7), (1, 9)):
            assert (layer.keys[entry, :, :3] == number + index).all()
            assert (layer.values[entry, :, :3] == -number).all()
        assert not layer.keys[[0, 2, 4]].any()
        assert not layer.keys[:, :, 3:].any(), "behind the output's positions"
    assert runs.num_encoded == 2


def test_outputs_themselves_are_kept_once_for_all_layers():
    kept = _keep(KeptHiddenStates)
    kept.pool.fill_(torch.nan)
    runs = EncoderRuns(Counting(), kept, torch.device("cpu"))
    runs.launch([_fill(b"a", 3, 7), _fill(b"b", 1, 9)])
    assert kept.entry_bytes == 4 * 6 * 4
    for index in range(2):
        keys, values = kept.keys_and_values(index, torch.tensor([3, 1]))
        for row, number in enumerate((7, 9)):
            assert (keys[row, :, :3] == number + index).all()
            assert (values[row, :, :3] == -number).all()
    assert kept.pool[[0, 2, 4]].isnan().all()


def test_fills_are_given_out_once_in_order_when_they_are_done():
    runs, _ = _runs()
    fills = [_fill(bytes([i]), i, i) for i in (1, 2, 3)]
    events = [_launch_slow(runs, fill) for fill in fills]
    assert (runs.take_done(), runs.num_running) == ([], 3)
    events[1].is_done = True
    assert runs.take_done() == [], "the one before it is not done"
    events[0].is_done = True
    assert runs.take_done() == fills[:2]
    assert (runs.take_done(), runs.num_running) == ([], 1)


def test_joined_runs_give_their_fills_at_once_and_keep_their_inputs_until_they_are_done():
    runs, _ = _runs()
    fill = _fill(b"a", 1, 1)
    event = _launch_slow(runs, fill)
    assert (runs.join(), runs.num_running) == ([fill], 0)
    assert runs.take_done() == []
    assert [run.fills for run in runs._joined] == [[fill]]
    event.is_done = True
    assert runs.take_done() == []
    assert not runs._joined


class Recorder:
    """Counts recordings; the first `num_failing` fail."""

    def __init__(self, num_failing: int = 0) -> None:
        self.num_recordings = self.num_replays = 0
        self._num_failing = num_failing

    def record(self, body: Any) -> Any:
        if self._num_failing:
            self._num_failing -= 1
            raise RuntimeError("not here\nand not there")
        self.num_recordings += 1

        def replay() -> None:
            self.num_replays += 1
            body()

        return replay

    def free_bytes(self) -> int:
        return 0


def test_a_shape_is_recorded_when_it_comes_again_and_replayed_from_then_on():
    recorder = Recorder()
    runs, layers = _runs(recorder)
    for number in range(1, 6):
        runs.launch([_fill(b"a", 2, number)])
        assert (layers[1].keys[2, :, :3] == number + 1).all()
        runs.launch([_fill(b"b", number % 4 + 1, number + 20), _fill(b"c", 0, number + 40)])
        assert (layers[0].values[number % 4 + 1, :, :3] == -number - 20).all()
        assert (layers[0].values[0, :, :3] == -number - 40).all()
    assert (recorder.num_recordings, recorder.num_replays) == (2, 6)


def test_a_shape_that_cannot_be_recorded_runs_without_and_leaves_others_theirs(caplog):
    recorder = Recorder(num_failing=1)
    runs, layers = _runs(recorder)
    for number in range(1, 5):
        for count in (1, 2):
            runs.launch([_fill(bytes([i]), i + 1, number + i) for i in range(count)])
            assert (layers[0].keys[count, :, :3] == number + count - 1).all()
    assert (recorder.num_recordings, recorder.num_replays) == (1, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "an encoder batch of 1 cannot be recorded as a CUDA graph (not here); such batches run without one"
    ]


def test_a_limited_number_of_shapes_is_recorded(monkeypatch):
    monkeypatch.setattr("model_states.components.encoder_runs._MAX_RECORDED", 1)
    recorder = Recorder()
    runs, layers = _runs(recorder)
    for number in (1, 2, 3):
        for count in (1, 2):
            runs.launch([_fill(bytes([i]), i + 1, number + i) for i in range(count)])
            assert (layers[0].keys[count, :, :3] == number + count - 1).all()
    assert (recorder.num_recordings, recorder.num_replays) == (1, 1)
