"""The prompts on which SmolLM2's greedy output must equal that of transformers."""

from __future__ import annotations

_PARAGRAPH = (
    "The river rises in the hills above the town, gathers a dozen streams on its way, and turns three mills before it "
    "reaches the plain. In spring it floods the meadows; in summer children wade across it. "
)

_CHAT = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in (
        "What is the capital of France?",
        "Explain in two sentences why the sky is blue.",
        "Write a haiku about autumn.",
        "Give me three names for a grey cat.",
        "What is 17 + 25?",
        "Translate 'good morning' into Spanish.",
    )
]

_CODE = [
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders\n",
    "import numpy as np\n\ndef softmax(x):\n    # numerically stable\n",
    '{"name": "pagewire", "version": ',
    "<html>\n<head>\n<title>",
]

_SCRIPTS = [
    "日本の首都は",
    "人工智能是计算机科学的一个分支，",
    "한국의 수도는",
    "Привет! Как",
    "🎉🎊 Happy birthday 🎂",
    "👩‍👩‍👧‍👦 family and 🇫🇷 flags:",
    "cafe\u0301 and nai\u0308ve are",
]

_PLAIN = [
    "Once upon a time",
    "The three laws of thermodynamics are",
    "A",
    "1, 1, 2, 3, 5, 8, 13,",
]

LONG = _PARAGRAPH * 45
"""Above 1,500 tokens; the tests cut it to exactly that many."""

PROMPTS: list[str] = [*_CHAT, *_CODE, *_SCRIPTS, *_PLAIN, LONG]
"""Twenty-four prompts: chat, code, CJK and other scripts, emoji, a single token, and 1,500 tokens."""
