"""Fidelity to Monte Carlo advantages: figures against plain loops and known truths, and the sampling around them."""

import io
import math
from itertools import product

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from spanwise.commands.fidelity import fidelity as room
from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.measure import BASELINES, FIGURES, Rerolls, fidelity
from spanwise.tasks import DIGITS_LAYOUT, Task, build_model, build_tokenizer

NAN = float("nan")


def rolled(x, s, m, *, seed=0, own_prefix=True, spread=0.15):
    """Confidences around a level of each prompt, over-confident; half of the prompts are mostly right."""
    g = torch.Generator().manual_seed(seed)
    level_x1, p_x1 = 0.5 + 0.3 * torch.rand(x, 1, generator=g), torch.rand(x, 1, generator=g)
    outcome_xs = (torch.rand(x, s, generator=g) < p_x1).double()
    prefix_xs = torch.arange(x * s).reshape(x, s) if own_prefix else (2 * torch.arange(x)[:, None] + outcome_xs).long()
    level_d = level_x1.expand(x, s if own_prefix else 2).flatten()
    confidence_xs = level_x1 + spread * (2 * torch.rand(x, s, generator=g) - 1)
    again_dm = level_d[:, None] + spread * (2 * torch.rand(len(level_d), m, generator=g) - 1)
    return Rerolls(confidence_xs.double(), outcome_xs, prefix_xs, again_dm.double())


def variance(values):
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def by_hand(data, score, name):
    """Every completion in one batch, group by prompt; figures straight from their definitions."""
    rows, (x, s) = [], data.prefix_xs.shape
    for i, j in product(range(x), range(s)):
        q, c, d = float(data.confidence_xs[i, j]), float(data.outcome_xs[i, j]), int(data.prefix_xs[i, j])
        again = [] if d < 0 else [v for v in data.again_dm[d].tolist() if v == v]
        rows.append((i, q, c, score(q, c), again))
    alone, advantages = [], []
    for i, _, c, r, _ in rows:
        others = {
            "none": [],
            "batch": [row for row in rows if row[3] == row[3]],
            "group": [row for row in rows if row[0] == i and row[3] == row[3]],
        }.get(name, [row for row in rows if row[0] == i and row[2] == c and row[3] == row[3]])
        alone.append(sum(row[0] == i and row[2] == c and row[3] == row[3] for row in rows) == 1)
        count, total = len(others), sum(row[3] for row in others)
        if name == "none":
            advantages.append(r)
        elif count < 2:
            advantages.append(0.0)
        else:
            advantages.append(r - (total - r) / (count - 1) if "LOO" in name else r - total / count)
    use = []
    for (_, q, c, r, again), a, single in zip(rows, advantages, alone, strict=True):
        if r == r and len(again) >= 2:
            values = [score(v, c) for v in again]
            target, noise = r - sum(values) / len(values), variance(values) / len(values)
            use.append((a, target, noise, (q - sum(again) / len(again)) ** 2, c, single))

    def root(top, below):
        return math.sqrt(max(top, 0.0) / below) if below else NAN

    def rmse(keep):
        kept = [(a - t) ** 2 - v for a, t, v, _, c, single in use if keep(c, single)]
        return root(sum(kept), len(kept))

    def rest(weight):
        """Least squares of w (k A - A_MC)^2 over k, and what it is relative to."""
        aa = sum(weight(u) * u[0] ** 2 for u in use)
        k = sum(weight(u) * u[0] * u[1] for u in use) / aa if aa else 0.0
        left = sum(weight(u) * ((k * u[0] - u[1]) ** 2 - u[2]) for u in use)
        return left, sum(weight(u) * (u[1] ** 2 - u[2]) for u in use)

    n = len(use)
    ma, mt = sum(u[0] for u in use) / n, sum(u[1] for u in use) / n
    va, vt = sum((u[0] - ma) ** 2 for u in use), sum((u[1] - mt) ** 2 for u in use)
    covariance = sum((u[0] - ma) * (u[1] - mt) for u in use)
    return {
        "rmse": rmse(lambda c, single: True),
        "rmse_wrong": rmse(lambda c, single: c == 0),
        "rmse_right": rmse(lambda c, single: c == 1),
        "rmse_alone": rmse(lambda c, single: single),
        "correlation": covariance / math.sqrt(va * vt) if va * vt > 0 else NAN,
        "ceiling": root(vt - sum(u[2] for u in use), vt),
        "rmse_scaled": root(rest(lambda u: 1.0)[0], n),
        "gradient_noise": root(*rest(lambda u: u[3])),
    }


