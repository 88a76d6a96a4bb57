"""A critic on real small transformers: it fits what can be known, reads nothing that is masked, and stops when it diverges."""

import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import pad
from transformers import AutoModelForTokenClassification

import critic_small as small
from helpers import NAN
from spanwise.errors import DivergedError, RecipeError, RewardError
from spanwise.losses import critic_error
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.critic import Critic, Sequences, ValueModel

TWO = ("correct", "brier")


def best(rows, streams):
    """Explained variance of a critic that knows all that can be known: nothing before the first token, all after it."""
    mask = streams.mask_snt[0]
    reward = streams.reward_snt[0].sum(dim=1, keepdim=True).expand_as(mask)
    ideal = reward.clone()
    ideal[:, 0] = 0.5
    return 1 - float((reward - ideal)[mask].var(correction=0) / reward[mask].var(correction=0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "precision"),
    [({"head": "hl_gauss", "value_range": (-0.2, 1.2), "learning_rate": 1e-2}, "no"), ({}, "bf16")],
    ids=["hl_gauss", "bfloat16"],
)
def test_a_critic_learns_what_can_be_known(options, precision):
    critic = small.critic(CriticConfig(**{"learning_rate": 3e-3, **options}), precision=precision)
    for seed in range(40):  # its values of a batch are from before the fit to it
        result = small.learn(critic, *small.question(seed=seed))
    small.accelerator()  # other tests of this process compute in float32
    rows, streams = small.question(seed=39)
    assert {result.value_nts.dtype, *(value.dtype for value in critic.model.parameters())} == {torch.float32}
    assert -0.12 < result.metrics["critic/explained_variance"] - best(rows, streams) < 0.02
    value = result.value_nts[..., 0]
    assert abs(float(value[:, 0].mean()) - 0.5) < 0.15  # before the first token nothing is known
    after = value[:, 2:4]  # the tokens behind the tool's, which all completions have
    good = rows.ids_nl[:, 3] == small.GOOD
    assert float(after[good].mean()) > 0.85
    assert float(after[~good].mean()) < 0.15
    assert critic.updates == 40


def test_any_token_classifier_that_reads_forwards_is_a_critic(tmp_path):
    """Saved by transformers, with labels of its own that are not our values."""
    torch.manual_seed(0)
    settings = small.TRUNKS["gpt2"]()  # tests/engines/trl/test_trl_critic.py loads a Llama
    settings.num_labels = 5
    AutoModelForTokenClassification.from_config(settings).save_pretrained(tmp_path)
    config = CriticConfig(model=str(tmp_path), learning_rate=3e-3)
    critic = Critic(ValueModel.load(str(tmp_path), ["return"], config), config, small.accelerator(), micro_batch=64)
    first = small.learn(critic, *small.question(seed=0))
    assert not first.value_nts.any()
    for seed in range(1, 25):
        last = small.learn(critic, *small.question(seed=seed))
    assert last.metrics["critic/explained_variance"] > first.metrics["critic/explained_variance"] + 0.4


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.filterwarnings("ignore")  # peft about itself
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "adapters"])
def test_the_trunk_is_the_policys_in_float32_with_adapters_merged_and_the_policy_stays_what_it_was(kind):
    policy = small.policy().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    policy = get_peft_model(policy, LORA) if kind == "adapters" else policy
    before = small.state(policy)
    critic = small.critic(CriticConfig(learning_rate=1e-6), model=policy)
    trunk, start = critic.model.model.base_model, small.state(critic.model.model.base_model)
    assert {value.dtype for value in critic.model.parameters()} == {torch.float32}
    assert all(value.requires_grad for value in critic.model.parameters())
    small.learn(critic, *small.question())
    small.learn(critic, *small.question())
    assert not small.equal(small.state(trunk), start)  # a step of 1e-6 is not lost in rounding
    assert small.equal(small.state(policy), before)
    merged = policy.merge_and_unload() if kind == "adapters" else policy
    assert small.equal(start, small.state(merged.base_model.float()))
    assert kind != "adapters" or not small.equal(start, small.state(small.policy().base_model))


