"""LoRA adapters: read from peft's files, cached in a bounded number, added to the model's products row by row."""

from tokenmill_worker.engine.lora.adapters import Adapters
from tokenmill_worker.engine.lora.files import AdapterError

__all__ = ["AdapterError", "Adapters"]
