"""Ctrl-C while modules are imported. Imports the standard library alone."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def leave_at_interrupt() -> Iterator[None]:
    """Within the `with` block Ctrl-C ends the process at once, with status 130 and no word.

    For imports alone: there is nothing to clean up yet, and a KeyboardInterrupt within the import
    of a large library may come out as any other error, or not at all. Where Ctrl-C is ignored, or
    is a Python program's own concern, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not main_thread:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
