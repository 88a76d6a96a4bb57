"""Token fidelity: figures against plain loops, Monte Carlo values and critics against a policy whose values are enumerated."""

import io
import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise.commands.fidelity.token_fidelity import show_tokens, token_fidelity_folder
from spanwise.commands.fidelity.token_rollouts import Roller, collect_tokens, fitted_critics
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.layout import Layout
from spanwise.measure.token_fidelity import TOKEN_FIGURES, monte_carlo_advantage, token_fidelity
from spanwise.measure.trajectories import TOKEN_ESTIMATORS, Trajectories
from spanwise.recipe import load
from spanwise.tasks import DIGITS_LAYOUT, Task, build_tokenizer

NAN = float("nan")


def drawn(n, t, *, seed=0, prompts=5):
    """Random trajectories with holes in the mask, and values of a critic."""
    g = torch.Generator().manual_seed(seed)
    mask_nt = torch.rand(n, t, generator=g) < 0.8
    return Trajectories(
        prompt_n=torch.randint(prompts, (n,), generator=g),
        reward_n=(torch.rand(n, generator=g) < 0.5).double(),
        value_nt=torch.rand(n, t, generator=g).double(),
        noise_nt=0.02 * torch.rand(n, t, generator=g).double(),
        logp_nt=(0.4 + 0.6 * torch.rand(n, t, generator=g)).double().log(),
        mask_nt=mask_nt,
    ), torch.rand(n, t, generator=g).double()


def by_hand(trajectories, value_nt, name, *, decision=0.97):
    """The figures of one estimator, straight from their definitions, by kind of token."""
    rows = []
    for n in range(len(trajectories.reward_n)):
        places = [t for t in range(value_nt.shape[1]) if trajectories.mask_nt[n, t]]
        reward = float(trajectories.reward_n[n])
        mc = [float(trajectories.value_nt[n, t]) for t in places] + [reward]
        noise = [float(trajectories.noise_nt[n, t]) for t in places] + [0.0]
        v = [float(value_nt[n, t]) for t in places] + [reward]
        p = [math.exp(float(trajectories.logp_nt[n, t])) for t in places]
        group = [r for r, x in zip(trajectories.reward_n.tolist(), trajectories.prompt_n.tolist(), strict=True)
                 if x == trajectories.prompt_n[n]]  # fmt: skip
        for k in range(len(places)):
            if name.startswith("GRPO c - g"):
                a = reward - sum(group) / len(group) if len(group) > 1 else 0.0
            elif name.startswith("GRPO"):
                a = reward - v[0]
            else:  # every later surprise, weighted by lambda for each boundary on the way to it
                threshold, lam = map(float, name[4:].split(", ")) if name[0] == "S" else (2.0, float(name[4:]))
                weight, a = 1.0, 0.0
                for j in range(k, len(places)):
                    weight *= lam if j > k and p[j] < threshold else 1.0
                    a += weight * (v[j + 1] - v[j])
            rows.append((a, mc[k + 1] - mc[k], noise[k + 1] + noise[k], p[k] < decision))
    found = {}
    for kind in ("all", "decision"):
        use = [row for row in rows if kind == "all" or row[3]]
        n = len(use)
        mean_a, mean_m = sum(u[0] for u in use) / n, sum(u[1] for u in use) / n
        var_a, var_m = sum((u[0] - mean_a) ** 2 for u in use), sum((u[1] - mean_m) ** 2 for u in use)
        noise = sum(u[2] for u in use)
        k = sum(u[0] * u[1] for u in use) / sum(u[0] ** 2 for u in use)
        found[kind] = {
            "correlation": sum((u[0] - mean_a) * (u[1] - mean_m) for u in use) / math.sqrt(var_a * var_m),
            "ceiling": math.sqrt(1 - noise / var_m),
            "rmse": math.sqrt(max(0, sum((u[0] - u[1]) ** 2 for u in use) - noise) / n),
            "rmse_scaled": math.sqrt(max(0, sum((k * u[0] - u[1]) ** 2 for u in use) - noise) / n),
        }
    return found


@pytest.mark.parametrize("seed", range(3))
def test_against_plain_loops(seed):
    trajectories, value_nt = drawn(12, 7, seed=seed)
    found = token_fidelity(trajectories, {"critic": value_nt}, draws=2)
    for name in TOKEN_ESTIMATORS:
        expected = by_hand(trajectories, value_nt, name)
        for kind in ("all", "decision"):
            got = {figure: found.interval("critic", name, figure, kind=kind).value for figure in TOKEN_FIGURES}
            assert got == pytest.approx(expected[kind], abs=1e-9), (name, kind)


