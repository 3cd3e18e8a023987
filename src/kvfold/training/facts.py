"""Facts hidden in a text and asked for at its end: single ones, and two that are linked."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvfold.training.words import (
    FORENAMES,
    LOOKS,
    SECRETS,
    SPOTS,
    SURNAMES,
    THINGS,
    TOWNS,
    Split,
    words_of,
)


@dataclass(frozen=True, slots=True)
class Relation:
    """What may be told of a key, and how it is asked for.

    Statements have the places `{key}` and `{value}`; questions and stems have `{key}`. A stem is
    a sentence that the value completes.
    """

    key: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    stems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Two relations that meet in the middle: whoever knows the key has to look up the middle.

    The first statements have `{key}` and `{middle}`, the second ones `{middle}` and `{value}`.
    """

    key: str
    middle: str
    value: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    questions: tuple[str, ...]
    stems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """Sentences to hide, and the question that they answer."""

    key: str
    """Whom or what is asked about."""
    sentences: tuple[str, ...]
    """One, or two that are linked."""
    question: str
    """Asks for the answer."""
    stem: str
    """Is completed by the answer."""
    answer: str
    """The value."""


RELATIONS = (
    Relation(
        "person",
        "number",
        (
            "{key} keeps a coat and two umbrellas in locker {value}.",
            "Locker {value} has been set aside for {key}.",
            "On the list by the door, {key} is put down for locker {value}.",
        ),
        ("Which locker belongs to {key}?", "Under which locker number is {key} listed?"),
        ("To fetch the coat of {key}, one has to open locker", "{key} was given locker"),
    ),
    Relation(
        "thing",
        "code",
        (
            "A paper tag reading {value} is tied to the {key}.",
            "Scratched into the bottom of the {key} one finds {value}.",
            "Whoever brings back the {key} must quote {value}.",
        ),
        ("What is marked on the {key}?", "Which mark identifies the {key}?"),
        ("The mark found on the {key} reads", "Asked about the {key}, the clerk wrote down"),
    ),
    Relation(
        "town",
        "word",
        (
            "At the gates of {key} the watchmen answer only to {value}.",
            "For tonight, travellers to {key} should remember the password {value}.",
            "In {key} they whisper {value} before a door is opened.",
        ),
        ("With which password does one enter {key}?", "What must be said at {key}?"),
        ("The password for {key} is the word", "At {key} the traveller said"),
    ),
    Relation(
        "thing",
        "spot",
        (
            "Somebody left the {key} {value}.",
            "After a long search the {key} turned up {value}.",
            "Nobody thought of looking for the {key} {value}, yet there it was.",
        ),
        ("Where was the {key} found?", "Where had the {key} been left?"),
        ("In the end the {key} was discovered", "We now know that the {key} stood"),
    ),
    Relation(
        "thing",
        "person",
        (
            "It was {value} who mended the {key}.",
            "The {key} had been repaired, without pay, by {value}.",
            "When the {key} broke, everybody sent for {value}.",
        ),
        ("Who repaired the {key}?", "To whom do we owe the repair of the {key}?"),
        ("Thanks for mending the {key} are due to", "The person who repaired the {key} was"),
    ),
    Relation(
        "person",
        "amount",
        (
            "{key} still owes the baker {value} coins.",
            "The baker's ledger has a debt of {value} coins against {key}.",
            "By autumn {key} had run up a bill of {value} coins at the bakery.",
        ),
        ("How many coins does {key} owe the baker?", "What is {key} in debt for, in coins?"),
        ("The number of coins that the baker wants from {key} is", "{key} must pay the baker"),
    ),
    Relation(
        "town",
        "time",
        (
            "The night train calls at {key} at {value}.",
            "Those who board in {key} have to be on the platform by {value}.",
            "According to the timetable, {key} is reached at {value}.",
        ),
        ("At what time does the train stop in {key}?", "When is the train due in {key}?"),
        ("The clock at {key}, when the train came in, showed", "The train stops in {key} at"),
    ),
    Relation(
        "person",
        "town",
        (
            "{key} has moved to {value} for the winter.",
            "Letters for {key} are now forwarded to {value}.",
            "One can reach {key} in {value} until the spring.",
        ),
        ("Where does {key} spend the winter?", "Which town has {key} moved to?"),
        ("For the winter {key} lives in", "A letter to {key} should be sent to"),
    ),
)
"""What single facts are about."""

