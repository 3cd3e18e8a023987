"""Words that generated prompts are made of, one part of each list for each split."""

from __future__ import annotations

from typing import Literal

Split = Literal["train", "validation"]
"""What is learnt from, and what tells how well."""

SPLITS: tuple[Split, ...] = ("train", "validation")
"""Both."""

_EVERY = 4
"""One word of so many is for validation."""


def words_of(words: str, split: Split) -> list[str]:
    """The words of a list that belong to a split; the other split has none of them.

    Args:
        words: One of the lists below.
        split: Every fourth word is for validation, the others are for training.
    """
    held_out = split == "validation"
    every = words.split(",") if "," in words else words.split()
    return [
        " ".join(word.split())
        for index, word in enumerate(every)
        if (index % _EVERY == _EVERY - 1) == held_out
    ]


FORENAMES = """
    Abena Aldo Amira Anselm Astrid Bashir Beatrix Bruno Calla Casimir Chiara Corwin Dagny Darius
    Delphine Dimitri Edda Elio Esme Farid Fenna Florian Gemma Goran Greta Hamza Hedda Hugo Ilse
    Imran Ines Ivo Jarek Jolana Kamal Katya Lamar Leonie Lorcan Mahsa Marcel Mirela Nadir Noemi
    Odile Orson Paloma Pavel Quentin Ramona Rosalind Ruben Saskia Silvan Tamsin Teodor Ulla Umberto
    Vasco Verena Wendell Wilma Xenia Yannick Yusra Zdenka Zoltan Zuri
"""
"""First names of people."""

SURNAMES = """
    Abernathy Achterberg Balint Barrow Castellan Crowther Dalgaard Desrosiers Eklund Everard
    Falkner Fontaine Gallagher Grimaldi Hargrove Holub Iversen Jaskolski Kavanagh Kestrel Lindqvist
    Lockwood Marchetti Mbeki Novotny Nwosu Okonkwo Ostberg Pemberton Petrov Quispe Rasmussen
    Romero Sandoval Severin Tanaka Thackeray Ulrich Valverde Vance Wexler Whitlock Yamada Zapata
"""
"""Family names of people."""

TOWNS = """
    Alderbrook Ashcombe Bellmare Birchholm Caldermoor Cinderford Copperhill Dunmarrow Eastwick
    Elmsgate Fallowfield Ferncliff Galloway Glenhaven Harrowdale Heathermere Ironbridge Juniper
    Kestwick Kingsmoor Larkspur Lowenthal Maplecross Millbrae Netherby Northolm Oakhurst Orchardton
    Pinecrest Quarrybank Ravensworth Ridgewater Saltmarsh Silverlea Thornbury Tidewell Underhill
    Valebrook Westerling Willowmere Yarrowby Zellerau
"""
"""Names of towns."""

LOOKS = """
    bamboo battered blue bronze carved chipped copper crimson dented dusty embroidered faded folding
    foreign gilded glazed greasy hollow jagged knotted lacquered leather mended mossy narrow painted
    pewter polished purple quilted rusty scarlet silver spotted striped tarnished turquoise velvet
    wicker woollen yellow
"""
"""How a thing looks; no word that `a` cannot stand before."""

THINGS = """
    banjo basket bellows birdcage blanket bucket candlestick canoe chessboard compass crate cushion
    drum easel fiddle flask globe hammer hammock helmet hourglass jar kettle kite ladder lantern
    loom mandolin mirror parasol pitcher pulley quill rucksack saddle samovar scarf sewing-box
    sledge stool suitcase tambourine teapot telescope toolbox trunk tureen umbrella vase violin
    wagon wheelbarrow whistle
"""
"""Things that somebody may own."""

GOODS = """
    apples bagels beads biscuits bottles bricks buttons candles carrots chairs coins cookies
    crayons eggs envelopes feathers flowers footballs grapes jars keys lamps leaflets lemons marbles
    melons muffins nails notebooks oranges pancakes pears pebbles pencils plates plums postcards
    potatoes ribbons sandwiches seashells shirts spoons stamps stickers tickets tiles tomatoes
    towels turnips
"""
"""Things that are counted."""

SPOTS = """
    behind the boiler, under the third stair, above the pantry, beside the mill,
    inside the clock case, below the bandstand, near the bakery door, on the gravel roof,
    between two hedges, at the ferry landing, under a heap of sacks, behind the altar cloth,
    in the glass house, on the lower shelf, by the frozen pond, inside an empty barrel,
    beneath the wooden bridge, at the end of the pier, over the stable, in the coal cellar,
    beside the old well, on the tailor's bench, among the beehives, behind a loose brick,
    in the signal box, under the billiard table, next to the furnace, inside the hollow oak,
    at the back of the choir, on top of the wardrobe, in the potting shed, beyond the orchard wall,
    below the cider press, near the weather vane, in the captain's cabin, under the willow
"""
"""Where a thing may be."""

SECRETS = """
    acorn avalanche badger balcony barley basilica beacon blizzard bramble cactus caravan cinnamon
    clover cobalt comet cormorant cricket cypress dahlia dolphin dragonfly eclipse ember falcon
    fiddlehead gazelle ginger glacier granite hazel heron horizon iceberg iris jasmine kingfisher
    lagoon lavender lichen magnet marigold meadow meteor nettle nutmeg obsidian orchid otter
    paprika pelican prairie quartz quicksand raven rosemary saffron salmon sequoia sparrow tamarind
    thistle thunder topaz tundra turmeric vanilla walnut yarrow zephyr
"""
"""Words that serve as values."""

LISTS = (FORENAMES, SURNAMES, TOWNS, LOOKS, THINGS, GOODS, SPOTS, SECRETS)
"""All of them, for the record of what was learnt from."""