def test_by_hand():
    # One completion: V_MC .5, .5, .25 and reward 1: A_MC 0, -.25, .75. The critic says .5, .6, .2.
    one = Trajectories(
        torch.tensor([0]), torch.tensor([1.0]), torch.tensor([[0.5, 0.5, 0.25]]), torch.tensor([[0.01, 0.02, 0.03]]),
        torch.tensor([[1.0, 1.0, 0.4]]).log(), torch.ones(1, 3, dtype=torch.bool),
    )  # fmt: skip
    target_nt, noise_nt = monte_carlo_advantage(one)
    assert target_nt.tolist() == [[0.0, -0.25, 0.75]]
    assert noise_nt.flatten().tolist() == pytest.approx([0.03, 0.05, 0.03])
    found = token_fidelity(one, {"critic": torch.tensor([[0.5, 0.6, 0.2]])}, draws=2)
    # mean 1/6; squares 0, .0625, .5625: variance sum .625 - 3/36 = .541667; noise .11
    assert found.interval("critic", "GAE 0", "ceiling").value == pytest.approx(math.sqrt(1 - 0.11 / (0.625 - 1 / 12)))
    # GAE 0: .1, -.4, .8, sum .5, squares .81, products 0 + .1 + .6 = .7
    assert found.interval("critic", "GAE 0", "correlation").value == pytest.approx(
        (0.7 - 0.5 * 0.5 / 3) / math.sqrt((0.81 - 0.25 / 3) * (0.625 - 0.25 / 3)), abs=1e-6
    )
    # SAE .5, 0 cuts before the last token: -.3, -.4, .8; sum .1, squares .89, products .1 + .6
    assert found.interval("critic", "SAE 0.5, 0", "correlation").value == pytest.approx(
        (0.7 - 0.1 * 0.5 / 3) / math.sqrt((0.89 - 0.01 / 3) * (0.625 - 0.25 / 3)), abs=1e-6
    )
    # Errors of GAE 0: .1, -.15, .05: squares .035, less .11 of noise is below 0. One token is a decision: no correlation.
    assert found.interval("critic", "GAE 0", "rmse").value == 0
    assert (found.count("all"), found.count("decision")) == (3, 1)
    assert math.isnan(found.interval("critic", "GAE 0", "correlation", kind="decision").value)
    # The critic's own values: errors 0, .1, -.05; squares .0125 less .06 of noise.
    assert found.critic_interval("critic", "rmse").value == 0


def test_masked_is_deleted():
    trajectories, value_nt = drawn(8, 6, seed=3)
    full = torch.ones(8, 6, dtype=torch.bool)
    short = Trajectories(
        trajectories.prompt_n,
        trajectories.reward_n,
        trajectories.value_nt,
        trajectories.noise_nt,
        trajectories.logp_nt,
        full,
    )
    place_t = torch.tensor([1, 2, 4, 5, 7, 8])

    def spread(x_nt, fill):
        wide = torch.full((8, 10), fill, dtype=x_nt.dtype)
        wide[:, place_t] = x_nt
        return wide

    wide = Trajectories(
        trajectories.prompt_n, trajectories.reward_n, spread(trajectories.value_nt, NAN), spread(trajectories.noise_nt, 1e9),
        spread(trajectories.logp_nt, -50.0), spread(full, False),
    )  # fmt: skip
    one = token_fidelity(short, {"c": value_nt}, draws=3)
    two = token_fidelity(wide, {"c": spread(value_nt, NAN)}, draws=3)
    assert torch.allclose(one.sum_cesnk, two.sum_cesnk)
    assert torch.allclose(one.value_sum_csnk, two.value_sum_csnk)


