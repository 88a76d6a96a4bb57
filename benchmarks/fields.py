"""What credit per part is worth when a completion has K parts: JSON objects of K fields, one number against a number per field.

    python benchmarks/fields.py [--study parts|total] [--counts 8,1,4,16,2] [--arms grpo,by_field] [--output runs/fields]
    python benchmarks/fields.py --table [--charts docs/images]         # trains nothing: tables of the runs that are there

    grpo       one number: the fields' rewards added up, minus the group's mean, over its standard deviation
    dr_grpo    the same without the standard deviation
    gdpo       each field's reward standardised in its group; their sum pays every token
    by_field   each field's reward minus the group's mean pays the value of that field and the form: keys, punctuation, the end
    no_form    the same, but a field's block runs from its key to the next one's, and nothing pays for the form

The arms have the `per` of their methods: completion, length, completion, block and block.

The study `total`: K = 3, the reward is on the last field alone, the sum of what is written before it.

    total_alone       it pays its own value and the form
    items_and_total   it pays the earlier values too

Here both arms have one learning rate, which was not searched for.

A step is 8 new prompts with 8 completions each and one step of Adam. Every arm has the learning rate that was best for it at that K
on another seed and on other held-out prompts. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from field_kinds import TOTAL, Total
from torch import Tensor
from transformers import AutoModelForCausalLM

from spanwise import Layout, Objective, Scheme
from spanwise.batch import Batch
from spanwise.commands.shared.progress import quiet
from spanwise.measure import mean_interval
from spanwise.pipeline import advantages, credit_batch, read
from spanwise.recipe import load
from spanwise.recipe import scheme_of as task_scheme
from spanwise.segment import Vocabulary
from spanwise.tasks import Fields, warm_start
from spanwise.tasks.embedded import build_fields_tokenizer
from spanwise.tasks.fields import FORM, FieldProblems

ARMS = ("grpo", "by_field", "gdpo", "dr_grpo", "no_form")
#: The task in which only the last field is rewarded, and who is paid for it.
ADDED_UP = Total(3)
TOTAL_ARMS = ("total_alone", "items_and_total")
TOTAL_RATE = 1e-3
COUNTS = (8, 16, 1, 4, 2)
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEEDS = (100, 101)
RATES = (5e-4, 1e-3, 2e-3)
GOALS = (0.8, 0.9, 0.95)
PROMPTS, GROUP = 8, 8
MOST_STEPS, TUNING_STEPS = 128, 80
EVERY = 4
#: A run ends when held-out accuracy is this high.
ENOUGH = 0.96
HELD_OUT = 128


# ------------------------------------------------------------------------------------------------------------ credit


def scheme_of(arm: str, fields: Fields) -> Scheme:
    """The rule of credit of an arm; those that are methods of the task `fields` as `spanwise train` has them."""
    if fields.kind == "total":
        return _total_scheme(arm, fields)
    if arm == "no_form":
        each = Objective("equals", each="*", baseline="group", if_missing=0.0)
        return Scheme.preset("bae", Layout(fields.names, segmenter="json"), objectives=[each])
    recipe = load(None, {"task": "fields", "fields": fields.count, "method": "bae" if arm == "by_field" else arm})
    return task_scheme(recipe, fields.layout, fields.longest)


def _total_scheme(arm: str, fields: Fields) -> Scheme:
    """Only the total is rewarded; what is written before it matters for nothing else."""
    pays = fields.layout.names if arm == "items_and_total" else (TOTAL, FORM)
    total = Objective("equals", pays=pays, baseline="group", if_missing=0.0, options={"tag": TOTAL})
    return Scheme.preset("bae", fields.layout, objectives=[total])


# ---------------------------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def sample(model: Any, prompt_nt: Tensor, steps: int, end: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample at temperature 1 with a cache of keys and values: a Llama of this size spends most of its time between operations.

    Returns:
        ids (N, T), the mask up to the end token, and the log-probabilities of all tokens (N, T, V) at every place.
    """
    sampler = _Cached(model, len(prompt_nt), prompt_nt.shape[1] + steps)
    logits_nv = sampler(prompt_nt)
    ids, logps = list[Tensor](), list[Tensor]()
    for step in range(steps):
        logp_nv = logits_nv.log_softmax(dim=-1)
        noise_nv = torch.empty_like(logp_nv).exponential_(generator=generator).log()
        ids.append((logp_nv - noise_nv).argmax(dim=-1))  # the largest of log p plus Gumbel noise is a sample
        logps.append(logp_nv)
        if step + 1 < steps:
            logits_nv = sampler(ids[-1][:, None])
    ids_nt = torch.stack(ids, dim=1)
    ended_nt = (ids_nt == end).cumsum(dim=1)
    return ids_nt, (ended_nt == 0) | ((ended_nt == 1) & (ids_nt == end)), torch.stack(logps, dim=1)


