"""`ValueModel`: a token classifier that predicts, before every token, the reward still to come. It can be saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer
from transformers.utils.hub import has_file

from spanwise.errors import DataError, RecipeError, first_line, refuse
from spanwise.losses import categorical_value, categorical_value_loss, value_loss
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.sequences import Sequences, positions

#: The file beside a saved critic's weights that describes it.
ABOUT = "critic.json"


class Saved(NamedTuple):
    """The description of a saved critic: its settings, its tokenizer, and the names of the values that it predicts."""

    names: list[str]
    config: CriticConfig
    tokenizer: str | None

    @staticmethod
    def of(place: str | Path) -> Saved | None:
        """Read a saved critic's description from its folder. None if it holds no saved critic."""
        description_file = Path(place) / ABOUT
        try:
            record = json.loads(description_file.read_text(encoding="utf-8"))
            head_options: dict[str, Any] = {}
            if record["head"] != "scalar":
                head_options = {"bins": record["bins"], "value_range": tuple(record["value_range"])}
            return Saved(list(record["values"]), CriticConfig(head=record["head"], **head_options), record.get("tokenizer"))
        except OSError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"'{description_file}' is damaged: {error!r}.") from error


class ValueModel(nn.Module):
    """A critic that predicts, before each token, the reward still to come, in total or per objective."""

    def __init__(self, model: Any, names: Sequence[str], config: CriticConfig) -> None:
        super().__init__()
        self.model, self.names, self.config = model, tuple(names), config

    @staticmethod
    def of_policy(policy: Any, names: Sequence[str], config: CriticConfig) -> ValueModel:
        """Build a float32 critic from the policy, with a head of zeros. Adapters are merged."""
        merged_policy = deepcopy(policy).merge_and_unload() if hasattr(policy, "merge_and_unload") else policy
        model_config = _set_head(deepcopy(merged_policy.config), names, config)
        try:
            model = AutoModelForTokenClassification.from_config(model_config, dtype=torch.float32)
        except ValueError as error:
            raise RecipeError(
                f"transformers has no token classifier for a {type(merged_policy).__name__}, so spanwise cannot make a "
                "critic of the policy. Name a critic with critic: {model: NAME}."
            ) from error
        try:
            model.base_model.load_state_dict({name: x.float() for name, x in merged_policy.base_model.state_dict().items()})
        except RuntimeError as error:
            if "size mismatch" not in str(error):  # raise all other errors unchanged, such as a lack of memory
                raise
            raise RecipeError(
                "spanwise cannot copy the policy as a critic, because its weights are quantized or sharded (DeepSpeed ZeRO-3). "
                "If they are quantized, name a critic with critic: {model: NAME}. If they are sharded, use ZeRO-2."
            ) from error
        _zero_head(model)
        return ValueModel(model.to(merged_policy.device), names, config)

    @staticmethod
    def load(place: str, names: Sequence[str], config: CriticConfig, tokenizer: Any = None) -> ValueModel:
        """Load a saved critic, or any token classifier as a critic. A head of another size is replaced by zeros."""
        saved_critic = Saved.of(place)
        if saved_critic is not None:
            fault_messages = {
                f"The critic '{place}' gives {len(saved_critic.names)} values ({', '.join(saved_critic.names)}), but this "
                f"recipe needs {len(names)} ({', '.join(names)}). Use a critic of a recipe with the same objectives and "
                "the same setting `values`.": (list(names) != saved_critic.names)
            }
            for name in ("head", "bins", "value_range"):
                saved_value, requested_value = getattr(saved_critic.config, name), getattr(config, name)
                yaml_value = list(saved_value) if isinstance(saved_value, tuple) else saved_value
                fault_messages[
                    f"The critic '{place}' has the {name} {saved_value}, but the recipe says {requested_value}; write critic: "
                    f"{{{name}: {yaml_value}}}."
                ] = saved_value != requested_value
            refuse(fault_messages)
        if tokenizer is not None:
            _check_tokenizer(place, saved_critic, tokenizer)
        try:
            model_config = _set_head(AutoConfig.from_pretrained(place, trust_remote_code=False), names, config)
            model, loading_report = AutoModelForTokenClassification.from_pretrained(
                place, config=model_config, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32,
                trust_remote_code=False,
            )  # fmt: skip
        except Exception as error:  # transformers, safetensors and json each raise errors of their own type
            raise DataError(f"The critic '{place}' cannot be read: {first_line(error)}.") from error
        if loading_report["missing_keys"] or loading_report["mismatched_keys"]:
            _zero_head(model)
        embedding_count = model.get_input_embeddings().num_embeddings
        tokenizer_size = 0 if tokenizer is None else len(tokenizer)
        with torch.no_grad():
            probe_ids = torch.tensor([[0, 1, 2], [0, 1, 3]], device=model.device)
            hidden_state_nlc = model.eval().base_model(input_ids=probe_ids).last_hidden_state[:, :2]
        refuse(
            {
                f"The critic '{place}' knows {embedding_count} token ids, which are too few for the policy's tokenizer "
                f"with {tokenizer_size} ids. Use a critic of the policy's tokenizer.": embedding_count < tokenizer_size,
                f"The critic '{place}' ({type(model).__name__}) sees later tokens when it values a token. So its values "
                "would give away what the policy writes next. Use a model that reads forwards only.": bool(
                    (hidden_state_nlc[0] - hidden_state_nlc[1]).abs().max() > 1e-4 * hidden_state_nlc.abs().max()
                ),
            },
            DataError,
        )
        return ValueModel(model, names, config)

    def forward(self, rows: Sequences) -> Tensor:
        """Return the value head's output before each token and after the last. Shape (N, T+1, S[, bins])."""
        model_args: dict[str, Any] = {"use_cache": False} if "use_cache" in signature(self.model.forward).parameters else {}
        model_args |= positions(self.model, rows.attention_nl)
        logits_nlc = self.model(input_ids=rows.ids_nl, attention_mask=rows.attention_nl, **model_args).logits
        head_shape = () if self.config.head == "scalar" else (self.config.bins,)
        return logits_nlc[:, -rows.width - 1 :].float().unflatten(-1, (len(self.names), *head_shape))

    def value(self, output_nts: Tensor) -> Float[Tensor, "n t s"]:
        """Turn the output of the value head into values. It may be a distribution over bins."""
        if self.config.head == "scalar":
            return output_nts
        return categorical_value(output_nts, value_range=self.config.value_range)

    def loss(self, output_nt: Tensor, target_nt: Tensor, mask_nt: Tensor, old_value_nt: Tensor) -> Float[Tensor, "n t"]:
        """Return the critic's loss at each token for one kind of value. The loss is 0 at masked tokens."""
        if self.config.head == "hl_gauss":
            return categorical_value_loss(output_nt, target_nt, mask_nt, value_range=self.config.value_range)
        clip_center_nt = None if self.config.value_clip is None else old_value_nt
        return value_loss(output_nt, target_nt, mask_nt, old_value_nt=clip_center_nt, clip=self.config.value_clip)

    def save(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the critic's weights, configuration and the names of its values. `load` and `transformers` can read them."""
        self.model.save_pretrained(str(folder))
        head_settings = {name: getattr(self.config, name) for name in ("head", "bins", "value_range")}
        tokenizer_hash = None if tokenizer is None else fingerprint(tokenizer)
        critic_description = {"values": self.names, **head_settings, "tokenizer": tokenizer_hash}
        (Path(folder) / ABOUT).write_text(json.dumps(critic_description, indent=1) + "\n", encoding="utf-8")


def fingerprint(tokenizer: Any) -> str:
    """Return a short hash of a tokenizer's vocabulary. Tokenizers with the same ids have the same hash."""
    vocabulary_json = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary_json.encode()).hexdigest()[:16]