def test_what_is_unknown_is_left_out():
    trajectories, value_nt = drawn(9, 5, seed=4)
    gone, unvalued, dumb = trajectories.reward_n.clone(), trajectories.value_nt.clone(), value_nt.clone()
    gone[0], dumb[1] = NAN, NAN
    unvalued[2, 2] = NAN
    mask_nt = torch.ones(9, 5, dtype=torch.bool)
    holes = Trajectories(trajectories.prompt_n, gone, unvalued, trajectories.noise_nt, trajectories.logp_nt, mask_nt)
    found = token_fidelity(holes, {"c": value_nt, "d": dumb}, draws=2)
    count_n = found.sum_cesnk[0, 0, 0, :, 0]
    assert count_n.tolist() == [0, 0, 3, 5, 5, 5, 5, 5, 5]  # V unknown before token 2: neither token 2 nor token 1 has A_MC
    assert torch.equal(count_n, found.sum_cesnk[1, -1, 0, :, 0])
    assert bool(found.sum_cesnk.isfinite().all())


def exact_and_noisy(rerolls, *, n=3000, t=6, seed=0):
    """Martingale values of a chain that is hit with probability .3 at each step, and their Monte Carlo estimates."""
    g = torch.Generator().manual_seed(seed)
    step_nt = torch.where(torch.rand(n, t, generator=g) < 0.3, -0.1, 0.3 * 0.1 / 0.7)
    value_nt = (0.5 + torch.cat([torch.zeros(n, 1), step_nt[:, 1:]], dim=1).cumsum(dim=1)).double()
    reward_n = (torch.rand(n, generator=g) < value_nt[:, -1]).double()

    def roll():
        return torch.distributions.Binomial(rerolls, value_nt).sample() / rerolls

    torch.manual_seed(seed)
    first_nt, second_nt = roll(), roll()
    noise_nt = first_nt * (1 - first_nt) / (rerolls - 1)
    logp_nt, mask_nt = torch.zeros(n, t).double(), torch.ones(n, t, dtype=torch.bool)
    return Trajectories(torch.arange(n), reward_n, first_nt, noise_nt, logp_nt, mask_nt), value_nt, second_nt


@pytest.mark.parametrize("rerolls", [4, 64])
def test_the_exact_critic_reaches_the_ceiling(rerolls):
    trajectories, exact_nt, again_nt = exact_and_noisy(rerolls)
    found = token_fidelity(trajectories, {"exact": exact_nt, "again": again_nt, "same": trajectories.value_nt}, draws=10)
    ceiling = found.interval("exact", "GAE 0", "ceiling").value
    assert found.interval("exact", "GAE 0", "correlation").value == pytest.approx(ceiling, abs=0.01)
    assert found.interval("exact", "GAE 0", "rmse").value < 0.06  # without taking the noise off: .35 and .09
    assert found.critic_interval("exact", "rmse").value < 0.05
    # An independent set of re-rolls is as noisy as the reference itself; its own re-rolls would look perfect.
    assert found.interval("again", "GAE 0", "correlation").value == pytest.approx(ceiling**2, abs=0.02)
    assert found.interval("same", "GAE 0", "correlation").value == pytest.approx(1.0)
    assert found.best("exact", "GAE") == "GAE 0"
    assert found.lead("exact", "SAE 0.5, 0", "GAE").value < 0  # no token is unlikely, so that SAE is c - V


def test_leads_choose_anew_in_every_draw():
    trajectories, value_nt = drawn(60, 6, seed=5, prompts=20)
    found = token_fidelity(trajectories, {"c": value_nt}, draws=300)
    names = [name for name in TOKEN_ESTIMATORS if name.startswith("GAE")]
    for figure, best in (("correlation", max), ("rmse_scaled", min)):
        by_name = {name: found.interval("c", name, figure).value for name in names}
        assert found.best("c", "GAE", figure) == best(by_name, key=by_name.__getitem__)
        lead = found.lead("c", "SAE 0.8, 0", "GAE", figure)
        assert lead.value == pytest.approx(found.interval("c", "SAE 0.8, 0", figure).value - best(by_name.values()))
        # Against many chosen anew, the lead is never better than against any one of them.
        for name in names:
            single = found.lead("c", "SAE 0.8, 0", name, figure)
            worse = lead.high <= single.high + 1e-12 if figure == "correlation" else lead.low >= single.low - 1e-12
            assert worse
    assert found.lead("c", "GAE", "GAE").low == found.lead("c", "GAE", "GAE").high == 0
    assert found.lead("c", "GAE 0", "GAE 1").value == -found.lead("c", "GAE 1", "GAE 0").value


