"""The keys of the log and the metrics they belong to."""

from spanwise.metric import Metric

MEAN, LOSS = Metric("credit/<block>/mean_abs"), Metric("critic/[value/]loss")


def test_the_part_of_a_key():
    assert MEAN.part("credit/a/mean_abs") == "a"
    assert Metric("kl").part("kl") == ""
    assert Metric("kl").part("k") is None
    assert LOSS.part("critic/brier/loss") == "brier"
    assert LOSS.part("critic/loss") == ""


def test_the_key_of_a_part():
    assert MEAN.key("a") == "credit/a/mean_abs"
    assert LOSS.key() == "critic/loss"
    assert LOSS.key("brier") == "critic/brier/loss"
