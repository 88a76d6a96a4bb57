"""Credit in a chain of K dependent parts: each field of a JSON object is computed from the one before, right or wrong.

    python benchmarks/chain.py [--counts 8,2,4] [--output runs/chain] [--charts docs/images]
    python benchmarks/chain.py --table [--charts docs/images]          # trains and samples nothing: tables of what is there

The reward of field k is 1 if its value is the right one for the prompt, whatever was written before: an error is inherited by all
later fields, unless a second one cancels it. The arms differ in credit alone:

    tuple      each reward pays its own field, compared with the completions of the prompt whose earlier fields went the same way;
               too small a stratum drops the last outcome first, and so on up to the whole group
    near       the same, but the outcome furthest back is dropped first
    last       given the outcome of the field just before alone
    group      each reward pays its own field, compared with the whole group
    sum        the rewards added up, minus the group's mean, pay all fields alike
    gdpo       each reward standardised in its group; their sum pays all fields alike

First the credit of two policies is held against what it should be: the warm start, and one that `group` has trained half way. Then
every arm trains. A step is 8 new prompts with 8 completions each; the learning rate is the best of four on another seed and on
other held-out prompts. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from field_kinds import Chain
from fields import GROUP, PROMPTS, Run, _Cached, samples_to, train
from parts import own_advantage, to_go_advantage, weighted_correlation
from torch import Tensor

from spanwise import Layout, Objective, Scheme
from spanwise.batch import Batch
from spanwise.commands.shared.progress import quiet
from spanwise.measure import Interval, mean_interval
from spanwise.measure.intervals import resample
from spanwise.pipeline import Reading, credit_batch
from spanwise.tasks import Fields
from spanwise.tasks.fields import FieldProblems
from spanwise.types import Credit, Scores

ARMS = ("tuple", "last", "group", "sum", "gdpo")
COUNTS = (8, 2, 4)
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEED = 100
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
STEPS = {2: 40, 4: 60, 8: 100}
GOAL = 0.8
POLICIES = ("warm start", "half-way")
HALF_SEED, HALF_RATE = 50, 1e-3
#: Of the fidelity: prompts, completions of each, groups made of those, continuations behind each prefix.
ASKED, SAMPLES, SIZES, AHEAD = 80, 16, (4, 8, 16), 8
RESAMPLES = 400
#: What is held against the exact advantages: an arm, and options of its method.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arm: (arm, {}) for arm in ("tuple", "near", *ARMS[1:])},
    "tuple, min_stratum 3": ("tuple", {"min_stratum": 3}),
    "tuple, min_stratum 4": ("tuple", {"min_stratum": 4}),
    "near, min_stratum 4": ("near", {"min_stratum": 4}),
    "tuple, leave_one_out": ("tuple", {"leave_one_out": True}),
    "near, leave_one_out": ("near", {"leave_one_out": True}),
    "last, leave_one_out": ("last", {"leave_one_out": True}),
    "tuple, no back-off": ("tuple", {"back_off": False}),
}

# ------------------------------------------------------------------------------------------------------------ credit


def scheme_of(arm: str, fields: Fields, *, back_off: bool | None = None, **options: Any) -> Scheme:
    """The rule of credit of an arm; every arm counts a token's share in its field."""
    layout = Layout({**{name: [name] for name in fields.names}, "keys": []}, segmenter="json")
    every = {"each": "*", "if_missing": 0.0}
    if arm in ("sum", "gdpo"):
        objectives = [Objective("equals", pays="*", **every)]
        return Scheme.preset("dr_grpo" if arm == "sum" else arm, layout, objectives=objectives, per="block", **options)
    if arm == "group":
        objectives = [Objective("equals", baseline="group", **every)]
    elif arm == "near":
        objectives = [Objective("equals", given="earlier", baseline="outcome", back_off=True, **every)]
    else:
        before = [fields.names[k - 1 if arm == "last" and k else 0 : k] for k in range(fields.count)]
        back_off = True if arm == "last" else back_off
        objectives = [_given(name, names, back_off) for name, names in zip(fields.names, before, strict=True)]
    return Scheme.preset("bae", layout, objectives=objectives, **options)