def test_an_estimator_that_never_varies_leads_nobody():
    # A critic that always says 0, and last tokens that are no decisions: GAE 0 is 0 at every decision, the others are not.
    trajectories, value_nt = drawn(60, 6, seed=5, prompts=20)
    last_nt = torch.arange(6) == 5
    sure = replace(
        trajectories, logp_nt=trajectories.logp_nt.masked_fill(last_nt, 0.0), mask_nt=trajectories.mask_nt | last_nt
    )
    found = token_fidelity(sure, {"zero": torch.zeros_like(value_nt)}, draws=50)
    assert math.isnan(found.interval("zero", "GAE 0", "correlation", kind="decision").value)
    best = found.best("zero", "GAE", kind="decision")
    lead = found.lead("zero", "SAE 0.5, 0", "GAE", kind="decision")
    own = [found.interval("zero", name, "correlation", kind="decision").value for name in ("SAE 0.5, 0", best)]
    assert lead.value == pytest.approx(own[0] - own[1])


def test_intervals_are_by_prompt():
    trajectories, value_nt = drawn(6, 5, seed=6, prompts=6)
    copies = 20  # the same six completions of six prompts, again and again: no new facts, the same interval
    many = Trajectories(
        trajectories.prompt_n.repeat(copies), trajectories.reward_n.repeat(copies), trajectories.value_nt.repeat(copies, 1),
        trajectories.noise_nt.repeat(copies, 1), trajectories.logp_nt.repeat(copies, 1), trajectories.mask_nt.repeat(copies, 1),
    )  # fmt: skip
    one = token_fidelity(trajectories, {"c": value_nt}).interval("c", "GAE 1", "correlation")
    two = token_fidelity(many, {"c": value_nt.repeat(copies, 1)}).interval("c", "GAE 1", "correlation")
    assert (two.low, two.high) == pytest.approx((one.low, one.high))
    assert one.low < one.value < one.high


@pytest.mark.usefixtures("unchecked_shapes")
def test_sentences():
    trajectories, value_nt = drawn(4, 5)
    with pytest.raises(AlignmentError, match=r"values of critic 'c' are \(4, 4\), the tokens \(4, 5\)"):
        token_fidelity(trajectories, {"c": value_nt[:, :4]})
    with pytest.raises(DataError, match="nothing can be compared"):
        token_fidelity(trajectories, {"c": value_nt * NAN})
    with pytest.raises(DataError, match="nothing can be compared"):
        token_fidelity(trajectories, {})
    with pytest.raises(AlignmentError, match=r"have the shapes \(4, 4\), \(4, 5\)"):
        replace(trajectories, mask_nt=trajectories.mask_nt[:, :4])
    with pytest.raises(AlignmentError, match="There are 3 prompts, 4 rewards and 4 rows of tokens"):
        replace(trajectories, prompt_n=trajectories.prompt_n[:3])
    found = token_fidelity(trajectories, {"c": value_nt}, draws=2)
    for arguments in (("d", "GAE 0", "rmse"), ("c", "GAE", "rmse"), ("c", "GAE 0", "rms")):
        with pytest.raises(RecipeError, match="There is no"):
            found.interval(*arguments)
    with pytest.raises(RecipeError, match="no estimator 'VAPO'"):
        found.best("c", "VAPO")


# A policy that looks at the last token only: a transformer of no layers, its table of probabilities written by hand

TABLE = {
    "=": {"<reasoning>": 0.8, "<answer>": 0.2},
    "<reasoning>": {"+3": 0.5, "-5": 0.3, "<eos>": 0.2},
    "+3": {"</reasoning>": 1.0},
    "-5": {"</reasoning>": 0.3, "<eos>": 0.7},
    "</reasoning>": {"<answer>": 1.0},
    "<answer>": {"2": 0.6, "3": 0.4},
    "2": {"</answer>": 0.9, "<eos>": 0.1},
    "3": {"</answer>": 0.9, "<eos>": 0.1},
    "</answer>": {"<analysis>": 1.0},
    "<analysis>": {"</analysis>": 1.0},
    "</analysis>": {"<confidence>": 1.0},
    "<confidence>": {"?": 1.0},
    "?": {"</confidence>": 1.0},
    "</confidence>": {"<eos>": 1.0},
}
ROWS = Dataset.from_dict({"prompt": ["1+1_____=", "1+1=", "7=", "1+1_____="], "answer": ["2", "2", "3", "3"]})


