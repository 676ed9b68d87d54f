"""Model implementations: native decoders, the generic path, and loading."""

# First, so that nothing here can import transformers before it is told about our `kernels`.
from worker_svc.models import transformers_guard as transformers_guard
