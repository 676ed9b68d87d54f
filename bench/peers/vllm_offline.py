"""vLLM on the CPU, offline: `LLM.generate` behind the protocol of the benchmark. Runs in vLLM's own environment.

python bench/peers/vllm_offline.py CHECKPOINT_DIRECTORY
"""

from __future__ import annotations

import sys

from protocol import answers, serve


def main() -> None:
    answer = answers()
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], dtype="bfloat16", disable_log_stats=True)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=True) for n in max_tokens]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reset() -> None:
        assert llm.reset_prefix_cache()

    serve(answer, generate, reset)


if __name__ == "__main__":
    main()
