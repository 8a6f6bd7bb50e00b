"""Text to tokens and back: the tokenizer, chat templates, and text that streams."""

from core_runner.text.detokenizer import IncrementalDetokenizer
from core_runner.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]
