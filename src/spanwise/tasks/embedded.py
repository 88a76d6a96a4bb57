"""The embedded (built-in) tasks: their problems, and the warm start (first training) of each tiny model.

A warm start is a `Course`: stretches of training on noisy traces, one after the other. Models have at most 0.7 million parameters,
tokenizers some sixty ids, or some 460 for letters in English; all are real `transformers` classes.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.layout import Layout
from spanwise.score import parse_confidence
from spanwise.tasks import digits, invoices
from spanwise.tasks.digits import Source
from spanwise.tasks.fields import FIELDS_NOISE, Fields, field_words
from spanwise.types import BlockText

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
# With embeddings of the usual standard deviation, 0.02, learning arithmetic takes much longer.
_EMBEDDING_STD = 0.5


def build_tokenizer() -> Any:
    """Build the tokenizer of the digit tasks: a token for each tag, each step such as `+3` and each other character."""
    tag_marks = [mark for tag in digits.DIGITS_LAYOUT.tags for mark in (f"<{tag}>", f"</{tag}>")]
    step_words = [f"{operator}{operand}" for operator in digits.OPERATORS for operand in range(1, 10)]
    vocabulary_words = [*tag_marks, *"0123456789", digits.FILLER, "=", ".", "?", *step_words]
    return word_tokenizer(vocabulary_words, r"</?[a-z]+>|[-+*~][1-9]|.")


def build_fields_tokenizer() -> Any:
    """Build the tokenizer of the task `fields`: a token per JSON key, digit and brace."""
    return word_tokenizer([*"0123456789", digits.FILLER, "=", *field_words()], r"""\{"a": |, "[a-z]+": |.""")


def build_invoice_tokenizer() -> Any:
    """Build the tokenizer of invoice letters: about 450 word pieces, digits, JSON keys and null."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    letter_problems = invoices.INVOICES.training(3_000, rng=np.random.default_rng(0))
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    # No word begins with a space, so that a name has the same tokens in a letter and in JSON.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z_]+ ?|[0-9]|[^A-Za-z_0-9] ?"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer_trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=[PAD, END, UNKNOWN], initial_alphabet=list(string.printable[:95]), show_progress=False
    )
    tokenizer.train_from_iterator([*letter_problems.prompts, *invoices.answers(letter_problems)], tokenizer_trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in invoices.key_words()])
    return _fast_tokenizer(tokenizer)


def build_reader(tokenizer: Any, seed: int, *, width: int = 128) -> Any:
    """Build the model that reads invoice letters. 0.7 million parameters; convolutions ease copying."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    id_of_token = tokenizer.get_vocab()
    model_config = Lfm2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3,
        block_auto_adjust_ff_dim=False, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=id_of_token[PAD], eos_token_id=id_of_token[END],
        bos_token_id=None,
    )  # fmt: skip
    return _draw_weights(Lfm2ForCausalLM, model_config, seed, embedding_std=0.3)


def _draw_weights(model_class: Any, config: Any, seed: int, *, embedding_std: float) -> Any:
    """Build a model with random weights from a seed. Leave torch's global random state unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=embedding_std)
    return model


def word_tokenizer(words: list[str], pattern: str) -> Any:
    """Build a tokenizer with one token for each word. `pattern` matches the words in a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    id_of_word = {word: index for index, word in enumerate([PAD, END, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(id_of_word, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast_tokenizer(tokenizer)


def _fast_tokenizer(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(tokenizer: Any, seed: int, *, layers: int = 2, positions: int = 64, width: int = 128, heads: int = 4) -> Any:
    """Build a Llama with random weights from a seed. Leave torch's global random state unchanged.

    Positions are rotary: prompts have one length, so step i always stands the same distance before the digit it leads to.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    id_of_token = tokenizer.get_vocab()
    model_config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=positions, tie_word_embeddings=True,
        pad_token_id=id_of_token[PAD], eos_token_id=id_of_token[END], bos_token_id=None,
    )  # fmt: skip
    return _draw_weights(LlamaForCausalLM, model_config, seed, embedding_std=_EMBEDDING_STD)


#: Prompts, each with the completion that a warm start imitates.
Pairs = list[tuple[str, str]]
#: The names of warm starts: the digit tasks have four of them, and the task `invoices` has one.
Start = Literal["easy", "hard", "twice", "long", "invoices"]


