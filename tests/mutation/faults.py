"""Small faults that the core's tests must find: an exact text of a source file, and what to put in its place."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULING = "tests/core/test_scheduling.py"
ADMISSION = "tests/core/test_admission.py"
POOL = "tests/core/test_block_pool.py"
KV = "tests/core/test_kv_cache_manager.py"
HASH = "tests/core/test_block_hash.py"
INTAKE = "tests/core/test_engine_intake.py"
UTILITIES = "tests/core/test_engine_utilities.py"
FAILURES = "tests/core/test_engine_failures.py"
PROPERTIES = "tests/core/test_core_properties.py"
OVERLAP = "tests/core/test_overlap.py"


@dataclass(frozen=True)
class Fault:
    """One fault. `before` must be found exactly once in the file."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


FAULTS = [
    Fault(
        "a block is freed twice",
        "core_svc/kv_cache_manager.py",
        "        request.num_announced_blocks = 0\n        request.blocks = []\n",
        "        request.num_announced_blocks = 0\n",
        (SCHEDULING,),
    ),
    Fault(
        "freeing does not notice a block that nobody holds",
        "core_svc/block_pool.py",
        "            if block.ref_cnt <= 0:\n",
        "            if block.ref_cnt < -9:\n",
        (POOL,),
    ),
    Fault(
        "blocks are freed head first",
        "core_svc/block_pool.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        (POOL,),
    ),
    Fault(
        "a partial block gets a hash",
        "core_svc/kv_cache_manager.py",
        "num_full_blocks = num_committed_tokens // self.block_size\n",
        "num_full_blocks = -(-num_committed_tokens // self.block_size)\n",
        (KV,),
    ),
    Fault(
        "rejected drafts are hashed",
        "core_svc/commit.py",
        "min(num_committed_tokens - num_rejected, request.num_tokens)",
        "min(num_committed_tokens, request.num_tokens + num_rejected)",
        (PROPERTIES,),
    ),
    Fault(
        "a hit on a free block leaves it in the free list",
        "core_svc/block_pool.py",
        "            if block.ref_cnt == 0:\n                self.free_queue.remove(block)\n",
        "",
        (POOL,),
    ),
    Fault(
        "a reused block keeps its hash",
        "core_svc/block_pool.py",
        "        self._forget_hashes(blocks)\n",
        "",
        (POOL,),
    ),
    Fault(
        "computed tokens are not rolled back after rejected drafts",
        "core_svc/commit.py",
        "    table.num_computed_tokens[slot] -= num_rejected\n",
        "",
        (SCHEDULING,),
    ),
    Fault(
        "computed tokens survive a preemption",
        "core_svc/scheduler.py",
        "        request.held_num_computed_tokens = 0\n",
        "",
        (SCHEDULING, PROPERTIES),
    ),
    Fault(
        "a stop token is ignored",
        "core_svc/commit.py",
        "if token_id in request.stop_token_ids:",
        "if token_id in request.stop_token_ids and not request.stop_token_ids:",
        (SCHEDULING,),
    ),
    Fault(
        "tokens after a stop are kept",
        "core_svc/commit.py",
        "        if status is not None:\n            break\n",
        "",
        (SCHEDULING,),
    ),
    Fault(
        "min_tokens is ignored",
        "core_svc/commit.py",
        "if request.num_output_tokens >= request.sampling_params.min_tokens:",
        "if request.num_output_tokens >= 0:",
        (SCHEDULING,),
    ),
    Fault(
        "one token too many",
        "core_svc/commit.py",
        "if request.num_tokens >= request.max_num_tokens:",
        "if request.num_tokens > request.max_num_tokens:",
        (SCHEDULING,),
    ),
    Fault(
        "an abort comes after the commit",
        "core_svc/engine.py",
        "        self._receive_aborts()\n        self.scheduler.update(step, result)\n",
        "        self.scheduler.update(step, result)\n        self._receive_aborts()\n",
        (SCHEDULING,),
    ),
    Fault(
        "the budget is exceeded by one",
        "core_svc/scheduler.py",
        "np.clip(budget - before, 0, num_new)",
        "np.clip(budget + 1 - before, 0, num_new)",
        (SCHEDULING,),
    ),
    Fault(
        "a victim from the front",
        "core_svc/scheduler.py",
        "self._preempt(self.table.requests[self.table.running[-1]])",
        "self._preempt(self.table.requests[self.table.running[0]])",
        (SCHEDULING,),
    ),
    Fault(
        "the prefix lookup reaches the last token",
        "core_svc/request.py",
        "        return self.num_tokens - 1\n",
        "        return self.num_tokens\n",
        (KV,),
    ),
    Fault(
        "prompt logprobs read the cache",
        "core_svc/request.py",
        "            return self.next_prompt_logprob - 1\n",
        "            pass\n",
        (KV,),
    ),
    Fault(
        "prompt logprobs come twice",
        "core_svc/commit.py",
        "    fresh = columns.rows(expected - start)\n",
        "    fresh = columns\n",
        (SCHEDULING,),
    ),
    Fault(
        "a tombstone is ignored",
        "core_svc/intake.py",
        "            if abort_reason is not None:\n",
        "            if abort_reason is not None and refusal is not None:\n",
        (INTAKE,),
    ),
    Fault(
        "an ended id runs again",
        "core_svc/intake.py",
        " or key in self._scheduler.ended:\n",
        ":\n",
        (INTAKE,),
    ),
    Fault(
        "released slots are not flushed",
        "core_svc/scheduler.py",
        "        if self._released_slots or (self.num_running",
        "        if (self.num_running",
        (SCHEDULING,),
    ),
    Fault(
        "admission looks at the first chunk only",
        "core_svc/kv_cache_manager.py",
        "        num_from_free = self.num_blocks_for(request.num_tokens) - len(computed_blocks)\n",
        "        num_from_free = self.num_blocks_for(num_tokens) - len(computed_blocks)\n",
        (ADMISSION,),
    ),
    Fault(
        "a step that preempted admits",
        "core_svc/scheduler.py",
        "        if not has_preempted and not is_throttled",
        "        if not is_throttled",
        (ADMISSION,),
    ),
    Fault(
        "a late result goes to the request that came back",
        "core_svc/plan_builder.py",
        "return table.admitted_step[self.slots] <= self.number",
        "return table.admitted_step[self.slots] < np.iinfo(np.int64).max",
        (INTAKE,),
    ),
    Fault(
        "a salt may collide with an adapter's name",
        "core_svc/block_hash.py",
        'return extra_key("cache_salt", cache_salt.encode())',
        'return extra_key("adapter", cache_salt.encode(), struct.pack("<Q", 1))',
        (HASH,),
    ),
    Fault(
        "a failed step leaves its released slots to the worker",
        "core_svc/scheduler.py",
        "        self._released_slots += step.plan.released_slots.tolist()\n",
        "",
        (FAILURES,),
    ),
    Fault(
        "slots of a failed step that were never taken are released",
        "core_svc/scheduler.py",
        "        self._released_slots = [slot for slot in self._released_slots if slot not in never_taken]\n",
        "",
        (FAILURES,),
    ),
    Fault(
        "the number of a failed step is left out",
        "core_svc/scheduler.py",
        "        self._plan_step -= 1\n",
        "",
        (FAILURES,),
    ),
    Fault(
        "a passed deadline is not looked at",
        "core_svc/engine.py",
        "        self._intake.expire_deadlines()\n",
        "",
        (INTAKE,),
    ),
    Fault(
        "sleep keeps the KV of those that run",
        "core_svc/utilities.py",
        "        engine.scheduler.preempt_all()\n        engine.scheduler.kv",
        "        engine.scheduler.kv",
        (UTILITIES,),
    ),
    Fault(
        "a stop token is looked for among the first ids only",
        "core_svc/commit.py",
        "in table.stop_ids[: table.num_stop_ids]:",
        "in table.stop_ids[:1]:",
        (SCHEDULING,),
    ),
    Fault(
        "ids beyond the columns are forgotten",
        "core_svc/slot_table.py",
        "not request.logprob_width and num_stop_ids <= MAX_STOP_IDS",
        "not request.logprob_width",
        (SCHEDULING,),
    ),
    Fault(
        "a length limit is not seen in the columns",
        "core_svc/commit.py",
        "= num_tokens >= table.max_num_tokens[slots]",
        "= num_tokens > table.max_num_tokens[slots] + 1",
        (SCHEDULING,),
    ),
    Fault(
        "results are taken in the worker's order",
        "core_svc/result_rows.py",
        "result.slots.tobytes() == plan.slots.tobytes()",
        "len(plan.slots) > 0",
        (PROPERTIES,),
    ),
    Fault(
        "frontends get each other's tokens",
        "core_svc/slot_table.py",
        "(name, numbers == number)",
        "(name, numbers >= 0)",
        (INTAKE,),
    ),
    Fault(
        "a full block is hashed once, the next ones never",
        "core_svc/full_blocks.py",
        "    table.next_full_tokens[request.slot] = next_full_tokens(kv, request)\n",
        "    table.next_full_tokens[request.slot] = NEVER\n",
        (UTILITIES, OVERLAP, PROPERTIES, SCHEDULING),
    ),
    Fault(
        "tokens are cut off where the table grows",
        "core_svc/slot_table.py",
        "            wider[:, :width] = self.token_ids\n",
        "            wider[:, : width // 2] = self.token_ids[:, : width // 2]\n",
        (ADMISSION,),
    ),
    Fault(
        "a row is planned behind the last token",
        "core_svc/scheduler.py",
        "(num_known - num_computed) * (num_known < table.max_num_tokens[slots])",
        "num_known - num_computed",
        (OVERLAP,),
    ),
    Fault(
        "a step is planned behind drafts",
        "core_svc/scheduler.py",
        "is_waiting = table.is_drafting[slots] & (num_known > table.num_tokens[slots])",
        "is_waiting = table.is_drafting[slots] & (num_known < 0)",
        (OVERLAP,),
    ),
    Fault(
        "the step behind a failed one is not taken back",
        "core_svc/scheduler.py",
        "            self._unplan(ahead)\n",
        "",
        (OVERLAP,),
    ),
    Fault(
        "requests of the step behind a failed one go on as if it had happened",
        "core_svc/scheduler.py",
        "            for request in ahead.requests[ahead.is_current(self.table)]:\n",
        "            for request in ahead.requests[:0]:\n",
        (OVERLAP,),
    ),
    Fault(
        "commands run while a step is in flight",
        "core_svc/engine.py",
        "                in_flight = self._update(in_flight, None)\n",
        "",
        (OVERLAP,),
    ),
    Fault(
        "a pause is answered while a step is in flight",
        "core_svc/engine.py",
        "        if ahead is None:\n            self._utilities.answer_pauses()\n",
        "        self._utilities.answer_pauses()\n",
        (OVERLAP,),
    ),
    Fault(
        "overlap waits for the step before it submits the next",
        "core_svc/engine.py",
        "        ahead = self._submit(self._schedule())\n        ahead = self._update(in_flight, ahead)\n",
        "        ahead = self._update(in_flight, None)\n        ahead = self._submit(self._schedule())\n",
        (OVERLAP,),
    ),
    Fault(
        "a loss ends only a wait that begins after it",
        "core_svc/executor_link.py",
        "        lost, future = in_flight.lost, in_flight.future\n",
        "        lost, future = self._lost, in_flight.future\n",
        (OVERLAP,),
    ),
    Fault(
        "a prefix that another request computes is computed again",
        "core_svc/kv_cache_manager.py",
        "* self.block_size >= MIN_COMING_TOKENS\n",
        "* self.block_size < 0\n",
        (ADMISSION,),
    ),
    Fault(
        "what an ended request was to compute is waited for",
        "core_svc/kv_cache_manager.py",
        "request.block_hashes[request.num_cached_blocks : request.num_announced_blocks]:\n",
        "request.block_hashes[:0]:\n",
        (ADMISSION,),
    ),
    Fault(
        "what a request has computed is waited for",
        "core_svc/kv_cache_manager.py",
        "            if idx < request.num_announced_blocks:\n",
        "            if idx < 0:\n",
        (ADMISSION,),
    ),
    Fault(
        "a decode's full block is hashed by the tokens of the next one",
        "core_svc/full_blocks.py",
        "first_tokens = table.next_full_tokens[decodes] - size",
        "first_tokens = table.next_full_tokens[decodes]",
        (ADMISSION,),
    ),
    Fault(
        "a token that ends a request is not looked at",
        "core_svc/commit.py",
        "is_turn = table.awaits_first_token[slots] | ends",
        "is_turn = table.awaits_first_token[slots]",
        (SCHEDULING,),
    ),
    Fault(
        "a first token is not noted",
        "core_svc/commit.py",
        "is_turn = table.awaits_first_token[slots] | ends",
        "is_turn = ends",
        (SCHEDULING, INTAKE),
    ),
    Fault(
        "an end goes to the row of another request",
        "core_svc/commit.py",
        "_end(scheduler, request, token_id, row + place, now_ns)",
        "_end(scheduler, request, token_id, row, now_ns)",
        (SCHEDULING,),
    ),
]
