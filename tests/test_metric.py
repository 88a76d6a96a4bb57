"""The keys of the log and the metrics they belong to."""

from spanwise.metric import Metric

MEAN, LOSS = Metric("credit/<block>/mean_abs"), Metric("critic/[value/]loss")


def test_the_part_of_a_key_and_the_key_of_a_part():
    assert MEAN.part("credit/a/mean_abs") == "a"
    assert (Metric("kl").part("kl"), Metric("kl").part("k")) == ("", None)
    assert MEAN.key("a") == "credit/a/mean_abs"
    for part, key in {"brier": "critic/brier/loss", "": "critic/loss"}.items():
        assert (LOSS.part(key), LOSS.key(part)) == (part, key)