@dataclass(frozen=True)
class Stretch:
    """One stage of a warm start: how to draw its texts, and the tokens in the loss. `learned=None`: all but prompts."""

    name: str
    place: int  # The seed of the stage's random training texts.
    noise: Any  # The error rates of the stage's texts, such as a `TraceNoise`.
    draw: Callable[[int, np.random.Generator], Pairs]
    learned: Callable[[Int[Tensor, "n t"], dict[str, int]], Bool[Tensor, "n t"]] | None = None

    def batch(self, tokenizer: Any, size: int, rng: np.random.Generator) -> tuple[Int[Tensor, "n t"], Int[Tensor, " n"]]:
        """Draw prompts with training completions. Return their right-padded token ids, and each prompt's token count."""
        trace_pairs = self.draw(size, rng)
        training_texts = [f"{prompt}{trace}{END}" for prompt, trace in trace_pairs]
        ids_nt = tokenizer(training_texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return ids_nt, torch.tensor([len(ids) for ids in tokenizer([prompt for prompt, _ in trace_pairs])["input_ids"]])


@dataclass(frozen=True)
class Course:
    """All training stages of a warm start, and the functions that build its tokenizer and its model."""

    stretches: tuple[Stretch, ...]
    tokenizer: Callable[[], Any] = build_tokenizer
    shape: Mapping[str, int] = field(default_factory=dict)  # keyword arguments of the function `model`
    model: Callable[..., Any] = build_model
    # Whether to keep the mean of the embeddings at 0, so that those of rare words do not become alike.
    centred: bool = False
    folder: str = "digits-{}"
    key: Mapping[str, Any] = field(default_factory=dict)  # the task settings on which the model's weights depend


@dataclass(frozen=True)
class Embedded:
    """A task with its own problems and a tiny model that has learned to write in the right form."""

    name: str
    layout: Layout
    longest: int  # the largest number of tokens of a well-formed completion
    source: Source[Any]
    course: Course
    answers: Callable[[Any], list[str]] = attrgetter("answers")


def _course(
    first: int,
    noises: Mapping[str, Any],
    source: Source[Any],
    traces: Callable[..., list[str]],
    *,
    batch_divisor: int = 1,
    source_of: Callable[[Any], Source[Any]] | None = None,
    **options: Any,
) -> Course:
    """Build a warm start with one training stage for each level of noise in `noises`. Seeds count up from `first`."""

    def build_stretch(place: int, name: str, noise: Any) -> Stretch:
        problem_source = source if source_of is None else source_of(noise)

        def draw(size: int, rng: np.random.Generator) -> Pairs:
            problem_count = max(1, size // batch_divisor)
            problems = problem_source.draw(problem_count, rng=rng, exclude=source.held_out_prompts)
            return list(zip(problems.prompts, traces(problems, noise, rng=rng), strict=True))

        return Stretch(name, place, noise, draw)

    return Course(tuple(build_stretch(place, *entry) for place, entry in enumerate(noises.items(), first)), **options)


# The model of the task `digits_long` learns arithmetic alone before it learns the task.
_TABLES = Stretch(
    "long_tables", 6, digits.TABLES_NOISE, lambda size, rng: digits.tables(4 * size, rng=rng),
    lambda ids_nt, ids: ids_nt.roll(1, dims=1) == ids["="],
)  # fmt: skip
_LONG = _course(7, digits.LONG_NOISE, digits.LONG, digits.long_traces, batch_divisor=2)
_INVOICES = _course(
    11, invoices.INVOICES_NOISE, invoices.INVOICES, invoices.clerk_traces, batch_divisor=4,
    source_of=lambda noise: replace(invoices.INVOICES, draw_any=partial(invoices.draw_letters, facts=noise.facts)),
    tokenizer=build_invoice_tokenizer, model=build_reader, centred=True, folder="{}",
)  # fmt: skip
_HARD = _course(0, digits.NOISE, digits.DIGITS, digits.noisy_traces)
# Seeds 4 and 5 are left out, because benchmarks/agent_start.py uses them.
_TWICE = _course(2, digits.TWICE_NOISE, digits.DIGITS, digits.twice_traces)
STARTS: dict[Start, Embedded] = {
    "easy": Embedded("digits-easy", digits.DIGITS_LAYOUT, 32, digits.DIGITS, Course(_HARD.stretches[:1])),
    "hard": Embedded("digits-hard", digits.DIGITS_LAYOUT, 32, digits.DIGITS, _HARD),
    "twice": Embedded("digits-twice", digits.TWICE_LAYOUT, 32, digits.DIGITS, _TWICE),
    "long": Embedded(
        "digits-long", digits.LONG_LAYOUT, digits.LONGEST, digits.LONG,
        Course((_TABLES, *_LONG.stretches), shape={"layers": 3, "positions": digits.LONG_POSITIONS}),
    ),
    "invoices": Embedded(
        "invoices", invoices.INVOICES_LAYOUT, invoices.LONGEST, invoices.INVOICES, _INVOICES, invoices.answers
    ),
}  # fmt: skip


def embedded(task: Start | Fields) -> Embedded:
    """Return an embedded (built-in) task by the name of its warm start. The task `fields` is given by its settings."""
    if not isinstance(task, Fields):
        return STARTS[task]
    fields_course = _course(
        9, FIELDS_NOISE, task.source, task.traces, tokenizer=build_fields_tokenizer, shape={"width": 64, "heads": 2},
        folder=f"{{}}-{task.kind}-{task.count}", key={"fields": {"kind": task.kind, "count": task.count}},
    )  # fmt: skip
    return Embedded(f"fields-{task.kind}-{task.count}", task.layout, task.longest, task.source, fields_course, task.answers)


@dataclass(frozen=True)
class Task:
    """The task of a run: a model, prompts with answers, and the blocks of completions.

    Args:
        name: how reports call it.
        model: a hub name or a folder that `from_pretrained` reads (model and tokenizer).
        train: training prompts, a `datasets.Dataset`; columns `prompt` and `answer`.
        evaluation: held-out prompts; the same columns.
        layout: the blocks of a completion.
        max_completion_length: no completion that keeps the format needs more tokens.

    Example:
        >>> from datasets import Dataset
        >>> from spanwise.tasks import DIGITS_LAYOUT
        >>> rows = Dataset.from_dict({"prompt": ["2 + 2?"], "answer": ["4"]})
        >>> Task("sums", "my/model", rows, rows, DIGITS_LAYOUT, 64).layout.names
        ('solution', 'confidence')
    """

    name: str
    model: str
    train: Any
    evaluation: Any
    layout: Layout
    max_completion_length: int


def stated_confidences(text: list[BlockText], block: str, layout: Layout, *, tag: str = "confidence") -> torch.Tensor:
    """Return the number that each completion states as its confidence. NaN if it is missing or unreadable."""
    tag_contents = [blocks.get(block) or {} for blocks in text]
    confidence_texts = [fields.get(tag) if tag in layout.keys[block] else None for fields in tag_contents]
    confidences = [None if stated_text is None else parse_confidence(stated_text) for stated_text in confidence_texts]
    return torch.tensor([math.nan if q is None else q for q in confidences], dtype=torch.float64)