@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 3, "value_clip": 0.05}, {"gae_lambda_value": 0.7, "weight_decay": 0.1, "max_grad_norm": 0.1}],
    ids=["plain", "clipped", "lambda"],
)
@pytest.mark.parametrize("names", [("return",), TWO], ids=["one", "two"])
def test_the_fit_is_the_one_written_out(options, names):
    config = CriticConfig(learning_rate=1e-2, **options)
    rows, streams = small.question(completions=12, names=names)
    critic, plain = (small.critic(config, names=names, micro_batch=5) for _ in range(2))
    for either in (critic, plain):  # a head of zeros says one value everywhere, which would hide much
        torch.manual_seed(3)
        for parameter in small.head(either):
            torch.nn.init.normal_(parameter, std=0.2)
    result = small.learn(critic, rows, streams)
    first = small.slow_fit(plain.model.model, rows, streams, config)
    mask = streams.mask_snt.permute(1, 2, 0)
    torch.testing.assert_close(result.value_nts[mask], first[mask], atol=1e-5, rtol=0)
    for s, name in enumerate(names):  # the metrics of a batch are of the values before the fit
        targets = small.slow_targets(first[..., s], streams, s, config.gae_lambda_value)
        want, prefix = critic_error(first[..., s], targets, streams.mask_snt[s]), f"{name}/" if names == TWO else ""
        assert {key: result.metrics[f"critic/{prefix}{key}"] for key in want} == pytest.approx(want, abs=1e-4)
    torch.testing.assert_close(small.state(critic.model), small.state(plain.model), atol=3e-5, rtol=0)


def test_micro_batches_and_gradient_checkpointing_change_nothing():
    ends = []
    for micro_batch, checkpointing in ((64, False), (5, True)):
        config = CriticConfig(learning_rate=1e-3, epochs=2, head="hl_gauss", gradient_checkpointing=checkpointing)
        critic = small.critic(config, micro_batch=micro_batch)
        result = small.learn(critic, *small.question(completions=12))
        assert any(getattr(layer, "gradient_checkpointing", False) for layer in critic.model.modules()) == checkpointing
        ends.append((result.value_nts, small.state(critic.model)))
    (whole_nts, whole), (parts_nts, parts) = ends
    torch.testing.assert_close(parts_nts, whole_nts, atol=1e-6, rtol=0)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", small.TRUNKS)  # gpt2 counts positions from 0, the others from token to token
