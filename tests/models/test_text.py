"""Long texts are long, real and repeatable."""

from __future__ import annotations

import pytest

from sglang_inplacekv.models import long_text, text_topics


@pytest.mark.parametrize("min_chars", [0, 1, 10_000, 300_000, 1_000_000])
def test_length_and_determinism(min_chars: int) -> None:
    text = long_text(min_chars)
    assert len(text) >= min_chars
    assert text == long_text(min_chars)


def test_shorter_texts_are_prefixes() -> None:
    assert long_text(200_000).startswith(long_text(50_000))


def test_topics_start_differently() -> None:
    starts = {long_text(500, topic=topic)[:200] for topic in text_topics()}
    assert len(starts) > 60


def test_last_topic_goes_on_with_the_first() -> None:
    assert long_text(1)[:200] in long_text(50_000, topic=text_topics()[-1])


def test_unknown_topic_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown topic 'cooking'"):
        long_text(10, topic="cooking")
