"""Real tokenizers small enough to build in milliseconds, with tokens that straddle tags and characters."""

import warnings

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

#: What a trained vocabulary merges: brackets with their neighbours, parts of tags, parts of characters.
WORDS = [
    "So", "So ", "answer", "<answer", "<answer>", "</answer>", "</", ".</", "><", ">x", ">4", "confidence", "<confidence>",
    "</confidence>", "reasoning>", "analysis>", ">\n\n<", " <", "0.9", "4", "日本", "é<",
]  # fmt: skip


def _merges(words: list[list[str]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for cut in range(1, len(word)):
            merges["".join(word[:cut]), word[cut]] = None
            vocab.setdefault("".join(word[: cut + 1]), len(vocab))
    return list(merges)


def byte_level(*, special: tuple[str, ...] = (), tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2, Qwen and Llama 3 have it, with merges that cut characters ("日" + a byte of "本")."""
    characters = bytes_to_unicode()  # the library's alphabet, not that of the code under test
    vocab = {characters[byte]: byte for byte in range(256)}
    words = [[characters[byte] for byte in word.encode()] for word in [*WORDS, "<|end|>"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(words, vocab)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", *special)])
    backend.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def byte_model(folder):
    """A small random model with a tokenizer of bytes, saved as one that came by name."""
    tokenizer = byte_level(special=("<|end|>",))
    tokenizer.eos_token = tokenizer.pad_token = "<|end|>"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def digits_model(folder, template=None):
    """A model of the digits that has learned nothing, saved as one that came by name."""
    from spanwise.tasks.embedded import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    build_model(tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sentencepiece(*, tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """BPE with byte fallback and ▁ for the space, as Llama 2 and Mistral have it."""
    vocab = {text: n for n, text in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    for character in sorted({c for word in WORDS for c in word.replace(" ", "▁")} | set("▁abcdefghijklmnopqrstuvwxyz.")):
        if character not in "é\n":
            vocab.setdefault(character, len(vocab))
    words = [list(word.replace(" ", "▁")) for word in WORDS if not set(word) & set("é\n")]
    merges = _merges([*words, list("▁the"), list("▁▁")], vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken(text, normalized=False) for text in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def word_level(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per word, joined by nothing."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def tag_level(pieces: list[str]) -> PreTrainedTokenizerFast:
    """One token per piece, a tag or a sign, with padding on the left: what scripted completions are written in."""
    backend = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    signs = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "?", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **signs)


def last_token_model(logits_fv):
    """A transformer of no layers that looks at the last token only, by its row of logits, and the tokenizer of the digits."""
    from spanwise.tasks.embedded import build_tokenizer

    tokenizer = build_tokenizer()
    size, width = len(logits_fv), 64
    config = LlamaConfig(
        vocab_size=size, hidden_size=width, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = logits_fv.T / 8  # the norm makes a unit vector of 64 numbers 8 times as long
    return model, tokenizer