def test_padding_changes_nothing(kind):
    rows, streams = small.question(completions=8)
    narrow, wide = (small.critic(CriticConfig(learning_rate=1e-3), model=small.policy(kind)) for _ in range(2))
    ids, attention = pad(rows.ids_nl, (2, 2), value=small.PAD), pad(rows.attention_nl, (2, 2))
    padded = replace(streams, reward_snt=pad(streams.reward_snt, (0, 2)), mask_snt=pad(streams.mask_snt, (0, 2)))
    mask = streams.mask_snt[0]
    for _ in range(2):
        bare = small.learn(narrow, rows, streams)
        wider = small.learn(wide, Sequences(ids, attention, rows.width + 2), padded)
    torch.testing.assert_close(wider.value_nts[:, :-2][mask], bare.value_nts[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(small.state(wide.model), small.state(narrow.model), atol=1e-5, rtol=0)


def test_the_same_seed_gives_the_same_mini_batches():
    ends = []
    for seed in (0, 0, 1):
        critic = small.critic(CriticConfig(learning_rate=1e-2, epochs=2, mini_batches=3), seed=seed)
        small.learn(critic, *small.question(completions=9))
        assert critic.updates == 2 * 3
        ends.append(small.state(critic.model))
    assert small.equal(ends[0], ends[1])
    assert not small.equal(ends[0], ends[2])


def test_saying_values_changes_nothing_and_dropout_does_not_make_them_random():
    """Values from the pass of the only fit are those of the model without dropout."""
    critic = small.critic(CriticConfig(learning_rate=1e-6), model=small.policy("gpt2"))  # whose dropouts are .1
    torch.nn.init.normal_(small.head(critic)[0])
    before = small.state(critic.model)
    first, second = (small.learn(critic, *small.question(), fit=False) for _ in range(2))
    assert torch.equal(first.value_nts, second.value_nts)
    assert small.equal(small.state(critic.model), before)
    assert (critic.updates, critic.batches) == (0, 0)
    assert "critic/loss" not in first.metrics
    on_the_way = small.learn(critic, *small.question())
    torch.testing.assert_close(on_the_way.value_nts, first.value_nts, atol=1e-5, rtol=0)


class Poisoned(torch.nn.Module):
    """A token classifier that returns `number` where nothing may be read: at every place that is not before a trainable token."""

    def __init__(self, model, rows, mask, number):
        super().__init__()
        self.model, self.number = model, number
        self.base_model = model.base_model
        self.masks = dict(zip(map(tuple, rows.ids_nl.tolist()), mask, strict=True))

    def forward(self, input_ids, attention_mask, position_ids=None, use_cache=None):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)
        mask = torch.stack([self.masks[tuple(ids)] for ids in input_ids.tolist()])
        readable = torch.zeros_like(input_ids, dtype=torch.bool)
        readable[:, -mask.shape[1] - 1 : -1] = mask  # the value of a token stands one place before it
        out.logits = torch.where(readable[..., None], out.logits, self.number)
        return out


@pytest.mark.parametrize("number", [1e9, NAN])
@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 2, "value_clip": 0.1}, {"head": "hl_gauss"}, {"mini_batches": 2, "gae_lambda_value": 0.5}],
    ids=["scalar", "clipped", "hl_gauss", "lambda"],
)
def test_what_a_critic_says_where_nothing_is_read_changes_nothing(options, number):
    rows, streams = small.question(completions=10)
    clean, dirty = (small.critic(CriticConfig(learning_rate=1e-2, **options), micro_batch=4) for _ in range(2))
    inner = dirty.model.model
    mask = streams.mask_snt[0]
    dirty.model.model = Poisoned(inner, rows, mask, number)
    for _ in range(2):  # before a fit, and after one
        expected, actual = small.learn(clean, rows, streams), small.learn(dirty, rows, streams)
        assert torch.equal(expected.value_nts[mask], actual.value_nts[mask])
        assert torch.equal(expected.bootstrap_ns.nan_to_num(7.0), actual.bootstrap_ns.nan_to_num(7.0))
        for name in expected.metrics.keys() - {"critic/seconds"}:
            assert expected.metrics[name] == pytest.approx(actual.metrics[name], abs=0, nan_ok=True), name
    assert small.equal(small.state(clean.model.model), small.state(inner))


@pytest.mark.parametrize("truncated", ["terminal", "bootstrap", "mask"])
def test_completions_that_were_cut_off(truncated):
    rows, streams = small.question(completions=8)
    cut = torch.tensor([True, False] * 4)  # those with a reward of 1
    critic = small.critic(CriticConfig(learning_rate=1e-2, truncated=truncated))
    torch.nn.init.constant_(small.head(critic)[1], 0.75)
    result = small.learn(critic, rows, streams, truncated=cut)
    assert torch.equal(result.value_nts, torch.full((8, 6, 1), 0.75))
    tokens = streams.mask_snt[0].sum(dim=1).double()
    targets = tokens * cut * {"terminal": 1.0, "bootstrap": 1.75, "mask": 0.0}[truncated]
    counted = tokens[~cut] if truncated == "mask" else tokens
    assert result.metrics["critic/target_mean"] == pytest.approx(float(targets.sum() / counted.sum()))


def test_offloading_on_a_cpu_is_refused():
    with pytest.raises(RecipeError, match=r"critic\.offload"):
        small.critic(CriticConfig(offload=True))


