"""Token ids to spans: which block every sampled token belongs to, and what each block says."""

from spanwise.segment import json_fields, parse  # noqa: F401 - each puts its segmenter into the registry
from spanwise.segment.census import Census, census
from spanwise.segment.claims import Claim, Found, Sample, numbered
from spanwise.segment.place import segment
from spanwise.segment.registry import SEGMENTERS, Segmenter
from spanwise.segment.vocabulary import Vocabulary

__all__ = ["SEGMENTERS", "Census", "Claim", "Found", "Sample", "Segmenter", "Vocabulary", "census", "numbered", "segment"]
