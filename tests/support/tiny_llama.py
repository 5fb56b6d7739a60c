"""A Llama of two layers with drawn weights on bytes, saved where the engine can load it.

It draws bytes, so nearly every answer has broken UTF-8. Its tokenizer has the special tokens, the
tool calls and the thoughts of a chat model, so that their letters in a text can be taken for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenmill_worker.text.token_pieces import token_bytes

END: Final = "<|im_end|>"
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", END)
MARKS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MARK_IDS: Final = range(256 + len(SPECIAL), 256 + len(SPECIAL) + len(MARKS))
LENGTH: Final = 2_048
VOCAB: Final = 272  # the last ids have no token

TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is string %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{% if m.content is string %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def save(folder: Path, seed: int = 0, *, head_size: int = 16) -> Path:
    """Draw the weights and save the model with its tokenizer and its chat template. vLLM needs a
    `head_size` of 32.
    """
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2 * head_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=token_bytes)
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, normalized=False, special=False) for name in MARKS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=SPECIAL[0],
        chat_template=TEMPLATE,
    )
