"""Monte Carlo values and critics against a policy whose values are enumerated, and `spanwise fidelity` per token."""

import io
import json
import math
import re
from functools import cache
from itertools import pairwise

import pytest
import torch
import yaml
from datasets import Dataset
from rich.console import Console

from spanwise.commands.fidelity.command import command as fidelity
from spanwise.commands.fidelity.fidelity import rolled_tokens, show_tokens
from spanwise.commands.shared.task import run_or_model
from spanwise.commands.train.train import train
from spanwise.errors import DataError, RecipeError
from spanwise.fidelity import SaeSegments, monte_carlo_advantage, rerolls, token_fidelity
from spanwise.fidelity.rerolls import Roller, choose_tokens, collect_tokens, fitted_critics, values
from spanwise.layout import Layout
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.critic import ValueModel
from spanwise.recipe import load
from spanwise.tasks import DIGITS_LAYOUT, Task
from spanwise.tasks.embedded import build_tokenizer
from tokenizers_small import last_token_model

TABLE = {
    "=": {"<reasoning>": 0.8, "<answer>": 0.2},
    "<reasoning>": {"+3": 0.5, "-5": 0.3, "<eos>": 0.2},
    "+3": {"</reasoning>": 1.0},
    "-5": {"</reasoning>": 0.3, "<eos>": 0.7},
    "</reasoning>": {"<answer>": 1.0},
    "<answer>": {"2": 0.6, "3": 0.4},
    "2": {"</answer>": 0.9, "<eos>": 0.1},
    "3": {"</answer>": 0.9, "<eos>": 0.1},
}
REPORT = ["</answer>", "<analysis>", "</analysis>", "<confidence>", "?", "</confidence>", "<eos>"]
TABLE |= {token: {next_token: 1.0} for token, next_token in pairwise(REPORT)}
ROWS = Dataset.from_dict({"prompt": ["1+1_____=", "1+1=", "7=", "1+1_____="], "answer": ["2", "2", "3", "3"]})


@cache
def worth(answer, tokens):
    """Return the exact value of a prefix, over all continuations; a regular expression decides which are right."""
    if tokens and tokens[-1] in ("<eos>", "<analysis>"):
        matched = re.search(r"<answer>(\d)</answer>", "".join(tokens))
        return float(matched is not None and matched[1] == answer)
    return sum(p * worth(answer, (*tokens, token)) for token, p in TABLE[tokens[-1] if tokens else "="].items())


@pytest.fixture(scope="module")
def tabular():
    vocabulary = build_tokenizer().get_vocab()
    logits_fv = torch.full((len(vocabulary), len(vocabulary)), -60.0)
    for before, row in TABLE.items():
        for after, p in row.items():
            logits_fv[vocabulary[before], vocabulary[after]] = math.log(p)
    return last_token_model(logits_fv)


@pytest.fixture
def model(tabular, tmp_path, monkeypatch):
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    for part in tabular:
        part.save_pretrained(tmp_path / "run" / "model")
    return tmp_path / "run" / "model"


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
    # By hand, with .54 = .6 .9, the value of an opened answer.
    assert worth("2", ()) == pytest.approx(0.8 * (0.5 * 0.54 + 0.3 * 0.3 * 0.54) + 0.2 * 0.54)
    blocks, trajectories, again_ntm = collected
    again_nt = again_ntm.nanmean(dim=2)
    squares = {}  # by prefix
    for n, t, answer, tokens in prefixes(tabular, blocks):
        v, p = worth(answer, tokens), TABLE[tokens[-1] if tokens else "="]
        token = tabular[1].convert_ids_to_tokens(int(blocks.ids_nt[n, t]))
        assert float(trajectories.logp_nt[n, t].exp()) == pytest.approx(p[token], abs=1e-5)
        sd = math.sqrt(v * (1 - v) / 50)
        mean, again = float(trajectories.value_nt[n, t]), float(again_nt[n, t])
        assert float(trajectories.noise_nt[n, t]) == pytest.approx(mean * (1 - mean) / 49)  # variance (ddof 1) over number
        assert [mean, again] == pytest.approx([v, v], abs=4.5 * sd + 1e-9), tokens
        if sd > 1e-9:
            squares[int(blocks.prompt_n[n]), tokens] = (mean - v) / sd * (again - v) / sd
    # The two sets share nothing: the product of their errors is 0 on average.
    assert abs(sum(squares.values()) / len(squares)) < 3 / math.sqrt(len(squares))
    # Equal prefixes of one prompt are re-rolled once.
    assert len(trajectories.value_nt[:6, 0].unique()) == 1
    for n, (ids_t, mask_t) in enumerate(zip(blocks.ids_nt, blocks.mask_nt, strict=True)):
        text, answer = tabular[1].decode(ids_t[mask_t]), ROWS["answer"][int(blocks.prompt_n[n])]
        assert "<analysis>" not in text
        assert float(blocks.reward_n[n]) == float(f"<answer>{answer}</answer>" in text)


