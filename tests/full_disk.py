"""A disk that is full, on any machine: no file of this process grows beyond some bytes (RLIMIT_FSIZE); writers see EFBIG."""

import resource
import signal
from contextlib import contextmanager


@contextmanager
def full_disk(bytes_left=0):
    """No file grows beyond `bytes_left` inside; the signal that would end the process is an error instead, as with a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
