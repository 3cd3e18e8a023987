"""The scores of public benchmarks: how good an answer is, from 0 to 1, as each of them defines it.

| score | of | definition |
|---|---|---|
| `words` | LongBench, InfiniteBench | F1 of words, without case, punctuation and articles |
| `words_zh` | LongBench | the same of Chinese words, as jieba divides them |
| `characters_zh` | InfiniteBench | the same of characters |
| `rouge`, `rouge_zh` | LongBench | ROUGE-L; see `kvfold.evaluation.rouge` |
| `rouge_lines` | InfiniteBench | ROUGE-L of lines |
| `class` | LongBench | 1 by the classes that are named, if the right one is among them |
| `number`, `paragraph` | LongBench | the share of the numbers named that are the right one |
| `line` | LongBench | similarity of the first line of code, in whole percent |
| `first_number`, `first_value`, `last_number` | InfiniteBench | whether it is the right one |
| `word`, `name`, `letter`, `option` | InfiniteBench | the same |
| `results` | InfiniteBench | the share of a list's numbers before the first wrong one |
| `any_part`, `all_parts` | RULER | whether one, or what share, of what is expected stands in it |
| `conclusion` | BBH | whether what follows "the answer is" is exactly right |
| `final_number` | GSM8K | whether the number after the first `####` is exactly right |
| `evidence` | HotpotQA | F1 of words; yes and no have to be said alone |
| `span_zh` | CMRC 2018 | F1 of the longest common stretch of characters |

Of several right answers the best counts. Departures: of classes whose name is a part of the right
one's none counts, where LongBench sometimes leaves one; words of CMRC 2018 in other scripts are
divided at blanks and punctuation; of `results` the first number said opens the list, and is not
compared, for every model, where InfiniteBench leaves it out for one alone.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import takewhile
from statistics import fmean

from kvfold.evaluation.chinese import PUNCTUATION, divide
from kvfold.evaluation.rouge import rouge_of_lines, rouge_of_words

Compare = Callable[[str, str], float]
"""From one right answer and what was said to a score."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How answers of a benchmark are scored."""

    score: Callable[[Sequence[str], str, Sequence[str]], float]
    """From what is expected, what was said and all classes there are to a score from 0 to 1."""
    is_graded: bool = False
    """Whether scores between 0 and 1 are usual, so that an answer is neither right nor wrong."""
    library: str | None = None
    """A package that it needs, beyond those of kvfold."""


def words_f1(wanted: str, said: str) -> float:
    """F1 of words, without case, punctuation and articles."""
    return _f1(*(_plain(text).split() for text in (wanted, said)))


def words_zh_f1(wanted: str, said: str) -> float:
    """F1 of Chinese words."""
    return _f1(
        *([word for each in divide(text) if (word := _bare(each))] for text in (wanted, said))
    )


def characters_zh_f1(wanted: str, said: str) -> float:
    """F1 of characters."""
    return _f1(_bare(wanted), _bare(said))


def rouge_zh(wanted: str, said: str) -> float:
    """ROUGE-L of Chinese words."""
    return rouge_of_words(*(" ".join(divide(text)) for text in (wanted, said)))


def class_share(expected: Sequence[str], said: str, classes: Sequence[str]) -> float:
    """1 by the number of classes that are named, if a right one is among them."""
    return max(_class_share(right, said, classes) for right in expected)


def number_share(wanted: str, said: str) -> float:
    """The share of the numbers named that are the one in the right answer."""
    (right, *_), numbers = re.findall(r"\d+", wanted), re.findall(r"\d+", said)
    return fmean(number == right for number in numbers) if numbers else 0.0


def line_similarity(wanted: str, said: str) -> float:
    """Similarity of the first line that is neither comment nor mark-up, in whole percent."""
    lines = said.lstrip("\n").split("\n")
    line = next((each for each in lines if not re.search("`|#|//", each)), "")
    return 1.0 if line == wanted else round(100 * SequenceMatcher(None, line, wanted).ratio()) / 100


def first_number(wanted: str, said: str) -> float:
    """Whether the first number, digit by digit, is the right one."""
    return float(re.findall(r"[0-9]+", said)[:1] == [wanted])


def first_value(wanted: str, said: str) -> float:
    """Whether the first number, with its fraction and without a sign, has the right value."""
    found = re.search(r"\d+(?:\.\d+)?", said)
    return float(found is not None and float(found[0]) == float(wanted))


def last_number(wanted: str, said: str) -> float:
    """Whether the last word is the right whole number."""
    *_, last = ["", *re.sub(r"[.`'\":]", " ", said).split()]
    return float(bool(re.fullmatch(r"[+-]?\d+", last)) and float(last) == float(wanted))


def results_share(expected: Sequence[str], said: str, classes: Sequence[str] = ()) -> float:
    """The share of a list's numbers, without their signs, right before the first wrong one.

    What is expected begins with the list's second number: the first is no result, but an operand.
    """
    pairs = zip(expected, re.findall(r"[0-9]+", said)[1:], strict=False)
    right = takewhile(lambda pair: float(pair[0]) == float(pair[1]), pairs)
    return sum(1 for _ in right) / len(expected)


def has_word(wanted: str, said: str) -> float:
    """Whether it has a word between blanks and punctuation."""
    return float(wanted in re.split(r"[\s:\"'.,?!{}]+", said))


def has_name(wanted: str, said: str) -> float:
    """Whether it has a name, in any case of letters."""
    return has_word(wanted, said.upper())


