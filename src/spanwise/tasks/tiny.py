"""Tokenizers of some forty or sixty ids and a transformer of at most 0.6 million parameters, all real `transformers` classes."""

from __future__ import annotations

from typing import Any

import torch

from spanwise.tasks.digits import DIGITS_LAYOUT, FILLER, OPERATORS
from spanwise.tasks.fields import field_words

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
# At the usual 0.02 the blocks' outputs swamp the digits and arithmetic is learned much later.
_EMBEDDING_STD = 0.5


def build_tokenizer() -> Any:
    """The tokenizer of the digit chain: one token per tag, per operator with its operand, and per other character.

    It adds no special tokens by itself, pads on the left, and decodes what it encoded to the same text.

    Example:
        >>> tokenizer = build_tokenizer()
        >>> tokenizer.tokenize("7+3*4____=<answer>0</answer>")
        ['7', '+3', '*4', '_', '_', '_', '_', '=', '<answer>', '0', '</answer>']
        >>> len(tokenizer), tokenizer.pad_token, tokenizer.eos_token
        (61, '<pad>', '<eos>')
    """
    tags = [mark for tag in DIGITS_LAYOUT.tags for mark in (f"<{tag}>", f"</{tag}>")]
    steps = [f"{operator}{operand}" for operator in OPERATORS for operand in range(1, 10)]
    words = [*tags, *"0123456789", FILLER, "=", ".", "?", *steps]
    return _tokenizer(words, r"</?[a-z]+>|[-+*~][1-9]|.")


def build_fields_tokenizer() -> Any:
    """The tokenizer of the fields: one token per key with its punctuation, per digit and per brace; for the rest as above.

    Example:
        >>> tokenizer = build_fields_tokenizer()
        >>> tokenizer.tokenize('3_8_={"a": 1, "total": 6}')[4:]
        ['=', '{"a": ', '1', ', "total": ', '6', '}']
        >>> len(tokenizer)
        33
    """
    return _tokenizer([*"0123456789", FILLER, "=", *field_words()], r"""\{"a": |, "[a-z]+": |.""")


def _tokenizer(words: list[str], pattern: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: index for index, word in enumerate([PAD, END, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: Any, seed: int, *, layers: int = 2, positions: int = 64, width: int = 128, heads: int = 4) -> Any:
    """A Llama with random weights; the global random state stays as it was.

    Positions are rotary: prompts have one length, so step i always stands the same distance before the digit it leads to.

    Args:
        tokenizer: of the embedded tasks.
        seed: of the weights.
        layers: two are enough for short chains.
        positions: room for prompt and completion.
        width: of the residual stream, a multiple of 16.
        heads: of attention; each has an even share of the width.

    Example:
        >>> model = build_model(build_tokenizer(), 0)
        >>> type(model).__name__, model.num_parameters()
        ('LlamaForCausalLM', 403712)
        >>> build_model(build_tokenizer(), 0, layers=3, positions=256).num_parameters()
        601600
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=ids[PAD],
        eos_token_id=ids[END],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=_EMBEDDING_STD)
    return model
