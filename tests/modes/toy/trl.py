"""`Brevity` in TRL: it looks at the last token of every pass and adds a term to the loss."""

import torch

from spanwise.modes.parts import TrlPart


class BrevityInTrl(TrlPart):
    last_b = None

    def forward(self, score, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        result = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        last_b = attention_mask[:, -logits_to_keep:].sum(dim=1) - 1
        self.last_b = result[0].gather(1, last_b[:, None])[:, 0]
        return result

    def loss(self, inputs):
        last_b = self.last_b.detach()
        metrics = {"brevity/last": float(last_b.mean()), "brevity/sure": float((last_b > -100).float().mean())}
        return -self.mode.pull * self.last_b.mean(), metrics

    @property
    def files(self):
        return {"brevity.txt": f"{self.mode.bonus}\n"}

    def restore(self, folder):
        self.restored = torch.tensor(float((folder / "brevity.txt").read_text()))
