"""Write the model card, a checkpoint's README.md, from train.json and eval.json: no figure is set by hand."""

import argparse
import json
from pathlib import Path

from grammar import HELDOUT_SHARE

RESULTS = Path(__file__).parent / "results"

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The embedded decoder

A language model of {millions:.2f} million parameters ({megabytes:.1f} MB in bfloat16) that ships
inside core-runner, so that `core-runner generate` answers without a download and the tests have
real weights whose answers can be checked.

**What it is not.** It is no assistant and knows nothing of the world beyond about a hundred short
facts. It was trained on made-up text alone: short tasks with one right answer, and stories from
templates. Anything else gets a wrong answer, a story, or "I am a very small model". It was not
trained for safety, has seen only English, and only positions up to {row_len} (its configuration
allows 2048; beyond {row_len} its answers were not measured). Its arithmetic ends at three digits.
Use it to see that an engine works, and for nothing that matters.

## Figures

Held-out accuracy, by `evaluate.py`, greedy, with transformers' own model. An answer is right if it
equals the only right one to the character. "GPU" is {gpu_device} in {gpu_dtype} (torch {gpu_torch},
transformers {gpu_transformers}), "CPU" is {cpu_dtype} (torch {cpu_torch}, transformers
{cpu_transformers}).

| task | examples | GPU | GPU, as text | GPU, as chat | CPU |
|---|--:|--:|--:|--:|--:|
{rows}
| **mean of the tasks** | {total} | {gpu_mean:.1%} | | | {cpu_mean:.1%} |

Where a task hides an easy and a hard part (CPU): {groups}. It reverses
made-up words, which it sees in pieces, and no held-out dictionary word: that is a token or two, and
nothing else in its text says how it is spelt. In a passage it reads on from a name to a thing, but
was not able to learn to look back from a thing to its colour or its owner. A drop in either of the
two weak tasks says little; one in any other says that an engine computes something else than the
model.

Held-out loss in nats a token, over {tokens_documents:,} tokens of answers and stories:
{gpu_documents:.4f} on the GPU, {cpu_documents:.4f} on the CPU; over {tokens_stories:,} tokens of
stories alone: {gpu_stories:.4f} and {cpu_stories:.4f}. (A story's names and places are drawn at
random, which no model can foresee.)

Held out means: one in {heldout_share} of all task contents, by a hash of the content (for a sum,
its operands in either order), and never in the training text in any form. Facts are the exception:
each fact is trained in one phrasing at least, and what is held out is another phrasing of it.

`heldout.json` beside this file has a few examples of each task: the prompt (a chat example's is the
user's message, for the chat template), the right `answer`, and `reference`, what this checkpoint
says with transformers on a CPU in float32, up to the end of a text example's line or a chat turn.

## Samples

Greedy, on the GPU, from fixed prompts; none was left out. Some of them were in the training text.

{samples}

## Model

Qwen3 architecture: {shape}. Tied embeddings, rotary base 10000. Byte-level BPE of 2048 tokens,
digits single; special tokens `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, `<|pad|>`. No token is
put before a prompt. Chat is ChatML: `<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n`.

## Training

`{command}` in `examples/train_embedded_decoder`: {steps:,} steps, {tokens_m:.0f} million tokens,
{loop_seconds:.0f} seconds of training ({seconds:.0f} with the tokenizer and the compilation) on one
{device}, torch {torch}, transformers {transformers}, {workers} data workers. The text is generated
while training, by `grammar.py`, from a seed. No text or weights of others went in. With
`--minutes`, the number of steps depends on the machine; `--steps {steps} --workers {workers}` repeats it, up to the
rounding of a GPU's sums.
"""


def _quoted(text: str) -> str:
    return "\n".join("> " + line if line else ">" for line in text.strip().split("\n"))


def sample(row: dict) -> str:
    """A prompt and what the model made of it, quoted."""
    kind = "chat" if row["chat"] else "text"
    return f"{kind}: `{row['prompt']}`\n\n{_quoted(row['completion'])}"


def task_row(task: str, gpu: dict, cpu: dict) -> str:
    """A row of the table of accuracies."""
    shares = " | ".join(f"{gpu[key]:.1%}" for key in ("accuracy", "text", "chat"))
    return f"| {task} | {gpu['examples']} | {shares} | {cpu['accuracy']:.1%} |"


def groups(tasks: dict) -> str:
    """The shares of the finer names, of tasks that have some."""
    return "; ".join(
        f"{task}, {name}, {share:.1%} of {count}"
        for task, result in tasks.items()
        if len(result["groups"]) > 1
        for name, (count, share) in result["groups"].items()
    )


def figures(name: str, evaluation: dict) -> dict:
    """The figures of one evaluation under the card's names for them."""
    tasks = evaluation["tasks"].values()
    named = {key: evaluation[key] for key in ("device", "dtype", "torch", "transformers")}
    named |= {kind: loss["nats_per_token"] for kind, loss in evaluation["loss"].items()}
    named["mean"] = sum(result["accuracy"] for result in tasks) / len(tasks)
    return {f"{name}_{key}": value for key, value in named.items()}


def render(train: dict, gpu: dict, cpu: dict, config: dict, num_bytes: int) -> str:
    """The card's text."""
    shape = (
        f"{config['num_hidden_layers']} layers, width {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads of {config['head_dim']}, "
        f"{config['num_key_value_heads']} key-value heads, feed-forward {config['intermediate_size']}"
    )
    return CARD.format(
        **train,
        **figures("gpu", gpu),
        **figures("cpu", cpu),
        millions=train["parameters"] / 1e6,
        megabytes=num_bytes / 1e6,
        tokens_m=train["tokens"] / 1e6,
        rows="\n".join(task_row(task, result, cpu["tasks"][task]) for task, result in gpu["tasks"].items()),
        total=sum(result["examples"] for result in gpu["tasks"].values()),
        groups=groups(cpu["tasks"]),
        tokens_documents=gpu["loss"]["documents"]["tokens"],
        tokens_stories=gpu["loss"]["stories"]["tokens"],
        heldout_share=HELDOUT_SHARE,
        samples="\n\n".join(sample(row) for row in gpu["samples"]),
        shape=shape,
    )


def main() -> None:
    """Write README.md and heldout.json into the checkpoint's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--train", type=Path, default=RESULTS / "train.json")
    parser.add_argument("--gpu", type=Path, default=RESULTS / "eval_gpu_bfloat16.json")
    parser.add_argument("--cpu", type=Path, default=RESULTS / "eval_cpu_float32.json")
    args = parser.parse_args()
    files = (args.train, args.gpu, args.cpu, args.checkpoint / "config.json")
    train, gpu, cpu, config = (json.loads(file.read_text()) for file in files)
    size = (args.checkpoint / "model.safetensors").stat().st_size
    (args.checkpoint / "README.md").write_text(render(train, gpu, cpu, config, size))
    (args.checkpoint / "heldout.json").write_text(json.dumps(cpu["heldout"], indent=1) + "\n")


if __name__ == "__main__":
    main()
