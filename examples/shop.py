"""The shop that the three adapters work for: its people, places and goods.

Each list has a part for training and a part that only held-out questions use.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Words:
    train: tuple[str, ...]
    heldout: tuple[str, ...]

    def pick(self, split: str, random: Random) -> str:
        return random.choice(self.train if split == "train" else self.heldout)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


FIRST_NAMES = Words(
    _words(
        "Anna, Bilal, Carla, Dmitri, Esra, Femi, Greta, Hugo, Ines, Jonas, Kavya, Lars, Mei, "
        "Nadia, Oscar, Priya, Quinn, Rosa, Sven, Tariq, Uma, Viktor, Wanda, Yusuf, Zoe, Aiko, "
        "Bruno, Chidi, Daria, Elias, Fatima, Goran, Hana, Ivan, Julia, Karim, Lena, Marco"
    ),
    _words("Mara, Theo, Salma, Ruben, Noor, Pavel, Linnea, Omar, Freya, Diego"),
)
LAST_NAMES = Words(
    _words(
        "Weber, Khan, Rossi, Ivanov, Yilmaz, Okafor, Nilsen, Moreau, Costa, Berg, Rao, Dahl, "
        "Chen, Haddad, Lind, Patel, Murphy, Silva, Holm, Aziz, Joshi, Novak, Kowalski, Demir, "
        "Petrov, Tanaka, Ferrari, Eze, Popescu, Fischer, Saleh, Horvat, Mori, Smirnov, Keller"
    ),
    _words("Brandt, Osei, Castillo, Vance, Lindqvist, Farouk, Marchetti, Byrne, Sato, Nowak"),
)
CITIES = Words(
    _words(
        "Bergen, Porto, Gdansk, Galway, Trieste, Izmir, Lagos, Mumbai, Osaka, Boston, Lima, "
        "Hamburg, Nantes, Valencia, Riga, Split, Tunis, Busan, Perth, Halifax, Dakar, Aarhus, "
        "Naples, Bristol, Rotterdam, Malmo, Varna, Batumi, Chennai, Seattle"
    ),
    _words("Oslo, Lisbon, Dublin, Turku, Cadiz, Kobe, Auckland, Antwerp, Haifa, Tampa"),
)
ITEMS = Words(
    _words(
        "kettle, teapot, blanket, rain coat, candle, bookshelf, mirror, hammock, cork board, "
        "wool hat, picnic basket, clock, door mat, cushion, bread bin, frying pan, backpack, "
        "parasol, vase, stool, lunch box, scarf, rope ladder, tool box, bath towel, tea set, "
        "curtain, desk, pillow, garden chair, thermos, storm lantern"
    ),
    _words("lamp, coffee mug, sail bag, barometer, rug, fishing rod, side table, wind chime"),
)


def person(split: str, random: Random) -> str:
    return f"{FIRST_NAMES.pick(split, random)} {LAST_NAMES.pick(split, random)}"


def order_number(random: Random) -> int:
    return random.randrange(1_000, 10_000)
