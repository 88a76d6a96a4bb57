"""docs/howto/troubleshooting.md has a heading for every reason and every metric that warns, and names none that does not exist."""

import re

import torch

from pages import DOCS
from spanwise import setup_warnings
from spanwise.credit_metrics import CREDIT
from spanwise.explain.alarms import SHOWN_BY
from spanwise.losses import critic_error
from spanwise.zeros import Zero

TEXT = (DOCS / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
#: The names that `metrics` logs, as the page writes them: a comparison is called by its objective.
LOGGED = {metric.name.replace("<comparison>", "<objective>") for metric in CREDIT}
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", TEXT, re.MULTILINE))


def headings(section):
    return re.findall(r"^### (.+)$", SECTIONS[section], re.MULTILINE)


def cells(section):
    """The first two cells of the rows of a section's table."""
    return re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", SECTIONS[section], re.MULTILINE)


def test_reasons_and_metrics_of_every_batch_have_their_headings_and_no_others_are_named():
    assert headings("Reasons for a zero") == [reason.words for reason in Zero if reason is not Zero.CREDITED]
    assert sorted(headings("Metrics of every batch")) == sorted(f"`{name}`" for name in LOGGED)
    mentioned = re.findall(r"`(credit/[^`]+)`", TEXT)
    assert {re.sub(r"/(correct|brier)/", "/<objective>/", name) for name in mentioned} <= LOGGED
    figures = critic_error(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
    names = {f"`critic/{name}`" for name in (*figures, "loss", "grad_norm")}
    assert {"`critic/explained_variance`"} <= set(headings("Metrics of a critic")) <= names


def test_what_warns_after_three_batches_says_so_with_its_threshold():
    parts = re.split(r"^### ", SECTIONS["Metrics of every batch"], flags=re.MULTILINE)[1:]
    warns = {part.split("\n")[0].strip("`"): re.findall(r"\*\*Warning:\*\*([^*]+)", part)[0] for part in parts}
    alarms = {metric.key("<objective>"): metric.lasting for metric in CREDIT if metric.lasting is not None}
    assert len(alarms) == 6
    for name, alarm in alarms.items():
        above = f"{alarm.side} {alarm.threshold:g}".replace("0.", ".")
        assert above in warns[name] or (name == "credit/no_signal" and "three batches in a row" in warns[name])
    assert all("above" not in warns[name] for name in set(warns) - set(alarms))


def test_every_first_warning_and_every_alarm_of_an_evaluation_is_in_its_table():
    listed = re.search(r"Key -> sentence: (.+?)\n\n", setup_warnings.__doc__ or "", re.DOTALL)
    assert listed is not None
    keys = [key for key in re.findall(r"`([\w/<>]+)`", listed[1]) if key != "if_missing"]
    assert [name.strip("`") for name, _ in cells("Warnings with the first batch")] == keys
    assert {what.strip(): name.split("`")[1] for name, what in cells("Figures of an evaluation")} == dict(SHOWN_BY)
