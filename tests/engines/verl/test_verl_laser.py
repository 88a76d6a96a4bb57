"""LaSeR under verl: a reserved token in real rows, its score in the credit, and the gradient of verl's own `ppo_loss`."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from queue_small import advantages_of, fetch, filled, put, trainer_of
from tensordict import TensorDict
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl_small import RECIPE, actor_config, config_of, manager_of, outputs_of, worker_of

from spanwise import Batch, advantages, credit_batch, read
from spanwise.engines.verl.settings import prepare
from spanwise.errors import RecipeError
from spanwise.modes.laser.logps import end_logp

LASER = {
    "token": "<|z|>", "reference": -7.0, "beta": 0.25, "alpha": 0.3, "mix": 0.4, "threshold": 0.0, "self_rewarding_warmup": 0,
}  # fmt: skip
TEXTS = [
    ["<answer>4</answer><confidence>0.9</confidence>", "<answer>5</answer>", "<answer>4</answer>"],
    ["<confidence>0.9</confidence>", "<answer>4</answer>"],
]
CUT = 2  # of the first prompt: no end
TEMPERATURE = 0.8


def configured(folder, *overrides, **laser):
    """verl's configuration with a model that has a reserved token, and the network itself."""
    config_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|z|>"], "pad_token": "<|pad|>"})
    tokenizer.save_pretrained(folder / "model")
    shape = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape)
    with torch.no_grad():  # so that scores differ
        model.lm_head.weight.mul_(8)
    shape.save_pretrained(folder / "model")
    recipe = f"{RECIPE}laser: {json.dumps({**LASER, **laser})}\n"
    config = config_of(folder, f"actor_rollout_ref.rollout.temperature={TEMPERATURE}", *overrides, recipe=recipe)
    return config, model, tokenizer


