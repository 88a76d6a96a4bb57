"""Make up English invoice letters, from which a model learns to write JSON.

    Invoice 4821 of 12 March 2024. Customer: Dana Weltor. 3 x blue lamp, 12 each. Total 36 euros. Please pay by 26.03.2024.
    {"invoice": 4821, "customer": "Dana Weltor", "date": "2024-03-12", "due": "2024-03-26", "currency": "EUR",
     "items": [{"name": "blue lamp", "quantity": 3, "price": 12}], "total": 36}

Letters hold what misleads a reader: other numbers, other dates, other names, smudged letters. A fact that a letter leaves out is
null, but for the total: it is then what the items add up to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Shaped

from spanwise.layout import Layout
from spanwise.tasks.digits import EmbeddedProblems, Source
from spanwise.tasks.fields import FORM

MOST_ITEMS, MOST_QUANTITY, MOST_PRICE = 3, 5, 29
#: The number of tokens of the longest JSON object and the end token, rounded up.
LONGEST = 88
FIELDS = ("invoice", "customer", "date", "due", "currency", "total")
ITEM_FIELDS = ("name", "quantity", "price")
#: The JSON fields that the objects of all invoice letters have.
MEASURED = (*FIELDS, *(f"items[0].{name}" for name in ITEM_FIELDS))
INVOICES_LAYOUT = Layout(
    {FORM: [], **{name: [name] for name in FIELDS}, **{f"items[*].{name}": [f"items[*].{name}"] for name in ITEM_FIELDS}},
    segmenter="json",
    most=MOST_ITEMS,
)

_FIRST = (
    "Ada", "Ben", "Cora", "Dana", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena", "Milo", "Nora", "Otto", "Pia",
)  # fmt: skip
_SYLLABLES = ("bar", "del", "fen", "gor", "han", "kel", "lin", "mar", "nor", "pel", "ran", "sol", "tam", "vik", "wel", "zan")
_SURNAME_ENDS = ("son", "berg", "ski", "mann", "ton", "er")
_COLOURS = ("blue", "red", "green", "black", "white", "small", "large", "round", "heavy", "plain", "oak", "steel")
_THINGS = (
    "lamp", "desk", "chair", "shelf", "cable", "pump", "valve", "filter", "ladder", "bench", "tile", "brush", "panel", "hinge",
    "motor", "basket", "frame", "mirror", "carpet", "kettle",
)  # fmt: skip
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_CURRENCIES: Mapping[str, tuple[str, ...]] = {
    "EUR": ("EUR", "euros"), "USD": ("USD", "dollars"), "GBP": ("GBP", "pounds"), "CHF": ("CHF", "francs"),
}  # fmt: skip
#: The wordings of an item in a letter. A comma, colon or semicolon ends the item's name.
_LINES = ("{quantity} x {name}, {price} each", "{name}: {quantity} at {price}", "{quantity} of {name}; {price} per piece")


@dataclass(frozen=True)
class InvoiceProblems(EmbeddedProblems):
    """N invoice letters, each with its right JSON object and its misleading facts."""

    letter_n: Shaped[np.ndarray, " n"]  # The texts of the invoice letters.
    gold_n: Shaped[np.ndarray, " n"]  # The right JSON object of each invoice letter.
    misleading_n: Shaped[np.ndarray, " n"]  # Each letter's misleading number, date and name, or None.

    @property
    def prompts(self) -> list[str]:
        """The text of each invoice letter, with a line break at its end."""
        return [f"{letter}\n" for letter in self.letter_n]


@dataclass(frozen=True)
class ClerkNoise:
    """How faulty the training completions of the invoice task are, and how many optional facts the letters state."""

    # the probability of a fault per field
    slip: float = 0.0
    facts: float = 1.0  # the smallest share of optional facts, such as a due date, in an invoice letter


INVOICES_NOISE: dict[str, ClerkNoise] = {
    "invoices_early": ClerkNoise(facts=0.2),
    "invoices": ClerkNoise(),
    "invoices_clerk": ClerkNoise(slip=0.65),
}


def _name(rng: np.random.Generator) -> str:
    """Make up the name of a person from parts of names."""
    syllable_count = int(rng.integers(1, 3))
    surname = "".join(_pick(_SYLLABLES, rng) for _ in range(syllable_count)) + _pick(_SURNAME_ENDS, rng)
    return f"{_pick(_FIRST, rng)} {surname.capitalize()}"


def _pick(words: Any, rng: np.random.Generator) -> Any:
    return words[int(rng.integers(len(words)))]


def _happens(rng: np.random.Generator, probability: float, share: float = 1.0) -> bool:
    return bool(rng.random() < share * probability)


def _write_date(day: date, form: int) -> str:
    month_name = _MONTHS[day.month - 1]
    return (
        day.isoformat(), f"{day:%d.%m.%Y}", f"{day.day} {month_name} {day.year}", f"{month_name} {day.day}, {day.year}",
        f"{day.day} {month_name[:3]} {day.year}",
    )[form]  # fmt: skip


def draw_letters(size: int, rng: np.random.Generator, *, facts: float = 1.0, most_facts: float = 1.0) -> InvoiceProblems:
    """Generate order letters and their JSON objects. Each has a share of `facts` to `most_facts` of optional facts."""
    empty_columns = [np.empty(size, dtype=object) for _ in range(3)]
    problems = InvoiceProblems(*empty_columns)
    for n in range(size):
        facts_share = facts if facts == most_facts else float(rng.uniform(facts, most_facts))
        problems.letter_n[n], problems.gold_n[n], problems.misleading_n[n] = _draw_letter(rng, facts_share)
    return problems


def _draw_letter(rng: np.random.Generator, facts: float) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Draw an invoice letter, its right JSON object, and the misleading facts in it."""
    draw_fact = partial(_happens, rng, facts)
    format_index = int(rng.integers(5))
    currency = _pick(tuple(_CURRENCIES), rng)
    currency_word = _pick(_CURRENCIES[currency], rng)
    invoice_number = int(rng.integers(1000, 10_000)) if draw_fact(0.88) else None
    invoice_date = date(2021, 1, 1) + timedelta(days=int(rng.integers(2_000)))
    due_date = invoice_date + timedelta(days=int(rng.integers(7, 61)))
    has_date, has_due_date = draw_fact(0.95), draw_fact(0.5)
    customer_name = _name(rng) if draw_fact(0.95) else None
    item_count = int(rng.integers(1, MOST_ITEMS + 1))
    item_names = [f"{_pick(_COLOURS, rng)} {_pick(_THINGS, rng)}" for _ in range(item_count)]
    items = [
        {"name": name, "quantity": int(rng.integers(1, MOST_QUANTITY + 1)), "price": int(rng.integers(2, MOST_PRICE + 1))}
        for name in item_names
    ]
    total_price = sum(item["quantity"] * item["price"] for item in items)
    gold_record = {
        "invoice": invoice_number, "customer": customer_name, "date": invoice_date.isoformat() if has_date else None,
        "due": due_date.isoformat() if has_due_date else None, "currency": currency, "items": items, "total": total_price,
    }  # fmt: skip
    misleading_facts = {
        "invoice": int(rng.integers(1000, 10_000)) if draw_fact(0.4) else None,
        "date": (invoice_date + timedelta(days=int(rng.integers(-20, 21)))).isoformat() if draw_fact(0.5) else None,
        "name": _name(rng) if draw_fact(0.4) else None,
    }
    first_sentence = " ".join(
        [_pick(("Invoice", "Bill", "Invoice no."), rng), *([str(invoice_number)] if invoice_number else [])]
        + ([_pick(("of", "from", "dated"), rng), _write_date(invoice_date, format_index)] if has_date else [])
    )
    sentences = [f"{first_sentence}."]
    if customer_name:
        sentences.append(_pick(("Customer: {}.", "For {}.", "Billed to {}."), rng).format(customer_name))
    item_template = _pick(_LINES, rng)
    sentences += [f"{item_template.format(**item)}." for item in items]
    first_insert_index = len(sentences)
    total_word = _pick(("Total", "Sum", "In all"), rng)
    sentences.append(f"{total_word} {total_price} {currency_word}." if draw_fact(0.7) else f"Prices in {currency_word}.")
    if has_due_date:
        sentences.append(f"{_pick(('Please pay by', 'Due', 'Payable until'), rng)} {_write_date(due_date, format_index)}.")
    misleading_day = misleading_facts["date"]
    misleading_date = _write_date(date.fromisoformat(misleading_day), format_index) if misleading_day else None
    wordings_of_facts = (
        (("Replaces {}.", "Order {}.", "Our reference {}."), misleading_facts["invoice"]),
        (("Delivered {}.", "Ordered {}.", "Shipped {}."), misleading_date),
        (("Contact: {}.", "Regards, {}.", "Delivered to {}."), misleading_facts["name"]),
    )
    for sentence in [_pick(wordings, rng).format(fact) for wordings, fact in wordings_of_facts if fact]:
        sentences.insert(int(rng.integers(first_insert_index, len(sentences) + 1)), sentence)
    letter = " ".join(sentences)
    return (_smudge(letter, rng) if draw_fact(0.5) else letter), gold_record, misleading_facts