def _given(name: str, earlier: Sequence[str], back_off: bool | None) -> Objective:
    """A field's objective, given earlier fields in their order."""
    given = [f"equals.{one}" for one in earlier]
    compared: dict[str, Any] = (
        {"given": given, "baseline": "outcome", "back_off": back_off} if given else {"baseline": "group"}
    )
    return Objective("equals", name, name=f"equals.{name}", if_missing=0.0, options={"tag": name}, **compared)


# ------------------------------------------------------------------------------------------------------------ policy


class ChainRun(Run):
    """A run whose keys are given, as structured outputs give them: the policy chooses among the ten digits, K times."""

    def __init__(self, arm: str, fields: Fields, rate: float, seed: int, **options: Any) -> None:
        super().__init__(arm, fields, rate, seed, scheme=scheme_of(arm, fields), **options)
        self.digit_v = torch.tensor(self.tokenizer.convert_tokens_to_ids(list("0123456789")))
        form = self.tokenizer("".join(f"{key}0" for key in _keys(fields)) + "}", return_tensors="pt")["input_ids"][0]
        self.form_t = torch.cat([form, torch.tensor([self.end])])

    def values(self, prefix_nt: Tensor, first: int = 0, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Sample the values of fields `first` to K - 1 behind prefixes that end with a value; and log p of the ten digits there."""
        count = self.fields.count
        cached = _Cached(self.model, len(prefix_nt), prefix_nt.shape[1] + 2 * (count - first))
        digits, logps = list[Tensor](), list[Tensor]()
        with torch.no_grad():
            for k in range(first, count):
                key_nt = self.form_t[2 * k].expand(len(prefix_nt), 1)
                logits_nv = cached(torch.cat([prefix_nt, key_nt], dim=1) if k == first else key_nt)
                logps.append(logits_nv[:, self.digit_v].log_softmax(dim=-1))
                digits.append(torch.multinomial(logps[-1].exp(), 1, generator=generator or self.generator)[:, 0])
                if k + 1 < count:
                    cached(self.digit_v[digits[-1]][:, None])
        return torch.stack(digits, dim=1), torch.stack(logps, dim=1)

    def written(self, value_nk: Tensor) -> Tensor:
        """Completions with these values, and the end."""
        ids_nt = self.form_t.repeat(len(value_nk), 1)
        ids_nt[:, 1 : 2 * value_nk.shape[1] : 2] = self.digit_v[value_nk]
        return ids_nt

    def credit(self, value_nk: Tensor, gold_nk: Tensor, size: int, scheme: Scheme | None = None) -> Credit:
        """The credit of completions of which each `size` that stand next to each other are a group; the last block is the keys."""
        right_nk, scheme = (value_nk == gold_nk).double(), scheme or self.scheme
        nothing = torch.full((*right_nk.shape, 2), torch.nan).double()
        scores = Scores(scheme.names, right_nk, torch.zeros(right_nk.shape).to(torch.int8), nothing)
        size_nk = torch.ones(len(right_nk), len(scheme.layout.names)).long()
        batch = Batch(torch.arange(len(right_nk)) // size)
        return credit_batch(Reading(scores, size_nk, torch.zeros(len(right_nk)).long()), batch, scheme)

    def step(self) -> float:
        """Sample, credit, learn; the mean reward of a field."""
        prompt_nt, gold_nk = self.asked(self.draw(PROMPTS, self.rng), GROUP)
        value_nk, _ = self.values(prompt_nt)
        adv_nk = self.credit(value_nk, gold_nk, GROUP).block_nk[:, :-1].float()
        whole_nt = torch.cat([prompt_nt, self.written(value_nk)], dim=1)
        logits_nkv = self.model(input_ids=whole_nt).logits[:, prompt_nt.shape[1] : -2 : 2, self.digit_v]
        logp_nk = logits_nkv.log_softmax(dim=-1).gather(2, value_nk[:, :, None]).squeeze(2)
        self.optimizer.zero_grad()
        (-(adv_nk * logp_nk).sum() / len(value_nk)).backward()
        self.optimizer.step()
        return float((value_nk == gold_nk).double().mean())

    def accuracy(self) -> list[float]:
        """Of each field on held-out prompts: the mean probability of its gold value behind what the policy itself has sampled."""
        prompt_nt, gold_nk = self.asked(self.held_out, 1)
        _, logp_nkv = self.values(prompt_nt, generator=torch.Generator().manual_seed(0))
        return logp_nkv.exp().gather(2, gold_nk[:, :, None]).mean(dim=(0, 2)).tolist()

    def asked(self, problems: FieldProblems, times: int) -> tuple[Tensor, Tensor]:
        """Token ids of every prompt, so many times, and the gold values."""
        gold_nk = torch.from_numpy(self.fields.values(problems))
        return self._prompts(problems).repeat_interleave(times, dim=0), gold_nk.repeat_interleave(times, dim=0)

    def draw(self, size: int, rng: np.random.Generator) -> FieldProblems:
        """Problems that are no evaluation problems."""
        return self.fields.source.training(size, rng=rng)


def _keys(fields: Fields) -> list[str]:
    return [f'{"{" if k == 0 else ", "}"{name}": ' for k, name in enumerate(fields.names)]


# ---------------------------------------------------------------------------------------------------------- training


def kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds, made first if it is not there."""
    if not file.exists():
        started, record = time.perf_counter(), make()
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(record))
        scratch.rename(file)
        print(
            f"{time.strftime('%H:%M:%S')} {file.parent.name}/{file.stem}: {time.perf_counter() - started:.0f} s", flush=True
        )
    return json.loads(file.read_text())