@cache
def worth(answer, tokens):
    """Exact value: every way to go on, with its probability; right is what a regular expression says."""
    if tokens and tokens[-1] in ("<eos>", "<analysis>"):
        found = re.search(r"<answer>(\d)</answer>", "".join(tokens))
        return float(found is not None and found[1] == answer)
    return sum(p * worth(answer, (*tokens, token)) for token, p in TABLE[tokens[-1] if tokens else "="].items())


def assert_hand_value():
    """.8 (.5 .54 + .3 .3 .54) + .2 .54 with .54 = .6 .9, the value of an opened answer."""
    assert worth("2", ()) == pytest.approx(0.8 * (0.5 * 0.54 + 0.3 * 0.3 * 0.54) + 0.2 * 0.54)


@pytest.fixture(scope="module")
def tabular():
    tokenizer = build_tokenizer()
    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=64, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1,
            num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    logits_fv = torch.full((size, size), -60.0)
    for before, row in TABLE.items():
        for after, p in row.items():
            logits_fv[tokenizer.get_vocab()[before], tokenizer.get_vocab()[after]] = math.log(p)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, 64))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = logits_fv.T / 8  # the norm makes a unit vector of 64 numbers 8 times as long
    return model, tokenizer


@pytest.fixture(scope="module")
def collected(tabular):
    return collect_tokens(roller(tabular), ROWS, samples=6, rerolls=50, seed=1)


def roller(tabular, layout=DIGITS_LAYOUT, temperature=1.0):
    return Roller(tabular[0], tabular[1], Task("digits-easy", "nowhere", ROWS, ROWS, layout, 32), temperature, 32)


def prefixes(tabular, blocks):
    """(n, t, answer, tokens before t) of every token that counts."""
    for n, t in blocks.mask_nt.nonzero().tolist():
        tokens = tuple(tabular[1].convert_ids_to_tokens(blocks.ids_nt[n, :t].tolist()))
        yield n, t, ROWS["answer"][int(blocks.prompt_n[n])], tokens


def test_monte_carlo_values_are_the_enumerated_ones(tabular, collected):
    assert_hand_value()
    blocks, trajectories, again_ntm = collected
    again_nt = again_ntm.nanmean(dim=2)
    squares, seen = [], set()
    for n, t, answer, tokens in prefixes(tabular, blocks):
        v, p = worth(answer, tokens), TABLE[tokens[-1] if tokens else "="]
        own = tabular[1].convert_ids_to_tokens(int(blocks.ids_nt[n, t]))
        assert float(trajectories.logp_nt[n, t].exp()) == pytest.approx(p[own], abs=1e-5)
        sd = math.sqrt(v * (1 - v) / 50)
        found = float(trajectories.value_nt[n, t])
        assert float(trajectories.noise_nt[n, t]) == pytest.approx(found * (1 - found) / 49)  # variance (ddof 1) over number
        for value in (float(trajectories.value_nt[n, t]), float(again_nt[n, t])):
            assert value == pytest.approx(v, abs=4.5 * sd + 1e-9), tokens
        if sd > 1e-9 and (int(blocks.prompt_n[n]), tokens) not in seen:
            seen.add((int(blocks.prompt_n[n]), tokens))
            squares.append(((float(trajectories.value_nt[n, t]) - v) / sd) * ((float(again_nt[n, t]) - v) / sd))
    # The two sets share nothing: the product of their errors is 0 on average.
    assert abs(sum(squares) / len(squares)) < 3 / math.sqrt(len(squares))
    # Equal prefixes of one prompt are re-rolled once.
    assert len(trajectories.value_nt[:6, 0].unique()) == 1
    for n, text in enumerate(
        tabular[1].batch_decode([ids[m] for ids, m in zip(blocks.ids_nt, blocks.mask_nt, strict=True)])
    ):
        answer = ROWS["answer"][int(blocks.prompt_n[n])]
        assert "<analysis>" not in text
        assert float(blocks.reward_n[n]) == float(f"<answer>{answer}</answer>" in text)


def test_the_exact_values_explain_the_advantages(tabular, collected):
    blocks, trajectories, _ = collected
    exact_nt = torch.zeros(blocks.mask_nt.shape, dtype=torch.float64)
    for n, t, answer, tokens in prefixes(tabular, blocks):
        exact_nt[n, t] = worth(answer, tokens)
    found = token_fidelity(trajectories, {"exact": exact_nt}, draws=10)
    ceiling = found.interval("exact", "GAE 0", "ceiling").value
    assert 0.85 < ceiling < 0.995
    assert found.interval("exact", "GAE 0", "correlation").value == pytest.approx(ceiling, abs=0.05)
    assert found.interval("exact", "GAE 1", "correlation").value < 0.8