def _smudge(letter: str, rng: np.random.Generator) -> str:
    """Replace one character by `_` in each of up to three words of an invoice letter."""
    characters = list(letter)
    smudgeable_words = ("Customer", "Total", "each", "Please", "Invoice", "pay", "Prices")
    word_starts = [letter.find(word) for word in smudgeable_words if word in letter]
    for word_start in word_starts[: int(rng.integers(1, 4))]:
        characters[word_start + int(rng.integers(1, 3))] = "_"
    return "".join(characters)


def answers(problems: InvoiceProblems) -> list[str]:
    """Return the right JSON object of each invoice letter as text."""
    return [json.dumps(gold) for gold in problems.gold_n]


def clerk_traces(problems: InvoiceProblems, noise: ClerkNoise, *, rng: np.random.Generator) -> list[str]:
    """Write training completions: each invoice letter as JSON, with random faults such as a hurried clerk makes."""
    fact_pairs = zip(problems.gold_n, problems.misleading_n, strict=True)
    return [json.dumps(_copy_with_faults(gold, misleading_facts, noise.slip, rng)) for gold, misleading_facts in fact_pairs]


def _copy_with_faults(
    gold: Mapping[str, Any], other: Mapping[str, Any], rate: float, rng: np.random.Generator
) -> dict[str, Any]:
    """Copy a letter's JSON object as a hurried clerk does: misread facts, invent dates, miscount."""
    draw_slip = partial(_happens, rng, rate)
    faulty_record = {**gold, "items": [dict(item) for item in gold["items"]]}
    if draw_slip():
        faulty_record["invoice"] = other["invoice"]
    if draw_slip() and faulty_record["customer"]:
        faulty_record["customer"] = other["name"] or faulty_record["customer"].split()[-1]
    if draw_slip() and faulty_record["date"]:
        faulty_record["date"] = other["date"] or faulty_record["due"] or faulty_record["date"]
    if draw_slip():
        faulty_record["due"] = None if faulty_record["due"] else (other["date"] or gold["date"])
    if draw_slip():
        faulty_record["currency"] = _pick(tuple(_CURRENCIES), rng)
    for item in faulty_record["items"]:
        if draw_slip():
            item["name"] = item["name"].split()[-1]
        if draw_slip():
            item["quantity"] = max(1, item["quantity"] + _pick((-1, 1), rng))
        if draw_slip():
            item["price"] = max(1, item["price"] + _pick((-10, -1, 1, 10), rng))
    if draw_slip():
        faulty_record["total"] = sum(item["price"] for item in gold["items"])
    return faulty_record


INVOICES: Source[InvoiceProblems] = Source(draw_letters, 20_264)


def key_words() -> list[str]:
    """Return texts that the tokenizer of the invoice task turns into one token each, such as JSON keys and `null`."""
    first_field, *other_fields = FIELDS[:-1]
    item_keys = [f', "{name}": ' for name in ITEM_FIELDS[1:]]
    return [f'{{"{first_field}": ', *(f', "{name}": ' for name in other_fields), ', "items": [', '{"name": ',
            '}, {"name": ', *item_keys, '}], "total": ', "}", '"', "null"]  # fmt: skip
