"""Words for keys and lists, our own: single ones, and as many compounds as are wanted."""

from __future__ import annotations

import random

from kvfold.evaluation.sample import distinct


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    amber ample ancient azure bitter blunt bold brave brief bright brisk broad bronze calm candid
    careful cheerful chilly civil clever cloudy coarse copper cosy crisp curious dainty damp daring
    deep dense distant dusty eager early eastern elegant empty faint famous fancy fearless fertile
    festive firm flat fragile frank fresh frosty gentle giant gifted glad golden graceful grand
    grateful hasty heavy hollow honest humble icy idle ivory jolly keen kind lasting lazy lively
    lofty lonely loyal lucky mellow merry mighty modest narrow neat noble northern odd olive patient
    plain polite proud quaint quick quiet rapid rare ready rough round rustic salty scarlet
    shallow sharp shiny silent silver simple sleepy slender smooth sober solid spare speedy steady
    stern sturdy subtle sudden sunny supple swift tall tame tender thick tidy timid tranquil upper
    useful velvet vivid warm wary western wise witty wooden young
    """
)
"""First halves of keys."""
NOUNS = _words(
    """
    acorn anchor anvil apron arrow badge badger bakery balcony bamboo banjo barrel basket beacon
    beetle bell bench bicycle biscuit blanket blossom bonnet border bottle boulder bracelet branch
    bridge bucket button cabin cactus camera candle canoe canyon carpet castle cellar chapel cherry
    chimney cliff clover coffee collar comet compass cottage cradle crane crater cricket crystal
    cupboard curtain cushion daisy desert diary dolphin donkey drawer eagle easel elbow engine
    envelope falcon feather fence fiddle forest fossil fountain gallery garden garlic glacier glove
    goblet granite guitar hammer harbour harvest hedge helmet heron hinge island jacket jigsaw
    journal jungle kettle kitchen kite ladder lagoon lantern lemon library lobster locket lumber
    magnet mango maple marble market meadow mirror mitten monkey mountain mustard napkin nectar
    needle oasis orchard otter oyster paddle palace parrot pasture pebble pencil pepper piano pillow
    pirate planet plaza pocket pottery prairie puzzle quarry quilt rabbit raven ribbon river rocket
    saddle sailor sandal saucer shovel sparrow spider spoon squirrel stable statue summit teapot
    temple thimble ticket timber tractor trumpet tulip tunnel turtle umbrella valley village violin
    wagon walnut whistle willow window zebra
    """
)
"""Second halves of keys, and both halves of compounds."""
VERBS = _words(
    """
    admire advise arrange arrive attend bargain believe borrow breathe capture celebrate climb
    collect compare confess connect consider consult convince correct decide declare decorate
    deliver depart describe deserve discover divide educate encourage enjoy escape examine explain
    explore forgive gather glance govern gossip hesitate hurry imagine imitate improve include
    inform inspect introduce invent invite juggle knock laugh listen manage measure mention multiply
    notice obey observe obtain offer organise overtake perform persuade polish postpone practise
    prepare present pretend produce promise propose protect publish punish receive recover reduce
    refuse remember repair repeat reply rescue resemble respect scatter shiver sketch stumble
    succeed suggest surround survive tremble uncover vanish wander welcome whisper wonder worship
    """
)
"""Besides the others in lists."""
PAIRS = len(ADJECTIVES) * len(NOUNS)
"""So many different keys there are."""


def draw_keys(own: random.Random, text: str, count: int) -> tuple[str, ...]:
    """Different pairs such as `amber-anvil` that do not stand in a text.

    Args:
        own: Chooses.
        text: Of which no more than half of all pairs may be told.
        count: How many; no more than half of all pairs.
    """
    return distinct(count, lambda: f"{own.choice(ADJECTIVES)}-{own.choice(NOUNS)}", text)


def draw_words(own: random.Random, count: int) -> list[str]:
    """Different words in random order: single ones, then compounds of two nouns.

    Args:
        own: Chooses.
        count: How many, if there are as many.
    """
    singles = [*ADJECTIVES, *NOUNS, *VERBS]
    own.shuffle(singles)
    if count <= len(singles):
        return singles[:count]
    size, more = len(NOUNS), count - len(singles)
    places = own.sample(range(size * size), min(more, size * size))
    return [*singles, *(NOUNS[at // size] + NOUNS[at % size] for at in places)]
