"""Find the block of every sampled token, and the text of each block."""

from spanwise.segment import channels, delimiters, json_fields, markdown, units  # noqa: F401 - each registers its own
from spanwise.segment.census import census
from spanwise.segment.claims import SEGMENTERS, Claim, Found, Sample, Segmenter
from spanwise.segment.place import find_blocks
from spanwise.segment.vocabulary import Vocabulary

__all__ = ["SEGMENTERS", "Claim", "Found", "Sample", "Segmenter", "Vocabulary", "census", "find_blocks"]
