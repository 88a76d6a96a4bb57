"""The rule of a self-rewarding score: what is refused, each in one sentence, and where it stands in schemes."""

import pytest

from spanwise import Laser, Layout, Objective, RecipeError, Scheme

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", True), ("beta", 0), ("alpha", 0.0), ("alpha", float("nan")), ("mix", 1.5), ("mix", -0.1), ("threshold", "low"),
        ("balanced", 1), ("scale", "mean"), ("reasoning_warmup", 1.5), ("tau", 0.1), ("reference", 1.0),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(field, value):
    with pytest.raises(RecipeError, match=field):
        Laser.of({"token": "<unk>", field: value})
    with pytest.raises(RecipeError, match="needs token"):
        Laser.of({})


def test_a_score_that_can_just_reach_1_is_taken_and_the_schedule_counts_the_mixing_from_the_loss():
    assert Laser("<unk>", beta=0.25, reference=-4.0).reference == -4.0
    assert Laser("<unk>", reasoning_warmup=30, self_rewarding_warmup=20).first_mix == 50
    assert Laser("<unk>", mix=0.0).first_mix is None


def test_a_scheme_refuses_rows_that_are_turns_and_what_is_no_mode_of_its_own():
    whole = Layout({"all": ["answer"]})
    with pytest.raises(RecipeError, match="'gigpo' gives credit to single turns"):
        Scheme.preset("gigpo", whole, laser=Laser("<unk>"))
    turn = [Objective("correct", pays="all"), Objective("format", pays="all", scope="turn", baseline="group")]
    with pytest.raises(RecipeError, match="gives credit to single turns"):
        Scheme("bae", whole, turn, modes=[Laser("<unk>")])
    with pytest.raises(RecipeError, match="'laser' is no mode"):
        Scheme.preset("bae", LAYOUT, modes=["laser"])
    with pytest.raises(RecipeError, match="two modes 'laser'"):
        Scheme.preset("bae", LAYOUT, modes=[Laser("<unk>")], laser=Laser("<unk>"))


def test_an_engine_without_the_score_is_refused_and_one_with_it_is_not():
    scheme = Scheme.preset("bae", LAYOUT, laser=Laser("<unk>"))
    with pytest.raises(RecipeError, match=r"'<unk>' after the end of each completion \(score_n\).*nothing computes score_n"):
        scheme.check(["ids_nt"])
    scheme.check(["ids_nt", "score_n"])


def test_a_run_that_ends_before_the_loss_or_the_mixing_begins_is_refused():
    both = {"reasoning_warmup": 5, "self_rewarding_warmup": 5}
    for warmups in ({"reasoning_warmup": 10, "mix": 0.0}, {"self_rewarding_warmup": 10}, both):
        with pytest.raises(RecipeError, match="the run has only 10"):
            Laser("<unk>", **warmups).check_steps(10)
        Laser("<unk>", **warmups).check_steps(11)
