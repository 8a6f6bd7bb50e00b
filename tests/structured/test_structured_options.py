"""`StructuredOutput` and the parameters that hold one."""

from __future__ import annotations

import json

import pytest

from core_runner import RequestError, SamplingParams, StructuredOutput


class Person:
    """What pydantic's classes have."""

    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "properties": {"b": {}, "a": {}}}


def test_schemas_come_as_dict_text_or_class_and_keep_their_order():
    schema = Person.model_json_schema()
    for given in (schema, json.dumps(schema), Person):
        structured = StructuredOutput(json=given)
        assert list(json.loads(structured.json)["properties"]) == ["b", "a"]
        assert structured.kind == "json"
    assert StructuredOutput(json=schema) == StructuredOutput(json=Person)


def test_values_are_frozen_and_can_be_hashed():
    choices = ["a", "b"]
    params = SamplingParams(structured_output=StructuredOutput(choice=choices))
    choices.append("c")
    assert params.structured_output.choice == ("a", "b")
    assert hash(params) == hash(SamplingParams(structured_output={"choice": ["a", "b"]}))


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({}, "it has none"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": "{"}, "is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "is not JSON"),
        ({"json": 3}, "must be a JSON schema"),
        ({"regex": ""}, "regex=''"),
        ({"regex": 7}, "regex=7"),
        ({"regex": "\ud800"}, "UTF-8"),
        ({"choice": []}, "choice="),
        ({"choice": "yes"}, "choice='yes'"),
        ({"choice": ["a", ""]}, "choice="),
        ({"choice": ["a", 1]}, "choice="),
        ({"choice": ["\udcff"]}, "UTF-8"),
        ({"grammar": b"start: A"}, "grammar="),
    ],
)
def test_anything_but_one_sound_value_is_refused(form, named):
    with pytest.raises(RequestError) as refused:
        StructuredOutput(**form)
    assert named in str(refused.value)


@pytest.mark.parametrize("value", ["[a-z]", 5, {"pattern": "a"}, ["regex"]])
def test_parameters_take_nothing_else(value):
    with pytest.raises(RequestError, match="must be a StructuredOutput, or a mapping"):
        SamplingParams(structured_output=value)


def test_ignoring_the_end_contradicts_a_form_that_ends():
    with pytest.raises(RequestError, match=r"structured_output.*ignore_eos=True"):
        SamplingParams(structured_output={"regex": "a"}, ignore_eos=True)
