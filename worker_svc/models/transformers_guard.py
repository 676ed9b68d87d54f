"""Keeps transformers from taking our package `kernels` for the Hugging Face package of that name.

transformers looks for a module called `kernels` and judges it by the version of whatever distribution provides it. Ours
is found that way, and a version of Pagewire that falls into the accepted range would make transformers import names
that are not there. As long as our package has that import name the other one can't be imported at all, so the answer
is always no.
"""

from __future__ import annotations

from typing import Any

import transformers.utils
import transformers.utils.import_utils


def _is_kernels_available(*_args: Any, **_kwargs: Any) -> bool:
    return False


for _module in (transformers.utils, transformers.utils.import_utils):
    vars(_module)["is_kernels_available"] = _is_kernels_available
