"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import os

from hypothesis import settings

# Two libraries that each start one thread per core make short tests slow, and the suite runs beside other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The suite may run in a container, where a log that is piped into a test would be JSON.
os.environ.setdefault("PAGEWIRE_LOG_FORMAT", "text")

# Time limits per example fail on machines that do something else meanwhile; pytest-timeout bounds the whole test.
settings.register_profile("pagewire", deadline=None, print_blob=True)
settings.load_profile("pagewire")