def test_long_completions_are_re_rolled_at_a_sample_of_tokens(tabular, monkeypatch):
    monkeypatch.setattr(rerolls, "UNLIKELY", 0.35)
    # Tokens below .35 are boundaries; of the other decisions, and of the tokens that are none, one of each completion is picked.
    blocks, trajectories, again_ntm = collect_tokens(roller(tabular), ROWS, samples=6, rerolls=50, sets=1, most=1, seed=1)
    assert again_ntm.shape == (*blocks.mask_nt.shape, 0)
    valued = set(map(tuple, trajectories.value_nt.isfinite().nonzero().tolist()))
    places = list(prefixes(tabular, blocks))
    expected = set()
    for n, t, answer, tokens in places:
        after = [u for m, u, _, _ in places if m == n and u > t][:1]
        expected |= {(n, u) for u in [t, *after] if trajectories.weight_nt[n, t] > 0} | ({(n, t)} if not tokens else set())
        if (n, t) in valued:
            v = worth(answer, tokens)
            assert float(trajectories.value_nt[n, t]) == pytest.approx(v, abs=4.5 * math.sqrt(v * (1 - v) / 50) + 1e-9)
    assert valued == expected
    assert len(valued) < len(places)
    with pytest.raises(DataError, match="some"):  # no critic is made of a sample
        collect_tokens(roller(tabular), ROWS, samples=6, rerolls=50, most=1, seed=1)
    # Every segment has both of its values, for either convention.
    for side in ("start", "end"):
        target_nt, _ = monte_carlo_advantage(trajectories, SaeSegments(0.35, side))
        assert torch.equal(target_nt.isfinite(), blocks.mask_nt & ~blocks.reward_n.isnan()[:, None])


def test_picked_tokens_stand_for_all_of_their_kind():
    g = torch.Generator().manual_seed(0)
    p_nt, mask_nt = torch.rand(40, 60, generator=g).sqrt(), torch.rand(40, 60, generator=g) < 0.8
    p_nt[:, ::3] = 0.99
    weight_nt = choose_tokens(p_nt.log(), mask_nt, most=5, seed=3)
    for kind_nt in (p_nt < 0.2, (p_nt >= 0.2) & (p_nt < 0.97), p_nt >= 0.97):
        here_nt = kind_nt & mask_nt
        assert torch.allclose(torch.where(here_nt, weight_nt, 0.0).sum(dim=1), here_nt.sum(dim=1).double())
        limit = 60 if bool((p_nt[kind_nt] < 0.2).all()) else 5
        assert torch.equal(((weight_nt > 0) & here_nt).sum(dim=1), here_nt.sum(dim=1).clamp(max=limit))
    assert not bool(weight_nt[~mask_nt].any())
    poisoned = torch.where(mask_nt, p_nt.log(), torch.nan)
    assert torch.equal(choose_tokens(poisoned, mask_nt, most=5, seed=3), weight_nt)
    assert torch.equal(choose_tokens(p_nt.log(), mask_nt, most=60), mask_nt.double())
    assert not torch.equal(choose_tokens(p_nt.log(), mask_nt, most=5, seed=4), weight_nt)


