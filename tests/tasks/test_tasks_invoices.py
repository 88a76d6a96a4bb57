"""The letters: gold objects against the text, the tokenizer, the clerk's faults, the warm start's loss, what pays for what."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from spanwise import Batch, Vocabulary, credit_batch, read
from spanwise.recipe import load, scheme_of
from spanwise.tasks import task_layout, warm_start
from spanwise.tasks.embedded import build_invoice_tokenizer, build_reader, embedded
from spanwise.tasks.invoices import INVOICES, LONGEST, ClerkNoise, answers, clerk_traces, draw_letters, key_words
from spanwise.tasks.warm_start import SHIPPED, WarmStartSettings, _train, is_intact
from spanwise.tasks.warm_start import load as load_model

LETTERS = draw_letters(400, np.random.default_rng(3))


@pytest.fixture(scope="module")
def tokenizer():
    return build_invoice_tokenizer()


def spellings(day: str) -> list[str]:
    d = date.fromisoformat(day)
    return [day, f"{d:%d.%m.%Y}", f"{d.day} {d:%B} {d.year}", f"{d:%B} {d.day}, {d.year}", f"{d.day} {d:%b} {d.year}"]


def test_every_fact_of_the_object_stands_in_the_letter_and_what_is_null_stands_nowhere():
    for letter, gold in zip(LETTERS.letter_n, LETTERS.gold_n, strict=True):
        assert gold["invoice"] is None or f" {gold['invoice']}" in letter
        assert gold["customer"] is None or f"{gold['customer']}." in letter
        head = re.sub("_", ".", letter.split(".")[0])
        assert gold["invoice"] is not None or gold["date"] is not None or not re.search(r"\d", head), letter
        assert gold["due"] is not None or not re.search(r"(Please pay by|Due|Payable until) ", letter), letter
        for name in ("date", "due"):
            assert gold[name] is None or any(text in letter for text in spellings(gold[name])), letter
        numbers = [int(number) for number in re.findall(r"\d+", letter)]
        for item in gold["items"]:
            assert item["name"] in letter
            assert {item["quantity"], item["price"]} <= {*numbers}
        assert gold["total"] == sum(item["quantity"] * item["price"] for item in gold["items"])
        sign = {"EUR": "EUR|euros", "USD": "USD|dollars", "GBP": "GBP|pounds", "CHF": "CHF|francs"}[gold["currency"]]
        assert re.search(rf"\b({sign})\b", letter)
    stated = [f" {gold['total']} " in letter for letter, gold in zip(LETTERS.letter_n, LETTERS.gold_n, strict=True)]
    assert np.mean(stated) == pytest.approx(0.7, abs=0.1)
    assert np.mean([gold["due"] is None for gold in LETTERS.gold_n]) == pytest.approx(0.5, abs=0.1)
    short = draw_letters(400, np.random.default_rng(3), facts=0.2)
    assert np.mean([gold["customer"] is None for gold in short.gold_n]) == pytest.approx(1 - 0.95 * 0.6, abs=0.1)


def test_the_start_comes_with_the_package_and_nothing_is_trained(tokenizer, tmp_path, monkeypatch):
    """Its name says which settings made it: if one of them changes, `make starts` is due."""
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path))
    folder = warm_start("invoices", progress=lambda *_: pytest.fail("trained"))
    assert folder == SHIPPED / "invoices_clerk-0-a0ed61271943"
    assert is_intact(folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    assert list(tmp_path.iterdir()) == []
    assert load_model(folder).num_parameters() == 716_160
    letters = INVOICES.held_out(8)
    assert AutoTokenizer.from_pretrained(folder)(letters.prompts)["input_ids"] == tokenizer(letters.prompts)["input_ids"]


def test_the_tokenizer_loses_nothing_and_gives_keys_digits_and_names_their_tokens(tokenizer):
    texts = [prompt + answer for prompt, answer in zip(LETTERS.prompts, answers(LETTERS), strict=True)]
    ids = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(ids) == texts
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert max(len(tokenizer(answer)["input_ids"]) for answer in answers(LETTERS)) < LONGEST
    assert all(len(tokenizer(word)["input_ids"]) == 1 for word in key_words())
    in_letter, in_object = (tokenizer.tokenize(text) for text in ("3 x blue lamp, 12 each", '{"name": "blue lamp"'))
    assert in_object[2:-1] == in_letter[3:5] == ["blue ", "lamp"]  # a copy, token by token
    assert [token for token in in_letter if token.strip().isdigit()] == ["3", "1", "2"]


def test_a_clerk_without_faults_writes_the_gold_object_and_one_with_faults_what_misleads():
    rng = np.random.default_rng(0)
    assert clerk_traces(LETTERS, ClerkNoise(), rng=rng) == answers(LETTERS)
    wrong = [json.loads(trace) for trace in clerk_traces(LETTERS, ClerkNoise(slip=1.0), rng=rng)]
    for record, gold, other in zip(wrong, LETTERS.gold_n, LETTERS.misleading_n, strict=True):
        assert record["invoice"] == other["invoice"]
        assert (record["due"] is None) == (gold["due"] is not None or (other["date"] or gold["date"]) is None)
        assert all(
            line["quantity"] != gold_line["quantity"] or line["quantity"] == 1
            for line, gold_line in zip(record["items"], gold["items"], strict=True)
        )
        assert record["total"] == sum(item["price"] for item in gold["items"])
    half = [json.loads(trace) for trace in clerk_traces(LETTERS, ClerkNoise(slip=0.5), rng=rng)]
    kept = np.mean([record["total"] == gold["total"] for record, gold in zip(half, LETTERS.gold_n, strict=True)])
    single = np.mean([gold["total"] == sum(item["price"] for item in gold["items"]) for gold in LETTERS.gold_n])
    assert kept == pytest.approx(0.5 + 0.5 * single, abs=0.07)


def test_the_loss_of_the_warm_start_is_that_of_the_objects_alone(tokenizer):
    """Letters have different lengths: against every row by itself, without padding."""
    stretch, settings = embedded("invoices").course.stretches[1], replace(WarmStartSettings(), batch=16)
    model = build_reader(tokenizer, 0)
    pairs = stretch.draw(settings.batch, np.random.default_rng([0, 0, stretch.place]))
    assert len({len(tokenizer(prompt)["input_ids"]) for prompt, _ in pairs}) > 1
    losses = []
    with torch.no_grad():
        for prompt, answer in pairs:
            ids = tokenizer(f"{prompt}{answer}<eos>", return_tensors="pt")["input_ids"]
            first = len(tokenizer(prompt)["input_ids"])
            logps = model(input_ids=ids).logits[0].log_softmax(dim=-1)
            losses += [-float(logps[t - 1, ids[0, t]]) for t in range(first, ids.shape[1])]
    run = _train(model, tokenizer, stretch, 0, settings, centred=True)
    assert next(run) == pytest.approx(np.mean(losses), rel=1e-4)
    next(run)
    assert model.get_input_embeddings().weight.mean(dim=0).abs().max() < 1e-6


def credit_of(tokenizer, texts, gold, **fields):
    recipe, columns = load(None, {"task": "invoices", **fields}), {"answer": [json.dumps(gold)] * len(texts)}
    scheme = scheme_of(recipe, task_layout(recipe), LONGEST)
    batch = Batch.jagged(tokenizer(texts)["input_ids"], [0] * len(texts), columns=columns)
    credit = credit_batch(read(batch, scheme, Vocabulary.from_tokenizer(tokenizer)), batch, scheme)
    return {name: credit.block_nk[:, k].tolist() for k, name in enumerate(scheme.layout.names)}


def test_a_field_pays_itself_and_an_invented_item_a_missing_key_and_text_behind_the_object_cost_the_form(tokenizer):
    gold = {**LETTERS.gold_n[0], "items": [{"name": "blue lamp", "quantity": 3, "price": 12}], "total": 36, "due": None}
    twice = {**gold, "items": gold["items"] * 2}
    wrong = {**gold, "total": 15, "due": "2024-01-01"}
    credit = credit_of(tokenizer, [json.dumps(record) for record in (gold, twice, wrong)], gold, method="bae")
    assert credit["form"] == pytest.approx([1 / 3, -2 / 3, 1 / 3])  # the number of items; all three have their keys
    assert credit["total"] == credit["due"] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert credit["invoice"] == credit["items[0].name"] == pytest.approx([0.0] * 3)
    less = {name: gold[name] for name in gold if name != "currency"}
    texts = [json.dumps(gold), f"{json.dumps(gold)} 5", json.dumps(less)]
    form = credit_of(tokenizer, texts, gold, method="bae")["form"]
    assert form[0] > 0 > max(form[1:])  # nothing else pays for the end: without it a policy learns to write on
    # One number pays every block the same.
    credit = credit_of(tokenizer, [json.dumps(gold), json.dumps({**gold, "total": -1})], gold, method="dr_grpo")
    assert credit["form"] == credit["customer"] == credit["total"] == pytest.approx([0.5, -0.5])
