"""Messages that two services need, to plain Python and back: logprobs, models, stats, traces, adapters, tokenizers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping

from pagewire.columns import pack_float32, pack_int32, unpack_float32, unpack_int32
from pagewire.engine import Adapter, CoreStats, LogprobColumns, ModelInfo, TraceContext
from pagewire.errors import InternalError, InvalidArgumentError, violation
from pagewire.stats import CoreDetail
from pagewire.stats_wire import fill, read
from pagewire.v1 import core_pb2, types_pb2

PROTOCOL_VERSION = 1
"""Minor version of pagewire.v1 that this build speaks."""


def protocol_versions() -> types_pb2.ProtocolVersions:
    """What this build speaks."""
    return types_pb2.ProtocolVersions(min=PROTOCOL_VERSION, max=PROTOCOL_VERSION)


TOKENIZER_CHUNK_BYTES = 256 * 2**10

_DATA_TYPES = {
    "": types_pb2.DATA_TYPE_UNSPECIFIED,
    "float32": types_pb2.DATA_TYPE_FLOAT32,
    "bfloat16": types_pb2.DATA_TYPE_BFLOAT16,
    "float16": types_pb2.DATA_TYPE_FLOAT16,
    "float8_e4m3": types_pb2.DATA_TYPE_FLOAT8_E4M3,
    "int8": types_pb2.DATA_TYPE_INT8,
}
_DATA_TYPE_NAMES = {value: name for name, value in _DATA_TYPES.items()}


def dtype_to_proto(name: str, path: str = "dtype") -> types_pb2.DataType.ValueType:
    """The enum of `float32`, `bfloat16`, ...; empty is unspecified. Raises InvalidArgumentError naming `path`."""
    if name not in _DATA_TYPES:
        known = ", ".join(filter(None, _DATA_TYPES))
        raise InvalidArgumentError([violation(path, name, f"must be one of {known}, or empty")])
    return _DATA_TYPES[name]


def dtype_from_proto(value: types_pb2.DataType.ValueType, path: str = "dtype") -> str:
    """The name of a DataType; unspecified is empty. Raises InvalidArgumentError naming `path` for unknown numbers."""
    if value not in _DATA_TYPE_NAMES:
        raise InvalidArgumentError([violation(path, value, "must be a known DataType")])
    return _DATA_TYPE_NAMES[value]


def logprob_columns_to_proto(columns: LogprobColumns) -> types_pb2.LogprobColumns:
    """Packs the columns."""
    return types_pb2.LogprobColumns(
        num_candidates=columns.token_ids.shape[1] if columns.token_ids.ndim == 2 else 0,
        token_ids=pack_int32(columns.token_ids.reshape(-1)),
        logprobs=pack_float32(columns.logprobs.reshape(-1)),
        ranks=pack_int32(columns.ranks),
    )


def logprob_columns_from_proto(proto: types_pb2.LogprobColumns, path: str = "logprobs") -> LogprobColumns:
    """Views of the packed columns. Raises InvalidArgumentError where their lengths disagree."""
    token_ids = unpack_int32(proto.token_ids, f"{path}.token_ids")
    logprobs = unpack_float32(proto.logprobs, f"{path}.logprobs")
    ranks = unpack_int32(proto.ranks, f"{path}.ranks")
    expected = len(ranks) * proto.num_candidates
    for name, found in (("token_ids", len(token_ids)), ("logprobs", len(logprobs))):
        if found != expected:
            limit = f"must have {len(ranks)} ranks x {proto.num_candidates} candidates = {expected} entries"
            raise InvalidArgumentError([violation(f"{path}.{name}", f"{found} entries", limit)])
    shape = (len(ranks), proto.num_candidates)
    return LogprobColumns(token_ids.reshape(shape), logprobs.reshape(shape), ranks)


def model_info_to_proto(info: ModelInfo) -> types_pb2.ModelInfo:
    """The message of a model's description."""
    return types_pb2.ModelInfo(
        fingerprint=types_pb2.ModelFingerprint(
            model=info.model,
            architecture=info.architecture,
            dtype=dtype_to_proto(info.dtype),
            kv_cache_dtype=dtype_to_proto(info.kv_cache_dtype, "kv_cache_dtype"),
            tokenizer_sha256=info.tokenizer_sha256,
            weights_id=info.weights_id,
            revision=info.revision,
            quantization=info.quantization,
        ),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        is_generative=info.is_generative,
        is_pooling=info.is_pooling,
        num_parameters=info.num_parameters,
        weights_bytes=info.weights_bytes,
        num_layers=info.num_layers,
        is_native=info.is_native,
    )


