"""Loading a tokenizer, prompts and chat templates, and what they refuse."""

import json

import pytest
from text_tokenizers import byte_fallback, byte_level, metaspace

from core_runner.errors import ConfigError, RequestError
from core_runner.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(directory)
    return str(directory)


def test_a_saved_tokenizer_loads_with_its_template(saved):
    tokenizer = load_tokenizer(saved)
    ids = tokenizer.encode_prompt("the cat")
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.eos_token_id == tokenizer.hf.convert_tokens_to_ids("</s>")
    assert len(tokenizer) == len(tokenizer.hf)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "sat"}])
    assert tokenizer.decode(chat) == "<s>user: sat</s><s>assistant:"
    closed = tokenizer.apply_chat_template([{"role": "user", "content": "sat"}], add_generation_prompt=False)
    assert tokenizer.decode(closed) == "<s>user: sat</s>"


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_checkpoint_without_tokenizer_files_is_refused(tmp_path, model_type):
    # For the second type transformers builds an empty tokenizer, which would turn every prompt into nothing.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match="token ids"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=tmp_path.name):
        load_tokenizer(str(tmp_path))


def test_prompts_that_are_no_text_are_refused(saved):
    tokenizer = load_tokenizer(saved)
    for prompt in (b"bytes", 3, None, ["list"]):
        with pytest.raises(RequestError, match="string or token ids"):
            tokenizer.encode_prompt(prompt)
    with pytest.raises(RequestError, match="cannot be tokenized"):
        tokenizer.encode_prompt("\udcff")


def test_chat_without_a_template_is_refused():
    hf = byte_level()
    hf.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(hf, "some/model").apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "messages", [[], "text", {"role": "user"}, ["text"], [{"content": "x"}], [{"role": "user"}]]
)
def test_malformed_messages_are_refused(saved, messages):
    with pytest.raises(RequestError, match="role"):
        load_tokenizer(saved).apply_chat_template(messages)


def test_a_template_that_refuses_is_quoted():
    hf = byte_level()
    hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(hf).apply_chat_template([{"role": "user", "content": "x"}])


def test_ids_beyond_the_vocabulary_have_no_piece(saved):
    tokenizer = load_tokenizer(saved)
    assert tokenizer.piece(0) is not None
    assert tokenizer.piece(len(tokenizer) + 5) is None
    assert tokenizer.piece(2**40) is None


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_bad_words_are_encoded_as_at_a_start_and_as_after_a_space(make):
    tokenizer = Tokenizer(make())
    sequences = tokenizer.encode_bad_word("cat")
    assert len(sequences) == len(set(sequences)) <= 2
    texts = [tokenizer.decode(list(ids)).strip() for ids in sequences]
    assert texts == ["cat"] * len(sequences)
    # What a text holds behind a space is one of them.
    ids = tokenizer.hf.encode("the cat", add_special_tokens=False)
    assert any(tuple(ids[-len(word) :]) == word for word in sequences)
    assert tokenizer.encode_bad_word(" cat")[-1] == sequences[-1]


@pytest.mark.parametrize("word", ["\ud800", "\ud800 x"])
def test_bad_words_that_cannot_be_encoded_are_refused(word, saved):
    with pytest.raises(RequestError, match="bad_words"):
        load_tokenizer(saved).encode_bad_word(word)
