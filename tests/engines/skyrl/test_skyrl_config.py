"""The entrypoint's configuration: what is refused before anything starts, and what fits."""

import sys

import cloudpickle
import pytest
import skyrl_small as small
from skyrl.train.entrypoints import main_base

from spanwise.engines.skyrl import main
from spanwise.engines.skyrl.config import REDUCTIONS, SpanwiseTrainConfig, check, critic_of
from spanwise.engines.skyrl.trainer import SpanRayPPOTrainer
from spanwise.errors import RecipeError

ALGORITHM = "trainer.algorithm."
GAE = "layout: {turn: []}\nmethod: gae\nobjectives: [{reward: environment, pays: turn}]\n"
CRITIC = {"trainer.critic.model.path": "some"}
BLOCKS = (
    "layout: {solution: [answer], confidence: [confidence]}\nmethod: gae\nobjectives:\n"
    "  - {reward: correct, pays: [solution]}\n  - {reward: brier, pays: [confidence], if_missing: -1.0}\n"
)
GRPO = small.BROADCAST.replace("rloo", "grpo")
MODEL = small.BROADCAST.replace("reward: environment", "reward: reward_model, options: {model: some}")
LEGACY = {ALGORITHM + "loss_reduction": "token_mean_legacy", "trainer.micro_train_batch_size_per_gpu": 5}
STEPWISE = {"layout": "stepwise"}


def of_algorithm(**changes):
    return {ALGORITHM + name: value for name, value in changes.items()}


def of_spanwise(**changes):
    return of_algorithm(**{f"spanwise.{name}": value for name, value in changes.items()})