def log_probs(model, row):
    """Log-probabilities at the rollout's temperature, from the second token on, and a 0: as verl's engines lay them out."""
    logits = model(input_ids=torch.tensor([row])).logits[0, :-1] / TEMPERATURE
    logps = logits.log_softmax(dim=-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    return torch.cat([logps, torch.zeros(1)])


@pytest.fixture
def credited(tmp_path, queue):
    """A batch in a real queue: sampled, scored and stored by verl's worker; old log-probabilities; advantages."""
    config, model, tokenizer = configured(tmp_path)
    trainer = trainer_of(config)
    manager = manager_of(config)
    prompts = [[[[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]] for text in texts] for texts in TEXTS]
    prompts[0][CUT][0].pop()
    batch = filled(manager, prompts)
    names = ("prompts", "responses", "response_mask", "input_ids", "position_ids")
    rows = {name: [row.tolist() for row in field] for name, field in zip(names, fetch(batch, *names), strict=True)}
    with torch.no_grad():
        pairs = zip(rows["input_ids"], rows["responses"], strict=True)
        old = [log_probs(model, row)[-len(ids) - 1 : -1] for row, ids in pairs]
    put(batch, old_log_probs=old)
    metrics = {}
    trainer._compute_advantage(batch, metrics)
    parts = {"config": config, "model": model, "trainer": trainer, "manager": manager}
    return SimpleNamespace(**parts, batch=batch, rows=rows, old=old, metrics=metrics)


def by_hand(case):
    """The same completions without the reserved token, and their scores from a pass of their own."""
    token, end = case.trainer.spanwise.parts["laser"].token, case.manager.tokenizer.eos_token_id
    ids = [row[:-1] if row[-1] == token else row for row in case.rows["responses"]]
    ended_n = torch.tensor([row[-1] == end for row in ids])
    whole = [[*prompt, *row] for prompt, row in zip(case.rows["prompts"], ids, strict=True) if row[-1] == end]
    logp_n = torch.full((len(ids),), torch.nan)
    logp_n[ended_n] = end_logp(case.model, whole, token, pad=0, temperature=TEMPERATURE)
    score_n = LASER["beta"] * (logp_n - LASER["reference"])
    batch = Batch.jagged(ids, [0, 0, 0, 1, 1], columns={"answer": ["4"] * 5})
    return ids, score_n, batch


def test_what_ended_has_one_more_token_and_the_advantages_are_those_of_the_pipeline(credited):
    token, end = credited.trainer.spanwise.parts["laser"].token, credited.manager.tokenizer.eos_token_id
    for n, (ids, mask) in enumerate(zip(credited.rows["responses"], credited.rows["response_mask"], strict=True)):
        if n == CUT:
            assert token not in ids
            assert all(mask)
        else:
            assert ids[-2:] == [end, token]
            assert mask == [1] * (len(ids) - 1) + [0]
        whole = credited.rows["prompts"][n] + ids
        assert credited.rows["input_ids"][n] == whole
        assert credited.rows["position_ids"][n] == list(range(len(whole)))
    ids, score_n, batch = by_hand(credited)
    assert score_n.isnan().tolist() == [False, False, True, False, False]
    scheme, reading = credited.manager.scheme, read(batch, credited.manager.scheme, credited.manager.vocabulary)
    batches = (replace(batch, score_n=scores) for scores in (None, score_n))
    plain_nt, mixed_nt = (advantages(credit_batch(reading, one, scheme), reading.spans, scheme) for one in batches)
    assert not torch.allclose(plain_nt, mixed_nt, atol=1e-3)
    for row, expected_t, reply in zip(advantages_of(credited.batch), mixed_nt, ids, strict=True):
        torch.testing.assert_close(row[: len(reply)], expected_t[: len(reply)], atol=1e-6, rtol=1e-5)
    assert 0 <= credited.metrics["laser/accuracy"] <= 1
    assert credited.metrics["laser/loss"] > 0
    assert credited.config.actor_rollout_ref.actor.policy_loss.loss_mode in POLICY_LOSS_REGISTRY


def test_validation_is_left_alone(tmp_path):
    config, _, tokenizer = configured(tmp_path)
    worker = worker_of(SimpleNamespace(config=config))
    outputs = {}
    for validate in (True, False):
        (output,) = outputs_of(tokenizer, [[5, tokenizer.eos_token_id]])
        output.response_logprobs = [-0.5, -0.25]
        asyncio.run(worker._compute_teacher_logprobs(output, prompt_ids=[1], response_ids=[5], validate=validate))
        outputs[validate] = output
    assert outputs[True].response_mask == [1, 1]
    assert outputs[False].response_ids == [5, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|z|>")]
    assert outputs[False].response_logprobs == [-0.5, -0.25, 0.0]


def loss_of(case, rows, old, adv, mode):
    """verl's `ppo_loss` on nested rows, as its FSDP engine calls it; the gradient in the model."""

    def nested(values):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in values], layout=torch.jagged)

    size = len(rows["responses"])
    fields = {name: rows[name] for name in ("prompts", "responses", "response_mask")}
    fields |= {"old_log_probs": old, "advantages": adv, "ref_log_prob": [row - 0.1 for row in old]}
    data = TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=size)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(map(sum, rows["response_mask"])), global_batch_size=size)
    config = actor_config(
        loss_agg_mode="seq-mean-token-sum", use_kl_loss=True, kl_loss_coef=0.2, entropy_coeff=0.0,
        policy_loss=PolicyLossConfig(loss_mode=mode),
    )  # fmt: skip
    case.model.zero_grad()
    whole = [p + r for p, r in zip(rows["prompts"], rows["responses"], strict=True)]
    loss, _ = ppo_loss(config, {"log_probs": nested([log_probs(case.model, row) for row in whole])}, data)
    return loss


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo"])
def test_the_loss_is_verls_own_plus_the_verification_loss(credited, mode):
    """The expected loss is verl's on rows without the token, plus a loop over completions."""
    case = credited
    ids, _, _ = by_hand(case)
    with torch.no_grad():  # another policy than the one that sampled
        for weight in case.model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    adv, old = ([row.clone() for row in rows] for rows in fetch(case.batch, "advantages", "old_log_probs"))
    loss = loss_of(case, case.rows, old, adv, f"spanwise_laser_{mode}")
    loss.backward()
    gradient = {name: weight.grad.clone() for name, weight in case.model.named_parameters()}

    length = list(map(len, ids))
    plain = {**case.rows, "responses": ids, "response_mask": [[1] * size for size in length]}
    before, paid = ([row[:size] for row, size in zip(rows, length, strict=True)] for rows in (case.old, adv))
    expected = loss_of(case, plain, before, paid, mode)
    token, errors = case.trainer.spanwise.parts["laser"].token, []
    verdicts = [1, 0, None, 0, 1]  # cut off; left out, which counts as wrong
    weights = {1: 4 / (2 * 2), 0: 4 / (2 * 2)}
    for prompt, reply, verdict in zip(case.rows["prompts"], ids, verdicts, strict=True):
        if verdict is None:
            continue
        logp = (case.model(input_ids=torch.tensor([prompt + reply])).logits[0, -1] / TEMPERATURE).log_softmax(dim=-1)[token]
        score = LASER["beta"] * (TEMPERATURE * logp - LASER["reference"])
        errors.append(weights[verdict] * (score - verdict) ** 2)
    expected = expected + LASER["alpha"] * sum(errors) / len(errors)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    case.model.zero_grad()
    expected.backward()
    for name, weight in case.model.named_parameters():
        torch.testing.assert_close(gradient[name], weight.grad, atol=1e-6, rtol=1e-4)


REFUSED = {
    r"laser needs .* nothing computes score_n": ["trainer.v1.trainer_mode=colocate_async"],
    r"laser needs .* or train with TRL": ["trainer.use_v1=False"],
    "bypass_mode=True takes": ["algorithm.rollout_correction.bypass_mode=True"],
    "filter_groups drops": ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=any_reward"],
    "teacher only scores sampled tokens": ["distillation.enabled=True"],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(tmp_path, sentence):
    with pytest.raises(RecipeError, match=sentence):
        prepare(configured(tmp_path, *REFUSED[sentence])[0])


def test_no_reference_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"laser.reference is missing: .*RECIPE --model MODEL --dataset FILE`"):
        prepare(configured(tmp_path, reference=None)[0])


def test_a_run_that_ends_before_the_mixing_begins_is_refused(tmp_path):
    trainer = trainer_of(configured(tmp_path, self_rewarding_warmup=5)[0])
    trainer.total_training_steps = 5
    with pytest.raises(RecipeError, match="the run has only 5"), trainer.spanwise.training(trainer):
        pass
    trainer.spanwise.config.trainer.val_only = True
    with trainer.spanwise.training(trainer):  # nothing is trained, so nothing is too short
        pass


def test_rollouts_of_several_outputs_are_refused(tmp_path, queue):
    config, _, _ = configured(tmp_path)
    trainer, manager = trainer_of(config), manager_of(config)
    batch = filled(manager, [[["So", "<answer>4</answer>"], ["<answer>4</answer>"]]])
    put(batch, old_log_probs=[torch.zeros(len(row)) for row in fetch(batch, "responses")[0]])
    with pytest.raises(RecipeError, match=r"these rollouts have several turns or outputs"):
        trainer._compute_advantage(batch, {})
