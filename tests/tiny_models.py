"""Llama models of a few thousand weights with known behaviour, made in a second, for end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def save_parrot(folder: Path, replies: list[str], *, seed: int = 0) -> None:
    """Save a model that answers every prompt with one of ``replies``, each about equally often.

    A reply is one token. Attention and MLP start at zero, so that the next token depends on the last one alone,
    however long the prompt; the embeddings are trained until the assistant's tag leads to the replies.
    """
    torch.manual_seed(seed)
    tokenizer = _byte_tokenizer(replies)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    answers = tokenizer.convert_tokens_to_ids(replies)
    texts = torch.tensor([[assistant, answer, tokenizer.eos_token_id] for answer in answers])
    optimizer = torch.optim.Adam([*model.model.embed_tokens.parameters(), *model.lm_head.parameters()], lr=0.03)
    for _ in range(100):
        optimizer.zero_grad()
        model(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer(replies: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(reply, normalized=False) for reply in replies])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
