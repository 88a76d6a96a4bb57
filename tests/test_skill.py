"""The packaged skill: found where tools look for it, its front matter is valid, its code runs and its metrics exist."""

import re
from importlib.resources import files

import pytest
import torch
import yaml

import trl_small
from spanwise.credit_metrics import CREDIT
from spanwise.engines.trl import SpanGRPOTrainer

pytestmark = [*trl_small.THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]
SKILL = files("spanwise") / ".agents" / "skills" / "spanwise" / "SKILL.md"  # where library-skills and its like look
TEXT = SKILL.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_front_matter_is_that_of_a_skill_and_the_metrics_that_it_names_are_watched():
    fields = yaml.safe_load(TEXT.split("---\n", 2)[1])
    assert set(fields) == {"name", "description"}
    assert fields["name"] == "spanwise"  # the name of its folder
    assert 0 < len(fields["description"]) <= 1024
    watched = {metric.key("<objective>") for metric in CREDIT if metric.lasting is not None}
    assert set(re.findall(r"`(credit/[^`]+)`", TEXT)) == watched


@pytest.mark.filterwarnings("ignore:Step 0. <:UserWarning")  # the tiny policy writes no tags, which is a warning
@pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning")
def test_its_code_runs_and_credits_as_it_says(tmp_path):
    code = "\n".join(BLOCKS)
    places = {
        '"out", num_generations=16, per_device_train_batch_size=16, max_completion_length=4096': (
            f'"{tmp_path}", num_generations=2, per_device_train_batch_size=2, max_completion_length=8, max_steps=1, '
            'use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to="none"'
        ),
        "train_dataset=data,": "train_dataset=data, processing_class=encoder,",
    }
    for name, place in places.items():
        assert name in code
        code = code.replace(name, place)
    # The prompts open nothing, so the vocabulary must be able to write the tags; what is written does not matter here.
    model = trl_small.policy(dtype=torch.float32)
    namespace = {"model": model, "data": trl_small.prompts(), "encoder": trl_small.tokenizer()}
    exec(compile(code, "SKILL.md", "exec"), namespace)
    # By hand: half are right; Brier scores -.01 and -.25 of the right ones (mean -.13), -.81 and -.01 of the wrong (-.41).
    expected = [[0.5, 0.12], [0.5, -0.12], [-0.5, -0.4], [-0.5, 0.4]]
    torch.testing.assert_close(namespace["found"].block_nk, torch.tensor(expected, dtype=torch.float64))
    assert namespace["setup_warnings"](namespace["reading"], namespace["scheme"]) == {}
    assert isinstance(namespace["trainer"], SpanGRPOTrainer)
    assert namespace["trainer"].state.global_step == 1
    parts = [{"solution": {"answer": "four"}}, {"solution": {"answer": "it is"}}, {"solution": None}]
    assert namespace["short"](parts) == [1.0, 0.0, None]
