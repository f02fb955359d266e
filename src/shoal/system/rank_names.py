"""Ranks, and other names, as a list in an error message: short, and in one form everywhere."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_RANKS = 16


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks with their noun.

    Example:
        >>> name_ranks([3]), name_ranks([0, 1]), name_ranks([])
        ('rank 3', 'ranks 0, 1', 'nobody')
    """
    if not ranks:
        return "nobody"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    if len(ranks) > _MOST_RANKS:
        shown = f"{shown}, ... ({len(ranks)} ranks)"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def name_spans(ranks: Sequence[int]) -> str:
    """Ranks with their noun, three or more in a row by the first and the last.

    Example:
        >>> name_spans([0, 1, 2, 3, 6]), name_spans([4, 5])
        ('ranks 0-3, 6', 'ranks 4, 5')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = [
        word
        for span in spans
        for word in ([f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span))
    ]
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(words)}"


def list_names(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many there are besides.

    Example:
        >>> list_names(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
