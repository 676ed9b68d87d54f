"""Makes the helpers of this folder importable under --import-mode=importlib as well."""

import sys
from pathlib import Path

from hypothesis import Phase, settings

sys.path.insert(0, str(Path(__file__).parent))

# For runs that only ask whether the tests fail.
settings.register_profile("no_shrink", phases=[Phase.explicit, Phase.generate], derandomize=True)
