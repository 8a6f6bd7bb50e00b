"""Compare grammar libraries for structured output: compile time, time of a mask, and odd schemas.

    pip install llguidance xgrammar
    python benchmarks/structured_output.py [--vocab-size 151936] [--json FILE]

Vocabularies: the embedded model's (2,048 ids), and one of --vocab-size ids that is trained here, byte-level
BPE on the Python files of this interpreter (about a minute; no network). Each case is a grammar and a text
that it allows; the text's tokens are fed one by one, and each step's mask is filled and timed, as a decode step
would. The second table feeds texts that a grammar allows or must not allow and counts wrong answers.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "plugins" / "model_states_decoder" / "embedded_model"

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["string", "null"], "maxLength": 200} for i in range(60)},
    "required": [f"field_{i}" for i in range(60)],
    "additionalProperties": False,
}
CHOICES = [f"label-{i:04d}" for i in range(1000)]
EMAIL = r"[a-z0-9._]{1,30}@[a-z0-9]{1,20}(\.[a-z]{2,6}){1,3}"

# name -> (kind, grammar, a text that it allows)
CASES: dict[str, tuple[str, Any, str]] = {
    "person": ("json", PERSON, json.dumps({"name": "Ada Lovelace", "age": 36, "tags": ["a", "c"]})),
    "recursive tree": (
        "json",
        NODE,
        json.dumps({"value": 1.5, "kids": [{"value": -2, "kids": [{"value": 3e5, "kids": []}]}] * 4}),
    ),
    "60 fields": ("json", WIDE, json.dumps({f"field_{i}": f"the value of {i}" for i in range(60)})),
    "any object": ("json", {"type": "object"}, json.dumps({"a": [1, {"b": "some text here"}], "c": None})),
    "e-mail regex": ("regex", EMAIL, "some.body_42@example.co.uk"),
    "1000 choices": ("choice", CHOICES, "label-0777"),
}

# Each has a name, a kind, a grammar, texts that it allows and texts that it refuses (null: the grammar itself).
ODD: list[dict[str, Any]] = json.loads((Path(__file__).parent / "structured_output_cases.json").read_text())


@dataclass(frozen=True)
class Session:
    """A matcher of either library: fill gives the mask's time to the library, accept takes an id."""

    fill: Callable[[], None]
    accept: Callable[[int], bool]
    may_end: Callable[[], bool]


class LLGuidance:
    """Microsoft's llguidance: derivatives of regexes and an Earley parser, in Rust."""

    name = "llguidance"

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=eos)
        self._num_words = -(-vocab_size // 32)

    def compile(self, kind: str, grammar: Any) -> Any:
        """The compiled grammar; raises what the library raises."""
        from llguidance import LLMatcher

        if kind == "json":
            text = LLMatcher.grammar_from_json_schema(json.dumps(grammar))
        elif kind == "regex":
            text = LLMatcher.grammar_from_regex(grammar)
        else:
            options = " | ".join(json.dumps(option, ensure_ascii=False) for option in grammar)
            text = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def session(self, compiled: Any) -> Session:
        """A matcher at the grammar's start."""
        matcher, row = compiled.deep_copy(), np.zeros(self._num_words, np.int32)
        return Session(
            fill=lambda: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes),
            accept=lambda token: matcher.try_consume_tokens([token]) == 1,
            may_end=matcher.is_accepting,
        )