CHAINS = (
    Chain(
        "person",
        "thing",
        "code",
        ("{key} went home with the {middle}.", "At the auction {key} bid for the {middle}."),
        (
            "A slip with {value} on it is tucked into the {middle}.",
            "On the rim of the {middle} stands {value}.",
        ),
        ("What is written on the thing that {key} has?", "{key} took something: how is it marked?"),
        ("The thing that {key} has is marked",),
    ),
    Chain(
        "town",
        "person",
        "word",
        ("{key} elected {middle} as mayor.", "The mayor's chain of {key} is worn by {middle}."),
        (
            "Every letter that {middle} writes ends with {value}.",
            "The favourite word of {middle} has always been {value}.",
        ),
        ("Which word does the mayor of {key} like to use?", "How does {key}'s mayor end letters?"),
        ("The word dear to the mayor of {key} is",),
    ),
    Chain(
        "thing",
        "spot",
        "number",
        ("The {key} was last seen {middle}.", "They say the {key} is hidden {middle}."),
        (
            "Whatever is {middle} is insured for {value} crowns.",
            "The inspector put a sticker with {value} on everything {middle}.",
        ),
        ("Which number goes with the place of the {key}?",),
        ("Judging by where it is, the number that goes with the {key} is",),
    ),
)
"""What linked facts are about."""

_LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
_DIGITS = (2, 3, 4, 5, 6, 8, 9)


def draw_facts(generator: random.Random, split: Split, count: int) -> list[Fact]:
    """Facts with different keys, in half of the cases all of one kind.

    Args:
        generator: Chooses.
        split: Whose words they are made of.
        count: Facts wanted.
    """
    relations = RELATIONS if generator.random() < 0.5 else (generator.choice(RELATIONS),)
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = _tell(generator, split, generator.choice(relations))
        facts.setdefault(fact.key, fact)
    return list(facts.values())


def draw_chain(generator: random.Random, split: Split) -> Fact:
    """One fact that takes two sentences.

    Args:
        generator: Chooses.
        split: Whose words it is made of.
    """
    chain = generator.choice(CHAINS)
    key, middle, value = (
        draw_word(generator, split, kind) for kind in (chain.key, chain.middle, chain.value)
    )
    first = generator.choice(chain.first).format(key=key, middle=middle)
    second = generator.choice(chain.second).format(middle=middle, value=value)
    question = generator.choice(chain.questions).format(key=key)
    return Fact(
        key, (first, second), question, generator.choice(chain.stems).format(key=key), value
    )


def draw_word(generator: random.Random, split: Split, kind: str) -> str:
    """A key or a value.

    Args:
        generator: Chooses.
        split: Whose words it is made of.
        kind: What is wanted, as relations name it.
    """
    pick = generator.choice
    match kind:
        case "person":
            return f"{pick(words_of(FORENAMES, split))} {pick(words_of(SURNAMES, split))}"
        case "thing":
            return f"{pick(words_of(LOOKS, split))} {pick(words_of(THINGS, split))}"
        case "number":
            return str(generator.randrange(10 ** (digits := pick(_DIGITS)) // 10, 10**digits))
        case "code":
            return f"{pick(_LETTERS)}{pick(_LETTERS)}-{generator.randrange(100, 10_000)}"
        case "amount":
            return str(generator.randrange(12, 5000))
        case "time":
            return f"{generator.randrange(24):02d}:{generator.randrange(60):02d}"
        case _:
            lists = {"town": TOWNS, "word": SECRETS, "spot": SPOTS}
            return pick(words_of(lists[kind], split))


def _tell(generator: random.Random, split: Split, relation: Relation) -> Fact:
    key = draw_word(generator, split, relation.key)
    value = draw_word(generator, split, relation.value)
    sentence = generator.choice(relation.statements).format(key=key, value=value)
    return Fact(
        key,
        (sentence,),
        generator.choice(relation.questions).format(key=key),
        generator.choice(relation.stems).format(key=key),
        value,
    )


@dataclass(frozen=True, slots=True)
class Recital:
    """How a passage is marked that is to be repeated, and how one asks for it."""

    marked: str
    question: str
    stem: str


RECITALS = (
    Recital(
        "The lines up to the dashes will be wanted again.\n{passage}\n---",
        "Which lines, up to the dashes, were to be kept for later?",
        "The lines that were wanted again:",
    ),
    Recital("[copy] {passage} [/copy]", "What stood between the copy marks?", "[paste]"),
    Recital(
        "Learn this by heart: {passage} (Here it ends.)",
        "Recite what was to be learnt by heart.",
        "Recited from memory:",
    ),
    Recital(
        "Dictation begins. {passage} Dictation ends.",
        "Read the dictation back, word for word.",
        "The dictation, read back:",
    ),
)
"""Ways to have a passage repeated."""


def draw_recital(generator: random.Random, passage: str) -> Fact:
    """A passage that is to be repeated word for word.

    Args:
        generator: Chooses how it is marked.
        passage: What is repeated.
    """
    recital = generator.choice(RECITALS)
    marked = recital.marked.format(passage=passage)
    return Fact(passage, (marked,), recital.question, recital.stem, passage)


def draw_token(generator: random.Random, split: Split) -> Fact:
    """The shortest thing to repeat, for prompts with room for little else."""
    code = draw_word(generator, split, "code")
    return Fact(code, (f"<< {code} >>",), "", "<<", code)