class _Cached:
    """A small Llama, one forward after another; a test compares it with the model's own."""

    def __init__(self, model: Any, rows: int, positions: int) -> None:
        config, self.model = model.config, model
        self.heads, self.size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.eps, self.done = config.rms_norm_eps, 0
        frequency = model.model.rotary_emb.inv_freq
        angle_td = torch.arange(positions)[:, None] * frequency.repeat(2)
        self.cos, self.sin = angle_td.cos(), angle_td.sin()
        shape = len(model.model.layers), rows, self.heads, positions, self.size
        self.key, self.value = torch.zeros(shape), torch.zeros(shape)

    def __call__(self, ids_nt: Tensor) -> Tensor:
        inner, width = self.model.model, ids_nt.shape[1]
        first, self.done = self.done, self.done + width
        x = inner.embed_tokens.weight[ids_nt]
        cos, sin = self.cos[first : self.done], self.sin[first : self.done]
        for index, layer in enumerate(inner.layers):
            h, own = self._norm(x, layer.input_layernorm), layer.self_attn
            query, key, value = (
                torch.nn.functional.linear(h, part.weight).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
                for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            self.key[index, :, :, first : self.done] = _turned(key, cos, sin)
            self.value[index, :, :, first : self.done] = value
            past = self.key[index, :, :, : self.done], self.value[index, :, :, : self.done]
            mixed = torch.nn.functional.scaled_dot_product_attention(_turned(query, cos, sin), *past, is_causal=width > 1)
            x = x + torch.nn.functional.linear(mixed.transpose(1, 2).flatten(2), own.o_proj.weight)
            h = self._norm(x, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(torch.nn.functional.linear(h, layer.mlp.gate_proj.weight))
            up = torch.nn.functional.linear(h, layer.mlp.up_proj.weight)
            x = x + torch.nn.functional.linear(gate * up, layer.mlp.down_proj.weight)
        return torch.nn.functional.linear(self._norm(x[:, -1], inner.norm), self.model.lm_head.weight)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, self.eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right_half = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right_half, left], dim=-1) * sin


# ---------------------------------------------------------------------------------------------------------- training


