"""Step-wise training: every turn of a trajectory is a row of its own, and each row gets credit on its own tokens.

Index letters: s step rows, j trajectories, t tokens of the padded response.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.registry import METHODS, Method, method
from spanwise.credit.spread import to_tokens
from spanwise.credit.strata import group_index
from spanwise.credit.trajectories.step_returns import OutcomeName, trajectory_outcomes
from spanwise.errors import AlignmentError, RecipeError


def broadcast_to_steps(
    adv_j: Float[Tensor, " j"],
    trajectory_s: Int[Tensor, " s"],
    mask_st: Shaped[Tensor, "s t"],
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "s t"]:
    r"""Give every trainable token of every step the credit of its trajectory.

    Equation
        A[s, t] = A[j(s)] * m[s, t], m the mask of row s itself: the rows of one trajectory differ in prompt and response length

    Args:
        adv_j: one advantage per trajectory, in the order of `trajectory_s.unique()`.
        trajectory_s: trajectory ids, in any order.
        mask_st: each row's own response mask, bool or 0/1, left- or right-aligned.
        dtype: of the result.

    Raises:
        AlignmentError: sizes differ.

    Example:
        The second trajectory has two steps; the responses are right-aligned.

        >>> mask_st = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
        >>> broadcast_to_steps(torch.tensor([2., -1.]), torch.tensor([0, 1, 1]), mask_st)
        tensor([[ 0.,  2.,  2.],
                [-1., -1., -1.],
                [ 0.,  0., -1.]])
    """
    if len(trajectory_s) != len(mask_st):
        raise AlignmentError(f"There are {len(trajectory_s)} trajectory ids for {len(mask_st)} rows of the mask.")
    index_s = group_index(trajectory_s)
    count = int(index_s.max()) + 1 if len(index_s) else 0
    if len(adv_j) != count:
        raise AlignmentError(
            f"There are {len(adv_j)} advantages for {count} trajectories; give one to each trajectory, in the order of its id."
        )
    return to_tokens(adv_j[index_s], mask_st, dtype=dtype)


def outcome_methods() -> tuple[str, ...]:
    """Names of the methods that turn one reward per completion into one advantage, and so work on whole trajectories.

    >>> {"dr_grpo", "grpo"} <= set(outcome_methods())
    True
    """
    return tuple(sorted(name for name, known in METHODS.items() if _is_outcome(known)))


def check_stepwise(name: str) -> Method:
    """The method called `name` if it can give credit to the steps of trajectories: an outcome method or a step method.

    Raises:
        RecipeError: an unknown name, or a method whose advantages vary over the tokens or blocks of one completion. The tokens of
            a trajectory lie in several rows, which such a method would treat as completions that end where the turn ends.

    >>> check_stepwise("grpo").name
    'grpo'
    """
    known = method(name)
    if known.kind == "step" or _is_outcome(known):
        return known
    steps = sorted(other for other, step in METHODS.items() if step.kind == "step")
    if known.kind == "completion":
        fault = f"needs {', '.join(known.needs) or next(iter(inspect.signature(known.estimator).parameters))}"
        fault += ", not one reward per trajectory"
    else:
        fault = f"gives every {known.kind} of one completion its own credit, and the steps of a trajectory are separate rows"
    raise RecipeError(
        f"Method '{name}' {fault}; it does not go with step-wise trajectories. Use an outcome method "
        f"({', '.join(outcome_methods())}) or a step method ({', '.join(steps)})."
    )


def stepwise(
    name: str,
    reward_s: Float[Tensor, " s"],
    group_s: Int[Tensor, " s"],
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    mask_st: Shaped[Tensor, "s t"],
    *,
    reward: OutcomeName = "last",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Float[Tensor, "s t"]:
    r"""Run an outcome method on trajectories and give every trainable token of every step its trajectory's advantage.

    Equation
        A[s, t] = A[j(s)] * m[s, t],   A[j] the method's advantage of R(j) among the trajectories of j's prompt

    Args:
        name: an outcome method, see `outcome_methods`.
        reward_s: one reward per step row; NaN where absent.
        group_s: prompt ids; all rows of a trajectory share one.
        trajectory_s: trajectory ids.
        step_s: step numbers.
        mask_st: each row's own response mask, bool or 0/1, left- or right-aligned.
        reward: R(j) is the reward of the last step or the sum over the steps, see `trajectory_outcomes`.
        dtype: of the result.
        **options: of the method.

    Edge cases:
        A trajectory counts once in its group, however many steps it has. Groups of one trajectory give what the method gives.

    Raises:
        RecipeError: the method is no outcome method.

    Example:
        Two trajectories of one prompt, the first with two steps.

        >>> reward_s, mask_st = torch.tensor([0., 1., 0.]), torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
        >>> one, trajectory_s, step_s = torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
        >>> stepwise("dr_grpo", reward_s, one, trajectory_s, step_s, mask_st)
        tensor([[ 0.5000,  0.5000,  0.0000],
                [ 0.5000,  0.0000,  0.0000],
                [-0.5000, -0.5000, -0.5000]])
    """
    known = check_stepwise(name)
    if known.kind == "step":
        raise RecipeError(
            f"Method '{name}' gives each step its own credit; call {name}(...) and pass the result to to_tokens."
        )
    outcome = trajectory_outcomes(reward_s, group_s, trajectory_s, step_s, reward=reward)
    adv_j = known.estimator(outcome.reward_j, outcome.group_j, **options)
    return broadcast_to_steps(adv_j, trajectory_s, mask_st, dtype=dtype)


def step_rewards(reward_st: Float[Tensor, "s t"], mask_st: Shaped[Tensor, "s t"]) -> Float[Tensor, " s"]:
    r"""Add up the token rewards of each step row.

    Equation
        r[s] = sum over t >= the first trainable token of row s of r[s, t]

    Args:
        reward_st: one reward per token, mostly 0, also in the padding; NaN at a trainable token: the row's reward is absent.
        mask_st: each row's own response mask, bool or 0/1, left- or right-aligned.

    Edge cases:
        A reward on a masked token (an observation at the end of the turn) counts for the trainable token before it; one before
        the first trainable token is dropped, for nothing that was chosen can have caused it. NaN at a masked token is no reward.
        A row without trainable tokens has reward 0.

    Example:
        >>> step_rewards(torch.tensor([[9., .5, 1.], [9., 2., .25]]), torch.tensor([[0, 1, 1], [0, 1, 0]]))
        tensor([1.5000, 2.2500], dtype=torch.float64)
    """
    if reward_st.shape != mask_st.shape:
        raise AlignmentError(f"Token rewards are {tuple(reward_st.shape)}, the mask is {tuple(mask_st.shape)}.")
    check_rewards(reward_st, row="row")
    kept_st = mask_st.bool()
    counts_st = (kept_st.cumsum(dim=1) > 0) & (kept_st | ~reward_st.isnan())
    return torch.where(counts_st, reward_st.double(), 0.0).sum(dim=1)


def prompt_mini_batches(group_s: Int[Tensor, " s"], *, prompts_per_batch: int) -> list[Int[Tensor, " b"]]:
    """Split a batch into mini-batches that hold whole prompts, however many rows the turns of each prompt make.

    Args:
        group_s: prompt ids, in any order, of any sizes.
        prompts_per_batch: prompts in each mini-batch; the last one may hold fewer.

    Returns:
        The rows of each mini-batch, ascending; prompts in the order in which they first appear. Where the rows of a prompt lie
        together, each mini-batch is a range of rows.

    Example:
        >>> prompt_mini_batches(torch.tensor([8, 8, 8, 3, 5, 5]), prompts_per_batch=2)
        [tensor([0, 1, 2, 3]), tensor([4, 5])]
    """
    if prompts_per_batch < 1:
        raise RecipeError(f"prompts_per_batch={prompts_per_batch} must be at least 1.")
    index_s = group_index(group_s)
    rows = torch.arange(len(index_s), device=index_s.device)
    first_g = torch.full((int(index_s.max()) + 1 if len(rows) else 0,), len(rows), device=index_s.device)
    first_g.scatter_reduce_(0, index_s, rows, "amin")
    batch_s = first_g.argsort().argsort()[index_s] // prompts_per_batch
    return list(batch_s.argsort(stable=True).split(batch_s.bincount().tolist()))


def _is_outcome(known: Method) -> bool:
    first = next(iter(inspect.signature(known.estimator).parameters))
    return known.kind == "completion" and first == "reward_n" and not known.needs
