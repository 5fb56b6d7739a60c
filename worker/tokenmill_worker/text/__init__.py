"""Text before and after the engine: tokenizer, chat template, incremental detokenisation, stop
strings.
"""