class Run:
    """One arm on one seed.

    Args:
        arm: see the module.
        fields: the task.
        rate: Adam's learning rate.
        seed: of the prompts and the sampling; all runs start from the same model.
        tuning: measure on other held-out prompts than those of the evaluation.
        scheme: instead of the arm's.
    """

    def __init__(
        self, arm: str, fields: Fields, rate: float, seed: int, *, tuning: bool = False, scheme: Scheme | None = None
    ) -> None:
        self.fields, self.tokenizer = fields, build_fields_tokenizer()
        self.model = AutoModelForCausalLM.from_pretrained(warm_start(fields), dtype=torch.float32)
        self.scheme = scheme or scheme_of(arm, fields)
        self.vocabulary = Vocabulary.of(self.tokenizer, self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        self.rng, self.generator = np.random.default_rng([seed, 2]), torch.Generator().manual_seed(seed)
        self.end = self.tokenizer.eos_token_id
        rows = np.arange(HELD_OUT) + (256 if tuning else 0)
        self.held_out = fields.source.held_out().take(rows)

    def step(self) -> float:
        """Sample, credit, learn; the mean reward of a field."""
        problems = self.fields.source.training(PROMPTS, rng=self.rng)
        prompt_nt = self._prompts(problems).repeat_interleave(GROUP, dim=0)
        ids_nt, mask_nt, _ = sample(self.model, prompt_nt, self.fields.longest, self.end, self.generator)
        answers = [answer for answer in self.fields.answers(problems) for _ in range(GROUP)]
        groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
        batch = Batch(groups, ids_nt, mask_nt, columns={"answer": answers})
        reading = read(batch, self.scheme, self.vocabulary)
        assert reading.spans is not None
        adv_nt = advantages(credit_batch(reading, batch, self.scheme), reading.spans, self.scheme)
        logits_ntv = self.model(input_ids=torch.cat([prompt_nt, ids_nt], dim=1), logits_to_keep=ids_nt.shape[1] + 1).logits
        logp_nt = logits_ntv[:, :-1].log_softmax(dim=-1).gather(2, ids_nt[:, :, None]).squeeze(2)
        self.optimizer.zero_grad()
        (-(adv_nt * logp_nt).sum() / len(ids_nt)).backward()
        self.optimizer.step()
        return float(reading.scores.reward_nm.nan_to_num(0.0).mean())

    def accuracy(self) -> list[float]:
        """Of each field on held-out prompts: the mean probability of its gold value behind what the model itself has sampled.

        That is what the share of right samples at temperature 1 would be on average, with less noise.
        """
        problems, generator = self.held_out, torch.Generator().manual_seed(0)
        ids_nt, _, logp_ntv = sample(self.model, self._prompts(problems), self.fields.longest, self.end, generator)
        gold_nt = self.tokenizer(self.fields.answers(problems), return_tensors="pt")["input_ids"]
        values = list[float]()
        for k in range(self.fields.count):
            reached_n = ids_nt[:, 2 * k] == gold_nt[:, 2 * k]
            p_n = logp_ntv[:, 2 * k + 1].gather(1, gold_nt[:, 2 * k + 1, None]).squeeze(1).exp()
            values.append(float((p_n * reached_n).mean()))
        return values

    def _prompts(self, problems: FieldProblems) -> Tensor:
        return self.tokenizer(problems.prompts, return_tensors="pt")["input_ids"]


def train(run: Run, *, most: int = MOST_STEPS, enough: float = ENOUGH) -> dict[str, Any]:
    """Train until what can be known (of kind `total`: the total) is right `enough`, or `most` steps; the curve of accuracy."""
    judged = (TOTAL,) if run.fields.kind == "total" else run.fields.knowable
    places = [run.fields.names.index(name) for name in judged]
    curve, started = list[dict[str, Any]](), time.perf_counter()
    for step in range(most + 1):
        if step % EVERY == 0:
            by_field = run.accuracy()
            mean = float(np.mean([by_field[k] for k in places]))
            curve.append({"samples": step * PROMPTS * GROUP, "accuracy": mean, "by_field": [round(a, 4) for a in by_field]})
            if mean >= enough:
                break
        if step < most:
            run.step()
    return {"curve": curve, "seconds": round(time.perf_counter() - started, 1)}


def samples_to(curve: Sequence[Mapping[str, Any]], goal: float) -> float:
    """Completions until the accuracy first reaches a goal, linear between evaluations in the logarithm of samples.

    Infinite where it never does. The first evaluation lies at 0 samples, where the logarithm of one step's is taken.
    """
    for before, after in itertools.pairwise(curve):
        if after["accuracy"] >= goal:
            low, high = max(before["samples"], PROMPTS * GROUP), after["samples"]
            share = (goal - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return float(math.exp(math.log(low) + min(max(share, 0.0), 1.0) * (math.log(high) - math.log(low))))
    return math.inf


# -------------------------------------------------------------------------------------------------------------- plan


def run_of(arm: str, fields: Fields, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """A run's curve, read or made."""
    tuning = seed in TUNING_SEEDS
    return kept_run(
        folder / f"{fields.kind}-{fields.count}" / f"{arm}-{rate:g}-{seed}.json",
        {"arm": arm, "count": fields.count, "rate": rate, "seed": seed},
        lambda: train(Run(arm, fields, rate, seed, tuning=tuning), most=TUNING_STEPS if tuning else MOST_STEPS),
    )


def kept_run(file: Path, names: Mapping[str, Any], trained: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A run's file, read or made; `names` say what was trained."""
    if not file.exists():
        record = trained()
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({**names, **record}))
        scratch.rename(file)
        reached = ", ".join(f"{goal:g}: {samples_to(record['curve'], goal):.0f}" for goal in GOALS)
        print(f"{time.strftime('%H:%M:%S')} {file.parent.name} {file.stem}: {record['seconds']} s, {reached}", flush=True)
    return json.loads(file.read_text())


def price(runs: Sequence[Mapping[str, Any]]) -> float:
    """What a learning rate is chosen by: the mean logarithm of samples to all goals; twice the budget where one is not reached."""
    most = TUNING_STEPS * PROMPTS * GROUP
    samples = [samples_to(run["curve"], goal) for run in runs for goal in GOALS]
    return float(np.mean([math.log(one if one <= most else 2 * most) for one in samples]))


def tuned(arm: str, fields: Fields, folder: Path) -> float:
    """The learning rate that is best on the tuning seeds; the grid is extended while the best lies at its edge.

    Two seeds for few fields, whose runs are noisier and cheaper.
    """
    seeds = TUNING_SEEDS if fields.count <= 4 else TUNING_SEEDS[:1]
    return best_rate(lambda rate: price([run_of(arm, fields, rate, seed, folder) for seed in seeds]), largest=0.05)


def best_rate(price_of: Callable[[float], float], *, largest: float) -> float:
    """The learning rate of the lowest price; the grid is extended while the best lies at its edge."""
    rates = list(RATES)
    while True:
        best = min(rates, key=price_of)
        if best == rates[0] and best > 1e-4:
            rates.insert(0, best / 2)
        elif best == rates[-1] and best < largest:
            rates.append(best * 2)
        else:
            return best


def found(arm: str, fields: Fields, folder: Path) -> list[dict[str, Any]]:
    """The runs of an arm that are there at its learning rate, by seed; none if the rate is not chosen yet."""
    return runs_in(folder / f"{fields.kind}-{fields.count}", arm)


def runs_in(place: Path, arm: str, given: float | None = None) -> list[dict[str, Any]]:
    """The runs of an arm in a folder at a given learning rate, or at the chosen one, by seed."""
    if given is None and not (place / f"{arm}.json").exists():
        return []
    rate = given or json.loads((place / f"{arm}.json").read_text())["rate"]
    files = [place / f"{arm}-{rate:g}-{seed}.json" for seed in SEEDS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def train_all(tasks: Sequence[Fields], arms: Sequence[str], folder: Path) -> None:
    """Choose learning rates and train what is missing, one run after the other."""
    for fields in tasks:
        for arm in arms:
            rate = TOTAL_RATE if fields.kind == "total" else tuned("by_field" if arm == "no_form" else arm, fields, folder)
            place = folder / f"{fields.kind}-{fields.count}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{arm}.json").write_text(json.dumps({"rate": rate}))
            for seed in SEEDS:
                run_of(arm, fields, rate, seed, folder)


# ------------------------------------------------------------------------------------------------------------ tables


def show(folder: Path) -> None:
    """Samples to each goal by K and arm, and the ratio to `by_field`, as Markdown."""
    heading = ["K", "arm", "learning rate", "seeds"]
    print(
        "| "
        + " | ".join([*heading, *(f"completions to {g:.0%} | against by_field" for g in GOALS), "right at the end"])
        + " |"
    )
    print("|" + "---|" * (len(heading) + 2 * len(GOALS) + 1))
    for fields in [*(Fields(count) for count in sorted(COUNTS)), ADDED_UP]:
        first = "items_and_total" if fields.kind == "total" else "by_field"
        base = found(first, fields, folder)
        for arm in TOTAL_ARMS if fields.kind == "total" else ARMS:
            runs = found(arm, fields, folder)
            if runs:
                cells = [
                    f"{fields.count}{', total' if fields.kind == 'total' else ''}",
                    f"`{arm}`",
                    f"{runs[0]['rate']:g}",
                    str(len(runs)),
                ]
                for goal in GOALS:
                    cells += [reach(runs, goal), "" if arm == first else ratio(runs, base, goal)]
                last = mean_interval(torch.tensor([run["curve"][-1]["accuracy"] for run in runs], dtype=torch.float64))
                print("| " + " | ".join([*cells, f"{last.value:.3f} ({last.low:.3f}, {last.high:.3f})"]) + " |")


def reach(runs: Sequence[Mapping[str, Any]], goal: float) -> str:
    """The geometric mean of samples with its interval over seeds; how many got there, where not all did."""
    samples = [samples_to(run["curve"], goal) for run in runs]
    there = sum(math.isfinite(value) for value in samples)
    if there < len(samples):
        return f"{there} of {len(samples)} within {MOST_STEPS * PROMPTS * GROUP:,}"
    return _written(samples, "{:,.0f}")


def ratio(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], goal: float) -> str:
    """How many times as many samples, paired by seed; at least so many, where a run was stopped before it got there."""
    most = MOST_STEPS * PROMPTS * GROUP
    of = {run["seed"]: samples_to(run["curve"], goal) for run in base}
    pairs = [(samples_to(run["curve"], goal), of[run["seed"]]) for run in runs if run["seed"] in of]
    if not pairs or not all(math.isfinite(other) for _, other in pairs):
        return "-"
    more = "more than " if any(not math.isfinite(one) for one, _ in pairs) else ""
    return more + _written([min(one, most) / other for one, other in pairs], "{:.1f}")


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and 95 % t interval of positive numbers."""
    interval = mean_interval(torch.tensor(values, dtype=torch.float64).log())
    return math.exp(interval.value), math.exp(interval.low), math.exp(interval.high)


def _written(values: Sequence[float], form: str) -> str:
    mean, low, high = (form.format(value) for value in interval_of(values))
    return mean if len(values) < 2 else f"{mean} ({low}, {high})"


# ------------------------------------------------------------------------------------------------------------ charts


def draw(folder: Path, place: Path) -> None:
    """Completions to the first goal against K, and the curves of every seed at K = 8, on white and on dark."""
    import altair as alt

    prices, points = list[dict[str, Any]](), list[dict[str, Any]]()
    for arm in ("grpo", "by_field"):
        for count in COUNTS:
            runs = found(arm, Fields(count), folder)
            reached = [samples_to(run["curve"], GOALS[0]) for run in runs]
            if len(reached) > 1 and all(map(math.isfinite, reached)):
                mean, low, high = interval_of(reached)
                prices.append({"arm": arm, "K": count, "completions": mean, "low": low, "high": high})
            if count == 8:
                points += [{"arm": arm, "seed": run["seed"], **point} for run in runs for point in run["curve"]]
    for name, background, ink in (("fields", "white", "#333"), ("fields-dark", "#16181d", "#ccc")):
        colour = alt.Color(
            "arm:N", scale=alt.Scale(domain=["grpo", "by_field"]), legend=alt.Legend(orient="bottom", title=None)
        )
        left = alt.Chart(alt.InlineData(values=prices), title=f"completions to {GOALS[0]:.0%}", width=260, height=220)
        x = alt.X(
            "K:Q", title="fields K", scale=alt.Scale(type="log", base=2), axis=alt.Axis(grid=False, values=sorted(COUNTS))
        )
        scaled = alt.Scale(type="log", base=2, domain=[256, 8192])
        band = left.mark_rule(strokeWidth=2).encode(
            x=x, y=alt.Y("low:Q", title=None, scale=scaled), y2="high:Q", color=colour
        )
        line = left.mark_line(point=True).encode(x=x, y=alt.Y("completions:Q", title=None, scale=scaled), color=colour)
        right = alt.Chart(
            alt.InlineData(values=points), title="fields right, held-out prompts, K = 8", width=260, height=220
        )
        curves = right.mark_line(strokeWidth=1.2, opacity=0.8).encode(
            x=alt.X("samples:Q", title="completions", axis=alt.Axis(grid=False, tickCount=4)),
            y=alt.Y("accuracy:Q", title=None),
            color=colour,
            detail="seed:N",
        )
        chart = alt.hconcat(band + line, curves).configure(background=background).configure_view(stroke=None)
        text: dict[str, Any] = {"labelColor": ink, "titleColor": ink}
        chart = chart.configure_axis(**text).configure_legend(**text).configure_title(color=ink)
        place.mkdir(parents=True, exist_ok=True)
        chart.save(str(place / f"{name}.png"), scale_factor=2)


def main() -> None:
    """Run what is missing, then show everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=["parts", "total"], default="parts")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--arms", help="default: all of the study")
    parser.add_argument("--output", default="runs/fields")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--charts", help="folder for the curves as PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    folder = Path(options.output)
    if not options.table:
        parts = options.study == "parts"
        tasks = [Fields(int(count)) for count in options.counts.split(",")] if parts else [ADDED_UP]
        train_all(tasks, options.arms.split(",") if options.arms else ARMS if parts else TOTAL_ARMS, folder)
    show(folder)
    if options.charts:
        draw(folder, Path(options.charts))


if __name__ == "__main__":
    main()
