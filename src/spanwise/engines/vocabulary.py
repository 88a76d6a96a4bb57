"""The ids that a model in a folder can sample."""

from __future__ import annotations

from transformers import PretrainedConfig


def model_size(path: str | None) -> int | None:
    """How many there are, often more than its tokenizer has tokens; None where no file says it. Read, never run."""
    try:
        written, _ = PretrainedConfig.get_config_dict(path) if path else ({}, {})
    except (OSError, ValueError):
        return None
    return {**written, **(written.get("text_config") or {})}.get("vocab_size")
