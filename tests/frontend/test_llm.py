"""LLM: offline generation in one process, in order, interruptible, with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import pytest
from frontend_support import SEED, TextExecutor

from core_svc.fake_executor import FakeOptions
from frontend_svc import LLM, FinishReason, SamplingParams
from frontend_svc.chat_template import ChatTemplate
from frontend_svc.tokenizer import Tokenizer
from pagewire.errors import InternalError, InvalidArgumentError, UnavailableError

Files = Mapping[str, bytes]


def make(files: Files, options: FakeOptions | None = None, **more: int) -> LLM:
    executor = TextExecutor(files, options, 0.0, max_model_len=1024)
    return LLM("fake", executor=executor, **{"num_kv_blocks": 500, **more})  # type: ignore[arg-type]


@pytest.fixture
def llm(smollm2_files: Files) -> Iterator[LLM]:
    with make(smollm2_files) as made:
        yield made


def is_empty(llm: LLM) -> bool:
    stats = llm.stats()
    numbers = (stats.num_running, stats.num_waiting, stats.num_used_blocks, len(llm._outputs), len(llm._published))
    return numbers == (0, 0, 0, 0, 0) and not llm._core.engine.scheduler.requests


def expected(llm: LLM, prompt: list[int], num_tokens: int, seed: int = SEED) -> list[int]:
    executor = llm._core.executor
    assert isinstance(executor, TextExecutor)
    return executor.model.generate(prompt, SamplingParams(seed=seed), num_tokens)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Many prompts of different lengths, more than run at once; each with its own parameters."""
    prompts = [f"Question {i}: " + "why " * (i % 5) for i in range(150)]
    params = [SamplingParams(seed=i, max_tokens=1 + (150 - i) % 9) for i in range(150)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        ids = llm.tokenizer.encode(prompts[i])
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompts[i], ids, True)
        (completion,) = output.outputs
        assert completion.token_ids == expected(llm, ids, 1 + (150 - i) % 9, seed=i)
        assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.finish_reason is FinishReason.LENGTH
    assert is_empty(llm)


def test_forms_of_prompts(llm: LLM) -> None:
    params = SamplingParams(seed=SEED, max_tokens=4)
    ids = llm.tokenizer.encode("Hello")
    forms = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    together = llm.generate(forms, params, use_tqdm=False)
    alone = [llm.generate(form, params, use_tqdm=False)[0] for form in forms]
    assert [o.outputs[0].token_ids for o in (*together, *alone)] == [expected(llm, ids, 4)] * 8
    assert llm.generate([], params, use_tqdm=False) == []
    assert llm.generate("Hello", use_tqdm=False)[0].outputs[0].finish_reason is FinishReason.LENGTH


def test_stop_string_and_logprobs(llm: LLM) -> None:
    ids = expected(llm, llm.tokenizer.encode("Hello"), 100)
    text = llm.tokenizer.decode(ids, skip_special_tokens=True)
    at = next(i for i in range(40, 200) if text[i : i + 6].isascii() and text.find(text[i : i + 6]) == i)
    params = SamplingParams(seed=SEED, max_tokens=500, stop=text[at : at + 6], logprobs=0)  # type: ignore[arg-type]
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.text, completion.stop_reason) == (text[:at], text[at : at + 6])
    assert completion.finish_reason is FinishReason.STOP
    assert completion.logprobs is not None
    assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    total = sum(next(iter(position.values())).logprob for position in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)
    assert is_empty(llm)


def test_several_completions_and_chat(llm: LLM, smollm2_template: ChatTemplate, smollm2: Tokenizer) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(seed=SEED, max_tokens=5, n=3)
    (one,) = llm.chat(turns, params, use_tqdm=False)
    prompt = smollm2_template.render(turns)
    assert one.prompt == prompt
    assert [o.index for o in one.outputs] == [0, 1, 2]
    assert one.outputs[0].token_ids == expected(llm, smollm2.encode(prompt), 5)
    assert len(llm.chat([turns, turns], params, use_tqdm=False)) == 2
    open_turn = [*turns, {"role": "assistant", "content": "Well,"}]
    (continued,) = llm.chat(open_turn, params, use_tqdm=False, continue_final_message=True)
    assert continued.prompt is not None
    assert continued.prompt.endswith("assistant\nWell,")