def test_nothing_is_sampled_after_the_first_block(tabular):
    (model, tokenizer), sampler, seen = tabular, roller(tabular), []
    blocks = sampler.blocks(ROWS, samples=4, seed=3)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with model.register_forward_hook(lambda *_: seen.append(1)):
        assert sampler.rewards_from(ROWS, [(0, (tokenizer.get_vocab()["<answer>"],))], rerolls=50, seed=0).shape == (1, 50)
    assert len(seen) == 3  # digit, closing tag, opening tag of the next block
    assert int(blocks.mask_nt.sum(dim=1).max()) == 6
    # Where both blocks are made of the same tags, no tag says that the first is over.
    twice = roller(tabular, Layout({"first": ["answer"], "second": ["answer"]}))
    with twice._ending_at_later_blocks():
        assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_log_probabilities_are_those_of_the_temperature(tabular):
    warm = roller(tabular, temperature=2.0)
    blocks = warm.blocks(ROWS, samples=6, seed=4)
    logp_nt = warm.logp(blocks)
    at = {tokens: float(logp_nt[n, t].exp()) for n, t, _, tokens in prefixes(tabular, blocks)}
    root = {token: math.sqrt(p) for token, p in TABLE["="].items()}
    assert at[()] in [pytest.approx(p / sum(root.values()), abs=1e-5) for p in root.values()]


