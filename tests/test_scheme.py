"""`Scheme`: every registered method is really called, and every option is used or refused."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from helpers import NAN
from spanwise import AlignmentError, Batch, Layout, Objective, Reading, RecipeError, Scheme, Steps, credit_batch, register
from spanwise.commands.methods.methods import show_methods
from spanwise.credit import METHODS, Preset
from spanwise.types import Scores, Spans

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
PRESETS = {name: entry.preset for name, entry in METHODS.items() if entry.preset is not None}
GENERATOR = torch.Generator().manual_seed(7)


def uniform(*shape):
    return torch.rand(*shape, generator=GENERATOR, dtype=torch.float64)


# A batch in which everything differs: prompts of 12, 3, 1 and 8, rewards that are no round numbers, one constant group.
N, T = 24, 12
GROUP_N = torch.tensor([0] * 12 + [1] * 3 + [3] + [2] * 8)
RIGHT_N = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0] + [1, 0, 0, 0, 0, 1, 1, 1] + [1] * 8).double()
MASK_NT = torch.arange(T) < torch.tensor([3, 12, 7, 5, 9, 4, 11, 6] * 3)[:, None]
BLOCK_NT = torch.where(MASK_NT, (torch.arange(T) >= 2).long(), -1).to(torch.int8)
SPANS = Spans(LAYOUT.names, torch.zeros(N, 2).long(), torch.zeros(N, 2).long(), BLOCK_NT, torch.zeros(N).long())
RAGGED = {"value_nt": uniform(N, T).float(), "logp_nt": -3 * uniform(N, T).float()}
RAGGED |= {"ids_nt": (5 * uniform(N, T)).long(), "mask_nt": MASK_NT}
TRAJECTORY_N = torch.tensor([0] * 5 + [1] * 3 + [2] * 4 + [3] + [4] * 2 + [5] + [6] * 3 + [7] * 5)
STEPS = Steps(TRAJECTORY_N, torch.arange(N), ["ab", "abc", "xy", "ab"] * 6)


def reading(scheme):
    m, k = len(scheme.objectives), len(scheme.layout.names)
    report_n = uniform(N)
    right_n = RIGHT_N if "outcome" in [o.baseline for o in scheme.objectives] else RIGHT_N + 0.25 * uniform(N)
    formed_n = (torch.arange(N) % 5 > 0).double()  # one in five is malformed
    reward_nm = torch.stack([right_n.where(GROUP_N != 2, 1.0), -((report_n - RIGHT_N) ** 2), formed_n, formed_n][:m], dim=1)
    rescored_no = torch.stack([-(report_n**2), -((1 - report_n) ** 2)], 1)
    unknown_no = torch.full((N, 2), NAN).double()
    by_outcome_nmo = torch.stack([unknown_no, rescored_no, unknown_no, unknown_no], 1)[:, :m]
    scores = Scores(scheme.names, reward_nm, torch.zeros(N, m, dtype=torch.int8), by_outcome_nmo)
    return Reading(scores, torch.full((N, k), 2) + torch.arange(N)[:, None] % 5, torch.zeros(N).long())


def credited(scheme):
    GENERATOR.manual_seed(11)
    read = reading(scheme)
    batch = Batch(GROUP_N, steps=STEPS if "steps" in scheme.needs else None, **RAGGED)
    spans = replace(SPANS, names=scheme.layout.names)
    local = Reading(read.scores, read.length_nk, read.fault_n, spans=spans if scheme.entry.kind == "token" else None)
    credit = credit_batch(local, batch, scheme)
    return (credit.block_nk if credit.token_nt is None else credit.token_nt), credit.stop_n


def preset(name, **options):
    return Scheme.preset(name, LAYOUT, longest=32, **options)


@contextmanager
def registered(name, kind, function, preset):
    """A method that is known for a while."""
    register(name, kind=kind, paper="none", preset=preset)(function)
    try:
        yield
    finally:
        METHODS.pop(name)


SHAPES = {"completion": "n", "block": "nk", "token": "nt", "step": "s"}


def spy(kind, calls):
    def numbers(reward):
        calls.append(reward)
        return torch.arange(reward.numel(), dtype=torch.float64).reshape(reward.shape) + 100

    functions = {
        "completion": lambda reward_n, group_n: numbers(reward_n),
        "block": lambda reward_nk, group_n: numbers(reward_nk),
        "token": lambda reward_nt, mask_nt: numbers(reward_nt).float(),
        "step": lambda reward_s, group_s, trajectory_s, step_s, anchor_s: numbers(reward_s),
    }
    return functions[kind]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("base", PRESETS)
def test_a_registered_method_is_called(kind, base):
    calls = []
    with registered("spy", kind, spy(kind, calls), PRESETS[base]):
        scheme = preset("spy")
        credit, _ = credited(scheme)
    assert len(calls) == 1
    expected = torch.arange(calls[0].numel(), dtype=torch.float64).reshape(calls[0].shape) + 100
    if kind == "block":  # a block gets the weighted sum of the objectives that pay it
        paid_mk = torch.tensor([[o.weight * (name in o.pays) for name in scheme.layout.names] for o in scheme.objectives])
        assert torch.equal(credit, expected @ paid_mk.double())
    elif kind == "token":
        assert torch.equal(credit.double(), expected)
    else:
        assert torch.equal(credit, expected[:, None].expand_as(credit))


def other(entry, option, default):
    """Another value that the option may have."""
    hint = get_type_hints(entry.estimator).get(option)
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != default)
    special = {"ddof": 1 - default if default in (0, 1) else 0, "min_stratum": 13, "similarity": 0.5, "seed": 3, "eps": 0.3}
    special |= {"length_adaptive_alpha": 0.4, "conflict": 1.0}
    if option in special:
        return special[option]
    if isinstance(default, float):
        return 0.5 * default + 0.13 if default else 0.37
    if isinstance(default, bool):
        return not default
    return default + 1


#: Other options that an option needs to show: a larger epsilon, or the number that switches a branch on.
WITH = {(name, "eps_at"): {"eps": 0.3} for name in ("reinforce++", "reinforce++-baseline")}
WITH["ktae", "top"] = {"form": "code"}
OPTIONS = [(name, option) for name, entry in METHODS.items() if entry.preset for option in entry.options]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_is_used_or_refused(name, option):
    entry = METHODS[name]
    value = other(entry, option, entry.options[option])
    base = dict(WITH.get((name, option), {}))
    condition, values = entry.only_with.get(option, ("", ()))
    idle = entry.options[condition] not in values if condition in entry.options else condition == "scale_k"
    if idle:
        with pytest.raises(RecipeError, match=f"Option '{option}' of method '{name}'"):
            preset(name, **{option: value})
    if condition == "scale_k":
        return  # an objective says it, see credit/test_comparison_exact.py
    if condition in entry.options:
        base[condition] = values[0]
    before, after = credited(preset(name, **base)), credited(preset(name, **{**base, option: value}))
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), f"{option}={value!r} changes nothing"


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.preset is None])
def test_options_of_functions_are_used(name):
    entry = METHODS[name]
    data = {"reward_n": RIGHT_N + 0.25 * uniform(N), "correct_n": RIGHT_N, "block_nt": BLOCK_NT.long(), **RAGGED}
    data |= {"adv_nt": uniform(N, T) - 0.5, "importance_nt": uniform(N, T), "stratum_n": torch.arange(N) % 3}
    run = lambda **options: entry.estimator(**{n: data.get(n, GROUP_N) for n in entry.required}, **options)  # noqa: E731
    before = run()
    for option, default in entry.options.items():
        value = other(entry, option, default)
        conditional = entry.only_with.get(option)
        base = {conditional[0]: conditional[1][0]} if conditional else WITH.get((name, option), {})
        assert not torch.equal(run(**base) if base else before, run(**base, **{option: value})), option


FACTS = [{"baseline": "batch"}, {"scale": "std"}, {"baseline": "outcome", "given": "correct", "back_off": True}]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_every_fact_of_an_objective_is_used_or_refused(name, fact):
    rule = preset(name)
    pays = {"pays": rule.layout.names}
    objectives = Objective("correct", **pays), Objective("correct", name="other", **pays, **fact)
    if "baseline" in METHODS[name].inputs:
        assert Scheme(name, rule.layout, objectives, rule.per).objectives[1] == objectives[1]
    else:
        with pytest.raises(RecipeError, match="would change nothing"):
            Scheme(name, rule.layout, objectives, rule.per)


def test_a_method_without_a_preset_is_called_from_python_only(capsys):
    with registered("measured", "token", lambda value_nk, block_nt: value_nk, None):
        with pytest.raises(RecipeError, match="No trainer can use method 'measured'"):
            Scheme.preset("measured", LAYOUT)
        show_methods("measured")
        show_methods()
    output = " ".join(capsys.readouterr().out.split())
    assert "# You can call this method from Python only" in output
    # A preset that divides by the token limit says whose it is.
    show_methods("dr_grpo")
    output = " ".join(capsys.readouterr().out.split())
    assert "per: 32.0" in output
    assert "In the recipe, `per` is the token limit of the example task digits. Your run uses its own limit." in output
    show_methods("grpo")
    assert "token limit" not in capsys.readouterr().out


SOLVED, UNCOMPARED = Objective("correct", pays="solution"), Objective("correct", pays="solution", baseline="none")
GIVEN = Objective("format", "confidence", given="correct")
OUT_OF_RANGE = [("bae", "min_stratum", 1), ("grpo", "ddof", 2), ("grpo", "eps", -1)]
OUT_OF_RANGE += [("gdpo", "conflict", 1.5), ("gdpo", "conflict", 0)]
OUTSIDE, NOT_POSITIVE = (-0.1, 1.1, NAN, True, "0.9"), (0, -0.05, NAN, float("inf"), True, "0.05")


@pytest.mark.parametrize(
    ("sentence", "name", "changes"),
    [
        ("calibration is", "grpo", {"calibration": "log_score"}),
        ("you also passed objectives", "bae", {"baseline": "group", "objectives": [Objective("correct", "solution")]}),
        ("no confidence", "bae", {"layout": Layout({"first": ["answer"], "second": ["answer"]}), "calibration": "brier"}),
        ("per is '-1'", "bae", {"per": "-1"}),
        ("per is 'True'", "bae", {"per": True}),
        *((f"{name} is {value}", method, {name: value}) for method, name, value in OUT_OF_RANGE),
        ("Pass it as longest=", "dr_grpo", {"longest": None}),
        ("names the outcome 'correct' in 'given', but", "bae", {"objectives": [SOLVED, GIVEN]}),
        ("Option 'leave_one_out' of method 'bae'", "bae", {"objectives": [UNCOMPARED], "leave_one_out": True}),
        ("Option 'min_stratum' of method 'bae'", "bae", {"objectives": [UNCOMPARED], "min_stratum": 13}),
        *((f"{name} is {value!r}; it must lie", "sae", {name: value}) for name in ("lam", "gamma") for value in OUTSIDE),
        *((f"length_adaptive_alpha is {value!r}", "gae", {"length_adaptive_alpha": value}) for value in NOT_POSITIVE),
    ],
)
def test_what_cannot_be_meant_is_refused(sentence, name, changes):
    with pytest.raises(RecipeError, match=sentence):
        Scheme.preset(name, **{"layout": LAYOUT, "longest": 32, **changes})


def test_a_scheme_is_plain_data_and_a_preset_pays_the_format_of_blocks_that_are_not_repeated(unchecked_shapes):
    layout = Layout({"solution": ["answer"], "quote[*]": ["quote"], "confidence": ["confidence"]})
    paid = [objective.pays for objective in Scheme.preset("bae", layout).objectives if objective.reward == "format"]
    assert paid == [("solution",), ("confidence",)]
    rule = preset("bae", baseline="blended", min_stratum=3)
    assert rule.plain()["options"] == {"min_stratum": 3}
    assert rule.plain()["objectives"][1] == {
        "reward": "brier", "pays": ["confidence"], "given": "correct", "baseline": "blended", "weight": 1.0, "if_missing": -1.0,
        "name": "brier",
    }  # fmt: skip
    assert rule.plain()["objectives"][2]["options"] == {"empty": True}, "the tags stand in the layout"
    assert replace(rule, per="completion").per == "completion"
    assert Scheme("bae", LAYOUT, [SOLVED], recorded="correct").recorded == {"correct"}, "one recorded name is one name"
    assert preset("bae", objectives=[SOLVED], recorded="correct").recorded == {"correct"}


@pytest.mark.parametrize(
    ("kind", "function", "sizes"),
    [
        ("completion", lambda reward_nm, group_n: reward_nm, r"\(24,\)"),
        ("block", lambda reward_nk, group_n: reward_nk[:, 0], r"\(24, 2\)"),
        ("token", lambda reward_nt, mask_nt: reward_nt[:, 1:], r"\(24, 12\)"),
        ("step", lambda reward_s, group_s: (reward_s, 1), r"\(24,\)"),
    ],
)
def test_a_function_that_is_not_of_its_kind_is_named(kind, function, sizes):
    sentence = f"'wrong shape' .*kind='{kind}' .*{sizes}"
    with registered("wrong shape", kind, function, Preset()), pytest.raises(AlignmentError, match=sentence):
        credited(preset("wrong shape"))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"objectives": [SOLVED, "brier"]}, "got 'brier'"),
        ({"objectives": [{"reward": "correct", "pays": "solution"}]}, "got {'reward'"),
        ({"options": None}, "options are None"),
        ({"options": ["ddof"]}, r"options are \['ddof'"),
    ],
)
def test_what_is_no_part_of_a_scheme_is_refused(unchecked_shapes, parts, sentence):
    with pytest.raises(RecipeError, match=sentence):
        Scheme(**{"method": "bae", "layout": LAYOUT, "objectives": [SOLVED], **parts})
    if "options" not in parts:
        with pytest.raises(RecipeError, match=sentence):
            Scheme.preset("bae", **{"layout": LAYOUT, **parts})


APART = [SOLVED, Objective("brier", "confidence", given="correct")]
ALIKE = [Objective("correct", LAYOUT.names), Objective("brier", LAYOUT.names[::-1], given="correct")]


def test_the_names_of_the_values():
    per_objective, shared = ("correct", "brier"), ("return",)
    for method in ("gae", "sae"):
        for objectives, names in ((None, shared), (APART, per_objective), (ALIKE, shared), (APART[:1], shared)):
            assert preset(method, objectives=objectives).value_names == names
        assert preset(method, objectives=APART, values="shared").value_names == shared
        assert preset(method, objectives=ALIKE, values="objective").value_names == per_objective
        alone = preset(method, values="objective")
        assert (alone.value_names, alone.plain()["values"]) == (("correct",), "objective")
        assert "values" not in preset(method).plain()
    assert preset("bae").value_names == preset("reinforce++").value_names == ()


@pytest.mark.parametrize("name", PRESETS)
def test_values_are_used_or_refused(unchecked_shapes, name):
    """A method that reads a critic hears what its values are of, and may pay different blocks; every other one says no."""
    if name in ("gae", "sae"):
        assert preset(name, values="shared").values == "shared"
        assert preset(name, objectives=APART).plain()["objectives"][0]["pays"] == ["solution"]
        with pytest.raises(RecipeError, match="no kind of values 'each'"):
            preset(name, values="each")
        return
    with pytest.raises(RecipeError, match="uses no critic"):
        preset(name, values="shared")
    if METHODS[name].kind != "block":
        with pytest.raises(RecipeError, match="'correct' pays solution"):
            preset(name, objectives=APART)


def test_an_option_by_its_other_name():
    scheme = preset("sae", gae_lambda_policy=0.9)
    assert scheme.options == scheme.plain()["options"] == {"lam": 0.9}
    assert Scheme("gae", LAYOUT, ALIKE, options={"gae_lambda_policy": 1.0}).options == {"lam": 1.0}
    with pytest.raises(RecipeError, match="both are given"):
        preset("gae", gae_lambda_policy=0.9, lam=0.9)
    with pytest.raises(RecipeError, match="Method 'grpo' has no option 'gae_lambda_policy'"):
        preset("grpo", gae_lambda_policy=0.9)
    for method in ("gae", "sae"):  # a lambda beside the adaptive one is void
        assert preset(method, length_adaptive_alpha=0.05).options == {"length_adaptive_alpha": 0.05}
        for name in ("lam", "gae_lambda_policy"):
            with pytest.raises(RecipeError, match=r"Option 'lam' .* length_adaptive_alpha"):
                preset(method, length_adaptive_alpha=0.05, **{name: 0.9})
