"""Write the hybrid's model card, its README.md, from train.json and the evaluations: no figure is set by hand."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import paths  # noqa: F401  (finds the decoder's modules)
from card import figures, groups, sample, task_row
from grammar import HELDOUT_SHARE

RESULTS = Path(__file__).parent / "results"

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The embedded hybrid

A language model of {millions:.2f} million parameters ({megabytes:.1f} MB in bfloat16) with recurrent
state: {num_mamba} Mamba-2 layers and {num_attention} of attention. It ships inside core-runner as
`embedded:mamba`, so that recurrent state beside paged attention can be seen, and tested, without a
download. It was trained on the text of the embedded decoder, whose tokenizer it has, and on recall
over long distances.

**What it is not.** It is no assistant and knows nothing of the world beyond about a hundred short
facts. It was trained on made-up text alone: short tasks with one right answer, and stories from
templates. Anything else gets a wrong answer, a story, or "I am a very small model". It was not
trained for safety, has seen only English, and only positions up to {row_len}. Use it to see that an
engine works, and for nothing that matters.

## Figures

Held-out accuracy, by `evaluate_hybrid.py`, greedy, with core-runner. An answer is right if it equals
the only right one to the character. "GPU" is {gpu_device} in {gpu_dtype} (torch {gpu_torch},
transformers {gpu_transformers}), "CPU" is {cpu_dtype} (torch {cpu_torch}, transformers
{cpu_transformers}), on the first {cpu_examples} examples of each row, or all if there are fewer.

| task | examples | GPU | GPU, as text | GPU, as chat | CPU |
|---|--:|--:|--:|--:|--:|
{rows}
| **mean of the tasks** | {total} | {gpu_mean:.1%} | | | {cpu_mean:.1%} |

Where a task hides an easy and a hard part (GPU): {groups}. As the decoder, it reverses made-up
words, which it sees in pieces, and no held-out dictionary word, and it was not able to learn to look
back in a passage from a thing to its colour or its owner.

Recall by distance: one to six named values over so many tokens of stories, and a question about the
first. Values and stories are held out. Tokens are counted from the end of the value to the end of
the question.

| distance | tokens, least to most | examples | GPU | GPU, as text | GPU, as chat | CPU |
|--:|--:|--:|--:|--:|--:|--:|
{distances}

Held-out loss in nats a token, on the GPU: {gpu_documents:.4f} over {gpu_loss_tokens[documents]:,} tokens
of answers and stories, {gpu_stories:.4f} over {gpu_loss_tokens[stories]:,} tokens of stories alone. On the
CPU: {cpu_documents:.4f} over {cpu_loss_tokens[documents]:,} and {cpu_stories:.4f} over
{cpu_loss_tokens[stories]:,}. (A story's names and places are drawn at
random, which no model can foresee.)

Held out means: one in {heldout_share} of all task contents, by a hash of the content (for a sum,
its operands in either order), and never in the training text in any form. Facts are the exception:
each fact is trained in one phrasing at least, and what is held out is another phrasing of it.

`heldout.json` beside this file has a few examples of each task and of each distance: the prompt (a
chat example's is the user's message, for the chat template), the right `answer`, and `reference`,
what this checkpoint says with transformers on a CPU in float32, up to the end of a text example's
line or a chat turn.

## Samples

Greedy, on the GPU, from fixed prompts; none was left out. Some of them were in the training text.

{samples}

## Model

Bamba architecture: {shape}. Tied embeddings, rotary base 10000 on half of a head, no limit on the
time step. Byte-level BPE of 2048 tokens, digits single; special tokens `<|endoftext|>`,
`<|im_start|>`, `<|im_end|>`, `<|pad|>`. No token is put before a prompt. Chat is ChatML:
`<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n`.

## Training

`{command}` in `examples/train_embedded_hybrid`: {steps:,} steps, {tokens_m:.0f} million tokens in
rows of {row_len:,}, {loop_seconds:.0f} seconds of training ({seconds:.0f} with the compilation) on
one {device}{shared}, torch {torch}, transformers {transformers}, {workers} data workers. The text is
generated while training, from a seed. No text or weights of others went in. With `--minutes`, the
number of steps and the learning rate follow the clock; `--steps {steps} --workers {workers}` takes the
same batches, at a learning rate that follows the steps.
"""


