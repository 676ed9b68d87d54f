"""Loads a model: finds its files, picks the native decoder or the generic path, and exports its tokenizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from kernels.cpu import jit
from kernels.matrix import new_weight
from pagewire.engine import ModelInfo
from pagewire.errors import InvalidArgumentError, violation
from worker_svc.models import sources, tokenizer_files, weights
from worker_svc.models.decoder_config import DecoderConfig, decoder_config
from worker_svc.models.generic import GenericModel
from worker_svc.models.generic_check import check_against_eager
from worker_svc.models.gguf_files import OnFraction, gguf_progress, shared_gguf_parsing
from worker_svc.models.interface import Model
from worker_svc.models.limits import check_quantization, choose_dtype, choose_max_model_len, dtype_name
from worker_svc.models.native import Decoder
from worker_svc.models.quantized_weights import GGUF, new_gguf_weight, new_int8_weight
from worker_svc.models.rope import rope_tables
from worker_svc.models.sources import ModelFiles
from worker_svc.models.warm_up import warm_up

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, float], None]
LOAD_FORMATS = ("", "safetensors", "gguf", "dummy")


@dataclass(slots=True)
class LoadedModel:
    """A model, what it is, and its tokenizer's files by name."""

    model: Model
    info: ModelInfo
    tokenizer_files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that is decided before weights are read."""

    files: ModelFiles
    config: Any
    architecture: str
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    is_dummy: bool
    native: DecoderConfig | None
    quantization: str
    """What the weights are in fact: empty where nothing can be compiled."""


def load_model(
    source: str,
    *,
    revision: str = "",
    dtype: str = "",
    device: str = "cpu",
    quantization: str = "",
    max_model_len: int = 0,
    force_generic: bool = False,
    load_format: str = "",
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Loads an alias, a local Hugging Face directory, a local GGUF file or a hub id.

    Empty dtype: see choose_dtype. quantization: empty (weights of that dtype), "int8", or "gguf", which runs a GGUF
    file's own blocks. max_model_len 0: the model's limit. load_format "dummy" makes random weights, the
    same in every process. on_progress receives a stage for humans and the part done, 0 to 1.
    Raises NotFoundError, UnavailableError (hub out of reach) and InvalidArgumentError (broken files; an architecture,
    type or quantization that is not supported; the field is named).
    """
    progress = on_progress or (lambda stage, fraction: None)
    with _quiet_transformers(), shared_gguf_parsing():
        progress("finding the model", 0.0)
        plan = _plan(source, revision, dtype, device, quantization, max_model_len, force_generic, load_format)
        stage = f"loading {plan.architecture} in {dtype_name(plan.dtype)}"

        def on_fraction(fraction: float) -> None:
            progress(stage, 0.05 + 0.85 * fraction)

        on_fraction(0.0)
        model = _native(plan, plan.native, on_fraction) if plan.native else _generic(plan, on_fraction)
        progress("compiling the CPU kernels, once per version of them", 0.9)
        warm_up(model, f"{plan.architecture} in {dtype_name(plan.dtype)} {plan.quantization}".rstrip())
        progress("exporting the tokenizer", 0.95)
        loaded = _describe(plan, model)
    progress("ready", 1.0)
    return loaded


def _plan(
    source: str,
    revision: str,
    dtype: str,
    device: str,
    quantization: str,
    max_model_len: int,
    force_generic: bool,
    load_format: str,
) -> _Plan:
    if load_format not in LOAD_FORMATS:
        known = ", ".join(filter(None, LOAD_FORMATS))
        raise InvalidArgumentError([violation("load_format", load_format, f"must be empty or one of {known}")])
    files = sources.locate(source, revision)
    is_dummy = load_format == "dummy"
    if not is_dummy:
        weights.check_has_weights(files)
        found = "gguf" if files.gguf_file else "safetensors"
        if load_format and load_format != found:
            raise InvalidArgumentError([violation("load_format", load_format, f"{files.name} has {found} weights")])
    config = sources.read_config(files)
    architecture = sources.architecture_of(config)
    torch_device = torch.device(device)
    native, is_gguf = None if force_generic else decoder_config(architecture, config), bool(files.gguf_file)
    check_quantization(
        quantization,
        config,
        architecture,
        is_native=native is not None,
        is_gguf=is_gguf and not is_dummy,
        device=torch_device,
    )
    if quantization and (problem := jit.unavailable()) is not None:
        jit.warn_once(problem)
        quantization = ""
    return _Plan(
        files=files,
        config=config,
        architecture=architecture,
        dtype=choose_dtype(dtype, config, device=torch_device, is_gguf=is_gguf, is_quantized=bool(quantization)),
        device=torch_device,
        max_model_len=choose_max_model_len(max_model_len, config),
        is_dummy=is_dummy,
        native=native,
        quantization=quantization,
    )


