"""The numbers of other frameworks at the corners where they differ from each other: docs/compat.md's table as functions."""

import re
from functools import partial

import torch

from pages import DOCS
from spanwise.credit.registry import method
from spanwise.credit.strata import group_index, moments, standardise, standardise_tokens

PAGE = DOCS / "compat.md"
#: How the page writes a deviation with its epsilon -> where epsilon stands, see `spanwise.credit.strata.standardise`.
EPS_AT = {r"std \+ (.+)": "std", r"sqrt\(var \+ (.+)\)": "variance", r"sqrt\(max\(var, (.+)\)\)": "floor"}


def read_table():
    table = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")[2].partition("\n<!-- end of table -->")[0]
    heading, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    by_framework = {}
    for row in rows:
        cells = dict(zip(heading, row, strict=True))
        by_framework.setdefault(cells["framework"], {})[cells["method"]] = cells
    return by_framework


COMPAT = read_table()


def compatible(method_name, framework):
    """A method with a framework's ddof, epsilon, group of one, whitening and treatment of masked tokens, as loops for comparing."""
    cells = COMPAT[framework][method_name]
    special = {"gdpo": _gdpo, "reinforce++-baseline": _reinforce_baseline, "reinforce++": _reinforce, "gae": _gae}
    return partial(special[method_name], cells) if method_name in special else partial(_grouped, method_name, cells)


def whitening_of(cells):
    """Return what counts once in the moments of a batch, and the options of `standardise`."""
    per, ddof, form = re.fullmatch(r"per (\w+), ddof (\d), (.+)", cells["whitening over the batch"]).groups()
    (eps_at, eps), *_ = ((at, matched[1]) for pattern, at in EPS_AT.items() if (matched := re.fullmatch(pattern, form)))
    return per, {"ddof": int(ddof), "eps": float(eps), "eps_at": eps_at}


def _grouped(name, cells, reward_n, group_n, **inputs):
    entry = method(name)
    inputs = {key: value for key, value in inputs.items() if key in entry.inputs}
    settings = {key: kind(cells[key]) for key, kind in (("ddof", int), ("eps", float)) if cells[key]}
    advantage_n = entry.estimator(reward_n, group_n, **settings, **inputs)
    alone_n = ~reward_n.isnan() & (moments(reward_n, group_index(group_n)).count_n() == 1)
    raw_n = reward_n.double()
    lone = {"zero": torch.zeros_like(raw_n), "raw": raw_n, "nan": torch.full_like(raw_n, torch.nan)}
    lone["scaled"] = raw_n / (1 + settings.get("eps", 0.0))
    return torch.where(alone_n, lone[cells["group of one"]], advantage_n)


def _gdpo(cells, reward_nm, group_n, *, weight_m, length_n=None):
    columns = [_grouped("grpo", cells, reward_nm[:, m], group_n) for m in range(reward_nm.shape[1])]
    summed_n = torch.stack(columns, dim=1) @ weight_m.double()
    return _whitened(cells, torch.where(reward_nm.isnan().all(dim=1), torch.nan, summed_n), length_n)


def _reinforce_baseline(cells, reward_n, group_n, *, length_n):
    centred_n = _grouped("dr_grpo", cells, reward_n, group_n)
    return _whitened(cells, torch.where(reward_n.isnan(), torch.nan, centred_n), length_n)


def _whitened(cells, value_n, length_n):
    per, options = whitening_of(cells)
    weight_n = length_n.double() if per == "token" else None
    shift = per == "token"  # counted once each, credit relative to a group has mean 0 but for rounding errors
    return standardise(value_n, weight_n=weight_n, shift=shift, **options)[0]


def _reinforce(cells, reward_nt, mask_nt, *, gamma=1.0):
    return _gae(cells, reward_nt, torch.zeros_like(reward_nt), mask_nt, gamma=gamma)


def _gae(cells, reward_nt, value_nt, mask_nt, *, gamma=1.0, lam=1.0, whiten=True):
    mask_nt = mask_nt & ~(reward_nt.isnan() & mask_nt).any(dim=1, keepdim=True)  # an absent reward takes no part
    advantage_nt = _recursion(reward_nt, value_nt, mask_nt, gamma, lam, cells["masked tokens"])
    return standardise_tokens(advantage_nt, mask_nt, **whitening_of(cells)[1]) if whiten else advantage_nt


def _recursion(reward_nt, value_nt, mask_nt, gamma, lam, masked):
    """A[t] = r[t] + gamma V[t+1] - V[t] + gamma lam A[t+1] with the framework's own rule at masked tokens."""
    if masked == "gap":
        reward_nt, value_nt = (torch.where(mask_nt, x, 0.0) for x in (reward_nt, value_nt))
    next_value_n = torch.zeros_like(reward_nt[:, :1]).flatten()
    next_advantage_n = next_value_n
    advantage_nt = torch.zeros_like(reward_nt)
    for t in range(reward_nt.shape[1] - 1, -1, -1):
        step_n = reward_nt[:, t] + gamma * next_value_n - value_nt[:, t] + gamma * lam * next_advantage_n
        keep_n = mask_nt[:, t] if masked in ("skip", "reset") else torch.ones_like(mask_nt[:, t])
        before_n = next_advantage_n if masked == "skip" else torch.zeros_like(step_n)
        advantage_nt[:, t] = torch.where(mask_nt[:, t], step_n, 0.0)
        next_advantage_n = torch.where(keep_n, step_n, before_n)
        next_value_n = torch.where(keep_n, value_nt[:, t], next_value_n)
    return advantage_nt
