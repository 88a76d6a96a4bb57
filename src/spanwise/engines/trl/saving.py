"""`Saving`: TRL's trainer whose checkpoints are whole, or not gone on from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers.trainer_utils import rotate_checkpoints
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.engines.checkpoints import MANIFEST, read_manifest, restore_estimator, whole_checkpoint, write_manifest
from spanwise.engines.trl.keeping import Keeping
from spanwise.errors import DataError
from spanwise.modes.parts import TrlPart
from spanwise.scheme import Scheme


class Saving(GRPOTrainer):
    """TRL's `GRPOTrainer` whose checkpoints hold what modes and a method remember, and say themselves that they are whole.

    Attributes:
        scheme: the rule of credit, whose method may remember earlier batches.
        parts: what each mode does here, by its name (`spanwise.modes`).
        keeping: writes the run folder, where it is asked for.
    """

    scheme: Scheme
    parts: Mapping[str, TrlPart]
    keeping: Keeping | None = None
    # TRL's annotation allows a None that a trainer never has.
    args: Any
    processing_class: Any

    @property
    def _text_tokenizer(self) -> Any:
        # A processor holds the tokenizer of a multimodal model.
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """TRL's training, whose run folder is complete however it ends. True goes on from the newest whole checkpoint."""
        place = whole_checkpoint(self.args, resume_from_checkpoint)
        keeping = self.keeping if self.accelerator.is_main_process else None
        try:
            with nullcontext() if keeping is None else keeping.record.running():
                return super().train(place, *args, **options)
        except UnpicklingError as error:
            if place is None:
                raise
            raise DataError(f"'{place}' holds more than numbers, which is not read: {str(error).splitlines()[0]}") from error

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's checkpoint, then the list of its files, which says that it is whole; only then older ones go."""
        folder = Path(self._get_output_dir(trial=trial))
        place = folder / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (place / MANIFEST).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            torch.save(self.args, place / "training_args.bin")  # with the limit
            resumable, processes = not self.args.save_only_model, self.accelerator.num_processes
            entry: Any = self.scheme.entry  # of a method that may remember earlier batches
            state = entry.estimator.state_dict() if entry.stateful else None
            write_manifest(place, processes=processes, resumable=resumable, estimator=state)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(folder), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        for part in self.parts.values() if self.args.should_save else ():
            part.save(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        for part in self.parts.values():
            part.restore(Path(checkpoint))
        if self.scheme.entry.stateful:
            restore_estimator(self.scheme, read_manifest(Path(checkpoint))["estimator"], Path(checkpoint))
