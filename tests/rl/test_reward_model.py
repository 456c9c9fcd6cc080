"""A reward model reads text through its own tokenizer, or the policy's token ids if the tokenizers are the same."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny
import torch
from e2e.toy import LETTERS
from samples import random_samples
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.rl import Learner, make_algorithm
from paceline.rl.reward_model import RewardModel

TEMPLATE = "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{% endfor %}"


def tokenizer(letters: str, template: str | None = None) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({c: i for i, c in enumerate(letters)}, unk_token="~"))
    made.pre_tokenizer, made.decoder = Split("", "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="~", chat_template=template,
                                   clean_up_tokenization_spaces=False)


POLICY, OTHER = LETTERS, LETTERS[::-1]


@pytest.fixture
def saved(tmp_path):
    """A classifier whose tokenizer numbers the letters the other way round."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, num_labels=1, pad_token_id=60, max_position_embeddings=64)
    model = Qwen2ForSequenceClassification(config).double()
    model.save_pretrained(tmp_path)
    tokenizer(OTHER, TEMPLATE).save_pretrained(tmp_path)
    return tmp_path, model


def sample(prompt, text):
    found = random_samples(1, 1)[0]
    words = prompt if isinstance(prompt, str) else "abc"
    ids = tokenizer(POLICY).encode(words + text)
    found.tokens, found.prompt_length, found.prompt, found.text = ids, len(words), prompt, text
    found.sampled = torch.zeros(len(text), dtype=torch.float64)
    return found


def test_text_goes_through_the_reward_models_own_tokenizer_and_chat_template(saved):
    path, theirs = saved
    messages = [{"role": "user", "content": "abc"}]
    samples = [sample("abc", "Hello"), sample(messages, "Hi"), sample(None, "xyz")]
    ours = RewardModel.load(path, tokenizer(POLICY), 61, "cpu", torch.float64, torch.float64)
    other = tokenizer(OTHER)
    texts = ["abcHello", "UabcAHi", "abcxyz"]
    with torch.no_grad():
        expected = [float(theirs(torch.tensor([other.encode(text)])).logits[0, 0]) for text in texts]
    assert [ours.token_ids(one) for one in samples] == [other.encode(text) for text in texts]
    learner = Learner(deepcopy(tiny.model()), make_algorithm("grpo", 16), LearnerConfig(), OptimizerConfig(), 10, 1.0,
                      torch.float64, reward_model=ours, reward_weight=0.5)
    assert learner.scores(samples) == pytest.approx([0.5 * score for score in expected], rel=1e-5)


def test_a_chat_template_that_rejects_the_prompt_is_one_line(saved):
    path, _ = saved
    tokenizer(OTHER, "{{ raise_exception('no role\\n is known') }}").save_pretrained(path)
    ours = RewardModel.load(path, tokenizer(POLICY), 61, "cpu", torch.float64, torch.float64)
    with pytest.raises(ValueError, match=r"^reward_model: messages: the chat template rejects them .no role is known.$"):
        ours.packed([sample([{"role": "user", "content": "abc"}], "Hi")], 64, "cpu")


def test_the_same_tokenizer_takes_the_policys_token_ids(saved):
    ours = RewardModel.load(saved[0], tokenizer(OTHER), 61, "cpu", torch.float64, torch.float64)
    assert ours.token_ids(one := sample("abc", "Hello")) is one.tokens


def test_a_reward_model_that_cannot_read_the_policys_answers_is_refused(saved):
    path, _ = saved
    with pytest.raises(ValueError, match="the policy has no tokenizer"):
        RewardModel.load(path, None, 61, "cpu", torch.float64, torch.float64)
    for file in path.glob("*token*"):
        file.unlink()
    (path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no tokenizer, and a smaller vocabulary"):
        RewardModel.load(path, tokenizer(POLICY), 90, "cpu", torch.float64, torch.float64)