def model_info_from_proto(proto: types_pb2.ModelInfo) -> ModelInfo:
    """The description that a message holds."""
    fingerprint = proto.fingerprint
    return ModelInfo(
        model=fingerprint.model,
        architecture=fingerprint.architecture,
        dtype=dtype_from_proto(fingerprint.dtype),
        kv_cache_dtype=dtype_from_proto(fingerprint.kv_cache_dtype, "kv_cache_dtype"),
        tokenizer_sha256=fingerprint.tokenizer_sha256,
        weights_id=fingerprint.weights_id,
        vocab_size=proto.vocab_size,
        max_model_len=proto.max_model_len,
        eos_token_ids=tuple(proto.eos_token_ids),
        revision=fingerprint.revision,
        quantization=fingerprint.quantization,
        is_generative=proto.is_generative,
        is_pooling=proto.is_pooling,
        num_parameters=proto.num_parameters,
        weights_bytes=proto.weights_bytes,
        num_layers=proto.num_layers,
        is_native=proto.is_native,
    )


_CORE_NUMBERS = [field.name for field in dataclasses.fields(CoreStats) if field.name != "detail"]


def core_stats_to_proto(stats: CoreStats) -> core_pb2.CoreStats:
    """The message of a core's numbers."""
    proto = core_pb2.CoreStats(**{name: getattr(stats, name) for name in _CORE_NUMBERS})
    if stats.detail is not None:
        fill(proto.detail, stats.detail)
    return proto


def core_stats_from_proto(proto: core_pb2.CoreStats) -> CoreStats:
    """The numbers that a message holds."""
    stats = CoreStats(**{name: getattr(proto, name) for name in _CORE_NUMBERS})
    if proto.HasField("detail"):
        stats.detail = read(CoreDetail, proto.detail)
    return stats


def trace_context_to_proto(context: TraceContext | None) -> types_pb2.TraceContext | None:
    """The message, or None (an unset field) where there is no trace."""
    if context is None or not context.traceparent:
        return None
    return types_pb2.TraceContext(traceparent=context.traceparent, tracestate=context.tracestate)


def trace_context_from_proto(proto: types_pb2.TraceContext) -> TraceContext | None:
    """The trace that a message names, or None."""
    return TraceContext(proto.traceparent, proto.tracestate) if proto.traceparent else None


def adapter_to_proto(adapter: Adapter | None) -> types_pb2.AdapterRef | None:
    """The message, or None (an unset field) where there is no adapter."""
    return None if adapter is None else types_pb2.AdapterRef(name=adapter.name, version=adapter.version)


def adapter_from_proto(proto: types_pb2.AdapterRef) -> Adapter | None:
    """The adapter that a message names, or None."""
    return Adapter(proto.name, proto.version) if proto.name else None


def tokenizer_sha256(files: Mapping[str, bytes]) -> str:
    """The identity of a tokenizer: sha256, hexadecimal, over names and contents in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def tokenizer_chunks(files: Mapping[str, bytes]) -> Iterator[types_pb2.TokenizerChunk]:
    """The files in pieces of 256 KiB, one file after another; the last piece of each carries its sha256."""
    for name, data in files.items():
        for start in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
            is_last = start + TOKENIZER_CHUNK_BYTES >= len(data)
            yield types_pb2.TokenizerChunk(
                name=name,
                data=data[start : start + TOKENIZER_CHUNK_BYTES],
                is_last=is_last,
                sha256=hashlib.sha256(data).hexdigest() if is_last else "",
            )


class TokenizerAssembler:
    """Puts the pieces together again."""

    def __init__(self, max_bytes: int = 512 * 2**20) -> None:
        """`max_bytes` bounds all files together."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: dict[str, bytes] = {}
        self._open_name = ""
        self._open = bytearray()

    def add(self, chunk: types_pb2.TokenizerChunk) -> None:
        """Takes the next piece. Raises InternalError where it is out of order, damaged or too much."""
        if not chunk.name or "/" in chunk.name or "\\" in chunk.name or chunk.name in self._files:
            raise InternalError(f"tokenizer file {chunk.name!r}: not a plain name, or sent twice")
        if self._open_name not in ("", chunk.name):
            raise InternalError(f"tokenizer file {chunk.name!r} begins before {self._open_name!r} has ended")
        self._num_bytes += len(chunk.data)
        if self._num_bytes > self._max_bytes:
            raise InternalError(f"tokenizer files: more than {self._max_bytes} bytes")
        self._open_name = chunk.name
        self._open += chunk.data
        if chunk.is_last:
            found = hashlib.sha256(self._open).hexdigest()
            if found != chunk.sha256:
                raise InternalError(f"tokenizer file {chunk.name!r}: sha256 is {found}, announced was {chunk.sha256}")
            self._files[chunk.name] = bytes(self._open)
            self._open_name, self._open = "", bytearray()

    def files(self) -> dict[str, bytes]:
        """All files by name. Raises InternalError where there are none, or one is not complete."""
        if self._open_name:
            raise InternalError(f"tokenizer file {self._open_name!r} is incomplete")
        if not self._files:
            raise InternalError("no tokenizer files came")
        return dict(self._files)
