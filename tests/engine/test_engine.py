"""Grouped attention, which copies no cache, gives the same logits as transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from qrl import tiny
from qrl.engine import attention, hf

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def models():
    plain = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32).eval()
    grouped = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32).eval()
    attention.use_grouped(grouped)
    assert (plain.config._attn_implementation, grouped.config._attn_implementation) == ("sdpa", attention.NAME)
    assert plain.config.num_key_value_heads < plain.config.num_attention_heads
    return plain, grouped


@torch.inference_mode()
def decoded(model, ids, mask, steps):
    """Return the logits of each step of decoding given ids: (steps, batch, vocabulary)."""
    cache, logits, start = DynamicCache(config=model.config), [], ids.shape[1] - steps
    for end in range(start, ids.shape[1]):
        new = ids[:, :end] if end == start else ids[:, end - 1 : end]
        positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        out = model(input_ids=new, attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("padding", [0, 9])
def test_grouped_attention_decodes_to_the_same_logits(models, padding):
    ids = torch.randint(10, 500, (5, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    plain, grouped = (decoded(model, ids, mask, 20) for model in models)
    torch.testing.assert_close(grouped, plain, rtol=1e-4, atol=1e-4)


def test_log_likelihoods_in_batches_are_those_of_each_text_alone(models):
    ids = torch.randint(5, 400, (7, 40), generator=torch.Generator().manual_seed(0)).tolist()
    prompts, texts = [row[: 9 + i] for i, row in enumerate(ids)], [row[20 : 23 + 2 * i] for i, row in enumerate(ids)]
    found = hf.log_likelihoods(models[1], prompts, texts, batch_size=4)
    for prompt, text, mean in zip(prompts, texts, found, strict=True):
        with torch.inference_mode():
            logits = models[0](torch.tensor([prompt + text])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(-1, torch.tensor(text)[:, None]).mean()
        assert mean == pytest.approx(float(expected), abs=1e-4)


def test_gradients_go_through_transformers_own_attention(models):
    ids = torch.randint(10, 500, (3, 24), generator=torch.Generator().manual_seed(1))
    gradients = []
    for model in models:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.equal(*gradients)


def test_a_model_with_another_attention_is_left_alone():
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, attn_implementation="eager")
    attention.use_grouped(model)
    assert model.config._attn_implementation == "eager"
