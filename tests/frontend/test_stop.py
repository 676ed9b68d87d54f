"""Stop strings: found anywhere, held back exactly, never before min_tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend_svc.stop import StopChecker
from frontend_svc.text_assembler import TextAssembler
from frontend_svc.tokenizer import Tokenizer
from pagewire.sampling import SamplingParams


def first_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """End, place in the list and stop string of the match that ends first, by brute force."""
    found = [
        (start + len(stop), place, stop)
        for place, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return min(found, default=None)


def held(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string without being one, by brute force."""
    return max(
        (k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])),
        default=0,
    )


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=1000, deadline=None)
@given(stops=STOPS, pieces=st.lists(st.text("ab\nc", max_size=5), max_size=12))
@example(stops=["aab"], pieces=["a", "a", "a", "b"])
@example(stops=["abab", "ba"], pieces=["abab"])
@example(stops=["ab", "b"], pieces=["xab"])
def test_checker_equals_brute_force(stops: list[str], pieces: list[str]) -> None:
    """However the text is cut, the first completed match is found where it ends, and what is held is exact.

    Case: vllm#3574
    Case: vllm#2577
    Case: vllm#3572
    """
    checker = StopChecker(stops)
    text = ""
    for piece in pieces:
        match = checker.check(piece)
        before, text = text, text + piece
        expected = first_match(text, stops)
        if expected is None:
            assert match is None
            assert checker.num_held == held(text, stops)
            continue
        assert match is not None
        end, _, stop = expected
        assert (len(before) + match.end, match.stop) == (end, stop)
        assert text[len(before) + match.start : len(before) + match.end] == stop
        return


def assemble(tokenizer: Tokenizer, text: str, **params: object) -> tuple[list[str], TextAssembler, int]:
    """Streams a text token by token; returns the deltas, the assembler and how many tokens counted."""
    assembler = TextAssembler(tokenizer, [0], SamplingParams(**params))  # type: ignore[arg-type]
    deltas, count = [], 0
    for token_id in tokenizer.encode(text):
        delta, kept = assembler.add([token_id])
        deltas.append(delta)
        count += kept
        if assembler.stop_match is not None:
            return deltas, assembler, count
    deltas.append(assembler.finish())
    return deltas, assembler, count


def test_nothing_of_a_stop_string_leaks(smollm2: Tokenizer) -> None:
    """A stop string over several tokens is never shown, not even its beginning.

    Case: vllm#3574
    """
    deltas, assembler, _ = assemble(smollm2, "One two three\n\nObservation: sunny", stop=("\nObservation:",))
    assert "".join(deltas) == "One two three\n"
    assert assembler.stop_match is not None
    assert assembler.stop_match.stop == "\nObservation:"


def test_stop_string_can_be_kept(smollm2: Tokenizer) -> None:
    deltas, _, _ = assemble(smollm2, "a b c. d", stop=("c.",), include_stop_str_in_output=True)
    assert "".join(deltas) == "a b c."


def test_text_that_only_looked_like_a_stop_comes_later(smollm2: Tokenizer) -> None:
    deltas, assembler, _ = assemble(smollm2, "see ###Input then ###Output", stop=("###Response",))
    assert "".join(deltas) == "see ###Input then ###Output"
    assert assembler.stop_match is None


def test_stop_in_the_middle_of_several_tokens(smollm2: Tokenizer) -> None:
    """Several tokens in one step: those after the match are neither shown nor counted.

    Case: vllm#57052
    """
    token_ids = smollm2.encode("alpha beta gamma delta epsilon")
    assembler = TextAssembler(smollm2, [0], SamplingParams(stop=("gamma",)))
    text, count = assembler.add(token_ids)
    assert text == "alpha beta "
    assert smollm2.decode(token_ids[:count]).endswith("gamma")
    assert count < len(token_ids)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 5])
def test_no_stop_before_min_tokens(smollm2: Tokenizer, min_tokens: int) -> None:
    """A match that ends within the first min_tokens tokens is text like any other; a later one stops.

    Case: vllm#21987
    """
    text = "x x x x x x x x"
    _, assembler, count = assemble(smollm2, text, stop=("x",), min_tokens=min_tokens)
    assert assembler.stop_match is not None
    assert count == min_tokens + 1


def test_a_match_may_begin_before_min_tokens(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("one two three")
    assert len(token_ids) == 3
    deltas, assembler, _ = assemble(smollm2, "one two three", stop=("two three",), min_tokens=2)
    assert assembler.stop_match is not None
    assert "".join(deltas) == "one "


def test_stop_token_is_not_shown(smollm2: Tokenizer) -> None:
    """The text of a stop token is left out, unless it is asked for."""
    token_ids = smollm2.encode("yes no")
    for includes, expected in ((False, "yes"), (True, "yes no")):
        params = SamplingParams(include_stop_str_in_output=includes)
        assembler = TextAssembler(smollm2, [0], params)
        text, count = assembler.add(token_ids, has_stop_token=True)
        assert text + assembler.finish() == expected
        assert count == 2


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab ", min_size=1, max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_shown_text_never_needs_taking_back(smollm2: Tokenizer, text: str, stops: list[str], size: int) -> None:
    """Whatever was shown is a prefix of the final text, and the final text ends before the first match."""
    assembler = TextAssembler(smollm2, [0], SamplingParams(stop=tuple(stops)))
    token_ids = smollm2.encode(text)
    shown = ""
    for start in range(0, len(token_ids), size):
        shown += assembler.add(token_ids[start : start + size])[0]
        if assembler.stop_match is not None:
            break
    else:
        shown += assembler.finish()
    expected = first_match(text, stops)
    assert shown == (text if expected is None else text[: expected[0] - len(expected[2])])
