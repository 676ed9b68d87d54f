"""A caller's request in, engine requests out: tokenizes, checks every parameter, resolves what is unset."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from frontend_svc.chat_template import ChatTemplate
from frontend_svc.logprobs import LogprobsProcessor
from frontend_svc.outputs import OutputKind
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.request_state import RequestState
from frontend_svc.tokenizer import Tokenizer
from pagewire.columns import EMPTY_INT32, Int32Column
from pagewire.engine import EngineInfo, EngineRequest, TraceContext
from pagewire.errors import FieldViolation, InvalidArgumentError, NotFoundError, UnimplementedError, violation
from pagewire.sampling import MAX_TOKEN_LIST, SamplingParams

MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 1024
MAX_PROMPT_CANDIDATES = 500_000
"""Candidates with text over all prompt positions: about half a second of work and 20 MiB of one message."""
_INT32_MAX = 2**31 - 1


@dataclass(slots=True)
class Conversation:
    """A conversation to render with the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class TextRequest:
    """What a caller asks for, in plain Python: GenerateRequest and ChatRequest are both this."""

    prompt: str | Sequence[int] | Conversation
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    model: str = ""
    output_kind: OutputKind = OutputKind.DELTA
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    num_media: int = 0
    returns_prompt_token_ids: bool = False
    add_special_tokens: bool | None = None
    """None: true for text, false for a conversation, whose template writes its own."""
    remaining_s: float | None = None
    """Time until the caller's deadline."""
    trace_context: TraceContext | None = None
    api_key: str = ""
    """Name of the key that the caller showed."""