def test_nothing_is_sampled_after_the_first_block(tabular):
    model, _ = tabular
    one = roller(tabular)
    blocks, ends = one.blocks(ROWS, samples=4, seed=3), model.generation_config.eos_token_id
    assert ends == tabular[1].eos_token_id
    seen = []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    try:
        assert one.rewards_from(ROWS, [(0, (tabular[1].get_vocab()["<answer>"],))], rerolls=50, seed=0).shape == (1, 50)
    finally:
        handle.remove()
    assert len(seen) == 3  # digit, closing tag, opening tag of the next block
    assert int(blocks.mask_nt.sum(dim=1).max()) == 6
    # Where both blocks are made of the same tags, no tag says that the first is over.
    twice = roller(tabular, Layout({"first": ["answer"], "second": ["answer"]}))
    with twice._stopping():
        assert model.generation_config.eos_token_id == [tabular[1].eos_token_id]


def test_log_probabilities_are_those_of_the_temperature(tabular):
    warm = roller(tabular, temperature=2.0)
    blocks = warm.blocks(ROWS, samples=6, seed=4)
    logp_nt = warm.logp(blocks)
    at = {tokens: float(logp_nt[n, t].exp()) for n, t, _, tokens in prefixes(tabular, blocks)}
    root = {token: math.sqrt(p) for token, p in TABLE["="].items()}
    assert at[()] in [pytest.approx(p / sum(root.values()), abs=1e-5) for p in root.values()]


def test_a_critic_learns_the_values_of_the_states_it_can_tell_apart(tabular):
    before = {name: weight.clone() for name, weight in tabular[0].state_dict().items()}
    one = roller(tabular)
    rows = ROWS.select([0, 1])  # one answer, so that the last token says all but how a closed answer reads
    blocks = one.blocks(rows, samples=20, seed=5)
    looks = {}
    for step, critic in fitted_critics(one, rows, steps=(1, 40), batch=64, learning_rate=0.03, seed=6):
        with torch.no_grad():
            looks[step] = critic(blocks)
    assert list(looks) == [1, 40]
    error = {1: [], 40: []}
    for n, t, answer, tokens in prefixes(tabular, blocks):
        known = worth(answer, tokens)
        if tokens and tokens[-1] == "</answer>":
            known = 0.6  # the share of right ones among closed answers
        for step in error:
            error[step].append(abs(float(looks[step][n, t]) - known))
    assert max(error[40]) < 0.15
    assert max(error[1]) > 0.25
    assert all(torch.equal(weight, before[name]) for name, weight in tabular[0].state_dict().items())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_from_a_folder_to_tables(tabular, tmp_path, monkeypatch):
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    for part in tabular:
        part.save_pretrained(tmp_path / "model")
    recipe = load(None, {"start_steps": 1, "eval_prompts": 8})
    found = token_fidelity_folder(tmp_path / "model", recipe, prompts=6, samples=3, rerolls=6, steps=(1, 2), seed=1)
    assert found.critics == ("1 steps", "2 steps", "MC 4", "MC 6")
    assert (len(found.prompt_n), len(found.prompt_n.unique())) == (18, 6)
    console = Console(width=80, record=True, file=io.StringIO())
    show_tokens(found, console=console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert f"{found.interval('MC 6', 'SAE 0.5, 0', 'correlation').value:.3f}" in text
    for words in (
        "18 completions of 6 prompts",
        "decision tokens: lead over the best GAE in correlation",
        "GRPO c - V(prompt)",
    ):
        assert words in text
    with pytest.raises(DataError, match="from 2 re-rolls on; 1 were asked for"):
        token_fidelity_folder(tmp_path / "model", recipe, rerolls=1)


def test_a_model_without_a_first_block(tabular):
    layout = Layout({"empty": ["never"], "rest": ["reasoning", "answer"]})
    one = roller(tabular, layout)
    with pytest.raises(DataError, match="None of 8 completions has the block 'empty'"):
        collect_tokens(one, ROWS, samples=2, rerolls=2)
