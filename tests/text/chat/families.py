"""Small chat templates of our own. Each behaves as the templates of one family do, in what they
read and in where their text is cut.
"""

from typing import Final

QWEN3: Final = """\
{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{%
     endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and m.reasoning_content is string %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}{% if m.content is string %}{{ m.content.lstrip('\\n') }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3: Final = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + system +
     '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' or m.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "'
  + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim +
     '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif
     %}"""

MISTRAL: Final = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT] ' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": '
  + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": '
  + call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- else %}{{ raise_exception('only user, system, assistant and tool') }}
{%- endif %}
{%- endfor %}"""

GEMMA3: Final = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- if messages[0].content is string %}{% set prefix = messages[0].content + '\\n\\n' %}
{%- else %}{% set prefix = messages[0].content[0].text + '\\n\\n' %}{% endif %}
{%- set turns = messages[1:] %}
{%- else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate')
     }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (prefix if
     loop.first else '') }}
{%- if m.content is string %}{{ m.content | trim }}
{%- elif m.content is iterable %}
{%- for item in m.content %}{% if item.type == 'text' %}{{ item.text | trim }}{% endif %}{% endfor
     %}
{%- else %}{{ raise_exception('no such content') }}{% endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

HERMES: Final = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + {'arguments': call.function.arguments, 'name': call.function.name} |
     tojson
  + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

DEEPSEEK: Final = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{%
     endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.content is defined %}
{%- set content = m.content.split('</think>')[-1] %}{{ '<|Assistant|>' + content + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

GPT_OSS: Final = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages %}
{%- if m.role in ('system', 'developer') %}{{ '<|start|>developer<|message|># Instructions\\n\\n'
  + m.content + '\\n\\n<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>'
     }}{% endif %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name
  + '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson +
     '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}{{ '<|start|>tool<|message|>' + m.content | tojson + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

PHI4: Final = """\
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

SMOLLM3: Final = """\
{%- set mode = '/think' if enable_thinking | default(true) else '/no_think' %}
{%- if messages[0].role == 'system' %}
{%- if '/no_think' in messages[0].content %}{% set mode = '/no_think' %}{% endif %}
{%- set instructions = messages[0].content.replace('/no_think', '').rstrip() %}
{%- else %}{% set instructions = '' %}{% endif %}
{{- '<|im_start|>system\\nMode: ' + mode + '\\n' + instructions + '<|im_end|>\\n' }}
{%- for d in documents or [] %}{{ '[' + d.title + ']' + d.text + '\\n' }}{% endfor %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' and mode == '/no_think' %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n'
     }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}
{%- endif %}"""

PARTS_ONLY: Final = """\
{%- for m in messages %}[{{ m.role }}]
{%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}
{% endfor %}"""

FAMILIES: Final = {
    "Qwen3": QWEN3,
    "Llama 3": LLAMA3,
    "Mistral": MISTRAL,
    "Gemma 3": GEMMA3,
    "Hermes": HERMES,
    "DeepSeek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "Phi-4": PHI4,
    "SmolLM3": SMOLLM3,
}