def test_the_learning_rate_warms_up():
    critic = small.critic(CriticConfig(learning_rate=1e-3, warmup_steps=4))
    rates = []
    for _ in range(6):
        rates.append(critic.optimizer.param_groups[0]["lr"])
        small.learn(critic, *small.question(completions=4))
    assert rates == pytest.approx([0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("number", [NAN, 1e30])
@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"head": "hl_gauss"}], ids=["once", "twice", "hl_gauss"])
def test_a_diverged_critic_is_stopped_before_its_weights_change(options, number):
    critic = small.critic(CriticConfig(learning_rate=1e-3, **options))
    small.learn(critic, *small.question())
    small.head(critic)[0].data[0, 0] = number
    weights, moments = small.state(critic.model), small.optimizer_state(critic.optimizer)
    rates = critic.schedule.state_dict()
    with pytest.raises(DivergedError, match=r"critic\.learning_rate \(0\.001\)"):
        small.learn(critic, *small.question())
    assert small.equal(small.state(critic.model), weights)
    assert small.equal(small.optimizer_state(critic.optimizer), moments)
    assert critic.schedule.state_dict() == rates
    assert all(value.grad is None for value in critic.model.parameters())


@pytest.mark.parametrize("options", [{}, {"mini_batches": 3, "epochs": 2}])
def test_the_completion_whose_values_are_lost_is_named(options):
    """One token's embedding is NaN, and one completion holds that token."""
    rows, streams = small.question()
    critic = small.critic(CriticConfig(learning_rate=1e-3, **options))
    ids, strange = rows.ids_nl.clone(), 9  # which no question has
    ids[17, int(rows.attention_nl[17].nonzero()[-1])] = strange
    critic.model.model.get_input_embeddings().weight.data[strange] = NAN
    sentences = r"\d+ of the critic's values are not finite. The first value that is not finite is in completion 17"
    for fit in (False, True):
        with pytest.raises(DivergedError, match=sentences):
            small.learn(critic, replace(rows, ids_nl=ids), streams, fit=fit)


def test_a_target_outside_the_range_of_the_bins_is_named():
    rows, streams = small.question(completions=4)
    critic = small.critic(CriticConfig(head="hl_gauss", learning_rate=1e-3))
    before = small.state(critic.model)
    with pytest.raises(RewardError, match=r"value_range \(0, 1\)"):
        small.learn(critic, rows, replace(streams, reward_snt=3 * streams.reward_snt))
    assert small.equal(small.state(critic.model), before)


def test_a_target_of_wrong_values_outside_the_range_is_cut_to_it():
    """1 at the first token and -1 at the last: returns are 0 and -1, but a value of 1/2 after the first makes its target 1.5."""
    rows, streams = small.question(completions=4)
    reward_nt, mask_nt = torch.zeros_like(streams.reward_snt[0]), streams.mask_snt[0]
    reward_nt[:, 0] = 1.0
    for n in range(4):
        reward_nt[n, mask_nt[n].nonzero()[-1]] = -1.0
    config = CriticConfig(head="hl_gauss", bins=2, value_range=(-1.0, 1.0), gae_lambda_value=0.0, learning_rate=1e-3)
    critic = small.critic(config)
    small.head(critic)[1].data = torch.tensor([0.0, 40.0])  # all probability is in the bin around 1/2
    tokens = int(mask_nt.sum())
    result = small.learn(critic, rows, replace(streams, reward_snt=reward_nt[None]))
    assert result.metrics["critic/target_mean"] == pytest.approx((4 * (1 - 1) + (tokens - 8) * 0.5) / tokens)


def test_a_batch_in_which_nothing_trains_changes_nothing():
    rows, streams = small.question(completions=4)
    critic = small.critic(CriticConfig(learning_rate=1e-2))
    small.learn(critic, rows, streams)
    before = small.state(critic.model)
    result = small.learn(critic, rows, replace(streams, mask_snt=torch.zeros_like(streams.mask_snt)))
    assert result.metrics["critic/loss"] == 0
    assert math.isnan(result.metrics["critic/explained_variance"])
    torch.testing.assert_close(small.state(critic.model), before, atol=2e-2, rtol=0)  # AdamW's momentum goes on