def _native(plan: _Plan, config: DecoderConfig, on_fraction: OnFraction) -> Decoder:
    tables = rope_tables(plan.config, plan.max_model_len, plan.dtype)
    keeps_blocks = plan.quantization == GGUF
    make = new_gguf_weight if keeps_blocks else new_int8_weight if plan.quantization else new_weight
    decoder = Decoder(config, tables, dtype=plan.dtype, device=plan.device, new_weight=make)
    views = decoder.checkpoint_views()
    if plan.is_dummy:
        weights.fill_with_random(views.items())
    else:
        weights.fill_from_files(
            views,
            plan.files,
            plan.config,
            is_tied=config.is_tied,
            on_fraction=on_fraction,
            keep_blocks=keeps_blocks,
            take_other=decoder.take_kv_scale,
        )
    return decoder


def _generic(plan: _Plan, on_fraction: OnFraction) -> GenericModel:
    try:
        if plan.is_dummy:
            model = AutoModelForCausalLM.from_config(plan.config, dtype=plan.dtype)
            named = {id(p): (name, p) for name, p in model.named_parameters()}
            weights.fill_with_random((name, p.data) for name, p in named.values())
        else:
            model = _read_generic(plan, on_fraction)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a configuration or file that is wrong fails anywhere in transformers' code
        problem = f"transformers can't load it: {type(error).__name__}: {error}"
        raise InvalidArgumentError(
            [violation("model", str(plan.files.path), problem)], reason="BAD_MODEL_FILES"
        ) from error
    generic = GenericModel(model.to(plan.device), plan.architecture)
    check_against_eager(generic, plan.architecture)
    return generic


def _read_generic(plan: _Plan, on_fraction: OnFraction) -> Any:
    with gguf_progress(on_fraction):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            plan.files.directory, dtype=plan.dtype, output_loading_info=True, **plan.files.load_args()
        )
    model, report = loaded
    # transformers fills what is missing with random numbers and says so in a log line only.
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := report.get(problem):
            raise ValueError(f"{problem.replace('_', ' ')}: {min(str(key) for key in found)} and {len(found) - 1} more")
    if unused := report.get("unexpected_keys"):
        # Many models ship what they don't need, so this can't be an error; it may be a layer, so it isn't silent.
        logger.warning("%s: %d tensors are not used, such as %s", plan.files.name, len(unused), min(unused))
    return model


def _describe(plan: _Plan, model: Model) -> LoadedModel:
    tokenizer = tokenizer_files.load_tokenizer(plan.files)
    generation = tokenizer_files.read_generation_config(plan.files, plan.config)
    exported = tokenizer_files.export_tokenizer(tokenizer) if tokenizer is not None else {}
    exported["generation_config.json"] = tokenizer_files.export_generation_config(generation)
    every = model.weights() if isinstance(model, Decoder) else model.module.parameters()  # type: ignore[attr-defined]
    num_parameters, num_bytes = weights.count(every)
    paths = [] if plan.is_dummy else plan.files.weight_paths()
    info = ModelInfo(
        model=plan.files.name,
        architecture=plan.architecture,
        dtype=dtype_name(plan.dtype),
        kv_cache_dtype=dtype_name(plan.dtype),
        tokenizer_sha256=tokenizer_files.files_sha256(exported),
        weights_id=sources.weights_id(plan.config, paths),
        vocab_size=model.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=tokenizer_files.eos_token_ids(generation, plan.config, tokenizer),
        revision=plan.files.revision,
        num_parameters=num_parameters,
        weights_bytes=num_bytes,
        num_layers=len(model.kv_cache_specs()),
        is_native=isinstance(model, Decoder),
        quantization=plan.quantization,
    )
    return LoadedModel(model, info, exported)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice on standard error: our caller reports progress."""
    theirs = transformers.utils.logging
    level, has_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if has_bars:
            theirs.enable_progress_bar()