def letter(expected: Sequence[str], said: str, classes: Sequence[str] = ()) -> float:
    """Whether one of four options is chosen, by its letter or its text."""
    said = said.strip()
    if said[:1] in tuple("ABCD"):
        return float(said[0] in expected)
    if said in expected:
        return 1.0
    plain = re.sub(r"[\n\"'.,?!{}]", " ", said)
    plain = re.sub(" {2,}", " ", plain)
    chosen = _after(plain, ("answer is:", "answer:", "answer is", "option is"), expected)
    if chosen is not None:
        return chosen
    return float(next((word for word in plain.split() if word in "ABCD"), None) in expected)


def option(expected: Sequence[str], said: str, classes: Sequence[str] = ()) -> float:
    """Whether an option is chosen: by its letter at the beginning, or by either after a lead.

    Expected are its text and its letter.
    """
    said = said.strip()
    if said[:2] in (f"{expected[1]}.", f"{expected[1]}:"):
        return 1.0
    plain = re.sub(r"[\n`'\"*-]|[Oo]ption", " ", said)
    plain = re.sub(" {2,}", " ", plain)
    return _after(plain, ("answer is:", "is:", "answer:"), expected) or 0.0


def any_part(wanted: str, said: str) -> float:
    """Whether it stands anywhere in the answer, in any case of letters."""
    return float(wanted.lower() in said.lower())


def all_parts(expected: Sequence[str], said: str, classes: Sequence[str] = ()) -> float:
    """The share of what is expected that stands anywhere in the answer."""
    return fmean(any_part(each, said) for each in expected)


def conclusion(wanted: str, said: str) -> float:
    """Whether what follows "the answer is", up to the end of the line, is exactly right."""
    found = re.search(r"the answer is (.*)", said)
    return float(found is not None and found[1].strip().removesuffix(".") == wanted)


def final_number(wanted: str, said: str) -> float:
    """Whether the number after the first "#### ", without its commas, is exactly right."""
    found = re.search(r"#### (-?[0-9.,]+)", said)
    return float(found is not None and found[1].replace(",", "") == wanted)


def evidence_f1(wanted: str, said: str) -> float:
    """F1 of words; of yes, no and no answer only the whole counts."""
    alone = {"yes", "no", "noanswer"}
    plain = {_plain(wanted), _plain(said)}
    return 0.0 if len(plain) > 1 and plain & alone else words_f1(wanted, said)


def span_zh_f1(wanted: str, said: str) -> float:
    """F1 of the longest common stretch of characters, other scripts word by word."""
    own, other = map(_segments, (wanted, said))
    match = SequenceMatcher(None, own, other, autojunk=False).find_longest_match()
    return 2 * match.size / (len(own) + len(other)) if match.size else 0.0


def _best(compare: Compare) -> Callable[[Sequence[str], str, Sequence[str]], float]:
    """The best of several right answers."""
    return partial(_best_of, compare)


def _best_of(
    compare: Compare, expected: Sequence[str], said: str, classes: Sequence[str] = ()
) -> float:
    return max(compare(each, said) for each in expected)


def _class_share(right: str, said: str, classes: Sequence[str]) -> float:
    named = [each for each in classes if each in said and (each == right or each not in right)]
    return 1 / len(named) if right in named else 0.0


def _after(plain: str, leads: Iterable[str], expected: Sequence[str]) -> float | None:
    """Whether something expected stands after the first lead that is there; None without one."""
    lead = next((each for each in leads if each in plain), None)
    return None if lead is None else float(plain.partition(lead)[2][1:].startswith(tuple(expected)))


def _f1(wanted: Iterable[str], found: Iterable[str]) -> float:
    own, other = Counter(wanted), Counter(found)
    common = (own & other).total()
    return 2 * common / (own.total() + other.total()) if common else 0.0


def _plain(text: str) -> str:
    """Lower case, single blanks, neither punctuation nor articles."""
    letters = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def _bare(text: str) -> str:
    """Lower case, neither blanks nor punctuation of either script."""
    letters = text.lower().translate(dict.fromkeys(map(ord, string.punctuation + PUNCTUATION)))
    return "".join(letters.split())


def _segments(text: str) -> list[str]:
    """Characters of Chinese and words of other scripts, without punctuation."""
    return re.findall(r"[\u4e00-\u9fa5]|[^\W\u4e00-\u9fa5_]+", text.lower())


METRICS: dict[str, Metric] = {
    "words": Metric(_best(words_f1), is_graded=True),
    "words_zh": Metric(_best(words_zh_f1), is_graded=True, library="jieba"),
    "characters_zh": Metric(_best(characters_zh_f1), is_graded=True),
    "rouge": Metric(_best(rouge_of_words), is_graded=True),
    "rouge_zh": Metric(_best(rouge_zh), is_graded=True, library="jieba"),
    "rouge_lines": Metric(_best(rouge_of_lines), is_graded=True),
    "class": Metric(class_share),
    "number": Metric(_best(number_share)),
    "paragraph": Metric(_best(number_share)),
    "line": Metric(_best(line_similarity), is_graded=True),
    "first_number": Metric(_best(first_number)),
    "word": Metric(_best(has_word)),
    "name": Metric(_best(has_name)),
    "letter": Metric(letter),
    "option": Metric(option),
    "first_value": Metric(_best(first_value)),
    "last_number": Metric(_best(last_number)),
    "results": Metric(results_share, is_graded=True),
    "any_part": Metric(_best(any_part)),
    "all_parts": Metric(all_parts),
    "conclusion": Metric(_best(conclusion)),
    "final_number": Metric(_best(final_number)),
    "evidence": Metric(_best(evidence_f1), is_graded=True),
    "span_zh": Metric(_best(span_zh_f1), is_graded=True),
}
"""By name, as in the table above."""
