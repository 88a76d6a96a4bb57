"""What a model is shown: an instruction and a question, or whole prompts as they are; and which tags and keys that tells it of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS

#: Where an instruction can go: no chat template, one without a system message, or one with it.
PromptStyle = Literal["plain", "user", "system"]


def message(role: str, content: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": role, "content": content}]


def asked(question: str, instruction: str, style: PromptStyle) -> Any:
    r"""A question with an instruction before it; with an empty one the question alone."""
    if style == "plain":
        return f"{instruction}\n\nProblem:\n{question}\n\n" if instruction else question
    if style == "system" and instruction:
        return message("system", instruction) + message("user", question)
    return message("user", f"{instruction}\n\n{question}" if instruction else question)


def shown(prompt: Any, tokenizer: Any) -> str:
    """A prompt as the model sees it: a text as it is, a conversation in the tokenizer's chat template."""
    if isinstance(prompt, str):
        return prompt
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False)
    except Exception as error:  # a template refuses a conversation with an exception of its own
        raise DataError(f"The model's chat template does not take the prompt {prompt!r:.80}: {error}.") from error


def untold(layout: Layout, texts: Iterable[str]) -> list[str]:
    """What a layout looks for and none of the texts holds, opening tags and keys, without what the prompt has opened already."""
    words: dict[str, None] = {}
    for part in layout.parts:
        asks = SEGMENTERS.find(part.segmenter).asks
        if asks is not None and part.mark != layout.prefilled:
            words.update(dict.fromkeys(asks(part.mark)))
    missing = list(words)
    for text in texts:
        missing = [word for word in missing if not _holds(text, word)]
    return missing


def _holds(text: str, word: str) -> bool:
    """Whether a text has a tag somewhere, or a word that is no part of another one."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) if word[:1].isalnum() else word in text
