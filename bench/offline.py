"""Pagewire in one process (`LLM`) behind the protocol of the benchmark, as the peers are.

python -m bench.offline --model MODEL [--dtype bfloat16] [--quantization int8] [--kv-cache-memory BYTES]
"""

from __future__ import annotations

import argparse
import math

from bench.peers.protocol import answers, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--kv-cache-memory", type=int, default=2**30)
    args = parser.parse_args()
    answer = answers()
    from frontend_svc import LLM, SamplingParams

    llm = LLM(args.model, dtype=args.dtype, quantization=args.quantization, kv_cache_memory_bytes=args.kv_cache_memory)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def perplexity(windows: list[list[int]]) -> float:
        """exp of the mean negative log-likelihood of every token but the first of each window."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        losses: list[float] = []
        for output in llm.generate(windows, params, use_tqdm=False):
            assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
            # Positions without a predecessor have no log-probability.
            pairs = zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[-(len(output.prompt_token_ids) - 1) :], strict=True
            )
            losses += [-position[token].logprob for token, position in pairs]
        return math.exp(sum(losses) / len(losses))

    with llm:
        serve(answer, generate, llm.reset_prefix_cache, {"perplexity": perplexity})


if __name__ == "__main__":
    main()
