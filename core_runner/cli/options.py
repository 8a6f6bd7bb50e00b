"""Options of `generate`, grouped for its help text."""

from __future__ import annotations

from typing import Any

import click

from core_runner.cli.sections import option, section

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
    "policy",
    "cuda_graphs",
    "record_graphs_at_start",
    "model_state",
    "model_options",
    "attention_backend",
)


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


def refuse_graphs_at_start(options: dict[str, Any]) -> None:
    """Raise `UsageError` where graphs are to be recorded at the start, and not at all."""
    if options["record_graphs_at_start"] and options["cuda_graphs"] is False:
        raise click.UsageError("--record-graphs-at-start needs graphs; leave --no-cuda-graphs out.")


_FILE_IN = click.Path(exists=True, dir_okay=False, allow_dash=True)
_FILE_OUT = click.Path(dir_okay=False, allow_dash=True)

input_options = section(
    "Input",
    option("--prompt-file", multiple=True, type=_FILE_IN, help="Read a prompt from a file (repeatable)."),
    option(
        "--chat", is_flag=True, help="Send each prompt as a user's message, in the model's chat template."
    ),
    option("--system", metavar="TEXT", help="System message of --chat."),
    option("--input", "input_path", type=_FILE_IN, metavar="FILE", help="JSONL batch; - is stdin."),
)
output_options = section(
    "Output",
    option("--output", "output_path", type=_FILE_OUT, metavar="FILE", help="JSONL results; - is stdout."),
    option("--resume", is_flag=True, help="Keep the rows of --output and skip their ids."),
    option("--overwrite", is_flag=True, help="Replace the rows of --output."),
    option("--stats", is_flag=True, help="Report speed and cache use on stderr."),
)
sampling_options = section(
    "Sampling (default: the model's generation_config)",
    option(
        "--max-tokens",
        type=int,
        metavar="N",
        default=256,
        show_default=True,
        help="Most tokens to generate.",
    ),
    option("--temperature", type=float, metavar="X", help="0 is greedy."),
    option("--top-k", type=int, metavar="N", help="Keep the k most likely tokens; 0 keeps all."),
    option("--top-p", type=float, metavar="X", help="Keep the most likely tokens up to this mass."),
    option(
        "--min-p",
        type=float,
        metavar="X",
        help="Keep tokens of at least this share of the best one's probability.",
    ),
    option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Above 1, make the tokens of prompt and output less likely.",
    ),
    option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Subtract this for each time that the output has a token.",
    ),
    option(
        "--presence-penalty", type=float, metavar="X", help="Subtract this once if the output has the token."
    ),
    option(
        "--logit-bias",
        multiple=True,
        callback=_bias,
        metavar="ID=VALUE",
        help="Add to a token's logit; -inf forbids it (repeatable).",
    ),
    option(
        "--allowed-token-id",
        "allowed_token_ids",
        multiple=True,
        type=int,
        metavar="ID",
        help="Sample only such tokens (repeatable).",
    ),
    option(
        "--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Text that never comes (repeatable)."
    ),
    option("--seed", type=int, metavar="N", help="Make sampling repeatable."),
    option("--stop", multiple=True, metavar="TEXT", help="End at this text, which is cut off (repeatable)."),
    option(
        "--stop-token-id",
        "stop_token_ids",
        multiple=True,
        type=int,
        metavar="ID",
        help="End at this token (repeatable).",
    ),
    option("--min-tokens", type=int, metavar="N", help="No end token before this many tokens."),
    option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token."),
    option(
        "--logprobs", type=int, metavar="N", help="Log-probabilities of N best tokens: in rows, or on stderr."
    ),
    option("--prompt-logprobs", type=int, metavar="N", help="The same for the tokens of the prompt."),
    option(
        "--logprobs-mode",
        type=click.Choice(["raw", "adjusted", "processed"]),
        help="Of the model, after masks and penalties, or of what is sampled from. [default: raw]",
    ),
    option(
        "-n", "--num-completions", "n", type=int, metavar="N", help="Completions of each prompt. [default: 1]"
    ),
    option(
        "--keep-special-tokens",
        "skip_special_tokens",
        flag_value=False,
        default=None,
        help="Show special tokens in the text.",
    ),
    option(
        "--priority",
        type=int,
        metavar="N",
        help="Smaller runs earlier, under --policy priority. [default: 0]",
    ),
    option("--cache-salt", metavar="TEXT", help="Share cached prefixes only with requests of this salt."),
)
structure_options = section(
    "Form of the output (one of these)",
    option("--json-schema", metavar="FILE|JSON", help="JSON that keeps to this schema."),
    option("--regex", metavar="REGEX", help="Text that this regular expression matches as a whole."),
    option("--choice", multiple=True, metavar="TEXT", help="One of these texts (repeatable)."),
    option("--grammar", metavar="FILE", help="Text of this grammar, in Lark or GBNF; - is stdin."),
)
model_options = section(
    "Model",
    option(
        "-m",
        "--model",
        metavar="NAME|DIR",
        help="Hub name, directory, or embedded:NAME, which model state NAME ships. [default: the embedded model]",
    ),
    option("--tokenizer", metavar="NAME|DIR", help="Tokenizer of another checkpoint. [default: the model's]"),
    option("--device", metavar="NAME", help="cpu, cuda, cuda:1. [default: a GPU if there is one]"),
    option(
        "--dtype", metavar="NAME", help="float32, bfloat16 or float16. [default: by device and checkpoint]"
    ),
    option(
        "--model-state",
        metavar="NAME",
        help="Plugin that serves the model. [default: the one that claims it]",
    ),
    option(
        "--model-option",
        "model_options",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_model_options,
        help="A setting of that plugin's own, such as state_dtype=float32; may be repeated.",
    ),
    option("--attention-backend", metavar="NAME", help="torch or triton. [default: the fastest that fits]"),
    option("--trust-remote-code", is_flag=True, default=None, help="Run code that the checkpoint brings."),
)
engine_options = section(
    "Memory and batching",
    option("--max-model-len", type=int, metavar="N", help="Tokens of prompt and output together."),
    option("--max-num-reqs", type=int, metavar="N", help="Requests that run at once. [default: 64]"),
    option("--max-num-batched-tokens", type=int, metavar="N", help="Tokens of one step. [default: 2048]"),
    option("--block-size", type=int, metavar="N", help="Tokens of one cache block. [default: 16]"),
    option("--num-blocks", type=int, metavar="N", help="Cache blocks. [default: what fits]"),
    option(
        "--no-prefix-caching",
        "enable_prefix_caching",
        flag_value=False,
        default=None,
        help="Compute shared prefixes again.",
    ),
    option(
        "--cuda-graphs/--no-cuda-graphs",
        default=None,
        help="Record steps and replay them. [default: where device and model can]",
    ),
    option(
        "--record-graphs-at-start",
        is_flag=True,
        default=None,
        help="Record the graphs of decode steps before the first request.",
    ),
)
order_options = section(
    "Memory and batching",
    option(
        "--policy",
        type=click.Choice(["fcfs", "priority"]),
        help="Who runs first: who came first, or who has the smallest --priority, by row. [default: fcfs]",
    ),
)
