"""Offline use: prompts in, results out, in one process.

    from frontend_svc import LLM, SamplingParams

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)

The engine runs on a thread of this process until everything has ended, and the worker's steps on one beside it: a
breakpoint anywhere in core, worker or kernels stops it.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from frontend_svc.chat_template import ChatTemplate
from frontend_svc.input_processor import Conversation, InputProcessor, TextRequest
from frontend_svc.llm_inputs import Message, Prompt, conversations, params_per_prompt, prompts_of
from frontend_svc.output_processor import OutputProcessor
from frontend_svc.outputs import OutputKind, RequestOutput
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import AbortReason, CoreStats, EngineRequest, ResetPrefixCache, StepOutputs
from pagewire.errors import InternalError, InvalidArgumentError, UnavailableError, violation
from pagewire.sampling import SamplingParams

if TYPE_CHECKING:
    from core_svc.executor import Executor
    from core_svc.executor_link import InFlight

_INCARNATION = "offline"


class LLM:
    """A model with its engine in this process. Threads may share it: their calls follow one another.

    Args:
        model: alias (`smollm2`), Hugging Face directory, GGUF file or hub id.
        dtype: float32, bfloat16 or float16; empty is the model's own choice.
        quantization: "int8" (8-bit weights and activations, any model), "gguf" (a GGUF file's own blocks, not
            dequantized), empty: weights of dtype. Both are for the CPU.
        max_model_len: longest sequence in tokens; 0 is the model's own limit.
        num_kv_blocks: KV blocks; 0 is as many as kv_cache_memory_bytes (0: the worker's own budget) takes.
        async_scheduling: plan the next step, and read the outputs of the last one, while one runs. Output is the same.
        executor: runs the plans; a worker in this process unless given.

    Raises:
        NotFoundError, InvalidArgumentError, ResourceExhaustedError: the model cannot be served as asked.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "",
        revision: str = "",
        quantization: str = "",
        device: str = "cpu",
        max_model_len: int = 0,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        long_prefill_token_threshold: int = 0,
        block_size: int = 16,
        num_kv_blocks: int = 0,
        kv_cache_memory_bytes: int = 0,
        kv_cache_dtype: str = "",
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        async_scheduling: bool = True,
        force_generic: bool = False,
        load_format: str = "",
        log_requests: bool = False,
        executor: Executor | None = None,
    ) -> None:
        from frontend_svc.inprocess import OfflineOptions, start_offline_core

        options = OfflineOptions(
            model=model,
            dtype=dtype,
            revision=revision,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
            async_scheduling=async_scheduling,
            force_generic=force_generic,
            load_format=load_format,
            log_requests=log_requests,
        )
        self._published: list[StepOutputs] = []
        # The engine has one thread at a time; calls of several threads follow one another.
        self._lock = threading.Lock()
        self._is_closed = False
        self._core = start_offline_core(options, executor, self._publish)
        files = self._core.tokenizer_files
        tokenizer = Tokenizer(files)
        self._inputs = InputProcessor(self._core.info, tokenizer, ChatTemplate(files, tokenizer))
        self._outputs = OutputProcessor()

    def _publish(self, frontend_incarnation: str, outputs: StepOutputs) -> None:
        self._published.append(outputs)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self._inputs.max_model_len

    def stats(self) -> CoreStats:
        """Numbers of the engine as of now."""
        return self._core.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets what earlier prompts left in the KV cache."""
        engine = self._core.engine

        def reset(is_interrupted: threading.Event) -> None:
            done = engine.utility(ResetPrefixCache())
            while not done.done():
                engine.step()
            done.result()

        self._run_apart(reset)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this LLM is closed")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns the results in their order.

        Args:
            prompts: one or many, each a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`.
            sampling_params: for all, or one per prompt.
            use_tqdm: show a progress bar.
            priority: one per prompt, smaller first, for the priority policy.

        Raises:
            InvalidArgumentError: a prompt or parameter is wrong; nothing has run then.
            KeyboardInterrupt: after Ctrl-C; everything is aborted and the engine can be used again.
        """
        return self._run(prompts_of(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one or many conversations, rendered with the model's chat template; otherwise like `generate`.

        A conversation is a list of mappings with `role` and `content`; a text alone is one message of the user.
        """
        if continue_final_message and add_generation_prompt:
            # The default asks for a new turn; to continue the last one excludes that.
            add_generation_prompt = False
        found = [
            Conversation(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations(messages)
        ]
        return self._run(found, sampling_params, use_tqdm, None)

    def _run(
        self,
        prompts: Sequence[str | Sequence[int] | Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = params_per_prompt(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise InvalidArgumentError(
                [violation("priority", f"{len(priority)} entries", f"must have one per prompt, {len(prompts)}")]
            )
        parents, engine_requests = [], []
        for i, prompt in enumerate(prompts):
            request = TextRequest(
                prompt,
                params[i],
                request_id=str(i),
                output_kind=OutputKind.FINAL_ONLY,
                priority=priority[i] if priority is not None else 0,
                returns_prompt_token_ids=True,
            )
            parent, children = self._process(request, i, is_one_of_many=len(prompts) > 1)
            parents.append(parent)
            engine_requests += children
        self._run_apart(lambda is_interrupted: self._drain(parents, engine_requests, use_tqdm, is_interrupted))
        errors = [parent.error for parent in parents if parent.error is not None]
        for error in errors:
            # With the worker gone, or nothing left to give, there is no result to save.
            if isinstance(error, UnavailableError) or len(errors) == len(parents):
                raise error
        return [parent.take() if parent.error is None else parent.failed_output() for parent in parents]

    def _process(
        self, request: TextRequest, index: int, *, is_one_of_many: bool
    ) -> tuple[ParentRequest, list[EngineRequest]]:
        try:
            return self._inputs.process(request)
        except InvalidArgumentError as error:
            if not is_one_of_many:
                raise
            found = [replace(v, field=f"prompts[{index}]: {v.field}") for v in error.violations]
            raise InvalidArgumentError(found) from error

    def _run_apart(self, work: Callable[[threading.Event], None]) -> None:
        """Runs work on a thread, so that what a signal's handler raises here (Ctrl-C, an alarm) cuts no step in two.

        The event tells the work to end early. After a first exception this waits until it has; a second one does not
        wait, but the next call does. Raises UnavailableError after `close`.
        """
        is_interrupted, done = threading.Event(), Future[None]()

        def run() -> None:
            try:
                with self._lock:
                    self._check_open()
                    work(is_interrupted)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), name="engine", daemon=True).start()
        try:
            done.result()
        except BaseException:
            if not done.done():
                is_interrupted.set()
                done.exception()
            raise

    def _drain(
        self,
        parents: Sequence[ParentRequest],
        requests: list[EngineRequest],
        use_tqdm: bool,
        is_interrupted: threading.Event,
    ) -> None:
        """The offline loop: adds everything, then steps until everything has ended."""
        engine = self._core.engine
        engine.add(_INCARNATION, requests)
        for parent in parents:
            self._outputs.add(parent)
        in_flight: InFlight | None = None
        with _progress(len(requests), use_tqdm) as bar:
            try:
                while len(self._outputs) and not is_interrupted.is_set():
                    num_alive = len(self._outputs)
                    in_flight = self._step(in_flight)
                    bar.update(num_alive - len(self._outputs))
            finally:
                self._abort_rest(parents, in_flight)

    def _step(self, in_flight: InFlight | None) -> InFlight | None:
        """One turn of the engine's loop; returns the step that runs while the outputs of the one before are read."""
        engine = self._core.engine
        if in_flight is None and not engine.has_work():
            raise InternalError("the engine has nothing to do, and requests have not ended")
        in_flight = engine.advance(in_flight)
        published, self._published[:] = list(self._published), []
        for outputs in published:
            for reason, ids in self._outputs.process_outputs(outputs).items():
                engine.abort(_INCARNATION, ids, reason)
        return in_flight

    def _abort_rest(self, parents: Sequence[ParentRequest], in_flight: InFlight | None) -> None:
        """Ends what is alive, and lets the engine flush what ended."""
        engine = self._core.engine
        for parent in parents:
            for reason, ids in self._outputs.abort(parent, AbortReason.CLIENT).items():
                engine.abort(_INCARNATION, ids, reason)
        while in_flight is not None or engine.has_work():
            in_flight = engine.advance(in_flight)
        self._published.clear()

    def close(self) -> None:
        """Ends the engine, after what other threads run. Idempotent."""
        engine = self._core.engine
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            engine.shutdown()
            while engine.has_work() and engine.step():
                pass
            self._core.executor.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _progress(total: int, use_tqdm: bool) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, desc="completions", disable=not use_tqdm, dynamic_ncols=True) as bar:
        yield bar
