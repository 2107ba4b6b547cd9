"""Chat templates that write tool calls, as models are published with them (shortened where that changes no text of a
conversation), with a tokenizer of bytes for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chat_tokenizer import byte_tokenizer

_CHATML_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools>\nCALLS<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
_CHATML_RESULTS = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
)
QWEN2_5 = (
    _CHATML_TOOLS.replace("CALLS", '{"name": <function-name>, "arguments": <args-json-object>}')
    + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
    """{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
    "{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    + _CHATML_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN3 = (
    _CHATML_TOOLS.replace("CALLS", '{"name": <function-name>, "arguments": <args-json-object>}')
    + "{%- set ns = namespace(last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set reasoning_content = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning_content) %}"
    "{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + "
    "content.lstrip('\n') }}{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}"
    "{%- for tool_call in message.tool_calls or [] %}"
    "{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    """{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
    "{%- if tool_call.arguments is string %}{{- tool_call.arguments }}"
    "{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}" + _CHATML_RESULTS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
QWEN3_CODER = (
    _CHATML_TOOLS.replace("CALLS", "<tool_call>\n<function=example>\n</function>\n</tool_call>")
    + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content is string and message.content | trim | length > 0 %}"
    "{{- '\n' + message.content | trim + '\n' }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
    "{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}"
    "{%- for name, value in tool_call.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    "{%- set value = value if value is string else value | tojson | safe %}"
    "{{- value }}{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    + _CHATML_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3_2 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}{{- system_message }}{{- '<|eot_id|>' }}"
    "{%- if not tools is none %}{%- set first_user_message = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}"
    """{{- 'Respond in the format {"name": function name, "parameters": dictionary}.\n\n' }}"""
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}"
    "{{- first_user_message + '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}"
    """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}"""
    "{{- '}' }}{{- '<|eot_id|>' }}{%- elif message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{%- if tools is not none and (message == user_messages[-1]) %}"
    "{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}"
    "{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}"
    "{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{- out[:-1] }}"
    "{%- if not tool_call.id is defined or tool_call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    """{{- ', "id": "' + tool_call.id + '"}' }}"""
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}"
    "{%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + ', ' }}"
    "{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    """{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}"""
    "{%- endif %}{%- endfor %}"
)
_DEEPSEEK_CALL = (
    "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' + "
    "tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>'"
)
DEEPSEEK_V3 = (
    "{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true) %}{{ bos_token }}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{{ message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}"
    "{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}"
    "{{ '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' + "
    + _DEEPSEEK_CALL
    + " }}{%- set ns.is_first = true -%}"
    "{%- else %}{{ '\n' + " + _DEEPSEEK_CALL + " }}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}"
    "{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}"
    "{%- set ns.is_tool = false -%}"
    "{%- else %}{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
    "{{ '<｜tool▁outputs▁begin｜>' if ns.is_output_first }}"
    "{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- set ns.is_output_first = false %}{%- endif %}{%- endfor -%}"
    "{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)
"""It ends a message of calls after each call but the conversation's first one."""
DEEPSEEK_V3_1 = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- if loop.index0 and messages[loop.index0 - 1].role == 'user' %}{{ '<｜Assistant｜></think>' }}{%- endif %}"
    "{{ message['content'] or '' }}{%- for tool in message['tool_calls'] or [] %}"
    "{{ '<｜tool▁calls▁begin｜>' if loop.first }}{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + "
    "'<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}{{ '<｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- if message['role'] == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜></think>' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Without tool calls."""


@dataclass(frozen=True)
class CallTemplate:
    """text: the template. format: key of FORMATS. stop: end of a turn."""

    text: str
    format: str
    stop: str = "<|im_end|>"


TEMPLATES = {
    "qwen2_5": CallTemplate(QWEN2_5, "hermes"),
    "qwen3": CallTemplate(QWEN3, "hermes"),
    "qwen3_coder": CallTemplate(QWEN3_CODER, "qwen_xml"),
    "llama3_2": CallTemplate(LLAMA3_2, "llama3_json", "<|eot_id|>"),
    "mistral": CallTemplate(MISTRAL, "mistral", "</s>"),
    "deepseek_v3": CallTemplate(DEEPSEEK_V3, "deepseek_v3", "<｜end▁of▁sentence｜>"),
    "deepseek_v3_1": CallTemplate(DEEPSEEK_V3_1, "deepseek_v31", "<｜end▁of▁sentence｜>"),
}


def tokenizer_of(template: CallTemplate) -> Any:
    """A tokenizer of bytes with this template; its end of sequence is the template's stop."""
    made = byte_tokenizer(template.text)
    made.add_special_tokens({"bos_token": "<s>", "eos_token": template.stop})
    return made
