"""Selection is explicit: by name, else the one claim, else the fallback; and it says why."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from test_manager import checkpoint, make_state, manager_of

from model_states import CapabilityError, PluginConflictError, UnsupportedModelError
from model_states.selection import check_capability

FOO = make_state("foo", architectures=("FooLM", "FooTooLM"))
BAR = make_state("bar", architectures=("BarLM",))
ANY = make_state("any", fallback=True)


def test_the_one_claim_wins_over_the_fallback(caplog):
    caplog.set_level(logging.INFO)
    manager = manager_of(ANY, BAR, FOO)
    assert manager.select(checkpoint("FooTooLM")) is FOO
    assert "model state 'foo' claims architecture 'FooTooLM'" in caplog.text


def test_a_name_wins_over_claims():
    manager = manager_of(ANY, BAR, FOO)
    assert manager.select(checkpoint("FooLM"), "bar") is BAR


def test_the_fallback_comes_last_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO)
    assert manager_of(FOO, ANY).select(checkpoint("NewLM", hf_config=object())) is ANY
    assert "nobody claims architecture 'NewLM', so it falls to the fallback 'any'" in caplog.text


def test_a_fallback_declines_a_type_that_nobody_knows():
    with pytest.raises(
        UnsupportedModelError, match=r"'any' cannot serve architecture 'NewLM': no plugin claims it"
    ):
        manager_of(FOO, ANY).select(checkpoint("NewLM", hf_config=None))


def test_two_claims_are_an_error_that_names_both_unless_one_is_named():
    other = make_state("other", claims=classmethod(lambda cls, config: config.architecture == "FooLM"))
    manager = manager_of(FOO, other)
    with pytest.raises(
        PluginConflictError, match=r"'foo' .* and 'other' .* claim architecture 'FooLM'; name one"
    ):
        manager.select(checkpoint("FooLM"))
    assert manager.select(checkpoint("FooLM"), "other") is other


def test_two_fallbacks_are_an_error_only_when_needed():
    manager = manager_of(FOO, ANY, make_state("second", fallback=True))
    assert manager.select(checkpoint("FooLM")) is FOO
    with pytest.raises(PluginConflictError, match=r"'any' .* and 'second' .* are fallbacks"):
        manager.select(checkpoint("NewLM"))


def test_no_model_state_lists_the_installed_ones():
    message = (
        r"no model state for architecture 'NewLM'\. Installed: foo \[FooLM, FooTooLM\], bar \[BarLM\]\. "
        r"Install a plugin for it, or pass model_state='foo' to force one"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        manager_of(FOO, BAR).select(checkpoint("NewLM"))
    with pytest.raises(UnsupportedModelError, match=r"Installed: none. Install a plugin for it$"):
        manager_of().select(checkpoint("NewLM"))


def test_an_unknown_name_suggests_the_closest():
    with pytest.raises(UnsupportedModelError, match=r"no model state is named 'fooo'\. Did you mean 'foo'\?"):
        manager_of(FOO, BAR).select(checkpoint("FooLM"), "fooo")


def test_a_chosen_class_may_decline_with_its_reason():
    picky = make_state("picky", unsupported=classmethod(lambda cls, config: "rope type 'odd' is unknown"))
    with pytest.raises(
        UnsupportedModelError, match=r"'picky' cannot serve architecture 'FooLM': rope type 'odd'"
    ):
        manager_of(picky).select(checkpoint("FooLM"), "picky")


def test_a_claim_that_fails_does_not_keep_others_from_answering(caplog):
    fails = make_state("fails", claims=classmethod(lambda cls, config: config.nothing))
    assert manager_of(fails, FOO).select(checkpoint("FooLM")) is FOO
    assert "'fails' failed to answer whether it claims architecture 'FooLM'" in caplog.text


def test_explanation_says_who_why_and_what_is_missing():
    text = manager_of(ANY, FOO).explain(checkpoint("FooLM"))
    assert "model state: foo (abc.State_foo) of plugin 'given'" in text
    assert "why: model state 'foo' claims architecture 'FooLM'" in text
    assert "capabilities: chunked_prefill" in text
    assert "  graphs: a step may be recorded as a CUDA graph" in text
    assert "  chunked_prefill" not in text


def test_a_missing_capability_is_logged_or_refused_if_it_was_chosen(caplog):
    assert check_capability(FOO, "chunked_prefill", chosen=True)
    assert not check_capability(FOO, "graphs", chosen=False)
    assert "model state 'foo' has no graphs" in caplog.text
    with pytest.raises(CapabilityError, match=r"'foo' has no speculation .*it has: chunked_prefill"):
        check_capability(FOO, "speculation", chosen=True)


LENGTHS = [
    ({"hf_config": SimpleNamespace(max_position_embeddings=64)}, 64),
    ({"hf_config": SimpleNamespace(n_positions=32, max_position_embeddings=None)}, 32),
    ({"hf_config": SimpleNamespace(text_config=SimpleNamespace(max_position_embeddings=16))}, 16),
    ({"raw_config": {"max_position_embeddings": 8}}, 8),
    ({"raw_config": {"text_config": {"n_positions": 4}}}, 4),
    ({"hf_config": SimpleNamespace(max_position_embeddings=64), "raw_config": {"n_positions": 8}}, 64),
    ({}, None),
]


@pytest.mark.parametrize(("fields", "expected"), LENGTHS)
def test_model_length_is_read_where_the_config_keeps_it(fields, expected):
    config = SimpleNamespace(**{"hf_config": None, "raw_config": {}, **fields})
    assert FOO.max_model_len(config) == expected