def trained(arm: str, fields: Fields, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """A run's curve, read or made; it always takes all steps."""

    def make() -> dict[str, Any]:
        run = ChainRun(arm, fields, rate, seed, tuning=seed == TUNING_SEED)
        return {"seed": seed, "rate": rate, **train(run, most=STEPS[fields.count], enough=2.0)}

    return kept(folder / f"train-{fields.count}" / f"{arm}-{rate:g}-{seed}.json", make)


def area(run: Mapping[str, Any]) -> float:
    """The mean accuracy over the curve, which a learning rate is chosen by."""
    return float(np.mean([point["accuracy"] for point in run["curve"]]))


def train_all(fields: Fields, arms: Sequence[str], folder: Path) -> None:
    """Choose the learning rates, then train seed by seed, so that an early look has whole pairs."""
    best = {}
    for arm in arms:
        best[arm] = max(RATES, key=lambda rate, arm=arm: area(trained(arm, fields, rate, TUNING_SEED, folder)))
        (folder / f"train-{fields.count}" / f"{arm}.json").write_text(json.dumps({"rate": best[arm]}))
    for seed in SEEDS:
        for arm in arms:
            trained(arm, fields, best[arm], seed, folder)


def arms_of(count: int, arms: Sequence[str]) -> list[str]:
    """`last` trains where it differs most from `tuple`; with two fields they are the same."""
    return [arm for arm in arms if arm != "last" or count == max(COUNTS)]


# ---------------------------------------------------------------------------------------------------------- fidelity


def measured(policy: str, fields: Fields) -> dict[str, Any]:
    """Correlation of every arm's credit with the exact advantages, by position and group size."""
    run = ChainRun("group", fields, HALF_RATE, HALF_SEED)
    if policy == "half-way":
        train(run, most=STEPS[fields.count], enough=0.5)
    prompt_nt, gold_nk = run.asked(run.draw(ASKED, np.random.default_rng([HALF_SEED, 7])), SAMPLES)
    value_nk, logp_nkv = run.values(prompt_nt)
    to_go_nk, noise_nk = ahead(run, prompt_nt, value_nk, gold_nk)
    reward_nk = (value_nk == gold_nk).double()
    goals = {"own": own_advantage(logp_nkv, value_nk, gold_nk), "to go": to_go_advantage(reward_nk, to_go_nk)}
    ceiling_k = (1 - noise_nk.mean(dim=0) / goals["to go"].var(dim=0)).clamp(min=0).sqrt()
    record: dict[str, Any] = {
        "accuracy": reward_nk.mean(dim=0).tolist(),
        "ceiling": ceiling_k.tolist(),
        "rows": [],
        "strata": [],
    }
    asked_n = torch.arange(len(value_nk)) // SAMPLES
    for size in SIZES:
        draws = dict[tuple[str, str], Tensor]()
        for name, (arm, options) in VARIANTS.items():
            credit = run.credit(value_nk, gold_nk, size, scheme_of(arm, fields, **options))
            if credit.coarser_m is not None and arm == "tuple":
                shares = {"coarser": (credit.coarser_m / len(value_nk)).tolist(), "members": _members(credit)}
                record["strata"].append({"arm": name, "size": size, **shares})
            for goal, goal_nk in goals.items():
                figure = partial(_correlations, credit.block_nk[:, :-1], goal_nk)
                value_k, draw_rk, _ = resample(figure, asked_n, resamples=RESAMPLES, seed=0)
                draws[name, goal] = draw_rk
                record["rows"] += [
                    {"arm": name, "size": size, "goal": goal, "k": k, **_bounds(value_k[k], draw_rk[:, k])}
                    for k in range(fields.count)
                ]
                mean = _bounds(value_k.nanmean(), draw_rk.nanmean(dim=1))
                record["rows"].append({"arm": name, "size": size, "goal": goal, "k": "mean", **mean})
        for name, goal in draws:
            gain_rk = draws["tuple", goal] - draws[name, goal]
            gain = _bounds(gain_rk.nanmean(), gain_rk.nanmean(dim=1))
            record["rows"].append({"arm": name, "size": size, "goal": goal, "k": "tuple minus", **gain})
    return record


def ahead(run: ChainRun, prompt_nt: Tensor, value_nk: Tensor, gold_nk: Tensor) -> tuple[Tensor, Tensor]:
    """The expected sum of rewards of each field and all later ones, behind what was written before, and the noise's variance.

    Continuations are sampled; each field on the way counts with the probability of its gold value, not with a sampled reward. Equal
    prefixes share theirs, and the few different prefixes of early fields get as many more of them.
    """
    count = run.fields.count
    mean_nk, noise_nk = (torch.zeros(len(value_nk), count + more, dtype=torch.float64) for more in (0, 1))
    ids_nt = run.written(value_nk)
    for k in range(count):
        prefix_ut, index_n = torch.cat([prompt_nt, ids_nt[:, : 2 * k]], dim=1).unique(dim=0, return_inverse=True)
        gold_uk = gold_nk.new_zeros(len(prefix_ut), count).index_copy(0, index_n, gold_nk)
        times = 1 if k == count - 1 else AHEAD * len(value_nk) // len(prefix_ut)
        sums = list[Tensor]()
        for part, gold in zip(prefix_ut.split(128), gold_uk.split(128), strict=True):
            _, logp_nkv = run.values(part.repeat_interleave(times, dim=0), first=k)
            chance_nk = logp_nkv.double().exp().gather(2, gold[:, k:].repeat_interleave(times, dim=0)[:, :, None])
            sums.append(chance_nk.sum(dim=(1, 2)).reshape(-1, times))
        sum_um = torch.cat(sums)
        mean_nk[:, k] = sum_um.mean(dim=1)[index_n]
        if times > 1:
            noise_nk[:, k] = (sum_um.var(dim=1) / times)[index_n]
    return mean_nk, noise_nk[:, :-1] + noise_nk[:, 1:]


def _correlations(credit_nk: Tensor, goal_nk: Tensor, weight_rn: Tensor) -> Tensor:
    pairs = zip(credit_nk.T, goal_nk.T, strict=True)
    return torch.stack([weighted_correlation(one_n, goal_n, weight_rn) for one_n, goal_n in pairs], dim=-1)


def _bounds(value: Tensor, draw_r: Tensor) -> dict[str, float]:
    low, high = draw_r.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": float(value), "low": low, "high": high}


def _members(found: Credit) -> list[float]:
    """By objective, how many completions a completion is compared with on average, itself among them."""
    assert found.comparison is not None, "it was credited here"
    columns = zip(found.comparison.members_nm.T, found.comparison.stratum_nm.T, strict=True)
    return [float(members_n[stratum_n >= 0].double().mean()) for members_n, stratum_n in columns]


# ------------------------------------------------------------------------------------------------------------ tables


def there(count: int, arms: Sequence[str], folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs that are there at their arm's learning rate, by arm and seed."""
    runs_by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in arms_of(count, arms):
        chosen = folder / f"train-{count}" / f"{arm}.json"
        rate = json.loads(chosen.read_text())["rate"] if chosen.exists() else 0.0
        files = [folder / f"train-{count}" / f"{arm}-{rate:g}-{seed}.json" for seed in SEEDS]
        runs = [json.loads(file.read_text()) for file in files if file.exists()]
        if runs:
            runs_by_arm[arm] = {run["seed"]: run for run in runs}
    return runs_by_arm


def show_training(arms: Sequence[str], folder: Path) -> None:
    """Completions to the goal and the final accuracy, and both against `group`, paired by seed, as Markdown."""
    head = ["K", "arm", "learning rate", "seeds", f"completions to {GOAL:.0%}", "times those of group"]
    _row([*head, "accuracy at the end", "minus group", "first field", "last field"], heading=True)
    for count in sorted(COUNTS):
        runs_by_arm = there(count, arms, folder)
        for arm, runs in runs_by_arm.items():
            base = {} if arm == "group" else runs_by_arm.get("group", {})
            seeds = [seed for seed in runs if seed in base]
            ends = {seed: run["curve"][-1] for seed, run in runs.items()}
            gain = [ends[seed]["accuracy"] - base[seed]["curve"][-1]["accuracy"] for seed in seeds]
            cells = [str(count), f"`{arm}`", f"{next(iter(runs.values()))['rate']:g}", str(len(runs)), _reach(runs)]
            cells += [_times([runs[seed] for seed in seeds], [base[seed] for seed in seeds])]
            cells += [_plain([end["accuracy"] for end in ends.values()]), _plain(gain, "+.3f") if gain else ""]
            cells += [_plain([end["by_field"][k] for end in ends.values()]) for k in (0, -1)]
            _row(cells)


def _reach(runs: Mapping[int, Mapping[str, Any]]) -> str:
    samples = [samples_to(run["curve"], GOAL) for run in runs.values()]
    there = sum(np.isfinite(samples))
    if there < len(samples):
        return f"{there} of {len(samples)} within {next(iter(runs.values()))['curve'][-1]['samples']:,}"
    return f"{np.exp(np.mean(np.log(samples))):,.0f}"


def _times(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> str:
    """The ratio of completions to the goal, with Student's t in logarithms; a run that never got there counts with all it had."""
    if not runs:
        return ""
    pairs = [
        (samples_to(one["curve"], GOAL), samples_to(two["curve"], GOAL), two["curve"][-1]["samples"])
        for one, two in zip(runs, base, strict=True)
    ]
    interval = mean_interval(torch.tensor([min(one, most) / min(two, most) for one, two, most in pairs]).double().log())
    more = "at least " if any(one == np.inf for one, _, _ in pairs) else ""
    return f"{more}{np.exp(interval.value):.2f} ({np.exp(interval.low):.2f}, {np.exp(interval.high):.2f})"


def show_fidelity(folder: Path, *, size: int = 8) -> None:
    """Correlations by position at one group size, then the mean over positions at every size, as Markdown."""
    for count in sorted(COUNTS):
        for policy in POLICIES:
            file = folder / f"fidelity-{count}" / f"{policy.replace(' ', '-')}.json"
            if not file.exists():
                continue
            record = json.loads(file.read_text())
            at = {(row["arm"], row["size"], row["goal"], row["k"]): row for row in record["rows"]}
            print(
                f"\n### K = {count}, {policy}: accuracy {_list(record['accuracy'])}; "
                f"ceiling of `to go` {_list(record['ceiling'])}\n"
            )
            _row([f"own reward, G = {size}", *Chain(count).names], heading=True)
            for arm in VARIANTS:
                _row([f"`{arm}`", *(_short(at[arm, size, "own", k]["value"]) for k in range(count))])
            print()
            heads = [f"own, G = {one}" for one in SIZES] + [f"to go, G = {size}"]
            gains = [f"tuple minus, {head}, G = {size}" for head in ("own", "to go")]
            _row(["mean of the fields", *heads, *gains], heading=True)
            for arm in VARIANTS:
                places = [(arm, one, "own", "mean") for one in SIZES] + [(arm, size, "to go", "mean")]
                gain = [_between(at[arm, size, goal, "tuple minus"], sign="+") for goal in ("own", "to go")]
                _row([f"`{arm}`", *(_between(at[place]) for place in places), *gain])
            print()
            _row(
                ["completions compared with, itself included; share that backs off", *Chain(count).names],
                heading=True,
            )
            for one in (row for row in record["strata"] if row["size"] == size):
                pairs = zip(one["members"], one["coarser"], strict=True)
                _row(
                    [f"`{one['arm']}`, G = {one['size']}", *(f"{members:.1f}; {coarser:.0%}" for members, coarser in pairs)]
                )


def _plain(values: Sequence[float], form: str = ".3f") -> str:
    interval: Interval = mean_interval(torch.tensor(values, dtype=torch.float64))
    if len(values) < 2:
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} ({interval.low:{form}}, {interval.high:{form}})"


def _between(row: Mapping[str, Any], sign: str = "") -> str:
    return f"{_short(row['value'], sign)} ({_short(row['low'], sign)}, {_short(row['high'], sign)})"


def _short(value: float, sign: str = "") -> str:
    return f"{value:{sign}.3f}".replace("0.", ".", 1)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _row(cells: Sequence[str], *, heading: bool = False) -> None:
    print(f"| {' | '.join(cells)} |")
    if heading:
        print("|" + "---|" * len(cells))


# ------------------------------------------------------------------------------------------------------------ charts


def draw(arms: Sequence[str], folder: Path, place: Path) -> None:
    """Correlation by position for the most fields; a curve of accuracy for every K, arm and seed."""
    import altair as alt

    colour = alt.Color(
        "arm:N", scale=alt.Scale(domain=list(ARMS)), legend=alt.Legend(orient="bottom", title=None, symbolOpacity=1)
    )

    def band(rows: list[dict[str, Any]], title: str, x: alt.X, y: alt.Y) -> Any:
        base = alt.Chart(alt.InlineData(values=rows), title=title, width=230, height=200)
        shade = base.mark_area(opacity=0.15).encode(
            x=x, y=alt.Y("low:Q", title=y.to_dict()["title"]), y2="high:Q", color=colour
        )
        return shade + base.mark_line(strokeWidth=1.6, point=alt.OverlayMarkDef(size=14)).encode(x=x, y=y, color=colour)

    def save(charts: list[Any], name: str) -> None:
        if charts:
            place.mkdir(parents=True, exist_ok=True)
            chart = alt.hconcat(*charts).resolve_scale(y="shared").configure(background="white")
            chart.save(str(place / f"chain-{name}.png"), scale_factor=2)

    most, charts = max(COUNTS), []
    for policy in POLICIES:
        file = folder / f"fidelity-{most}" / f"{policy.replace(' ', '-')}.json"
        for goal, words in (("own", "own reward"), ("to go", "own and later rewards")):
            rows = [
                {**row, "field": row["k"] + 1}
                for row in (json.loads(file.read_text())["rows"] if file.exists() else [])
                if row["goal"] == goal and row["size"] == 8 and row["arm"] in ARMS and isinstance(row["k"], int)
            ]
            x = alt.X("field:O", title="field", axis=alt.Axis(labelAngle=0, grid=False))
            y = alt.Y("value:Q", title="correlation with the exact advantage")
            charts += [band(rows, f"{policy}: {words}", x, y)] if rows else []
    save(charts, "fidelity")
    charts = []
    for count in sorted(COUNTS):
        rows = [row for arm, runs in there(count, arms, folder).items() for row in _curve(arm, runs)]
        if rows:
            x = alt.X("samples:Q", title="completions", axis=alt.Axis(grid=False, tickCount=4))
            y = alt.Y("value:Q", title="mean accuracy of a field", scale=alt.Scale(domain=[0, 1]))
            chart = alt.Chart(alt.InlineData(values=rows), title=f"{count} fields", width=260, height=220)
            charts.append(chart.mark_line(strokeWidth=1.2, opacity=0.8).encode(x=x, y=y, color=colour, detail="seed:N"))
    save(charts, "training")


def _curve(arm: str, runs: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for seed, run in runs.items():
        for point in run["curve"]:
            yield {"arm": arm, "seed": seed, "samples": point["samples"], "value": point["accuracy"]}


def main() -> None:
    """Run what is missing, then show everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--output", default="runs/chain")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--charts", help="folder for the charts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    folder = Path(options.output)
    for count in [] if options.table else map(int, options.counts.split(",")):
        fields = Chain(count)
        for policy in POLICIES:
            kept(folder / f"fidelity-{count}" / f"{policy.replace(' ', '-')}.json", partial(measured, policy, fields))
        train_all(fields, arms_of(count, options.arms.split(",")), folder)
    arms = options.arms.split(",")
    show_training(arms, folder)
    show_fidelity(folder)
    if options.charts:
        draw(arms, folder, Path(options.charts))


if __name__ == "__main__":
    main()
