"""`ValueModel`: a token classifier that predicts before every token the worth of the rest; saved and loaded."""

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

from spanwise.errors import DataError, RecipeError, refuse
from spanwise.losses import categorical_value, categorical_value_loss, value_loss
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.sequences import Sequences, positions

#: The file that describes a saved critic, beside its weights.
ABOUT = "critic.json"


class Saved(NamedTuple):
    """The description of a saved critic: the names of its values, its head, and its tokenizer (None: not known)."""

    names: list[str]
    config: CriticConfig
    tokenizer: str | None

    @staticmethod
    def of(place: str | Path) -> Saved | None:
        """Read the description in a folder; None if there is none, as with any other token classifier."""
        file = Path(place) / ABOUT
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            bins = {} if about["head"] == "scalar" else {"bins": about["bins"], "value_range": tuple(about["value_range"])}
            return Saved(list(about["values"]), CriticConfig(head=about["head"], **bins), about.get("tokenizer"))
        except OSError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"'{file}' is damaged: {error!r}.") from error


class ValueModel(nn.Module):
    """A model of the worth of the rest of a completion, before each of its tokens: one value per stream."""

    def __init__(self, model: Any, names: Sequence[str], config: CriticConfig) -> None:
        super().__init__()
        self.model, self.names, self.config = model, tuple(names), config

    @staticmethod
    def of_policy(policy: Any, names: Sequence[str], config: CriticConfig) -> ValueModel:
        """Copy a policy's trunk, adapters merged, with a head of zeros; in float32, on the policy's device."""
        merged = deepcopy(policy).merge_and_unload() if hasattr(policy, "merge_and_unload") else policy
        settings = _settled(deepcopy(merged.config), names, config)
        try:
            model = AutoModelForTokenClassification.from_config(settings, dtype=torch.float32)
        except ValueError as error:
            raise RecipeError(
                f"There is no token classifier for a {type(merged).__name__}, so its trunk cannot be copied as a critic. Name one "
                "with critic: {model: NAME}."
            ) from error
        model.base_model.load_state_dict({name: value.float() for name, value in merged.base_model.state_dict().items()})
        _zero_head(model)
        return ValueModel(model.to(merged.device), names, config)

    @staticmethod
    def load(place: str, names: Sequence[str], config: CriticConfig, tokenizer: Any = None) -> ValueModel:
        """Load a saved critic, or any token classifier; a head of another size is replaced by one of zeros."""
        saved = Saved.of(place)
        if saved is not None:
            faults = {
                f"The critic '{place}' gives {len(saved.names)} values ({', '.join(saved.names)}) and this recipe needs "
                f"{len(names)} ({', '.join(names)}). Use a critic of the same objectives and the same values.": (
                    list(names) != saved.names
                )
            }
            for name in ("head", "bins", "value_range"):
                value, asked = getattr(saved.config, name), getattr(config, name)
                written = list(value) if isinstance(value, tuple) else value
                faults[
                    f"The critic '{place}' has the {name} {value} and the recipe says {asked}; write critic: {{{name}: {written}}}."
                ] = value != asked
            refuse(faults)
        if tokenizer is not None:
            _check_tokenizer(place, saved, tokenizer)
        try:
            settings = _settled(AutoConfig.from_pretrained(place, trust_remote_code=False), names, config)
            model, report = AutoModelForTokenClassification.from_pretrained(
                place, config=settings, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32,
                trust_remote_code=False,
            )  # fmt: skip
        except Exception as error:  # transformers, safetensors and json each raise their own type
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(f"The critic '{place}' cannot be read: {reason}") from error
        if report["missing_keys"] or report["mismatched_keys"]:
            _zero_head(model)
        size, needed = model.get_input_embeddings().num_embeddings, 0 if tokenizer is None else len(tokenizer)
        with torch.no_grad():
            ids = torch.tensor([[0, 1, 2], [0, 1, 3]], device=model.device)
            state_nlc = model.eval().base_model(input_ids=ids).last_hidden_state[:, :2]
        refuse(
            {
                f"The critic '{place}' knows {size} token ids and the policy's tokenizer has {needed}, so they do not fit. "
                "Use a critic of the policy's tokenizer.": size < needed,
                f"The critic '{place}' ({type(model).__name__}) reads the tokens that come after the one it values, so its values "
                "would give away what the policy is about to write. Use a model that reads forwards only.": bool(
                    (state_nlc[0] - state_nlc[1]).abs().max() > 1e-4 * state_nlc.abs().max()
                ),
            },
            DataError,
        )
        return ValueModel(model, names, config)

    def forward(self, rows: Sequences) -> Tensor:
        """Return the head's output before each of the T tokens and after the last column: (N, T + 1, S), or (..., bins)."""
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in signature(self.model.forward).parameters else {}
        options |= positions(self.model, rows.attention_nl)
        logits_nlc = self.model(input_ids=rows.ids_nl, attention_mask=rows.attention_nl, **options).logits
        output_ntc = logits_nlc[:, -rows.width - 1 :].float()
        bins = () if self.config.head == "scalar" else (self.config.bins,)
        return output_ntc.unflatten(-1, (len(self.names), *bins))

    def value(self, output_nts: Tensor) -> Float[Tensor, "n t s"]:
        """Turn the head's output into values."""
        if self.config.head == "scalar":
            return output_nts
        return categorical_value(output_nts, value_range=self.config.value_range)

    def loss(self, said_nt: Tensor, target_nt: Tensor, mask_nt: Tensor, old_value_nt: Tensor) -> Float[Tensor, "n t"]:
        """Return the loss of one stream per token, 0 at masked tokens."""
        if self.config.head == "hl_gauss":
            return categorical_value_loss(said_nt, target_nt, mask_nt, value_range=self.config.value_range)
        old = None if self.config.value_clip is None else old_value_nt
        return value_loss(said_nt, target_nt, mask_nt, old_value_nt=old, clip=self.config.value_clip)

    def save(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write weights, configuration and the names of the values; `load` reads them, and so does `transformers`."""
        self.model.save_pretrained(str(folder))
        about = {
            "values": list(self.names),
            "head": self.config.head,
            "bins": self.config.bins,
            "value_range": list(self.config.value_range),
            "tokenizer": None if tokenizer is None else fingerprint(tokenizer),
        }
        (Path(folder) / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def fingerprint(tokenizer: Any) -> str:
    """Return a short hash of a tokenizer's vocabulary: two tokenizers with the same ids have the same."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _settled(settings: Any, names: Sequence[str], config: CriticConfig) -> Any:
    """Return a trunk's settings with the critic's head and without dropout, as values must not be random."""
    settings.num_labels = len(names) * (1 if config.head == "scalar" else config.bins)
    for name, share in vars(settings).items():
        if isinstance(share, float) and "drop" in name:
            setattr(settings, name, 0.0)
    settings.classifier_dropout = 0.0  # the default of transformers is .1
    return settings


@torch.no_grad()
def _zero_head(model: Any) -> None:
    """Set the head so that every value starts the same."""
    trunk = {id(p) for p in model.base_model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trunk:
            nn.init.zeros_(parameter)


def _check_tokenizer(place: str, saved: Saved | None, tokenizer: Any) -> None:
    """Refuse a critic that was fitted to the ids of another tokenizer, if it records its tokenizer."""
    own, theirs = fingerprint(tokenizer), None if saved is None else saved.tokenizer
    if theirs is None:
        try:
            if not has_file(place, "tokenizer_config.json"):  # transformers would invent an empty tokenizer
                return
            theirs = fingerprint(AutoTokenizer.from_pretrained(place, trust_remote_code=False))
        except Exception:  # a missing tokenizer raises many types; then the number of ids is compared
            return
    if own != theirs:
        raise DataError(
            f"The critic '{place}' was fitted to the ids of another tokenizer than the policy's ({theirs} and {own}), so it would "
            "read other words. Use a critic of the policy's tokenizer."
        )
