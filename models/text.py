"""Real English prose of any length, from Python's own language reference (no network, no data files)."""

from __future__ import annotations


def text_topics() -> list[str]:
    """List the names that `long_text` accepts as ``topic``, in the order in which texts continue."""
    from pydoc_data.topics import topics

    return sorted(topics)


def long_text(min_chars: int, topic: str | None = None) -> str:
    """Return at least ``min_chars`` characters of prose, deterministic for one Python version.

    The text starts with ``topic`` (the first one by default) and goes on through the others in sorted order. Past the
    end of the reference (about 450,000 characters) it starts over, so a longer text repeats itself.
    """
    from pydoc_data.topics import topics

    names = text_topics()
    first = names.index(topic) if topic in topics else 0
    if topic is not None and topic not in topics:
        raise ValueError(f"unknown topic {topic!r}; known topics: {', '.join(names)}")
    parts: list[str] = []
    length = 0
    position = first
    while length < min_chars:
        part = topics[names[position % len(names)]]
        parts.append(part)
        length += len(part)
        position += 1
    return "".join(parts)