class XGrammar:
    """MLC's xgrammar: a pushdown automaton with precomputed context-independent tokens, in C++."""

    name = "xgrammar"

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int) -> None:
        import xgrammar

        pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        self._info = xgrammar.TokenizerInfo(
            [piece for piece, _ in pieces],
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab_size,
            stop_token_ids=[eos],
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._vocab_size = vocab_size

    def compile(self, kind: str, grammar: Any) -> Any:
        """The compiled grammar; raises what the library raises."""
        if kind == "json":
            return self._compiler.compile_json_schema(json.dumps(grammar))
        if kind == "regex":
            return self._compiler.compile_regex(grammar)
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in grammar)
        return self._compiler.compile_grammar(f"root ::= {options}")

    def session(self, compiled: Any) -> Session:
        """A matcher at the grammar's start."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)
        mask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        return Session(
            fill=lambda: matcher.fill_next_token_bitmask(mask),
            accept=matcher.accept_token,
            may_end=matcher.is_completed,
        )


def train_vocabulary(vocab_size: int) -> Any:
    """A byte-level BPE of this size, trained on the interpreter's own files and kept in the temporary folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    kept = Path(tempfile.gettempdir()) / f"structured_output_bpe_{vocab_size}.json"
    if kept.exists():
        return Tokenizer.from_file(str(kept))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [f for f in files if "site-packages" not in f.parts or "transformers" in f.parts]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f.read_text(errors="replace") for f in files), trainer)
    tokenizer.save(str(kept))
    return tokenizer


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds it took."""
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def measure_case(library: Any, tokenizer: Any, case: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a compile, microseconds of a mask and of taking a token, over the text's tokens."""
    kind, grammar, text = CASES[case]
    compile_s = []
    fills: list[float] = []
    first_fills: list[float] = []
    accepts: list[float] = []
    for _ in range(repeats):
        compiled, seconds = timed(partial(library.compile, kind, grammar))
        compile_s.append(seconds)
        session = library.session(compiled)
        for index, token in enumerate(tokenizer.encode(text).ids):
            (fills if index else first_fills).append(timed(session.fill)[1])
            accepted, seconds = timed(partial(session.accept, token))
            assert accepted, f"{library.name} refuses a valid text of {case!r}"
            accepts.append(seconds)
        session.fill()
        assert session.may_end(), f"{library.name} does not let {case!r} end"
    return {
        "compile_ms": 1e3 * float(np.median(compile_s)),
        "first_mask_us": 1e6 * float(np.median(first_fills)),
        "mask_p50_us": 1e6 * float(np.percentile(fills, 50)),
        "mask_p99_us": 1e6 * float(np.percentile(fills, 99)),
        "accept_p50_us": 1e6 * float(np.percentile(accepts, 50)),
    }


def allows(library: Any, tokenizer: Any, compiled: Any, text: str) -> bool:
    """Whether the grammar takes the whole text and may end there."""
    session = library.session(compiled)
    for token in tokenizer.encode(text).ids:
        session.fill()
        if not session.accept(token):
            return False
    return session.may_end()


def odd_answers(library: Any, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(case, what is wrong) for each wrong answer."""
    for case in ODD:
        name, good, bad = case["name"], case["allowed"], case["refused"]
        try:
            compiled = library.compile(case["kind"], case["grammar"])
        except Exception as error:  # each library has its own tree
            if bad is not None:
                yield name, f"refused: {str(error).strip().splitlines()[0][:60]}"
            continue
        if bad is None:
            yield name, "taken, though it must be refused or is not enforced"
            continue
        for text, want in [(t, True) for t in good] + [(t, False) for t in bad]:
            if allows(library, tokenizer, compiled, text) != want:
                yield name, f"{'refuses' if want else 'allows'} {text}"


def report(results: list[dict[str, Any]], odd: dict[str, list[tuple[str, str]]]) -> None:
    """Print both tables in Markdown."""
    print("| ids | grammar | library | compile ms | first mask us | mask p50 us | p99 us | accept p50 us |")
    print("|---|---|---|---|---|---|---|---|")
    for row in results:
        print(
            f"| {row['ids']:,} | {row['case']} | {row['library']} | {row['compile_ms']:.2f} | "
            f"{row['first_mask_us']:.0f} | {row['mask_p50_us']:.1f} | {row['mask_p99_us']:.0f} | "
            f"{row['accept_p50_us']:.1f} |"
        )
    for library, wrong in odd.items():
        print(f"\n{library}: {len(wrong)} wrong answers in {len(ODD)} odd grammars")
        for name, what in wrong:
            print(f"- {name}: {what}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    from tokenizers import Tokenizer

    embedded = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    vocabularies = [(embedded, embedded.get_vocab_size(), 2)]
    vocabularies.append((train_vocabulary(arguments.vocab_size), arguments.vocab_size, 0))
    results, odd = [], {}
    for tokenizer, size, eos in vocabularies:
        for kind in (LLGuidance, XGrammar):
            library, seconds = timed(partial(kind, tokenizer, size, eos))
            print(f"{kind.name}: {size:,} ids made ready in {1e3 * seconds:.0f} ms", flush=True)
            for case in CASES:
                figures = measure_case(library, tokenizer, case, arguments.repeats)
                results.append({"ids": size, "case": case, "library": kind.name, **figures})
            if tokenizer is embedded:
                odd[kind.name] = list(odd_answers(library, tokenizer))
    report(results, odd)
    if arguments.json:
        arguments.json.write_text(json.dumps({"timings": results, "odd": odd}, indent=1) + "\n")


if __name__ == "__main__":
    main()