def _set_head(settings: Any, names: Sequence[str], config: CriticConfig) -> Any:
    """Set the critic's number of outputs in a model's configuration. Remove dropout, because values must not be random."""
    settings.num_labels = len(names) * (1 if config.head == "scalar" else config.bins)
    for name, setting in vars(settings).items():
        if isinstance(setting, float) and "drop" in name:
            setattr(settings, name, 0.0)
    settings.classifier_dropout = 0.0  # some token classifiers default to dropout 0.1
    return settings


@torch.no_grad()
def _zero_head(model: Any) -> None:
    """Set the head's weights to 0, so that all values are equal at first."""
    trunk_parameter_ids = {id(p) for p in model.base_model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trunk_parameter_ids:
            nn.init.zeros_(parameter)


def _check_tokenizer(place: str, saved: Saved | None, tokenizer: Any) -> None:
    """Refuse a critic that was fitted to another tokenizer's ids, if its tokenizer is known."""
    policy_fingerprint = fingerprint(tokenizer)
    critic_fingerprint = None if saved is None else saved.tokenizer
    if critic_fingerprint is None:
        try:
            if not has_file(place, "tokenizer_config.json"):  # AutoTokenizer loads an empty tokenizer if the file is missing
                return
            critic_fingerprint = fingerprint(AutoTokenizer.from_pretrained(place, trust_remote_code=False))
        except Exception:  # a missing tokenizer raises errors of many types
            return
    if policy_fingerprint != critic_fingerprint:
        raise DataError(
            f"The critic '{place}' and the policy have different tokenizers, so the critic would misread token ids. The hashes "
            f"of their vocabularies are {critic_fingerprint} and {policy_fingerprint}. Use a critic of the policy's tokenizer."
        )
