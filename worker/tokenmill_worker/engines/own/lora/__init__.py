"""LoRA adapters: read from peft's files, cached, and added to the model's products by row.

Belongs here: files, cache, and the places of a model where adapters act. Which adapters share a
step belongs to `scheduler`.
"""

from tokenmill_worker.engines.own.lora.adapters import Adapters
from tokenmill_worker.engines.own.lora.files import AdapterError

__all__ = ["AdapterError", "Adapters"]
