"""Put the embedded decoder's folder on the path: its text, tokenizer, loop and evaluation are used as they are."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECODER = ROOT / "examples" / "train_embedded_decoder"
DECODER_MODEL = ROOT / "plugins" / "model_states_decoder" / "embedded_model"

sys.path.insert(0, str(DECODER))
