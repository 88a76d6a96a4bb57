"""Token ids to spans: which block every sampled token belongs to, and what each block says."""

from spanwise.segment.census import Census, census
from spanwise.segment.registry import SEGMENTERS, Segmenter, locate
from spanwise.segment.tagged import segment
from spanwise.segment.vocabulary import Vocabulary

__all__ = ["SEGMENTERS", "Census", "Segmenter", "Vocabulary", "census", "locate", "segment"]
