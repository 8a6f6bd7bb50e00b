"""Turn documents into packed rows of tokens, each with its weight; worker processes do it during training."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from grammar import Document, documents
from tokenizer import PAD
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CHUNK = 256  # documents that are tokenized by one call

Row = tuple[np.ndarray, np.ndarray]


def encode_documents(tokenizer: Tokenizer, source: Iterable[Document]) -> Iterator[Row]:
    """Token ids and weights of each document: every token weighs what its segment does."""
    stream = iter(source)
    while chunk := list(itertools.islice(stream, CHUNK)):
        texts = [text for document in chunk for text, _ in document]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document in chunk:
            parts = [(next(encoded).ids, weight) for _, weight in document]
            ids = np.fromiter((token for part, _ in parts for token in part), np.int64)
            weights = np.repeat([weight for _, weight in parts], [len(part) for part, _ in parts])
            yield ids, weights.astype(np.float32)


def pack_rows(encoded: Iterable[Row], row_len: int, pad_id: int) -> Iterator[Row]:
    """Rows of exactly `row_len` tokens, each starting with a document's start.

    So the model sees at every row what a prompt at position 0 looks like; a document that does not fit opens
    the next row, and what is left of this one is padding of weight 0.
    """
    ids, weights, used = np.full(row_len, pad_id), np.zeros(row_len, np.float32), 0
    for document_ids, document_weights in encoded:
        if len(document_ids) > row_len:
            continue
        if used + len(document_ids) > row_len:
            yield ids, weights
            ids, weights, used = np.full(row_len, pad_id), np.zeros(row_len, np.float32), 0
        end = used + len(document_ids)
        ids[used:end], weights[used:end] = document_ids, document_weights
        used = end


def batches(
    tokenizer: Tokenizer, source: Iterable[Document], rows: int, row_len: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of token ids [rows, row_len], int16, and the weights of the same tokens, float16.

    The narrow types keep the workers' queue small: some machines have little shared memory.
    """
    packed = pack_rows(encode_documents(tokenizer, source), row_len, tokenizer.token_to_id(PAD))
    while batch := list(itertools.islice(packed, rows)):
        ids = torch.from_numpy(np.stack([row for row, _ in batch])).short()
        yield ids, torch.from_numpy(np.stack([weights for _, weights in batch])).half()


class TrainingStream(IterableDataset):
    """An endless stream of training batches; each worker process has a seed, and so documents, of its own."""

    def __init__(
        self,
        tokenizer_json: str,
        seed: int,
        rows: int,
        row_len: int,
        source: Callable[[int], Iterator[Document]] = documents,
    ) -> None:
        self.tokenizer_json = tokenizer_json
        self.source = source
        self.seed = seed
        self.rows = rows
        self.row_len = row_len

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        return batches(tokenizer, self.source(seed), self.rows, self.row_len)


def training_loader(tokenizer: Tokenizer, seed: int, rows: int, row_len: int, workers: int) -> DataLoader:
    """Workers take turns in a fixed order, so the same seed and worker count give the same batches."""
    stream = TrainingStream(tokenizer.to_str(), seed, rows, row_len)
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
