"""A tiny policy with an end-of-text token, and a tokenizer with the characters of JSON and of calls of tools."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from tiny import CONFIGS, VOCAB, model
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from paceline.models.decoder import Decoder

PIECES = ["<eos>", "{", "}", '"', ":", ",", "[", "]", " ", '"a":', '"name"', *"0123456789", *"abcdefghijklmnoprstuvwxyz",
          "ab", "abc", "bc", "12", "true", "~", "<", ">", "/", "_", "\n", ";", "-", "."]
EOS = 0


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with pieces of several letters: one text has several tokenizations. It encodes letter by letter."""
    assert len(PIECES) <= VOCAB
    raw = Tokenizer(WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="~"))
    raw.pre_tokenizer, raw.decoder = Split("", "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="~", eos_token="<eos>", clean_up_tokenization_spaces=False)


@cache
def policy(kind: str = "llama") -> Decoder:
    """The tiny policy, with an end-of-text token."""
    found = Decoder.random(replace(CONFIGS[kind], eos_token_ids=(EOS,)), 0, std=0.35, dtype=torch.float64)
    found.load_state_dict(model(kind).state_dict())
    return found
