"""A reply's tokens are what the chat template writes behind the turn; earlier tokens are never touched."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from paceline.bundled import resolve_model
from paceline.engine.replies import encode_reply
from paceline.models.weights import open_checkpoint

QWEN = """{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content.strip() + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
"""Like Qwen3's: a default system prompt, thinking that depends on what follows, one turn for adjacent results of tools."""
LLAMA = """{{- '<|begin_of_text|>' }}{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<|eom_id|>"]
REPLY = [{"role": "tool", "content": "4", "name": "f"}, {"role": "tool", "content": "5"}]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and special ones."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    made = Tokenizer(BPE(letters, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, clean_up_tokenization_spaces=False)


def reply_text(template: str | None, turn: str, messages=None, **variables) -> str:
    tokens = tokenizer(template)
    stops = {tokens.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")}
    ids = encode_reply(messages or REPLY, tokens.encode(turn, add_special_tokens=False), tokens, stops, variables)
    return tokens.decode(ids)


def test_qwen_style():
    results = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    assert reply_text(QWEN, "call<|im_end|>") == results + "<|im_start|>assistant\n"
    assert reply_text(QWEN, "a call that a limit cut") == "<|im_end|>" + results + "<|im_start|>assistant\n"
    assert reply_text(QWEN, "x<|im_end|>", enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    user = [{"role": "user", "content": "more"}]
    assert reply_text(QWEN, "x<|im_end|>", user) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_llama_style():
    """Its turns end in two ways; a call of a tool with <|eom_id|>, which the template does not write."""
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    results = head.format("ipython") + "4<|eot_id|>" + head.format("ipython") + "5<|eot_id|>" + head.format("assistant")
    assert reply_text(LLAMA, "call<|eom_id|>") == reply_text(LLAMA, "call<|eot_id|>") == results
    assert reply_text(LLAMA, "cut") == "<|eot_id|>" + results


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_a_whole_conversation_is_what_the_template_writes(template):
    """Prompt, turn, reply: where the template does not change earlier turns, the tokens are those of the whole conversation."""
    tokens = tokenizer(template)
    asked, answered = [{"role": "user", "content": "?"}], {"role": "assistant", "content": "call"}
    end = "<|im_end|>" if template is QWEN else "<|eot_id|>"
    prompt = tokens.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokens.apply_chat_template([*asked, answered, *REPLY], tokenize=False, add_generation_prompt=True)
    assert prompt + "call" + end + reply_text(template, "call" + end) == whole


def test_without_a_template_and_with_the_bundled_one():
    assert reply_text(None, "x") == "\n4\n\n5\n"
    tokens = open_checkpoint(resolve_model("default")).tokenizer()
    end = tokens.convert_tokens_to_ids("<end>")
    ids = encode_reply([{"role": "user", "content": "?3"}], [1, 2, end], tokens, {end})
    assert tokens.decode(ids) == "?3:"


def test_a_template_that_raises_or_drops_turns_is_one_line():
    for template, wrong in (("{{ raise_exception('roles must\\n alternate') }}", "rejects them .roles must alternate"),
                            ("{{ messages[-1].content }}", "leaves out the turn before it")):
        with pytest.raises(ValueError, match=wrong):
            reply_text(template, "x")
