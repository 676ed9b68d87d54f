"""SamplingParams on the wire: plain Python to pagewire.v1 and back."""

from __future__ import annotations

from typing import Any

from pagewire.errors import InvalidArgumentError, violation
from pagewire.sampling import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    SamplingParams,
    StructuredOutputs,
)
from pagewire.v1 import types_pb2

_SCALARS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "detokenize",
    "skip_reading_prefix_cache",
)
_MOST_ENTRIES = {
    # No vocabulary is larger; SamplingParams.violations knows the model's own size.
    "allowed_token_ids": 2**20,
    "logit_bias": 2**18,
    "bad_words": MAX_TOKEN_LIST,
    "bad_words_token_ids": MAX_TOKEN_LIST,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_TOKEN_LIST,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
}
_LISTS = ("allowed_token_ids", "bad_words", "stop", "stop_token_ids", "logprob_token_ids")


def sampling_params_from_proto(proto: types_pb2.SamplingParams, path: str = "sampling_params") -> SamplingParams:
    """The parameters of a message; what is unset takes its default. Values are checked by SamplingParams.violations.

    Raises InvalidArgumentError for lists so long that reading them would hold up everybody else.
    Floats are binary32 on the wire: 0.1 comes back as 0.10000000149.
    """
    _check_lengths(proto, path)
    values: dict[str, Any] = {name: getattr(proto, name) for name in _SCALARS if proto.HasField(name)}  # type: ignore[arg-type]
    for name in _LISTS:
        values[name] = tuple(getattr(proto, name))
    return SamplingParams(
        **values,
        logit_bias=dict(proto.logit_bias),
        bad_words_token_ids=tuple(tuple(sequence.ids) for sequence in proto.bad_words_token_ids),
        structured_outputs=_structured_from_proto(proto),
    )


def _check_lengths(proto: types_pb2.SamplingParams, path: str) -> None:
    lengths = [(name, len(getattr(proto, name)), most) for name, most in _MOST_ENTRIES.items()]
    if len(proto.bad_words_token_ids) <= MAX_TOKEN_LIST:
        lengths += [
            (f"bad_words_token_ids[{i}].ids", len(sequence.ids), MAX_TOKEN_LIST)
            for i, sequence in enumerate(proto.bad_words_token_ids)
        ]
    found = [
        violation(f"{path}.{name}", f"{length} entries", f"at most {most}")
        for name, length, most in lengths
        if length > most
    ]
    if found:
        raise InvalidArgumentError(found)


def _structured_from_proto(proto: types_pb2.SamplingParams) -> StructuredOutputs | None:
    if not proto.HasField("structured_outputs"):
        return None
    kind = proto.structured_outputs.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return StructuredOutputs(kind) if proto.structured_outputs.json_object else None
    if kind == "choices":
        return StructuredOutputs(kind, choices=tuple(proto.structured_outputs.choices.values))
    return StructuredOutputs(kind, spec=getattr(proto.structured_outputs, kind))


def sampling_params_to_proto(params: SamplingParams, path: str = "sampling_params") -> types_pb2.SamplingParams:
    """The message with every scalar set that is not None.

    Raises InvalidArgumentError, with the field's path under `path`, where a value does not fit the message's type.
    """
    proto = types_pb2.SamplingParams()

    def put(name: str, limit: str, assign: Any) -> None:
        try:
            assign()
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidArgumentError([violation(f"{path}.{name}", getattr(params, name), limit)]) from error

    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            put(name, _type_limit(name), lambda name=name, value=value: setattr(proto, name, value))
    for name in _LISTS:
        limit = "must be a sequence of " + ("strings" if name in ("stop", "bad_words") else "32-bit integers")
        put(name, limit, lambda name=name: getattr(proto, name).extend(_sequence(getattr(params, name))))
    put("logit_bias", "must map token ids to numbers", lambda: proto.logit_bias.update(params.logit_bias))
    for sequence in params.bad_words_token_ids:
        put("bad_words_token_ids", "must be sequences of 32-bit integers", lambda ids=sequence: _add_ids(proto, ids))
    if params.structured_outputs is not None:
        put("structured_outputs", "must name a known kind", lambda: _structured_to_proto(params, proto))
    return proto


def _sequence(value: Any) -> Any:
    # "abc" as a list of stop strings would be three of them.
    if isinstance(value, str | bytes):
        raise TypeError("a single string is not a sequence of strings")
    return value


def _add_ids(proto: types_pb2.SamplingParams, ids: Any) -> None:
    proto.bad_words_token_ids.add(ids=ids)


def _type_limit(name: str) -> str:
    field = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    return {
        field.TYPE_UINT32: "must be an unsigned 32-bit integer",
        field.TYPE_UINT64: "must be an unsigned 64-bit integer",
        field.TYPE_INT32: "must be a 32-bit integer",
        field.TYPE_FLOAT: "must be a number",
        field.TYPE_BOOL: "must be true or false",
    }[field.type]


def _structured_to_proto(params: SamplingParams, proto: types_pb2.SamplingParams) -> None:
    given = params.structured_outputs
    assert given is not None
    if given.kind == "choices":
        proto.structured_outputs.choices.values.extend(_sequence(given.choices))
    elif given.kind == "json_object":
        proto.structured_outputs.json_object = True
    else:
        setattr(proto.structured_outputs, given.kind, given.spec)
