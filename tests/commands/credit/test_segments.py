"""Where the report says that a segment opens is where `sae` reads a later value."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.commands.credit.page import opening_tokens, segment_words
from spanwise.credit import sae
from spanwise.credit.methods._gae import SaeSegments


def read_by_sae(logp, trained, threshold, boundary):
    """The tokens whose value an earlier token's advantage depends on: by the definition of SAE those that open a segment."""
    size = len(logp)
    mask_nt = torch.tensor([trained])
    found = []
    for t in range(size):
        value_nt = torch.zeros(1, size)
        value_nt[0, t] = 1.0
        options = {"lam": 0.5, "threshold": threshold, "boundary": boundary}
        adv_nt = sae(torch.zeros(1, size), value_nt, torch.tensor([logp]), mask_nt, **options)
        if trained[t] and bool((adv_nt[0, :t] != 0).any()):
            found.append(t)
    return found


@given(
    tokens=st.lists(st.tuples(st.sampled_from([0.01, 0.15, 0.2, 0.25, 0.9]), st.booleans()), max_size=9),
    threshold=st.sampled_from([0.0, 0.2, 0.5, 2.0]),
    boundary=st.sampled_from(["start", "end"]),
)
def test_segments_open_where_sae_reads_a_value(tokens, threshold, boundary):
    logp, trained = [float(np.log(p)) for p, _ in tokens], [flag for _, flag in tokens]
    expected = read_by_sae(logp, trained, threshold, boundary) if tokens else []
    noisy = np.where(trained, logp, np.nan)  # what is not trained is never read
    assert opening_tokens(SaeSegments(threshold, boundary), noisy, np.array(trained, dtype=bool)) == expected


def test_the_options_of_a_method_are_taken_and_the_rest_is_its_own():
    assert SaeSegments.of("sae", {"boundary": "end", "lam": 0.9}) == SaeSegments(0.2, "end")
    assert SaeSegments.of("sae", {"threshold": 0.4}) == SaeSegments(0.4, "start")
    for method in ("gae", "bae", None, "no such method"):
        assert SaeSegments.of(method, {"threshold": 0.4}) is None


@pytest.mark.parametrize(("boundary", "does"), [("start", "opens a segment"), ("end", "has closed a segment")])
def test_the_words_say_which_side_the_unlikely_token_lies_on(boundary, does):
    assert (
        segment_words(SaeSegments(0.2, boundary))
        == f"A tick marks each place where a token with a probability below 0.2 {does}."
    )
