"""Token ids to spans: which block every sampled token belongs to, and what each block says."""

from spanwise.segment.tagged import segment
from spanwise.segment.vocabulary import Vocabulary

__all__ = ["Vocabulary", "segment"]
