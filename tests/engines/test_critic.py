"""A critic on real small transformers: it fits what can be known, reads nothing that is masked, and stops when it diverges."""

import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForTokenClassification

from critic_small import (
    GOOD,
    PAD,
    TRUNKS,
    accelerator,
    critic,
    equal,
    head,
    learn,
    policy,
    question,
    slow_fit,
    slow_targets,
    state,
)
from helpers import NAN
from spanwise.errors import DivergedError, RecipeError, RewardError
from spanwise.losses import critic_error
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.critic import Critic, Sequences, ValueModel

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
TWO = ("correct", "brier")


def best(rows, streams):
    """Explained variance of a critic that knows all that can be known: nothing before the first token, all after it."""
    mask = streams.mask_snt[0]
    reward = streams.reward_snt[0].sum(dim=1, keepdim=True).expand_as(mask)
    known = reward.clone()
    known[:, 0] = 0.5
    return 1 - float((reward - known)[mask].var(correction=0) / reward[mask].var(correction=0))


# ------------------------------------------------------------------------------------------------------------- it fits


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "no"),
        ({"head": "hl_gauss", "value_range": (-0.2, 1.2), "learning_rate": 1e-2}, "no"),
        ({"epochs": 2, "mini_batches": 2, "value_clip": 0.2}, "no"),
        ({"gae_lambda_value": 0.95}, "no"),
        ({}, "bf16"),
    ],
    ids=["scalar", "hl_gauss", "clipped", "lambda", "bfloat16"],
)
def test_a_critic_learns_what_can_be_known(options, precision):
    found = critic(CriticConfig(**{"learning_rate": 3e-3, **options}), precision=precision)
    for seed in range(40):  # what it says of a batch is before it is fitted to it
        said = learn(found, *question(seed=seed))
    accelerator()  # other tests of this process compute in float32
    rows, streams = question(seed=39)
    assert {said.value_nts.dtype, *(value.dtype for value in found.model.parameters())} == {torch.float32}
    assert said.metrics["critic/explained_variance"] > best(rows, streams) - 0.12
    assert said.metrics["critic/explained_variance"] < best(rows, streams) + 0.02
    value = said.value_nts[..., 0]
    assert abs(float(value[:, 0].mean()) - 0.5) < 0.15  # before the first token nothing is known
    after = value[:, 2:4]  # the tokens behind the tool's, which all completions have
    good = rows.ids_nl[:, 3] == GOOD
    assert float(after[good].mean()) > 0.85
    assert float(after[~good].mean()) < 0.15
    assert found.updates == 40 * found.config.epochs * found.config.mini_batches


@pytest.mark.parametrize("kind", TRUNKS)
def test_any_token_classifier_that_reads_forwards_is_a_critic(kind, tmp_path):
    """Saved by transformers, with labels of its own that are not our values."""
    torch.manual_seed(0)
    settings = TRUNKS[kind]()
    settings.num_labels = 5
    AutoModelForTokenClassification.from_config(settings).save_pretrained(tmp_path)
    config = CriticConfig(model=str(tmp_path), learning_rate=3e-3)
    found = Critic(ValueModel.load(str(tmp_path), ["return"], config), config, accelerator(), micro_batch=16)
    first = learn(found, *question(seed=0))
    assert not first.value_nts.any()
    for seed in range(1, 25):
        last = learn(found, *question(seed=seed))
    assert last.metrics["critic/explained_variance"] > first.metrics["critic/explained_variance"] + 0.4


def test_the_trunk_is_the_policys_and_the_policy_stays_what_it_was():
    one = policy()
    before = state(one)
    found = critic(CriticConfig(learning_rate=1e-2), model=one)
    assert equal(state(found.model.model.base_model), state(one.base_model))
    learn(found, *question())
    learn(found, *question())
    assert equal(state(one), before)
    assert not equal(state(found.model.model.base_model), state(one.base_model))


