"""ROUGE-L of a summary (Lin 2004), as LongBench and as InfiniteBench count it.

Each sentence of the reference is compared with every sentence of the summary by a longest common
subsequence; what any of them has in common with it counts once. Recall is what counts as a share
of the reference's words, precision as a share of the summary's, and the score is their F1.

LongBench (rouge 1.0.1) splits sentences at full stops and words at blanks, and counts different
words, wherever they stand. InfiniteBench (`rougeLsum` of rouge-score 0.1.2) has a sentence a line,
words of lower-case letters a to z and digits, and counts places. Which of several longest
subsequences is taken differs, too, and is as it is there. Departure: rouge gives up where a
sentence has about a thousand words, and LongBench counts 0 then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def rouge_of_words(reference: str, summary: str) -> float:
    """ROUGE-L as LongBench counts it.

    Args:
        reference: What was expected.
        summary: What was said.

    Returns:
        F1 from 0 to 1; 0 where either has no words.
    """
    wanted, found = ([part.split() for part in text.split(".")] for text in (reference, summary))
    common = {
        line[place]
        for line in wanted
        for other in found
        for place in _places_in_common(line, other, skip_first=False)
    }
    return _f1(
        len(common), *(len({word for line in lines for word in line}) for lines in (wanted, found))
    )


def rouge_of_lines(reference: str, summary: str) -> float:
    """ROUGE-L as InfiniteBench counts it.

    Args:
        reference: What was expected, a sentence a line.
        summary: What was said, likewise.

    Returns:
        F1 from 0 to 1; 0 where either has no words.
    """
    wanted, found = (
        [re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n")]
        for text in (reference, summary)
    )
    common: Counter[str] = Counter()
    for line in wanted:
        places = (_places_in_common(line, other, skip_first=True) for other in found)
        common.update(line[place] for place in set().union(*places))
    # A word counts no oftener than the summary has it.
    said = Counter(word for line in found for word in line)
    return _f1((common & said).total(), sum(map(len, wanted)), said.total())


def _places_in_common(first: Sequence[str], other: Sequence[str], *, skip_first: bool) -> list[int]:
    """Where in the first sequence the words of a longest common subsequence stand, from its end.

    Args:
        first: Words.
        other: Words.
        skip_first: Where either could be shortened, whether the first is.
    """
    lengths = [[0] * (len(other) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for place, each in enumerate(other):
            row.append(above[place] + 1 if word == each else max(above[place + 1], row[-1]))
        lengths.append(row)
    found, at, there = [], len(first), len(other)
    while at and there:
        if first[at - 1] == other[there - 1]:
            at, there = at - 1, there - 1
            found.append(at)
        elif lengths[at - 1][there] - lengths[at][there - 1] + skip_first > 0:
            at -= 1
        else:
            there -= 1
    return found


def _f1(common: int, wanted: int, found: int) -> float:
    return 2 * common / (wanted + found) if common else 0.0
