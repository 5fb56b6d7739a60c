"""Text on both sides of the engine: tokenizer, chat template, incremental detokenisation, stop strings."""