def brier(q, c):
    return -((q - c) ** 2)


def log_score(q, c):
    q = min(max(q, 0.01), 0.99)
    return c * math.log(q) + (1 - c) * math.log(1 - q)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [brier, log_score])
def test_against_plain_loops(seed, rule):
    g = torch.Generator().manual_seed(seed)
    data = rolled(5, 6, 4, seed=seed)
    confidence_xs, outcome_xs, prefix_xs = data.confidence_xs.clone(), data.outcome_xs.clone(), data.prefix_xs.clone()
    again_dm = data.again_dm.clone()
    again_dm[torch.rand(again_dm.shape, generator=g) < 0.3] = NAN  # also prefixes with one re-roll or none
    gone = torch.rand(confidence_xs.shape, generator=g)
    confidence_xs[gone < 0.2] = NAN
    prefix_xs[gone < 0.1] = -1
    outcome_xs[gone > 0.93] = NAN
    data = Rerolls(confidence_xs, outcome_xs, prefix_xs, again_dm)
    found = fidelity(data, group_sizes=[6], batch=30, resamples=2, draws=3, rule=rule.__name__, seed=seed)
    for name in BASELINES:
        if name != "blended":
            expected = by_hand(data, rule, name)
            got = {figure: found.value(name, 6, figure) for figure in FIGURES}
            assert got == pytest.approx(expected, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("rerolls", [2, 64])
def test_the_noise_of_the_re_rolls_is_subtracted(rerolls):
    # Two thousand groups of 8 whose re-rolls vary like the reports: the error of a stratum mean is var / n, whatever M is.
    data = rolled(2000, 8, rerolls, seed=1)
    found = fidelity(data, baselines={"outcome": BASELINES["outcome"]}, group_sizes=[8], batch=16000, resamples=1, draws=20)
    count_xs = (data.outcome_xs[:, :, None] == data.outcome_xs[:, None, :]).sum(dim=2)
    level_x = data.confidence_xs.mean(dim=1, keepdim=True)
    # var (q - c)^2 for q uniform in level +- h and d = level - c: 4 d^2 h^2/3 + 4 h^4/45
    h, d2_xs = 0.15, (level_x - data.outcome_xs).square()
    expected = float(((4 * d2_xs * h**2 / 3 + 4 * h**4 / 45) / count_xs).mean().sqrt())
    assert found.value("outcome", 8, "rmse") == pytest.approx(expected, rel=0.04)


def test_an_exact_baseline_reaches_the_ceiling():
    # The spread of reports is all there is, and strata of about 128 know their mean.
    found = fidelity(rolled(40, 256, 4, own_prefix=True), group_sizes=[256], batch=10240, resamples=1, draws=50)
    for name in ("outcome", "blended"):
        ceiling = found.value(name, 256, "ceiling")
        assert ceiling < 0.95
        assert found.value(name, 256, "correlation") == pytest.approx(ceiling, abs=0.02)
        assert found.value(name, 256, "gradient_noise") < 0.15


def test_the_order_of_the_paper():
    found = fidelity(rolled(64, 32, 16, spread=0.1), resamples=5, draws=200)
    for size in found.group_sizes:
        rmse = [found.value(name, size, "rmse") for name in ("none", "batch", "group", "outcome")]
        assert rmse == sorted(rmse, reverse=True)
        assert found.value("blended", size, "correlation") > found.value("outcome", size, "correlation")
        better, low, high = found.difference("blended", "outcome", size, "rmse_scaled")
        assert low < better < high < 0


def test_what_is_scale_free():
    options = {"group": {"baseline": "group"}, "without": {"baseline": "group", "leave_one_out": True}}
    found = fidelity(rolled(30, 8, 8), baselines=options, group_sizes=[4, 8], resamples=3, draws=5)
    for size, figure in product([4, 8], ["correlation", "rmse_scaled", "gradient_noise", "ceiling"]):
        assert found.value("group", size, figure) == pytest.approx(found.value("without", size, figure))
    assert found.value("group", 4, "rmse") < found.value("without", 4, "rmse")
    for size in (4, 8):
        assert found.value("without", size, "rmse") >= found.value("without", size, "rmse_scaled")


def test_a_batch_of_one_prompt_is_its_group():
    found = fidelity(rolled(6, 8, 8), group_sizes=[8], batch=8, resamples=12, draws=5)
    for figure in FIGURES:
        assert found.value("batch", 8, figure) == pytest.approx(found.value("group", 8, figure), nan_ok=True)


def test_parts_make_the_whole():
    data = rolled(20, 8, 8)
    found = fidelity(data, group_sizes=[8], batch=160, resamples=1, draws=5)
    share = float(data.outcome_xs.mean())
    for name in found.baselines:
        wrong, right = found.value(name, 8, "rmse_wrong"), found.value(name, 8, "rmse_right")
        assert found.value(name, 8, "rmse") == pytest.approx(math.sqrt((1 - share) * wrong**2 + share * right**2))


def test_intervals_come_from_the_same_prompts():
    twice = {"a": {"baseline": "outcome"}, "b": {"baseline": "outcome"}, "none": {"baseline": "none"}}
    found = fidelity(rolled(40, 8, 8), baselines=twice, group_sizes=[4], resamples=4, draws=400)
    assert found.difference("a", "b", 4, "rmse") == (0.0, 0.0, 0.0)
    assert found.difference("none", "a", 4, "rmse")[0] == -found.difference("a", "none", 4, "rmse")[0]
    low, high = found.interval("a", 4, "rmse")
    assert low < found.value("a", 4, "rmse") < high
    narrow, wide = found.interval("a", 4, "rmse", level=0.5), fidelity(rolled(10, 8, 8), group_sizes=[4], draws=400)
    assert low < narrow[0] < narrow[1] < high
    assert wide.interval("outcome", 4, "rmse")[1] - wide.interval("outcome", 4, "rmse")[0] > high - low
    again = fidelity(rolled(40, 8, 8), baselines=twice, group_sizes=[4], resamples=4, draws=400)
    assert torch.equal(found.draw_rbgf, again.draw_rbgf)


def test_what_cannot_be_used_is_not_read():
    data = rolled(10, 6, 4)
    prefix_xs, confidence_xs = data.prefix_xs.clone(), data.confidence_xs.clone()
    prefix_xs[:, 0], confidence_xs[:, 0] = -1, NAN
    poisoned = data.again_dm.clone()
    poisoned[data.prefix_xs[:, 0]] = 1e9
    options = {"group_sizes": [4], "resamples": 3, "draws": 5}
    one = fidelity(Rerolls(confidence_xs, data.outcome_xs, prefix_xs, data.again_dm), **options)
    two = fidelity(Rerolls(confidence_xs, data.outcome_xs, prefix_xs, poisoned), **options)
    assert torch.equal(one.value_bgf, two.value_bgf)
    assert one.share == pytest.approx(5 / 6)


def test_sentences():
    data = rolled(4, 6, 3)
    with pytest.raises(DataError, match="group of 8 cannot be drawn from 6 completions per prompt"):
        fidelity(data, group_sizes=[4, 8])
    with pytest.raises(DataError, match="batch of 3 completions of 4 prompts holds no group of 4"):
        fidelity(data, group_sizes=[4], batch=3)
    with pytest.raises(AlignmentError, match="has prefix 23, but only 5 prefixes were re-rolled"):
        Rerolls(data.confidence_xs, data.outcome_xs, data.prefix_xs, data.again_dm[:5])
    with pytest.raises(DataError, match="nothing to compare with"):
        fidelity(Rerolls(data.confidence_xs * NAN, data.outcome_xs, data.prefix_xs, data.again_dm), group_sizes=[4])
    with pytest.raises(RecipeError, match=r"no baseline 'blend'. Did you mean 'blended'"):
        fidelity(data, group_sizes=[4], draws=2).value("blend", 4, "rmse")


# Sampling


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer()
    return build_model(tokenizer, 0).eval(), tokenizer


def test_continuing_greedily_gives_the_rest(tiny):
    model, tokenizer = tiny
    prompts = ["7+3*4____=", "2-5*4~9___="]
    options = {"samples": 1, "temperature": 1e-4}
    ids_nt, mask_nt = sample(model, tokenizer, prompts, max_new_tokens=12, **options)
    starts = prompt_ids(tokenizer, prompts)
    assert tokenizer.decode(starts[1]) == prompts[1]
    cuts = (3, 7)  # prefixes of different lengths are padded on the left
    heads = [start + ids_nt[n, :cut].tolist() for n, (start, cut) in enumerate(zip(starts, cuts, strict=True))]
    more_nt, more_mask_nt = continue_ids(model, tokenizer, heads, max_new_tokens=9, **options)
    for n, cut in enumerate(cuts):
        rest = ids_nt[n, cut:12][mask_nt[n, cut:12]].tolist()
        assert more_nt[n][more_mask_nt[n]].tolist()[: len(rest)] == rest


def test_padding_is_not_seen(tiny, monkeypatch):
    model, tokenizer = tiny
    seen, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **inputs: seen.append(inputs) or generate(**inputs))
    continue_ids(model, tokenizer, [[11], [12, 13, 14]], samples=2, max_new_tokens=2)
    assert seen[0]["input_ids"].tolist() == [[tokenizer.pad_token_id] * 2 + [11], [12, 13, 14]]
    assert seen[0]["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]


def test_continuations_stand_next_to_each_other_and_repeat(tiny):
    model, tokenizer = tiny
    heads = [[5, 6, 7], [8, 9]]
    options = {"samples": 3, "max_new_tokens": 4, "temperature": 9.0, "seed": 5, "batch_size": 3}
    state = torch.random.get_rng_state()
    one, two = continue_ids(model, tokenizer, heads, **options), continue_ids(model, tokenizer, heads, **options)
    assert one[0].shape == (6, 4)
    assert torch.equal(one[0], two[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(one[0], continue_ids(model, tokenizer, heads, **(options | {"seed": 6}))[0])


def solved(digit, confidence):
    return (
        f"<reasoning>{digit}</reasoning><answer>{digit}</answer><analysis></analysis><confidence>{confidence}</confidence>"
    )


@pytest.fixture
def scripted(monkeypatch, tiny):
    """A model that says what it is told: first four completions of two prompts, then one confidence per re-roll."""
    _, tokenizer = tiny
    heads = []

    def rows(texts):
        ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        width = max(map(len, ids))
        ids_nt = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in ids])
        return ids_nt, torch.tensor([[t < len(row) for t in range(width)] for row in ids])

    def first(model, tokenizer, prompts, *, samples, **rest):
        assert list(prompts) == ["1+1_____=", "2+2_____="]
        assert samples == 4
        return rows([
            solved(2, 0.5), solved(2, 0.6), solved(3, 0.7), "<reasoning>2</reasoning><answer>2</answer>",
            solved(4, 0.8), solved(4, "high"), solved(5, 0.9), "no tags",
        ])  # fmt: skip

    def again(model, tokenizer, prefixes, *, samples, max_new_tokens, **rest):
        heads.extend(tokenizer.decode(prefix) for prefix in prefixes)
        texts = [
            f"<analysis></analysis><confidence>0.{k}</confidence>" if k else "<analysis>"
            for _ in prefixes
            for k in range(samples)
        ]
        return rows(texts)

    monkeypatch.setattr(room, "sample", first)
    monkeypatch.setattr(room, "continue_ids", again)
    return heads


def test_prefixes_are_re_rolled_once_each(tiny, scripted):
    from datasets import Dataset

    rows = Dataset.from_dict({"prompt": ["1+1_____=", "2+2_____="], "answer": ["2", "4"]})
    task = Task("digits-easy", "nowhere", rows, rows, DIGITS_LAYOUT, max_completion_length=32)
    found = room.collect(*tiny, task, samples=4, rerolls=3)
    block = "<reasoning>{0}</reasoning><answer>{0}</answer>".format
    assert scripted == [
        f"1+1_____={block(2)}", f"1+1_____={block(3)}", f"2+2_____={block(4)}", f"2+2_____={block(5)}",
    ]  # fmt: skip
    assert found.prefix_xs.tolist() == [[0, 0, 1, -1], [2, 2, 3, -1]]
    assert found.outcome_xs[:, :3].tolist() == [[1, 1, 0], [1, 1, 0]]
    nan_to = found.confidence_xs.nan_to_num(nan=-1.0).tolist()
    assert nan_to == [[0.5, 0.6, 0.7, -1], [0.8, -1, 0.9, -1]]
    assert found.again_dm.nan_to_num(nan=-1.0).tolist() == [[-1, 0.1, 0.2]] * 4


def test_a_completion_may_not_grow_longer_than_it_could_have(tiny, scripted):
    from datasets import Dataset

    rows = Dataset.from_dict({"prompt": ["1+1_____=", "2+2_____="], "answer": ["2", "4"]})
    # 6 tokens of the first block and 6 of the last: without its closing tag there is no confidence to read.
    task = Task("digits-easy", "nowhere", rows, rows, DIGITS_LAYOUT, max_completion_length=12)
    assert bool(room.collect(*tiny, task, samples=4, rerolls=3).again_dm.isnan().all())


def test_other_layouts_and_silent_models_are_refused(tiny, monkeypatch):
    from datasets import Dataset

    from spanwise.layout import Layout

    rows = Dataset.from_dict({"prompt": ["1+1_____="], "answer": ["2"]})
    task = Task("two", "nowhere", rows, rows, Layout({"first": ["answer"], "second": ["answer"]}), max_completion_length=8)
    with pytest.raises(RecipeError, match="last block 'second' has no tag 'confidence'"):
        room.collect(*tiny, task)
    task = Task("digits-easy", "nowhere", rows, rows, DIGITS_LAYOUT, max_completion_length=8)
    ids_nt = torch.full((3, 4), 20)
    monkeypatch.setattr(room, "sample", lambda *_, **__: (ids_nt, ids_nt > 0))
    with pytest.raises(DataError, match="None of 3 completions has the block 'confidence'"):
        room.collect(*tiny, task, samples=3)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no readable model"):
        room.load_model(tmp_path)


def test_tables_hold_every_baseline():
    found = fidelity(rolled(10, 8, 4), group_sizes=[4, 8], resamples=2, draws=20)
    console = Console(width=80, record=True, file=io.StringIO())
    tables = [
        *room.fidelity_tables(found),
        room.difference_table(found),
        room.fixed_point_table(room.fixed_point_rows(group_sizes=(4,), batches=40)),
    ]
    for table in tables:
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    for words in ("outcome (LOO)", f"{found.value('blended', 8, 'correlation'):.3f}", "0.087", "standard error at most"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_model_and_tokenizer_come_from_the_folder(tmp_path, tiny):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = room.load_model(tmp_path)
    assert type(loaded) is type(AutoModelForCausalLM.from_pretrained(tmp_path))
