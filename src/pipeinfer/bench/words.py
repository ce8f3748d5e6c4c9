"""Text of a given number of words, for servers whose tokenizer nobody knows.

Common words, most of them one token of the usual tokenizers; what they make together means nothing.
"""

from __future__ import annotations

import numpy as np

COMMON = """
about above across after again against air all almost alone along also always among animal
another answer any area around ask away back base bear beauty because become bed before began
begin behind best better between big bird black blue board boat body book both bottom box boy
bring brought build built business busy but call came can car care carry cause center certain
change check children city class clear close cold color come common complete contain cook cool
correct could country course cover cross cry cut dark day decide deep develop did differ direct
do dog done door down draw drive dry during each early earth ease east eat end enough even ever
every example eye face fact fall family far farm fast father feel feet few field figure fill
final find fine fire first fish five floor fly follow food foot force form found four free
friend from front full game gave general girl give glass go gold good got govern great green
ground group grow half hand happen hard have head hear heart heat help here high hold home horse
hot hour house how hundred hunt idea inch interest island just keep kind king knew know land
language large last late laugh lead learn leave left less let letter life light like line list
listen little live long look love low machine main make man many map mark may mean measure men
might mile mind minute miss money moon more morning most mother mountain move much music must
name near need never new next night north note nothing notice noun now number object ocean off
often old once one only open order other our out over own page paper part pass pattern people
"""
WORDS = tuple(COMMON.split())


def random_words(source: np.random.Generator, words: int) -> str:
    """That many words with a space between."""
    return " ".join(WORDS[index] for index in source.integers(0, len(WORDS), words).tolist())
