"""Rows of a JSONL batch: what comes in, and what goes out.

In:  {"prompt": "text"} | {"prompt_token_ids": [1, 2]} | {"messages": [{"role": "user", "content": "..."}]},
     and optionally "id" (text or number; "line-3" in line 3 otherwise) and fields of `SamplingParams`. A field that
     is null counts as absent. JSON's keys are text, so "logit_bias" is {"5": 1.0}.
Out: {"id", "text", "token_ids", "finish_reason", "usage", "error"}, and "logprobs" and "prompt_logprobs" where they
     were asked for. With n > 1 "completions" has {"text", "token_ids", "finish_reason"} of each, the first included.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core_runner.errors import CoreRunnerError, RequestError
from core_runner.sampling_params import SamplingParams

if TYPE_CHECKING:
    from core_runner.outputs import CompletionOutput, RequestOutput

RowId = str | int
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_KNOWN_FIELDS = ("id", *_PROMPT_FIELDS, *_SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input. `error` says why it cannot run; then it has no `prompt`.

    prompt: a text, token ids, or (kind "messages") a conversation.
    """

    id: RowId
    line: int
    kind: str = ""
    prompt: Any = None
    params: SamplingParams = field(default_factory=SamplingParams)
    error: str | None = None


def parse_rows(lines: Iterable[bytes], base: SamplingParams) -> Iterator[Row]:
    """Rows of the lines that are not blank; `base` holds the sampling options that a row may override.

    A line that cannot be used yields a row with its error. An id that was used before is such an error.
    """
    seen: dict[RowId, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_row(number, line, base)
        if row.id in seen and row.error is None:
            row = Row(
                row.id,
                number,
                error=f"line {number}: id {row.id!r} is line {seen[row.id]}'s; make ids unique",
            )
        seen.setdefault(row.id, number)
        yield row


def parse_row(number: int, line: bytes, base: SamplingParams) -> Row:
    """The row of one line; never raises for what the line holds."""
    # Until the row has told its id, its error is reported under the line's own. A bare number would be taken from
    # a later row that has it as its id.
    row_id: RowId = f"line-{number}"
    try:
        fields = _load_object(line)
        row_id = _row_id(fields, row_id)
        _refuse_unknown(fields)
        fields = {name: value for name, value in fields.items() if value is not None}
        kind = _prompt_field(fields)
        options = {name: fields[name] for name in _SAMPLING_FIELDS if name in fields}
        if "logit_bias" in options:
            options["logit_bias"] = _bias_by_token_id(options["logit_bias"])
        params = dataclasses.replace(base, **options)
        return Row(row_id, number, kind, fields[kind], params)
    # A value of a type that the parameters do not expect is the row's fault as well.
    except (CoreRunnerError, TypeError) as error:
        return Row(row_id, number, error=f"line {number}: {error}")


def _load_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise RequestError(f'a row is a JSON object such as {{"prompt": "..."}}, not {type(value).__name__}')
    return value


def _row_id(fields: dict[str, Any], default: RowId) -> RowId:
    row_id = fields.get("id")
    if row_id is None:
        return default
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
        raise RequestError(f"id={row_id!r} must be a text or an integer")
    return row_id


def _refuse_unknown(fields: dict[str, Any]) -> None:
    # A misspelt option that is ignored would give plausible, wrong results.
    for name in fields:
        if name not in _KNOWN_FIELDS:
            close = difflib.get_close_matches(name, _KNOWN_FIELDS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_KNOWN_FIELDS)}"
            raise RequestError(f"unknown field {name!r}; {hint}")


def _prompt_field(fields: dict[str, Any]) -> str:
    present = [name for name in _PROMPT_FIELDS if name in fields]
    if len(present) != 1:
        raise RequestError(
            f"a row has exactly one of {', '.join(_PROMPT_FIELDS)}; this one has {present or 'none'}"
        )
    kind, value = present[0], fields[present[0]]
    if kind == "prompt" and not isinstance(value, str):
        raise RequestError(f"prompt must be a text, not {type(value).__name__}")
    if kind != "prompt" and not isinstance(value, list):
        raise RequestError(f"{kind} must be a list, not {type(value).__name__}")
    if kind == "prompt_token_ids" and any(type(token_id) is not int for token_id in value):
        raise RequestError("prompt_token_ids must be a flat list of integers")
    return kind


def _bias_by_token_id(bias: Any) -> Any:
    """`bias` with its keys as integers; what is not an object is left for `SamplingParams` to refuse."""
    if not isinstance(bias, dict):
        return bias
    by_id: dict[int, Any] = {}
    for key, value in bias.items():
        # Twenty digits are past any token id, and short of what `int` refuses to read.
        if not re.fullmatch("-?[0-9]{1,20}", key):
            raise RequestError(f"logit_bias has the key {key!r}, which is no token id; keys are integers")
        if int(key) in by_id:
            raise RequestError(f"logit_bias has token id {int(key)} twice, once as {key!r}; keep one of them")
        by_id[int(key)] = value
    return by_id


def error_row(row_id: RowId, message: str) -> dict[str, Any]:
    """The output row of a request that did not run."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    return {
        "id": row_id,
        "text": "",
        "token_ids": [],
        "finish_reason": "error",
        "usage": usage,
        "error": message,
    }


def output_row(row: Row, output: RequestOutput) -> dict[str, Any]:
    """The output row of a finished or refused request."""
    first, error = _completion_fields(output.outputs[0]), output.error
    if error is not None:
        # The row's own name says more than the one that the engine gave it.
        error = f"line {row.line}: {error.removeprefix(f'request {output.request_id!r}: ')}"
    result: dict[str, Any] = {
        "id": row.id,
        "text": first["text"],
        "token_ids": first["token_ids"],
        # A row has failed if any of its completions has.
        "finish_reason": first["finish_reason"] if error is None else "error",
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
            "cached_tokens": output.num_cached_tokens,
        },
        "error": error,
    }
    if "logprobs" in first:
        result["logprobs"] = first["logprobs"]
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [p and logprob_items(p) for p in output.prompt_logprobs]
    if len(output.outputs) > 1:
        result["completions"] = [_completion_fields(completion) for completion in output.outputs]
    return result


def _completion_fields(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [logprob_items(position) for position in completion.logprobs]
    return fields


def logprob_items(position: Any) -> list[dict[str, Any]]:
    """Ids with their values, the token itself first. JSON has no infinity: a banned id's value is null."""
    return [
        {"token_id": int(token_id), "logprob": value if math.isfinite(value) else None}
        for token_id, value in ((t, float(getattr(v, "logprob", v))) for t, v in position.items())
    ]
