"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import os

# Two libraries that each start one thread per core make short tests slow, and the suite runs beside other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
