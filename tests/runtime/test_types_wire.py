"""Plain Python to messages and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine import Adapter, CoreStats, LogprobColumns, ModelInfo, TraceContext
from pagewire.errors import InternalError, InvalidArgumentError
from pagewire.sampling import SamplingParams, StructuredOutputs
from pagewire.sampling_wire import sampling_params_from_proto, sampling_params_to_proto
from pagewire.types_wire import (
    TokenizerAssembler,
    adapter_from_proto,
    adapter_to_proto,
    core_stats_from_proto,
    core_stats_to_proto,
    dtype_from_proto,
    dtype_to_proto,
    logprob_columns_from_proto,
    logprob_columns_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    tokenizer_chunks,
    tokenizer_sha256,
    trace_context_from_proto,
    trace_context_to_proto,
)
from pagewire.v1 import core_pb2, types_pb2

token_id = st.integers(0, 2**31 - 1)
ids = st.lists(token_id, max_size=5).map(tuple)
texts = st.lists(st.text(max_size=8), max_size=3).map(tuple)
number = st.floats(width=32, allow_nan=False)
maybe_count = st.none() | st.integers(-1, 100)
structured = st.none() | st.one_of(
    st.builds(StructuredOutputs, st.sampled_from(["json_schema", "regex", "grammar", "structural_tag"]), st.text()),
    st.just(StructuredOutputs("json_object")),
    st.builds(lambda choices: StructuredOutputs("choices", choices=choices), texts),
)
params = st.builds(
    SamplingParams,
    n=st.integers(0, 2**32 - 1),
    temperature=number,
    top_k=st.integers(-(2**31), 2**31 - 1),
    top_p=number,
    min_p=number,
    repetition_penalty=number,
    presence_penalty=number,
    frequency_penalty=number,
    logit_bias=st.dictionaries(token_id, number, max_size=3),
    allowed_token_ids=ids,
    bad_words=texts,
    bad_words_token_ids=st.lists(ids, max_size=3).map(tuple),
    max_tokens=st.none() | st.integers(0, 2**32 - 1),
    min_tokens=st.integers(0, 2**32 - 1),
    stop=texts,
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logprobs=maybe_count,
    prompt_logprobs=maybe_count,
    logprob_token_ids=ids,
    skip_special_tokens=st.booleans(),
    detokenize=st.booleans(),
    skip_reading_prefix_cache=st.none() | st.booleans(),
    structured_outputs=structured,
)


@given(params)
def test_sampling_params_round_trip(sent):
    wire = types_pb2.SamplingParams.FromString(sampling_params_to_proto(sent).SerializeToString())
    assert sampling_params_from_proto(wire) == sent


def test_unset_means_default_and_zero_is_a_value():
    assert sampling_params_from_proto(types_pb2.SamplingParams()) == SamplingParams()
    found = sampling_params_from_proto(types_pb2.SamplingParams(temperature=0, max_tokens=0, logprobs=0, seed=0))
    assert (found.temperature, found.max_tokens, found.logprobs, found.seed) == (0, 0, 0, 0)


def test_every_field_of_the_message_is_converted():
    """A field added to the proto and forgotten here would be ignored in silence."""
    assert {f.name for f in types_pb2.SamplingParams.DESCRIPTOR.fields} == {
        f.name for f in dataclasses.fields(SamplingParams)
    }


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("top_k", 1.5, "32-bit integer"),
        ("n", -1, "unsigned 32-bit"),
        ("seed", 2**64, "unsigned 64-bit"),
        ("temperature", "hot", "number"),
        ("stop", "abc", "sequence of strings"),
        ("stop_token_ids", (2**31,), "32-bit integers"),
        ("logit_bias", {"a": 1.0}, "map token ids"),
        ("bad_words_token_ids", (("x",),), "32-bit integers"),
        ("structured_outputs", StructuredOutputs("nonsense"), "known kind"),
    ],
)
def test_what_does_not_fit_names_the_field(name, value, limit):
    """Fractional top_k and the like are refused with the field's path, before anything is sent.

    Case: vllm#16529
    """
    with pytest.raises(InvalidArgumentError) as caught:
        sampling_params_to_proto(dataclasses.replace(SamplingParams(), **{name: value}), "requests[3].sampling_params")
    (found,) = caught.value.violations
    assert found.field == f"requests[3].sampling_params.{name}"
    assert limit in found.limit


def test_floats_are_binary32():
    found = sampling_params_from_proto(sampling_params_to_proto(SamplingParams(temperature=0.1)))
    assert found.temperature == np.float32(0.1)


def test_logprob_columns_round_trip():
    sent = LogprobColumns(
        np.arange(6, dtype=np.int32).reshape(3, 2),
        -np.arange(6, dtype=np.float32).reshape(3, 2),
        np.array([1, 7, 3], np.int32),
    )
    found = logprob_columns_from_proto(logprob_columns_to_proto(sent))
    np.testing.assert_array_equal(found.token_ids, sent.token_ids)
    np.testing.assert_array_equal(found.logprobs, sent.logprobs)
    np.testing.assert_array_equal(found.ranks, sent.ranks)
    part = logprob_columns_from_proto(logprob_columns_to_proto(sent.rows(1, 2)))
    assert part.token_ids.tolist() == [[2, 3]]


def test_logprob_columns_of_wrong_length():
    proto = types_pb2.LogprobColumns(num_candidates=2, token_ids=bytes(8), logprobs=bytes(4), ranks=bytes(4))
    with pytest.raises(InvalidArgumentError, match=r"lp\.logprobs"):
        logprob_columns_from_proto(proto, "lp")


def test_model_info_round_trip():
    sent = ModelInfo(
        "smollm2", "LlamaForCausalLM", "float32", "bfloat16", "aa", "bb", 49152, 8192, (0, 2),
        revision="main", quantization="int8", num_parameters=10**9, weights_bytes=2**40, num_layers=30, is_native=False,
    )  # fmt: skip
    assert model_info_from_proto(model_info_to_proto(sent)) == sent


@pytest.mark.parametrize("name", ["", "float32", "bfloat16", "float16", "float8_e4m3", "int8"])
def test_dtypes(name):
    assert dtype_from_proto(dtype_to_proto(name)) == name


def test_unknown_dtypes():
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype"):
        dtype_to_proto("float99", "kv_cache_dtype")
    with pytest.raises(InvalidArgumentError, match="99"):
        dtype_from_proto(99)


def test_core_stats_round_trip():
    fields = dataclasses.fields(CoreStats)
    assert {f.name for f in fields} == {f.name for f in core_pb2.CoreStats.DESCRIPTOR.fields}
    kinds = {"int": int, "float": float, "bool": bool}
    numbers = [f for f in fields if f.name != "detail"]
    sent = CoreStats(**{f.name: kinds[f.type](i) for i, f in enumerate(numbers)})
    assert core_stats_from_proto(core_stats_to_proto(sent)) == sent


def test_trace_context_and_adapter():
    trace = TraceContext("00-aa-bb-01", "k=v")
    assert trace_context_from_proto(trace_context_to_proto(trace)) == trace
    assert trace_context_to_proto(None) is None
    assert trace_context_from_proto(types_pb2.TraceContext()) is None
    assert adapter_from_proto(adapter_to_proto(Adapter("a", 3))) == Adapter("a", 3)
    assert adapter_to_proto(None) is None
    assert adapter_from_proto(types_pb2.AdapterRef()) is None


FILES = {"tokenizer.json": bytes(range(256)) * 2500, "empty.txt": b"", "chat_template.jinja": b"{{ x }}"}


def test_tokenizer_round_trip():
    chunks = list(tokenizer_chunks(FILES))
    assert max(len(chunk.data) for chunk in chunks) == 256 * 2**10
    assembler = TokenizerAssembler()
    for chunk in chunks:
        assembler.add(chunk)
    assert assembler.files() == FILES
    assert tokenizer_sha256(FILES) == tokenizer_sha256(dict(reversed(FILES.items())))
    assert tokenizer_sha256(FILES) != tokenizer_sha256({**FILES, "empty.txt": b"x"})


def _damage(chunks):
    chunks[0].data = b"y" + chunks[0].data[1:]


def _drop(chunks):
    del chunks[-1]


def _interleave(chunks):
    chunks[0].is_last = False
    chunks[1].name = "other"


def _escape(chunks):
    chunks[0].name = "../evil"


@pytest.mark.parametrize(
    ("spoil", "word"), [(_damage, "sha256"), (_drop, "incomplete"), (_interleave, "other"), (_escape, "plain")]
)
def test_tokenizer_damage_is_found(spoil, word):
    chunks = list(tokenizer_chunks({"tokenizer.json": b"x" * 300_000}))
    spoil(chunks)
    assembler = TokenizerAssembler()
    with pytest.raises(InternalError, match=word):
        for chunk in chunks:
            assembler.add(chunk)
        assembler.files()


def test_tokenizer_size_is_bounded():
    assembler = TokenizerAssembler(max_bytes=1000)
    with pytest.raises(InternalError, match="1000"):
        for chunk in tokenizer_chunks({"tokenizer.json": b"x" * 1001}):
            assembler.add(chunk)