def test_one_bad_prompt_leaves_nothing(llm: LLM) -> None:
    """The k-th prompt is wrong: its place and field are named, and none of the others has begun."""
    steps = llm.stats().num_steps
    with pytest.raises(InvalidArgumentError) as caught:
        llm.generate(["a", "b", [1, 99999], "d"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert caught.value.violations[0].field == "prompts[2]: token_ids.ids[1]"
    for params in ([SamplingParams()], [SamplingParams(), SamplingParams(top_p=9)]):
        with pytest.raises(InvalidArgumentError):
            llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(InvalidArgumentError):
        llm.generate([3.5], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError):
        llm.generate(["a", ""], use_tqdm=False)
    assert llm.stats().num_steps == steps
    assert is_empty(llm)


def test_ctrl_c_leaves_the_engine_usable(smollm2_files: Files, request: pytest.FixtureRequest) -> None:
    """The interrupt comes between steps, everything is aborted, and the next call works."""
    # A shell starts its background jobs with SIGINT ignored, and Python leaves it so.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    llm = make(smollm2_files, FakeOptions(latency_s=0.005))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=1000), use_tqdm=False)
    timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert is_empty(llm)
    (output,) = llm.generate("a", SamplingParams(seed=SEED, max_tokens=3), use_tqdm=False)
    assert output.outputs[0].token_ids == expected(llm, llm.tokenizer.encode("a"), 3)
    llm.close()
    llm.close()


def test_failures_are_raised(smollm2_files: Files) -> None:
    """A row that fails harms no other; alone, or with the worker lost, the error is raised. Nothing stays."""
    llm = make(smollm2_files, FakeOptions(failing_request_ids={2, 4}))
    outputs = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=5), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs].count(FinishReason.ERROR) == 1
    for output in outputs:
        is_failed = output.outputs[0].finish_reason is FinishReason.ERROR
        assert output.finished and len(output.outputs[0].token_ids) == (0 if is_failed else 5)
        assert isinstance(output.error, InternalError) if is_failed else output.error is None
    assert is_empty(llm)
    with pytest.raises(InternalError, match="logits"):
        llm.generate("a", SamplingParams(max_tokens=5), use_tqdm=False)
    assert is_empty(llm)
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=5), use_tqdm=False)) == 2
    lost = make(smollm2_files, FakeOptions(failures={3: UnavailableError("gone")}))
    with pytest.raises(UnavailableError, match="gone"):
        lost.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
    assert len(lost._outputs) == 0


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "2/2" in capsys.readouterr().err


def test_threads_share_it(llm: LLM) -> None:
    """Calls of several threads follow one another, each with its own results."""
    params = SamplingParams(seed=SEED, max_tokens=30)
    results: dict[int, list[int]] = {}

    def call(i: int) -> None:
        results[i] = llm.generate(f"Question {i}", params, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: expected(llm, llm.tokenizer.encode(f"Question {i}"), 30) for i in range(8)}
    assert is_empty(llm)


def test_closed_is_closed(smollm2_files: Files) -> None:
    llm = make(smollm2_files)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("Hello", use_tqdm=False), llm.reset_prefix_cache):
        with pytest.raises(UnavailableError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("temperature", None),
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("n", True),
        ("seed", 1.5),
        ("logprobs", 0.5),
        ("logit_bias", {"5": 1.0}),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", ["x"]),
        ("bad_words", "word"),
        ("bad_words_token_ids", [["x"]]),
    ],
)
def test_a_value_of_a_wrong_type_is_named(llm: LLM, name: str, value: object) -> None:
    """Case: vllm#16529"""
    with pytest.raises(InvalidArgumentError) as caught:
        llm.generate("Hello", SamplingParams(**{name: value}), use_tqdm=False)  # type: ignore[arg-type]
    (found,) = caught.value.violations
    assert found.field == f"sampling_params.{name}"
    assert found.limit.startswith("must ")


def test_inputs_of_a_wrong_type_are_named(llm: LLM) -> None:
    wrong: list[tuple[object, str]] = [(None, "prompts"), (5, "prompts"), (["a", None], "prompts[1]")]
    for prompts, field in wrong:
        with pytest.raises(InvalidArgumentError) as caught:
            llm.generate(prompts, use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.violations[0].field == field
    for messages, field in ((5, "messages"), (["Hello"], "messages[0]"), ([{"role": "user"}, "x"], "messages")):
        with pytest.raises(InvalidArgumentError) as caught:
            llm.chat(messages, use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.violations[0].field == field
    with pytest.raises(InvalidArgumentError, match="must be SamplingParams"):
        llm.generate("Hello", {"max_tokens": 3}, use_tqdm=False)  # type: ignore[arg-type]


def test_a_text_is_a_message_of_the_user(llm: LLM) -> None:
    params = SamplingParams(seed=SEED, max_tokens=4)
    (by_text,) = llm.chat("Hello", params, use_tqdm=False)
    (by_message,) = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    assert by_text.prompt == by_message.prompt


def test_prefix_cache_and_pressure_change_nothing(smollm2_files: Files) -> None:
    """A pool so small that requests are preempted, and shared prefixes, give the same tokens.

    Case: vllm#5543
    """
    prompts = ["A long shared beginning of every prompt, " * 3 + str(i) for i in range(12)]
    params = SamplingParams(seed=SEED, max_tokens=40)
    results = []
    for blocks in (500, 14):
        with make(smollm2_files, num_kv_blocks=blocks) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([o.outputs[0].token_ids for o in outputs])
            if blocks == 14:
                assert llm.stats().num_preemptions > 0
            assert is_empty(llm)
    assert results[0] == results[1]


def test_the_frontend_loads_no_torch() -> None:
    """Neither the package nor a frontend process's modules load torch, transformers, the core or the worker."""
    code = (
        "import sys, frontend_svc, frontend_svc.server, frontend_svc.__main__, frontend_svc.inprocess;"
        "from frontend_svc import SamplingParams, LLM;"
        "bad = {'torch', 'transformers', 'core_svc', 'worker_svc', 'kernels'} & {m.split('.')[0] for m in sys.modules};"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_is_light() -> None:
    """`import frontend_svc` alone loads neither gRPC nor the tokenizer library."""
    code = (
        "import sys, frontend_svc;"
        "bad = {'grpc', 'tokenizers', 'jinja2', 'numpy'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