SAMPLING = of_algorithm(**{"dynamic_sampling.type": "filter"})
FULL = {"trainer.fully_async.sample_full_batch": True}
BASELINE = GAE.replace("gae", "reinforce++-baseline")
UNSCALED = of_algorithm(grpo_norm_by_std=False)
OF_BATCH = small.BROADCAST.replace("rloo", "bae").replace("turn}", "turn, baseline: batch}")
REFUSED = {  # recipe, changes of SkyRL's configuration, and the words that the error names
    "no estimator": (small.BROADCAST, of_algorithm(advantage_estimator="grop"), "'grop'. Did you mean 'grpo'"),
    "whitened": (small.BROADCAST, of_algorithm(advantage_batch_normalize=True), "even of padding"),
    "KL in the reward": (small.BROADCAST, of_algorithm(use_kl_in_reward=True), "use_kl_loss=true"),
    "no reduction": (small.BROADCAST, of_algorithm(loss_reduction="mean"), "loss_reduction 'mean'"),
    "no advantages": (small.BROADCAST, of_algorithm(policy_loss_type="cross_entropy"), "without advantages"),
    **{
        f"tokens picked by {loss}": (small.BROADCAST, of_algorithm(policy_loss_type=loss), f"'{loss}', a token's weight")
        for loss in ("clip_cov", "kl_cov")
    },
    "no recipe": (small.BROADCAST, {ALGORITHM + "spanwise.recipe": None}, r"spanwise\.recipe="),
    "rows that are dropped": (small.BROADCAST, LEGACY, r"48 rows of .* micro-batches of 5 and drops .* Use token_mean"),
    "two lambdas": (GAE + "options: {lam: 0.7}", {**CRITIC, **of_algorithm(lambd=0.8)}, r"lambd is 0\.8, .* lam: 0\.7"),
    "no deviation, dcpo": (GRPO.replace("grpo", "dcpo"), UNSCALED, "method 'dcpo'"),
    "no deviation, gigpo": (small.GIGPO + "options: {scale: std}", {**STEPWISE, **UNSCALED}, "method 'gigpo'"),
    "refined turns": (GRPO + "refine: ktae", STEPWISE, r"refine needs .* generator\.step_wise_trajectories=false"),
    "no deviation": (GRPO, UNSCALED, "grpo_norm_by_std is False"),
    "a model": (MODEL, {}, "'reward_model' loads a reward model"),
    "no critic": (GAE, {}, r"Add trainer\.critic\.model\.path=MODEL"),
    "a critic for nobody": (small.BROADCAST, CRITIC, "asks for a critic, but method"),
    "a section for nobody": (small.BROADCAST + "critic: {gae_lambda_value: 0.9}", {}, "has a critic section"),
    "turns, gae": (GAE, {**CRITIC, **STEPWISE}, r"generator\.merge_stepwise_output=true"),
    "turns, reinforce++": (GAE.replace("gae", "reinforce++"), STEPWISE, r"generator\.merge_stepwise_output=true"),
    "two values": (BLOCKS, CRITIC, r"\(correct, brier\).* Write values: shared"),
    "bins": (GAE + "critic: {head: hl_gauss}", CRITIC, "Leave head out"),
    "groups by values": (GAE, {**CRITIC, **SAMPLING}, "credit depends on value_nt"),
    "groups by turns": (small.BROADCAST, {**STEPWISE, **SAMPLING}, "but in step-wise training a row is one turn"),
    "groups by a batch": (OF_BATCH, FULL, "'environment'"),
    "groups by a method's batch": (GAE.replace("gae", "reinforce++"), FULL, "method 'reinforce\\+\\+'"),
    "groups by a mean of the batch": (BASELINE, FULL, "method 'reinforce\\+\\+-baseline'"),
    "groups by conflicts": (GAE.replace("gae", "gdpo") + "options: {conflict: 1}", FULL, "method 'gdpo'"),
    "rollouts in no folder": (small.BROADCAST, of_spanwise(keep_rollouts=1), "need a folder"),
    "no number of rollouts": (small.BROADCAST, of_spanwise(keep_rollouts=-1, folder="runs/a"), "keep_rollouts is -1"),
    "a value after the end": (GAE + "critic: {truncated: bootstrap}", CRITIC, "'bootstrap'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_credit_or_lacks_something_is_refused(data, case):
    recipe, changes, sentence = REFUSED[case]
    with pytest.raises(RecipeError, match=sentence):
        check(small.config(data, recipe=recipe, **changes))


def test_what_fits(data):
    for name in REDUCTIONS:
        assert check(small.config(data, recipe=small.BROADCAST, **of_algorithm(loss_reduction=name))).scheme.method == "rloo"
    for method in ("gae", "sae", "reinforce++"):
        recipe, critic = GAE.replace("gae", method), {} if method == "reinforce++" else CRITIC
        for layout in ("flat", "merged"):
            assert check(small.config(data, recipe=recipe, layout=layout, **critic)).scheme.method == method
    assert check(small.config(data, recipe=BLOCKS + "values: shared", **CRITIC)).scheme.value_names == ("return",)
    check(small.config(data, recipe=small.BROADCAST, **UNSCALED))
    check(small.config(data, recipe=small.BROADCAST, **FULL, **STEPWISE))
    for recipe in (  # a group of equal rewards gets the same in the batch and alone: its returns, or 0
        GAE.replace("gae", "reinforce++") + "options: {whiten: false}",
        BASELINE + "options: {zero_constant_groups: true}",
        GAE.replace("gae", "gdpo"),
    ):
        check(small.config(data, recipe=recipe, **FULL))
    check(small.config(data, recipe=small.BROADCAST, **of_algorithm(advantage_estimator="rloo")))  # warnings are errors here


def test_what_gives_way_or_changes_nothing_is_said(data):
    cfg = small.config(data, recipe=small.BROADCAST, **of_algorithm(advantage_estimator="grpo"))
    with pytest.warns(UserWarning, match="advantage_estimator=grpo is ignored. The recipe's method is 'rloo'"):
        check(cfg)
    assert cfg.trainer.algorithm.advantage_estimator == "spanwise"
    with pytest.warns(UserWarning, match=r"(gamma|lambd)=0\..* sets the recipe's option (gamma|lam)\."):
        scheme = check(small.config(data, recipe=GAE, **CRITIC, **of_algorithm(gamma=0.9, lambd=0.8))).scheme
    assert {name: scheme.options[name] for name in ("gamma", "lam")} == {"gamma": 0.9, "lam": 0.8}
    recipe = GAE + "steps: 9\ncritic: {learning_rate: 1.0e-3, gae_lambda_value: 0.9, policy_training_start_step: 2}"
    cfg = small.config(data, recipe=recipe, **CRITIC)
    with pytest.warns(UserWarning, match=r"ignores the recipe's critic\.learning_rate, steps and uses"):
        recipe_of_cfg = check(cfg).recipe
    assert critic_of(recipe_of_cfg).gae_lambda_value == 0.9


def test_the_configuration_travels_to_the_task_that_trains(data):
    cfg = small.config(data, recipe=small.BROADCAST)
    arrived = cloudpickle.loads(cloudpickle.dumps(cfg))
    assert arrived.trainer.algorithm.spanwise.recipe == cfg.trainer.algorithm.spanwise.recipe
    assert check(arrived).scheme.method == "rloo"


def arguments(data, tmp_path, **changes):
    (tmp_path / "recipe.yaml").write_text(small.BROADCAST)
    settings = {
        "trainer.override_entrypoint": "spanwise.engines.skyrl.main", "trainer.policy.model.path": "some",
        "trainer.logger": "console", "trainer.placement.policy_num_gpus_per_node": 1, "data.train_data": f"['{data}']",
        "generator.inference_engine.num_engines": 1, **of_spanwise(recipe="recipe.yaml"), **changes,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("command", [main_base, main])
def test_both_commands_come_here(data, tmp_path, monkeypatch, command):
    """SkyRL's own command runs until it asks for GPUs; ours reads every argument, including the first."""
    started = []
    monkeypatch.setattr(main, "initialize_ray", started.append)
    monkeypatch.setattr(main.ray, "get", lambda task: None)
    monkeypatch.setattr(main._run, "remote", started.append)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main", *arguments(data, tmp_path, **of_spanwise(folder="runs/a"))[command is main :]])
    command.main()
    assert [type(cfg) for cfg in started] == [SpanwiseTrainConfig] * 2
    assert started[0].trainer.algorithm.advantage_estimator == "spanwise"
    ours = [cfg.trainer.algorithm.spanwise for cfg in started]  # absolute, as Ray's task runs in another folder
    assert [(part.recipe, part.folder) for part in ours] == [(str(tmp_path / "recipe.yaml"), str(tmp_path / "runs/a"))] * 2


def test_it_is_refused_before_ray_starts(data, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "initialize_ray", lambda cfg: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    bad = arguments(data, tmp_path, **of_algorithm(use_kl_in_reward="true"))
    monkeypatch.setattr(sys, "argv", ["main_base", *bad])
    with pytest.raises(RecipeError, match="use_kl_loss=true"):
        main_base.main()


def test_the_experiment_makes_our_trainer(data):
    trainer = small.trainer(small.config(data, recipe=small.BROADCAST))
    parts = {name: getattr(trainer, name) for name in ("cfg", "tracker", "tokenizer", "train_dataset", "generator")}
    parts |= dict.fromkeys(("eval_dataset", "inference_engine_client", "colocate_pg"))
    exp = object.__new__(main.SpanPPOExp)
    exp.cfg = trainer.cfg
    assert isinstance(exp.get_trainer(**parts), SpanRayPPOTrainer)