class InputProcessor:
    """Checks and resolves requests for one core. Thread-safe; tokenizing is slow, so call it off the event loop."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._ids = itertools.count(1)

    @property
    def max_model_len(self) -> int:
        return self.info.model.max_model_len

    def check_model(self, name: str) -> None:
        """Raises NotFoundError unless the name is empty or the served model's."""
        if name and name != self.info.model.model:
            raise NotFoundError(
                f"model {name!r} is not served; this server has {self.info.model.model!r}",
                metadata={"field": "model", "model": self.info.model.model},
            )

    def check(self, request: TextRequest) -> None:
        """Everything that can be checked without tokenizing."""
        self.check_model(request.model)
        if not self.info.model.is_generative:
            raise UnimplementedError(f"model {self.info.model.model!r} does not generate text")
        params = request.sampling_params
        found = params.violations(self.info.model.vocab_size)
        found += _check_bad_words(params)
        found += self._check_features(request)
        for name, text, limit in (
            ("request_id", request.request_id, MAX_REQUEST_ID_BYTES),
            ("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES),
        ):
            if len(text.encode(errors="replace")) > limit:
                found.append(violation(name, text, f"must have at most {limit} bytes"))
        if not -_INT32_MAX - 1 <= request.priority <= _INT32_MAX:
            found.append(violation("priority", request.priority, "must be a 32-bit integer"))
        if found:
            raise InvalidArgumentError(found)

    def _check_features(self, request: TextRequest) -> list[FieldViolation]:
        """Parts of the contract that this core does not have."""
        asked = [
            ("adapter", "adapters", request.adapter, bool(request.adapter)),
            ("media", "media", f"{request.num_media} items", request.num_media > 0),
            (
                "sampling_params.structured_outputs",
                "structured_outputs",
                request.sampling_params.structured_outputs,
                request.sampling_params.structured_outputs is not None,
            ),
        ]
        features = ", ".join(self.info.features) or "none"
        return [
            violation(path, value, f"not supported here: the core lacks the feature {name!r} (it has: {features})")
            for path, name, value, is_asked in asked
            if is_asked and name not in self.info.features
        ]

    def tokenize(
        self, prompt: str | Sequence[int] | Conversation, add_special_tokens: bool | None = None
    ) -> tuple[str | None, list[int]]:
        """Text (where there is one) and token ids of a prompt.

        An empty or too long one is refused, the latter without tokenizing where its size alone tells.
        """
        if isinstance(prompt, Conversation):
            text = self.render(prompt)
            ids = self._encode(text, "messages", add_special_tokens is True)
            return text, self._check_prompt(ids, "messages")
        if isinstance(prompt, str):
            ids = self._encode(prompt, "text", add_special_tokens is not False)
            return prompt, self._check_prompt(ids, "text")
        ids = self._check_prompt(prompt, "token_ids")
        self.check_vocabulary(ids, "token_ids.ids")
        return None, ids

    def render(self, conversation: Conversation) -> str:
        """The conversation's text. Raises InvalidArgumentError where the template refuses it."""
        return self.chat_template.render(
            conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            template_kwargs=conversation.template_kwargs,
        )

    def _encode(self, text: str, path: str, add_special_tokens: bool) -> list[int]:
        self.tokenizer.check_size(text, self.max_model_len, path)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                [violation(path, text, "must be valid Unicode without lone surrogates")]
            ) from error
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_prompt(self, ids: Sequence[int], path: str) -> list[int]:
        if not ids:
            raise InvalidArgumentError([violation(path, "no tokens", "the prompt must not be empty")])
        if len(ids) >= self.max_model_len:
            limit = f"must have fewer tokens than the model's max_model_len, {self.max_model_len}"
            raise InvalidArgumentError([violation(path, f"{len(ids)} tokens", limit)])
        return list(ids)

    def encode_any(self, prompt: str | Conversation, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text or conversation of any length that could fit the model."""
        if isinstance(prompt, Conversation):
            try:
                text = self.render(prompt)
            except InvalidArgumentError as error:
                found = [replace(v, field=f"conversation.{v.field}") for v in error.violations]
                raise InvalidArgumentError(found) from error
            return self._encode(text, "conversation", add_special_tokens is True)
        return self._encode(prompt, "text", add_special_tokens is not False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text."""
        return [self.tokenizer.token_text(token_id) for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids, all of which must be in the vocabulary."""
        ids = list(token_ids)
        self.check_vocabulary(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def check_vocabulary(self, token_ids: Sequence[int], path: str = "token_ids") -> None:
        """Raises InvalidArgumentError for the first id that is not in the vocabulary."""
        vocab_size = self.info.model.vocab_size
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidArgumentError(
                    [violation(f"{path}[{i}]", token_id, f"token ids must be in [0, {vocab_size})")]
                )

    def resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Parameters as the core takes them: seed drawn, max_tokens set, bad words as token ids, no stop strings."""
        room = self.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            limit = f"must be at most {max_tokens}: max_tokens and the model's max_model_len leave no more"
            raise InvalidArgumentError([violation("sampling_params.min_tokens", params.min_tokens, limit)])
        return replace(
            params,
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            n=1,
            stop=(),
            bad_words=(),
            bad_words_token_ids=params.bad_words_token_ids + self._bad_words(params.bad_words),
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            stem = word.lstrip() or word
            for spelling in (stem, " " + stem):
                ids = tuple(self.tokenizer.encode(spelling, add_special_tokens=False))
                if ids and max(ids) < self.info.model.vocab_size:
                    found[ids] = None
        return tuple(found)

    def process(self, request: TextRequest) -> tuple[ParentRequest, list[EngineRequest]]:
        """Checks, tokenizes and resolves a request.

        Returns:
            The parent with its children, and one engine request per child, in the same order.

        Raises:
            InvalidArgumentError: with the path, value and limit of each bad field.
            NotFoundError: the model is not served.
        """
        self.check(request)
        prompt, prompt_token_ids = self.tokenize(request.prompt, request.add_special_tokens)
        params = request.sampling_params
        self._check_prompt_logprobs(params, len(prompt_token_ids))
        resolved = self.resolve(params, len(prompt_token_ids))
        wants_prompt = params.prompt_logprobs is not None
        parent = ParentRequest(
            request.request_id,
            prompt_token_ids,
            request.output_kind,
            prompt=prompt,
            prompt_logprobs=self._prompt_logprobs(prompt_token_ids, params) if wants_prompt else None,
            returns_prompt_token_ids=request.returns_prompt_token_ids,
        )
        column = np.asarray(prompt_token_ids, np.int32)
        engine_requests = []
        for index in range(params.n):
            child = RequestState(
                next(self._ids),
                index,
                params,
                prompt_token_ids,
                self.tokenizer,
                is_delta=request.output_kind is OutputKind.DELTA,
            )
            parent.add_child(child)
            engine_requests.append(self._engine_request(request, child, column, resolved))
        return parent, engine_requests

    def _check_prompt_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        count = params.prompt_logprobs
        if count is None:
            return
        num_candidates = (self.info.model.vocab_size if count < 0 else count) + 1
        most = MAX_PROMPT_CANDIDATES // num_prompt_tokens - 1
        if num_candidates - 1 > most:
            limit = f"must be at most {most} for a prompt of {num_prompt_tokens} tokens"
            raise InvalidArgumentError([violation("sampling_params.prompt_logprobs", count, limit)])

    def _prompt_logprobs(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> LogprobsProcessor:
        processor = LogprobsProcessor(self.tokenizer, params.prompt_logprobs or 0)
        processor.skip(prompt_token_ids[0])
        return processor

    def _engine_request(
        self, request: TextRequest, child: RequestState, prompt: Int32Column, params: SamplingParams
    ) -> EngineRequest:
        # One child computes the prompt's log-probabilities for all.
        own_params = params if child.index == 0 else replace(params, prompt_logprobs=None)
        remaining_s = request.remaining_s
        return EngineRequest(
            request_id=child.request_id,
            prompt_token_ids=prompt,
            sampling_params=own_params,
            eos_token_ids=self.info.model.eos_token_ids,
            output_token_ids=EMPTY_INT32,
            child_index=child.index,
            priority=request.priority,
            arrival_time_ns=time.time_ns(),
            remaining_ms=None if remaining_s is None else max(0, int(remaining_s * 1000)),
            cache_salt=request.cache_salt,
            trace_context=request.trace_context,
            external_request_id=request.request_id,
        )


def _check_bad_words(params: SamplingParams) -> list[FieldViolation]:
    path = "sampling_params.bad_words"
    if len(params.bad_words) > MAX_BAD_WORDS:
        return [violation(path, f"{len(params.bad_words)} words", f"at most {MAX_BAD_WORDS} words")]
    room = MAX_TOKEN_LIST - len(params.bad_words_token_ids)
    if params.bad_words and 2 * len(params.bad_words) > room:
        return [
            violation(path, f"{len(params.bad_words)} words", f"at most {max(0, room // 2)} beside bad_words_token_ids")
        ]
    return [
        violation(f"{path}[{i}]", word, f"must have at most {MAX_BAD_WORD_BYTES} bytes")
        for i, word in enumerate(params.bad_words)
        if len(word.encode(errors="replace")) > MAX_BAD_WORD_BYTES
    ]