@pytest.mark.long
def test_a_critic_learns_the_values_of_the_states_it_can_tell_apart(tabular, monkeypatch):
    monkeypatch.setattr(rerolls, "CRITIC_BATCH", 64)
    monkeypatch.setattr(rerolls, "LEARNING_RATE", 0.03)
    before = {name: weight.clone() for name, weight in tabular[0].state_dict().items()}
    sampler = roller(tabular)
    rows = ROWS.select([0, 1])  # one answer, so that the last token says all but how a closed answer reads
    blocks = sampler.blocks(rows, samples=20, seed=5)
    looks = {step: values(critic, blocks) for step, critic in fitted_critics(sampler, rows, steps=(1, 40), seed=6)}
    assert list(looks) == [1, 40]
    errors = []
    for n, t, answer, tokens in prefixes(tabular, blocks):
        closed = tokens[-1:] == ("</answer>",)
        expected = 0.6 if closed else worth(answer, tokens)  # the share of right ones among closed answers
        errors.append([abs(float(looks[step][n, t]) - expected) for step in (1, 40)])
    first, last = map(max, zip(*errors, strict=True))
    assert last < 0.15
    assert first > 0.25
    assert all(torch.equal(weight, before[name]) for name, weight in tabular[0].state_dict().items())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_from_a_folder_to_tables(model):
    recipe = load(None, {"start_steps": 1, "eval_prompts": 8})
    rolled = rolled_tokens(model, recipe, prompts=6, samples=3, rerolls=6, steps=(1, 2), seed=1)
    measured = token_fidelity(*rolled, seed=1)
    assert measured.critics == ("1 steps", "2 steps", "MC 4", "MC 6")
    assert (len(measured.prompt_n), len(measured.prompt_n.unique())) == (18, 6)
    console = Console(width=80, record=True, file=io.StringIO())
    show_tokens(measured, console=console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for kind in ("all", "decision"):
        table = text.split(f"{kind} tokens: correlation with Monte Carlo (its noise allows ")[1]
        row = next(line for line in table.splitlines() if "SAE start 0.5, 0 " in line)
        values = [measured.interval(c, "SAE start 0.5, 0", "correlation", kind=kind).value for c in measured.critics]
        assert row.split()[-4:] == [f"{value:.3f}" for value in values]
    leads = (("decision", "the best GAE"), ("all", "GRPO c - group mean"))
    of_kinds = (f"{kind} tokens: lead of SAE over {other} in correlation with Monte Carlo" for kind, other in leads)
    for words in ("18 completions of 6 prompts", "GRPO c - V(prompt)", *of_kinds):
        assert words in " ".join(text.split())
    with pytest.raises(DataError, match=r"at least 2 re-rolls .* asked for 1"):
        rolled_tokens(model, recipe, rerolls=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_run_of_one_block_with_its_own_critic(tabular, model, tmp_path, capsys):
    fields = {
        "layout": {"solution": ["reasoning", "answer"]}, "objectives": [{"reward": "correct", "pays": ["solution"]}],
        "start_steps": 1, "eval_prompts": 8,
    }  # fmt: skip
    run = model.parent
    (run / "recipe.yaml").write_text(yaml.safe_dump(fields))
    sizes = {"tokens": True, "token_prompts": 6, "rerolls": 6, "output": tmp_path / "out"}
    with pytest.raises(DataError, match="has no critic: there is no folder 'critic'"):
        fidelity(run, critics="own", **sizes)
    critic = ValueModel.of_policy(tabular[0], ("correct",), CriticConfig())
    torch.nn.init.normal_(critic.model.score.weight)
    critic.save(run / "critic", tabular[1])
    for reference, words in (
        ("token", "change that this token makes to the Monte Carlo value."),
        ("segment", "The comparison favours SAE, because SAE gives credit by segments, too."),
    ):
        fidelity(run, critics="own", reference=reference, **sizes)
        output = " ".join(capsys.readouterr().out.split())
        assert words in output
        assert "The layout's last block has no confidence" in output
        written = json.loads((tmp_path / "out" / "fidelity.json").read_text())
        assert written["counts"] == {"completions": 24, "prompts": 6}
        assert {row["critic"] for row in written["tokens"]} == {"own"}
        flags = ("--tokens", "--token-prompts 6", "--critics own", f"--reference {reference}", "--rerolls 6")
        page = (tmp_path / "out" / "report.html").read_text()
        assert all(word in page for word in (*flags, "24 completions of 6 prompts.", "SAE end 0.9, 0.95"))
    with pytest.raises(RecipeError, match="There is no kind of critic 'mine'"):
        fidelity(run, critics="own,mine", **sizes)
    with pytest.raises(RecipeError, match="add --tokens"):
        fidelity(run, critics="own", output=tmp_path / "out")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_a_real_run(model, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 2) for b in (1, 2, 3, 4, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "trained"
    fields = {
        "task": "confidence", "model": str(model), "dataset": str(tmp_path / "rows.jsonl"), "prompt_column": "prompt",
        "instruction": None, "layout": {"solution": ["reasoning", "answer"]}, "method": "sae",
        "objectives": [{"reward": "correct", "pays": ["solution"]}], "critic": {"learning_rate": 0.1},
        "steps": 2, "prompts": 2, "group_size": 4, "save_every": 1, "max_completion_length": 32, "eval_samples": 1,
        "report": False, "learning_rate": 0.01, "warmup_steps": 0, "output": str(run),
    }  # fmt: skip
    train(load(None, fields))
    found = []
    for place in ("checkpoints/checkpoint-1", "checkpoints/checkpoint-2", ""):
        folder, run_recipe = run_or_model(run / place, None, {})
        trajectories, critics = rolled_tokens(folder, run_recipe, critics=["own"], prompts=2, samples=4, rerolls=4, seed=1)
        assert list(critics) == ["own"]
        found.append((critics["own"], trajectories.logp_nt))
    # The last checkpoint is the end of the run, policy and critic; the one before it is not.
    for first, second, end in zip(*found, strict=True):
        assert torch.equal(second, end)
        assert not torch.equal(first, end)
    assert token_fidelity(trajectories, critics, draws=5).count() > 8


def test_a_model_without_a_first_block(tabular):
    layout = Layout({"empty": ["never"], "rest": ["reasoning", "answer"]})
    with pytest.raises(DataError, match="None of 8 completions has the block 'empty'"):
        collect_tokens(roller(tabular, layout), ROWS, samples=2, rerolls=2)
