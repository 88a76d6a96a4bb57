"""The bytes of every token id that the model of a verl run can sample."""

from __future__ import annotations

from typing import Any

from spanwise.segment import Vocabulary


def vocabulary_of(config: Any, tokenizer: Any) -> Vocabulary:
    """The vocabulary that completions are read with."""
    return Vocabulary.from_tokenizer(tokenizer, size=_model_size(config))


def _model_size(config: Any) -> int | None:
    """How many ids the model can sample: often it has more embedding rows than its tokenizer has tokens."""
    from transformers import AutoConfig

    path = config.actor_rollout_ref.model.get("path")
    if path is None:
        return None
    try:
        trusted = bool(config.actor_rollout_ref.model.get("trust_remote_code"))  # verl's own setting, off by default
        known = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    except (OSError, ValueError):
        return None
    return getattr(known.get_text_config(), "vocab_size", None)