def _shape(config: dict) -> str:
    attention = " and ".join(str(index + 1) for index in config["attn_layer_indices"])
    return (
        f"{config['num_hidden_layers']} layers, width {config['hidden_size']}, feed-forward "
        f"{config['intermediate_size']}; {config['num_attention_heads']} attention heads of "
        f"{config['hidden_size'] // config['num_attention_heads']} with {config['num_key_value_heads']} key-value "
        f"heads in layers {attention}, and in the others Mamba-2 with {config['mamba_n_heads']} heads of "
        f"{config['mamba_d_head']}, a state of {config['mamba_d_state']} and a convolution over "
        f"{config['mamba_d_conv']} tokens"
    )


def _distance_row(distance: str, gpu: dict, cpu: dict) -> str:
    least, _, most = gpu["tokens"]
    shares = " | ".join(f"{gpu[key]:.1%}" for key in ("accuracy", "text", "chat"))
    return f"| {distance} | {least} to {most} | {gpu['examples']} | {shares} | {cpu['accuracy']:.1%} |"


def _table(row: Callable[[str, dict, dict], str], gpu: dict, cpu: dict) -> str:
    return "\n".join(row(name, result, cpu[name]) for name, result in gpu.items())


def render(train: dict, gpu: dict, cpu: dict, config: dict, num_bytes: int, shared: bool) -> str:
    """The card's text. shared: whether another training ran on the same GPU."""
    num_attention = len(config["attn_layer_indices"])
    return CARD.format(
        **train,
        **figures("gpu", gpu),
        **figures("cpu", cpu),
        shared=" that another training shared" if shared else "",
        millions=train["parameters"] / 1e6,
        megabytes=num_bytes / 1e6,
        tokens_m=train["tokens"] / 1e6,
        num_attention=num_attention,
        num_mamba=config["num_hidden_layers"] - num_attention,
        rows=_table(task_row, gpu["tasks"], cpu["tasks"]),
        cpu_examples=max(result["examples"] for result in cpu["tasks"].values()),
        total=sum(result["examples"] for result in gpu["tasks"].values()),
        groups=groups(gpu["tasks"]),
        distances=_table(_distance_row, gpu["distances"], cpu["distances"]),
        gpu_loss_tokens={kind: loss["tokens"] for kind, loss in gpu["loss"].items()},
        cpu_loss_tokens={kind: loss["tokens"] for kind, loss in cpu["loss"].items()},
        heldout_share=HELDOUT_SHARE,
        samples="\n\n".join(sample(row) for row in gpu["samples"]),
        shape=_shape(config),
    )


def main() -> None:
    """Write README.md and heldout.json into the checkpoint's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--train", type=Path, default=RESULTS / "train.json")
    parser.add_argument("--gpu", type=Path, default=RESULTS / "eval_gpu_bfloat16.json")
    parser.add_argument("--cpu", type=Path, default=RESULTS / "eval_cpu_float32.json")
    parser.add_argument("--shared", action="store_true", help="another training ran on the same GPU")
    args = parser.parse_args()
    files = (args.train, args.gpu, args.cpu, args.checkpoint / "config.json")
    train, gpu, cpu, config = (json.loads(file.read_text()) for file in files)
    size = (args.checkpoint / "model.safetensors").stat().st_size
    (args.checkpoint / "README.md").write_text(render(train, gpu, cpu, config, size, args.shared))
    (args.checkpoint / "heldout.json").write_text(json.dumps(cpu["heldout"], indent=1) + "\n")


if __name__ == "__main__":
    main()
