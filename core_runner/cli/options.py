"""Options of `generate`, grouped for its help text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])

SAMPLING_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs_mode",
    "priority",
    "cache_salt",
    "skip_special_tokens",
)
MODEL_OPTIONS = (
    "model",
    "tokenizer",
    "trust_remote_code",
    "device",
    "dtype",
    "max_model_len",
    "max_num_reqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "enable_prefix_caching",
    "model_state",
    "model_options",
    "attention_backend",
)


class SectionOption(click.Option):
    """An option that names the section of the help text in which it stands."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows its options by section, in the order of declaration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one definition list for each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "Other"), []).append(record)
        for title in sorted(sections, key="Other".__eq__):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def _section(
    title: str, *declarations: tuple[tuple[str, ...], dict[str, Any]]
) -> Callable[[_Function], _Function]:
    def decorate(function: _Function) -> _Function:
        # Decorators apply from the last to the first; help shows what was applied last first.
        for names, settings in reversed(declarations):
            function = click.option(*names, cls=SectionOption, section=title, **settings)(function)
        return function

    return decorate


def _option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, settings


def _bias(_ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]) -> dict[int, float] | None:
    """Callback of `--logit-bias`: its ID=VALUE pairs as a dictionary; None without any."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token_id, _, value = pair.partition("=")
        try:
            key, number = int(token_id), float(value)
        except ValueError:
            raise click.BadParameter(f"{pair!r} is not ID=VALUE, such as 5=-2.5 or 5=-inf.") from None
        if key in bias:
            raise click.BadParameter(f"token id {key} is given twice.")
        bias[key] = number
    return bias or None


def _model_options(
    _ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str | int] | None:
    """Callback of `--model-option`: its NAME=VALUE pairs as a dictionary, whole numbers as such; None without any."""
    chosen: dict[str, str | int] = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not (name and found and value):
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE, such as state_block_size=512.")
        chosen[name] = int(value) if value.isdecimal() else value
    return chosen or None


_FILE_IN = click.Path(exists=True, dir_okay=False, allow_dash=True)
_FILE_OUT = click.Path(dir_okay=False, allow_dash=True)

input_options = _section(
    "Input",
    _option("--prompt-file", multiple=True, type=_FILE_IN, help="Read a prompt from a file (repeatable)."),
    _option(
        "--chat", is_flag=True, help="Send each prompt as a user's message, in the model's chat template."
    ),
    _option("--system", metavar="TEXT", help="System message of --chat."),
    _option("--input", "input_path", type=_FILE_IN, metavar="FILE", help="JSONL batch; - is stdin."),
)
output_options = _section(
    "Output",
    _option("--output", "output_path", type=_FILE_OUT, metavar="FILE", help="JSONL results; - is stdout."),
    _option("--resume", is_flag=True, help="Keep the rows of --output and skip their ids."),
    _option("--overwrite", is_flag=True, help="Replace the rows of --output."),
    _option("--stats", is_flag=True, help="Report speed and cache use on stderr."),
)
sampling_options = _section(
    "Sampling (default: the model's generation_config)",
    _option(
        "--max-tokens",
        type=int,
        metavar="N",
        default=256,
        show_default=True,
        help="Most tokens to generate.",
    ),
    _option("--temperature", type=float, metavar="X", help="0 is greedy."),
    _option("--top-k", type=int, metavar="N", help="Keep the k most likely tokens; 0 keeps all."),
    _option("--top-p", type=float, metavar="X", help="Keep the most likely tokens up to this mass."),
    _option(
        "--min-p",
        type=float,
        metavar="X",
        help="Keep tokens of at least this share of the best one's probability.",
    ),
    _option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Above 1, make the tokens of prompt and output less likely.",
    ),
    _option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Subtract this for each time that the output has a token.",
    ),
    _option(
        "--presence-penalty", type=float, metavar="X", help="Subtract this once if the output has the token."
    ),
    _option(
        "--logit-bias",
        multiple=True,
        callback=_bias,
        metavar="ID=VALUE",
        help="Add to a token's logit; -inf forbids it (repeatable).",
    ),
    _option(
        "--allowed-token-id",
        "allowed_token_ids",
        multiple=True,
        type=int,
        metavar="ID",
        help="Sample only such tokens (repeatable).",
    ),
    _option(
        "--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Text that never comes (repeatable)."
    ),
    _option("--seed", type=int, metavar="N", help="Make sampling repeatable."),
    _option("--stop", multiple=True, metavar="TEXT", help="End at this text, which is cut off (repeatable)."),
    _option(
        "--stop-token-id",
        "stop_token_ids",
        multiple=True,
        type=int,
        metavar="ID",
        help="End at this token (repeatable).",
    ),
    _option("--min-tokens", type=int, metavar="N", help="No end token before this many tokens."),
    _option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token."),
    _option(
        "--logprobs", type=int, metavar="N", help="Log-probabilities of N best tokens: in rows, or on stderr."
    ),
    _option("--prompt-logprobs", type=int, metavar="N", help="The same for the tokens of the prompt."),
    _option(
        "--logprobs-mode",
        type=click.Choice(["raw", "processed"]),
        help="Of the model, or of what is sampled from. [default: raw]",
    ),
    _option(
        "-n", "--num-completions", "n", type=int, metavar="N", help="Completions of each prompt. [default: 1]"
    ),
    _option(
        "--keep-special-tokens",
        "skip_special_tokens",
        flag_value=False,
        default=None,
        help="Show special tokens in the text.",
    ),
    _option(
        "--priority", type=int, metavar="N", help="Smaller runs earlier, under the scheduling policy for it."
    ),
    _option("--cache-salt", metavar="TEXT", help="Share cached prefixes only with requests of this salt."),
)
structure_options = _section(
    "Form of the output (one of these)",
    _option("--json-schema", metavar="FILE|JSON", help="JSON that keeps to this schema."),
    _option("--regex", metavar="REGEX", help="Text that this regular expression matches as a whole."),
    _option("--choice", multiple=True, metavar="TEXT", help="One of these texts (repeatable)."),
    _option("--grammar", metavar="FILE", help="Text of this grammar, in Lark or GBNF; - is stdin."),
)
model_options = _section(
    "Model",
    _option(
        "-m",
        "--model",
        metavar="NAME|DIR",
        help="Hub name, directory, or embedded:NAME, which model state NAME ships. [default: the embedded model]",
    ),
    _option(
        "--tokenizer", metavar="NAME|DIR", help="Tokenizer of another checkpoint. [default: the model's]"
    ),
    _option("--device", metavar="NAME", help="cpu, cuda, cuda:1. [default: a GPU if there is one]"),
    _option(
        "--dtype", metavar="NAME", help="float32, bfloat16 or float16. [default: by device and checkpoint]"
    ),
    _option(
        "--model-state",
        metavar="NAME",
        help="Plugin that serves the model. [default: the one that claims it]",
    ),
    _option(
        "--model-option",
        "model_options",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_model_options,
        help="A setting of that plugin's own, such as state_dtype=float32; may be repeated.",
    ),
    _option("--attention-backend", metavar="NAME", help="torch or triton. [default: the fastest that fits]"),
    _option("--trust-remote-code", is_flag=True, default=None, help="Run code that the checkpoint brings."),
)
engine_options = _section(
    "Memory and batching",
    _option("--max-model-len", type=int, metavar="N", help="Tokens of prompt and output together."),
    _option("--max-num-reqs", type=int, metavar="N", help="Requests that run at once. [default: 64]"),
    _option("--max-num-batched-tokens", type=int, metavar="N", help="Tokens of one step. [default: 2048]"),
    _option("--block-size", type=int, metavar="N", help="Tokens of one cache block. [default: 16]"),
    _option("--num-blocks", type=int, metavar="N", help="Cache blocks. [default: what fits]"),
    _option(
        "--no-prefix-caching",
        "enable_prefix_caching",
        flag_value=False,
        default=None,
        help="Compute shared prefixes again.",
    ),
)


def given(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of `names` that the caller set; an unset option leaves the default to the library."""
    return {name: options[name] for name in names if options[name] not in (None, ())}