@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 3, "value_clip": 0.05}, {"gae_lambda_value": 0.7, "weight_decay": 0.1, "max_grad_norm": 0.1}],
    ids=["plain", "clipped", "lambda"],
)
@pytest.mark.parametrize("names", [("return",), TWO], ids=["one", "two"])
def test_the_fit_is_the_one_written_out(options, names):
    config = CriticConfig(learning_rate=1e-2, **options)
    rows, streams = question(completions=12, names=names)
    found, plain = (critic(config, names=names, micro_batch=5) for _ in range(2))
    for one in (found, plain):  # a head of zeros says one value everywhere, which would hide much
        torch.manual_seed(3)
        for parameter in head(one):
            torch.nn.init.normal_(parameter, std=0.2)
    said = learn(found, rows, streams)
    first = slow_fit(plain.model.model, rows, streams, config)
    mask = streams.mask_snt.permute(1, 2, 0)
    torch.testing.assert_close(said.value_nts[mask], first[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(state(found.model), state(plain.model), atol=3e-5, rtol=0)


def test_what_is_said_of_a_batch_is_of_the_values_before_the_fit():
    config = CriticConfig(learning_rate=1e-2, gae_lambda_value=0.5, epochs=2)
    rows, streams = question(completions=8)
    found = critic(config)
    learn(found, rows, streams)
    said = learn(found, rows, streams)
    value_nt = said.value_nts[..., 0]
    want = critic_error(value_nt, slow_targets(value_nt, streams, 0, 0.5), streams.mask_snt[0])
    assert {name: said.metrics[f"critic/{name}"] for name in want} == pytest.approx(want, abs=1e-5)


def test_two_streams_have_names_of_their_own():
    said = learn(critic(CriticConfig(), names=TWO), *question(names=TWO))
    assert said.value_nts.shape == (64, 6, 2)
    assert said.metrics["critic/correct/target_mean"] == 2 * said.metrics["critic/brier/target_mean"]
    assert "critic/explained_variance" not in said.metrics


# ------------------------------------------------------------------------------------------- how a batch is cut changes nothing


@pytest.mark.parametrize("options", [{}, {"head": "hl_gauss"}], ids=["scalar", "hl_gauss"])
def test_micro_batches_change_nothing(options):
    ends = []
    for micro_batch in (1, 5, 64):
        found = critic(CriticConfig(learning_rate=1e-3, epochs=2, **options), micro_batch=micro_batch)
        said = learn(found, *question(completions=12))
        ends.append((said.value_nts, state(found.model)))
    for value_nts, weights in ends[1:]:
        torch.testing.assert_close(value_nts, ends[0][0], atol=1e-6, rtol=0)
        torch.testing.assert_close(weights, ends[0][1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", TRUNKS)  # gpt2 counts positions from 0, the others from token to token
def test_padding_changes_nothing(kind):
    rows, streams = question(completions=8)
    found, wide = (critic(CriticConfig(learning_rate=1e-3), model=policy(kind)) for _ in range(2))
    pad = torch.full((8, 2), PAD)
    ids = torch.cat([pad, rows.ids_nl, pad], dim=1)
    attention = torch.cat([0 * pad, rows.attention_nl, 0 * pad], dim=1)
    empty = torch.zeros(1, 8, 2)
    padded = replace(
        streams,
        reward_snt=torch.cat([streams.reward_snt, empty], dim=2),
        mask_snt=torch.cat([streams.mask_snt, empty.bool()], dim=2),
    )
    for _ in range(2):
        one = learn(found, rows, streams)
        two = learn(wide, Sequences(ids, attention, rows.width + 2), padded)
    torch.testing.assert_close(two.value_nts[:, :-2][padded.mask_snt[0, :, :-2]], one.value_nts[streams.mask_snt[0]],
                               atol=1e-5, rtol=0)  # fmt: skip
    torch.testing.assert_close(state(wide.model), state(found.model), atol=1e-5, rtol=0)


def test_the_same_seed_gives_the_same_mini_batches():
    ends = []
    for seed in (0, 0, 1):
        found = critic(CriticConfig(learning_rate=1e-2, epochs=2, mini_batches=3), seed=seed)
        learn(found, *question(completions=9))
        learn(found, *question(completions=2))  # of which there are no three
        assert found.updates == 2 * 3 + 2 * 2
        ends.append(state(found.model))
    assert equal(ends[0], ends[1])
    assert not equal(ends[0], ends[2])


def test_saying_values_changes_nothing():
    found = critic(CriticConfig(learning_rate=1e-2))
    learn(found, *question())
    before, updates = state(found.model), found.updates
    one = learn(found, *question(), fit=False)
    two = learn(found, *question(), fit=False)
    assert torch.equal(one.value_nts, two.value_nts)
    assert equal(state(found.model), before)
    assert (found.updates, found.batches) == (updates, 1)
    assert "critic/loss" not in one.metrics


def test_dropout_does_not_make_values_random():
    """Read on the way of the only fit of a batch, values are those of the model without dropout."""
    model = policy("gpt2")  # whose dropouts are .1
    found = critic(CriticConfig(learning_rate=1e-6), model=model)
    torch.nn.init.normal_(head(found)[0])
    calm = learn(found, *question(), fit=False).value_nts
    on_the_way = learn(found, *question()).value_nts
    torch.testing.assert_close(on_the_way, calm, atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------------------------------- poison


class Poisoned(torch.nn.Module):
    """A token classifier that says `number` wherever nothing may be read: at every place that is before no trainable token."""

    def __init__(self, model, rows, mask, number):
        super().__init__()
        self.model, self.number = model, number
        self.base_model = model.base_model
        self.masks = dict(zip(map(tuple, rows.ids_nl.tolist()), mask, strict=True))

    def forward(self, input_ids, attention_mask, position_ids=None, use_cache=None):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)
        mask = torch.stack([self.masks[tuple(ids)] for ids in input_ids.tolist()])
        read = torch.zeros_like(input_ids, dtype=torch.bool)
        read[:, -mask.shape[1] - 1 : -1] = mask  # the place before a token says its value
        out.logits = torch.where(read[..., None], out.logits, self.number)
        return out


@pytest.mark.parametrize("number", [1e9, NAN, math.inf])
@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 2, "value_clip": 0.1}, {"head": "hl_gauss"}, {"mini_batches": 2, "gae_lambda_value": 0.5}],
    ids=["scalar", "clipped", "hl_gauss", "lambda"],
)
def test_what_a_critic_says_where_nothing_is_read_changes_nothing(options, number):
    rows, streams = question(completions=10)
    clean, dirty = (critic(CriticConfig(learning_rate=1e-2, **options), micro_batch=4) for _ in range(2))
    own = dirty.model.model
    dirty.model.model = Poisoned(own, rows, streams.mask_snt[0], number)
    for _ in range(3):
        one, two = learn(clean, rows, streams), learn(dirty, rows, streams)
        mask = streams.mask_snt[0]
        assert torch.equal(one.value_nts[mask], two.value_nts[mask])
        assert torch.equal(one.bootstrap_ns.nan_to_num(7.0), two.bootstrap_ns.nan_to_num(7.0))
        for name in one.metrics.keys() - {"critic/seconds"}:
            assert one.metrics[name] == pytest.approx(two.metrics[name], abs=0, nan_ok=True), name
    assert equal(state(clean.model.model), state(own))


# ---------------------------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("truncated", ["terminal", "bootstrap", "mask"])
def test_completions_that_were_cut_off(truncated):
    rows, streams = question(completions=8)
    cut = torch.tensor([True, False] * 4)  # those with a reward of 1
    found = critic(CriticConfig(learning_rate=1e-2, truncated=truncated))
    torch.nn.init.constant_(head(found)[1], 0.75)
    said = learn(found, rows, streams, truncated=cut)
    assert torch.equal(said.value_nts, torch.full((8, 6, 1), 0.75))
    tokens = streams.mask_snt[0].sum(dim=1).double()
    targets = tokens * cut * {"terminal": 1.0, "bootstrap": 1.75, "mask": 0.0}[truncated]
    counted = tokens[~cut] if truncated == "mask" else tokens
    assert said.metrics["critic/target_mean"] == pytest.approx(float(targets.sum() / counted.sum()))


# ------------------------------------------------------------------------------------- precision, memory, adapters


def test_a_policy_in_bfloat16_gets_a_critic_in_float32():
    one = policy().to(torch.bfloat16)
    found = critic(CriticConfig(learning_rate=1e-6), model=one)
    assert {value.dtype for value in found.model.parameters()} == {torch.float32}
    learn(found, *question())
    ours, theirs = (model.base_model.embed_tokens.weight[GOOD].float() for model in (found.model.model, one))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # a step of 1e-6 is not lost in rounding


def test_gradient_checkpointing_gives_the_same_weights():
    ends = []
    for choice in (False, True):
        found = critic(CriticConfig(learning_rate=1e-3, gradient_checkpointing=choice))
        for seed in range(3):
            learn(found, *question(seed=seed))
        assert any(getattr(layer, "gradient_checkpointing", False) for layer in found.model.modules()) == choice
        ends.append(state(found.model))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore")  # peft about itself
def test_the_trunk_of_a_policy_with_adapters_has_them_merged():
    adapted = get_peft_model(policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    before = state(adapted)
    found = critic(CriticConfig(learning_rate=1e-2), model=adapted)
    assert equal(state(adapted), before)
    merged = state(adapted.merge_and_unload().base_model)
    assert equal(state(found.model.model.base_model), merged)
    assert not equal(merged, state(policy().base_model))
    assert all(value.requires_grad for value in found.model.parameters())
    learn(found, *question())


def test_offloading_on_a_cpu_is_refused():
    with pytest.raises(RecipeError, match=r"critic\.offload"):
        critic(CriticConfig(offload=True))


def test_the_learning_rate_warms_up():
    found = critic(CriticConfig(learning_rate=1e-3, warmup_steps=4))
    rates = []
    for seed in range(6):
        rates.append(found.optimizer.param_groups[0]["lr"])
        learn(found, *question(seed=seed))
    assert rates == pytest.approx([0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


# -------------------------------------------------------------------------------------------------------------- diverged


@pytest.mark.parametrize("number", [NAN, math.inf, 1e30])
@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"head": "hl_gauss"}], ids=["once", "twice", "hl_gauss"])
def test_a_diverged_critic_is_stopped_before_its_weights_change(options, number):
    found = critic(CriticConfig(learning_rate=1e-3, **options))
    learn(found, *question())
    head(found)[0].data[0, 0] = number
    weights, held = state(found.model), found.optimizer.state_dict()["state"]
    held = {key: {name: x.clone() for name, x in value.items()} for key, value in held.items()}
    rates = found.schedule.state_dict()
    with pytest.raises(DivergedError, match=r"critic\.learning_rate \(0\.001\)"):
        learn(found, *question())
    assert equal(state(found.model), weights)
    after = found.optimizer.state_dict()["state"]
    assert all(torch.equal(after[key][name], x) for key, value in held.items() for name, x in value.items())
    assert found.schedule.state_dict() == rates
    assert all(value.grad is None for value in found.model.parameters())


@pytest.mark.parametrize("options", [{}, {"mini_batches": 3, "epochs": 2}])
def test_the_completion_whose_values_are_lost_is_named(options):
    """One token's embedding is NaN, and one completion holds that token."""
    rows, streams, *rest = question()
    found = critic(CriticConfig(learning_rate=1e-3, **options))
    strange = 9
    ids = rows.ids_nl.clone()
    ids[ids == strange] = PAD + 2
    ids[17, int(rows.attention_nl[17].nonzero()[-1])] = strange
    found.model.model.get_input_embeddings().weight.data[strange] = NAN
    for fit in (False, True):
        with pytest.raises(DivergedError, match=r"\d+ of its values are not finite, of completion 17 first"):
            learn(found, replace(rows, ids_nl=ids), streams, *rest, fit=fit)


def test_a_learning_rate_that_is_far_too_high_ends_in_one_error():
    found = critic(CriticConfig(learning_rate=1e20, max_grad_norm=1e30))
    batches = (question(seed=seed) for seed in range(6))
    with pytest.raises(DivergedError, match=r"1e\+20"):
        _ = [learn(found, *batch) for batch in batches]


def test_a_target_outside_the_range_of_the_bins_is_named():
    rows, streams = question(completions=4)
    found = critic(CriticConfig(head="hl_gauss", learning_rate=1e-3))
    before = state(found.model)
    with pytest.raises(RewardError, match=r"value_range \(0, 1\)"):
        learn(found, rows, replace(streams, reward_snt=3 * streams.reward_snt))
    assert equal(state(found.model), before)


def test_a_batch_in_which_nothing_trains_changes_nothing():
    rows, streams = question(completions=4)
    found = critic(CriticConfig(learning_rate=1e-2))
    learn(found, rows, streams)
    before = state(found.model)
    said = learn(found, rows, replace(streams, mask_snt=torch.zeros_like(streams.mask_snt)))
    assert said.metrics["critic/loss"] == 0
    assert math.isnan(said.metrics["critic/explained_variance"])
    difference = max(float((state(found.model)[name] - value).abs().max()) for name, value in before.items())
    assert difference < 2e-2  # AdamW's momentum goes on
